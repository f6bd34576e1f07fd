"""``rope-patch theory``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch import __version__
from rope_patch.cli.options import Import, Json, Output, Report, command_line, tokens

SCHEMA = 2


# Long because every option is declared with its help.
def theory(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint whose config states the table, without its weights: a local folder, a Hugging Face hub "
            "id or a GGUF file. Without one the table is plain RoPE of --head-dim and --rope-theta.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="The method to study, for example yarn:factor=4. rope-patch methods lists all of them; default is "
            "the table as it is.",
        ),
    ] = "default",
    head_dim: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="The number of features of an attention head, 128 by default; all of them are rotated.",
            show_default=False,
        ),
    ] = None,
    rope_theta: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="The base of the rotary table before the method is applied, 10000 by default.",
            show_default=False,
        ),
    ] = None,
    trained_length: Annotated[
        int | None,
        tokens(
            "--trained-length",
            "The context length that the model was trained at: by default the config's, or 4096 without MODEL.",
            show_default=False,
        ),
    ] = None,
    length: Annotated[
        int | None,
        tokens(
            "--length", "The context length at which the model is used: by default 4 times that.", show_default=False
        ),
    ] = None,
    output: Output = Path("rope-patch-theory"),
    report: Report = True,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Compute what a rotary table implies, and compare with numbers that papers print.

    It covers how activations decay with distance, what attention heads can be built from the table, and how far it
    keeps positions apart. It writes **theory.json** and **theory.html**, and takes seconds on a CPU.

    Example: **rope-patch theory --method yarn:factor=4 --rope-theta 500000 --trained-length 8k --length 32k**
    """
    if report:
        from rope_patch.reports import theory as page
    from rope_patch.files import folder_to_write, write_atomically

    if model is not None and (head_dim is not None or rope_theta is not None):
        raise ValueError("--head-dim and --rope-theta describe a table without MODEL: leave them out")
    if model is None:
        table = _plain(128 if head_dim is None else head_dim, 1e4 if rope_theta is None else rope_theta)
    else:
        table = _table_of(model)
    if trained_length is not None:  # methods rest on it
        table = replace(table, max_position_embeddings=trained_length, original_max_position_embeddings=None)
    result = _study(table, model, method, 4 * table.context if length is None else length)
    with folder_to_write(output, ["theory.json", *["theory.html"] * report]):
        head = {"schema": SCHEMA, "rope_patch": __version__}
        data = json.dumps(head | result.to_dict(), indent=2, allow_nan=False)
        write_atomically(output / "theory.json", data)
        if report:
            page.write(output / "theory.html", result, command=command_line())
    if as_json:
        print(data)
        return
    _print(result)
    print(f"wrote {output / 'theory.json'}" + (f" and {output / 'theory.html'}" if report else ""))


def _plain(head_dim: int, rope_theta: float) -> Any:
    """Return plain RoPE, trained at 4096 tokens.

    Raises:
        ValueError: a base that is not above 1.
    """
    from rope_patch.frequencies import geometric
    from rope_patch.tables import RotaryTable

    if not (math.isfinite(rope_theta) and rope_theta > 1):
        raise ValueError(f"rope_theta must be a finite number > 1, got {rope_theta}")
    return RotaryTable(geometric(rope_theta, head_dim), 1.0, rope_theta, "default", 4096)


def _table_of(model: str) -> Any:
    """Return the base table of a checkpoint, read from its config; of several the one that methods patch by default."""
    from rope_patch.checkpoints.offline import skeleton
    from rope_patch.patching.base_tables import read_tables
    from rope_patch.patching.locate import find_rotary
    from rope_patch.patching.targets import choose_layer_types

    tables, _ = read_tables(find_rotary(skeleton(model)))
    return tables[choose_layer_types(tables, None)[0]]


def _study(table: Any, model: str | None, method: str, length: int) -> Any:
    """Return a study of what a method makes of a table."""
    from rope_patch.methods import as_method
    from rope_patch.study import Study

    name = "plain RoPE" if model is None else f"the table of {Path(model).name}"
    asked = as_method(method)
    patch = asked.for_target(table, max(length, table.context) if asked.needs_target else None)
    after = patch(table)
    tables = table.inv_freq, after.inv_freq
    return Study(str(patch), name, table.rope_theta, *tables, after.attention_scaling, table.context, length)


def _print(result: Any) -> None:
    """Print both tables for people."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rope_patch.evaluation.numbers import four_digits, percent_text
    from rope_patch.study import papers

    console = Console(width=None if sys.stdout.isatty() else 160)
    shape = f"head_dim {2 * len(result.before)}, rope_theta {result.rope_theta:g}"
    title = f"{result.method}: {shape}, {result.trained_length} → {result.length} tokens"
    table = Table("quantity", title=escape(title), box=box.SIMPLE_HEAD, title_justify="left")
    for head in (result.base, *([result.method] if result.changed else [])):
        table.add_column(escape(head), justify="right")
    table.add_column("note", style="dim")
    for fact in result.facts():
        values = [four_digits(fact.before), four_digits(fact.after)][: 1 + result.changed]
        table.add_row(escape(fact.label), *values, escape(fact.note))
    console.print(table)
    table = Table("source", "quantity", title="the papers' numbers", box=box.SIMPLE_HEAD, title_justify="left")
    for head in ("ours", "printed", "difference"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("note", style="dim")
    for entry in papers():
        numbers = four_digits(entry.ours), four_digits(entry.printed, ""), percent_text(entry.difference)
        table.add_row(entry.source, escape(entry.name), *numbers, escape(entry.note))
    console.print(table)
