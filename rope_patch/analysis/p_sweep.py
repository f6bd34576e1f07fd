"""The p sweep: which pairs p-RoPE zeroes at several p, and what share of queries, keys and logits they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rope_patch.analysis.heads import FIRST_COUNTED_QUERY, TYPE_SHARE
from rope_patch.analysis.single_heads import SingleHead
from rope_patch.frequencies import unrotated
from rope_patch.modeling.state_statistics import Capture
from rope_patch.patching.install import patched
from rope_patch.patching.verify import inspect_model


@dataclass(frozen=True)
class SweepPoint:
    """One p of the sweep: which pairs it zeroes, and what they carry.

    Shares are means over the query heads of the layers whose table changes.

    Attributes:
        p: the share of the pairs that keep rotating.
        stopped: the pairs whose frequency is zeroed, by layer type; fastest first.
        query_share: the share of the queries' norms that these pairs carry.
        key_share: the share of the keys' norms that they carry.
        logit_share: the share that they carry of the products of both norms, which bound what a pair can add to a
            logit.
        positional: the number of positional heads that lose pairs, of those that show it on a short text.
        kept: the number of these that attend to their distance also where the pairs stop in their layer alone.
    """

    p: float
    stopped: Mapping[str, tuple[int, ...]]
    query_share: float
    key_share: float
    logit_share: float
    positional: int
    kept: int

    def __str__(self) -> str:
        """The pairs that are stopped."""
        spans = (f"{pairs[0]} to {pairs[-1]} ({kind} layers)" for kind, pairs in self.stopped.items())
        return " and ".join(spans) or "none"


def sweep_p(
    model: nn.Module, statistics: Capture, p_values: Sequence[float], positional: Mapping[SingleHead, int]
) -> tuple[SweepPoint, ...]:
    """Return what the pairs carry that p-RoPE would zero at each p, on top of the patch that is in place.

    Args:
        model: a causal language model.
        statistics: the statistics of its queries and keys, from :func:`~rope_patch.modeling.capture.capture`.
        p_values: the values of p, in (0, 1).
        positional: the positional heads on a short text, each with its distance [tokens].
    """
    inspection = inspect_model(model)
    before = () if inspection.record is None else (inspection.record.to_method(),)
    unrotated_before = {slot.layer_type: unrotated(slot.inv_freq) for slot in inspection.tables}
    positional = {head: distance for head, distance in positional.items() if _attends_to(head, distance)}
    points = []
    for p in p_values:
        # The patch that is in place stays, and p-RoPE is put on top of it.
        with patched(model, (*before, f"p_rope:p={p:g}"), replace=True) as patch:
            # Pairs that the checkpoint itself does not rotate lose nothing.
            zeroed = {kind: unrotated(table.inv_freq) & ~unrotated_before[kind] for kind, table in patch.after.items()}
        stopped = {
            kind or "all": tuple(mask.nonzero().flatten().tolist()) for kind, mask in zeroed.items() if mask.any()
        }
        kept = []
        for head, distance in positional.items():
            resting = zeroed[statistics.layer(head.layer).layer_type]
            if resting.any():
                kept.append(_attends_to(replace(head, inv_freq=head.inv_freq.masked_fill(resting, 0.0)), distance))
        points.append(SweepPoint(p, stopped, *_stopped_shares(statistics, zeroed), len(kept), sum(kept)))
    return tuple(points)


def _attends_to(head: SingleHead, distance: int) -> bool:
    """Tell whether a head puts most of its attention at a distance."""
    masses = head.pattern.diagonal(-distance)[max(0, FIRST_COUNTED_QUERY - distance) :]
    return bool(masses.mean() >= TYPE_SHARE)


def _stopped_shares(statistics: Capture, zeroed: Mapping[str | None, Tensor]) -> tuple[float, float, float]:
    """Return the shares of queries' norms, keys' norms and their products, in that order."""
    shares = []
    for layer in statistics.layers:
        stopped = zeroed[layer.layer_type]
        if stopped.any():
            query = layer.query.mean_norm
            keys = layer.key_by_query_head.mean_norm
            parts = torch.stack((query, keys, query * keys))
            shares.append(parts[..., stopped].sum(-1) / parts.sum(-1).clamp_min(torch.finfo(torch.float64).tiny))
    if not shares:
        return 0.0, 0.0, 0.0
    query_share, key_share, logit_share = torch.cat(shares, 1).mean(1).tolist()
    return query_share, key_share, logit_share
