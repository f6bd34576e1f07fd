"""Skipped positions for a fit: those of a retrieval prompt, and the layers whose positions must not skip."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.patching.locate import locate

WINDOW_KEYS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer types that see only a part of a row, each with the config's name for the length of that part."""


def stretched_positions(prompt: Prompt, maker: PromptMaker, length: int, rng: random.Random) -> Tensor:
    """Return the positions of a short prompt that stands for a longer one: (tokens,) [tokens].

    Each stretch of text before a needle, and the one before the question, is cut at a random place, where the positions
    of the missing text are skipped. So the needles lie at the same depths as in the long prompt, and the tokens of a
    needle, and those of the question and its answer, have consecutive positions.

    *Source*: the idea of PoSE (Zhu et al. 2023, arXiv:2309.10400), which has no needles.

    Args:
        prompt: the short prompt.
        maker: the maker of the prompt.
        length: length of the long prompt, at least that of the short one [tokens].
        rng: source of the randomness of the cuts.
    """
    positions, room = torch.arange(len(prompt.ids)), length - len(prompt.ids)
    depths = [*(depth for depth, _ in prompt.hidden), 1.0]
    start, skipped = max(1, len(maker.prefix)), 0
    for depth, (first, stop) in zip(depths, _needles_and_question(prompt, maker), strict=True):
        if first > start:  # there is text before the needle or question, which can be cut
            skips = round(depth * room)
            positions[rng.randint(start, first) :] += skips - skipped
            skipped = skips
        start = max(start, stop)
    return positions


def _needles_and_question(prompt: Prompt, maker: PromptMaker) -> Iterator[tuple[int, int]]:
    """Yield the first token of every needle and the one after its last, then those of question and answer together."""
    text, ids, at = prompt.text + prompt.target, prompt.ids, 0
    for _, needle in prompt.hidden:
        begin = text.index(needle.strip(), at)
        at = begin + len(needle.strip())
        after = maker.tokenizer(text[at:], add_special_tokens=False, verbose=False)["input_ids"]
        # Text is compared by its tokens from both ends: a token that reaches over an end of the needle belongs to it.
        yield _common_beginning(ids, maker.encode(text[:begin])), len(ids) - _common_beginning(ids[::-1], after[::-1])
    begin = text.rindex(prompt.question.strip(), at, len(prompt.text))
    yield _common_beginning(ids, maker.encode(text[:begin])), len(ids)


def _common_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of ids at the start that are the same in both lists.

    >>> _common_beginning([1, 2, 3], [1, 2, 4]), _common_beginning([1, 2], [1, 2, 4])
    (2, 2)
    """
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def consecutive_types(model: nn.Module, length: int) -> tuple[str, ...]:
    """Return the layer types whose positions must not skip, because their window counts tokens and not positions.

    Within its window, a sliding layer that reads a long row meets only consecutive positions, and masks go by the place
    of a token in its row. A window of the whole length hides nothing, so such layers are left out.

    Args:
        model: the patched model.
        length: the length that positions reach [tokens].

    Raises:
        ValueError: such layers share their table with others, and therefore their positions.
    """
    site = locate(model)
    # A config with a window and without layer types gives every layer the window.
    types = getattr(site.config, "layer_types", None) or ["sliding_attention"]
    windows = {kind: getattr(site.config, name, None) for kind, name in WINDOW_KEYS.items() if kind in types}
    short = tuple(kind for kind, window in windows.items() if window is not None and window < length)
    tables: Any = site.module.tables
    if short and None in tables:
        raise ValueError(
            f"{type(site.model).__name__} has one rotary table for all layers, and its layers of {short[0]} see less "
            f"than {length} tokens: skipped positions would show them distances that they never meet. Use "
            "positions='full' (--positions full)"
        )
    return short
