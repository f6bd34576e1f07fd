"""The rows that a table is fitted to: text and retrieval prompts, drawn by seed and step."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.documents import Source, documents, prefix_ids
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.tasks import NEEDLES, find_task
from rope_patch.evaluation.text import Corpus, builtin_text
from rope_patch.modeling.loss import IGNORED

VALIDATION = 0.1
"""Share of the text, at its end, that is held out: the table is chosen on it."""
HAY = 1_000_000
"""Characters of the text in which prompts hide their needles; more where a row is longer."""
TRIES = 20
"""Attempts to draw a prompt of an exact length before the error is raised."""
LIMIT = 64_000_000
"""The most characters that are read of a text."""


@dataclass(frozen=True)
class Objective:
    """What is minimised: the loss of plain text, and the loss of answers to retrieval prompts over such text.

    Half of the rows of a step are of each kind; with ``retrieval=0`` all are text. Each loss has its own moments of
    Adam and its share of the learning rate, so that the heavy tail of the answers' gradients does not dominate. Half of
    the needles are anywhere, a quarter at the very start and a quarter right before the question, where most are lost:
    prompts that are answered anyway only add noise to the gradient.

    Attributes:
        retrieval: share of the learning rate for answers, in [0, 1); text has the rest.
        task: as in :func:`~rope_patch.evaluation.retrieval.retrieval`.
        full: share of the steps whose rows have the target length; the lengths of the others are drawn between the
            trained length and the target, evenly on a logarithmic scale.

    Raises:
        ValueError: a weight or share out of its range, an unknown task.
    """

    retrieval: float = 0.8
    task: str = "passkey"
    full: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.retrieval < 1:
            raise ValueError(f"retrieval must be in [0, 1), got {self.retrieval}")
        if not 0 <= self.full <= 1:
            raise ValueError(f"full must be in [0, 1], got {self.full}")
        find_task(self.task)


class Rows:
    """The rows of every step; they depend on the seed and the step alone."""

    def __init__(
        self, tokenizer: Any, text: str, objective: Objective, trained: int, target: int, tokens: int, seed: int
    ) -> None:
        self.goals = 2 if objective.retrieval else 1
        if tokens < self.goals * target:
            rows = "a row of text and one of retrieval" if self.goals == 2 else "a row"
            raise ValueError(f"batch_tokens must be >= {self.goals * target}, {rows} of the target, got {tokens}")
        self.tokenizer, self.text, self.objective, self.seed = tokenizer, text, objective, seed
        self.trained, self.target, self.tokens = trained, target, tokens
        self.prefix = prefix_ids(tokenizer)
        self.digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        size = max(HAY, 16 * target)
        start = random.Random(f"hay/{seed}").randrange(max(1, len(text) - size))
        self.maker = PromptMaker(tokenizer, Haystack(text[start : start + size], "text to fit to"))
        self.needles = NEEDLES if find_task(objective.task).joined else 1

    def check(self) -> None:
        """Raise ValueError if the text is shorter than a row, or a prompt does not fit into a row."""
        self._crop(random.Random(0), self.target)
        for length in (self.target, self.trained) if self.goals == 2 else ():
            self._prompt(random.Random(0), length, 0)

    def __call__(
        self, step: int, goal: int, share: int = 0, shares: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the rows of a step, all of one length: ids, labels and weights, (rows, tokens) each.

        The weights add up to 1 over all of them.

        Args:
            step: its number.
            goal: 0 for text, 1 for answers.
            share: rank of this process.
            shares: number of processes that divide the rows.
        """
        rng = random.Random(f"fit/{self.seed}/{step}")
        length = self.target
        if rng.random() >= self.objective.full:
            length = round(math.exp(rng.uniform(math.log(self.trained), math.log(self.target))))
        count = self.tokens // length
        texts = count - count // 2 if self.goals == 2 else count
        first, stop = (texts, count) if goal else (0, texts)
        rows: list[tuple[list[int], list[float]]] = []
        for i in range(first, stop):
            if i % shares == share:
                own = random.Random(f"fit/{self.seed}/{step}/{i}")
                row, answer = self._prompt(own, length, step * count + i) if goal else (self._crop(own, length), 0)
                learned = answer or length - 1
                rows.append((row, [0.0] * (length - learned) + [1 / learned / (stop - first)] * learned))
        if rows:
            ids, weights = (torch.tensor(several) for several in zip(*rows, strict=True))
            labels = ids.masked_fill(weights == 0, IGNORED)
            size = max(1, self.target // length)
            for low in range(0, len(rows), size):
                part = slice(low, low + size)
                yield ids[part], labels[part], weights[part]

    def _prompt(self, rng: random.Random, length: int, number: int) -> tuple[list[int], int]:
        """Return the ids of a prompt, and the number of tokens of the answer at its end."""
        for left in reversed(range(TRIES)):
            depths = [min(max(rng.uniform(-0.5, 1.5), 0.0), 1.0) for _ in range(self.needles)]
            seed = rng.getrandbits(32)
            try:
                (prompt,) = self.maker.prompts(self.objective.task, length, depths, seed=seed, sample=number)
                break
            except ValueError:  # sometimes no stretch of the text has the exact number of tokens
                if not left:
                    raise
        return list(prompt.ids), prompt.answer

    def _crop(self, rng: random.Random, length: int) -> list[int]:
        """Return a row that begins at a random place of the text."""
        size, characters = length - len(self.prefix), 8 * length
        while True:
            start = rng.randrange(max(1, len(self.text) - characters))
            ids = self.tokenizer(self.text[start : start + characters], add_special_tokens=False, verbose=False)
            if len(ids["input_ids"]) >= size:
                return [*self.prefix, *ids["input_ids"][:size]]
            if characters >= len(self.text):
                raise ValueError(
                    f"a row of {length} tokens is longer than the text to fit to, which has "
                    f"{len(ids['input_ids'])}: give more text, or a shorter target"
                )
            characters *= 2


def split_text(data: Source | None) -> tuple[str, str]:
    """Return the text to fit to and the held-out text."""
    source = builtin_text("train") if data is None else data
    if isinstance(source, Corpus):
        whole = source.text[:LIMIT]
    else:
        parts, size = [], 0
        for document in documents(source):
            parts.append(document.text[: LIMIT - size])
            size += len(parts[-1])
            if size >= LIMIT:
                break
        whole = "\n\n".join(parts)
    cut = round(len(whole) * (1 - VALIDATION))
    return whole[:cut], whole[cut:]
