"""The rows that a table is fitted to: text and retrieval prompts, drawn by seed and step, and their positions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.documents import prefix_ids
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.evaluation.tasks import NEEDLES, find_task
from rope_patch.fitting.positions import stretched_positions
from rope_patch.fitting.texts import TextPart
from rope_patch.modeling.loss import IGNORED
from rope_patch.modeling.positions import CHUNKS, check_positions, skipped_positions

HAY = 1_000_000
"""Characters of the text in which prompts hide their needles; more where a row is longer."""
TRIES = 20
"""Attempts to draw a prompt of an exact length before the error is raised."""
GOLDEN = (math.sqrt(5) - 1) / 2
SHORT = 2048
"""The longest that rows with skipped positions are by default, and the tokens of such rows read side by side."""


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
            trained length and the target, evenly on a logarithmic scale. Under ``"pose"`` a share of the rows.
        positions: ``"full"``: rows have every position from 0 to their length; ``"pose"``: short rows stand for rows of
            these lengths and skip positions (PoSE, Zhu et al. 2023, arXiv:2309.10400), at a cost that hardly grows
            with the target. Text is cut at random places. A prompt is cut in the text around its needles, so that
            they lie as far from the question as in a whole prompt. Layers with a sliding window and a table of their
            own get consecutive positions. Attention is over fewer tokens than in a long row, so an attention scaling
            that is fitted too is one for short rows.
        row_length: of the rows under ``"pose"``; by default the trained length or a quarter of the target, whichever is
            longer, 2048 at most [tokens].
        chunks: pieces of a row of text under ``"pose"``.
        mix: share of the rows, of text and of prompts, that are drawn from Python code where the data is of one kind
            (:func:`~rope_patch.fitting.texts.fit_texts` says when it is), in [0, 1).

    Raises:
        ValueError: a weight or share out of its range, an unknown task, unknown positions, or a length or chunks for
            rows that skip none.
    """

    retrieval: float = 0.8
    task: str = "passkey"
    full: float = 0.5
    positions: str = "full"
    row_length: int | None = None
    chunks: int = CHUNKS
    mix: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.retrieval < 1:
            raise ValueError(f"retrieval must be in [0, 1), got {self.retrieval}")
        if not 0 <= self.full <= 1:
            raise ValueError(f"full must be in [0, 1], got {self.full}")
        if not 0 <= self.mix < 1:
            raise ValueError(f"mix must be in [0, 1), got {self.mix}")
        find_task(self.task)
        check_positions(self.positions, self.row_length, self.chunks)

    def longest_row(self, trained: int, target: int) -> int:
        """Return the length of the longest row, of all rows under ``"pose"`` [tokens].

        Args:
            trained: length that the model was trained at [tokens].
            target: to fit to [tokens].

        Raises:
            ValueError: rows longer than the target, or shorter than their chunks.
        """
        if self.positions == "full":
            return target
        length = min(max(trained, target // 4), SHORT) if self.row_length is None else self.row_length
        check_positions(self.positions, length, self.chunks, target)
        return length

    def describe_rows(self, trained: int, target: int) -> str:
        """Return length and positions of the rows, for reports; arguments as in :meth:`longest_row`.

        >>> Objective().describe_rows(256, 1024), Objective(positions="pose").describe_rows(256, 1024)
        ('256 to 1024 tokens', '256 tokens at positions that skip ahead up to 1024 (PoSE)')
        """
        longest = self.longest_row(trained, target)
        if self.positions == "pose":
            return f"{longest} tokens at positions that skip ahead up to {target} (PoSE)"
        return f"{trained} to {longest} tokens"


class Rows:
    """The rows of every step; they depend on the seed and the step alone."""

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[TextPart],
        objective: Objective,
        trained: int,
        target: int,
        tokens: int,
        seed: int,
    ) -> None:
        self.goals = 2 if objective.retrieval else 1
        self.longest = objective.longest_row(trained, target)
        if tokens < self.goals * self.longest:
            rows = "a row of text and one of retrieval" if self.goals == 2 else "a row"
            length = "the target" if self.longest == target else f"{self.longest} tokens"
            raise ValueError(f"batch_tokens must be >= {self.goals * self.longest}, {rows} of {length}, got {tokens}")
        self.tokenizer, self.texts, self.objective, self.seed = tokenizer, texts, objective, seed
        self.trained, self.target, self.tokens = trained, target, tokens
        self.prefix = prefix_ids(tokenizer)
        self.makers = [PromptMaker(tokenizer, self._haystack(part.text)) for part in texts]
        self.needles = NEEDLES if find_task(objective.task).joined else 1

    def check(self) -> None:
        """Raise ValueError if a text is shorter than a row, or a prompt does not fit into a row."""
        lengths = (self.longest, self.trained) if self.objective.positions == "full" else (self.longest,)
        for part, maker in zip(self.texts, self.makers, strict=True):
            self._crop(part, random.Random(0), self.longest)
            for length in lengths if self.goals == 2 else ():
                self._prompt(maker, random.Random(0), length, 0)

    def __call__(
        self, step: int, goal: int, share: int = 0, shares: int = 1
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Yield the rows of a step, all of one length: ids, labels, weights and positions, (rows, tokens) each.

        The weights add up to 1 over all of them. The positions are None where they are those of every row, from 0 on.

        Args:
            step: its number.
            goal: 0 for text, 1 for answers.
            share: rank of this process.
            shares: number of processes that divide the rows.
        """
        skipping = self.objective.positions == "pose"
        length = self.longest if skipping else self._length(random.Random(f"fit/{self.seed}/{step}"))
        count = self.tokens // length
        texts = count - count // 2 if self.goals == 2 else count
        first, stop = (texts, count) if goal else (0, texts)
        rows: list[tuple[list[int], list[float]]] = []
        positions: list[Tensor] = []
        for i in range(first, stop):
            if i % shares == share:
                own = random.Random(f"fit/{self.seed}/{step}/{i}")
                reach = max(length, self._length(own)) if skipping else length
                text, maker = self._take(step + i - first)
                if goal:
                    prompt = self._prompt(maker, own, length, step * count + i)
                    row, learned = list(prompt.ids), prompt.answer
                    if skipping:
                        positions.append(stretched_positions(prompt, maker, reach, own))
                else:
                    row, learned = self._crop(text, own, length), length - 1
                    if skipping:
                        positions.append(skipped_positions(own, length, reach, self.objective.chunks))
                rows.append((row, [0.0] * (length - learned) + [1 / learned / (stop - first)] * learned))
        if rows:
            ids, weights = (torch.tensor(several) for several in zip(*rows, strict=True))
            labels = ids.masked_fill(weights == 0, IGNORED)
            size = max(1, (SHORT if skipping else self.target) // length)
            for low in range(0, len(rows), size):
                part = slice(low, low + size)
                yield ids[part], labels[part], weights[part], torch.stack(positions[part]) if skipping else None

    def _length(self, rng: random.Random) -> int:
        """Draw the length of a row, or of the row that a short one stands for."""
        if rng.random() < self.objective.full:
            return self.target
        return round(math.exp(rng.uniform(math.log(self.trained), math.log(self.target))))

    def _take(self, number: int) -> tuple[TextPart, PromptMaker]:
        """Return the text of a row, with what makes its prompts.

        Any few steps in a row have the texts in nearly their shares: where texts differ in how hard they are, the loss
        would else go up and down with what was drawn. The multiples of the golden ratio are that even (Weyl 1916).
        """
        place = number * GOLDEN % 1.0
        reached = itertools.accumulate(part.share for part in self.texts)
        at = next((i for i, share in enumerate(reached) if place < share), len(self.texts) - 1)
        return self.texts[at], self.makers[at]

    def _haystack(self, text: str) -> Haystack:
        """Return a stretch of a text in which prompts hide their needles."""
        size = max(HAY, 16 * self.target)
        start = random.Random(f"hay/{self.seed}").randrange(max(1, len(text) - size))
        return Haystack(text[start : start + size], "text to fit to")

    def _prompt(self, maker: PromptMaker, rng: random.Random, length: int, number: int) -> Prompt:
        """Return a prompt with its needles drawn."""
        for left in reversed(range(TRIES)):
            depths = [min(max(rng.uniform(-0.5, 1.5), 0.0), 1.0) for _ in range(self.needles)]
            seed = rng.getrandbits(32)
            try:
                (prompt,) = maker.prompts(self.objective.task, length, depths, seed=seed, sample=number)
                break
            except ValueError:  # sometimes no stretch of the text has the exact number of tokens
                if not left:
                    raise
        return prompt

    def _crop(self, part: TextPart, rng: random.Random, length: int) -> list[int]:
        """Return a row that begins at a random place of the text."""
        size, characters = length - len(self.prefix), 8 * length
        while True:
            start = rng.randrange(max(1, len(part.text) - characters))
            ids = self.tokenizer(part.text[start : start + characters], add_special_tokens=False, verbose=False)
            if len(ids["input_ids"]) >= size:
                return [*self.prefix, *ids["input_ids"][:size]]
            if characters >= len(part.text):
                raise ValueError(
                    f"a row of {length} tokens is longer than {part.name}, the text to fit to, which has "
                    f"{len(ids['input_ids'])}: give more text, or a shorter target"
                )
            characters *= 2
