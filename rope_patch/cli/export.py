"""``rope-patch export``."""

from __future__ import annotations

from rope_patch.cli.printing import print_json
from rope_patch.engines import export as write
from rope_patch.options.export import ExportOptions
from rope_patch.runtime.folders import check_source


def export(options: ExportOptions) -> None:
    """Run ``rope-patch export`` with its options."""
    check_source(options.model)
    written = write(
        options.model,
        options.output,
        to=options.to,
        method=options.method,
        converter=options.converter,
        dtype=options.dtype,
        overwrite=options.force,
        **options.patching.arguments(),
    )
    if options.as_json:
        print_json(written | {"output": str(options.output)})
        return
    checked = written.get("checked_against")
    for table in written.get("tables", ()):
        name = "table"
        if table["layer_type"]:
            name += f" [{table['layer_type']}]"
        print(f"{name}: written as {table['rope_type']}, {table['hash']}")
    if checked == "unverified":
        print(
            f"unverified: no version of {written['engine']} was checked to read such tables on {written['model_type']}"
        )
    elif checked:
        print(f"checked against {written['engine']} {checked}")
    for note in written.get("notes", ()):
        print(f"note: {note}")
    print(f"wrote {options.output}")
