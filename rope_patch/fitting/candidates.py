"""Evaluate tables on held-out text and prompts and on a second domain, and choose one of them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_patch.evaluation.documents import TokenDocument
from rope_patch.evaluation.intervals import paired_shares
from rope_patch.evaluation.metrics import METRICS, Metric, PairedDifference, Span, spans_of
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.retrieval import effective_prompts
from rope_patch.evaluation.suite import EvalResult, EvalSuite
from rope_patch.methods import Method
from rope_patch.runtime import progress

RETRIEVAL_TASK = "passkey"

METRIC_OF = {
    "nll": ("perplexity", "scores"),
    "second_nll": ("perplexity", "second"),
    "retrieval": ("retrieval", "scores"),
}
"""The comparisons of two candidates: for each the name of the metric, and the attribute that it is computed from."""


@dataclass(frozen=True)
class Candidate:
    """A table, and its scores on held-out text and prompts.

    Attributes:
        name: ``"start"``, ``"step 20"`` or ``"average"`` (of the second half); if none of these is good enough, also
            ``"halfway"`` from the start to the average, a ``"quarter"`` or an ``"eighth"`` of this way.
        method: the method that gives the table.
        scores: scores on held-out text and prompts.
        second: scores on the text of the second domain; None if there is no such domain.
    """

    name: str
    method: Method
    scores: EvalResult
    second: EvalResult | None

    @property
    def means(self) -> dict[str, dict[int, float]]:
        """Losses of both domains between the lengths [nats/token], and the share of answered prompts, by length."""
        return self._measured(lambda metric, of, span: statistics.fmean(metric.values(getattr(self, of), span)))

    @property
    def answers(self) -> float:
        """Mean loss of an answer over all prompts, where the losses of its tokens are added up [nats]."""
        lengths = self.scores.spec.lengths
        return math.fsum(-self.scores.retrieval[RETRIEVAL_TASK].logprob(length) for length in lengths) / len(lengths)

    @property
    def answered(self) -> list[list[bool]]:
        """Whether each prompt was answered, in a list for each haystack of all lengths."""
        retrieval = self.scores.retrieval[RETRIEVAL_TASK]
        haystacks = (several for length in self.scores.spec.lengths for several in retrieval.haystacks(length))
        return [[sample.correct for sample in several] for several in haystacks]

    @property
    def rank(self) -> tuple[int, float]:
        """Number of answered prompts, then the negative loss of both domains; a larger rank is better."""
        losses = [*self.means["nll"].values(), *self.means["second_nll"].values()]
        return sum(map(sum, self.answered)), -math.fsum(losses)

    def changes(self, other: Candidate) -> dict[str, dict[int, PairedDifference]]:
        """Return the differences of the means from those of another candidate, with 95 % intervals."""
        return self._measured(lambda metric, of, span: metric.difference(getattr(self, of), getattr(other, of), span))

    def _measured(self, measure: Callable[[Metric, str, Span], Any]) -> dict[str, dict[int, Any]]:
        """Return what a function measures for each comparison and span, leaving out a second domain that is not there.

        Args:
            measure: function of a metric, the name of an attribute of a candidate, and a span.
        """
        measured: dict[str, dict[int, Any]] = {}
        for kind, (name, of) in METRIC_OF.items():
            spans = spans_of(METRICS[name], self.scores.spec) if getattr(self, of) else []
            measured[kind] = {span.stop: measure(METRICS[name], of, span) for span in spans}
        return measured

    def never_worse(self, other: Candidate) -> bool:
        """Tell whether retrieval, text and the second domain are no worse than those of another candidate.

        No bucket of text may be predicted worse. The second domain may not be predicted worse on average over buckets,
        nor significantly worse in any: the paired 95 % interval over windows may not lie above 0.
        """
        changes = self.changes(other)
        ours, theirs = (math.fsum(candidate.means["second_nll"].values()) for candidate in (self, other))
        return (
            self.finds_no_less(other)
            and all(change.estimate <= 0 for change in changes["nll"].values())
            and ours <= theirs
            and all(change.low <= 0 for change in changes["second_nll"].values())
        )

    def finds_no_less(self, other: Candidate) -> bool:
        """Tell whether retrieval is no worse than that of another candidate, and significantly worse at no length.

        It is significantly worse if the paired 95 % interval of the difference in answered prompts lies below 0, where
        the prompts of a haystack count as fewer independent ones. Over all lengths, either no fewer prompts are
        answered, or not significantly fewer and the answers are no less probable: which of the borderline prompts are
        answered is chance, and no other table would match a start that was lucky with them.
        """
        ours, theirs = self.answered, other.answered
        pairs = zip(ours, theirs, strict=True)
        differences = [[float(a) - float(b) for a, b in zip(*pair, strict=True)] for pair in pairs]
        one, another = list(itertools.chain(*ours)), list(itertools.chain(*theirs))
        _, high = paired_shares(one, another, count=effective_prompts(RETRIEVAL_TASK, differences, 0.95))
        lost = sum(one) < sum(another) and (self.answers > other.answers or high < 0)
        return not lost and all(change.high >= 0 for change in self.changes(other)["retrieval"].values())

    def to_dict(self, start: Candidate) -> dict[str, Any]:
        """Return the scores, and their differences from those of the start with 95 % intervals, as a dict for JSON."""
        changes = {kind: {n: list(c) for n, c in several.items()} for kind, several in self.changes(start).items()}
        facts = {"name": self.name, "method": str(self.method), "answers_nll": self.answers}
        return {**facts, **self.means, "change_from_start": changes}


@dataclass(eq=False)
class Evaluator:
    """Evaluates tables on held-out text and prompts and on a second domain, the same for all candidates.

    Attributes:
        model: the model whose table is fitted.
        suite: the suite of held-out windows and prompts.
        second: windows of the second domain, as long as those of the suite; empty if there is no such domain.
    """

    model: nn.Module
    suite: EvalSuite
    second: Sequence[TokenDocument] = ()

    def __call__(self, name: str, method: Method) -> Candidate:
        """Evaluate the table that is in place on the model, and return it as a candidate.

        Args:
            name: name of the candidate.
            method: the method that gives the table.
        """
        spec, second = self.suite.spec, None
        with progress.stage(f"{name}: evaluation"):
            scores = self.suite.run(self.model)
            if self.second:
                cut: dict[str, Any] = {"window": spec.longest, "buckets": spec.edges, "batch": spec.window_batch}
                second = EvalResult(spec, perplexity(self.model, self.second, **cut), {})
        return Candidate(name, method, scores, second)


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best candidate that is not worse than the first one, the start, in anything; otherwise the start."""
    start, *others = candidates
    # A candidate that equals the start is no reason to change the table.
    better = [c for c in others if c.never_worse(start) and c.rank != start.rank]
    return max(better, key=lambda c: c.rank, default=start)
