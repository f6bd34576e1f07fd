"""``generate`` of a model with two tables: it states the length that each prompt will reach."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rope_patch.patching.reach import by_row, cached_tokens, mark_of, reaching, stated_reach

DEFAULT_NEW_TOKENS = 20
"""What transformers generates where no length is given [tokens]."""


class Generation:
    """Stands before the ``generate`` of a model's class.

    A prompt and its new tokens together decide the table. Lengths that are stated by the caller hold instead. A cache
    that was filled under the other table is emptied, and filled again from the ids.

    Args:
        model: a causal language model of transformers.
        switch_at: the greatest length under the short table [tokens].
    """

    def __init__(self, model: Any, switch_at: int) -> None:
        self.model, self.switch_at = model, switch_at

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the class of the model does.

        Raises:
            ValueError: a cache of the other table that cannot be filled again.
        """
        generate = type(self.model).generate
        given = inspect.signature(generate).bind(self.model, *args, **kwargs)
        options = {**given.arguments, **given.arguments.get("kwargs", {})}
        stated = stated_reach()
        reach = reach_of(self.model, options) if stated is None else stated.tokens
        if reach is None:
            return generate(self.model, *args, **kwargs)
        self._refill(options, reach)
        with reaching(reach) if stated is None else contextlib.nullcontext():
            return generate(self.model, *args, **kwargs)

    def _refill(self, options: dict[str, Any], reach: Tensor) -> None:
        """Empty a cache that was filled under another table than the prompt will now be read under."""
        cache, known = options.get("past_key_values"), mark_of(options.get("past_key_values"))
        if known is None:
            return
        rows = max(len(known.long), len(reach))
        long = by_row(reach.to(known.long.device) > self.switch_at, rows, "lengths are stated")
        if bool((by_row(known.long, rows, "rows are in the cache") == long).all()):
            return
        ids = _prompts(options)
        if type(cache) is not DynamicCache or ids is None or ids.ndim != 2 or ids.shape[1] <= cached_tokens(cache):
            raise ValueError(
                f"past_key_values holds keys of the other table: the text now reaches to the other side of "
                f"{self.switch_at} tokens. Give generate the ids of the whole text, and no past_key_values"
            )
        cache.layers = DynamicCache(config=self.model.config).layers


def reach_of(model: Any, options: dict[str, Any]) -> Tensor | None:
    """Return the lengths that ``generate`` will reach at most: (prompts,) [tokens]; None without a prompt.

    Args:
        model: a causal language model.
        options: what ``generate`` is given, by name.
    """
    ids = _prompts(options)
    if ids is None:
        return None
    size = ids.shape[1]
    defaults = model.generation_config

    def option(name: str) -> Any:
        config = options.get("generation_config")
        sources = [options.get(name), getattr(config, name, None), getattr(defaults, name, None)]
        return next((value for value in sources if value is not None), None)

    new, longest = option("max_new_tokens"), option("max_length")
    if new is None:
        new = DEFAULT_NEW_TOKENS if longest is None else max(longest - size, 1)
    mask = options.get("attention_mask")
    if mask is None and ids.ndim == 2:
        mask = _without_padding(ids, option("pad_token_id"), option("eos_token_id"))
    tokens = mask.sum(-1) if isinstance(mask, Tensor) and mask.ndim == 2 else torch.tensor([size])
    return tokens.long().clamp(min=1) + int(new)


def _prompts(options: dict[str, Any]) -> Tensor | None:
    """Return the ids (prompts, tokens) or embeddings (prompts, tokens, hidden) that ``generate`` is given."""
    values = (options.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))
    return next((value for value in values if isinstance(value, Tensor)), None)


def _without_padding(ids: Tensor, pad: Any, end: Any) -> Tensor | None:
    """Return the mask that ``generate`` itself infers from padding; None where it infers none."""
    pad, ends = (torch.as_tensor(value).reshape(-1).tolist() if value is not None else [] for value in (pad, end))
    if len(pad) != 1 or pad[0] in ends or not bool((ids == pad[0]).any()):
        return None
    mask: Tensor = ids != pad[0]
    return mask.long()
