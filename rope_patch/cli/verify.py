"""``rope-patch verify``."""

from __future__ import annotations

from rope_patch.cli.options import Import, Json, Model, print_json


def verify(model: Model, imports: Import = None, as_json: Json = False) -> None:
    """Check that a patched checkpoint or adapter still has the rotary tables that were recorded when it was patched.

    The command fails if the patch was lost or changed, or if a file of weights is damaged.

    Example: **rope-patch verify ./llama-abf**
    """
    from rope_patch.checkpoints.offline import verify_folder

    record = verify_folder(model)
    if as_json:
        print_json({"verified": True, "record": record.to_dict()})
        return
    tables = ", ".join(f"{key} {table.hash}" for key, table in record.tables.items())
    print(f"{model}: patched with {record.to_method()}, as recorded (tables: {tables})")
