"""Two rotary tables, one of which is chosen once for each sequence.

The choice depends on the length that the sequence will reach: the length that is stated (:func:`reaching`,
``generate``), or else the last position of a pass that reads the whole sequence, without its padding. A sequence in a
cache keeps its table. Keys that were cached under one table cannot be rotated again for the other: from the second
layer on they were computed from hidden states that attention under the first table gave.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from rope_patch.patching.cache_argument import arguments_of, cache_argument, cache_in
from rope_patch.patching.rotary import PatchedRotary
from rope_patch.tables import Tables

Reach = int | Sequence[int] | Tensor
"""The length that a sequence will reach, or one length for each row of a batch [tokens]."""

HOW_TO_STATE_LENGTH = (
    "State the length that each sequence will reach before its first token is read, `with patch.reaching(tokens):` "
    "(generate states that of a prompt and its new tokens)"
)


# --- the length that a sequence will reach, as the caller states it --------------------------------------------------


class Stated(NamedTuple):
    """What is stated about the sequences that a model reads.

    Attributes:
        rotary: the model's rotary module.
        tokens: the length for all rows of the batch, or one length for each row: (1,) or (rows,) [tokens].
        trusted: whether the caller handles the cache, as :func:`reaching` explains.
    """

    rotary: nn.Module
    tokens: Tensor
    trusted: bool


# A context variable, so that threads that serve one model do not see each other's lengths.
_STATED: ContextVar[tuple[Stated, ...]] = ContextVar("rope_patch_reach", default=())


@contextlib.contextmanager
def reaching(rotary: nn.Module, tokens: Reach, *, trusted: bool = False) -> Iterator[None]:
    """State the length that sequences of one model will reach, for its forward passes in a ``with`` block.

    The block belongs to the thread: a generator that yields inside it leaves the length stated until it goes on.

    Args:
        rotary: the model's rotary module; a module of one table ignores the length.
        tokens: the length for all rows of the batch, or one length for each row [tokens].
        trusted: whether the caller handles the cache, too, so that crossings of the switch are not checked. Passes may
            then read tokens beyond the length that no other token sees or that are dropped again: padding on the right,
            speculated tokens.

    Raises:
        ValueError: the lengths are not whole numbers above 0, or have several axes.
    """
    # Under torch.device("meta") a new tensor would have no numbers to check.
    stated = tokens if isinstance(tokens, Tensor) else torch.as_tensor(tokens, device="cpu")
    whole = not stated.is_floating_point() and stated.dtype != torch.bool
    if not whole or stated.ndim > 1 or not stated.numel() or int(stated.min()) < 1:
        raise ValueError(f"reaching takes a number of tokens >= 1, or one for each row, got {tokens!r}")
    entry = Stated(rotary, stated.reshape(-1), trusted)
    _STATED.set((*_STATED.get(), entry))
    try:
        yield
    finally:
        # This entry is removed, not the last one: blocks of generators can end in any order.
        _STATED.set(tuple(other for other in _STATED.get() if other is not entry))


def stated_of(rotary: nn.Module) -> Stated | None:
    """Return what was stated last about the sequences of a rotary module's model; None if nothing was."""
    return next((entry for entry in reversed(_STATED.get()) if entry.rotary is rotary), None)


_MARK = "rope_patch_read_under"


class ReadUnder(NamedTuple):
    """The tables under which the rows of a cache were read.

    Attributes:
        long: whether each row was read under the long table: (rows,) bool.
        tables: fingerprint of the rotary module, which identifies its two tables and the length of the switch.
    """

    long: Tensor
    tables: str


def cached_tokens(cache: Any) -> int:
    """Return how many tokens a cache holds; 0 for none."""
    return int(cache.get_seq_length()) if isinstance(cache, Cache) else 0


def _mark_of(cache: Any, tables: str) -> ReadUnder | None:
    """Return the tables under which a cache was filled; None if it was by another rotary module, or is not known."""
    noted: ReadUnder | None = getattr(cache, _MARK, None)
    return noted if noted is not None and noted.tables == tables else None


def _unknown_table(before: int) -> ValueError:
    return ValueError(
        f"the cache holds {before} tokens, and under which table they were read is not known: they are of another "
        "model or patch, of prefix tuning, built from tensors, or of rows under different tables, which may have been "
        f"reordered. {HOW_TO_STATE_LENGTH}"
    )


# --- the rotary module -----------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """A call of a decoder.

    Attributes:
        cache: the cache that the decoder is called with.
        mask: the attention mask that the decoder is called with.
        chosen: whether each row is read under the long table, as the rotary module chose: (rows,) bool.
    """

    cache: Any = None
    mask: Tensor | None = None
    chosen: Tensor | None = None


# The rotary module is called with positions alone, so the decoder's hooks hand it the cache and the mask.
_CALL: ContextVar[_Call | None] = ContextVar("rope_patch_pass", default=None)


class TwoTableRotary(PatchedRotary):
    """A rotary module that reads each row under its short or its long table.

    Everything that it shares with a module of one table (``tables``, ``table()``, ``inv_freq``) describes the long one.

    Args:
        tables: the long tables, by layer type.
        original: the module that is replaced, as for :class:`PatchedRotary`.
        short: the short tables, by the layer types that have two.
        switch_at: the greatest length that is read under the short table [tokens].
        **options: other arguments of :class:`PatchedRotary`.
    """

    def __init__(
        self,
        tables: Tables,
        original: nn.Module,
        *,
        short: Tables,
        switch_at: int,
        **options: Any,
    ) -> None:
        super().__init__(tables, original, **options)
        self.short_tables, self.switch_at = dict(short), switch_at
        hashes = [table.fingerprint for table in (*tables.values(), *short.values())]
        self.fingerprint = " ".join(("switch", str(switch_at), *hashes))  # caches are marked with it
        # In a tuple, so that the model still has one rotary module.
        self._short = (PatchedRotary(short, original, **options),)

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin (batch, tokens, …) as :class:`PatchedRotary` does, every row under its own table.

        Args:
            x: any tensor with the dtype and the device of the result.
            position_ids: (batch, tokens) positions, or (axes, batch, tokens) [tokens].
            layer_type: layer type whose tables are used, on a model with several.

        Raises:
            ValueError: a sequence in a cache would cross from one table to the other, or the number of stated lengths
                does not fit the rows.
        """
        # Both tables are computed for all rows, and then chosen from: this needs no look at the numbers, for which a
        # GPU would have to be waited for.
        long = super().forward(x, position_ids, layer_type)
        if layer_type not in self.short_tables:
            return long
        short = self._short[0](x, position_ids, layer_type)
        # position_ids may have one row for the whole batch; hidden states in x tell how many there are.
        rows = self._long_rows(position_ids, x.shape[0] if x.ndim == 3 else position_ids.shape[-2]).view(-1, 1, 1)
        if isinstance(long, Tensor):  # a layout of complex numbers
            return torch.where(rows, long, short)
        return torch.where(rows, long[0], short[0]), torch.where(rows, long[1], short[1])

    @torch.no_grad()
    def _long_rows(self, position_ids: Tensor, rows: int) -> Tensor:
        """Return whether each row is read under the long table: (rows,) bool on the device of the positions."""
        now, stated = _CALL.get() or _Call(), stated_of(self)
        before, mark = cached_tokens(now.cache), _mark_of(now.cache, self.fingerprint)
        ends, size = _lengths(position_ids, now.mask, before), position_ids.shape[-1]
        trusted = stated is not None and stated.trusted
        if before and mark is None and not trusted:
            raise _unknown_table(before)
        if stated is not None:
            long = _by_row(stated.tokens.to(ends.device) > self.switch_at, rows, "lengths are stated")
            # Not at a step of decoding, which would wait for the GPU to answer; the prompt was checked before.
            if before and mark is not None and size > 1:
                cached = _by_row(mark.long.to(ends.device), rows, "rows are in the cache")
                if bool((cached != long).any()):
                    raise ValueError(
                        f"the cache holds keys of another table than that for {stated.tokens.tolist()} tokens: read "
                        f"the sequence again from its start, with an empty cache. {HOW_TO_STATE_LENGTH}"
                    )
        elif before and mark is not None:
            long = mark.long[:1].to(ends.device)
            if bool((mark.long != mark.long[0]).any()):
                raise _unknown_table(before)
        else:
            long = ends > self.switch_at
        now.chosen = long
        # The numbers are looked at only if a crossing is possible, since a GPU has to be waited for.
        crosses = not trusted and (stated is not None or before) and before + size > self.switch_at
        if crosses and bool(((ends > self.switch_at) & ~long).any()):
            raise ValueError(
                f"a sequence reaches {int(ends.max())} tokens, beyond the {self.switch_at} at which its table changes, "
                f"and it was stated not to, or its beginning was read under the short table. {HOW_TO_STATE_LENGTH}"
            )
        return long

    def extra_repr(self) -> str:
        """Show the tables in ``print(model)``."""
        short = "\n".join(f"to {self.switch_at} tokens {table}" for table in self.short_tables.values())
        return f"{super().extra_repr()}\n{short}"


def _lengths(position_ids: Tensor, mask: Tensor | None, before: int) -> Tensor:
    """Return the length of each row without its padding: (rows,), or (1,) if all rows have the same length [tokens].

    Args:
        position_ids: positions of shape (batch, tokens), (1, tokens) or (axes, batch, tokens) [tokens].
        mask: (batch, cached and new tokens) attention mask, 0 at padding; None if there is none.
        before: number of tokens in the cache.
    """
    positions = position_ids if position_ids.ndim == 2 else position_ids.amax(0)
    size = positions.shape[1]
    if mask is None or mask.ndim != 2 or mask.shape[1] < before + size:
        return positions.amax(1) + 1
    mask = mask.to(positions.device) != 0
    ends = positions.masked_fill(~mask[:, before : before + size], 0).amax(1) + 1
    # Positions that nobody gave are counted from the first column, so they include the padding on the left.
    padding = (mask[:, : before + size].cumsum(1) == 0).sum(1)
    return ends - torch.where(positions[:, -1] == before + size - 1, padding, 0)


def _by_row(values: Tensor, rows: int, what: str) -> Tensor:
    """Return one value for each row; values of fewer prompts are repeated as ``generate`` repeats prompts.

    Args:
        values: (values,) one value for all rows, for each prompt or for each row.
        rows: number of rows with which the model is called.
        what: words that name the values in an error.

    Raises:
        ValueError: the number of rows is not a multiple of the number of values.
    """
    if len(values) in (1, rows):
        return values
    if rows % len(values):
        raise ValueError(f"{len(values)} {what}, and the model is called with {rows} rows")
    return values.repeat_interleave(rows // len(values))


# --- the model around it ---------------------------------------------------------------------------------------------


def switch_of(model: nn.Module) -> int | None:
    """Return the greatest length that a model reads under its short table [tokens]; None if it has one table."""
    return next((part.switch_at for part in model.modules() if isinstance(part, TwoTableRotary)), None)


def check_decoder(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Raise ValueError if a model cannot have two tables."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder: two tables are for models that are a decoder alone")
    if cache_argument(decoder) not in arguments_of(decoder):
        raise ValueError(f"the decoder of {name} takes no cache, which tells what was read under which table")


def attach(model: PreTrainedModel, decoder: nn.Module, rotary: nn.Module) -> None:
    """Install the hooks by which a rotary module of two tables learns of the cache; for any other module remove them.

    Args:
        model: the model whose ``generate`` will state the length that sequences reach.
        decoder: the decoder of the model, whose calls tell the cache and the mask.
        rotary: the rotary module that the model now has.
    """
    # Hooks are found by their function, because a deep copy of a model has hooks, but no handles to remove them by.
    for hooks in (decoder._forward_pre_hooks, decoder._forward_hooks):
        for number in [number for number, hook in hooks.items() if hook in (_note_call, _mark_cache)]:
            del hooks[number]
    if isinstance(model.__dict__.get("generate"), Generation):
        del model.__dict__["generate"]
    if isinstance(rotary, TwoTableRotary):
        decoder.register_forward_pre_hook(_note_call, with_kwargs=True)
        decoder.register_forward_hook(_mark_cache, with_kwargs=True, always_call=True)
        if hasattr(model, "generate"):
            model.generate = Generation(model, rotary)  # type: ignore[assignment]


def _note_call(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the cache and the mask that a decoder is called with, for its rotary module."""
    given = {**dict(zip(arguments_of(decoder), args, strict=False)), **kwargs} if len(args) > 1 else kwargs
    if "read_index" in given:  # transformers' continuous batching gives it
        raise ValueError(
            "continuous batching (generate_batch) reads several sequences as one row, in which their tables cannot "
            f"differ: use generate, or a patch of one table. {type(decoder).__name__} has two"
        )
    mask = given.get("attention_mask")
    _CALL.set(_Call(cache_in(given), mask if isinstance(mask, Tensor) else None))


def _mark_cache(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Mark the cache with the table of each row; nothing is marked after a pass that failed, which has no output."""
    now = _CALL.get()
    # Also after a failed pass (always_call), so that the next one does not see this call's cache.
    _CALL.set(None)
    if now is None or now.chosen is None or output is None:
        return
    # Without a cache among the arguments the decoder may have made one, which it returns.
    returned = output.values() if isinstance(output, Mapping) else output
    cache = next((item for item in (now.cache, *returned) if isinstance(item, Cache)), None)
    if cache is not None:
        rotary = next(part for part in decoder.modules() if isinstance(part, TwoTableRotary))
        setattr(cache, _MARK, ReadUnder(now.chosen, rotary.fingerprint))


@dataclass(eq=False)
class Generation:
    """Replaces ``generate`` on a model, and states the length of each prompt and its new tokens.

    Lengths that the caller states are used instead.

    Attributes:
        model: the model whose class generates.
        rotary: the rotary module of the model.
    """

    model: Any
    rotary: TwoTableRotary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the class of the model does.

        Raises:
            ValueError: the cache was filled under the other table, or not by this model.
        """
        generate = type(self.model).generate
        given = inspect.signature(generate).bind(self.model, *args, **kwargs)
        options = {**given.arguments, **given.arguments.get("kwargs", {})}
        cache, stated = cache_in(options), stated_of(self.rotary)
        if (before := cached_tokens(cache)) and _mark_of(cache, self.rotary.fingerprint) is None:
            raise _unknown_table(before)
        if stated is not None:
            return generate(self.model, *args, **kwargs)
        with reaching(self.rotary, reach_of(self.model, options), trusted=True):
            return generate(self.model, *args, **kwargs)


def reach_of(model: Any, options: dict[str, Any]) -> Tensor:
    """Return the greatest lengths that ``generate`` can reach: (prompts,) [tokens].

    Args:
        model: a causal language model.
        options: the arguments of ``generate``, by name.
    """
    prompts = [options.get(name) for name in ("inputs", "input_ids", "inputs_embeds")]
    prompt = next((value for value in prompts if isinstance(value, Tensor) and value.shape[1]), None)
    size = 1 if prompt is None else prompt.shape[1]  # without a prompt it begins with one token
    new, longest = _option(model, options, "max_new_tokens"), _option(model, options, "max_length")
    if new is None:
        new = 20 if longest is None else max(longest - size, 1)  # 20 is what transformers generates by default
    mask = options.get("attention_mask")
    if mask is None and prompt is not None and prompt.ndim == 2:  # embeddings have no padding tokens
        mask = _without_padding(prompt, *(_option(model, options, f"{name}_token_id") for name in ("pad", "eos")))
    tokens = mask.sum(-1) if isinstance(mask, Tensor) and mask.ndim == 2 else torch.tensor([size])
    return tokens.long().clamp(min=1) + int(new)


def _option(model: Any, options: dict[str, Any], name: str) -> Any:
    """Return an option of ``generate``: the argument, or else that of the given config, or of the model's own."""
    sources = (options.get("generation_config"), model.generation_config)
    values = [options.get(name), *(getattr(config, name, None) for config in sources)]
    return next((value for value in values if value is not None), None)


def _without_padding(ids: Tensor, pad: Any, end: Any) -> Tensor | None:
    """Return the mask that ``generate`` infers from padding tokens; None if it infers none.

    Args:
        ids: (prompts, tokens) token ids.
        pad: the id of the padding token, if there is one.
        end: the id of the end token, or several; a padding token among them is not taken for padding.
    """
    pad, ends = (torch.as_tensor(value).reshape(-1).tolist() if value is not None else [] for value in (pad, end))
    padded = len(pad) == 1 and pad[0] not in ends and bool((ids == pad[0]).any())
    return torch.ne(ids, pad[0]).long() if padded else None
