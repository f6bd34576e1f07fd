"""A few answers as the model gave them, for reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.evaluation.suite import EvalResult

EXACT_MATCH = "A prompt counts as answered if greedy decoding gives the right answer (exact match)"
"""The sentence by which reports explain retrieval, without a full stop, because a sentence may continue it."""


@dataclass(frozen=True)
class ShownAnswer:
    """One answer as the model gave it.

    Attributes:
        task: name of the retrieval task.
        length: length of the prompt [tokens].
        depth: depth of the needle, from 0 to 1.
        expected: string that was asked for.
        output: text of greedy decoding.
        correct: whether the answer counts as an exact match.
    """

    task: str
    length: int
    depth: float
    expected: str
    output: str
    correct: bool

    @property
    def quoted(self) -> str:
        """The output in quotation marks, on one line."""
        return json.dumps(self.output, ensure_ascii=False)

    @property
    def verdict(self) -> str:
        """The word ``right`` or ``wrong``."""
        return "right" if self.correct else "wrong"


def few_answers(scores: Sequence[tuple[str, EvalResult]]) -> list[tuple[str, ShownAnswer]]:
    """Return a wrong answer and then a right one to the shortest and longest prompts of each task and result.

    Args:
        scores: results of one spec, each with the name that it is shown under.
    """
    spec = scores[0][1].spec
    lengths = dict.fromkeys((spec.lengths[0], spec.lengths[-1]))
    return [
        (name, ShownAnswer(task, length, depth, sample.expected, sample.output, bool(sample.correct)))
        for task in spec.tasks
        for length in lengths
        for name, result in scores
        for depth, sample in result.retrieval[task].examples(length)
    ]
