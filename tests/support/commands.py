"""Run the command line in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rope_patch.cli import app as cli


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(cli.app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fail(monkeypatch, capsys, *arguments: str | Path) -> str:
    """Run as the console script does; return the error line."""
    monkeypatch.setattr(sys, "argv", ["rope-patch", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err
