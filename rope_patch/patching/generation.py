"""``generate`` of a model with two tables: it states the length that each prompt will reach."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rope_patch.patching.reach import by_row, cached_tokens, mark_of, reaching, stated_of

DEFAULT_NEW_TOKENS = 20
"""What transformers generates where no length is given [tokens]."""


class Generation:
    """Stands before the ``generate`` of a model's class.

    A prompt and its new tokens together decide the table. Lengths that are stated by the caller hold instead. A cache
    that was filled under the other table is emptied, and filled again from the ids.

    Args:
        model: a causal language model of transformers; it is not kept alive.
        rotary: its rotary module, of two tables.
    """

    def __init__(self, model: Any, rotary: Any) -> None:
        self._model: Callable[[], Any] = weakref.ref(model)
        self._rotary: Callable[[], Any] = weakref.ref(rotary)

    @property
    def model(self) -> Any:
        """The model whose ``generate`` this is."""
        return self._model()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the class of the model does.

        Raises:
            ReferenceError: a model that nothing refers to any more.
            ValueError: a cache of the other table that cannot be filled again.
        """
        model, rotary = self._model(), self._rotary()
        if model is None:  # load(folder).generate(ids): Python drops the model before it calls
            raise ReferenceError(
                "generate of a model with two tables needs a model that is kept: model = rope_patch.load(...), then "
                "model.generate(...)"
            )
        generate = type(model).generate
        given = inspect.signature(generate).bind(model, *args, **kwargs)
        options = {**given.arguments, **given.arguments.get("kwargs", {})}
        stated = stated_of(rotary)
        reach = reach_of(model, options) if stated is None else stated.tokens
        self._refill(options, reach, rotary)
        slack = (_option(model, options, "prompt_lookup_num_tokens") or 0) if stated is None else stated.slack
        with reaching(rotary, reach, slack=slack, generating=True):
            return generate(model, *args, **kwargs)

    def _refill(self, options: dict[str, Any], reach: Tensor, rotary: Any) -> None:
        """Empty a cache that was filled under another table than the prompt will now be read under."""
        cache, switch_at = options.get("past_key_values"), rotary.switch_at
        before, known = cached_tokens(cache), mark_of(cache, rotary.fingerprint)
        if not before:
            return
        if known is not None:
            rows = max(len(known.long), len(reach))
            long = by_row(reach.to(known.long.device) > switch_at, rows, "lengths are stated")
            if bool((by_row(known.long, rows, "rows are in the cache") == long).all()):
                return
        ids, mask = _prompt(options), options.get("attention_mask")
        whole = ids is not None and ids.ndim == 2 and ids.shape[1] > before
        if whole and isinstance(mask, Tensor):  # a longer mask says that only the new tokens are given
            whole = ids is not None and mask.shape[-1] == ids.shape[1]
        if type(cache) is not DynamicCache or not whole:
            under = "the other table" if known is not None else "a table that is not known"
            raise ValueError(
                f"past_key_values holds {before} tokens that were read under {under}, and the text will now reach to "
                f"one side of {switch_at} tokens. Give generate the ids of the whole text, and no past_key_values"
            )
        cache.layers = DynamicCache(config=self.model.config).layers

    def __reduce__(self) -> tuple[type[Generation], tuple[Any, Any]]:
        return Generation, (self._model(), self._rotary())  # of a copied model, its copies


def reach_of(model: Any, options: dict[str, Any]) -> Tensor:
    """Return the lengths that ``generate`` will reach at most: (prompts,) [tokens].

    Args:
        model: a causal language model.
        options: what ``generate`` is given, by name.
    """
    prompt = _prompt(options)
    size = 1 if prompt is None else prompt.shape[1]  # without a prompt it begins with one token
    new, longest = _option(model, options, "max_new_tokens"), _option(model, options, "max_length")
    if new is None:
        new = DEFAULT_NEW_TOKENS if longest is None else max(longest - size, 1)
    mask = options.get("attention_mask")
    if mask is None and prompt is not None and prompt.ndim == 2:
        mask = _without_padding(prompt, *(_option(model, options, f"{name}_token_id") for name in ("pad", "eos")))
    tokens = mask.sum(-1) if isinstance(mask, Tensor) and mask.ndim == 2 else torch.tensor([size])
    negative = options.get("negative_prompt_ids")  # of classifier-free guidance, which the same model reads
    if isinstance(negative, Tensor):
        tokens = tokens.clamp(min=negative.shape[-1])
    return tokens.long().clamp(min=1) + int(new)


def _option(model: Any, options: dict[str, Any], name: str) -> Any:
    """Return an option of ``generate``: as given, of the config that is given, or of the model's own."""
    sources = (options.get("generation_config"), model.generation_config)
    values = [options.get(name), *(getattr(config, name, None) for config in sources)]
    return next((value for value in values if value is not None), None)


def _prompt(options: dict[str, Any]) -> Tensor | None:
    """Return the ids (prompts, tokens) or embeddings (prompts, tokens, hidden) that ``generate`` is given."""
    values = [options.get(name) for name in ("inputs", "input_ids", "inputs_embeds")]
    given = [value for value in values if isinstance(value, Tensor) and value.shape[1]]
    return given[0] if given else None


def _without_padding(ids: Tensor, pad: Any, end: Any) -> Tensor | None:
    """Return the mask that ``generate`` itself infers from padding; None where it infers none."""
    pad, ends = (torch.as_tensor(value).reshape(-1).tolist() if value is not None else [] for value in (pad, end))
    if len(pad) != 1 or pad[0] in ends or not bool((ids == pad[0]).any()):
        return None
    mask: Tensor = ids != pad[0]
    return mask.long()
