"""The commands that are not converted to :mod:`rope_patch.options` yet."""

from __future__ import annotations

from typing import Any

import typer

from rope_patch.cli.demo import demo
from rope_patch.cli.extend import extend
from rope_patch.cli.finetune import finetune
from rope_patch.cli.fit import fit
from rope_patch.cli.plan import plan
from rope_patch.cli.recipes import recipes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
app.add_typer(recipes, name="recipes")
COMMANDS: list[Any] = [extend, plan, finetune, fit, demo]
for command in COMMANDS:
    app.command(command.__name__.replace("_", "-"))(command)


@app.callback()
def _root() -> None:
    pass


def names() -> dict[str, str]:
    """Return the commands that are here, each with its help."""
    return {one.__name__.replace("_", "-"): one.__doc__ or "" for one in COMMANDS} | {"recipes": str(recipes.info.help)}
