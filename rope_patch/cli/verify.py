"""``rope-patch verify``."""

from __future__ import annotations

from rope_patch.cli.options import Json, Model, print_json


def verify(folder: Model, as_json: Json = False) -> None:
    """Check that a patched checkpoint or adapter folder still says and gives what was applied to it."""
    from rope_patch.checkpoints.offline import verify_folder

    record = verify_folder(folder)
    if as_json:
        print_json({"verified": True, "record": record.to_dict()})
        return
    tables = ", ".join(f"{key} {table.hash}" for key, table in record.tables.items())
    print(f"{folder}: patched with {record.to_method()}, as recorded (tables: {tables})")
