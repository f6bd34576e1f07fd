"""``rope-patch theory``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.options import command_line


def theory(
    method: Annotated[str, typer.Option(help="A method in the grammar NAME:key=value+NAME…")] = "default",
    head_dim: Annotated[int, typer.Option(help="Features of a head, all of them rotary.")] = 128,
    rope_theta: Annotated[float, typer.Option(help="Base of the plain table.")] = 10000.0,
    trained_length: Annotated[str, typer.Option(help="Context of training, 4096 or 4k [tokens].")] = "4k",
    length: Annotated[str, typer.Option(help="Context in use, 16384 or 16k [tokens].")] = "16k",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("rope-patch-theory"),
    report: Annotated[bool, typer.Option(help="Write theory.html; needs matplotlib.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Say what a table implies, without a model: decay, heads, distances; the papers' numbers beside ours.

    Writes **theory.json** and **theory.html**. Seconds on one CPU core, up to a million tokens.

    Example: **rope-patch theory --method yarn:factor=4 --rope-theta 500000 --trained-length 8k --length 32k**
    """
    from rope_patch.theory.tables import study
    from rope_patch.words import parse_length

    made = study(
        method,
        head_dim=head_dim,
        rope_theta=rope_theta,
        trained_length=parse_length(trained_length),
        length=parse_length(length),
    )
    if report:
        from rope_patch.reports import theory as page
    from rope_patch.files import folder_to_write, write_atomically

    with folder_to_write(output, ["theory.json", *["theory.html"] * report]):
        write_atomically(output / "theory.json", made.to_json())
        if report:
            page.write(output / "theory.html", made, command=command_line())
    if as_json:
        print(made.to_json())
        return
    _print(made)
    print(f"wrote {output / 'theory.json'}" + (f" and {output / 'theory.html'}" if report else ""))


def _print(made: Any) -> None:
    """Print both tables for people."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rope_patch.theory.tables import cells, numbers

    console = Console(width=None if sys.stdout.isatty() else 160)
    lengths = f"{made.trained_length} → {made.length} tokens"
    title = f"{made.method}: head_dim {made.head_dim}, rope_theta {made.rope_theta:g}, {lengths}"
    table = Table(title=escape(title), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("quantity")
    for head in ("plain RoPE", *([made.method] if made.changed else [])):
        table.add_column(escape(head), justify="right")
    table.add_column("remark", style="dim")
    for fact in made.facts:
        values = cells(fact)[: 1 + made.changed]
        table.add_row(escape(fact.label), *values, escape(fact.remark))
    console.print(table)
    table = Table(title="the papers' numbers", box=box.SIMPLE_HEAD, title_justify="left")
    for head in ("source", "quantity"):
        table.add_column(head)
    for head in ("ours", "printed", "difference"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("remark", style="dim")
    for entry in made.papers:
        table.add_row(entry.source, escape(entry.name), *numbers(entry), escape(entry.remark))
    console.print(table)
