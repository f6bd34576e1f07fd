"""Held-out text and prompts, and which table is chosen by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_patch.evaluation.intervals import paired_shares
from rope_patch.evaluation.suite import EvalResult, EvalSuite
from rope_patch.fitting.rows import Objective
from rope_patch.methods import Method
from rope_patch.processes import from_first

SEED = 2_000_003
"""Added to the seed of held-out prompts, so that no comparison with a small seed asks the same."""


@dataclass(frozen=True)
class Candidate:
    """A table, and how it did on held-out text and prompts.

    Attributes:
        name: ``"start"``, ``"step 20"``, ``"average"`` (of the second half); where none of these will do, ``"halfway"``
            from the start to the average, a ``"quarter"`` or an ``"eighth"`` of this way.
        method: that puts it in.
        hits: which prompts were answered, by length.
        answers: mean loss of an answer over all prompts, its tokens added up [nats].
        nll: mean loss of text between the lengths, by the end of the bucket [nats/token].
    """

    name: str
    method: Method
    hits: Mapping[int, tuple[bool, ...]]
    answers: float
    nll: Mapping[int, float]

    @property
    def retrieval(self) -> dict[int, float]:
        """Share of prompts answered, by length."""
        return {length: sum(hits) / len(hits) for length, hits in self.hits.items()}

    @classmethod
    def from_scores(cls, name: str, method: Method, scores: EvalResult) -> Candidate:
        """Return the candidate with the scores that its table was given.

        Args:
            name: as above.
            method: as above.
            scores: on held-out text and prompts of one task.
        """
        lengths, text = scores.spec.lengths, scores.perplexity
        (retrieval,) = scores.retrieval.values()
        if text is None:
            raise ValueError("a fit is chosen on held-out text too: give windows >= 1")
        return cls(
            name,
            method,
            {length: tuple(sample.correct for sample in retrieval.samples(length)) for length in lengths},
            math.fsum(-retrieval.logprob(length) for length in lengths) / len(lengths),
            {high: math.log(text.between(low, high)) for low, high in itertools.pairwise([0, *lengths])},
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the scores, for JSON."""
        return {
            "name": self.name,
            "method": str(self.method),
            "retrieval": {str(length): share for length, share in self.retrieval.items()},
            "prompts": {str(length): len(hits) for length, hits in self.hits.items()},
            "answers_nll": self.answers,
            "nll": {str(high): nll for high, nll in self.nll.items()},
        }

    def never_worse(self, other: Candidate) -> bool:
        """Whether its retrieval and its perplexity are no worse than another's."""
        return self.finds_no_less(other) and self.reads_no_worse(other)

    def reads_no_worse(self, other: Candidate) -> bool:
        """Whether no bucket of text is predicted worse."""
        return all(self.nll[n] <= other.nll[n] for n in other.nll)

    def finds_no_less(self, other: Candidate) -> bool:
        """Whether retrieval is no worse, and significantly worse at no length.

        Significantly: the paired 95 % interval of the difference in prompts answered lies below 0. Over all lengths,
        either no fewer are answered, or not significantly fewer and the answers are no less probable: which of the
        borderline prompts are answered is chance, and no other table would match a start that was lucky with them.
        """
        whole, others = (tuple(itertools.chain(*c.hits.values())) for c in (self, other))
        return (
            sum(whole) >= sum(others) or (self.answers <= other.answers and paired_shares(whole, others)[1] >= 0)
        ) and all(paired_shares(self.hits[n], other.hits[n])[1] >= 0 for n in other.hits)

    @property
    def rank(self) -> tuple[int, float]:
        """Retrieval first, perplexity second; the larger the better."""
        return sum(map(sum, self.hits.values())), -math.fsum(self.nll.values())


@dataclass(eq=False)
class Evaluator:
    """Measures tables on held-out text and prompts, the same for all candidates.

    Attributes:
        model: whose table is fitted.
        suite: held-out windows and prompts of one task.
        objective: what is minimised.
        on_progress: called with a stage and the number of tokens just read.
    """

    model: nn.Module
    suite: EvalSuite
    objective: Objective
    on_progress: Callable[[str, int], None]

    def __call__(self, name: str, method: Method, result_cache: MutableMapping[str, Any] | None) -> Candidate:
        """Measure the table that is in place; the first process does it for all."""

        def measure() -> Candidate:
            scores = self.suite.run(
                self.model,
                resume=result_cache,
                on_progress=lambda tokens: self.on_progress(f"{name}: evaluation", tokens),
            )
            return Candidate.from_scores(name, method, scores)

        return from_first(measure)

    def loss(self, candidate: Candidate) -> float:
        """Return ``(1 - retrieval) * text + retrieval * answers``, what patience goes by.

        A mean over buckets [nats/token], and one over whole answers [nats].
        """
        text = math.fsum(candidate.nll.values()) / len(candidate.nll)
        return (1 - self.objective.retrieval) * text + self.objective.retrieval * candidate.answers


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best candidate that is in nothing worse than the first, the start; of equals, the start."""
    start, *others = candidates
    better = [c for c in others if c.never_worse(start) and c.rank != start.rank]
    return max(better, key=lambda c: c.rank, default=start)


def choose(candidates: Mapping[str, Sequence[Candidate]]) -> tuple[str, Candidate]:
    """Return the label of the start that leads to the best table, and that table.

    A start counts with the better of two ranks: its own, and that of the table fitted from it. So a table that is only
    by chance worse than its start does not lose to a table that the start beats.

    Args:
        candidates: of each start, itself first.
    """
    winners = {label: best(several) for label, several in candidates.items()}
    label = max(winners, key=lambda name: max(winners[name].rank, candidates[name][0].rank))
    return label, winners[label]
