"""``rope-patch theory``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.options import Import, Json, Output, Report, command_line, tokens


def theory(
    method: Annotated[
        str,
        typer.Option(
            metavar="METHOD",
            help="The method to study, for example yarn:factor=4. rope-patch methods lists all of them; default is "
            "plain RoPE.",
        ),
    ] = "default",
    head_dim: Annotated[
        int, typer.Option(metavar="COUNT", help="The number of features of an attention head; all of them are rotated.")
    ] = 128,
    rope_theta: Annotated[
        float, typer.Option(metavar="NUMBER", help="The base of the rotary table before the method is applied.")
    ] = 10000.0,
    trained_length: Annotated[
        int, tokens("--trained-length", "The context length that the model was trained at.")
    ] = 4096,
    length: Annotated[int, tokens("--length", "The context length at which the model is used.")] = 16384,
    output: Output = Path("rope-patch-theory"),
    report: Report = True,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Compute what a rotary table implies, without a model, and compare with numbers that papers print.

    It covers how activations decay with distance, what attention heads can be built from the table, and how far it
    keeps positions apart. It writes **theory.json** and **theory.html**, and takes seconds on a CPU.

    Example: **rope-patch theory --method yarn:factor=4 --rope-theta 500000 --trained-length 8k --length 32k**
    """
    from rope_patch.theory.tables import study

    result = study(method, head_dim=head_dim, rope_theta=rope_theta, trained_length=trained_length, length=length)
    if report:
        from rope_patch.reports import theory as page
    from rope_patch.files import folder_to_write, write_atomically

    with folder_to_write(output, ["theory.json", *["theory.html"] * report]):
        write_atomically(output / "theory.json", result.to_json())
        if report:
            page.write(output / "theory.html", result, command=command_line())
    if as_json:
        print(result.to_json())
        return
    _print(result)
    print(f"wrote {output / 'theory.json'}" + (f" and {output / 'theory.html'}" if report else ""))


def _print(result: Any) -> None:
    """Print both tables for people."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rope_patch.theory.tables import cells, numbers

    console = Console(width=None if sys.stdout.isatty() else 160)
    lengths = f"{result.trained_length} → {result.length} tokens"
    title = f"{result.method}: head_dim {result.head_dim}, rope_theta {result.rope_theta:g}, {lengths}"
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("quantity")
    for head in ("plain RoPE", *([result.method] if result.changed else [])):
        table.add_column(escape(head), justify="right")
    table.add_column("note", style="dim")
    for fact in result.facts:
        values = cells(fact)[: 1 + result.changed]
        table.add_row(escape(fact.label), *values, escape(fact.note))
    console.print(table)
    table = Table(title="the papers' numbers", box=box.SIMPLE_HEAD, title_justify="left")
    for head in ("source", "quantity"):
        table.add_column(head)
    for head in ("ours", "printed", "difference"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("note", style="dim")
    for entry in result.papers:
        table.add_row(entry.source, escape(entry.name), *numbers(entry), escape(entry.note))
    console.print(table)
