"""How long commands take on SmolLM2-135M, and how good their own estimate is.

    make smollm2-checkpoint
    python benchmarks/command_times.py -o benchmarks/results/command_times.json           # nothing else running

The minutes are those of the whole command, from its start to its last file; those of `make smollm2` include a download
of 93 MB. A command that another run of the same output file has measured is not run again; `--commands` names those to
run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import command, environment, write
from public_checkpoint import FOLDER, SMOLLM2

MODEL = "{model}"
OUTPUT = "{output}"
COMMANDS: dict[str, tuple[str, ...]] = {
    "analyze": ("rope-patch", "analyze", MODEL, "-o", OUTPUT),
    "kv-check": (
        "rope-patch", "kv-check", MODEL, "--schemes", "kivi-2 int4-token fp8", "--lengths", "512", "--windows", "4",
        "-o", OUTPUT,
    ),
    "make smollm2": (sys.executable, str(Path(__file__).parent / "smollm2.py"), "--folder", OUTPUT),
}  # fmt: skip
"""The commands by name, where MODEL and OUTPUT stand for the folders."""

ANNOUNCED = re.compile(r"reads ([\d,]+) tokens in about ([^;]+);")


def measure(words: tuple[str, ...], model: Path) -> dict[str, Any]:
    """Run a command, and return how long it took and what it announced.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "out")
        line = [word.format(model=model, output=output) for word in words]
        program = Path(sys.executable).parent / line[0]
        started = time.perf_counter()
        done = subprocess.run([str(program), *line[1:]], capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{shlex.join(line)} failed:\n{done.stderr[-2000:]}")
    announced = ANNOUNCED.search(done.stderr) if words[0] == "rope-patch" else None  # a tour announces several times
    shown = [Path(word).name if os.sep in word else word.format(model="MODEL", output="OUTPUT") for word in words]
    return {
        "command": shlex.join(shown),
        "minutes": round(seconds / 60, 1),
        "tokens": int(announced[1].replace(",", "")) if announced else None,
        "estimated": announced[2] if announced else None,
    }


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=FOLDER / SMOLLM2.model, help="folder of SmolLM2 (%(default)s)")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS), help="the commands to run")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    before = json.loads(args.output.read_text()) if args.output is not None and args.output.exists() else {"rows": {}}
    rows = before["rows"]
    for name in args.commands:
        if name in rows:
            continue
        rows[name] = measure(COMMANDS[name], args.model)
        print(name, rows[name], flush=True)
        write(
            {
                "benchmark": "command_times",
                "command": command(),
                "what": f"wall time of commands on {SMOLLM2.model}",
                "environment": environment(threads=len(os.sched_getaffinity(0))),
                "rows": {name: rows[name] for name in COMMANDS if name in rows},
            },
            args.output,
        )


if __name__ == "__main__":
    main()
