"""Held-out text and prompts, and which table is chosen by them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_patch.evaluation.intervals import paired_shares
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.retrieval import retrieval
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
        return {length: sum(found) / len(found) for length, found in self.hits.items()}

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
        """Whether it finds no less and reads no worse than another."""
        return self.finds_no_less(other) and self.reads_no_worse(other)

    def reads_no_worse(self, other: Candidate) -> bool:
        """Whether no bucket of text is predicted worse."""
        return all(self.nll[n] <= other.nll[n] for n in other.nll)

    def finds_no_less(self, other: Candidate) -> bool:
        """Whether retrieval is no worse, and surely worse at no length.

        Surely: the paired 95 % interval of the difference in prompts answered lies below 0. Over all lengths, either no
        fewer are answered, or not surely fewer and the answers are no less probable: which of the marginal ones are
        answered is chance, and no table but itself would come up to a start that was lucky with them.
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
class Judging:
    """Held-out text and prompts, the same for all candidates."""

    model: nn.Module
    tokenizer: Any
    texts: Sequence[Any]
    lengths: Sequence[int]
    depths: Sequence[float]
    samples: int
    objective: Objective
    seed: int
    maker: PromptMaker
    progress: Callable[[str, int], None]

    def __call__(self, name: str, method: Method, kept: MutableMapping[str, Any] | None) -> Candidate:
        """Measure the table in place; the first process does, for all."""
        return from_first(lambda: self._measure(name, method, kept))

    def _measure(self, name: str, method: Method, kept: MutableMapping[str, Any] | None) -> Candidate:
        def told(tokens: int) -> None:
            self.progress(f"{name}: judging", tokens)

        score = perplexity(
            self.model, self.texts, window=self.lengths[-1], buckets=[0, *self.lengths], resume=kept, progress=told
        )
        found = retrieval(
            self.model,
            self.tokenizer,
            self.objective.task,
            lengths=self.lengths,
            depths=self.depths,
            samples=self.samples,
            seed=SEED + self.seed,
            haystack=self.maker,
            resume=kept,
            progress=told,
        )
        answers = [-found.logprob(length) for length in self.lengths]
        edges = [0, *self.lengths]
        return Candidate(
            name,
            method,
            {length: tuple(sample.correct for sample in found.samples(length)) for length in self.lengths},
            math.fsum(answers) / len(answers),
            {high: math.log(score.between(low, high)) for low, high in itertools.pairwise(edges)},
        )

    def loss(self, candidate: Candidate) -> float:
        """Return ``(1 - retrieval) * text + retrieval * answers``, what patience goes by.

        A mean over buckets [nats/token], and one over whole answers [nats].
        """
        text = math.fsum(candidate.nll.values()) / len(candidate.nll)
        return (1 - self.objective.retrieval) * text + self.objective.retrieval * candidate.answers


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Return the best of those that are worse in nothing than the first, their start; of equals, the start."""
    start, *others = candidates
    better = [c for c in others if c.never_worse(start) and c.rank != start.rank]
    return max(better, key=lambda c: c.rank, default=start)
