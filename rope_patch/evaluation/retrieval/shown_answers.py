"""A few answers as the model gave them, for reports."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
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

    def __str__(self) -> str:
        """Return the answer in one line.

        >>> print(ShownAnswer("passkey", 512, 0.25, "48213", " 48218", False))
        passkey, 512 tokens, depth 25 %: asked for 48213, answered " 48218" (wrong)
        """
        return (
            f"{self.task}, {self.length} tokens, depth {100 * self.depth:.3g} %: asked for {self.expected}, answered "
            f"{self.quoted} ({self.verdict})"
        )


def few_answers(
    scores: Sequence[tuple[str, EvalResult]], lengths: Sequence[int] | None = None
) -> list[tuple[str, ShownAnswer]]:
    """Return a wrong answer and then a right one for each task, length and result, as far as there are.

    Args:
        scores: results of one spec, each with the name that it is shown under.
        lengths: lengths of the prompts; by default the shortest and the longest [tokens].
    """
    spec = scores[0][1].spec
    if lengths is None:
        lengths = list(dict.fromkeys((spec.lengths[0], spec.lengths[-1])))
    return [
        (name, ShownAnswer(task, length, depth, sample.expected, sample.output, bool(sample.correct)))
        for task in spec.tasks
        for length in lengths
        for name, result in scores
        for depth, sample in result.retrieval[task].examples(length)
    ]


def one_of_each(shown: Iterable[tuple[str, ShownAnswer]]) -> list[tuple[str, ShownAnswer]]:
    """Return the first wrong answer and the first right one, if they exist."""
    firsts: dict[bool, tuple[str, ShownAnswer]] = {}
    for name, answer in shown:
        firsts.setdefault(answer.correct, (name, answer))
    return [firsts[correct] for correct in (False, True) if correct in firsts]


def shortest_of_each(scores: Sequence[tuple[str, EvalResult]]) -> list[tuple[str, ShownAnswer]]:
    """Return the wrong answer and the right one that were given to the shortest prompts."""
    return one_of_each(sorted(few_answers(scores, scores[0][1].spec.lengths), key=lambda one: one[1].length))


def answers_text(shown: Iterable[tuple[str, ShownAnswer]]) -> list[str]:
    """Return lines for a terminal that say when a prompt counts as answered and show some answers; none for none."""
    answers = [f"  {name}, {answer}" for name, answer in shown]
    if not answers:
        return []
    return [f"{EXACT_MATCH}, as in:", *answers]
