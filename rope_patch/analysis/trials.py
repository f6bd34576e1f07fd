"""p-RoPE on one checkpoint: which pairs a p would stop, what they carry, and what stopping them costs untrained."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.documents import Source, TokenDocument, documents, encode, spread_windows
from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.losses import PerplexityResult
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.text import builtin_text
from rope_patch.frequencies import unrotated
from rope_patch.modeling.statistics import Capture, LayerCapture
from rope_patch.patching.apply import patched
from rope_patch.patching.verify import inspect_model

SHARES = (0.9, 0.75, 0.5, 0.25)
"""Values of p that are tried."""
TOLERANCE = 0.01
"""Rise of perplexity within the context that a p may cost, relative."""
CONTEXT = 8192
"""Perplexity is measured within and beyond the stated context, or this where it is longer [tokens]."""
WINDOWS = 8
BEYOND = 4
"""Positions beyond the context are read up to this many times it."""
CHUNK = 4096
"""Tokens per forward pass, through a cache [tokens]."""

Told = Callable[[str, int], None]


@dataclass(frozen=True)
class Trial:
    """One p of p-RoPE: what it would stop, and what that costs before any training.

    Shares are means over the query heads of the layers whose table changes.

    Attributes:
        p: share of the pairs that go on rotating; 1 for the table as found.
        stopped: pairs that come to rest, by layer type; fastest first.
        query_share: of the queries' norms, that the stopped pairs carry.
        key_share: of the keys' norms.
        logit_share: of the products of both, what the pairs can add to a logit.
        turned: of the same, what their rotation moves within the context: each product times half the mean chord
            ``|1 - exp(i f n)|`` over distances ``n``.
        perplexity: within and beyond the trial's context; one value where the text has no room for both.
        windows: of text that it was measured on.
        change: estimate and 95 % interval of the rise of each over the table as found [nats/token], paired by window;
            None for the table as found.
    """

    p: float
    stopped: Mapping[str, tuple[int, ...]]
    query_share: float
    key_share: float
    logit_share: float
    turned: float
    perplexity: tuple[float, ...]
    windows: int
    change: tuple[tuple[float, float, float], ...] | None


@dataclass(frozen=True)
class Advice:
    """Which p suits the checkpoint.

    Attributes:
        p: None when none of those tried does.
        reason: in a sentence or two.
    """

    p: float | None
    reason: str


def longest_trial(context: int) -> int:
    """Return the tokens of a trial's windows when there is text enough.

    Args:
        context: of the model [tokens].
    """
    return WINDOWS * BEYOND * min(context, CONTEXT)


def trial_text(
    tokenizer: Any, sources: Mapping[str, Source] | None, context: int
) -> tuple[list[TokenDocument], tuple[int, ...], str]:
    """Return the windows that trials are measured on: of four contexts, or of one, or of what there is.

    Args:
        tokenizer: of the model.
        sources: texts by name; by default the held-out part of the built-in text.
        context: of the model; more than ``CONTEXT`` counts as that [tokens].

    Returns:
        The windows, the edges of the positions to measure, and the name of the text.

    Raises:
        ValueError: fewer than 2 tokens.
    """
    if sources is None:
        whole, name = builtin_text("heldout").text, "held-out part of the built-in text"
    else:
        whole = "\n\n".join(document.text for source in sources.values() for document in documents(source))
        name = ", ".join(sources)
    (stream,) = encode(tokenizer, whole, bos=False)
    near = min(context, CONTEXT, max(2, len(stream.ids) // 2))
    edges = (0, near, BEYOND * near) if len(stream.ids) >= 2 * BEYOND * near else (0, near)
    count = max(1, min(WINDOWS, len(stream.ids) // edges[-1]))
    windows, _ = spread_windows(tokenizer, whole, edges[-1], count)
    return windows, edges, name


def run_trials(
    model: nn.Module,
    captured: Capture,
    windows: Sequence[TokenDocument],
    edges: tuple[int, ...],
    shares: Sequence[float],
    resume: Path | None,
    progress: Told,
) -> tuple[Trial, ...]:
    """Measure p-RoPE at several p, on top of the patch that is in place.

    Args:
        model: a causal language model.
        captured: its statistics.
        windows: from :func:`trial_text`, as are
        edges: of positions [tokens].
        shares: values of p.
        resume: file in which scored windows are kept.
        progress: told the part of the work and the tokens it has just read.

    Returns:
        The table as found, and each p.
    """
    seen = inspect_model(model)
    before = () if seen.record is None else (seen.record.to_method(),)
    resting = {slot.layer_type: unrotated(slot.inv_freq) for slot in seen.tables}

    def score(stage: str) -> PerplexityResult:
        return perplexity(
            model,
            windows,
            window=edges[-1],
            buckets=edges,
            chunk=min(CHUNK, edges[-1]),
            resume=resume,
            on_progress=lambda tokens: progress(stage, tokens),
        )

    found = score("as found")
    spans = list(itertools.pairwise(edges))
    made = [Trial(1.0, {}, 0.0, 0.0, 0.0, 0.0, tuple(found.between(*span) for span in spans), len(windows), None)]
    for p in shares:
        with patched(model, (*before, f"p_rope:p={p:g}"), replace=True) as patch:
            result = score(f"p = {p:g}")
            rests = {kind: unrotated(slot.inv_freq) & ~resting[kind] for kind, slot in patch.after.items()}
        changes = []
        for i, _ in enumerate(spans):
            ours, theirs = (
                [document.nll[i] / document.tokens[i] for document in scored.documents] for scored in (result, found)
            )
            estimate = math.fsum(a - b for a, b in zip(ours, theirs, strict=True)) / len(ours)
            changes.append((estimate, *paired_means(ours, theirs)))
        made.append(
            Trial(
                p,
                {kind or "all": tuple(mask.nonzero().flatten().tolist()) for kind, mask in rests.items() if mask.any()},
                *_stopped_shares(captured, rests),
                tuple(result.between(*span) for span in spans),
                len(windows),
                tuple(changes),
            )
        )
    return tuple(made)


def _stopped_shares(captured: Capture, rests: Mapping[str | None, Tensor]) -> tuple[float, float, float, float]:
    """Return the shares of queries' norms, keys' norms, products, and turned products, in that order."""
    sums = [torch.empty(0, dtype=torch.float64)] * 4
    for layer in captured.layers:
        stopped = rests[layer.layer_type]
        if not stopped.any():
            continue
        query, keys = layer.query.mean_norm, layer.key_by_query_head.mean_norm
        product = query * keys
        moved = product * half_chord(layer)
        for i, (part, whole) in enumerate(((query, query), (keys, keys), (product, product), (moved, product))):
            share = part[:, stopped].sum(-1) / whole.sum(-1).clamp_min(torch.finfo(torch.float64).tiny)
            sums[i] = torch.cat((sums[i], share))
    query_share, key_share, logit_share, turned = (float(part.mean()) if len(part) else 0.0 for part in sums)
    return query_share, key_share, logit_share, turned


def half_chord(layer: LayerCapture, points: int = 257) -> Tensor:
    """Return half the mean chord ``|1 - exp(i f n)|`` over distances within a layer's context: (pairs,), 0 to 1."""
    distances = torch.linspace(0, layer.context, points, dtype=torch.float64)
    return (layer.inv_freq.double()[:, None] * distances / 2).sin().abs().mean(-1)


def advise(trials: Sequence[Trial], tolerance: float = TOLERANCE, *, vocabulary: int | None = None) -> Advice:
    """Return the smallest p whose rise of perplexity within the context stays below the tolerance beyond doubt.

    Args:
        trials: the table as found first.
        tolerance: relative; the upper end of the 95 % interval must not exceed it.
        vocabulary: tokens of the model; nothing is advised on a text that it knows less well than a uniform guess.
    """
    if len(trials) < 2:
        return Advice(None, "No p was tried, so none is advised.")
    base, *others = trials
    if vocabulary is not None and base.perplexity[0] > vocabulary:
        return Advice(
            None, "No p is advised: the trial's text is foreign to this checkpoint, at a perplexity of "
            f"{base.perplexity[0]:.0f} where a uniform guess has {vocabulary}. Give a text it knows with --text.",
        )  # fmt: skip
    others = [trial for trial in others if trial.stopped]
    if not others:
        return Advice(None, "No p tried stops a pair that is not at rest already, so none is advised.")
    limit = math.log1p(tolerance)
    kinds = {trial.p: _kind(trial, limit) for trial in others}
    good = [trial for trial in others if kinds[trial.p] == "cheap"]
    seen = f"over {base.windows} window{'s' * (base.windows > 1)} of text"
    if good:
        chosen = min(good, key=lambda trial: trial.p)
        beyond = f", beyond it by {_rise(chosen, 1)}" if len(chosen.perplexity) > 1 else ""
        lower = [f"p = {trial.p:g} {_told(trial, kinds[trial.p])}" for trial in others if trial.p < chosen.p]
        rest = f" {'; '.join(lower)}." if lower else " It is the smallest tried."
        return Advice(
            chosen.p,
            f"p = {chosen.p:g} suits this checkpoint untrained: {_carried(chosen)}, and {seen} perplexity within the "
            f"context changes by {_rise(chosen, 0)}{beyond}.{rest}",
        )
    open_ones = [trial for trial in others if kinds[trial.p] == "unknown"]
    if open_ones:
        told = "; ".join(f"p = {trial.p:g} {_told(trial, kinds[trial.p])}" for trial in others)
        return Advice(
            None,
            f"Whether a p suits this checkpoint untrained cannot be told {seen}: {told}. Give more text with --text.",
        )
    least = min(others, key=lambda trial: trial.perplexity[0])
    tried = ", ".join(f"{trial.p:g}" for trial in others)
    return Advice(
        None,
        f"No p tried ({tried}) suits this checkpoint untrained, if perplexity may rise by {100 * tolerance:g} %: with "
        f"p = {least.p:g}, {_carried(least)}, and {seen} perplexity within the context changes by {_rise(least, 0)}. "
        "Fine-tune after patching, or keep every pair turning (YaRN, ABF).",
    )


def _kind(trial: Trial, limit: float) -> str:
    """Tell whether a rise of perplexity is below the limit, above it, or neither beyond doubt."""
    assert trial.change is not None
    _, low, high = trial.change[0]
    return "cheap" if high <= limit else "dear" if low > limit else "unknown"


def _told(trial: Trial, kind: str) -> str:
    verb = {"cheap": "costs", "dear": "costs", "unknown": "may cost"}[kind]
    return f"{verb} {_rise(trial, 0)}"


def _rise(trial: Trial, place: int) -> str:
    """A rise of perplexity in per cent, with its 95 % interval."""
    assert trial.change is not None
    value, low, high = (f"{math.expm1(part):+.1%}" if part < 20 else "far more" for part in trial.change[place])
    return f"{value} ({low} to {high})"


def _carried(trial: Trial) -> str:
    return (
        f"the pairs it stops carry {trial.query_share:.0%} of the queries' norm and {trial.key_share:.0%} of the keys' "
        "in the layers whose table changes"
    )
