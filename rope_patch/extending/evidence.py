"""What was measured of each method, as numbers, window by window: the evidence that a choice rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal

from rope_patch.evaluation.compare import UNPATCHED, Comparison, Row, row_name
from rope_patch.evaluation.intervals import paired_means, wilson
from rope_patch.evaluation.metrics import METRICS, PairedDifference, Span
from rope_patch.patching.verify import shortened
from rope_patch.runtime.number_format import relative

LEAST_NATS = 0.1
"""Least difference of the log-probability of right answers that counts [nats]: a smaller one makes them less than a
tenth more probable."""

LEAST_RISE = math.log1p(0.02)
"""Least difference of a loss that counts, within the trained context and beyond it [nats/token]: 2 % of perplexity.
``benchmarks/results/extend_rules.json`` has the choices with others."""

REACHED_SHARE = 0.5
"""A method does not reach the target if prompts show that it answers less than this share of what the unpatched model
answers within its context."""

FLAT_RISE = math.log(1.25)
"""Where the unpatched model cannot answer prompts within its context: a method reaches the target if its loss at the
end is above the unpatched model's at the end of that context by at most this [nats/token], 1.25 times the perplexity.
A loss that is lower than the unpatched model's by as much needs no interval to be better."""

FAR_NATS = 1.0
"""Rise of the mean log-probability of right answers over the unpatched model that needs no interval [nats]: they are e
times as probable. A single prompt has no interval, and must not be a reason to refuse a method."""


@dataclass(frozen=True)
class Evidence:
    """The numbers of one method, or of the unpatched model. Smaller ones are better.

    Attributes:
        method: the method as a method string.
        trained: whether the weights were trained under it.
        within: the loss within the trained context (windows,) [nats/token].
        end: the loss in the second half of the trained context (windows,) [nats/token].
        perplexity: the loss in the second half of the positions up to the target (windows,) [nats/token].
        retrieval: the loss of the right answer at the target, its log-probability below zero (windows,) [nats].
        answered: the number of prompts that are answered at the target, one prompt a window.
        answered_within: the number of prompts that are answered within the trained context.
        cost: the rise of the loss within the trained context over the unpatched model (windows,) [nats/token].
        reaches: whether it reaches the target; "open" where the estimate says no and the interval is too wide.
        confirmed: whether right answers are significantly more probable at the target than in the unpatched model.
        served_by: the programs that run it, with the options that they need.
    """

    method: str
    trained: bool
    within: tuple[float, ...]
    end: tuple[float, ...]
    perplexity: tuple[float, ...]
    retrieval: tuple[float, ...]
    answered: int
    answered_within: int
    cost: tuple[float, ...] = ()
    reaches: Literal["yes", "open", "no"] = "yes"
    confirmed: bool = False
    served_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The label of its row in a comparison."""
        return row_name(self.method, self.trained)

    @property
    def name(self) -> str:
        """The label for a sentence, in which a table does not state every number."""
        return row_name(shortened(self.method), self.trained)

    @property
    def price(self) -> PairedDifference:
        """The mean of the cost, with its interval [nats/token]."""
        return difference(self.cost, [0.0] * len(self.cost))

    @property
    def loss_in_all(self) -> float:
        """The price and the loss beyond the context, added up [nats/token]; infinite where one is no finite number."""
        total = fmean(self.cost) + fmean(self.perplexity)
        return total if math.isfinite(total) else math.inf

    def may_be_chosen(self, tolerance: float) -> bool:
        """Tell whether it reaches the target, as far as is known, and costs no more than the tolerance."""
        return self.reaches != "no" and relative(fmean(self.cost)) <= tolerance


@dataclass(frozen=True)
class Findings:
    """The evidence of all methods, and where it was measured.

    Attributes:
        task: the task of the prompts.
        target: the length to reach [tokens].
        within: the trained context, or the longest measured length within it [tokens].
        half: the position near the middle of the target, from which on the loss counts as beyond the context.
        half_within: the position near the middle of ``within``.
        unpatched: the numbers of the unpatched model.
        methods: the evidence of each method.
    """

    task: str
    target: int
    within: int
    half: int
    half_within: int
    unpatched: Evidence
    methods: tuple[Evidence, ...]


def difference(ours: Sequence[float], theirs: Sequence[float]) -> PairedDifference:
    """Return the mean difference of values from the same windows, with its 95 % interval."""
    return PairedDifference(fmean(ours) - fmean(theirs), *paired_means(ours, theirs))


def measured_in(comparison: Comparison) -> Findings:
    """Return the evidence of every method of a comparison of one task, with the unpatched model as ``"default"``."""
    spec = comparison.spec
    (task,) = spec.tasks
    target = spec.longest
    within = max(length for length in spec.lengths if length <= comparison.trained_length)
    text = comparison.rows[0].scores.perplexity
    assert text is not None  # a run reads windows
    starts = [bucket.start for bucket in text.buckets]
    half = min(starts, key=lambda start: abs(start - target / 2))
    half_within = min(starts, key=lambda start: abs(start - within / 2))

    def losses(row: Row, start: int, stop: int) -> tuple[float, ...]:
        return tuple(METRICS["perplexity"].values(row.scores, Span(stop, start)))

    def numbers(row: Row) -> Evidence:
        retrieval = row.scores.retrieval[task]
        logprobs = METRICS["logprob"].values(row.scores, Span(target, task=task))
        return Evidence(
            method=row.method,
            trained=row.trained,
            within=losses(row, 0, within),
            end=losses(row, half_within, within),
            perplexity=losses(row, half, target),
            retrieval=tuple(-logprob for logprob in logprobs),
            answered=sum(sample.correct for sample in retrieval.samples(target)),
            answered_within=sum(sample.correct for sample in retrieval.samples(within)),
        )

    found = {row.label: numbers(row) for row in comparison.rows}
    unpatched = found.pop(UNPATCHED)
    methods = tuple(against(one, unpatched) for one in found.values())
    return Findings(task, target, within, half, half_within, unpatched, methods)


def against(one: Evidence, unpatched: Evidence) -> Evidence:
    """Return the evidence of a method with what it costs, and whether it reaches the target."""
    prompts = len(one.retrieval)
    answers = difference(unpatched.retrieval, one.retrieval)
    gain = difference(unpatched.perplexity, one.perplexity)
    by_far = gain.estimate > FLAT_RISE or answers.estimate >= FAR_NATS
    better = answers.low > LEAST_NATS or (answers.high >= -LEAST_NATS and (gain.low > LEAST_RISE or by_far))
    enough = REACHED_SHARE * unpatched.answered_within / prompts
    if unpatched.answered_within >= REACHED_SHARE * prompts:
        missed = one.answered / prompts < enough
        # The end of the interval, since few prompts leave a larger share open than the one measured.
        shown = wilson(one.answered, prompts)[1] < enough
    else:
        rise = difference(one.perplexity, unpatched.end)
        missed = not rise.estimate <= FLAT_RISE
        # Other positions hold other text, so that few windows prove no rise.
        shown = rise.low > FLAT_RISE
    reaches: Literal["yes", "open", "no"] = "yes"
    if not better or not math.isfinite(fmean(one.perplexity)) or (missed and shown):
        reaches = "no"
    elif missed:
        reaches = "open"
    cost = tuple(ours - theirs for ours, theirs in zip(one.within, unpatched.within, strict=True))
    return replace(one, cost=cost, reaches=reaches, confirmed=answers.low > LEAST_NATS)
