"""Held-out text and prompts, text of a second domain, and which table is chosen by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from rope_patch.evaluation.answers import ShownAnswer, few_answers, one_of_each
from rope_patch.evaluation.documents import TokenDocument
from rope_patch.evaluation.intervals import paired_means, paired_shares
from rope_patch.evaluation.losses import PerplexityResult
from rope_patch.evaluation.metric import PairedDifference
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.retrieval import effective_prompts
from rope_patch.evaluation.suite import ANSWERED, EvalResult, EvalSuite
from rope_patch.fitting.rows import Objective
from rope_patch.methods import Method
from rope_patch.processes import from_first

SEED = 2_000_003
"""Added to the seed of held-out prompts, so that no comparison with a small seed asks the same."""


Losses = Mapping[int, tuple[float, ...]]
"""The mean loss of each window between two lengths, by the end of the bucket [nats/token]."""


@dataclass(frozen=True)
class Candidate:
    """A table, and how it did on held-out text and prompts.

    Attributes:
        name: ``"start"``, ``"step 20"``, ``"average"`` (of the second half); where none of these will do, ``"halfway"``
            from the start to the average, a ``"quarter"`` or an ``"eighth"`` of this way.
        method: that puts it in.
        haystacks: which prompts were answered, by length and haystack.
        answers: mean loss of an answer over all prompts, its tokens added up [nats].
        windows: loss of each window of held-out text.
        second_windows: loss of each window of the second domain; empty where there is none.
        task: of the prompts.
        first_choice: share of answers that are first choice, by length.
        answers_given: of each length a wrong answer, where there is one, and a right one.
    """

    name: str
    method: Method
    haystacks: Mapping[int, tuple[tuple[bool, ...], ...]]
    answers: float
    windows: Losses
    second_windows: Losses = field(default_factory=dict)
    task: str = "passkey"
    first_choice: Mapping[int, float] = field(default_factory=dict)
    answers_given: tuple[ShownAnswer, ...] = ()

    @property
    def hits(self) -> dict[int, tuple[bool, ...]]:
        """Which prompts were answered, by length."""
        return {length: tuple(itertools.chain(*several)) for length, several in self.haystacks.items()}

    @property
    def retrieval(self) -> dict[int, float]:
        """Share of prompts answered, by length."""
        return {length: sum(hits) / len(hits) for length, hits in self.hits.items()}

    @property
    def nll(self) -> dict[int, float]:
        """Mean loss of held-out text between the lengths, by the end of the bucket [nats/token]."""
        return _means(self.windows)

    @property
    def second_nll(self) -> dict[int, float]:
        """Mean loss of the second domain, by the end of the bucket [nats/token]."""
        return _means(self.second_windows)

    @property
    def few_answers(self) -> list[ShownAnswer]:
        """A wrong answer and a right one, those of the shortest prompts that have them."""
        return [answer for _, answer in one_of_each(("", answer) for answer in self.answers_given)]

    @classmethod
    def from_scores(
        cls, name: str, method: Method, scores: EvalResult, second: PerplexityResult | None = None
    ) -> Candidate:
        """Return the candidate with the scores that its table was given.

        Args:
            name: as above.
            method: as above.
            scores: on held-out text and prompts of one task.
            second: on the second domain, in the same buckets.
        """
        lengths, text = scores.spec.lengths, scores.perplexity
        ((task, retrieval),) = scores.retrieval.items()
        if text is None:
            raise ValueError("a fit is chosen on held-out text too: give windows >= 1")
        return cls(
            name,
            method,
            {
                length: tuple(tuple(sample.correct for sample in several) for several in retrieval.haystacks(length))
                for length in lengths
            },
            math.fsum(-retrieval.logprob(length) for length in lengths) / len(lengths),
            _losses(text, lengths),
            {} if second is None else _losses(second, lengths),
            task,
            {length: retrieval.first_choice(length) for length in lengths},
            tuple(answer for _, answer in few_answers([(name, scores)], lengths)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the scores, for JSON."""
        return {
            "name": self.name,
            "method": str(self.method),
            "retrieval": {str(length): share for length, share in self.retrieval.items()},
            "prompts": {str(length): len(hits) for length, hits in self.hits.items()},
            "first_choice": {str(length): share for length, share in self.first_choice.items()},
            "answers_given": [asdict(answer) for answer in self.answers_given],
            "answers_nll": self.answers,
            "nll": {str(high): nll for high, nll in self.nll.items()},
            "second_nll": {str(high): nll for high, nll in self.second_nll.items()},
        }

    def text_changes(self, other: Candidate) -> dict[int, PairedDifference]:
        """Return how the loss of held-out text differs from another's, with 95 % intervals over windows."""
        return _changes(self.windows, other.windows)

    def second_changes(self, other: Candidate) -> dict[int, PairedDifference]:
        """Return the same of the second domain."""
        return _changes(self.second_windows, other.second_windows)

    def retrieval_changes(self, other: Candidate) -> dict[int, PairedDifference]:
        """Return how the shares answered differ from another's, with 95 % intervals over haystacks."""
        return {n: self._retrieval_change(other, [n]) for n in self.haystacks}

    def changes(self, other: Candidate) -> dict[str, dict[str, list[float]]]:
        """Return all differences from another, for JSON: estimate, lower and upper end of the 95 % interval."""
        kinds = {
            "nll": self.text_changes(other),
            "second_nll": self.second_changes(other),
            "retrieval": self.retrieval_changes(other),
        }
        return {name: {str(n): list(change) for n, change in by_length.items()} for name, by_length in kinds.items()}

    def never_worse(self, other: Candidate) -> bool:
        """Whether its retrieval and its perplexity are no worse than another's, and the second domain's neither."""
        return self.finds_no_less(other) and self.reads_no_worse(other) and self.carries_over(other)

    def reads_no_worse(self, other: Candidate) -> bool:
        """Whether no bucket of text is predicted worse."""
        return all(self.nll[n] <= other.nll[n] for n in other.nll)

    def carries_over(self, other: Candidate) -> bool:
        """Whether the second domain is predicted no worse on average over buckets, and significantly worse in none.

        Significantly: the paired 95 % interval over windows lies above 0. True where there is no second domain.
        """
        ours, theirs = self.second_nll, other.second_nll
        return math.fsum(ours.values()) <= math.fsum(theirs.values()) and all(
            change.low <= 0 for change in self.second_changes(other).values()
        )

    def finds_no_less(self, other: Candidate) -> bool:
        """Whether retrieval is no worse, and significantly worse at no length.

        Significantly: the paired 95 % interval of the difference in prompts answered lies below 0, over as many
        independent prompts as the haystacks are worth. Over all lengths, either no fewer are answered, or not
        significantly fewer and the answers are no less probable: which of the borderline prompts are answered is
        chance, and no other table would match a start that was lucky with them.
        """
        whole = self._retrieval_change(other, list(self.haystacks))
        return (whole.estimate >= 0 or (self.answers <= other.answers and whole.high >= 0)) and all(
            change.high >= 0 for change in self.retrieval_changes(other).values()
        )

    @property
    def rank(self) -> tuple[int, float]:
        """Retrieval first, perplexity of both domains second; the larger the better."""
        losses = [*self.nll.values(), *self.second_nll.values()]
        return sum(map(sum, self.hits.values())), -math.fsum(losses)

    def _retrieval_change(self, other: Candidate, lengths: Sequence[int]) -> PairedDifference:
        ours, theirs = ([hits for n in lengths for hits in c.haystacks[n]] for c in (self, other))
        apart = [
            [float(a) - float(b) for a, b in zip(one, another, strict=True)]
            for one, another in zip(ours, theirs, strict=True)
        ]
        mine, others = (list(itertools.chain(*several)) for several in (ours, theirs))
        count = effective_prompts(self.task, apart, 0.95)
        estimate = (sum(mine) - sum(others)) / len(mine)
        return PairedDifference(estimate, *paired_shares(mine, others, count=count))


def _means(losses: Losses) -> dict[int, float]:
    return {high: math.fsum(values) / len(values) for high, values in losses.items()}


def _losses(text: PerplexityResult, lengths: Sequence[int]) -> Losses:
    """Return the loss of each window between the lengths; all windows have as many tokens there."""
    inside = {high: text.inside(low, high) for low, high in itertools.pairwise([0, *lengths])}
    return {
        high: tuple(sum(d.nll[i] for i in at) / sum(d.tokens[i] for i in at) for d in text.documents)
        for high, at in inside.items()
    }


def _changes(ours: Losses, theirs: Losses) -> dict[int, PairedDifference]:
    one, other = _means(ours), _means(theirs)
    return {n: PairedDifference(one[n] - other[n], *paired_means(ours[n], theirs[n])) for n in ours}


@dataclass(eq=False)
class Evaluator:
    """Measures tables on held-out text and prompts and on a second domain, the same for all candidates.

    Attributes:
        model: whose table is fitted.
        suite: held-out windows and prompts of one task.
        second: windows of the second domain, as long as the suite's; none where there is no such domain.
        objective: what is minimised.
        on_progress: called with a stage and the number of tokens just read.
    """

    model: nn.Module
    suite: EvalSuite
    second: Sequence[TokenDocument]
    objective: Objective
    on_progress: Callable[[str, int], None]

    def __call__(self, name: str, method: Method, result_cache: MutableMapping[str, Any] | None) -> Candidate:
        """Measure the table that is in place; the first process does it for all."""
        spec = self.suite.spec
        options: dict[str, Any] = {
            "resume": result_cache,
            "on_progress": lambda tokens: self.on_progress(f"{name}: evaluation", tokens),
        }

        def measure() -> Candidate:
            scores, second = self.suite.run(self.model, **options), None
            if self.second:
                chunk = None if spec.chunk is None else min(spec.chunk, spec.longest)
                cut: dict[str, Any] = {"window": spec.longest, "buckets": spec.edges, "chunk": chunk}
                second = perplexity(self.model, self.second, batch=spec.rows, **cut, **options)
            return Candidate.from_scores(name, method, scores, second)

        return from_first(measure)

    def fails_within(self, trained: int, candidates: Iterable[Candidate]) -> bool:
        """Tell whether no candidate answers the prompts of some length that the model was trained at.

        Args:
            trained: the length that it was trained at [tokens].
            candidates: all of a fit.
        """
        several = list(candidates)
        return any(max(c.retrieval[n] for c in several) < ANSWERED for n in self.suite.spec.lengths if n <= trained)

    def unpatched_warnings(self, trained: int, result_cache: MutableMapping[str, Any] | None) -> tuple[str, ...]:
        """Return what to know of the model without a patch, which it must be now; the first process measures it.

        Args:
            trained: the length that it was trained at; longer prompts are not read [tokens].
            result_cache: of finished work.
        """
        part = self.suite.smaller(0, self.suite.spec.samples)
        part.spec = replace(part.spec, lengths=[n for n in part.spec.lengths if n <= trained])

        def measure() -> tuple[str, ...]:
            def on_progress(tokens: int) -> None:
                self.on_progress("unpatched: evaluation", tokens)

            return tuple(part.run(self.model, resume=result_cache, on_progress=on_progress).warnings(trained))

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
