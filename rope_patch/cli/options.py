"""What commands share: options, and how they print; ``loading`` has the models they read."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id.", show_default=False)]
Out = Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
Force = Annotated[bool, typer.Option("--force", help="Write into a folder that holds files.")]

KEPT = "kept.jsonl"
"""Finished work, in the folder that is written."""


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["rope-patch", *sys.argv[1:]])


def say_copied(name: str) -> None:
    """Tell of a file that is copied."""
    print(f"copying {name}", file=sys.stderr)


def print_json(data: Any) -> None:
    """Print for machines."""
    print(json.dumps(data, indent=2, allow_nan=False))
