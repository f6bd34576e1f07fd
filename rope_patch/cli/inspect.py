"""``rope-patch inspect``."""

from __future__ import annotations

from collections.abc import Sequence

from rope_patch.cli.parsing import parse
from rope_patch.cli.printing import print_json
from rope_patch.options.checkpoints import InspectOptions


def inspect(words: Sequence[str]) -> None:
    """Run ``rope-patch inspect`` with the words behind it."""
    options = parse(InspectOptions, words)
    from rope_patch import checkpoints
    from rope_patch.frequencies import wavelength

    inspection = checkpoints.inspect(options.model)
    if not options.as_json:
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
            "notes": list(inspection.warnings),
        }
    )
