"""Recall of the bounds: how many of a model's outlier pairs lie inside them (Jonasson, arXiv:2503.01832, table 2)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from torch import Tensor

from rope_patch import frequencies
from rope_patch.analysis.outliers import scatter
from rope_patch.modeling.statistics import Capture

THRESHOLDS = (6.0, 9.0, 12.0)
"""Radii above which Jonasson's table 2 calls a pair an outlier."""
RELAXED = 0.1
"""By how much Jonasson relaxes the angle bound [rad]."""


@dataclass(frozen=True)
class RecallRow:
    """A row of Jonasson's table 2.

    Attributes:
        states: ``"key"`` or ``"query"``.
        threshold: radius above which a pair is an outlier.
        quantile: the quantile of the radii that the threshold is; None where it was given as a radius.
        features: number of pairs over all heads and layers.
        outliers: number of outliers among them.
        unrotated: outliers whose frequency is zero.
        frequency: share of the outliers below the frequency bound; None without outliers, as the next two.
        angle: share beyond the angle bound.
        relaxed: share beyond the angle bound less 0.1 rad.
    """

    states: str
    threshold: float
    quantile: float | None
    features: int
    outliers: int
    unrotated: int
    frequency: float | None
    angle: float | None
    relaxed: float | None


@dataclass(frozen=True)
class Recall:
    """Jonasson's table 2 for one model and text."""

    model: str
    tokens: int
    rows: tuple[RecallRow, ...]

    def to_json(self) -> str:
        """Return the table as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    def __str__(self) -> str:
        lines = [
            f"{self.model}, {self.tokens} tokens: outliers inside the bounds",
            "states  radius >   outliers  frequency   angle  relaxed",
        ]
        for row in self.rows:
            shares = (row.frequency, row.angle, row.relaxed)
            cells = ["-" if share is None else f"{share:.3f}" for share in shares]
            lines.append(
                f"{row.states:<6} {row.threshold:>9.3f} {row.outliers:>10} {cells[0]:>10} {cells[1]:>7} {cells[2]:>8}"
            )
        return "\n".join(lines)


def recall(
    capture: Capture,
    *,
    thresholds: Sequence[float] = THRESHOLDS,
    quantiles: Sequence[float] = (),
    context: int | None = None,
    layers: Sequence[int] | None = None,
) -> Recall:
    """Return how many of the pairs of large radius lie inside the bounds (Jonasson, table 2), for keys and queries.

    Args:
        capture: what was measured.
        thresholds: radii above which a pair is an outlier.
        quantiles: the same, each as a quantile of all radii of the keys or queries, in [0, 1).
        context: as for :func:`scatter` [tokens].
        layers: indices; all captured by default.

    Raises:
        ValueError: a negative threshold, a quantile out of range, a layer that was not captured.
    """
    for threshold in thresholds:
        if not threshold >= 0:
            raise ValueError(f"thresholds must be >= 0, got {threshold}")
    for quantile in quantiles:
        if not 0 <= quantile < 1:
            raise ValueError(f"quantiles must be in [0, 1), got {quantile}")
    points = scatter(capture, context=context, layers=layers)
    rows = []
    for states in ("key", "query"):
        radius = points.radius(states)
        cuts: list[tuple[float, float | None]] = [(float(threshold), None) for threshold in thresholds]
        cuts += [(_quantile(radius, quantile), quantile) for quantile in quantiles]
        for threshold, share in cuts:
            outlier = radius > threshold
            inside = (points.partial, points.within_angle, points.phi > points.angle - RELAXED)
            shares = [float(mask[outlier].double().mean()) if bool(outlier.any()) else None for mask in inside]
            unrotated = int(frequencies.unrotated(points.inv_freq)[outlier].sum())
            rows.append(RecallRow(states, threshold, share, len(radius), int(outlier.sum()), unrotated, *shares))
    return Recall(capture.model, capture.tokens, tuple(rows))


def _quantile(values: Tensor, share: float) -> float:
    """The quantile by linear interpolation; ``torch.quantile`` refuses more than 16 million values."""
    ordered = values.sort().values
    at = share * (len(ordered) - 1)
    low, high = float(ordered[math.floor(at)]), float(ordered[math.ceil(at)])
    return low + (high - low) * (at - math.floor(at))
