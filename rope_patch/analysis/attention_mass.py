"""Measure where the heads of a model attend while it reads: attention mass by distance, sinks, induction.

No fused kernel returns its weights, and none of these numbers needs all of them. Attended values, the sums of
exponentials and what each key draws come from fused kernels; the weights near a query, on the first key and on the
key that induction finds are computed one by one from the sums. Sliding windows and soft caps, which no kernel here
knows, and states that no kernel takes, are read a block of queries at a time. Nothing is as large as ``(heads, tokens,
tokens)``.

*Source*: Barbero et al., arXiv:2410.06205, sec. 4 and 5, for diagonal and previous-token heads; Gu et al.,
arXiv:2410.10781, for sinks; Olsson et al., arXiv:2209.11895, for induction (their prefix matching).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rope_patch.analysis.heads import (
    FIRST_COUNTED_QUERY,
    OFFSETS,
    SINK_DISTANCE,
    SINK_WEIGHT,
    SINKS_PER_HEAD,
    Heads,
    LayerHeads,
)
from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.modeling.attention import attend_fused
from rope_patch.modeling.attention_probe import window_alone, window_of
from rope_patch.modeling.devices import device_of_sums, on_cpu
from rope_patch.modeling.inputs import check_ids, refuse_prompts, token_rows
from rope_patch.modeling.read_at_once import LARGE_WEIGHTS_BLOCK_BYTES, WEIGHTS_BLOCK_BYTES
from rope_patch.modeling.temporary_modes import attending_with, attention_state, in_eval_mode
from rope_patch.modeling.visit_states import run_decoder
from rope_patch.patching.locate import device_of, locate
from rope_patch.runtime import progress

ATTENTION_NAME = "rope_patch_attention_mass"
REPEATED_TOKENS = 64
"""Longest half of the random tokens that come twice: short, so that layers of a small window see it too [tokens]."""
REPRODUCED_SHARE = 0.75
"""Share of the tokens whose states have to be reproduced."""
STATE_TOLERANCE = 1e-3
"""How closely the pass must give the states of these tokens, relative to them; 16-bit models are allowed 50 times as
much."""
TINY = 1e-9
MOST_QUERIES = 512
"""Greatest number of queries whose weights are computed at one time."""


def measure_heads(model: nn.Module, token_ids: Tensor) -> Heads:
    """Measure where the heads of a model attend on a text, in a pass of their own.

    Args:
        model: a causal language model of transformers, as for :func:`measuring_heads`.
        token_ids: (tokens,) or (rows, tokens) the text, at least 2 tokens; rows are texts of their own.

    Returns:
        Attention masses and sinks, by layer.

    Raises:
        TypeError, ValueError: the model or the text is wrong, as for :func:`measuring_heads`; or there are logits that
            are no finite numbers, which the message names by layer and head.
    """
    rows = token_rows(token_ids)
    with measuring_heads(model, rows) as sums:
        run_decoder(model, rows)
    return sums.result()


@contextlib.contextmanager
def measuring_heads(model: nn.Module, rows: Tensor) -> Iterator[HeadSums]:
    """Measure where the heads of a model attend while it reads rows of text in a ``with`` block, in order.

    After the block the model reads a few random tokens, twice in a row.

    Args:
        model: a causal language model of transformers, patched or not, bare or under a LoRA adapter.
        rows: (rows, tokens) the token ids that are read.

    Raises:
        TypeError: the model is not one of transformers.
        ValueError: ids the model does not know; a model whose attention this does not reproduce (biases or masks of its
            own); an adapter that puts tokens of its own before the text.
    """
    refuse_prompts(model)
    root: Any = locate(model).model
    embedding = root.get_input_embeddings()
    check_ids(rows, embedding.num_embeddings)
    count = root.config.get_text_config().num_hidden_layers
    sums = HeadSums(rows, count)
    repeated = repeated_tokens(rows)[None]
    on_repeated = HeadSums(repeated, count, is_repeated=True)
    with in_eval_mode(model), torch.no_grad():
        # A model whose attention is another shows it on 64 tokens, before the whole text is read.
        _check_reproduced(root, decoder_path(root)[0], rows[0, :64].to(device_of(embedding)))
    with attending_with(root, ATTENTION_NAME, sums):
        yield sums
    with attending_with(root, ATTENTION_NAME, on_repeated), progress.work(0):
        run_decoder(model, repeated)
    # In a shorter text the token to be found is among the nearest keys, where a head may attend by distance alone.
    if repeated.shape[1] > 2 * OFFSETS:
        sums.repeated = on_repeated


def repeated_tokens(rows: Tensor) -> Tensor:
    """Return tokens of a text in random order, twice in a row: (2 length,). No token occurs twice in a half.

    Induction alone can know what follows there.

    Args:
        rows: (rows, tokens) the text; both halves together are no longer than a row.
    """
    different = torch.unique(rows)
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(0))
    half = different[order[: min(REPEATED_TOKENS, max(1, rows.shape[1] // 2))]]
    return torch.cat((half, half))


# --- the attention ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Logits:
    """How a layer makes logits of queries and keys.

    Attributes:
        scaling: factor on q·k.
        softcap: bound of the scaled logits; None if there is none.
        window: number of tokens that a query sees [tokens].
    """

    scaling: float
    softcap: float | None
    window: int

    def of(self, products: Tensor) -> Tensor:
        """Return the logits of products q·k."""
        logits = products * self.scaling
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True, eq=False)
class _Attended:
    """What the queries of a text attend to, without their weights.

    Attributes:
        values: (heads, tokens, width) the attended values.
        logsum: (heads, tokens) the logarithm of the sum of exponentials, that of a learned sink included.
        given: (heads, tokens) the weight that each query gives to keys: 1, or less where a learned sink takes some.
        logit: (heads, tokens) the sum over keys of weight × logit.
        given_far: (heads, tokens) the weight that each counted query gives to keys that are far behind it, by
            ``SINK_DISTANCE`` tokens or more.
        drawn_far: (heads, tokens) the weight that each key draws from these queries together.
    """

    values: Tensor
    logsum: Tensor
    given: Tensor
    logit: Tensor
    given_far: Tensor
    drawn_far: Tensor


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
    """Attend causally, and add up on the way where; see AttentionInterface."""
    if kwargs.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} attends with position_bias: this pass knows logits of q·k alone")
    sums: HeadSums = attention_state(module)
    heads, tokens, width = query.shape[1:]  # without the dimension of rows, which are read one at a time
    logits = _Logits(scaling or width**-0.5, softcap, min(window_of(attention_mask) or tokens, tokens))
    sinks = kwargs.get("s_aux")  # a logit of each head that has no key, as gpt-oss learns it
    if sinks is not None:
        sinks = sinks.float()[:, None]
    dtype = value.dtype
    if query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
    key, value = (state.repeat_interleave(heads // state.shape[1], 1) for state in (key, value))
    attended = None
    if softcap is None and logits.window == tokens:
        attended = _by_kernels(query, key, value, logits.scaling, sinks, sums.first_query)
    query, key, value = (state[0].float() for state in (query, key, value))
    if attended is None:
        attended = _by_blocks(query, key, value, logits, sinks, sums.first_query)
    index = int(module.layer_idx)  # type: ignore[arg-type]
    sums.layer(index, logits.window).add(query, key, attended, logits)
    return attended.values.transpose(0, 1)[None].to(dtype), None


def _by_kernels(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, sinks: Tensor | None, first: int
) -> _Attended | None:
    """Attend to all keys before each query by fused kernels; None if none takes the states.

    What a key draws is the gradient of its value: that of the sum of the first attended feature over all queries. It is
    that of far queries alone, since in 16 bits the small rest that a key draws from afar would be lost beside what it
    draws from near ones.

    Args:
        query: (1, heads, tokens, width) the queries.
        key: (1, heads, tokens, width) the keys.
        value: (1, heads, tokens, head_dim) the values.
        scaling: factor on q·k.
        sinks: (heads, 1) a logit of each head that has no key; None if there is none.
        first: position of the first query that is counted [tokens].
    """
    heads, tokens, _ = query.shape[1:]
    width = value.shape[-1]
    padded = nn.functional.pad(value, (0, max(0, query.shape[-1] - width)))
    part = attend_fused(query, key, padded, scaling, causal=True)
    mean_key = attend_fused(query, key, key, scaling, causal=True)
    if part is None or mean_key is None:
        return None
    logsum = part[1][0, ..., 0]
    total = logsum if sinks is None else torch.logaddexp(logsum, sinks)
    given = (logsum - total).exp()
    given_far = query.new_zeros(heads, tokens, dtype=torch.float32)
    drawn_far = torch.zeros_like(given_far)
    if tokens > SINK_DISTANCE:
        # Shifted against each other, so that a query sees the keys that are far behind it.
        with torch.inference_mode(False), torch.enable_grad():
            shifted = (query[:, :, SINK_DISTANCE:], key[:, :, :-SINK_DISTANCE], padded[:, :, :-SINK_DISTANCE])
            states = [state.clone() if state.is_inference() else state.detach() for state in shifted]
            far = attend_fused(states[0], states[1], states[2].requires_grad_(), scaling, causal=True)
            assert far is not None
            share = (far[1].detach()[0, ..., 0] - total[:, SINK_DISTANCE:]).exp().to(value.dtype)
            share[:, : max(0, first - SINK_DISTANCE)] = 0
            counted = torch.zeros_like(far[0])
            counted[0, :, :, 0] = share
            (drawn,) = torch.autograd.grad(far[0], states[2], counted)
        given_far[:, SINK_DISTANCE:] = share
        drawn_far[:, :-SINK_DISTANCE] = drawn[0, :, :, 0]
    return _Attended(
        values=part[0][0, :, :, :width] * given[..., None],
        logsum=total,
        given=given,
        logit=torch.linalg.vecdot(query[0].float(), mean_key[0][0].float()) * scaling * given,
        given_far=given_far,
        drawn_far=drawn_far,
    )


def _by_blocks(
    query: Tensor, key: Tensor, value: Tensor, logits: _Logits, sinks: Tensor | None, first: int
) -> _Attended:
    """Attend a block of queries at a time, by their weights; the arguments are those of :func:`_by_kernels`."""
    heads, tokens, _ = query.shape
    bytes_at_once = WEIGHTS_BLOCK_BYTES.get(query.device.type, LARGE_WEIGHTS_BLOCK_BYTES)
    bytes_of_query = 4 * heads * min(tokens, logits.window + MOST_QUERIES)  # float32
    size = max(1, min(MOST_QUERIES, bytes_at_once // bytes_of_query))
    places = torch.arange(tokens, device=query.device)
    attended = _Attended(
        values=torch.empty(*query.shape[:2], value.shape[-1], device=query.device),
        logsum=torch.empty(query.shape[:2], device=query.device),
        given=torch.empty(query.shape[:2], device=query.device),
        logit=torch.empty(query.shape[:2], device=query.device),
        given_far=torch.empty(query.shape[:2], device=query.device),
        drawn_far=torch.zeros(query.shape[:2], device=query.device),
    )
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        # The first key within the window of the block's first query: keys before it are not even multiplied.
        low = max(0, start - logits.window + 1)
        distance = places[start:stop, None] - places[low:stop]
        hidden = (distance < 0) | (distance >= logits.window)
        block = logits.of(query[:, start:stop] @ key[:, low:stop].mT)
        logsum = block.masked_fill(hidden, -torch.inf).logsumexp(-1)
        if sinks is not None:
            logsum = torch.logaddexp(logsum, sinks)
        weights = (block - logsum[..., None]).exp().masked_fill(hidden, 0.0)
        attended.values[:, start:stop] = weights @ value[:, low:stop]
        attended.logsum[:, start:stop] = logsum
        attended.given[:, start:stop] = weights.sum(-1)
        attended.logit[:, start:stop] = torch.linalg.vecdot(weights, block)
        weights = weights.masked_fill((distance < SINK_DISTANCE) | (places[start:stop, None] < first), 0.0)
        attended.given_far[:, start:stop] = weights.sum(-1)
        attended.drawn_far[:, low:stop] += weights.sum(1)
    return attended


AttentionInterface.register(ATTENTION_NAME, _attend)
AttentionMaskInterface.register(ATTENTION_NAME, window_alone)


# --- the sums --------------------------------------------------------------------------------------------------------


class HeadSums:
    """Running sums over the attention of all layers, while rows of text are read, see :func:`measuring_heads`.

    Args:
        rows: (rows, tokens) the token ids of the text.
        count: the number of layers of the model.
        is_repeated: whether the second half of each row repeats the first, token by token.
    """

    def __init__(self, rows: Tensor, count: int, *, is_repeated: bool = False) -> None:
        self.rows = rows
        self.count = count
        self.is_repeated = is_repeated
        self.first_query = min(FIRST_COUNTED_QUERY, rows.shape[1] // 2)
        self.layers: dict[int, _LayerSums] = {}
        self.repeated: HeadSums | None = None

    def layer(self, index: int, window: int) -> _LayerSums:
        """Return the sums of a layer that sees a window of tokens."""
        return self.layers.setdefault(index, _LayerSums(self, index, window))

    def result(self) -> Heads:
        """Return the means over all queries that are counted, after waiting for a GPU once for each data type.

        Raises:
            ValueError: no layer was seen, or one did not attend once in each row.
        """
        if not self.layers:
            raise ValueError("no layer attends through transformers' AttentionInterface: where it attends is not seen")
        moved = on_cpu({index: sums.rows for index, sums in self.layers.items()})
        for index, sums in self.layers.items():
            sums.rows = moved[index]
        layers = tuple(self.layers[index].means() for index in sorted(self.layers))
        if self.repeated is not None:
            again = self.repeated.result().layers
            layers = tuple(
                replace(one, induction_mass=two.induction_mass) for one, two in zip(layers, again, strict=True)
            )
        return Heads(layers, tuple(sorted(set(range(self.count)) - set(self.layers))))


class _LayerSums:
    """Sums over the attention of one layer.

    Args:
        text: the sums of all layers, which know the text.
        index: the index of the layer.
        window: the number of tokens that a query sees, at most the length of a row [tokens].
    """

    def __init__(self, text: HeadSums, index: int, window: int) -> None:
        self.text = text
        self.index = index
        self.window = window
        self.rows: list[dict[str, Tensor]] = []
        """Sums over the queries of each row (heads, …) by the names of the means, and its sinks."""

    def add(self, query: Tensor, key: Tensor, attended: _Attended, logits: _Logits) -> None:
        """Add the attention of the next row.

        Args:
            query: (heads, tokens, width) float32 queries.
            key: (heads, tokens, width) float32 keys.
            attended: what the queries attend to.
            logits: how the layer makes logits.
        """
        heads, tokens, _ = query.shape
        if len(self.rows) == len(self.text.rows):
            raise ValueError(f"attention layer {self.index} is called more than once in a pass")
        start = self.text.first_query

        # Products with the nearest keys by distance, (heads, offsets, queries): -inf where a query does not see one.
        products = query.new_full((heads, OFFSETS, tokens - start), -torch.inf)
        spans = [(max(start, distance), distance) for distance in range(min(OFFSETS, self.window))]
        for low, distance in spans:
            found = torch.linalg.vecdot(query[:, low:], key[:, low - distance : tokens - distance])
            products[:, distance, low - start :] = found
        hidden = products.isneginf()
        near = (logits.of(products) - attended.logsum[:, None, start:]).exp().masked_fill(hidden, 0.0)
        # What each key draws from the queries near it, and from all.
        drawn = attended.drawn_far.clone()
        for low, distance in spans:
            drawn[:, low - distance : tokens - distance] += near[:, distance, low - start :]
        scaled = (products * logits.scaling).masked_fill(hidden, 0.0)
        logit = scaled.sum(-1)
        mean = logit / (~hidden).sum(-1).clamp_min(1)
        squares = (scaled - mean[..., None]).masked_fill(hidden, 0.0).square().sum(-1)
        behind = (
            nn.functional.pad(torch.linalg.vector_norm(key, dim=-1), (OFFSETS - 1, 0)).unfold(1, OFFSETS, 1).flip(-1)
        )
        bounds = torch.linalg.vector_norm(query, dim=-1)[:, start:, None] * behind[:, start:] * logits.scaling
        induction = query.new_zeros(heads)
        if self.text.is_repeated:
            half = tokens // 2
            induction = self._weights(query[:, half:], key[:, 1 : half + 1], attended.logsum[:, half:], logits).sum(1)
        places = torch.arange(tokens, device=device_of_sums(query.device)).double()
        given_far, drawn_far = (far.to(places.device).double() for far in (attended.given_far, attended.drawn_far))
        weight, place, sinks = self._sinks(attended.drawn_far, drawn)
        seeing = slice(start, max(start, self.window))  # the queries that see the first key
        self.rows.append(
            {
                "offset": near.sum(-1),
                "logit": logit,
                "squares": squares,
                "bound": bounds.masked_fill(hidden.mT, 0.0).sum(1),
                "first": self._weights(query[:, seeing], key[:, :1], attended.logsum[:, seeing], logits).sum(1),
                "distance": (given_far - drawn_far) @ places,
                "given": attended.given[:, start:].sum(1),
                "entropy": (attended.given * attended.logsum - attended.logit)[:, start:].sum(1),
                "induction": induction,
                "sinks": sinks,
                "sink_weight": weight,
                "sink_position": place,
            }
        )

    @staticmethod
    def _weights(query: Tensor, key: Tensor, logsum: Tensor, logits: _Logits) -> Tensor:
        """Return the weight that each query (heads, queries, width) gives to one key of its own, or to one of all."""
        return (logits.of(torch.linalg.vecdot(query, key)) - logsum).exp()

    def _sinks(self, far: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the strongest sinks of a row and their positions, (heads, top) each, and what all draw: (heads,).

        Args:
            far: (heads, tokens) the weight that each key draws from all queries that are far from it.
            drawn: (heads, tokens) the weight that it draws from all.
        """
        tokens = far.shape[1]
        places = torch.arange(tokens, device=far.device)
        begin = (places + SINK_DISTANCE).clamp_min(self.text.first_query)
        # Of the queries that see a key from afar.
        count = ((places + self.window).clamp_max(tokens) - begin).clamp_min(0)
        draws = far / count.clamp_min(1)
        too_few = count < (count.max() / 4).clamp_min(SINK_DISTANCE)  # for a mean
        draws = draws.masked_fill(too_few, 0.0)
        weight, place = draws.topk(min(SINKS_PER_HEAD, tokens))
        return weight, place, torch.where(draws > SINK_WEIGHT, drawn, 0.0).sum(1)

    def means(self) -> LayerHeads:
        """Return the means, once the sums are on the CPU.

        Raises:
            ValueError: the layer was not called in every row, or has logits that are no finite numbers.
        """
        rows, tokens = self.text.rows.shape
        if len(self.rows) != rows:
            raise ValueError(f"attention layer {self.index} was called in {len(self.rows)} of {rows} rows")
        start = self.text.first_query
        stacked = {name: torch.stack([row[name] for row in self.rows]) for name in self.rows[0]}
        sums = {name: of_rows.double().sum(0) for name, of_rows in stacked.items()}
        if len(invalid := (~torch.isfinite(sums["entropy"])).nonzero()):
            raise ValueError(
                f"layer {self.index}, query head {int(invalid[0])} has logits that are no finite numbers: statistics "
                "need finite states"
            )
        offsets = torch.arange(OFFSETS)
        offset_count = (tokens - offsets.clamp_min(start)).clamp_min(0) * (offsets < self.window)
        # Of the sinks of all rows, the strongest.
        weight, keep = torch.cat(list(stacked["sink_weight"]), 1).topk(stacked["sink_weight"].shape[2])
        position = torch.cat(list(stacked["sink_position"]), 1).gather(1, keep)
        token = self.text.rows[keep // weight.shape[1], position]
        induction = torch.full_like(sums["induction"], torch.nan)
        half = tokens // 2
        # The match is half - 1 tokens back.
        if self.text.is_repeated and half <= self.window:
            induction = sums["induction"] / (rows * half)
        counted = (rows * offset_count).clamp_min(1)
        # Within the rows and between them.
        of_rows = stacked["logit"].double() / offset_count.clamp_min(1)
        variance = sums["squares"] / counted + of_rows.var(0, correction=0)
        return LayerHeads(
            index=self.index,
            offset_mass=sums["offset"] / counted,
            logit=sums["logit"] / counted,
            logit_spread=variance.sqrt(),
            logit_bound=sums["bound"] / counted,
            key_mass=sums["given"] / (rows * (tokens - start)),
            first_mass=sums["first"] / (rows * max(1, self.window - start)),
            sink_mass=sums["sinks"] / (rows * (tokens - start)),
            sink_position=position.masked_fill(weight == 0, -1),
            sink_token=token.masked_fill(weight == 0, -1),
            sink_weight=weight.double(),
            induction_mass=induction,
            distance=(sums["offset"] @ offsets.double() + sums["distance"]) / sums["given"].clamp_min(TINY),
            entropy=(sums["entropy"] / (rows * (tokens - start))).clamp_min(0),
        )


def _check_reproduced(root: Any, decoder: nn.Module, ids: Tensor) -> None:
    """Raise unless a pass through :func:`_attend` gives what the model gives."""
    if "chunked_attention" in (getattr(root.config.get_text_config(), "layer_types", None) or ()):
        raise ValueError(
            f"{type(root).__name__} attends within chunks: this pass knows causal and sliding layers alone"
        )

    def read() -> Tensor:
        out: Tensor = decoder(input_ids=ids[None], use_cache=False)[0]
        return out.float()

    original = read()
    with attending_with(root, ATTENTION_NAME, HeadSums(ids[None].cpu(), 0)):
        ours = read()
    allowed = STATE_TOLERANCE
    if root.dtype in (torch.float16, torch.bfloat16):
        allowed *= 50
    # Compared token by token: in half precision a few tokens are far off between transformers' own kernels, too.
    tiny = torch.finfo(torch.float32).tiny  # the states of padding tokens may be 0
    lengths = torch.linalg.norm(original, dim=-1).clamp_min(tiny)
    off = float((torch.linalg.norm(ours - original, dim=-1) / lengths).flatten().quantile(REPRODUCED_SHARE))
    if torch.isfinite(original).all() and not off <= allowed:
        raise ValueError(
            f"{type(root).__name__} attends in a way of its own: a causal softmax of q·k gives states that are off by "
            f"{off:.2g}, at most {allowed:g} is allowed"
        )
