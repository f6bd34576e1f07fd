"""Two rotary tables, one of which is chosen for each sequence, once: all that a model needs for it.

Which table a sequence is read under depends on the length it will reach: the one that is stated (:func:`reaching`,
``generate``), or the last position of a pass that reads the whole sequence (padding aside). A sequence in a cache
keeps its table. Keys that were cached under one table cannot be read under the other by rotating them again: below the
first layer they were computed under other attention.
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
"""The length that a sequence will reach, or one of each row of a batch [tokens]."""

HOW_TO_STATE_LENGTH = (
    "State the length that each sequence will reach before its first token is read, `with patch.reaching(tokens):` "
    "(generate states that of a prompt and its new tokens)"
)


# --- the length that a sequence will reach, as who knows it states it ------------------------------------------------


class Stated(NamedTuple):
    """What is stated of the sequences that a model reads: the arguments of :func:`reaching`, ``tokens`` as a tensor."""

    rotary: nn.Module
    tokens: Tensor
    trusted: bool


_STATED: ContextVar[tuple[Stated, ...]] = ContextVar("rope_patch_reach", default=())


@contextlib.contextmanager
def reaching(rotary: nn.Module, tokens: Reach, *, trusted: bool = False) -> Iterator[None]:
    """State the length that sequences of one model will reach, for its forward passes in a ``with`` block.

    The block belongs to the thread: a generator that yields inside it leaves the length stated until it goes on.

    Args:
        rotary: the model's rotary module; one of a single table takes no notice.
        tokens: one number for all rows, or one for each [tokens].
        trusted: whoever states it handles the cache, too. Passes may read tokens beyond the length that no other token
            sees or that are dropped again: padding on the right, speculated tokens.

    Raises:
        ValueError: no whole numbers above 0, or several axes of them.
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
    finally:  # its own entry: blocks of generators end in any order
        _STATED.set(tuple(other for other in _STATED.get() if other is not entry))


def stated_of(rotary: nn.Module) -> Stated | None:
    """Return what was stated last of a model's sequences, by its rotary module; None where nothing was."""
    return next((entry for entry in reversed(_STATED.get()) if entry.rotary is rotary), None)


_MARK = "rope_patch_read_under"


class ReadUnder(NamedTuple):
    """What the rows of a cache were read under.

    Attributes:
        long: which rows under the long table: (rows,) bool.
        tables: that were chosen from, and where they change: the fingerprint of a rotary module.
    """

    long: Tensor
    tables: str


def cached_tokens(cache: Any) -> int:
    """Return how many tokens a cache holds; 0 for none."""
    return int(cache.get_seq_length()) if isinstance(cache, Cache) else 0


def _mark_of(cache: Any, tables: str) -> ReadUnder | None:
    """Return which of two tables the tokens in a cache were read under; None where it was filled under others."""
    noted: ReadUnder | None = getattr(cache, _MARK, None)
    return noted if noted is not None and noted.tables == tables else None


def _unknown(before: int) -> ValueError:
    return ValueError(
        f"the cache holds {before} tokens, and under which table they were read is not known: they are of another "
        "model or patch, of prefix tuning, built from tensors, or of rows under different tables, which may have been "
        f"reordered. {HOW_TO_STATE_LENGTH}"
    )


# --- the rotary module -----------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """What a decoder is called with, and what its rotary module chose, for the length of the call."""

    cache: Any = None
    mask: Tensor | None = None
    chosen: Tensor | None = None


_CALL: ContextVar[_Call | None] = ContextVar("rope_patch_pass", default=None)


class TwoTableRotary(PatchedRotary):
    """A rotary embedding that reads each row under its short or its long table.

    What it says of itself as a module of one table (``tables``, ``table()``, ``inv_freq``) is of the long one.

    Args:
        tables: the long tables, by layer type.
        original: as for :class:`PatchedRotary`.
        short: the short tables of the layer types that have two.
        switch_at: the greatest length under the short table [tokens].
        **options: of ``PatchedRotary``.
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
        self.fingerprint = " ".join(("switch", str(switch_at), *hashes))  # what a cache is marked with
        # In a tuple, so that the model still has one rotary module.
        self._short = (PatchedRotary(short, original, **options),)

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
        rows = self._long_rows(position_ids, x.shape[0] if x.ndim == 3 else position_ids.shape[-2]).view(-1, 1, 1)
        if isinstance(long, Tensor):  # complex numbers
            return torch.where(rows, long, short)
        return torch.where(rows, long[0], short[0]), torch.where(rows, long[1], short[1])

    @torch.no_grad()
    def _long_rows(self, position_ids: Tensor, rows: int) -> Tensor:
        """Return which rows are read under the long table: (rows,) bool on the device of the positions."""
        now, stated = _CALL.get() or _Call(), stated_of(self)
        before, mark = cached_tokens(now.cache), _mark_of(now.cache, self.fingerprint)
        ends, size = _lengths(position_ids, now.mask, before), position_ids.shape[-1]
        trusted = stated is not None and stated.trusted
        if before and mark is None and not trusted:
            raise _unknown(before)
        if stated is not None:
            long = _by_row(stated.tokens.to(ends.device) > self.switch_at, rows, "lengths are stated")
            # Of more than a step of decoding: on a GPU the answer has to be waited for.
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
                raise _unknown(before)
        else:
            long = ends > self.switch_at
        now.chosen = long
        # Whether anything crosses is looked at where it could.
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


def _by_row(values: Tensor, rows: int, what: str) -> Tensor:
    """Return one value for each row; those of fewer prompts are repeated as ``generate`` repeats prompts."""
    if len(values) in (1, rows):
        return values
    if rows % len(values):
        raise ValueError(f"{len(values)} {what}, and the model is called with {rows} rows")
    return values.repeat_interleave(rows // len(values))


# --- the model around it ---------------------------------------------------------------------------------------------


def switch_of(model: nn.Module) -> int | None:
    """Return the greatest length that a model reads under its short table [tokens]; None where it has one table."""
    return next((part.switch_at for part in model.modules() if isinstance(part, TwoTableRotary)), None)


def check_decoder(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Raise ValueError for a model that cannot have two tables."""
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder: two tables are for models that are a decoder alone")
    if cache_argument(decoder) not in arguments_of(decoder):
        raise ValueError(f"the decoder of {name} takes no cache, which tells what was read under which table")


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


def _before(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the cache and the padding that a decoder is called with."""
    given = {**dict(zip(arguments_of(decoder), args, strict=False)), **kwargs} if len(args) > 1 else kwargs
    if "read_index" in given:  # of transformers' continuous batching
        raise ValueError(
            "continuous batching (generate_batch) reads several sequences as one row, in which their tables cannot "
            f"differ: use generate, or a patch of one table. {type(decoder).__name__} has two"
        )
    mask = given.get("attention_mask")
    _CALL.set(_Call(cache_in(given), mask if isinstance(mask, Tensor) else None))


def _after(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Note in the cache what was read under which table; a failed pass has no output."""
    now = _CALL.get()
    _CALL.set(None)
    if now is None or now.chosen is None or output is None:
        return
    returned = output.values() if isinstance(output, Mapping) else output  # with a cache that the decoder made itself
    cache = next((item for item in (now.cache, *returned) if isinstance(item, Cache)), None)
    if cache is not None:
        rotary = next(part for part in decoder.modules() if isinstance(part, TwoTableRotary))
        setattr(cache, _MARK, ReadUnder(now.chosen, rotary.fingerprint))


@dataclass(eq=False)
class Generation:
    """Stands before the ``generate`` of a model's class, and states how long each prompt and its new tokens will be.

    Lengths that are stated by the caller hold instead.
    """

    model: Any
    rotary: TwoTableRotary

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the class of the model does.

        Raises:
            ValueError: a cache that was filled under the other table, or not by this model.
        """
        generate = type(self.model).generate
        given = inspect.signature(generate).bind(self.model, *args, **kwargs)
        options = {**given.arguments, **given.arguments.get("kwargs", {})}
        cache, stated = cache_in(options), stated_of(self.rotary)
        if (before := cached_tokens(cache)) and _mark_of(cache, self.rotary.fingerprint) is None:
            raise _unknown(before)
        if stated is not None:
            return generate(self.model, *args, **kwargs)
        with reaching(self.rotary, reach_of(self.model, options), trusted=True):
            return generate(self.model, *args, **kwargs)


def reach_of(model: Any, options: dict[str, Any]) -> Tensor:
    """Return the lengths that ``generate`` will reach at most: (prompts,) [tokens].

    Args:
        model: a causal language model.
        options: what ``generate`` is given, by name.
    """
    prompts = [options.get(name) for name in ("inputs", "input_ids", "inputs_embeds")]
    prompt = next((value for value in prompts if isinstance(value, Tensor) and value.shape[1]), None)
    size = 1 if prompt is None else prompt.shape[1]  # without a prompt it begins with one token
    new, longest = _option(model, options, "max_new_tokens"), _option(model, options, "max_length")
    if new is None:
        new = 20 if longest is None else max(longest - size, 1)  # 20 is what transformers generates by default
    mask = options.get("attention_mask")
    if mask is None and prompt is not None and prompt.ndim == 2:  # not embeddings
        mask = _without_padding(prompt, *(_option(model, options, f"{name}_token_id") for name in ("pad", "eos")))
    tokens = mask.sum(-1) if isinstance(mask, Tensor) and mask.ndim == 2 else torch.tensor([size])
    return tokens.long().clamp(min=1) + int(new)


def _option(model: Any, options: dict[str, Any], name: str) -> Any:
    """Return an option of ``generate``: as given, of the config that is given, or of the model's own."""
    sources = (options.get("generation_config"), model.generation_config)
    values = [options.get(name), *(getattr(config, name, None) for config in sources)]
    return next((value for value in values if value is not None), None)


def _without_padding(ids: Tensor, pad: Any, end: Any) -> Tensor | None:
    """Return the mask that ``generate`` itself infers from padding; None where it infers none."""
    pad, ends = (torch.as_tensor(value).reshape(-1).tolist() if value is not None else [] for value in (pad, end))
    padded = len(pad) == 1 and pad[0] not in ends and bool((ids == pad[0]).any())
    return torch.ne(ids, pad[0]).long() if padded else None
