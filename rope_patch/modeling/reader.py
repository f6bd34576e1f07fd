"""Read texts with a causal language model without whole ``[tokens, vocab]`` logits. All scores are computed here."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from rope_patch.modeling.after_decoder import DecoderOutput, decoder_path, modules_return
from rope_patch.modeling.inputs import refuse_prompts
from rope_patch.modeling.prefill import ATTENTION_NAME, RoomyLayer
from rope_patch.modeling.read_at_once import SLIDING_CHUNK, rows_at_once, scored_at_once
from rope_patch.modeling.temporary_modes import attending_with, in_eval_mode
from rope_patch.patching.cache_argument import cache_argument
from rope_patch.patching.locate import base_of
from rope_patch.patching.rotary import PatchedRotary
from rope_patch.runtime import progress
from rope_patch.tables import changes_with_length

CacheFactory = Callable[[], Any]
KnownStates = Callable[[Tensor], Tensor | None]
"""A function of the token ids of a text (tokens,), which returns its last hidden states (tokens, hidden), or None."""

CHECKED_TOKENS = 8
"""Number of tokens on which ways of reading are compared with the model itself [tokens]."""
WHOLE_TOLERANCE, PIECES_TOLERANCE, COARSE_TOLERANCE = 1e-2, 1e-3, 0.2
"""Differences of logits that count as rounding, as shares of their spread: of the parts from the whole, which run the
same code; of pieces in float32; and of pieces in 16 bits, which move those of SmolLM2-135M by .06."""
_WAYS = {"whole": "by parts", "pieces": "in pieces through a cache: whole texts alone can be scored"}
_DIFFERENCES: WeakKeyDictionary[nn.Module, dict[str, float]] = WeakKeyDictionary()
"""How much each way of reading changes the logits, by model: it is measured once."""


def cache_identity(cache: CacheFactory | None, resume: bool) -> dict[str, str]:
    """Return the entry by which keys of the result cache tell KV caches apart; empty without a KV cache.

    Args:
        cache: factory of KV caches, whose attribute ``identity`` is a text that describes them, if it has one.
        resume: whether results are stored.

    Raises:
        ValueError: results are stored, and the factory has no identity.
    """
    if cache is None:
        return {}
    known = getattr(cache, "identity", None)
    if resume and known is None:
        raise ValueError("resume cannot tell one cache from another: leave resume out, or give the cache an identity")
    return {"cache": str(known)}


class Reader:
    """A causal language model taken apart: its decoder reads chunks, and what follows it scores slices of their states.

    What follows is asked of the model's own ``forward`` with given states in the decoder's place, so that heads, scales
    and soft caps are the family's own. On the first use of a model its parts are compared with the whole. The parts of
    a model sharded by FSDP2 are called through its root, so every process must read the same tokens.

    Args:
        model: a causal language model of transformers, bare, quantized, sharded or under a LoRA adapter.

    Raises:
        TypeError: it is not a model of transformers.
        ValueError: the model has no decoder with an output head, an adapter puts tokens of its own before the text, or
            the parts together do not compute what the model does.
    """

    def __init__(self, model: nn.Module) -> None:
        refuse_prompts(model)
        base: Any = base_of(model)  # to the type checker, attributes of modules are tensors or modules
        self.model = base
        self.path = decoder_path(base)
        self.decoder = self.path[0]
        self.head = base.get_output_embeddings()
        embedding = base.get_input_embeddings()
        self.vocabulary: int = embedding.weight.shape[0]
        self.dynamic = _is_dynamic(base)
        config = base.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        self.sliding_window: int | None = None
        if "sliding_attention" in kinds:
            self.sliding_window = getattr(config, "sliding_window", None)
        self.cache_argument = cache_argument(self.decoder)
        self.device = input_device(embedding)
        self.call: Callable[..., Any] = _call
        self.forward: Callable[..., Any] = base
        root = _sharded_root(model)
        if root is not None and root is not self.decoder:
            self.call = _through(root)
            if root is not base:  # PEFT's model is
                self.forward = functools.partial(self.call, base)
        self.check("whole")

    def chunk(self, tokens: int, asked: int | None = None, cache: CacheFactory | None = None) -> int:
        """Return how many of some tokens a forward pass reads: as many as asked for, or else all of them, if possible.

        Read at once, a layer with a sliding window computes the scores of all pairs of tokens, and masks most of them.
        A cache of the caller's own is given all tokens.
        """
        if asked is not None:
            return min(tokens, asked)
        if self.sliding_window is None or self.dynamic or cache is not None:
            return tokens
        size = max(SLIDING_CHUNK, self.sliding_window)
        if size >= tokens or self.difference("pieces") > 0:
            return tokens
        return size

    def new_cache(self, capacity: int) -> DynamicCache:
        """Return an empty cache, in which sliding layers keep only the tokens of their windows.

        Args:
            capacity: number of tokens that the cache will hold, for which memory is allocated once [tokens].
        """
        cache = DynamicCache(config=self.model.config)
        for index, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                cache.layers[index] = RoomyLayer(capacity)
        return cache

    def read(
        self,
        ids: Tensor,
        past: Any = None,
        chunk: int | None = None,
    ) -> Iterator[tuple[int, Tensor]]:
        """Run the decoder over token ids, in chunks if there is a cache.

        Args:
            ids: (rows, tokens) token ids.
            past: cache whose tokens are before these, and to which these are added; None for no cache.
            chunk: number of tokens in a forward pass; all by default.

        Yields:
            The offset of the chunk, and its last hidden states (rows, chunk, hidden).
        """
        if self.dynamic and (past is not None or len(ids) > 1):
            raise ValueError(
                "this model's rotary table changes with the length it reads (rope_type dynamic, or longrope with two "
                "tables), so chunks, caches and batches would change its numbers: freeze it first, "
                "rope_patch.apply(model, 'default', freeze_at=LENGTH), or read whole texts one at a time"
            )
        size = chunk or max(ids.shape[1], 1)
        # Caches of other kinds may stand for an attention that is replaced now, which the check would not go through.
        if type(past) is DynamicCache:
            begun = any(getattr(layer, "is_initialized", False) for layer in past.layers)
            if begun or size < ids.shape[1]:
                self.check("pieces")
        for start in range(0, ids.shape[1], size):
            part = ids[:, start : start + size].to(self.device)
            attending: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if past is not None:  # without a cache sdpa itself needs no mask
                attending = attending_with(self.model, ATTENTION_NAME, instead_of="sdpa")
            with attending, progress.forward_pass(self.path[-1], part.numel()):
                cache = {self.cache_argument: past, "use_cache": past is not None}
                out = self.call(self.decoder, input_ids=part, **cache)
            yield start, out[0]

    def past(self, tokens: int, chunk: int | None, cache: CacheFactory | None) -> Any:
        """Return the empty cache through which a text of some tokens is read; None if it is read at once."""
        if cache is not None:
            return cache()
        return self.new_cache(tokens) if chunk is not None and chunk < tokens else None

    def states(self, ids: Tensor, past: Any = None, chunk: int | None = None) -> Tensor:
        """Return the last hidden states (rows, tokens, hidden) of all tokens, which :meth:`read` reads."""
        return torch.cat([hidden for _, hidden in self.read(ids, past, chunk)], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits (states, vocab) of states (states, hidden), as the model itself computes them."""
        return self.own_logits(hidden).float()

    def own_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits in the data type that the model computes them in."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device).expand(1, len(hidden))
        with modules_return(self.path, DecoderOutput(hidden[None].to(input_device(self.head)))):
            logits: Tensor = self.forward(input_ids=ids, use_cache=False).logits
        return logits[0]

    def check(self, way: str) -> None:
        """Raise ValueError if a way of reading gives other logits than the model itself: ``whole`` or ``pieces``."""
        share = self.difference(way)
        if share > 0:
            raise ValueError(
                f"{type(self.model).__name__} cannot be read {_WAYS[way]} (its logits change by {share:.1%} of their "
                "spread)"
            )

    def difference(self, way: str) -> float:
        """Return how much a way of reading changes the logits of a few tokens, as a share of their spread.

        It is 0 if no more is changed than rounding explains, or if the weights are not at hand.
        """
        known = _DIFFERENCES.setdefault(self.model, {})
        if way not in known and weights_at_hand(self.model):
            known[way] = 0.0  # the check itself reads in this way
            try:
                known[way] = self._measured_difference(way)
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                del known[way]
                raise ValueError(f"{type(self.model).__name__} cannot be read {_WAYS[way]} ({error})") from error
        return known.get(way, 0.0)

    @torch.no_grad()
    def _measured_difference(self, way: str) -> float:
        ids = fixed_ids(CHECKED_TOKENS, self.vocabulary)
        cut = CHECKED_TOKENS // 2
        with in_eval_mode(self.model), progress.work(0):
            states = self.states(ids)
            if way == "whole":
                expected = self.forward(input_ids=ids.to(self.device), use_cache=False).logits[0].float()
                share = _share(self.logits(states[0]), expected)
                return share if share > WHOLE_TOLERANCE else 0.0
            expected = self.logits(states[0])
            past = self.new_cache(CHECKED_TOKENS)
            # The first piece differs by rounding alone, in a causal model.
            rounding = _share(self.logits(self.states(ids[:, :cut], past)[0]), expected[:cut])
            share = _share(self.logits(self.states(ids[:, cut:], past)[0]), expected[cut:])
        coarse = rounding > PIECES_TOLERANCE or torch.finfo(states.dtype).bits < 32
        return share if share > (COARSE_TOLERANCE if coarse else PIECES_TOLERANCE) else 0.0

    def score(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Score the token that follows each state, and find the most probable one, a slice of logits at a time.

        Args:
            hidden: (states, hidden) last hidden states.
            targets: (states,) ids of the tokens that follow.

        Returns:
            The negative log-likelihood (states,) float64 [nats] and the most probable token (states,), on the CPU.
        """
        losses, best = self._score(hidden, targets, lambda logits: logits.max(-1).indices)
        return losses.cpu().double(), best.cpu()

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log-likelihood (states,) float64 [nats] alone, as :meth:`score` does."""
        return self._score(hidden, targets)[0].cpu().double()

    def _score(self, hidden: Tensor, targets: Tensor, *more: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return the losses, and what functions make of the same logits, where the states are.

        The model is asked once for a slice of states, whose logits are freed before the next is made. On a CPU what
        follows is done for a few states at a time: each larger tensor is new memory there, and to map its pages takes
        longer than to compute it. On a GPU few states would leave most of it idle.
        """
        targets = targets.to(hidden.device)
        # Written in place: small results kept between the large tensors would split the heap, slice by slice. They stay
        # where the states are until all are there, so that a GPU is waited for once.
        results = [torch.empty(len(targets), dtype=torch.float32, device=hidden.device)]
        results += [torch.empty_like(targets) for _ in more]
        slice_size = scored_at_once(len(targets), hidden.device.type)
        for low in range(0, len(targets), slice_size):
            out = self.own_logits(hidden[low : low + slice_size])
            few = rows_at_once(out)
            for start in range(0, len(out), few):
                logits = out[start : start + few].float()
                at = slice(low + start, low + start + len(logits))
                ids = targets[at].to(logits.device)
                results[0][at] = torch.nn.functional.cross_entropy(logits, ids, reduction="none")
                for result, of in zip(results[1:], more, strict=True):
                    result[at] = of(logits)
        return results


def scored_together(
    score: Callable[[Tensor, Tensor], Sequence[Tensor]], parts: Sequence[tuple[Tensor, Tensor]]
) -> list[tuple[Tensor, ...]]:
    """Score states (states, hidden) and targets (states,) of several rows in one call, and return what it gives each.

    A head reads all of its weights, even for a single state.
    """
    if not parts:
        return []
    states, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    sizes = [len(ids) for _, ids in parts]
    return list(zip(*(torch.split(values, sizes) for values in score(states, targets)), strict=True))


@torch.no_grad()
def losses(
    reader: Reader,
    rows: Tensor,
    first: Sequence[int],
    *,
    lengths: Sequence[int] | None = None,
    chunk: int | None = None,
    cache: CacheFactory | None = None,
    known: KnownStates | None = None,
) -> Tensor:
    """Score tokens of rows of equal length, or padded on the right, in one pass or in chunks through a cache.

    No mask is needed, since no token sees the padding to its right.

    Args:
        reader: the model, taken apart.
        rows: (rows, tokens) token ids, padded on the right with any id.
        first: position of the first token that is scored in each row, at least 1 [tokens].
        lengths: number of tokens of each row that are not padding; all by default.
        chunk: number of tokens in a forward pass; all by default.
        cache: factory of the cache through which rows are read; by default a ``DynamicCache`` if there are chunks.
        known: function that returns the states of a row which is read alone.

    Returns:
        The negative log-likelihood (rows, tokens) float64 [nats], at the position of the scored token; nan elsewhere.
    """
    width = rows.shape[1]
    lengths = [width] * len(rows) if lengths is None else lengths
    nll = torch.full(rows.shape, math.nan, dtype=torch.float64)
    states = known(rows[0]) if known is not None and len(rows) == 1 else None
    chunks: Iterable[tuple[int, Tensor]] = (
        [(0, states[None])] if states is not None else reader.read(rows, reader.past(width, chunk, cache), chunk)
    )
    for start, hidden in chunks:
        # The state at position p scores the token at p + 1.
        spans = [(i, max(start, first[i] - 1), min(start + hidden.shape[1], lengths[i] - 1)) for i in range(len(rows))]
        spans = [span for span in spans if span[1] < span[2]]
        parts = [(hidden[i, low - start : high - start], rows[i, low + 1 : high + 1]) for i, low, high in spans]
        found = scored_together(lambda *asked: [reader.losses(*asked)], parts)
        for (i, low, high), (loss,) in zip(spans, found, strict=True):
            nll[i, low + 1 : high + 1] = loss
    return nll


def _share(logits: Tensor, expected: Tensor) -> float:
    """Return the root mean square of a difference as a share of a standard deviation; what is masked does not count."""
    error = (logits - expected).nan_to_num(0.0, 0.0, 0.0)
    return float(error.square().mean().sqrt() / expected.nan_to_num(0.0, 0.0, 0.0).std())


def fixed_ids(tokens: int, vocabulary: int) -> Tensor:
    """Return token ids (1, tokens) that are the same at every call; a prime spreads them over the vocabulary."""
    return torch.arange(tokens)[None] * 7919 % vocabulary


def weights_at_hand(model: PreTrainedModel) -> bool:
    """Tell whether a model can compute numbers: its weights are no placeholders, or are loaded as they are needed."""
    weight: Any = model.get_input_embeddings().weight
    loaded = not weight.is_meta or hasattr(model, "_hf_hook")
    return loaded and not isinstance(weight, FakeTensor) and not hasattr(weight, "ds_id")


def input_device(module: nn.Module) -> torch.device:
    """Return the device on which a module takes its inputs: that of its weights, or where accelerate will move them."""
    hook: Any = getattr(module, "_hf_hook", None)
    for each in (hook, *getattr(hook, "hooks", ())):
        if getattr(each, "execution_device", None) is not None:
            return torch.device(each.execution_device)
    device: torch.device = module.weight.device  # type: ignore[assignment]
    return device


def _call(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return part(*args, **kwargs)


def _sharded_root(model: nn.Module) -> Any:
    """Return the outermost module that FSDP2 shards; None if there is none."""
    # Not imported, which is slow: if nobody has imported it, nothing is sharded.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return next(
        (module for module in model.modules() if fsdp is not None and isinstance(module, fsdp.FSDPModule)), None
    )


def _through(root: Any) -> Callable[..., Any]:
    """Return a function that calls the parts of a model that FSDP2 shards, as a forward pass of the root.

    The root gathers and casts the weights that belong to no sharded layer, and the first of all passes must be its own.
    """
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    root._rope_patch_call = _call
    fsdp.register_fsdp_forward_method(root, "_rope_patch_call")
    # FSDP2 wraps a method in place; the wrapped one is taken off the root again, so that the model is as it was.
    call: Callable[..., Any] = root.__dict__.pop("_rope_patch_call")
    return call


def _is_dynamic(model: nn.Module) -> bool:
    if any(isinstance(module, PatchedRotary) for module in model.modules()):
        return False  # a patched table never changes with the length
    config: Any = model.config
    parameters: Any = getattr(config.get_text_config(), "rope_parameters", None) or {}
    several = [item for item in parameters.values() if isinstance(item, Mapping)]
    return any(changes_with_length(item) for item in several or [parameters] if "rope_type" in item)


def model_name(model: nn.Module) -> str:
    """Return the name of a model in its config, without the folder that it is in."""
    config: Any = model.config
    return str(getattr(config, "name_or_path", "") or "").rstrip("/").rpartition("/")[2]
