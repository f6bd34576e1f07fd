"""Which method is chosen, and why; or why none is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.evaluation.compare import UNPATCHED, Comparison, Row, row_name
from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.metrics import METRICS, PairedDifference, Span, change_sentence, change_text
from rope_patch.patching.verify import shortened
from rope_patch.runtime.captions import count_text, names_text
from rope_patch.runtime.number_format import number_text, percent, perplexity_text, relative

REACHED_SHARE = 0.5
"""A method does not reach the target if prompts show that it answers less than this share of what the unpatched model
answers within its context."""

LEAST_NATS = 0.1
"""Difference of the log-probability of right answers beyond which the whole interval must lie to count [nats]: a
smaller one makes them less than a tenth more probable, which is worth less than a few percent of perplexity."""

FLAT_RATIO = 1.25
"""Where the unpatched model cannot answer prompts within its context: a method reaches the target if its perplexity at
the end is at most this many times the unpatched model's at the end of that context."""

FAR_NATS = 1.0
"""Rise of the mean log-probability of right answers over the unpatched model that needs no interval [nats]: they are e
times as probable. A single prompt has no interval, and must not be a reason to refuse a method."""

RANKING = (
    "Methods under which right answers are less probable at the target length, by more than 0.1 nats at both ends of "
    "the interval, are behind; the others are ranked by perplexity there; among those that this does not tell apart, "
    "the one that costs least within the trained context is chosen"
)
"""The order of the choice, as a sentence for reports."""

NEEDLES = (
    "In each window of text a needle lies within the trained context and is asked for at every length; it shifts "
    "perplexity, in windows of 8192 tokens by 0.1 to 0.2 %"
)
"""How the measurement is made, as a sentence for reports."""


@dataclass(frozen=True)
class EvaluatedMethod:
    """A method with the measurements that speak for and against it.

    Attributes:
        method: the method as a method string.
        trained: whether the weights were trained under it.
        answered: the number of prompts that are answered at the target length.
        prompts: the number of prompts of that length.
        logprob: the mean log-probability of their right answers [nats].
        perplexity: the perplexity in the second half of the positions up to the target; infinite where it is not a
            number.
        change: the change of the loss within the trained context against the unpatched model, paired over windows
            [nats/token].
        failures: the reasons why it cannot be chosen, a sentence each; empty where it can.
        doubt: why it is open whether it reaches the target, in a sentence, where it answers too few prompts and these
            are too few to refuse it; empty where it is not open.
    """

    method: str
    trained: bool
    answered: int
    prompts: int
    logprob: float
    perplexity: float
    change: PairedDifference
    failures: tuple[str, ...]
    doubt: str = ""

    @property
    def label(self) -> str:
        """The label of its row in a comparison."""
        return row_name(self.method, self.trained)

    @property
    def name(self) -> str:
        """The label for a sentence, in which a table does not state every number."""
        return row_name(shortened(self.method), self.trained)


@dataclass(frozen=True)
class Choice:
    """The decision between methods.

    Attributes:
        chosen: the method that is chosen; None where none can be.
        reason: the reason for the choice, or why there is none, in a sentence.
        cost: what it costs on texts within the trained context, and what would lower that, in a sentence; empty where
            none is chosen.
        evaluated: every method but the unpatched one, the best first.
        advice: the steps that would help where none is chosen, a sentence each.
        unconfirmed: why prompts do not confirm the choice, in a sentence; empty where it answers at least half of what
            the unpatched model answers within its context, and right answers have a significantly higher
            log-probability at the target length than in the unpatched model.
    """

    chosen: EvaluatedMethod | None
    reason: str
    cost: str
    evaluated: tuple[EvaluatedMethod, ...]
    advice: tuple[str, ...] = ()
    unconfirmed: str = ""

    @property
    def method(self) -> str | None:
        """The chosen method as a method string."""
        return None if self.chosen is None else self.chosen.method

    @property
    def label(self) -> str | None:
        """The label of the row of the chosen method."""
        return None if self.chosen is None else self.chosen.label

    @property
    def verdict(self) -> list[str]:
        """The decision in sentences: the price first, or that there is none and what would help."""
        if self.chosen is None:
            sentences = [f"Nothing was written: {self.reason}."]
            for one in self.evaluated:
                # The reason has those of the best one already.
                sentences += [f"{one.label}: {failure}." for failure in one.failures if failure not in self.reason]
            return sentences + [f"What would help: {sentence}." for sentence in self.advice]
        sentences = [f"{self.chosen.name} was chosen. The price: {self.cost}."]
        if self.unconfirmed:
            sentences.append(f"Unconfirmed: {self.unconfirmed}.")
        return [*sentences, f"{self.reason}."]


class MethodEvaluator:
    """Compares the methods of a comparison by the rules of ``extend``.

    Args:
        comparison: the comparison of the methods, with the unpatched model as ``"default"``, and of one task.
        tolerance: the relative rise of the perplexity within the trained context that a method may cost.
        conditions: whether a method that loses more, or does not reach the target, is behind all others and cannot be
            chosen; before a training it may.
    """

    def __init__(self, comparison: Comparison, tolerance: float, *, conditions: bool = True) -> None:
        self.comparison = comparison
        self.tolerance = tolerance
        self.conditions = conditions
        (self.task,) = comparison.spec.tasks
        self.target = comparison.spec.longest
        self.within = max(n for n in comparison.spec.lengths if n <= comparison.trained_length)
        self.rows = {row.label: row for row in comparison.rows}
        self.unpatched = self.rows[UNPATCHED]
        self.methods = [self.evaluate(row) for label, row in self.rows.items() if label != UNPATCHED]

    def perplexity(self, row: Row, stop: int) -> float:
        """Return the perplexity in the second half of the positions below ``stop``."""
        perplexity = METRICS["perplexity"].value(row.scores, Span(stop, self.half(stop)))
        if math.isnan(perplexity):
            return math.inf  # so that it sorts last
        return perplexity

    def half(self, stop: int) -> int:
        """Return the edge of the measured position ranges that is nearest to the middle of the positions up to here."""
        text = self.unpatched.scores.perplexity
        assert text is not None  # a run reads windows
        starts = [bucket.start for bucket in text.buckets if bucket.start < stop]
        return min(starts, key=lambda start: abs(start - stop / 2))

    def positions(self, stop: int) -> str:
        """Return the positions that :meth:`perplexity` averages over, in words."""
        return f"positions {self.half(stop)} to {stop}"

    def evaluate(self, row: Row) -> EvaluatedMethod:
        """Return what speaks for and against a method."""
        change = self.comparison.difference(row.label, UNPATCHED, "perplexity", Span(self.within, 0))
        retrieval = row.scores.retrieval[self.task]
        answers = [sample.correct for sample in retrieval.samples(self.target)]
        before = self.unpatched.scores.retrieval[self.task]
        perplexity = self.perplexity(row, self.target)
        failures = []
        rise = relative(change.estimate)
        # Not `rise > tolerance`, which would let a rise of NaN pass.
        if not rise <= self.tolerance:
            failures.append(
                f"within the trained {self.within} tokens perplexity changes by {percent(change.estimate)}, where "
                f"{percent(math.log1p(self.tolerance))} are allowed"
            )
        possible = before.accuracy(self.within)
        # The end of the interval, since few prompts leave a larger share open than the one measured.
        at_most = retrieval.interval(self.target)[1]
        doubt = ""
        if possible >= REACHED_SHARE and retrieval.accuracy(self.target) < REACHED_SHARE * possible:
            too_few = (
                f"at {self.target} tokens it answers {retrieval.answered(self.target)} prompts, where the unpatched "
                f"model answers {before.answered(self.within)} at {self.within}"
            )
            if at_most < REACHED_SHARE * possible:
                failures.append(too_few)
            else:
                doubt = too_few
        end = self.perplexity(self.unpatched, self.within)
        not_flat = (
            f"at {self.positions(self.target)} perplexity is {perplexity_text(perplexity)}, where that of the "
            f"unpatched model is {perplexity_text(end)} at {self.positions(self.within)}"
        )
        if not math.isfinite(perplexity):
            failures.append(not_flat)
        elif possible < REACHED_SHARE and perplexity > FLAT_RATIO * end:
            # Other positions hold other text, so that few windows prove no rise.
            if self._least_rise(row) > math.log(FLAT_RATIO):
                failures.append(not_flat)
            else:
                doubt = not_flat
        if not self.better_than_unpatched(row):
            failures.append(f"at {self.target} tokens it is not shown to be better than the unpatched model")
        return EvaluatedMethod(
            method=row.method,
            trained=row.trained,
            answered=sum(answers),
            prompts=len(answers),
            logprob=retrieval.logprob(self.target),
            perplexity=perplexity,
            change=change,
            failures=tuple(failures),
            doubt=doubt,
        )

    def _least_rise(self, row: Row) -> float:
        """Return the lower end of the interval of the loss at the target above that within the trained context.

        It is the difference between :meth:`perplexity` of a method and of the unpatched model there, paired by window
        [nats/token].
        """
        metric = METRICS["perplexity"]
        ours = metric.values(row.scores, Span(self.target, self.half(self.target)))
        theirs = metric.values(self.unpatched.scores, Span(self.within, self.half(self.within)))
        return paired_means(ours, theirs)[0]

    def order(self, *, conditions: bool) -> list[EvaluatedMethod]:
        """Return the methods with the best first.

        Those that keep more of the conditions come first, then those that are not behind in retrieval at the target,
        then perplexity there decides.

        Args:
            conditions: whether methods that fail fewer conditions come first.
        """
        behind = {one.label for one in self.behind(self.methods)}

        def rank(one: EvaluatedMethod) -> tuple[float, ...]:
            failures = 0
            if conditions:
                failures = len(one.failures)
            lost = -one.logprob if one.label in behind else 0.0
            return failures, lost, one.perplexity

        return sorted(self.methods, key=rank)

    def behind(self, evaluated: Sequence[EvaluatedMethod]) -> list[EvaluatedMethod]:
        """Return the methods that are significantly behind the one under which right answers are most probable."""
        best = max(evaluated, key=lambda one: (one.logprob, -one.perplexity))
        return [one for one in evaluated if self._sign(one.label, best.label, "logprob") < 0]

    def leaders(self, count: int) -> list[str]:
        """Return the methods that are worth more windows and prompts.

        Few windows tell poorly whether a condition is kept, and methods that change nothing keep most of them. So the
        best with regard to the conditions and the best without take turns. One under which right answers are more
        probable than under all of these takes the last place, by which it may drive out a method that costs less: a few
        prompts rarely show a difference, so that perplexity alone would decide who stays.

        Args:
            count: the number of methods, at least 1.
        """
        orders = self.order(conditions=self.conditions), self.order(conditions=False)
        turns = dict.fromkeys(evaluated.label for pair in zip(*orders, strict=True) for evaluated in pair)
        leaders = list(turns)[:count]
        likeliest = min(self.methods, key=lambda one: (len(one.failures) if self.conditions else 0, -one.logprob))
        if likeliest.logprob > LEAST_NATS + max(one.logprob for one in self.methods if one.label in leaders):
            leaders[-1] = likeliest.label
        return leaders

    def settled(self) -> bool:
        """Tell whether more windows and prompts would hardly change the decision.

        The best is significantly ahead of all others, and of the unpatched model, it is not open whether it reaches the
        target, and the interval of what it loses within the trained context lies on one side of the tolerance.
        """
        best, *others = self.order(conditions=self.conditions)
        if best.doubt or not all(self.ahead(best.label, other.label) for other in others):
            return False
        if not self.conditions:
            return True
        tolerable = [relative(end) <= self.tolerance for end in (best.change.low, best.change.high)]
        return tolerable[0] == tolerable[1] and self.better_than_unpatched(self.rows[best.label])

    def ahead(self, method: str, other: str) -> bool:
        """Tell whether a method is significantly better than another at the target, in retrieval or in perplexity."""
        return self._sign(method, other, "logprob") > 0 or (
            self._sign(method, other, "logprob") == 0 and self._sign(method, other, "perplexity") > 0
        )

    def better_than_unpatched(self, row: Row) -> bool:
        """Tell whether a method is ahead of the unpatched model at the target, significantly or by far.

        A single window or prompt has no interval; a perplexity that differs by more than the :data:`FLAT_RATIO`, or a
        log-probability of right answers by the :data:`FAR_NATS`, needs none.
        """
        reads_better = FLAT_RATIO * self.perplexity(row, self.target) < self.perplexity(self.unpatched, self.target)
        ours, theirs = (self._logprob(one) for one in (row, self.unpatched))
        by_far = reads_better or ours >= theirs + FAR_NATS
        return self.ahead(row.label, UNPATCHED) or (by_far and self._sign(row.label, UNPATCHED, "logprob") == 0)

    def _logprob(self, row: Row) -> float:
        """Return the mean log-probability of right answers at the target [nats]."""
        return row.scores.retrieval[self.task].logprob(self.target)

    def level(self, evaluated: Sequence[EvaluatedMethod]) -> tuple[list[EvaluatedMethod], str]:
        """Return the methods that do not differ significantly from the best, and the metrics in which the others do.

        Args:
            evaluated: the methods to compare, the best first.
        """
        behind = self.behind(evaluated)
        remaining = [one for one in evaluated if one not in behind]
        best = min(remaining, key=lambda one: one.perplexity)
        worse = [one for one in remaining if self._sign(one.label, best.label, "perplexity") < 0]
        by = []
        if behind:
            by.append("the log-probability of right answers")
        if worse:
            by.append("perplexity")
        return [one for one in remaining if one not in worse], " and ".join(by)

    def choose(self) -> Choice:
        """Return the decision between the methods."""
        evaluated = self.order(conditions=self.conditions)
        fit = [one for one in evaluated if math.isfinite(one.perplexity) and not (self.conditions and one.failures)]
        if not fit:
            reason = f"no method can be chosen; the best is {evaluated[0].name}, and {'; '.join(evaluated[0].failures)}"
            return Choice(None, reason, "", tuple(evaluated), tuple(self._advice(evaluated)))
        remaining, by = self.level(fit)
        chosen = min(remaining, key=lambda one: one.change.estimate)
        reason = f"{chosen.name}: {chosen.answered} of {chosen.prompts} prompts of {self.target} tokens are answered"
        reason += f", the log-probability of right answers is {number_text(chosen.logprob)}"
        reason += f", perplexity is {perplexity_text(chosen.perplexity)} at {self.positions(self.target)}"
        if by:
            reason += f"; ahead of {names_text([one.name for one in fit if one not in remaining])} in {by}"
        if len(remaining) > 1:
            others = names_text([one.name for one in remaining if one is not chosen])
            reason += f"; not significantly different from {others}, and the least costly of them within the trained "
            reason += "context"
        most = max(fit, key=lambda one: one.answered)
        if most.answered > chosen.answered:
            cost = change_text(METRICS["perplexity"], most.change.estimate)
            reason += f"; {most.name} answers {most.answered} of {most.prompts}, and changes perplexity within the "
            reason += f"trained context by {cost}"
        unconfirmed = ""
        if chosen.doubt:
            unconfirmed = f"{chosen.doubt}; training (--train) may mend that, and a larger --budget asks more prompts"
        elif self._sign(chosen.label, UNPATCHED, "logprob") <= 0:
            unconfirmed = (
                f"{count_text(chosen.prompts, 'prompt')} of {self.target} tokens cannot show that {chosen.name} "
                "retrieves more than the unpatched model; a larger --budget asks more prompts"
            )
        return Choice(chosen, reason, self._cost(chosen), tuple(evaluated), unconfirmed=unconfirmed)

    def _sign(self, method: str, other: str, metric: str) -> int:
        """Return 1 where a method is significantly better at the target, -1 where it is worse, else 0."""
        span = Span(self.target, task=self.task)
        least = LEAST_NATS
        if metric == "perplexity":
            span = Span(self.target, self.half(self.target))
            least = 0.0
        change = self.comparison.difference(method, other, metric, span)
        # The interval of a single window is not known: its ends are NaN, which differ from nothing.
        if not (change.low > least or change.high < -least):
            return 0
        worse = METRICS[metric].lower_is_better == (change.estimate > 0)
        return -1 if worse else 1

    def _cost(self, chosen: EvaluatedMethod) -> str:
        change = change_sentence(METRICS["perplexity"], chosen.change)
        sentence = f"within the trained {self.within} tokens perplexity changes by {change}"
        if not chosen.change.estimate > 0:
            return sentence
        training = "training (--train)"
        if chosen.trained:
            training = "a longer training (--train-rows)"
        return f"{sentence}; {training} or a smaller --length than {self.target} lowers that"

    def _advice(self, evaluated: Sequence[EvaluatedMethod]) -> list[str]:
        """Return what would help, a sentence each, by what the methods fail at."""
        advice = ["training: --train"]
        if any(one.trained for one in evaluated):
            advice = ["more training: --train-rows, or a larger --budget"]
        one_failure = [one for one in evaluated if len(one.failures) == 1]
        costly = [one for one in one_failure if 1 >= relative(one.change.estimate) > self.tolerance]
        if costly:
            least = min(costly, key=lambda one: one.change.estimate)
            # Rounded up, so that the method passes with the tolerance that is printed.
            enough = math.ceil(1000 * relative(least.change.estimate)) / 1000
            advice.append(
                f"a --tolerance of {enough:g} or more: {least.label} is the least costly of those measured to the end"
            )
        if any(not self.better_than_unpatched(self.rows[one.label]) for one in one_failure):
            advice.append("a larger --budget: more windows and prompts tell smaller differences apart")
        advice.append(f"a smaller --length than {self.target}")
        return advice
