"""A short fit of a tiny model to the bundled texts."""

from __future__ import annotations

from pathlib import Path

import rope_patch
from rope_patch.fitting import fit

ASSETS = Path(rope_patch.data_path("assets"))

TEXT = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ASSETS / "domains").glob("*.txt")))

ASKED = {"target_length": 96, "steps": 4, "checks": 2, "windows": 2, "samples": 1, "depths": (0.0, 1.0),
         "batch_tokens": 192}  # fmt: skip


def fitted(model, tokenizer, **changes):
    return fit(model, tokenizer, TEXT, **{**ASKED, "init": "yarn", **changes})
