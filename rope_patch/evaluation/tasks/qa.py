"""RULER's questions about paragraphs, from a file of SQuAD 2.0 or HotpotQA that a user has."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.evaluation.tasks.base import TASKS, Draw, Question, Task
from rope_patch.evaluation.tasks.ruler import SOURCE

ENDING = ".json"
"""The ending of a task's name that is the path of a file of questions."""
INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
OR = " | "
"""The text between answers any of which is right."""


@dataclass(frozen=True)
class Asked:
    """A question of a file.

    Attributes:
        text: the question.
        answers: the answers, any of which is right.
        documents: the documents that it is about.
        related: documents of the same article, which stand in a prompt before others do.
    """

    text: str
    answers: Sequence[str]
    documents: Sequence[str]
    related: Sequence[str] = ()


class OneOf(Question):
    """A question whose one part is several answers, any of which is right."""

    def answer(self, parts: int) -> str:
        """Return the first of the answers, as it continues the answer's prefix."""
        return " " + self.parts[0].split(OR)[0]


class Questions(Task):
    """Questions about paragraphs, among as many other paragraphs of the file as the prompt has room for.

    A question asks about one haystack, and its paragraphs stand at random places.

    Args:
        path: the file: SQuAD's, such as ``dev-v2.0.json``, or HotpotQA's, such as ``hotpot_dev_distractor_v1.json``.

    Raises:
        ValueError: the file is neither.
    """

    source = SOURCE + "the last document is filled up by the haystack"
    name = "questions"
    joined = anywhere = essay = True
    generated = 32

    def __init__(self, path: str) -> None:
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            self.asked = list(_squad(content) if isinstance(content, dict) else _hotpotqa(content))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no questions of SQuAD or HotpotQA: {error!r}") from error
        self.documents = sorted({text for asked in self.asked for text in (*asked.documents, *asked.related)})

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question about a haystack; its paragraphs have no depths."""
        rng = draw.rng
        asked = rng.choice(self.asked)
        known = {*asked.documents, *asked.related}
        others = [text for text in self.documents if text not in known]
        more = [*rng.sample(asked.related, len(asked.related)), *rng.sample(others, len(others))]
        seed = rng.random()

        def context(size: int) -> list[str]:
            documents = [*asked.documents, *more[:size]]
            random.Random(seed).shuffle(documents)
            return [f"\n\nDocument {number}:\n{text}" for number, text in enumerate([*documents, ""], 1)]

        question = OneOf(
            hidden=(),
            text=f"\n\n{INSTRUCTION}\n\nQuestion: {asked.text}",
            answer_prefix=" Answer:",
            parts=(OR.join(dict.fromkeys(asked.answers)),),
            depths=(0.0,),
            context=context,
            opening=f"{INSTRUCTION}\n\nThe following are given documents.\n\n",
        )
        return [question]

    def correct(self, part: str, output: str) -> bool:
        """Return whether an output gives one of the answers."""
        return any(super(Questions, self).correct(answer, output) for answer in part.split(OR))


def _squad(content: dict[str, Any]) -> Iterator[Asked]:
    for article in content["data"]:
        paragraphs = dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"])
        for paragraph in article["paragraphs"]:
            related = [text for text in paragraphs if text != paragraph["context"]]
            for one in paragraph["qas"]:
                if not one.get("is_impossible"):
                    answers = [answer["text"] for answer in one["answers"]]
                    yield Asked(one["question"], answers, [paragraph["context"]], related)


def _hotpotqa(content: Sequence[Any]) -> Iterator[Asked]:
    for one in content:
        documents = dict.fromkeys(f"{title}\n{''.join(sentences)}" for title, sentences in one["context"])
        yield Asked(one["question"], [one["answer"]], list(documents))


TASKS.from_files(ENDING, functools.cache(Questions))
