"""Asks a model for greedy answers and for the log-probabilities of the right ones; shared beginnings are read once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rope_patch.evaluation.retrieval.prompts import Prompt
from rope_patch.modeling.reader import CacheFactory, Reader
from rope_patch.runtime import progress

TAIL_TOKENS = 16
"""Number of prompt tokens that are read together with the answer, and once more if the answer is wrong; the tokens
before them are read once."""

SHORT_PASS_TOKENS = 32
"""Number of tokens before the tail that are not worth a forward pass of their own: they are read with the tail."""


# Names of cache layers that never write into the memory of earlier tokens, so a copy may share it.
_COPIED_BY_REFERENCE = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer", "RoomyLayer"}


@dataclass(frozen=True)
class Answer:
    """The answer of a model to one prompt.

    Attributes:
        output: tokens of greedy decoding, up to the number that the task generates; a right answer ends them.
        logprobs: log-probability of each token of the right answer [nats].
    """

    output: Sequence[int]
    logprobs: Sequence[float]


def copy_cache(cache: Any) -> Any:
    """Return a copy of a cache; what is added to the copy does not change the original.

    Layers of transformers' ``DynamicCache`` replace their tensors, and our layers write after the tokens that are
    there, so the copy shares their memory: use the copy up before you add to the original. All other caches are copied
    whole.
    """
    # A subclass may hold more state, which a shallow copy would share.
    if type(cache) is DynamicCache:
        branch = copy.copy(cache)
        branch.layers = []
        for layer in cache.layers:
            if type(layer).__name__ in _COPIED_BY_REFERENCE:
                branch.layers.append(copy.copy(layer))
            else:
                branch.layers.append(copy.deepcopy(layer))
        return branch
    return copy.deepcopy(cache)


@torch.no_grad()
def answer_prompts(
    reader: Reader,
    rows: Sequence[Sequence[Prompt]],
    *,
    chunk: int | None = None,
    cache: CacheFactory | None = None,
) -> list[list[Answer]]:
    """Return the answers to a grid of prompts; the prompts of a column share their beginnings.

    The prompt that has most in common with the others, the trunk, is read once. Every other prompt is read from a copy
    of the trunk's cache, taken where the two differ for the first time. The right answer is scored in the forward pass
    that reads the question; only if greedy decoding gives another token there, the answer is generated token by token.

    Args:
        reader: the model that answers.
        rows: (questions, batch) prompts of the same length; within a row the answers have the same length too.
        chunk: length of a forward pass [tokens]; by default that of :meth:`Reader.chunk`.
        cache: a factory of the cache to read through. With one, the answer is read a token at a time, as in generation.

    Raises:
        ValueError: logits are not finite.
    """
    ids = torch.tensor([[prompt.ids for prompt in row] for row in rows])  # (questions, batch, tokens)
    size = ids.shape[2]
    trunk, parting = _trunk(ids)
    chunk = reader.chunk(size, chunk, cache)
    # Its memory is taken once for the whole prompt, so that adding to it copies nothing.
    past = cache() if cache is not None else reader.new_cache(size + rows[0][0].beyond)
    read = 0
    answers = {}
    longest = max(row[0].answer for row in rows)
    body = size - longest - TAIL_TOKENS  # tokens that are read before the tail
    meeting = [max(0, min(place, body)) for place in parting]
    # From the prompt that differs first to the trunk itself: so the trunk's cache only ever grows, and is copied where
    # needed.
    order = sorted(range(len(rows)), key=lambda i: (i == trunk, parting[i]))
    shared = sum(meeting[i] for i in order[:-1])  # each is read from where the one before it left the trunk
    with progress.work(
        sum(prompt.length for row in rows for prompt in row), reads=ids.shape[1] * (len(rows) * (size - 1) - shared)
    ):
        for i in order:
            meet = meeting[i]
            if meet > read:
                for _ in reader.read(ids[trunk, :, read:meet], past, chunk):
                    pass
                read = meet
            branch = past if i == trunk else copy_cache(past)
            begin = read
            if body - read > SHORT_PASS_TOKENS:
                for _ in reader.read(ids[i, :, read:body], branch, chunk):
                    pass
                begin = body
            answers[i] = answer_from(reader, rows[i], ids[i], begin, branch, cache is not None)
    return [answers[i] for i in range(len(rows))]


def _trunk(ids: Tensor) -> tuple[int, list[int]]:
    """Return the index of the trunk, and for each question how many tokens its prompts share with it [tokens]."""
    # Tokens that are shared in all columns of the batch.
    shared = [(ids == row).all(1).long().cumprod(1).sum(1).tolist() for row in ids]
    trunk = max(range(len(ids)), key=lambda i: sum(shared[i]))
    return trunk, shared[trunk]


def answer_from(
    reader: Reader,
    prompts: Sequence[Prompt],
    ids: Tensor,
    read: int,
    past: Any,
    stepwise: bool = False,
) -> list[Answer]:
    """Return the answers to prompts whose first tokens are in a cache, which is used up.

    Args:
        reader: the model that answers.
        prompts: (batch,) the prompts; their answers are of one length in tokens.
        ids: (batch, tokens) the token ids of the prompts with their answers.
        read: the number of tokens that the cache holds [tokens].
        past: the cache.
        stepwise: whether the answer is read a token at a time, as in generation.

    Raises:
        ValueError: logits are not finite.
    """
    answer = prompts[0].answer
    prompt_tokens = ids.shape[1] - answer
    expected = ids[:, prompt_tokens:]
    # Where greedy decoding differs from the right answer, it continues from this copy, without the right answer in the
    # cache. It may overwrite memory that past shares, because past is not read again by then.
    spare = copy_cache(past)
    if stepwise:
        # A cache that rounds gives other states if several tokens are added at once, so they are added as generation
        # adds them.
        states = [reader.states(ids[:, read:prompt_tokens], past)[:, -1:]]
        states += [reader.states(expected[:, i, None], past) for i in range(answer - 1)]
        hidden = torch.cat(states, dim=1)
    else:
        # The last token of the answer predicts nothing that is scored, so it is left out.
        hidden = reader.states(ids[:, read:-1], past)[:, -answer:]
    loss, best = reader.score(hidden.flatten(0, 1), expected.flatten())
    logprobs = -loss.view(expected.shape)
    predicted = best.view(expected.shape)
    if not bool(torch.isfinite(logprobs).all()):
        raise ValueError(f"NaN or infinite logits in a prompt of {ids.shape[1]} tokens: try float32")
    outputs: list[list[int]] = expected.tolist()
    missed = (predicted != expected).any(1)
    if bool(missed.any()):
        # Before the first position where any row is wrong, greedy decoding gives the right tokens; at it, the predicted
        # ones. Only the tokens after it have to be generated.
        first = int((predicted != expected).long()[missed].argmax(1).min())
        said = [*expected[:, :first].unbind(1), predicted[:, first]]
        start = torch.cat([ids[:, read : prompt_tokens + first], predicted[:, first, None]], dim=1)
        for _ in range(first + 1, answer + prompts[0].beyond):
            _, token = reader.score(reader.states(start, spare)[:, -1], said[-1])  # the label is not needed
            said.append(token)
            start = token[:, None]
        # Rows that are right were generated only because they share the batch.
        generated = torch.stack(said, dim=1).tolist()
        outputs = [new if wrong else right for new, right, wrong in zip(generated, outputs, missed, strict=True)]
    return [Answer(*pair) for pair in zip(outputs, logprobs.tolist(), strict=True)]
