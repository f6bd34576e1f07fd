"""``rope-patch methods``."""

from __future__ import annotations

from dataclasses import fields

from rope_patch.cli.printing import new_table, print_json, show
from rope_patch.methods import METHODS, field_help
from rope_patch.options.shipped import MethodsOptions


def methods(options: MethodsOptions) -> None:
    """Run ``rope-patch methods`` with its options."""
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
