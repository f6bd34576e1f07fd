"""Draw the rows to which a table is fitted, by seed and step: text and retrieval prompts, and their positions."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rope_patch.evaluation.documents import prefix_ids
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.fitting.candidates import RETRIEVAL_TASK
from rope_patch.fitting.row_positions import stretched_positions
from rope_patch.modeling.positions import skipped_positions
from rope_patch.modeling.training_loss import IGNORED_LABEL

HAYSTACK_CHARACTERS = 1_000_000
"""Number of characters of the text in which prompts hide their needles; there are more if rows are long."""
PROMPT_ATTEMPTS = 20
"""Number of attempts to draw a prompt of an exact length before the error is raised."""
TARGET_LENGTH_SHARE = 0.5
"""Share of the steps whose rows have the target length; with ``"pose"`` the share of rows that stand for such rows."""
LONGEST_SKIPPING_ROW = 2048
"""Greatest length of rows with skipped positions, and the number of tokens of such rows in one forward pass."""
LEAST_STEP_TOKENS = 4096
"""Least number of tokens of a step; two rows may be more."""


def longest_row(positions: str, trained: int, target: int) -> int:
    """Return the length of the longest row [tokens]; with ``"pose"`` all rows have it.

    Args:
        positions: ``"full"`` or ``"pose"``.
        trained: length at which the model was trained [tokens].
        target: length to which the table is fitted [tokens].

    >>> longest_row("full", 256, 1024), longest_row("pose", 256, 1024), longest_row("pose", 256, 16384)
    (1024, 256, 2048)
    """
    return target if positions == "full" else min(max(trained, target // 4), LONGEST_SKIPPING_ROW)


def step_tokens(positions: str, trained: int, target: int) -> int:
    """Return the number of tokens of a step; the arguments are those of :func:`longest_row`."""
    return max(LEAST_STEP_TOKENS, 2 * longest_row(positions, trained, target))


class DrawnRows:
    """The rows of every step, which depend on nothing but the seed and the step.

    Half of the rows of a step are text, and half are text that hides a passkey; without answers all are text. Half of
    the needles are anywhere, a quarter at the very start and a quarter right before the question, where most are lost:
    prompts that are answered anyway only add noise to the gradient.

    Args:
        tokenizer: the tokenizer of the model.
        text: the text from which rows are drawn.
        answers: whether there are rows of retrieval prompts.
        positions: kind of positions. With ``"full"`` rows have every position from 0 to their length, which is drawn
            between the trained length and the target, evenly on a logarithmic scale. With ``"pose"`` short rows stand
            for such rows and skip positions (PoSE, Zhu et al. 2023, arXiv:2309.10400). Text is cut at a random place,
            and a prompt in the text around its needle, so that the needle is as far from the question as in a whole
            prompt.
        trained: length at which the model was trained [tokens].
        target: length to which the table is fitted [tokens].
        seed: seed of everything that is drawn.

    Raises:
        ValueError: the text is shorter than a row, or a prompt does not fit into a row.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text: str,
        *,
        answers: bool,
        positions: str,
        trained: int,
        target: int,
        seed: int,
    ) -> None:
        self.goals, self.skipping = (2 if answers else 1), positions == "pose"
        self.longest = longest_row(positions, trained, target)
        self.tokens = step_tokens(positions, trained, target)
        self.tokenizer, self.text, self.seed = tokenizer, text, seed
        self.trained, self.target = trained, target
        self.prefix = prefix_ids(tokenizer)
        size = max(HAYSTACK_CHARACTERS, 16 * target)
        start = random.Random(f"hay/{seed}").randrange(max(1, len(text) - size))
        self.maker = PromptMaker(tokenizer, Haystack(text[start : start + size], "text to fit to"))
        # A text or prompt that does not fit raises here, before the model is changed.
        self._crop(random.Random(0), self.longest)
        for length in {self.longest, self.longest if self.skipping else trained} if answers else ():
            self._prompt(random.Random(0), length, 0)

    def __call__(self, step: int, goal: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        """Yield the rows of a step, all of one length: ids, labels, weights and positions, (rows, tokens) each.

        The weights of all rows add up to 1. The positions are None if they are counted from 0 in every row.

        Args:
            step: number of the step.
            goal: 0 for text, 1 for answers.
        """
        # Random numbers are drawn from the seed, the step and the row, so that a step does not depend on earlier ones.
        length = self.longest if self.skipping else self._length(random.Random(f"fit/{self.seed}/{step}"))
        count = self.tokens // length
        texts = count - count // 2 if self.goals == 2 else count
        first, stop = (texts, count) if goal else (0, texts)
        rows: list[tuple[list[int], list[float]]] = []
        positions: list[Tensor] = []
        for i in range(first, stop):
            own = random.Random(f"fit/{self.seed}/{step}/{i}")
            reach = max(length, self._length(own)) if self.skipping else length
            if goal:
                prompt = self._prompt(own, length, step * count + i)
                row, learned = list(prompt.ids), prompt.answer
            else:
                row, learned = self._crop(own, length), length - 1
            if self.skipping and goal:
                positions.append(stretched_positions(prompt, self.maker, reach, own))
            elif self.skipping:
                positions.append(skipped_positions(own, length, reach))
            rows.append((row, [0.0] * (length - learned) + [1 / learned / (stop - first)] * learned))
        if rows:
            ids, weights = (torch.tensor(several) for several in zip(*rows, strict=True))
            labels = ids.masked_fill(weights == 0, IGNORED_LABEL)
            size = max(1, (LONGEST_SKIPPING_ROW if self.skipping else self.target) // length)
            for low in range(0, len(rows), size):
                part = slice(low, low + size)
                yield ids[part], labels[part], weights[part], torch.stack(positions[part]) if self.skipping else None

    def _length(self, rng: random.Random) -> int:
        """Draw the length of a row, or of the long row that a short one stands for."""
        if rng.random() < TARGET_LENGTH_SHARE:
            return self.target
        return round(math.exp(rng.uniform(math.log(self.trained), math.log(self.target))))

    def _prompt(self, rng: random.Random, length: int, number: int) -> Prompt:
        """Return a prompt whose needle is at a random depth.

        Args:
            rng: source of the randomness.
            length: length of the prompt [tokens].
            number: number of the haystack; each has other values and another place in the text.
        """
        for left in reversed(range(PROMPT_ATTEMPTS)):
            # Clipped, so that a quarter of the needles is at the very start and a quarter at the very end.
            depth = min(max(rng.uniform(-0.5, 1.5), 0.0), 1.0)
            try:
                return self.maker.prompts(RETRIEVAL_TASK, length, [depth], seed=rng.getrandbits(32), sample=number)[0]
            except ValueError:  # sometimes no stretch of the text has the exact number of tokens
                if not left:
                    raise
        raise AssertionError  # the last attempt returns or raises

    def _crop(self, rng: random.Random, length: int) -> list[int]:
        """Return a row that begins at a random place of the text."""
        # 8 characters a token are more than most texts have; if they are not enough, more are taken.
        size, characters = length - len(self.prefix), 8 * length
        while True:
            start = rng.randrange(max(1, len(self.text) - characters))
            part = self.text[start : start + characters]
            ids = self.tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= size:
                return [*self.prefix, *ids[:size]]
            if characters >= len(self.text):
                raise ValueError(
                    f"a row of {length} tokens is longer than the text to fit to, which has {len(ids)}: give more "
                    "text, or a shorter target"
                )
            characters *= 2
