"""``rope-patch inspect``."""

from __future__ import annotations

from rope_patch.cli.options import Import, Json, Model, print_json


def inspect(model: Model, imports: Import = None, as_json: Json = False) -> None:
    """Show the rotary tables of a checkpoint or adapter: type, wavelengths, scaling, and the patch that made them.

    Only the config is read, or the header of a GGUF file, not the weights.

    Example: **rope-patch inspect ./llama**
    """
    from rope_patch import checkpoints
    from rope_patch.frequencies import wavelength

    inspection = checkpoints.inspect(model)
    if not as_json:
        print(inspection)
        return
    tables = [
        {
            "layer_type": table.layer_type,
            "path": table.path,
            "rope_type": table.rope_type,
            "rope_theta": table.rope_theta,
            "attention_scaling": table.attention_scaling,
            "max_position_embeddings": table.max_position_embeddings,
            "inv_freq": table.inv_freq.tolist(),
            "wavelength": [None if w == float("inf") else w for w in wavelength(table.inv_freq).tolist()],
            "hash": table.fingerprint,
        }
        for table in inspection.tables
    ]
    record = inspection.record.to_dict() if inspection.record else None
    print_json(
        {
            "model": inspection.model_class,
            "tables": tables,
            "record": record,
            "checked": list(inspection.checked),
            "notes": list(inspection.notes),
        }
    )
