"""Texts in which many answers are graded in one pass, for ``cache_damage.py``.

A text gives something, such as the rows of a table, and asks for it again, several times. Each answer follows the right
answers before it, so that a model sees what is meant; it is right if every token of it is the first choice, which is
when greedy decoding would write it. So one pass of 512 tokens grades up to thirty answers, where a prompt of
``rope_patch.evaluation.tasks`` grades one.
"""

from __future__ import annotations

import itertools
import keyword
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import rope_patch
from rope_patch.evaluation.retrieval.haystack import NOISE
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.evaluation.tasks.base import endless_pairs
from rope_patch.evaluation.texts.documents import prefix_ids

LENGTH = 512
"""Greatest length of a text [tokens]."""
ASKED = 8
SHORTEST_NAME = 4
"""Names of code that are shorter are not graded [characters]."""

Piece = tuple[str, str]
"""Text that is given, and the graded answer that follows it; "" for none."""


@dataclass(frozen=True, eq=False)
class GradedText:
    """A text with graded answers.

    Attributes:
        ids: (tokens,) token ids.
        answers: the place of the first token of each answer, and the place after its last.
    """

    ids: Tensor
    answers: tuple[tuple[int, int], ...]


def asked_again(rng: random.Random, answers: Mapping[str, str], end: str) -> list[Piece]:
    """Return some of the questions with their answers, each followed by ``end``."""
    pieces: list[Piece] = []
    for question in rng.sample(list(answers), min(ASKED, len(answers))):
        pieces += [(question, answers[question]), (end, "")]
    return pieces


def lookup(rng: random.Random, size: int) -> list[Piece]:
    """Return numbers of ``size`` words, as ``niah_multikey_2`` has them, and then ask for some of them."""
    names = itertools.islice(endless_pairs(rng), size)
    numbers = {f" The number of {name} is": f" {rng.randrange(10**4, 10**5)}" for name in names}
    given = "".join(f"{question}{number}." for question, number in numbers.items())
    return [(given, ""), *asked_again(rng, numbers, ".")]


def rows(rng: random.Random, size: int) -> list[Piece]:
    """Return a table of ``size`` rows, and then copy some of them."""
    names = itertools.islice(endless_pairs(rng), size)
    cells = {f"| {name} |": " " + " | ".join(str(rng.randrange(100, 1000)) for _ in range(3)) for name in names}
    given = "".join(f"{name}{row} |\n" for name, row in cells.items())
    return [(f"{given}\n", ""), *asked_again(rng, cells, " |\n")]


def sums(rng: random.Random, size: int) -> list[Piece]:
    """Return ``size`` sums of two numbers of two digits between sentences, of which the first three are examples.

    Sums that follow one another are too hard for models of this size: in a list they write any number.
    """
    sentences = NOISE.split(". ")[:-1]
    pieces, given = list[Piece](), ""
    for number in range(size):
        a, b = rng.randrange(10, 50), rng.randrange(10, 50)
        given += f" {rng.choice(sentences)}. {rng.choice(sentences)}. {a} + {b} ="
        if number < 3:
            given += f" {a + b}."
        else:
            pieces.append((given, f" {a + b}"))
            given = "."
    return [*pieces, (given, "")]


def code(rng: random.Random, size: int) -> list[Piece]:
    """Return ``size`` lines of the Python text of the package; names that stood before are graded."""
    lines = (rope_patch.data_path("assets") / "domains" / "python.txt").read_text(encoding="utf-8").splitlines(True)
    first = rng.randrange(len(lines) // 2)
    pieces, given, known = list[Piece](), "", set[str]()
    for part in re.findall(r"\w+|\W+", "".join(lines[first : first + size])):
        if part in known:
            pieces.append((given, part))
            given = ""
        else:
            given += part
        if len(part) >= SHORTEST_NAME and part.isidentifier() and not keyword.iskeyword(part):
            known.add(part)
    return [*pieces, (given, "")]


WORKLOADS: dict[str, Callable[[random.Random, int], list[Piece]]] = {
    "lookup": lookup,
    "rows": rows,
    "sums": sums,
    "code": code,
}


def graded_text(tokenizer: Any, workload: str, number: int) -> GradedText:
    """Return a text of a workload that is as large as fits into :data:`LENGTH` tokens.

    Args:
        tokenizer: the tokenizer of the model that will read it.
        workload: a key of :data:`WORKLOADS`, or "passkey" for a prompt of the package's task, at one of four depths.
        number: number of the text; each is another one.
    """
    if workload == "passkey":
        (prompt,) = PromptMaker(tokenizer).prompts("passkey", LENGTH, [number % 4 / 3], sample=number)
        return GradedText(torch.tensor(prompt.ids), ((LENGTH - prompt.answer, LENGTH),))
    fitting = None
    for size in itertools.count(5):
        text = encoded(tokenizer, WORKLOADS[workload](random.Random(f"{workload}/{number}"), size))
        if len(text.ids) > LENGTH:
            break
        fitting = text
    assert fitting is not None
    return fitting


def encoded(tokenizer: Any, pieces: Sequence[Piece]) -> GradedText:
    """Return a text in tokens; a token that holds letters of an answer belongs to it, with the space before them."""
    text, spans = "", list[tuple[int, int]]()
    for given, answer in pieces:
        text += given
        if answer:
            spans.append((len(text), len(text) + len(answer)))
        text += answer
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    prefix = prefix_ids(tokenizer)
    answers = []
    for start, stop in spans:
        places = [i for i, (low, high) in enumerate(coded["offset_mapping"]) if low < stop and high > start]
        answers.append((len(prefix) + places[0], len(prefix) + places[-1] + 1))
    return GradedText(torch.tensor([*prefix, *coded["input_ids"]]), tuple(answers))
