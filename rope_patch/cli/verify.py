"""``rope-patch verify``."""

from __future__ import annotations

from rope_patch.cli.options import Import, Json, Model, print_json


def verify(model: Model, imports: Import = None, as_json: Json = False) -> None:
    """Check that a patched checkpoint or adapter still has the rotary tables that were recorded when it was patched.

    The command fails if the patch was lost or changed, or if a file of weights is damaged. Of a GGUF file its keys and
    factors are compared with the record.

    Example: **rope-patch verify ./llama-abf**
    """
    from rope_patch import checkpoints

    verified = checkpoints.verify(model)
    if as_json:
        weights = {} if verified.weights is None else {"weights": verified.weights}
        print_json({"verified": True, **weights, "record": verified.record.to_dict()})
        return
    print(verified)
