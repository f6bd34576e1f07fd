"""Retrieval: does the model still find a number it was told, at every length and depth?"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.perplexity import in_eval_mode
from rope_patch.evaluation.text import builtin_text

SCHEMA = 1
NEEDLE = " The pass key is {key}. Remember it."
QUESTION = " What is the pass key? The pass key is {key}"
DIGITS = 5
TASKS = ("passkey",)


@dataclass(frozen=True)
class Prompt:
    """One question with its answer.

    Attributes:
        ids: prompt and answer, in tokens of the model at hand.
        answer: how many of the last tokens are the answer.
    """

    ids: tuple[int, ...]
    answer: int


@dataclass(frozen=True)
class RetrievalCell:
    """Scores at one length and depth.

    Attributes:
        length: prompt and answer together [tokens].
        depth: where the needle is, 0 for the start and 1 for just before the question.
        samples: prompts asked.
        correct: exact matches, as greedy decoding would give them.
        digits: mean share of answer tokens that are the most probable one given the true ones
            before; some tokenizers put a token for the space before the digits.
        logprob: mean log-probability of the whole answer [nats].
    """

    length: int
    depth: float
    samples: int
    correct: int
    digits: float
    logprob: float


@dataclass(frozen=True)
class RetrievalResult:
    """Scores over lengths × depths.

    Attributes:
        task: its name.
        cells: one per length and depth.
        seed: of keys and haystacks.
        haystack: SHA-256 of the haystack text.
        python_version: whose files the built-in haystack is made of; None for a text of the user's.
        schema: version of this layout.
    """

    task: str
    cells: tuple[RetrievalCell, ...]
    seed: int
    haystack: str
    python_version: str | None
    schema: int = SCHEMA

    def accuracy(self, length: int) -> float:
        """Return the exact match at a length, over all depths."""
        correct, asked = self._counts(length)
        return correct / asked

    def interval(self, length: int, z: float = 1.96) -> tuple[float, float]:
        """Return the Wilson interval of :meth:`accuracy`, 95 % by default."""
        correct, asked = self._counts(length)
        p, share = correct / asked, z * z / asked
        middle, half = p + share / 2, z * math.sqrt(p * (1 - p) / asked + share / (4 * asked))
        return (middle - half) / (1 + share), (middle + half) / (1 + share)

    def _counts(self, length: int) -> tuple[int, int]:
        cells = [cell for cell in self.cells if cell.length == length]
        if not cells:
            raise ValueError(f"no cell of length {length}. Known: {sorted({c.length for c in self.cells})}")
        return sum(c.correct for c in cells), sum(c.samples for c in cells)

    def to_json(self) -> str:
        """Return the result as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)


def passkey_prompt(tokenizer: Any, haystack: Sequence[int], length: int, depth: float, rng: random.Random) -> Prompt:
    """Build a passkey prompt of exactly ``length`` tokens, its answer included.

    Args:
        tokenizer: of the model.
        haystack: token ids to hide the needle in; a stretch starting anywhere is used.
        length: of the whole [tokens].
        depth: in [0, 1].
        rng: source of the key and the stretch.

    Raises:
        ValueError: a depth outside [0, 1], a length with no room, or a haystack that is too short.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth must be in [0, 1], got {depth}")
    key = "".join(rng.choice("0123456789") for _ in range(DIGITS))

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    question, asked = encode(QUESTION.format(key=key)), encode(QUESTION.format(key="").rstrip())
    answer = len(question) - len(asked)
    if question[: len(asked)] != asked or answer < 1:
        raise ValueError("this tokenizer merges the answer with the question: passkey cannot be scored with it")
    needle = encode(NEEDLE.format(key=key))
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    room = length - len(start) - len(needle) - len(question)
    if room < 0:
        raise ValueError(f"a passkey prompt needs at least {length - room} tokens with this tokenizer, got {length}")
    if room > len(haystack):
        raise ValueError(f"the haystack has {len(haystack)} tokens, {room} are needed: give a longer one as text=")
    first = rng.randrange(len(haystack) - room + 1)
    before = round(depth * room)
    hay = list(haystack[first : first + room])
    return Prompt((*start, *hay[:before], *needle, *hay[before:], *question), answer)


@torch.no_grad()
def retrieval(
    model: nn.Module,
    tokenizer: Any,
    task: str = "passkey",
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int,
    seed: int = 0,
    cache: Callable[[], Any] | None = None,
    text: str | None = None,
    batch_tokens: int = 16384,
    progress: Callable[[int], None] = lambda _: None,
) -> RetrievalResult:
    """Ask for a number hidden in a text, at every length and depth. One needle per prompt.

    The answer's tokens are scored in the pass that reads the prompt: greedy decoding gives the exact answer if and only
    if each of them is the most probable one given those before. With ``cache`` the prompt is read through it first and
    the answer's tokens follow one at a time, as in generation.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        task: ``"passkey"``.
        lengths: of prompt and answer together, exact [tokens of this tokenizer].
        depths: of the needle, each in [0, 1].
        samples: prompts per length and depth.
        seed: of keys and haystacks; the same seed gives the same prompts.
        cache: zero-argument factory of a cache to read through.
        text: haystack of the user's own; the built-in haystack split by default.
        batch_tokens: tokens per forward pass, at most.
        progress: told the number of tokens read after each batch.

    Raises:
        ValueError: unknown task, bad lengths or depths, or a prompt that does not fit; nothing is ever cut.
    """
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}. Known: {', '.join(TASKS)}")
    lengths, depths = [int(length) for length in lengths], [float(depth) for depth in depths]
    for name, values in (("lengths", lengths), ("depths", depths)):
        if not values:
            raise ValueError(f"{name} is empty")
    if samples < 1:
        raise ValueError(f"samples must be >= 1, got {samples}")
    corpus = builtin_text("haystack") if text is None else None
    source = corpus.text if corpus is not None else str(text)
    haystack = tokenizer(source, add_special_tokens=False, verbose=False)["input_ids"]
    device = next(p.device for p in model.parameters())

    def prompt(length: int, depth: float, sample: int) -> Prompt:
        rng = random.Random(f"{seed}/{length}/{depth}/{sample}")
        return passkey_prompt(tokenizer, haystack, length, depth, rng)

    for length, depth in itertools.product(lengths, depths):  # what does not fit is refused before any has run
        prompt(length, depth, 0)
    cells = []
    with in_eval_mode(model):
        for length, depth in itertools.product(lengths, depths):
            prompts = [prompt(length, depth, sample) for sample in range(samples)]
            right, scores = [], []
            per_batch = max(1, batch_tokens // length)
            for i in range(0, samples, per_batch):
                batch = prompts[i : i + per_batch]
                hits, logprobs = _score(model, batch, device, cache)
                right.append(hits)
                scores.append(logprobs)
                progress(len(batch) * length)
            hit = torch.cat(right)
            correct, digits = int(hit.all(1).sum()), float(hit.double().mean())
            logprob = float(torch.cat(scores).sum(1).mean())
            cells.append(RetrievalCell(length, depth, samples, correct, digits, logprob))
    digest = corpus.sha256 if corpus is not None else hashlib.sha256(source.encode()).hexdigest()
    return RetrievalResult(task, tuple(cells), seed, digest, corpus.python_version if corpus is not None else None)


def _score(
    model: Any, prompts: Sequence[Prompt], device: torch.device, cache: Callable[[], Any] | None
) -> tuple[Tensor, Tensor]:
    """Hits and log-probabilities of the answers' tokens: (prompts, answer) bool and float64."""
    answer = prompts[0].answer
    if any(prompt.answer != answer for prompt in prompts):
        raise ValueError("this tokenizer gives keys of different lengths: passkey cannot be scored with it")
    ids = torch.tensor([prompt.ids for prompt in prompts], device=device)
    if cache is None:
        logits = model(ids, use_cache=False, logits_to_keep=answer + 1).logits[:, :-1]
    else:
        past = cache()
        steps = [model(ids[:, :-answer], past_key_values=past, use_cache=True, logits_to_keep=1).logits]
        for i in range(answer - 1):
            token = ids[:, ids.shape[1] - answer + i, None]
            steps.append(model(token, past_key_values=past, use_cache=True).logits)
        logits = torch.cat(steps, dim=1)
    wanted = ids[:, -answer:]
    logprobs = logits.float().log_softmax(-1).gather(-1, wanted[..., None])[..., 0]
    if not bool(torch.isfinite(logprobs).all()):
        raise ValueError("the model gives NaN or infinite logits for an answer")
    return (logits.argmax(-1) == wanted).cpu(), logprobs.double().cpu()
