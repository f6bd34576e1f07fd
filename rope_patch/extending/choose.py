"""Which method is chosen, by rules on numbers; :mod:`rope_patch.extending.explain` says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from rope_patch.extending.evidence import LEAST_NATS, LEAST_RISE, Evidence, difference
from rope_patch.runtime.number_format import relative

CRITERIA = {"retrieval": LEAST_NATS, "perplexity": LEAST_RISE, "cost": LEAST_RISE}
"""The numbers of :class:`Evidence` by which methods are dropped, in this order, with the least difference that counts.
"""


@dataclass(frozen=True)
class Choice:
    """The decision between methods.

    Attributes:
        order: every method, the best first.
        level: those of them that may be chosen and that no criterion drops.
        dropped: by the label of a method, the criterion by which it was dropped; without those that may not be chosen.
    """

    order: tuple[Evidence, ...]
    level: tuple[Evidence, ...]
    dropped: dict[str, str]

    @property
    def chosen(self) -> Evidence | None:
        """The method that is chosen; None where none can be."""
        return self.level[0] if self.level else None

    @property
    def method(self) -> str | None:
        """The chosen method as a method string."""
        return None if self.chosen is None else self.chosen.method

    @property
    def label(self) -> str | None:
        """The label of the row of the chosen method."""
        return None if self.chosen is None else self.chosen.label


def is_clearly_worse(one: Evidence, other: Evidence, criterion: str) -> bool:
    """Tell whether the whole interval of a criterion lies beyond its least difference."""
    return difference(getattr(one, criterion), getattr(other, criterion)).low > CRITERIA[criterion]


def rank(methods: Sequence[Evidence], tolerance: float, *, conditions: bool = True) -> Choice:
    """Return the order of methods, and the choice: the first of them, if it may be chosen.

    Of the methods that reach the length and cost no more than the tolerance, those are dropped that are clearly worse
    than the best: in retrieval, then in perplexity beyond the context, then in price within it. Of the rest the
    cheapest is chosen. Prices that lie less than the least difference above the lowest count as equal to it, and the
    method that most programs run goes first.

    Args:
        methods: the evidence of the methods.
        tolerance: the relative rise of the perplexity within the trained context that a method may cost.
        conditions: whether a method that costs more, or does not reach the target, may not be chosen; before a training
            it may.
    """
    level = [one for one in methods if math.isfinite(one.loss_in_all)]
    if conditions:
        level = [one for one in level if one.may_be_chosen(tolerance)]
    dropped = {}
    for criterion in CRITERIA:
        best = min(level, key=lambda one: fmean(getattr(one, criterion)), default=None)
        for one in level:
            if best is not None and is_clearly_worse(one, best, criterion):
                dropped[one.label] = criterion
        level = [one for one in level if one.label not in dropped]
    lowest = min(level, key=lambda one: fmean(one.cost), default=None)

    def preference(one: Evidence) -> tuple[float, ...]:
        assert lowest is not None
        if difference(one.cost, lowest.cost).estimate < LEAST_RISE:
            return 0, -len(one.served_by), fmean(one.cost)
        return 1, 0, fmean(one.cost)

    level.sort(key=preference)
    others = sorted((one for one in methods if one not in level), key=lambda one: one.loss_in_all)
    return Choice((*level, *others), tuple(level), dropped)


def best_half(methods: Sequence[Evidence], tolerance: float, *, conditions: bool = True) -> list[str]:
    """Return the better half of the methods, which are worth more windows: at least two, if there are two.

    Few windows show no clear difference, so estimates decide: the loss within and beyond the context together, which
    neither a method that changes nothing nor one that costs much keeps low. One place is kept for the best retriever,
    where right answers are twice as probable as under all others that go on: a few prompts rarely show more. The
    arguments are those of :func:`rank`.
    """

    def unfit(one: Evidence) -> bool:
        return conditions and not one.may_be_chosen(tolerance)

    ordered = sorted(methods, key=lambda one: (unfit(one), one.loss_in_all))
    half = ordered[: max(2, math.ceil(len(ordered) / 2))]
    fit = [one for one in ordered if unfit(one) == unfit(ordered[0])]
    retriever = min(fit, key=lambda one: fmean(one.retrieval))
    if fmean(retriever.retrieval) < min(fmean(one.retrieval) for one in half) - math.log(2):
        half[-1] = retriever
    return [one.method for one in half]


def is_settled(choice: Choice, tolerance: float, *, conditions: bool = True) -> bool:
    """Tell whether more windows would hardly change a choice.

    The chosen method reaches the target without doubt, all others are clearly worse, and the interval of its price lies
    on one side of the tolerance. The last arguments are those of :func:`rank`.
    """
    chosen = choice.chosen
    if chosen is None or chosen.reaches != "yes":
        return False
    for other in choice.order[1:]:
        if not any(is_clearly_worse(other, chosen, criterion) for criterion in CRITERIA):
            return False
    _, low, high = chosen.price
    return not conditions or (relative(low) <= tolerance) == (relative(high) <= tolerance)
