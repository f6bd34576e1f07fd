"""``rope-patch verify``."""

from __future__ import annotations

from rope_patch.cli.options import Json, Model, print_json


def verify(folder: Model, as_json: Json = False) -> None:
    """Check that a patched checkpoint or adapter folder still says and gives what was applied to it."""
    from rope_patch import checkpoints

    verified = checkpoints.verify(folder)
    if as_json:
        print_json({"verified": True, "record": verified.record.to_dict()})
        return
    print(verified)
