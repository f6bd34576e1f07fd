"""Decode with a quantized cache: the greedy continuation of each window of text, beside full precision.

A window is a prompt. It is read in full precision, as serving engines read one; its keys and values are rounded then,
and so are those of each token that follows. Tokens that are known are read in one pass, which equals reading them one
by one (:mod:`rope_patch.kv_cache.attention`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.generate_answers import copy_cache
from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.metrics import PairedDifference
from rope_patch.kv_cache.cache import QuantizedCache, quantized
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.check_setting import Setting
from rope_patch.modeling.inputs import ids_hash
from rope_patch.modeling.scoring import LOGITS_AT_ONCE, Reader
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.runtime import progress


@dataclass(frozen=True)
class Decoding:
    """What a format changes while a model continues prompts greedily. KL is that from full precision [nats/token].

    Attributes:
        forced: KL at each step of each prompt, on the tokens that full precision writes.
        own: the same on the tokens that the format writes, which full precision reads for comparison.
        parted: for each prompt the number of steps after which the format writes another token; None if it never does.
    """

    forced: tuple[tuple[float, ...], ...]
    own: tuple[tuple[float, ...], ...]
    parted: tuple[int | None, ...]

    @property
    def kl(self) -> tuple[float, float]:
        """The mean KL on the tokens of full precision, and on the format's own [nats/token]."""
        forced, own = (math.fsum(map(_mean, steps)) / len(steps) for steps in (self.forced, self.own))
        return forced, own

    def growth(self, confidence: float) -> PairedDifference:
        """Return by how much KL on own tokens is larger in the second half of the steps than in the first."""
        late = [_mean(steps[len(steps) // 2 :]) for steps in self.own]
        early = [_mean(steps[: len(steps) // 2]) for steps in self.own]
        return PairedDifference(_mean(late) - _mean(early), *paired_means(late, early, confidence))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def check_decoding(prompt: int, steps: int, context: int) -> None:
    """Raise ValueError where a prompt and the steps after it exceed the stated context, or steps have no two halves."""
    if steps and prompt + steps > context:
        raise ValueError(
            f"decode {steps} tokens after prompts of {prompt}: the context that the model states is {context} tokens, "
            f"so that decode can be at most {max(0, context - prompt)}"
        )
    if steps == 1:
        raise ValueError("decode must be 0 or at least 2, since halves of the steps are compared, got 1")


def tokens_to_decode(prompt: int, steps: int, formats: int) -> int:
    """Return the number of tokens that are read for each prompt, at most."""
    return bool(steps) * (prompt + 2 * steps + formats * 4 * steps)


def measure_decoding(setting: Setting, formats: Mapping[str, Scheme], steps: int) -> dict[str, Decoding]:
    """Measure by format what it changes while the model continues the windows of a check.

    Args:
        setting: the setting of the check.
        formats: the formats by name.
        steps: number of tokens by which each window is continued; the ends of texts are written over.
    """
    measured: dict[str, list[tuple[Any, Any, int | None]]] = {name: [] for name in formats}
    for window in setting.suite.windows:
        prompt = _Prompt(setting, window.ids, steps)
        for name, scheme in formats.items():
            about = {"scheme": scheme.identity, "ids": ids_hash(window.ids), "steps": steps, "chunk": setting.chunk}
            measure = functools.partial(prompt.decode, scheme)
            measured[name].append(setting.finished(4 * steps, measure, kind="decoding", **about))
        # Full precision was read only if a format was not finished yet.
        report = progress.advance if "full" in vars(prompt) else progress.known
        report(len(window.ids) + 2 * steps)
    return {name: Decoding(*zip(*prompts, strict=True)) for name, prompts in measured.items()}


@dataclass(eq=False)
class _Prompt:
    """A prompt that a model continues.

    Attributes:
        setting: the setting of the check.
        ids: (tokens,) the prompt.
        steps: number of tokens by which it is continued.
    """

    setting: Setting
    ids: Tensor
    steps: int

    @functools.cached_property
    def reader(self) -> Reader:
        """The model that reads."""
        return Reader(self.setting.model)

    @functools.cached_property
    @torch.no_grad()
    def full(self) -> tuple[QuantizedCache, Tensor, Tensor]:
        """The prompt's cache in full precision, the tokens with which that continues it, and their hidden states."""
        with quantized(self.setting.model, Scheme(), layers=self.setting.layers) as factory, self._eval():
            # With an offset a layer keeps cos and sin, of which a format that undoes the rotation is in need.
            plans = factory.run.plans.items()
            factory.run.plans = {index: replace(plan, offset=torch.zeros(())) for index, plan in plans}
            cache = factory()
            last = self._read(self.ids, cache)[-1:]
            tokens = self._continued(copy_cache(cache), self._best(last))
            return cache, tokens, self._read(tokens, copy_cache(cache))

    @torch.no_grad()
    def decode(self, scheme: Scheme) -> tuple[list[float], list[float], int | None]:
        """Return KL at each step on the tokens of full precision and on those of a format, and where they part."""
        cache, tokens, plain = self.full
        with quantized(self.setting.model, scheme, layers=self.setting.layers) as factory, self._eval():
            prompt = factory()
            prompt.hold(cache)
            rough = self._read(tokens, copy_cache(prompt))
            other = (self._best(rough)[:-1] != tokens[1:]).nonzero()
            own, parted = tokens, None
            if len(other):
                parted = int(other[0, 0]) + 1
                begun = torch.cat([tokens[:parted], self._best(rough[parted - 1 : parted])])
                own = self._continued(copy_cache(prompt), begun)
            rough_own = self._read(own, prompt)
        with self._eval():
            plain_own = self._read(own, copy_cache(cache))
            forced = kl_by_position(self.reader, plain, rough)[0]
            compared = kl_by_position(self.reader, plain_own, rough_own)[0]
        return forced.tolist(), compared.tolist(), parted

    def _eval(self) -> Any:
        return in_eval_mode(self.setting.model)

    def _read(self, ids: Tensor, cache: QuantizedCache) -> Tensor:
        """Return the last hidden states of tokens that are added to a cache."""
        return torch.cat([part[0] for _, part in self.reader.read(ids[None], cache, self.setting.chunk)])

    def _best(self, states: Tensor) -> Tensor:
        """Return the most probable token after each state."""
        parts = torch.split(states, LOGITS_AT_ONCE)
        return torch.cat([self.reader.logits(part).argmax(-1) for part in parts]).cpu()

    def _continued(self, cache: QuantizedCache, tokens: Tensor) -> Tensor:
        """Return tokens continued greedily to the number of steps; the cache holds what is before them."""
        unread = tokens
        while len(tokens) < self.steps:
            unread = self._best(self._read(unread, cache)[-1:])
            tokens = torch.cat([tokens, unread])
        return tokens


def kl_by_position(reader: Reader, plain: Tensor, rough: Tensor) -> Tensor:
    """Return KL and whether the first choice is the same, (2, tokens), a slice of positions at a time.

    Args:
        reader: the model.
        plain: (tokens, hidden) last hidden states in full precision.
        rough: those through a quantized cache.
    """
    parts = []
    for states in zip(torch.split(plain, LOGITS_AT_ONCE), torch.split(rough, LOGITS_AT_ONCE), strict=True):
        p, q = (reader.logits(part).log_softmax(-1) for part in states)
        kl, same = (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
        parts.append(torch.stack([kl, same.to(kl.dtype)]).cpu().double())
    return torch.cat(parts, 1)
