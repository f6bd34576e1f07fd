"""The text that mean keys are taken over before a cache is centred; never the text that is measured on."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rope_patch.evaluation.documents import encode
from rope_patch.evaluation.text import builtin_text

TOKENS = 4096
LONGEST = 2048


def calibration(tokenizer: Any, model: nn.Module) -> Tensor:
    """Return rows (rows, tokens) of the training part of the built-in text, within the context the config states.

    Args:
        tokenizer: of the model.
        model: whose context counts.
    """
    config: Any = model.config
    size = min(int(config.get_text_config().max_position_embeddings), LONGEST)
    (stream,) = encode(tokenizer, builtin_text("train").text[: 16 * TOKENS], max_tokens=TOKENS)
    count = len(stream.ids) // size
    return stream.ids[: count * size].view(count, size) if count else stream.ids[None]
