"""One, two and four processes compare the same methods: are the results equal, and how long does it take?

    python benchmarks/many_processes.py -o benchmarks/results/many_processes.json       # nothing else running

Every run is `rope-patch compare` of two methods on the bundled Llama, on the CPU with one thread per process, once by
itself and then under `torchrun`. The seconds are those of the whole command, and without those of a run that reads
almost nothing, which are the start of the processes. More processes than cores share them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import command, environment, write
from rope_patch import data_path

PROCESSES = (1, 2, 4)
ARGUMENTS = ("--methods", "default yarn:factor=4", "--lengths", "256 1k", "--dtype", "float32", "--no-report")


def run(processes: int, windows: int, samples: int) -> tuple[dict[str, Any], float]:
    """Return the scores of a comparison, and how long it took [s]."""
    folder = Path(tempfile.mkdtemp())
    program = ["-m", "rope_patch.cli.app"] if processes == 1 else []
    launch = [sys.executable, *program]
    if processes > 1:
        launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
        launch += ["-m", "rope_patch.cli.app"]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sizes = ["--windows", str(windows), "--samples", str(samples), "--batch-tokens", "4k"]
    arguments = ["compare", str(data_path("assets") / "llama"), *ARGUMENTS, *sizes, "-o", str(folder / "out")]
    started = time.perf_counter()
    done = subprocess.run([*launch, *arguments], env=variables, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{processes} processes failed:\n{done.stderr[-2000:]}")
    scores = json.loads((folder / "out" / "comparison.json").read_text())
    shutil.rmtree(folder)
    return {"rows": scores["rows"], "columns": scores["columns"]}, seconds


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    scores, rows = None, []
    for processes in PROCESSES:
        _, start = run(processes, 4, 1)
        found, seconds = run(processes, args.windows, args.samples)
        scores = found if scores is None else scores
        times = {"seconds": round(seconds, 1), "seconds_without_start": round(seconds - start, 1)}
        rows.append({"processes": processes, **times, "equal": found == scores})
        print(rows[-1], flush=True)
    write(
        {
            "benchmark": "many_processes",
            "command": command(),
            "what": "rope-patch compare by one, two and four processes: equal scores, and wall time",
            "environment": environment(threads=1),
            "cores": len(os.sched_getaffinity(0)),
            "windows": args.windows,
            "samples": args.samples,
            "rows": rows,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
