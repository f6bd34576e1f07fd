"""Run the tutorials, and write what they print into their pages.

    python benchmarks/tutorials.py docs/tutorials/extend.md

A tutorial is a page whose blocks of commands and Python are run in order, in one process and from the current folder;
what a block prints is the block of text behind it. They need the folder and the GGUF file that `make smollm2` writes,
and one needs llama-cpp-python. An error or Ctrl-C leaves the page as it was. tests/benchmarks/test_tutorials.py runs
the same blocks on a bundled checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rope_patch.files import write_atomically

BLOCK = re.compile(r"```(bash|python)\n(.*?)```\n(?:\n```text\n.*?```\n)?", re.S)


def in_shell(commands: str) -> str:
    """Run commands in a shell that has this interpreter's programs, and return what they print on standard output."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": "110", "NO_COLOR": "1"}
    done = subprocess.run(["bash", "-ec", commands], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout


def with_output(page: str, shell: Callable[[str], str] = in_shell) -> str:
    """Return a page with what its blocks print.

    Args:
        page: its text.
        shell: runs the lines of a block of commands, and returns what they print.
    """
    space: dict[str, Any] = {"__name__": "tutorial"}

    def run(block: re.Match[str]) -> str:
        kind, code = block.groups()
        printed = io.StringIO()
        if kind == "bash":
            printed.write(shell(code))
        else:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "tutorial", "exec"), space)
        text = "\n".join(line.rstrip() for line in printed.getvalue().strip("\n").splitlines())
        return f"```{kind}\n{code}```\n" + (f"\n```text\n{text}\n```\n" if text else "")

    return BLOCK.sub(run, page)


def main() -> None:
    """Run pages in order, each as a whole."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    for path in parser.parse_args().pages:
        write_atomically(path, with_output(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
