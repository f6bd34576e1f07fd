"""The p sweep: p-RoPE at several p on one checkpoint, without training.

For each p it measures which pairs become unrotated, how much of the queries, keys and logits those pairs carry, and how
much perplexity rises. :func:`advise` turns that into advice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.builtin_text import builtin_text
from rope_patch.evaluation.documents import Source, TokenDocument, documents, encode, spread_windows
from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.metrics import METRICS, PairedDifference, change_sentence
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.perplexity_result import PerplexityResult
from rope_patch.frequencies import unrotated
from rope_patch.modeling.state_statistics import Capture, LayerCapture
from rope_patch.options.analyze import P_TOLERANCE
from rope_patch.patching.install import patched
from rope_patch.patching.verify import inspect_model
from rope_patch.runtime import progress
from rope_patch.runtime.captions import count_text

LONGEST_CONTEXT = 8192
"""Perplexity is measured within and beyond the context that the config states, or this where it is longer [tokens]."""
MOST_WINDOWS = 8
"""Number of windows of text at most."""
LEAST_WINDOWS = 2
"""Number of windows of text at least, where there is enough text: one alone has no interval."""
SHORTEST_WINDOW = 256
"""Length of a window at least, where there is enough text [tokens]."""
MOST_CONTEXTS = 4
"""Positions beyond the context are read up to this many times it."""
CHUNK_TOKENS = 4096
"""Number of tokens per forward pass, which are read through a cache."""


@dataclass(frozen=True)
class SweepPoint:
    """One p of the sweep: which pairs it zeroes, and what that costs without training.

    Shares are means over the query heads of the layers whose table changes.

    Attributes:
        p: the share of the pairs that keep rotating; 1 for the unchanged table.
        stopped: the pairs whose frequency is zeroed, by layer type; fastest first.
        query_share: the share of the queries' norms that these pairs carry.
        key_share: the share of the keys' norms that they carry.
        logit_share: the share that they carry of the products of both norms, which bound what a pair can add to a
            logit.
        turned: the part of ``logit_share`` that depends on distance: each product times half the mean chord ``|1 -
            exp(i f n)|`` over distances ``n`` within the context.
        perplexity: the perplexity within the context and beyond it; one value where the text is too short for both.
        windows: the number of windows of text.
        change: the rise of each perplexity over the unchanged table, as its estimate and the ends of its 95 % interval,
            paired by window; None for the unchanged table [nats/token].
    """

    p: float
    stopped: Mapping[str, tuple[int, ...]]
    query_share: float
    key_share: float
    logit_share: float
    turned: float
    perplexity: tuple[float, ...]
    windows: int
    change: tuple[PairedDifference, ...] | None


@dataclass(frozen=True)
class Advice:
    """The p that suits a checkpoint without training.

    Attributes:
        p: the smallest suitable value; None when no measured value is suitable.
        reason: the reason, in a sentence or two.
    """

    p: float | None
    reason: str


def sweep_text(
    tokenizer: Any, text: Mapping[str, Source] | None, context: int, tokens: int | None = None
) -> tuple[list[TokenDocument], tuple[int, ...], str]:
    """Return the windows that the sweep measures: four contexts long, or one, or as long as the text and tokens allow.

    At least two windows are read where that is possible, since one alone has no interval.

    Args:
        tokenizer: the tokenizer of the model.
        text: the texts by name; by default the held-out part of the built-in text.
        context: the context of the model; more than ``LONGEST_CONTEXT`` counts as that [tokens].
        tokens: the number of tokens that each p may read; by default as many as eight windows of four contexts have
            [tokens].

    Returns:
        The windows, the edges of the positions to measure, and the name of the text.

    Raises:
        ValueError: the text has fewer than 2 tokens.
    """
    if text is None:
        whole_text, name = builtin_text("heldout").text, "held-out part of the built-in text"
    else:
        whole_text = "\n\n".join(document.text for source in text.values() for document in documents(source))
        name = ", ".join(text)
    (stream,) = encode(tokenizer, whole_text, prefix=())
    most = (
        MOST_WINDOWS * MOST_CONTEXTS * LONGEST_CONTEXT
        if tokens is None
        else max(tokens, LEAST_WINDOWS * SHORTEST_WINDOW)
    )
    most = min(most, len(stream.ids))
    end = min(context, LONGEST_CONTEXT, max(2, most // LEAST_WINDOWS))
    edges = (0, end, MOST_CONTEXTS * end) if most >= LEAST_WINDOWS * MOST_CONTEXTS * end else (0, end)
    windows, _ = spread_windows(tokenizer, whole_text, edges[-1], max(1, min(MOST_WINDOWS, most // edges[-1])))
    return windows, edges, name


def sweep_p(
    model: nn.Module,
    statistics: Capture,
    windows: Sequence[TokenDocument],
    edges: tuple[int, ...],
    p_values: Sequence[float],
    *,
    resume: Path | None = None,
) -> tuple[SweepPoint, ...]:
    """Measure p-RoPE at several p, on top of the patch that is in place.

    Args:
        model: a causal language model.
        statistics: the statistics of its queries and keys, from :func:`~rope_patch.modeling.capture.capture`.
        windows: the windows of text, from :func:`sweep_text`.
        edges: the edges of the spans of positions to measure, from :func:`sweep_text` [tokens].
        p_values: the values of p to measure, in (0, 1).
        resume: the file of the result cache: windows that it holds are not scored again.

    Returns:
        The unchanged table first, then each p.
    """
    inspection = inspect_model(model)
    before = () if inspection.record is None else (inspection.record.to_method(),)
    unrotated_before = {slot.layer_type: unrotated(slot.inv_freq) for slot in inspection.tables}

    def score(step: str) -> PerplexityResult:
        with progress.stage(step):
            return perplexity(
                model, windows, window=edges[-1], buckets=edges, chunk=min(CHUNK_TOKENS, edges[-1]), resume=resume
            )

    unchanged = score("unchanged table")
    spans = list(itertools.pairwise(edges))
    points = [
        SweepPoint(1.0, {}, 0.0, 0.0, 0.0, 0.0, tuple(unchanged.between(*span) for span in spans), len(windows), None)
    ]
    for p in p_values:
        # The patch that is in place stays, and p-RoPE is put on top of it.
        with patched(model, (*before, f"p_rope:p={p:g}"), replace=True) as patch:
            result = score(f"p = {p:g}")
            # Pairs that the checkpoint itself does not rotate lose nothing.
            zeroed = {kind: unrotated(table.inv_freq) & ~unrotated_before[kind] for kind, table in patch.after.items()}
        changes = []
        for i, _ in enumerate(spans):
            ours, theirs = (
                [document.nll[i] / document.tokens[i] for document in scored.documents]
                for scored in (result, unchanged)
            )
            estimate = math.fsum(a - b for a, b in zip(ours, theirs, strict=True)) / len(ours)
            changes.append(PairedDifference(estimate, *paired_means(ours, theirs)))
        points.append(
            SweepPoint(
                p,
                {
                    kind or "all": tuple(mask.nonzero().flatten().tolist())
                    for kind, mask in zeroed.items()
                    if mask.any()
                },
                *_stopped_shares(statistics, zeroed),
                tuple(result.between(*span) for span in spans),
                len(windows),
                tuple(changes),
            )
        )
    return tuple(points)


def _stopped_shares(statistics: Capture, zeroed: Mapping[str | None, Tensor]) -> tuple[float, float, float, float]:
    """Return the shares of queries' norms, keys' norms, products, and turned products, in that order."""
    sums = [torch.empty(0, dtype=torch.float64)] * 4
    for layer in statistics.layers:
        stopped = zeroed[layer.layer_type]
        if not stopped.any():
            continue
        query, keys = layer.query.mean_norm, layer.key_by_query_head.mean_norm
        product = query * keys
        moved = product * half_chord(layer)
        # The turned products are a part of all products, so that both are shares of the same whole.
        for i, (part, whole) in enumerate(((query, query), (keys, keys), (product, product), (moved, product))):
            share = part[:, stopped].sum(-1) / whole.sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
            sums[i] = torch.cat((sums[i], share))
    query_share, key_share, logit_share, turned = (float(part.mean()) if len(part) else 0.0 for part in sums)
    return query_share, key_share, logit_share, turned


def half_chord(layer: LayerCapture) -> Tensor:
    """Return half the mean chord ``|1 - exp(i f n)|`` over distances within a layer's context: (pairs,), 0 to 1."""
    distances = torch.linspace(0, layer.context, 257, dtype=torch.float64)
    return (layer.inv_freq.double()[:, None] * distances / 2).sin().abs().mean(-1)


def advise(
    points: Sequence[SweepPoint], tolerance: float = P_TOLERANCE, *, length: int, vocabulary: int | None = None
) -> Advice:
    """Return the smallest p whose rise of perplexity within the context is significantly below the tolerance.

    Args:
        points: the result of :func:`sweep_p`, the unchanged table first.
        tolerance: the relative rise of perplexity that may be paid; the upper end of the 95 % interval must not exceed
            it.
        length: the length up to which the first perplexity of each point was measured; in longer texts p-RoPE costs
            more [tokens].
        vocabulary: the number of tokens that the model knows; nothing is advised on a text that it predicts worse than
            a uniform guess does.
    """
    if len(points) < 2:
        return Advice(None, "The p sweep was left out, so no p is advised.")
    base, *others = points
    if vocabulary is not None and base.perplexity[0] > vocabulary:
        return Advice(
            None,
            "No p is advised: this checkpoint does not know the text of the p sweep. Its perplexity is "
            f"{base.perplexity[0]:.0f}, and a uniform guess over the vocabulary has {vocabulary}. Pass a "
            "text like those it was trained on (--text).",
        )
    others = [point for point in others if point.stopped]
    if not others:
        return Advice(None, "No measured p zeroes a pair that rotates now, so none is advised.")
    metric, rises, verdicts = METRICS["perplexity"], dict[float, list[str]](), dict[float, str]()
    for point in others:
        changes = point.change or ()
        rises[point.p] = [change_sentence(metric, change) for change in changes]
        verdicts[point.p] = metric.verdict(changes[0], tolerance)
    costs = {p: f"p = {p:g} {'may cost' if verdicts[p] == 'undecided' else 'costs'} {rises[p][0]}" for p in rises}
    sample = f"over {count_text(base.windows, 'window')} of text"
    cheap = [point for point in others if verdicts[point.p] == "safe"]
    if cheap:
        chosen = min(cheap, key=lambda point: point.p)
        lower = [cost for p, cost in costs.items() if p < chosen.p]
        larger_sentence = f" {'; '.join(lower)}." if lower else " It is the smallest p measured."
        return Advice(
            chosen.p,
            f"p = {chosen.p:g} suits this checkpoint without training, in texts of up to {length} tokens: "
            f"{_carried(chosen)}, and {sample} perplexity up to there changes by "
            f"{', and beyond it by '.join(rises[chosen.p])}.{larger_sentence}",
        )
    if "undecided" in verdicts.values():
        return Advice(
            None,
            f"Whether a p suits this checkpoint without training up to {length} tokens cannot be decided {sample}: "
            f"{'; '.join(costs.values())}. Pass more text (--text).",
        )
    least = min(others, key=lambda point: point.perplexity[0])
    measured = ", ".join(f"{point.p:g}" for point in others)
    return Advice(
        None,
        f"No measured p ({measured}) suits this checkpoint without training if perplexity may rise by at most "
        f"{100 * tolerance:g} %: with p = {least.p:g}, {_carried(least)}, and {sample} perplexity up to {length} "
        f"tokens changes by {rises[least.p][0]}. "
        "Fine-tune after patching, or choose a method that keeps every pair rotating (YaRN, ABF).",
    )


def _carried(point: SweepPoint) -> str:
    return (
        f"the pairs it zeroes carry {point.query_share:.0%} of the queries' norm and {point.key_share:.0%} of the "
        "keys' in the layers whose table changes"
    )
