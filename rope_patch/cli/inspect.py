"""``rope-patch inspect``."""

from __future__ import annotations

from rope_patch.cli.options import Checkpoint, Import, Json, print_json


def inspect(model: Checkpoint, imports: Import = None, as_json: Json = False) -> None:
    """Show the rotary tables of a checkpoint: their type, wavelengths, scaling, and the patch that made them.

    MODEL may also be a GGUF file. Only the config or the header of the file is read, not the weights.

    Example: **rope-patch inspect ./llama**
    """
    from rope_patch.checkpoints.offline import skeleton
    from rope_patch.frequencies import wavelength
    from rope_patch.patching.verify import look

    if model.lower().endswith(".gguf"):
        from rope_patch.exporting.gguf import read_gguf

        seen = read_gguf(model)
    else:
        seen = look(skeleton(model))
    if not as_json:
        print(seen)
        return
    slots = [
        {
            "layer_type": slot.layer_type,
            "path": slot.path,
            "rope_type": slot.rope_type,
            "rope_theta": slot.rope_theta,
            "attention_scaling": slot.attention_scaling,
            "max_position_embeddings": slot.max_position_embeddings,
            "inv_freq": slot.inv_freq.tolist(),
            "wavelength": [None if w == float("inf") else w for w in wavelength(slot.inv_freq).tolist()],
            "hash": slot.fingerprint,
        }
        for slot in seen.slots
    ]
    record = seen.record.to_dict() if seen.record else None
    print_json({"model": seen.model_class, "tables": slots, "record": record, "notes": list(seen.remarks)})
