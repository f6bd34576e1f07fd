"""Compute which table each layer uses, and how far it attends, as programs read that from a checkpoint config.

A table that is right in the wrong layers is a wrong table. Some programs take every second or sixth layer for full
attention whatever ``layer_types`` says, and some know no sliding window on a family. *Sources*: the programs, which
``make test-engines`` runs on folders with other layers and windows; SGLang 0.5.23, ``srt/models``, which was read.
"""

from __future__ import annotations

from rope_patch.engines.dialect_tables import RefusesError
from rope_patch.engines.stated_config import ALL_SLIDE, FULL, SLIDING, LayerReach, StatedConfig

_QWEN = ("qwen2", "qwen3")
_WINDOWLESS = {
    "sglang": (*ALL_SLIDE, *_QWEN),
    "llama.cpp": (*ALL_SLIDE, *_QWEN),
    "mlx": (*ALL_SLIDE, *_QWEN, "gemma2"),
}
"""Families on which every layer of a program attends to the whole context."""

_PERIODS = {
    ("mlx", "gemma3_text"): 6,
    ("llama.cpp", "gemma3_text"): 6,
    ("llama.cpp", "gemma2"): 2,
    ("sglang", "gemma2"): 2,
}
"""The number of layers of which a program takes the last for full attention."""


def layers_of(program: str, stated: StatedConfig) -> tuple[tuple[LayerReach, ...], str]:
    """Return the layers as a program runs them, and the reason if they are others than those of transformers.

    Raises:
        RefusesError: the program fails on such layers.
    """
    own = stated.layers
    family = stated.model_type
    if family in _WINDOWLESS.get(program, ()):
        return tuple(LayerReach(layer.kind, None) for layer in own), f"it knows no sliding window on {family}"
    if program == "vllm" and family in _QWEN and len(set(own)) > 1:
        raise RefusesError(f"it fails on a {family} some of whose layers have a sliding window")
    period = _PERIODS.get((program, family))
    if period is None:
        return own, ""
    if program == "mlx":
        period = int(stated.raw.get("sliding_window_pattern") or period)
    types = [SLIDING if i % period else FULL for i in range(1, len(own) + 1)]
    reason = f"it takes one of {period} layers for full attention, and does not read layer_types"
    return tuple(stated.layer(each) for each in types), reason
