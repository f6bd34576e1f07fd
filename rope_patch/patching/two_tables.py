"""A rotary embedding of two tables, one of which is chosen for each sequence, once.

Which table a sequence is read under depends on the length it will reach: the one that is stated
(:func:`~rope_patch.patching.reach.reaching`, ``generate``), or the last position of a pass that reads the whole
sequence (padding aside). A sequence in a cache keeps its table. Keys that were cached under one table cannot be read
under the other by rotating them again: below the first layer they were computed under other attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from rope_patch.patching.generation import Generation
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.reach import ReadUnder, Stated, by_row, cached_tokens, mark, mark_of, stated_of
from rope_patch.tables import RotaryTable

_CACHE: ContextVar[Any] = ContextVar("rope_patch_cache", default=None)
_MASK: ContextVar[Tensor | None] = ContextVar("rope_patch_mask", default=None)
_CHOSEN: ContextVar[tuple[Tensor, Stated | None, str] | None] = ContextVar("rope_patch_chosen", default=None)

HOW = (
    "State the length that each sequence will reach before its first token is read, `with patch.reaching(tokens):` "
    "(generate states that of a prompt and its new tokens)"
)


class TwoTableRotary(PatchedRotary):
    """A rotary embedding that reads each row under its short or its long table.

    What it says of itself as a module of one table (``tables``, ``table()``, ``inv_freq``) is of the long one.

    Args:
        tables: the long tables, by layer type.
        original: as for :class:`PatchedRotary`.
        precision: as for ``PatchedRotary``.
        short: the short tables of the layer types that have two.
        switch_at: the greatest length under the short table [tokens].
        keep_float32: as for ``PatchedRotary``.
    """

    def __init__(
        self,
        tables: Mapping[str | None, RotaryTable],
        original: nn.Module,
        precision: str = "float32",
        *,
        short: Mapping[str | None, RotaryTable],
        switch_at: int,
        keep_float32: bool = False,
    ) -> None:
        super().__init__(tables, original, precision, keep_float32=keep_float32)
        self.short_tables, self.switch_at = dict(short), switch_at
        hashes = [table.fingerprint for table in (*tables.values(), *short.values())]
        self.fingerprint = " ".join(("switch", str(switch_at), *hashes))  # what a cache is marked with
        # In a tuple, so that the model still has one rotary module.
        self._short = (PatchedRotary(short, original, precision, keep_float32=keep_float32),)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return what :class:`PatchedRotary` does, cos and sin (batch, tokens, …), every row under its own table.

        Args:
            x: as for :class:`PatchedRotary`.
            position_ids: (batch, tokens), or (axes, batch, tokens) [tokens].
            layer_type: which table, on models that have several.

        Raises:
            ValueError: a sequence in a cache that would cross from one table to the other, or a number of stated
                lengths that does not fit the rows.
        """
        long = super().forward(x, position_ids, layer_type)
        if layer_type not in self.short_tables:
            return long
        short = self._short[0](x, position_ids, layer_type)
        rows = self._long_rows(position_ids, x.shape[0] if x.ndim == 3 else position_ids.shape[-2])
        rows = rows.view(-1, 1, 1)
        if isinstance(long, Tensor):  # complex numbers
            return torch.where(rows, long, short)
        return torch.where(rows, long[0], short[0]), torch.where(rows, long[1], short[1])

    @torch.no_grad()
    def _long_rows(self, position_ids: Tensor, rows: int) -> Tensor:
        """Return which rows are read under the long table: (rows,) bool on the device of the positions."""
        cache, stated = _CACHE.get(), stated_of(self)
        before, known = cached_tokens(cache), mark_of(cache, self.fingerprint)
        ends = _lengths(position_ids, _MASK.get(), before)
        if before and known is None and not (stated is not None and stated.generating):
            raise ValueError(
                f"past_key_values holds {before} tokens, and under which table they were read is not known: they are "
                f"of another model or patch, of prefix tuning, built from tensors, or their rows were reordered. {HOW}"
            )
        if stated is not None:
            chosen = by_row(stated.tokens.to(ends.device) > self.switch_at, rows, "lengths are stated")
        elif before and known is not None:
            chosen = by_row(known.long.to(ends.device), rows, "rows are in the cache")
        else:
            chosen = ends > self.switch_at
        _CHOSEN.set((chosen, stated, self.fingerprint))
        if before and known is not None and stated is not None and known.stated is not stated.tokens:
            self._check_same_table(known, chosen)
        # Whether anything crosses is looked at where it could: on a GPU the answer has to be waited for.
        room = self.switch_at + (0 if stated is None else stated.slack)
        if (stated is not None or before) and before + position_ids.shape[-1] > room:
            self._check_no_crossing(chosen, ends, room)
        return chosen

    def _check_same_table(self, known: ReadUnder, chosen: Tensor) -> None:
        rows = max(len(known.long), len(chosen))
        cached, now = (by_row(one.to("cpu"), rows, "rows are in the cache") for one in (known.long, chosen))
        if bool((cached != now).any()):
            was, will = ("long", "at most") if bool(cached.any()) else ("short", "more than")
            raise ValueError(
                f"the cache holds keys of the {was} table, and the sequence is now stated to reach {will} "
                f"{self.switch_at} tokens: read it again from its start. {HOW}"
            )

    def _check_no_crossing(self, chosen: Tensor, ends: Tensor, room: float) -> None:
        if bool(((ends > room) & ~chosen).any()):
            raise ValueError(
                f"a sequence reaches {int(ends.max())} tokens, beyond the {self.switch_at} at which its table changes, "
                f"and it was stated not to, or its beginning was read under the short table. {HOW}"
            )

    def extra_repr(self) -> str:
        """Show the tables in ``print(model)``."""
        short = "\n".join(f"to {self.switch_at} tokens {table}" for table in self.short_tables.values())
        return f"{super().extra_repr()}\n{short}"


def _lengths(position_ids: Tensor, mask: Tensor | None, before: int) -> Tensor:
    """Return how long each row is, padding aside: (rows,), or (1,) where all rows are alike [tokens].

    Args:
        position_ids: (batch, tokens), (1, tokens) or (axes, batch, tokens) [tokens].
        mask: (batch, tokens in all), 0 at padding; None without.
        before: tokens in the cache.
    """
    positions = position_ids if position_ids.ndim == 2 else position_ids.amax(0)
    size = positions.shape[1]
    if mask is None or mask.ndim != 2 or mask.shape[1] < before + size:
        return positions.amax(1) + 1
    mask = mask.to(positions.device) != 0
    ends = positions.masked_fill(~mask[:, before : before + size], 0).amax(1) + 1
    # Positions that count the padding on the left, as they do where nobody gave any.
    padding = (mask[:, : before + size].cumsum(1) == 0).sum(1)
    return ends - torch.where(positions[:, -1] == before + size - 1, padding, 0)


def switch_of(model: nn.Module) -> int | None:
    """Return the greatest length that a model reads under its short table [tokens]; None where it has one table."""
    return next((part.switch_at for part in model.modules() if isinstance(part, TwoTableRotary)), None)


# --- what a model needs besides the rotary module


def check_decoder(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Raise ValueError for a model that cannot have two tables."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder: two tables are for models that are a decoder alone")
    if "past_key_values" not in _arguments(decoder):
        raise ValueError(f"the decoder of {name} takes no past_key_values, which tell what was read under which table")


def attach(model: PreTrainedModel, decoder: nn.Module, rotary: nn.Module) -> None:
    """Let a model tell a rotary module of two tables what it reads through; undo that for any other module.

    Args:
        model: whose ``generate`` is to state the length it will reach.
        decoder: whose calls are given the cache.
        rotary: the module that the model now has.
    """
    for hooks in (decoder._forward_pre_hooks, decoder._forward_hooks):  # by what they are: a copied model has copies
        for number in [number for number, hook in hooks.items() if hook in (_before, _after)]:
            del hooks[number]
    if isinstance(model.__dict__.get("generate"), Generation):
        del model.__dict__["generate"]
    if isinstance(rotary, TwoTableRotary):
        decoder.register_forward_pre_hook(_before, with_kwargs=True)
        decoder.register_forward_hook(_after, with_kwargs=True, always_call=True)
        if hasattr(model, "generate"):
            model.generate = Generation(model, rotary)  # type: ignore[assignment]


def _arguments(decoder: nn.Module) -> list[str]:
    return list(inspect.signature(type(decoder).forward).parameters)[1:]


def _before(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the cache and the padding that a decoder is called with."""
    given = {**dict(zip(_arguments(decoder), args, strict=False)), **kwargs} if len(args) > 1 else kwargs
    if "read_index" in given:  # of transformers' continuous batching
        raise ValueError(
            "continuous batching (generate_batch) reads several sequences as one row, in which their tables cannot "
            f"differ: use generate, or a patch of one table. {type(decoder).__name__} has two"
        )
    mask = given.get("attention_mask")
    _CACHE.set(given.get("past_key_values"))
    _MASK.set(mask if isinstance(mask, Tensor) else None)
    _CHOSEN.set(None)


def _after(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note in the cache what was read under which table; a failed pass has no output."""
    cache, chosen = _CACHE.get(), _CHOSEN.get()
    for variable in (_CACHE, _MASK, _CHOSEN):
        variable.set(None)
    if cache is None:  # one that the decoder made itself
        given = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
        cache = next((item for item in given if isinstance(item, Cache)), None)
    if chosen is not None and output is not None and isinstance(cache, Cache):
        mark(cache, *chosen)
