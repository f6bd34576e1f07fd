"""Rows to train on: documents packed without losing a token, and retrieval prompts among them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rope_patch.evaluation.documents import TokenDocument
from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.evaluation.tasks import NEEDLES, TASKS

BOUNDARIES = ("join", "apart", "whole")


@dataclass(frozen=True, eq=False)
class WeightedDocument(TokenDocument):
    """A document whose tokens have different weights in the loss.

    Attributes:
        weights: (tokens,) of each label; None where all are 1.
    """

    weights: Tensor | None = None


def pack(documents: Iterable[TokenDocument], length: int, boundaries: str = "join") -> Iterator[dict[str, Any]]:
    """Yield rows of at most ``length`` tokens that hold every token of the documents exactly once, in order.

    Args:
        documents: as :func:`~rope_patch.evaluation.documents.encode` yields them, with their special tokens.
        length: of a row [tokens].
        boundaries: ``"join"``: a stream cut into rows, documents see those before them in their row; ``"apart"``: the
            same rows, with ``starts`` that say where documents begin, for
            :class:`~rope_patch.training.collators.PackedCollator`; ``"whole"``: each row holds one document or a piece
            of one.

    Yields:
        ``ids``, ``index`` (number of the row), ``starts`` of the documents within the row, and ``weights`` of its
        labels (None where all are 1).

    Raises:
        ValueError: a length below 2, or unknown boundaries.
    """
    if length < 2:
        raise ValueError(f"a row needs at least 2 tokens to learn one, got length={length}")
    if boundaries not in BOUNDARIES:
        raise ValueError(f"boundaries must be one of {', '.join(BOUNDARIES)}, got {boundaries!r}")
    index = itertools.count()
    ids: list[int] = []
    weights: list[float] = []
    starts: list[int] = []
    weighted = False

    def current_row() -> dict[str, Any]:
        return {"ids": ids, "index": next(index), "starts": starts, "weights": weights if weighted else None}

    for document in documents:
        own = getattr(document, "weights", None)
        size, done = len(document.ids), 0
        while done < size:
            starts.append(len(ids))  # the rest of a document counts as a start in the next row
            stop = min(size, done + length - len(ids))
            ids += document.ids[done:stop].tolist()
            weights += [1.0] * (stop - done) if own is None else own[done:stop].tolist()
            weighted, done = weighted or own is not None, stop
            if len(ids) == length or (boundaries == "whole" and done == size):
                yield current_row()
                ids, weights, starts, weighted = [], [], [], False
    if ids:
        yield current_row()


def prompt_row(prompt: Prompt, index: int, answer_weight: float) -> dict[str, Any]:
    """Return a retrieval prompt with its answer as a row, in which the tokens of the answer have this weight."""
    size = len(prompt.ids)
    weights = [1.0] * (size - prompt.answer) + [answer_weight] * prompt.answer
    return {"ids": list(prompt.ids), "index": index, "starts": [0], "weights": weights}


def mix(
    rows: Iterable[dict[str, Any]],
    maker: PromptMaker,
    share: float,
    length: int,
    *,
    task: str = "passkey",
    answer_weight: float = 5.0,
    seed: int = 0,
    first: int = 0,
) -> Iterator[dict[str, Any]]:
    """Put retrieval prompts between rows; which and where depends on the seed and the number of the row alone.

    Args:
        rows: of :func:`pack`; they get new numbers.
        maker: of prompts, from a text that is not used in evaluation.
        share: of all rows, in [0, 1].
        length: of a prompt [tokens].
        task: as in :func:`~rope_patch.evaluation.retrieval.retrieval`.
        answer_weight: weight of the answer's tokens in the loss.
        seed: of prompts and places; evaluation draws its keys from other seeds.
        first: number of the first row.

    Raises:
        ValueError: an unknown task, or a length with no room for it.
    """
    source, needles = iter(rows), NEEDLES if TASKS.find(task).joined else 1
    for index in itertools.count(first):
        rng = random.Random(f"train/{seed}/{index}")
        if share and rng.random() < share:
            depths = [rng.random() for _ in range(needles)]
            (prompt,) = maker.prompts(task, length, depths, seed=rng.getrandbits(32), sample=index)
            yield prompt_row(prompt, index, answer_weight)
            continue
        row = next(source, None)
        if row is None:
            return
        yield {**row, "index": index}


def conversation(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], learn: str) -> TokenDocument:
    """Return a conversation in the model's chat template.

    Args:
        tokenizer: of the model; it has a chat template.
        messages: of ``role`` and ``content``, as transformers' ``apply_chat_template`` takes them.
        learn: which labels count: all, or those of the assistant's turns with the tokens that end each. A turn that
            opens the conversation does not count: where its rendering begins cannot be found.

    Raises:
        ValueError: no chat template, one that refuses these messages, or one whose rendering of a turn depends on
            those after it.
    """
    if tokenizer.chat_template is None:
        raise ValueError("this tokenizer has no chat template: set tokenizer.chat_template, or give plain text")

    def render(count: int, ask: bool = False) -> list[int]:
        try:
            return list(tokenizer.apply_chat_template(messages[:count], add_generation_prompt=ask, return_dict=False))
        except TemplateError as error:
            raise ValueError(f"the chat template refuses a conversation: {error}") from error

    ids = render(len(messages))
    if learn == "all":
        return TokenDocument("conversation", torch.tensor(ids))
    weights = torch.zeros(len(ids))
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and i:
            before, after = render(i, ask=True), render(i + 1)
            if ids[: len(after)] != after or after[: len(before)] != before:
                raise ValueError(
                    "this chat template renders earlier turns differently once later ones follow, or joins turns into "
                    "one token, so the assistant's tokens cannot be found: set data.learn=all"
                )
            weights[len(before) : len(after)] = 1
    return WeightedDocument("conversation", torch.tensor(ids), weights=weights)
