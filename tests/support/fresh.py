"""Run programs in processes of their own, into which nothing of rope_patch was imported before.

A new interpreter needs seconds to import torch and transformers. So one process that has imported both waits, and forks
for each program.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def fork_for(order: dict) -> int:
    """Run a program in a fork of this process, as an interpreter would, and return its exit status."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    status = 1
    try:
        signal.alarm(300)  # a program that hangs is killed, instead of the whole test run
        os.chdir(order["cwd"])
        os.environ.clear()
        os.environ.update(order["environment"])
        for number, name in ((0, os.devnull), (1, order["out"]), (2, order["err"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
        sys.argv = ["-c", *order["arguments"]]
        sys.path[:1] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        exec(compile(order["code"], "<string>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit, which would run what the parent has registered to run at its own end.
        os._exit(status)


def serve() -> None:
    """Run the programs that stdin asks for, a line of JSON each, and answer with their exit statuses."""
    # Imported for the programs: transformers loads these modules only when they are asked for.
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401

    assert not any(name.split(".")[0] == "rope_patch" for name in sys.modules)
    for line in sys.stdin:
        print(fork_for(json.loads(line)), flush=True)


@functools.cache
def server() -> subprocess.Popen[str]:
    """Return the waiting process, of which every process that runs tests has its own."""
    here = [sys.executable, __file__]
    process = subprocess.Popen(here, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)  # this closes its input, at which it ends
    return process


def run_code(
    code: str, *arguments: object, cwd: str | Path = ".", env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code arguments`` with torch and transformers imported, and return its output and exit status."""
    if not hasattr(os, "fork"):  # Windows has none; a new interpreter gives the same result seconds later
        command = [sys.executable, "-c", code, *map(str, arguments)]
        return subprocess.run(command, cwd=cwd, env=dict(env), capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        err = Path(folder, "err")
        order = {"code": code, "arguments": [*map(str, arguments)], "cwd": os.path.abspath(cwd)}
        order |= {"environment": dict(env), "out": str(out), "err": str(err)}
        process = server()
        print(json.dumps(order), file=process.stdin, flush=True)
        status = int(process.stdout.readline())
        return subprocess.CompletedProcess([code, *arguments], status, out.read_text(), err.read_text())


def stock_logits(root: Path, tokens: torch.Tensor, *names: str) -> dict[str, torch.Tensor]:
    """Return the logits of folders below a root in plain transformers, in a process that cannot import rope_patch.

    Args:
        root: the folder that holds the checkpoints' folders.
        tokens: (batch, tokens) ids that every model reads.
        *names: names of the checkpoints' folders.
    """
    save_file({"ids": tokens}, root / "ids.safetensors")
    done = run_code(Path(__file__).with_name("stock_reload.py").read_text(), root, *names)
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(root / "stock.safetensors")


if __name__ == "__main__":
    serve()
