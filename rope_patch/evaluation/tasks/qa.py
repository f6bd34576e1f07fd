"""RULER's questions about paragraphs, from a file of SQuAD or HotpotQA that a user has."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.evaluation.tasks.base import TASKS, Draw, Question, Task
from rope_patch.evaluation.tasks.ruler import SOURCE

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

    Each haystack asks the next question, in a random order that is always the same; too long ones are passed over. The
    paragraphs of a question stand at random places.

    Args:
        path: the file: SQuAD's, such as ``dev-v2.0.json``, or HotpotQA's, such as ``hotpot_dev_distractor_v1.json``.

    Raises:
        ValueError: the file is neither, or has no question with an answer; a haystack is asked for, and no question is
            left for it.
    """

    source = SOURCE + "the last document is filled up by the haystack"
    joined = anywhere = essay = True
    generated = 32

    def __init__(self, path: Path) -> None:
        self.name = path.name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            every = _squad(content) if isinstance(content, dict) else _hotpotqa(content)
            self.asked = [asked for asked in every if asked.answers]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} holds no questions of SQuAD or HotpotQA: {error!r}") from error
        if not self.asked:
            raise ValueError(f"{path} holds no question with an answer")
        self.documents = sorted({text for asked in self.asked for text in (*asked.documents, *asked.related)})
        self.order = random.Random(0).sample(range(len(self.asked)), len(self.asked))
        self._tokens = dict[tuple[Any, int], int]()

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question about a haystack; its paragraphs have no depths."""
        rng = draw.rng
        asked = self.asked[self._number(draw)]
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
            parts=(OR.join(asked.answers),),
            depths=(0.0,),
            context=context,
            opening=f"{INSTRUCTION}\n\nThe following are given documents.\n\n",
        )
        return [question]

    def _number(self, draw: Draw) -> int:
        """Return the number of the question of a haystack, of those that fit; the shortest one if none fits."""
        room = draw.length - self.generated - 2 * len(INSTRUCTION)  # what is about a question has fewer tokens
        all_fitting = (number for number in self.order if self._size(draw.tokenizer, number) <= room)
        fitting = list(itertools.islice(all_fitting, draw.sample + 1))
        if not fitting:
            return min(self.order, key=lambda number: self._size(draw.tokenizer, number))
        if len(fitting) <= draw.sample:
            raise ValueError(
                f"{len(fitting)} of the {len(self.asked)} questions of {self.name} fit into {draw.length} tokens: ask "
                f"at most {len(fitting)} (--samples), or give longer lengths"
            )
        return fitting[-1]

    def _size(self, tokenizer: Any, number: int) -> int:
        """Return the number of tokens of a question with its documents."""
        key = (tokenizer, number)
        if key not in self._tokens:
            asked = self.asked[number]
            text = "\n\nDocument 1:\n".join([*asked.documents, asked.text, asked.answers[0]])
            self._tokens[key] = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return self._tokens[key]

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
                    answers = _different(answer["text"] for answer in one["answers"])
                    yield Asked(one["question"], answers, [paragraph["context"]], related)


def _hotpotqa(content: Sequence[Any]) -> Iterator[Asked]:
    for one in content:
        documents = dict.fromkeys(f"{title}\n{''.join(sentences)}" for title, sentences in one["context"])
        yield Asked(one["question"], _different([one["answer"]]), list(documents))


def _different(answers: Iterable[str]) -> list[str]:
    """Return answers in a line each, without empty and repeated ones."""
    lines = (" ".join(answer.split()) for answer in answers)
    return [line for line in dict.fromkeys(lines) if line]


@functools.lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> Questions:
    return Questions(path)


def of_file(name: str) -> Questions:
    """Return the task of a file, which is read again after it was changed."""
    path = Path(name).expanduser().resolve()
    return _read(path, path.stat().st_mtime_ns, path.stat().st_size)


TASKS.from_files(".json", of_file)
