"""``rope-patch methods``."""

from __future__ import annotations

from collections.abc import Sequence

from rope_patch.cli.parsing import parse_words
from rope_patch.cli.printing import new_table, print_json, show
from rope_patch.options.shipped import MethodsOptions


def methods(words: Sequence[str]) -> None:
    """Run ``rope-patch methods`` with the words that follow it."""
    options = parse_words(MethodsOptions, words)
    from dataclasses import fields

    from rope_patch.methods import METHODS, field_help

    rows = [
        (name, [field_help(f) for f in fields(cls)], (cls.__doc__ or "").strip().splitlines()[0])
        for name, cls in METHODS.items()
    ]
    if options.as_json:
        print_json([{"method": name, "defaults": METHODS[name]().to_dict(), "what": what} for name, _, what in rows])
        return
    table = new_table(
        "method",
        "parameters",
        "what it does",
        caption="Write NAME:key=value; join methods with +.",
    )
    for name, parameters, what in rows:
        table.add_row(name, "\n".join(parameters), what.replace("``", ""))
    show(table)
