"""Compare the analyses of two checkpoints on the same text, before and after fine-tuning for example."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rope_patch.analysis.heads import LayerHeads
from rope_patch.analysis.result import Analysis
from rope_patch.evaluation.result_cache import finite


@dataclass(frozen=True)
class HeadChange:
    """A head that attends differently after.

    Attributes:
        layer: index.
        head: query head.
        moved: largest change of the mean weight on its own token, the previous one, the first one or on sinks, or of
            its induction on the text.
        before: its types before.
        after: its types after.
    """

    layer: int
    head: int
    moved: float
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AnalysisDifference:
    """The difference between two checkpoints on the same text.

    Attributes:
        heads: heads whose types differ, or whose attention mass moved by a tenth or more; most moved first.
        query_norm: (layers, pairs) log2 of the ratio of mean norms, after to before, mean over heads; nan where layers
            have fewer pairs.
        key_norm: (layers, pairs) as for queries.
        layers: indices of the rows.
        gained: layer, head and pair of the mean keys that are outliers only after.
        lost: layer, head and pair of those that are outliers only before.
    """

    heads: tuple[HeadChange, ...]
    query_norm: Tensor
    key_norm: Tensor
    layers: tuple[int, ...]
    gained: tuple[tuple[int, int, int], ...]
    lost: tuple[tuple[int, int, int], ...]


def differences(before: Analysis, after: Analysis) -> AnalysisDifference:
    """Return the difference between two analyses.

    Raises:
        ValueError: analyses of different texts, layers or shapes.
    """
    if before.capture.text != after.capture.text:
        raise ValueError("the analyses read different tokens: give both the same text, and one tokenizer")
    shapes = [
        [(layer.index, tuple(layer.query.mean.shape), tuple(layer.key.mean.shape)) for layer in analysis.capture.layers]
        for analysis in (before, after)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError("the checkpoints have different layers or heads: only one before and after can be compared")
    moves = []
    for old, new in zip(before.heads.layers, after.heads.layers, strict=True):
        moved = (_attention_masses(new) - _attention_masses(old)).abs().amax(0).tolist()
        moves += [HeadChange(old.index, h, moved[h], old.head_types(h), new.head_types(h)) for h in range(old.heads)]
    pairs = max(layer.query.pairs for layer in before.capture.layers)

    def ratio(role: str) -> Tensor:
        out = torch.full((len(before.capture.layers), pairs), math.nan, dtype=torch.float64)
        for line, old, new in zip(out, before.capture.layers, after.capture.layers, strict=True):
            norms = [getattr(layer, role).mean_norm.mean(0) for layer in (old, new)]
            line[: len(norms[0])] = torch.log2(norms[1] / norms[0])
        return out

    was, now = (
        {(pair.layer, pair.head, pair.pair): None for pair in analysis.outliers("key")} for analysis in (before, after)
    )
    return AnalysisDifference(
        heads=tuple(sorted(
            (move for move in moves if move.before != move.after or move.moved >= 0.1), key=lambda move: -move.moved
        )),
        query_norm=ratio("query"),
        key_norm=ratio("key"),
        layers=tuple(layer.index for layer in before.capture.layers),
        gained=tuple(place for place in now if place not in was),
        lost=tuple(place for place in was if place not in now),
    )  # fmt: skip


def changes(difference: AnalysisDifference, name: str) -> list[str]:
    """Return the main differences, a sentence each.

    Args:
        difference: of two analyses.
        name: of the second checkpoint.
    """
    if difference.heads:
        most = [f"{head.layer}.{head.head} by {head.moved:.2f}" for head in difference.heads[:5]]
        count = f"{len(difference.heads)} heads attend" if len(difference.heads) > 1 else "1 head attends"
        heads = f"{count} differently; the largest changes of attention mass are {', '.join(most)}"
    else:
        heads = "no head changes its type or moves a tenth of its attention"
    apart = [part[torch.isfinite(part)].abs() for part in (difference.query_norm, difference.key_norm)]
    factors = [2 ** float(part.max()) if len(part) else 1.0 for part in apart]
    return [
        f"Compared with {name}: {heads}.",
        f"The mean norm of a pair, averaged over heads, changes by a factor of up to {factors[0]:.2f} (queries) and "
        f"{factors[1]:.2f} (keys). {len(difference.gained)} key pairs became outliers and {len(difference.lost)} are "
        "outliers no longer.",
    ]


def _attention_masses(layer: LayerHeads) -> Tensor:
    """Return what :class:`HeadChange` compares: (masses, heads)."""
    masses = (layer.offset_mass[:, 0], layer.offset_mass[:, 1], layer.first_mass, layer.sink_mass, layer.induction_mass)
    return torch.stack(masses).nan_to_num()


def to_json(difference: AnalysisDifference, name: str) -> str:
    """Return a difference as JSON.

    Args:
        difference: of two analyses.
        name: of the second checkpoint.
    """
    out = {
        "against": name,
        "changes": changes(difference, name),
        "heads": [asdict(head) for head in difference.heads],
        "layers": list(difference.layers),
        "log2_query_norm": difference.query_norm.tolist(),
        "log2_key_norm": difference.key_norm.tolist(),
        "outliers_gained": difference.gained,
        "outliers_lost": difference.lost,
    }
    return json.dumps(finite(out), indent=1, allow_nan=False)
