"""Where the heads of a model attend: masses by distance, sinks, induction, and how near logits come to their bound.

A pass of its own, since no fused kernel returns its weights. The model attends through a function of this module, which
computes weights a block of queries at a time, reduces them, and goes on with the same weights: the pass costs one
forward with unfused attention, and memory for one block, never ``(heads, tokens, tokens)``.

*Source*: Barbero et al., arXiv:2410.06205, sec. 4 and 5 and tables 3-5, for diagonal, previous-token and
"apostrophe" heads and for the Cauchy-Schwarz bound; Gu et al., arXiv:2410.10781, for sinks; Olsson et al.,
arXiv:2209.11895, for induction (their prefix matching).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.sources import attending_with, layers_text, refuse_prompts, window_alone, window_of
from rope_patch.modeling.statistics import read_arrays, write_arrays
from rope_patch.modeling.streaming import text_digest, token_rows
from rope_patch.patching.locate import device_of, find_rotary

SCHEMA = "heads 1"

NAME = "rope_patch_masses"
OFFSETS = 8
"""Distances whose mass is kept one by one [tokens]."""
SETTLED = 8
"""Queries from this position on are counted: before, every key is near and first at once [tokens]."""
FAR = 8
"""A key counts as a sink by what it draws from this far and farther [tokens]."""
SINK = 0.3
"""Mean weight above which a key is a sink, as Gu et al. have it."""
MAJORITY = 0.5
"""A head has a habit when this share of its attention follows it."""
FEW = 3
"""Tokens that must each draw the one after them, for a head to have that habit; hundreds of tokens are looked at."""
OFTEN = 8
"""Times a token must occur to tell what it draws."""
REPEATED = 64
"""Longest half of the random tokens that come twice: short, so that layers of a small window see it too [tokens]."""
TOP = 4
"""Sinks and triggers kept per head."""
BLOCK_BYTES = 1 << 26
"""Weights of one block of queries."""
REPRODUCED = 1e-3
"""How closely the pass must give what the model gives, relative to it; 16-bit models are allowed 50 times as much."""


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """Where the heads of one layer attend. Tensors are float64 on the CPU; means are over the queries counted.

    Attributes:
        index: of the layer.
        offset_mass: (heads, offsets) mean weight on the key at each distance, 0 for the query's own.
        first_mass: (heads,) mean weight on the first token, over the queries that see it.
        sink_mass: (heads,) mean weight on all sinks together.
        sink_position: (heads, top) keys that draw most from afar, most first [tokens]; -1 where there are no more.
        sink_token: (heads, top) token ids there.
        sink_row: (heads, top) row of the text.
        sink_weight: (heads, top) mean weight they draw from queries at least ``FAR`` tokens behind them.
        induction_mass: (heads,) mean weight on keys whose previous token equals the query's token, over the queries
            that have any; nan when none has.
        induction_chance: () what even attention would put there.
        repeated_mass: (heads,) the same on random tokens twice in a row, where nothing but induction can know what
            follows; nan when the text is too short for it: a match at most ``OFFSETS`` back could be a matter of
            distance.
        trigger_token: (heads, top) tokens that draw the query right after them most; -1 where there are no more.
        trigger_mass: (heads, top) mean weight they draw from it.
        trigger_count: (heads, top) how often they occur.
        distance: (heads,) mean distance of attention [tokens].
        entropy: (heads,) mean entropy of the weights [nats].
        logit: (heads, 2) mean logit with the query's own key and with the previous one, before soft-capping; over all
            queries, as the next two.
        bound: (heads, 2) mean of the Cauchy-Schwarz bound on it, ``scaling ‖q‖ ‖k‖``.
        cosine: (heads, 2) mean of their ratio.
    """

    index: int
    offset_mass: Tensor
    first_mass: Tensor
    sink_mass: Tensor
    sink_position: Tensor
    sink_token: Tensor
    sink_row: Tensor
    sink_weight: Tensor
    induction_mass: Tensor
    induction_chance: Tensor
    repeated_mass: Tensor
    trigger_token: Tensor
    trigger_mass: Tensor
    trigger_count: Tensor
    distance: Tensor
    entropy: Tensor
    logit: Tensor
    bound: Tensor
    cosine: Tensor

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return len(self.first_mass)

    def habits(self, head: int, *, majority: float = MAJORITY) -> tuple[str, ...]:
        """Return what a head does with most of its attention.

        ``"diagonal"``, ``"previous token"``, ``"2 back"`` …, ``"first token"``, ``"sink"`` (sinks together, where the
        first token alone is not enough), ``"induction"`` (on the text, less what chance puts there, or on repeated
        tokens), ``"after a token"`` (the previous token, but only after certain ones: Barbero et al.'s apostrophe
        heads).

        Args:
            head: query head.
            majority: share of attention that makes a habit.
        """
        made = [
            name for name, mass in zip(_offset_names(self.offset_mass.shape[1]), self.offset_mass[head], strict=True)
            if float(mass) >= majority
        ]  # fmt: skip
        if float(self.first_mass[head]) >= majority:
            made.append("first token")
        elif float(self.sink_mass[head]) >= majority:
            made.append("sink")
        on_text = self.induction_mass[head] - self.induction_chance
        if max(float(on_text.nan_to_num()), float(self.repeated_mass[head].nan_to_num())) >= majority:
            made.append("induction")
        rests = bool({"first token", "sink"} & set(made))
        drawn = self.trigger_mass[head, : 1 if rests else FEW]  # one token is enough for a head that else rests
        looks_there = "diagonal" in made or float(self.offset_mass[head, 1]) >= majority / 5
        if not looks_there and bool((drawn >= majority).all()):
            made.append("after a token")
        return tuple(made)


@dataclass(frozen=True, eq=False)
class Heads:
    """Where the heads of a model attend on a text.

    Attributes:
        model: class name.
        tokens: read in all.
        rows: texts read.
        text: 16 hex digits that identify the token ids.
        layers: those measured, in order.
    """

    model: str
    tokens: int
    rows: int
    text: str
    layers: tuple[LayerHeads, ...]

    def positional(self, *, majority: float = MAJORITY) -> list[tuple[int, int, tuple[str, ...]]]:
        """Return layer, head and habits of every head whose attention follows distance, in order."""
        return [
            (layer.index, head, habits)
            for layer in self.layers
            for head in range(layer.heads)
            if set(_offset_names(layer.offset_mass.shape[1])) & set(habits := layer.habits(head, majority=majority))
        ]

    def layer(self, index: int) -> LayerHeads:
        """Return a layer by its index in the model.

        Raises:
            ValueError: a layer that was not measured.
        """
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise ValueError(f"layers {[layer.index for layer in self.layers]} were measured, got {index}")

    def to_npz(self, path: str | Path) -> None:
        """Write everything to one ``.npz`` of plain arrays, ``layer3.offset_mass`` and the like, no pickle in it.

        Raises:
            OSError: the folder cannot be written; nothing is left behind.
        """
        outline = {name: getattr(self, name) for name in ("model", "tokens", "rows", "text")}
        outline |= {"schema": SCHEMA, "layers": [layer.index for layer in self.layers]}
        arrays = {f"layer{layer.index}.{name}": getattr(layer, name) for layer in self.layers for name in _ARRAYS}
        write_arrays(path, outline, arrays)

    @classmethod
    def from_npz(cls, path: str | Path) -> Heads:
        """Read what :meth:`to_npz` wrote.

        Raises:
            ValueError: a file of another kind or version.
        """
        outline, arrays = read_arrays(path, SCHEMA)
        layers = [
            LayerHeads(index=index, **{name: arrays[f"layer{index}.{name}"] for name in _ARRAYS})
            for index in outline.pop("layers")
        ]
        return cls(**outline, layers=tuple(layers))


_ARRAYS = tuple(item.name for item in fields(LayerHeads) if item.name != "index")


@torch.no_grad()
def masses(
    model: nn.Module,
    token_ids: Tensor,
    *,
    offsets: int = OFFSETS,
    layers: Sequence[int] | None = None,
    block: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Heads:
    """Measure where the heads of a model attend on a text.

    Args:
        model: a causal language model of transformers, patched or not, bare or under a LoRA adapter. It is in eval mode
            meanwhile, and left as it was.
        token_ids: (tokens,) or (rows, tokens), at least 2 tokens; rows are texts of their own, read one by one.
        offsets: distances whose mass is kept one by one, at least 2.
        layers: indices of the layers to measure; all by default.
        block: queries at a time; by default as many as ``BLOCK_BYTES`` of weights allow.
        progress: told of tokens as they have been read, in parts of a text as its layers are done.

    Returns:
        Masses, sinks and bounds, by layer.

    Raises:
        TypeError: not a transformers model.
        ValueError: fewer than 2 tokens, ids the model does not know, a layer it does not have; a model without rotary
            table, or whose attention this pass does not reproduce (learned sinks, biases or masks of its own); an
            adapter that puts tokens of its own before the text; NaN or infinite logits, by layer and head.
    """
    if offsets < 2 or (block is not None and block < 1):
        raise ValueError(f"offsets must be >= 2 and block >= 1, got {offsets} and {block}")
    rows = token_rows(token_ids)
    refuse_prompts(model)
    root: Any = find_rotary(model).model
    vocabulary = root.get_input_embeddings().num_embeddings
    if int(rows.min()) < 0 or int(rows.max()) >= vocabulary:
        raise ValueError(f"token ids must be in [0, {vocabulary}), got {int(rows.min())} to {int(rows.max())}")
    total = root.config.get_text_config().num_hidden_layers
    if layers is not None and (not layers or not all(0 <= index < total for index in layers)):
        raise ValueError(f"{type(root).__name__} has attention layers {layers_text(range(total))}, got {list(layers)}")
    decoder = root.get_decoder() if hasattr(root, "get_decoder") else root
    device = device_of(root.get_input_embeddings())
    study = _Study(rows, offsets, block, layers, progress, total)
    repeated = _Study(repeated_tokens(rows)[None], offsets, block, layers, None, total)
    with in_eval_mode(model):
        _check_reproduced(root, decoder, rows[0, :64].to(device))
        with attending_with(root, NAME):
            for some in (study, repeated):
                reset = _STUDY.set(some)
                try:
                    for number, row in enumerate(some.rows):
                        some.begin(number)
                        decoder(input_ids=row[None].to(device), use_cache=False)
                        some.end()
                finally:
                    _STUDY.reset(reset)
    measured = tuple(study.tallies[index].result() for index in sorted(study.tallies))
    if repeated.rows.shape[1] > 2 * OFFSETS:
        measured = tuple(
            replace(layer, repeated_mass=repeated.tallies[layer.index].result().induction_mass) for layer in measured
        )
    return Heads(type(root).__name__, rows.numel(), len(rows), text_digest(rows), measured)


def repeated_tokens(rows: Tensor, *, longest: int = REPEATED, seed: int = 0) -> Tensor:
    """Return tokens of a text in random order, twice in a row: (2 length,). No token occurs twice in a half.

    Induction alone can know what follows there.

    Args:
        rows: (rows, tokens) the text; both halves together are no longer than a row.
        longest: half [tokens].
        seed: of the draw.
    """
    known = torch.unique(rows)
    order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
    half = known[order[: min(longest, max(1, rows.shape[1] // 2))]]
    return torch.cat((half, half))


# --- the attention ---------------------------------------------------------------------------------------------------


class _Study:
    """What a pass is after, and where it stands."""

    def __init__(
        self,
        rows: Tensor,
        offsets: int,
        block: int | None,
        layers: Sequence[int] | None,
        progress: Callable[[int], None] | None,
        total: int,
    ) -> None:
        self.rows, self.offsets, self.block, self.layers = rows, offsets, block, layers
        self.progress, self.total = progress, total
        self.start = min(SETTLED, rows.shape[1] // 2)
        self.ids, self.codes = torch.unique(rows, return_inverse=True)
        self.tallies: dict[int, _Tally] = {}

    def begin(self, row: int) -> None:
        self.row, self.done, self.told = row, set[int](), 0

    def end(self) -> None:
        missing = set(range(self.total) if self.layers is None else self.layers) - self.done
        if missing:
            raise ValueError(
                f"layers {layers_text(sorted(missing))} did not attend through transformers' AttentionInterface: where "
                "they attend cannot be seen"
            )
        self._tell(self.rows.shape[1])

    def tally(self, module: nn.Module, heads: int) -> _Tally | None:
        """Return where a layer's weights are to be added up; None if they are not wanted."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        self._tell(self.rows.shape[1] * len(self.done) // self.total)
        if index in self.done:
            raise ValueError(f"attention layer {index} is called more than once in a pass")
        self.done.add(index)
        if self.layers is not None and index not in self.layers:
            return None
        if index not in self.tallies:
            self.tallies[index] = _Tally(index, heads, self)
        self.tallies[index].begin()
        return self.tallies[index]

    def _tell(self, tokens: int) -> None:
        if self.progress is not None and tokens > self.told:
            self.progress(tokens - self.told)
        self.told = max(self.told, tokens)


_STUDY: ContextVar[_Study | None] = ContextVar("_STUDY", default=None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally, a block of queries at a time, and add up the weights on the way; see AttentionInterface."""
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}: this pass knows logits of q·k alone")
    study = _STUDY.get()
    heads, tokens, head_dim = query.shape[1:]  # one row at a time
    tally = None if study is None else study.tally(module, heads)
    key_heads = key.shape[1]
    scaling = scaling or head_dim**-0.5
    window = window_of(attention_mask) or tokens
    block = study.block if study and study.block else max(16, min(512, BLOCK_BYTES // (4 * heads * tokens)))
    out = torch.empty(1, tokens, heads, value.shape[-1], dtype=value.dtype, device=value.device)
    queries, keys, values = query[0].float(), key[0].float(), value[0].float()
    places = torch.arange(tokens, device=query.device)
    for start in range(0, tokens, block):
        stop = min(start + block, tokens)
        low = max(0, start - window + 1)
        some = queries[:, start:stop]
        grouped = some.reshape(key_heads, -1, head_dim)  # the queries that share a key head, one after the other
        logits = (grouped @ keys[:, low:stop].mT).view(heads, stop - start, stop - low) * scaling
        apart = places[start:stop, None] - places[low:stop]
        hidden = (apart < 0) | (apart >= window)
        capped = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        weights = capped.masked_fill(hidden, -torch.inf).softmax(-1)
        if tally is not None:
            tally.add(some, keys[:, low:stop], scaling, logits, weights, apart, hidden, start, low)
        done = weights.view(key_heads, -1, stop - low) @ values[:, low:stop]
        out[0, start:stop] = done.view(heads, stop - start, -1).transpose(0, 1).to(value.dtype)
    if tally is not None:
        tally.end()
    return out, None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, window_alone)


def _check_reproduced(root: Any, decoder: nn.Module, ids: Tensor) -> None:
    """Raise unless a pass through :func:`_attend` gives what the model gives."""
    if "chunked_attention" in (getattr(root.config.get_text_config(), "layer_types", None) or ()):
        raise ValueError(
            f"{type(root).__name__} attends within chunks: this pass knows causal and sliding layers alone"
        )

    def read() -> Tensor:
        out: Tensor = decoder(input_ids=ids[None], use_cache=False)[0]
        return out.float()

    stock = read()
    with attending_with(root, NAME):
        ours = read()
    allowed = REPRODUCED * (50 if root.dtype in (torch.float16, torch.bfloat16) else 1)
    off = float((ours - stock).norm() / stock.norm())
    if torch.isfinite(stock).all() and not off <= allowed:
        raise ValueError(
            f"{type(root).__name__} attends in a way of its own: a causal softmax of q·k gives states that are off by "
            f"{off:.2g}, at most {allowed:g} is allowed"
        )


# --- sums ------------------------------------------------------------------------------------------------------------


class _Tally:
    """Sums over the weights of one layer."""

    def __init__(self, index: int, heads: int, study: _Study) -> None:
        self.index, self.heads, self.study = index, heads, study
        self.offset = self._zeros(heads, study.offsets)
        self.offset_count = [0] * study.offsets
        self.first, self.first_count = self._zeros(heads), 0
        self.distance, self.entropy, self.queries = self._zeros(heads), self._zeros(heads), 0
        self.induction, self.even, self.matched = self._zeros(heads), 0.0, 0
        self.near = self._zeros(3, heads, 2)  # logit, bound, ratio
        self.near_count = [0, 0]
        self.after = self._zeros(heads, len(study.ids))
        self.after_count = torch.zeros(len(study.ids), dtype=torch.float64)
        self.sink_sum = self._zeros(heads)
        self.sinks: list[tuple[Tensor, Tensor, Tensor]] = []  # weight, position, row: (heads, top) of each row

    @staticmethod
    def _zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.float64)

    def begin(self) -> None:
        """Begin a row."""
        tokens = self.study.rows.shape[1]
        self.far, self.all = self._zeros(self.heads, tokens), self._zeros(self.heads, tokens)
        self.far_count = torch.zeros(tokens, dtype=torch.float64)
        self.row_queries = 0

    def add(
        self,
        query: Tensor,
        key: Tensor,
        scaling: float,
        logits: Tensor,
        weights: Tensor,
        apart: Tensor,
        hidden: Tensor,
        start: int,
        low: int,
    ) -> None:
        """Add a block of queries: weights (heads, queries, keys) of keys from ``low`` on, queries from ``start`` on."""
        wrong = ~(torch.isfinite(logits) | hidden)
        if bool(wrong.any()):
            head, at = wrong.nonzero()[0, :2].tolist()
            raise ValueError(
                f"layer {self.index}, query head {head} has logits that are no finite numbers at position "
                f"{start + at}: statistics need finite states"
            )
        ids = self.study.rows[self.study.row].to(weights.device)
        self._add_bound(query, key, scaling, logits, start, low)
        skip = max(self.study.start - start, 0)
        if skip >= weights.shape[1]:
            return
        weights, logits, apart, hidden = weights[:, skip:], logits[:, skip:], apart[skip:], hidden[skip:]
        start += skip
        stop = start + weights.shape[1]
        queries = stop - start
        self.queries += queries
        self.row_queries += queries
        for offset in range(self.study.offsets):
            if start - low - offset > -queries:
                self.offset[:, offset] += _sum(weights.diagonal(start - low - offset, 1, 2))
                self.offset_count[offset] += int((~hidden).diagonal(start - low - offset).sum())
        if low == 0:
            seen = ~hidden[:, 0]
            self.first += _sum(weights[:, seen, 0])
            self.first_count += int(seen.sum())
        self.distance += _sum(torch.einsum("hqk,qk->hq", weights, apart.to(weights.dtype)))
        self.entropy += _sum(torch.special.entr(weights).sum(-1))
        # Keys whose previous token is the query's own token; the query itself does not count.
        match = torch.zeros_like(hidden)
        match[:, max(0, 1 - low) :] = ids[start:stop, None] == ids[max(low, 1) - 1 : stop - 1]
        match &= ~hidden & (apart > 0)
        any_match = match.any(-1)
        self.induction += _sum(torch.einsum("hqk,qk->hq", weights, match.to(weights.dtype))[:, any_match])
        visible = (~hidden).sum(-1)
        self.even += float((match.sum(-1) / visible)[any_match].sum())
        self.matched += int(any_match.sum())
        # The query right after each token.
        if start - low - 1 > -queries:
            previous = weights.diagonal(start - low - 1, 1, 2)
            codes = self.study.codes[self.study.row][stop - 1 - previous.shape[1] : stop - 1]
            self.after.index_add_(1, codes, previous.cpu().double())
            self.after_count.index_add_(0, codes, torch.ones(len(codes), dtype=torch.float64))
        far = (apart >= FAR) & ~hidden
        self.far[:, low:stop] += torch.einsum("hqk,qk->hk", weights, far.to(weights.dtype)).cpu().double()
        self.far_count[low:stop] += far.sum(0).cpu().double()
        self.all[:, low:stop] += weights.sum(1).cpu().double()

    def _add_bound(self, query: Tensor, key: Tensor, scaling: float, logits: Tensor, start: int, low: int) -> None:
        """Add logits and their Cauchy-Schwarz bound for the query's own key and the previous one."""
        lengths = key.norm(dim=-1).repeat_interleave(self.heads // len(key), 0)
        for offset in (0, 1):
            if start - low - offset <= -logits.shape[1]:
                continue
            line = logits.diagonal(start - low - offset, 1, 2)
            stop = start + logits.shape[1] - low - offset  # of the keys
            bound = query[:, -line.shape[1] :].norm(dim=-1) * lengths[:, stop - line.shape[1] : stop] * scaling
            cosine = torch.where(bound > 0, line / bound.clamp_min(torch.finfo(bound.dtype).tiny), 0.0)
            self.near[:, :, offset] += torch.stack([_sum(part) for part in (line, bound, cosine)])
            self.near_count[offset] += line.shape[1]

    def end(self) -> None:
        """End a row: keep its sinks."""
        row = self.study.row
        draws = self.far / self.far_count.clamp_min(1)
        draws[:, self.far_count < max(FAR, float(self.far_count.max()) / 4)] = 0.0  # too few to tell
        self.sink_sum += torch.where(draws > SINK, self.all, 0.0).sum(1)
        weight, position = draws.topk(min(TOP, draws.shape[1]))
        self.sinks.append((weight, position, torch.full_like(position, row)))
        if len(self.sinks) > 1:
            weight, position, of = (torch.cat(parts, 1) for parts in zip(*self.sinks, strict=True))
            weight, keep = weight.topk(min(TOP, weight.shape[1]))
            self.sinks = [(weight, position.gather(1, keep), of.gather(1, keep))]
        del self.far, self.all, self.far_count

    def result(self) -> LayerHeads:
        """Return the means."""
        ((weight, position, row),) = self.sinks
        drawn = weight > 0
        token = self.study.rows[row, position]
        often = self.after_count >= OFTEN
        mass = torch.where(often, self.after / self.after_count.clamp_min(1), 0.0)
        trigger_mass, at = mass.topk(min(TOP, mass.shape[1]))
        told = trigger_mass > 0
        counts = torch.tensor(self.offset_count, dtype=torch.float64)
        logit, bound, cosine = self.near / torch.tensor(self.near_count, dtype=torch.float64).clamp_min(1)
        nothing = torch.full((self.heads,), torch.nan, dtype=torch.float64)
        return LayerHeads(
            index=self.index,
            offset_mass=self.offset / counts.clamp_min(1),
            first_mass=self.first / max(self.first_count, 1),
            sink_mass=self.sink_sum / self.queries,
            sink_position=position.masked_fill(~drawn, -1),
            sink_token=token.masked_fill(~drawn, -1),
            sink_row=row.masked_fill(~drawn, -1),
            sink_weight=weight,
            induction_mass=self.induction / self.matched if self.matched else nothing,
            induction_chance=torch.tensor(self.even / max(self.matched, 1), dtype=torch.float64),
            repeated_mass=nothing,
            trigger_token=self.study.ids[at].masked_fill(~told, -1),
            trigger_mass=trigger_mass,
            trigger_count=self.after_count[at].long().masked_fill(~told, 0),
            distance=self.distance / self.queries,
            entropy=self.entropy / self.queries,
            logit=logit,
            bound=bound,
            cosine=cosine,
        )


def _sum(values: Tensor) -> Tensor:
    """Sums over all but the first dimension, in float64 on the CPU."""
    return values.flatten(1).sum(1, dtype=torch.float32).cpu().double()


def _offset_names(offsets: int) -> list[str]:
    return ["diagonal", "previous token", *(f"{offset} back" for offset in range(2, offsets))][:offsets]
