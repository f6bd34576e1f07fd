"""What another checkpoint does differently on the same text, after fine-tuning for example."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from rope_patch.analysis.heads import LayerHeads
from rope_patch.analysis.run import Analysis
from rope_patch.evaluation.result_cache import finite


@dataclass(frozen=True)
class HeadChange:
    """A head that attends in another way than before.

    Attributes:
        layer: index.
        head: query head.
        moved: largest change of the mean weight on its own token, the previous one, the first one or on sinks, or of
            its induction on the text.
        before: habits.
        after: habits.
    """

    layer: int
    head: int
    moved: float
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Difference:
    """What another checkpoint does differently on the same text, after fine-tuning for example.

    Attributes:
        heads: those whose habits differ, or whose attention has moved by a tenth or more; most moved first.
        query_norm: (layers, pairs) log2 of the ratio of mean norms, after to before, mean over heads; nan where layers
            have fewer pairs.
        key_norm: (layers, pairs) as for queries.
        layers: indices of the rows.
        gained: layer, head and pair of keys that have become outliers, by the median of ``before``.
        lost: of those that no longer are.
    """

    heads: tuple[HeadChange, ...]
    query_norm: Tensor
    key_norm: Tensor
    layers: tuple[int, ...]
    gained: tuple[tuple[int, int, int], ...]
    lost: tuple[tuple[int, int, int], ...]


def differences(before: Analysis, after: Analysis) -> Difference:
    """Return what ``after`` does differently.

    Raises:
        ValueError: analyses of different texts, layers or shapes.
    """
    if before.capture.text != after.capture.text:
        raise ValueError("the analyses read different tokens: give both the same text, and one tokenizer")
    shapes = [
        [(layer.index, tuple(layer.query.mean.shape), tuple(layer.key.mean.shape)) for layer in made.capture.layers]
        for made in (before, after)
    ]
    if shapes[0] != shapes[1]:
        raise ValueError("the checkpoints have different layers or heads: only one before and after can be compared")
    moves = []
    for old, new in zip(before.heads.layers, after.heads.layers, strict=True):
        moved = (_masses(new) - _masses(old)).abs().amax(0).tolist()
        moves += [HeadChange(old.index, h, moved[h], old.habits(h), new.habits(h)) for h in range(old.heads)]
    pairs = max(layer.query.pairs for layer in before.capture.layers)

    def ratio(role: str) -> Tensor:
        out = torch.full((len(before.capture.layers), pairs), math.nan, dtype=torch.float64)
        for line, old, new in zip(out, before.capture.layers, after.capture.layers, strict=True):
            norms = [getattr(layer, role).mean_norm.mean(0) for layer in (old, new)]
            line[: len(norms[0])] = torch.log2(norms[1] / norms[0])
        return out

    was, now = ({(pair.layer, pair.head, pair.pair): None for pair in made.outliers("key")} for made in (before, after))
    return Difference(
        heads=tuple(sorted(
            (move for move in moves if move.before != move.after or move.moved >= 0.1), key=lambda move: -move.moved
        )),
        query_norm=ratio("query"),
        key_norm=ratio("key"),
        layers=tuple(layer.index for layer in before.capture.layers),
        gained=tuple(place for place in now if place not in was),
        lost=tuple(place for place in was if place not in now),
    )  # fmt: skip


def changes(found: Difference, name: str) -> list[str]:
    """Return what a difference comes to, a sentence each.

    Args:
        found: the difference.
        name: of the other checkpoint.
    """
    if found.heads:
        most = [f"{head.layer}.{head.head} by {head.moved:.2f}" for head in found.heads[:5]]
        count = f"{len(found.heads)} heads attend" if len(found.heads) > 1 else "1 head attends"
        heads = f"{count} in another way, most of all {', '.join(most)}"
    else:
        heads = "every head attends as before, to a tenth of its attention"
    apart = [part[torch.isfinite(part)].abs() for part in (found.query_norm, found.key_norm)]
    factors = [2 ** float(part.max()) if len(part) else 1.0 for part in apart]
    return [
        f"Against {name}: {heads}.",
        f"Norms of pairs differ by a factor of up to {factors[0]:.2f} (queries) and {factors[1]:.2f} (keys), mean over "
        f"heads; key pairs that have become outliers: {len(found.gained)}, that no longer are: {len(found.lost)}.",
    ]


def _masses(layer: LayerHeads) -> Tensor:
    """Return what :class:`HeadChange` compares: (masses, heads)."""
    kept = (layer.offset_mass[:, 0], layer.offset_mass[:, 1], layer.first_mass, layer.sink_mass, layer.induction_mass)
    return torch.stack(kept).nan_to_num()


def to_json(found: Difference, name: str) -> str:
    """Return a difference as JSON.

    Args:
        found: the difference.
        name: of the other checkpoint.
    """
    out = {
        "against": name,
        "changes": changes(found, name),
        "heads": [asdict(head) for head in found.heads],
        "layers": list(found.layers),
        "log2_query_norm": found.query_norm.tolist(),
        "log2_key_norm": found.key_norm.tolist(),
        "outliers_gained": found.gained,
        "outliers_lost": found.lost,
    }
    return json.dumps(finite(out), indent=1, allow_nan=False)
