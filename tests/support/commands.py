"""Run commands of rope-patch in this process, which has everything imported already."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from rope_patch import data_path
from rope_patch.cli import app as cli

DOMAINS = str(data_path("assets") / "domains")
MEASURE = ("--lengths", "64", "--samples", "1", "--depths", "0.5", "--windows", "1", "--no-report")
MEASURE += ("--text", DOMAINS, "--haystack", DOMAINS)
"""The least that a command may measure, on texts that are shorter than the built-in one."""


@dataclass(frozen=True)
class Result:
    """The output of a command, and its exit status."""

    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def invoke(*arguments: str | Path) -> Result:
    """Run a command as the console script does, and return its output; a user's mistake is a line on stderr."""
    out = io.StringIO()
    err = io.StringIO()
    words = [str(argument) for argument in arguments]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["rope-patch", *words])
        patch.setattr("os._exit", sys.exit)  # how an interrupted command ends
        with pytest.raises(SystemExit) as stop:
            cli.main()
    return Result(int(stop.value.code or 0), out.getvalue(), err.getvalue())


def run(*arguments: str | Path) -> str:
    """Run a command that must succeed, and return what it printed on stdout."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(*arguments: str | Path) -> str:
    """Run a command that must fail by a user's mistake, and return what it printed on stderr."""
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.stderr
    return result.stderr


def fail_without_a_trace(base: Path, words: tuple[str, ...], message: str) -> None:
    """Run a command that must fail with a message, on a checkpoint beside which nothing may change.

    "{base}", "{out}" and "{full}" in its words are that checkpoint, a new place and a folder with a file.
    """
    full = base.parent / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    before = sorted(base.parent.rglob("*"))
    assert message in fail(*(word.format(base=base, out=base.parent / "out", full=full) for word in words))
    assert sorted(base.parent.rglob("*")) == before
