"""Asking a model: greedy answers and their log-probabilities, with what prompts have in common read once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rope_patch.evaluation.prompts import Prompt
from rope_patch.modeling.scoring import CacheFactory, Reader
from rope_patch.runtime.progress import Progress

TAIL_TOKENS = 16
"""Prompt tokens read together with the answer, and again where the answer is wrong: what came before is not."""

SHORT_PASS_TOKENS = 32
"""So few tokens more are not worth a pass of their own: they are read with the tail."""


_COPIED_BY_REFERENCE = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer", "RoomyLayer"}


@dataclass(frozen=True)
class Answer:
    """What a model answered.

    Attributes:
        output: greedy tokens, as many as the right answer has; fewer when a token ended the text.
        predicted: the most probable token at each place of the right answer, given the right ones before.
        logprobs: log-probabilities of the right answer's tokens [nats].
    """

    output: tuple[int, ...]
    predicted: tuple[int, ...]
    logprobs: tuple[float, ...]


def fork(cache: Any) -> Any:
    """Return a copy of a cache that can be added to without what the first one holds changing.

    The layers of transformers' ``DynamicCache`` put new tensors in place of the old, and ours write behind what is
    there, so their copies share memory: be done with the copy before the first one is added to. Anything else is copied
    whole.
    """
    if type(cache) is DynamicCache:
        branch = copy.copy(cache)
        branch.layers = [
            copy.copy(layer) if type(layer).__name__ in _COPIED_BY_REFERENCE else copy.deepcopy(layer)
            for layer in cache.layers
        ]
        return branch
    return copy.deepcopy(cache)


class NotFinite(ValueError):
    """Logits that are NaN or infinite.

    Attributes:
        row: which prompt of a batch.
        position: of the token that was to be predicted [tokens].
    """

    def __init__(self, row: int, position: int) -> None:
        super().__init__(f"NaN or infinite logits for the token at position {position} of prompt {row}")
        self.row, self.position = row, position


@torch.no_grad()
def answer(
    reader: Reader,
    rows: Sequence[Sequence[Prompt]],
    *,
    chunk: int | None = None,
    cache: CacheFactory | None = None,
    stops: Sequence[int] = (),
) -> list[list[Answer]]:
    """Answer every prompt of a grid; the prompts of a column share what they begin with.

    The prompt that has most in common with the others is read once, as a trunk; each other prompt is answered from a
    copy of the trunk's cache, taken where the two part. The right answer is scored in the pass that reads the question.
    Where greedy decoding takes another way, it is followed to the end.

    Args:
        reader: the model.
        rows: (questions, batch) prompts, all of one length; answers within a row are of one length.
        chunk: tokens per forward pass; all by default.
        cache: factory of a cache to read through. With one, answers are read a token at a time, as in generation.
        stops: token ids that end a text.

    Raises:
        ValueError: prompts of different lengths, or logits that are not finite.
    """
    if len({len(prompt.ids) for row in rows for prompt in row}) != 1 or len({len(row) for row in rows}) != 1:
        raise ValueError("the prompts of a grid must be of one length")
    if any(len({prompt.answer for prompt in row}) != 1 for row in rows):
        raise ValueError("answers of one row must be of one length in tokens")
    ids = torch.tensor([[prompt.ids for prompt in row] for row in rows])  # (questions, batch, tokens)
    size = ids.shape[2]
    trunk, parting = _trunk(ids)
    past = cache() if cache is not None else reader.new_cache(size)
    read, answers = 0, {}
    longest = max(row[0].answer for row in rows)
    body = size - longest - TAIL_TOKENS  # what is read before the tail
    meeting = [max(0, min(place, body)) for place in parting]
    # From the one that parts first to the trunk itself, which never does.
    order = sorted(range(len(rows)), key=lambda i: (i == trunk, parting[i]))
    shared = sum(meeting[i] for i in order[:-1])  # each but the first is read from where the one before it parted
    progress = Progress(ids.numel(), reads=ids.shape[1] * (len(rows) * (size - 1) - shared))
    for i in order:
        meet = meeting[i]
        if meet > read:
            for _ in reader.read(ids[trunk, :, read:meet], past, chunk, progress, reach=size):
                pass
            read = meet
        branch = past if i == trunk else fork(past)
        begin = read
        if body - read > SHORT_PASS_TOKENS:
            for _ in reader.read(ids[i, :, read:body], branch, chunk, progress, reach=size):
                pass
            begin = body
        try:
            answers[i] = _finish(reader, ids[i], begin, rows[i][0].answer, branch, cache is not None, stops, progress)
        except NotFinite as error:
            prompt = rows[i][error.row]
            raise ValueError(
                f"NaN or infinite logits at position {error.position} of a prompt of {size} tokens that asks for "
                f"{', '.join(prompt.parts)} at depth {', '.join(f'{depth:g}' for depth in prompt.depths)}: try float32"
            ) from None
    progress.finish()
    return [answers[i] for i in range(len(rows))]


def _trunk(ids: Tensor) -> tuple[int, list[int]]:
    """The question whose prompt has most in common with the others, and where each parts from it [tokens]."""
    best: tuple[int, list[int]] = (0, [])
    for i in range(len(ids)):
        same = (ids == ids[i]).all(1).long().cumprod(1).sum(1)  # over the batch: the shortest of the columns
        parting = [int(n) for n in same]
        if not best[1] or sum(parting) > sum(best[1]):
            best = i, parting
    return best


def _finish(
    reader: Reader,
    ids: Tensor,
    read: int,
    answer: int,
    past: Any,
    stepwise: bool,
    stops: Sequence[int],
    progress: Progress,
) -> list[Answer]:
    """Read the end of the prompts and their answers: ids (batch, tokens), of which ``read`` are in the cache."""
    size = ids.shape[1]
    asked = size - answer
    expected = ids[:, asked:]
    spare = fork(past)
    if stepwise:
        states = [_last(reader, ids[:, read:asked], past, size, progress)]
        states += [_last(reader, expected[:, i, None], past, size, progress) for i in range(answer - 1)]
        hidden = torch.cat(states, dim=1)
    else:
        hidden = _all(reader, ids[:, read:-1], past, size, progress)[:, -answer:]
    loss, best = reader.score(hidden.flatten(0, 1), expected.flatten())
    logprobs, predicted = -loss.view(expected.shape), best.view(expected.shape)
    if not bool(torch.isfinite(logprobs).all()):
        where = (~torch.isfinite(logprobs)).nonzero()[0]
        raise NotFinite(int(where[0]), asked + int(where[1]))
    outputs = expected.clone()
    missed = (predicted != expected).any(1)
    if bool(missed.any()):
        # Up to the first miss of all rows greedy decoding says what is right. What it says there is known; from there
        # on it goes its own way.
        first = int((predicted != expected).long()[missed].argmax(1).min())
        outputs[:, first] = predicted[:, first]
        start = torch.cat([ids[:, read : asked + first], predicted[:, first, None]], dim=1)
        for i in range(first + 1, answer):
            _, token = reader.score(_last(reader, start, spare, size)[:, 0], expected[:, i])
            outputs[:, i], start = token, token[:, None]
        outputs[~missed] = expected[~missed]
    return [
        Answer(until(output.tolist(), stops), tuple(p.tolist()), tuple(score.tolist()))
        for output, p, score in zip(outputs, predicted, logprobs, strict=True)
    ]


def _all(reader: Reader, ids: Tensor, past: Any, reach: int, progress: Progress | None = None) -> Tensor:
    return torch.cat([hidden for _, hidden in reader.read(ids, past, progress=progress, reach=reach)], dim=1)


def _last(reader: Reader, ids: Tensor, past: Any, reach: int, progress: Progress | None = None) -> Tensor:
    return _all(reader, ids, past, reach, progress)[:, -1:]


def until(output: Sequence[int], stops: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens before the first one that ends a text."""
    at = next((i for i, token in enumerate(output) if token in stops), len(output))
    return tuple(output[:at])
