"""The commands that are not converted to :mod:`rope_patch.options` yet."""

from __future__ import annotations

from typing import Any

import typer

from rope_patch.cli.finetune import finetune

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
COMMANDS: list[Any] = [finetune]
for command in COMMANDS:
    app.command(command.__name__.replace("_", "-"))(command)


@app.callback()
def _root() -> None:
    pass


def names() -> dict[str, str]:
    """Return the commands that are here, each with its help."""
    return {one.__name__.replace("_", "-"): one.__doc__ or "" for one in COMMANDS}


def run(words: list[str]) -> int:
    """Run a command, and return its exit status."""
    try:
        status = int(app(words, prog_name="rope-patch", standalone_mode=False) or 0)
    except Exception as error:
        if hasattr(error, "format_message"):  # of typer: wrong words
            raise ValueError(error.format_message()) from None
        raise
    if status == 130:  # typer turns Ctrl-C into a status
        raise KeyboardInterrupt
    return status
