"""Which method is chosen, and why; or why none is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rope_patch.evaluation.compare import Comparison, Row
from rope_patch.evaluation.metric import PairedDifference
from rope_patch.evaluation.metrics import METRICS
from rope_patch.evaluation.numbers import percent, perplexity_text, relative
from rope_patch.extending.options import UNPATCHED

REACHED = 0.5
"""A method reaches the target if it answers this share of what the unpatched model answers within its context."""

FLAT = 1.25
"""Where the unpatched model cannot answer prompts within its context: a method reaches the target if its perplexity at
the end is at most this many times the unpatched model's at the end of that context."""

AFTER = " after training"
"""What stands after the method of an adapted model."""

NATIVE = ("default", "linear", "dynamic", "yarn", "llama3")
"""Types of rotary tables that other programs compute by a formula of their own, without a list of numbers."""


@dataclass(frozen=True)
class Judged:
    """What speaks for and against a method.

    Attributes:
        method: as a method string.
        answered: share of the prompts answered at the target, over all tasks.
        perplexity: in the second half of the positions up to the target.
        change: of the loss within the trained context against the unpatched model, paired over windows [nats/token].
        native: every loader computes its table by a formula of its own.
        failures: why it cannot be chosen, a sentence each; empty where it can.
    """

    method: str
    answered: float
    perplexity: float
    change: PairedDifference
    native: bool
    failures: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the values for JSON; differences that no interval is known of are None."""
        values = asdict(self)
        values["change"] = [x if math.isfinite(x) else None for x in self.change]
        return values


@dataclass(frozen=True)
class Choice:
    """What was decided.

    Attributes:
        method: that is chosen; None where none can be.
        reason: in a sentence.
        judged: every method but the unpatched one, the best first.
        advice: what would help where none is chosen, a sentence each.
    """

    method: str | None
    reason: str
    judged: tuple[Judged, ...]
    advice: tuple[str, ...] = ()


class Judge:
    """Compares the methods of a comparison by the rules of ``extend``.

    Args:
        comparison: with the unpatched model as ``"default"``.
        tolerance: by which share the perplexity within the trained context may rise.
    """

    def __init__(self, comparison: Comparison, tolerance: float) -> None:
        self.comparison, self.tolerance = comparison, tolerance
        self.target = comparison.spec.longest
        self.within = max(n for n in comparison.spec.lengths if n <= comparison.trained_length)
        self.rows = {row.method: row for row in comparison.rows}
        self.unpatched = self.rows[UNPATCHED]

    def answered(self, row: Row, length: int) -> float:
        """Return the share of the prompts that are answered, over all tasks."""
        return statistics.fmean(result.accuracy(length) for result in row.scores.retrieval.values())

    def perplexity(self, row: Row, stop: int) -> float:
        """Return the perplexity in the second half of the positions below one."""
        text = row.scores.perplexity
        if text is None:
            raise ValueError("no window of text was measured: give windows >= 1")
        return text.between(self.comparison.spec.edge_at(stop // 2), stop)

    def judge(self, row: Row) -> Judged:
        """Return what speaks for and against a method."""
        change = PairedDifference(*self._against(row.method, UNPATCHED, "perplexity", self.within))
        answered, perplexity = self.answered(row, self.target), self.perplexity(row, self.target)
        failures = []
        rise = relative(change.estimate)
        if not rise <= self.tolerance:
            failures.append(
                f"within the trained {self.within} tokens perplexity changes by {percent(change.estimate)}, where "
                f"{self.tolerance:+.1%} are allowed"
            )
        possible = self.answered(self.unpatched, self.within)
        if possible >= REACHED and answered < REACHED * possible:
            failures.append(
                f"at {self.target} tokens it answers {answered:.0%} of the prompts, where the unpatched model answers "
                f"{possible:.0%} at {self.within}"
            )
        end = self.perplexity(self.unpatched, self.within)
        if possible < REACHED and not perplexity <= FLAT * end:
            failures.append(
                f"at the end of {self.target} tokens perplexity is {perplexity_text(perplexity)}, where the unpatched "
                f"model reads {perplexity_text(end)} at the end of {self.within}"
            )
        native = all(table.rope_type in NATIVE for table in row.tables)
        return Judged(row.method, answered, perplexity, change, native, tuple(failures))

    def order(self, methods: Sequence[str]) -> list[Judged]:
        """Return methods with the best first, by what was measured and without regard to intervals.

        Those that cannot be chosen come last; then retrieval at the target decides, then perplexity there.
        """
        judged = [self.judge(self.rows[method]) for method in methods]
        return sorted(judged, key=lambda one: (bool(one.failures), -one.answered, one.perplexity))

    def ahead(self, method: str, other: str) -> bool:
        """Tell whether a method is significantly better than another at the target, in retrieval or in perplexity."""
        return self._sign(method, other, "retrieval") > 0 or (
            self._sign(method, other, "retrieval") == 0 and self._sign(method, other, "perplexity") > 0
        )

    def level(self, judged: Sequence[Judged]) -> tuple[list[Judged], str]:
        """Return those that nothing tells from the best, and what told them from the others.

        Args:
            judged: methods, the best first.
        """
        left, by = list(judged), []
        for metric, name in (("retrieval", "retrieval"), ("perplexity", "perplexity")):
            best = (
                max(left, key=lambda one: one.answered)
                if metric == "retrieval"
                else min(left, key=lambda one: one.perplexity)
            )
            behind = [one for one in left if one is not best and self._sign(one.method, best.method, metric) < 0]
            by += [name] if behind else []
            left = [one for one in left if one not in behind]
        return left, " and ".join(by)

    def choose(self, methods: Sequence[str], *, conditions: bool = True) -> Choice:
        """Return the decision between methods.

        Args:
            methods: to choose from, without the unpatched one.
            conditions: leave out those that lose too much or do not reach the target.
        """
        judged = self.order(methods)
        fit = [one for one in judged if not (conditions and one.failures)]
        if not fit:
            return Choice(None, self._why_none(judged), tuple(judged), tuple(self._advice(judged)))
        if conditions and not any(self.ahead(one.method, UNPATCHED) for one in fit):
            why = f"no method is shown to be better than the checkpoint as it is at {self.target} tokens"
            advice = ("more windows and prompts (a larger budget) tell smaller differences apart",)
            return Choice(None, why, tuple(judged), advice)
        left, by = self.level(fit)
        chosen = next((one for one in left if one.native), left[0])
        reason = f"{chosen.method}: {chosen.answered:.0%} of the prompts of {self.target} tokens are answered"
        reason += f", perplexity {perplexity_text(chosen.perplexity)} at their end"
        if by:
            reason += f"; ahead of {_names(one.method for one in fit if one not in left)} in {by}"
        if len(left) > 1:
            reason += f"; not told apart from {_names(one.method for one in left if one is not chosen)}"
            if chosen.native and chosen is not left[0]:
                reason += ", and chosen because every loader computes its table by a formula"
        return Choice(chosen.method, reason, tuple(judged))

    def _sign(self, method: str, other: str, metric: str) -> int:
        """Return 1 where a method is significantly better at the target, -1 where it is worse, else 0."""
        signs = set()
        for task in self.comparison.spec.tasks if metric == "retrieval" else (None,):
            start = self.comparison.spec.edge_at(self.target // 2) if metric == "perplexity" else 0
            change = self._against(method, other, metric, self.target, start, task)
            better = change.high < 0 if METRICS[metric].lower_is_better else change.low > 0
            worse = change.low > 0 if METRICS[metric].lower_is_better else change.high < 0
            signs.add(1 if better else -1 if worse else 0)
        signs.discard(0)
        return signs.pop() if len(signs) == 1 else 0

    def _against(
        self, method: str, other: str, metric: str, stop: int, start: int = 0, task: str | None = None
    ) -> PairedDifference:
        found = self.comparison.difference(method, other, metric, stop, start, task)
        return PairedDifference(found.estimate, found.low, found.high)

    def _why_none(self, judged: Sequence[Judged]) -> str:
        best = judged[0]
        return f"no method can be chosen; the best is {best.method}, and {'; '.join(best.failures)}"

    def _advice(self, judged: Sequence[Judged]) -> list[str]:
        """Return what would help, a sentence each, by what the methods fail at."""
        trained = all(one.method.endswith(AFTER) for one in judged)
        advice = ["more training: --train-rows, or a larger --budget" if trained else "training: --train"]
        costly = [one for one in judged if len(one.failures) == 1 and "perplexity changes" in one.failures[0]]
        if costly:
            least = min(costly, key=lambda one: one.change.estimate)
            enough = math.ceil(1000 * relative(least.change.estimate)) / 1000
            advice.append(
                f"--tolerance {enough:g} would choose {least.method}, the least costly that reaches the length"
            )
            if not trained:
                advice.append(
                    f"rope-patch apply with {least.method}@{self.within}: short texts are read as before, but only by "
                    "rope_patch, since plain transformers has one table for all"
                )
        advice.append(f"a smaller --length than {self.target}")
        return advice


def _names(methods: Any) -> str:
    names = list(methods)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
