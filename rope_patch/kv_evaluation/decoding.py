"""Decode with a quantized cache: the greedy continuation of each window of text, beside full precision.

A window is a prompt. It is read in full precision, as serving engines read one; its keys and values are rounded then,
and so are those of each token that follows, one by one through the streaming cache. A prompt that is read in chunks
reads the rounded keys and values of the chunks before, as it does in engines.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.metrics import PairedDifference
from rope_patch.evaluation.retrieval.generate_answers import copy_cache
from rope_patch.kv_cache.block_rounding import scheme_identity
from rope_patch.kv_cache.cache import QuantizedCache, quantized
from rope_patch.kv_cache.layer import QuantizedLayer
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.check_setting import Setting
from rope_patch.modeling.inputs import tensor_hash
from rope_patch.modeling.read_at_once import rows_at_once, scored_at_once
from rope_patch.modeling.reader import Reader
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
        return fmean(map(fmean, self.forced)), fmean(map(fmean, self.own))

    def growth(self) -> PairedDifference:
        """Return by how much KL on own tokens is larger in the second half of the steps than in the first."""
        middle = len(self.own[0]) // 2 or 1
        late, early = ([fmean(steps[part]) for steps in self.own] for part in (slice(-middle, None), slice(middle)))
        return PairedDifference(fmean(late) - fmean(early), *paired_means(late, early))


def check_decoding(prompt: int, steps: int, context: int) -> None:
    """Raise ValueError where a prompt and the steps after it exceed the stated context."""
    if steps and prompt + steps > context:
        raise ValueError(
            f"decode {steps} tokens after prompts of {prompt}: the context that the model states is {context} tokens, "
            f"so that decode can be at most {max(0, context - prompt)}"
        )


def tokens_to_decode(prompt: int, steps: int, formats: int) -> int:
    """Return the number of tokens that are read for each prompt, where formats need not read it again."""
    return bool(steps) * (prompt + steps + formats * 3 * steps)


def measure_decoding(setting: Setting, formats: Mapping[str, Scheme]) -> dict[str, Decoding]:
    """Measure by format what it changes while the model continues the windows of a check, beyond ends of text.

    Args:
        setting: the setting of the check.
        formats: the formats by name.
    """
    steps = setting.decode
    measured: dict[str, list[tuple[Any, Any, int | None]]] = {name: [] for name in formats}
    windows = torch.stack([window.ids for window in setting.suite.windows])
    with torch.no_grad(), in_eval_mode(setting.model):
        # A pass of one token takes a batch as long as a single row, where weights are what is read from memory.
        for ids in torch.split(windows, setting.suite.spec.window_batch):
            # Full precision is read only if a format is not finished yet.
            full = functools.cache(functools.partial(_written, setting, Scheme(), ids, steps))
            about = {"ids": tensor_hash(ids), "steps": steps, "chunk": setting.chunk}
            for name, scheme in formats.items():
                measure = {"decoding": functools.partial(_decode, setting, scheme, ids, full)}
                finished = setting.finished(3 * steps * len(ids), measure, scheme=scheme_identity(scheme), **about)
                measured[name] += finished["decoding"]
            tokens = ids.numel() + steps * len(ids)
            if full.cache_info().currsize:
                progress.advance(tokens)
            else:
                progress.more(-tokens)
    return {name: Decoding(*zip(*prompts, strict=True)) for name, prompts in measured.items()}


Written = tuple[Tensor, Tensor, QuantizedCache]
"""Tokens (rows, steps) that continue prompts, their last hidden states, and the cache of the prompts before them."""


def _decode(
    setting: Setting, scheme: Scheme, ids: Tensor, full: Callable[[], Written]
) -> list[tuple[list[float], list[float], int | None]]:
    """Return for each row KL by step on the tokens of full precision, on those of a format, and where they part."""
    with progress.work(0):  # it is reported once, for all formats
        tokens, plain, prompt = full()
    both, rough, _ = _written(setting, scheme, ids, tokens.shape[1], full())
    own = both[1::2]
    plain_own = setting.reader.states(own, copy_cache(prompt), setting.chunk)
    rows = []
    for i, differs in enumerate((own != tokens).int()):
        forced, compared = (
            kl_by_position(setting.reader, *states)[0].tolist()
            for states in ((plain[i], rough[2 * i]), (plain_own[i], rough[2 * i + 1]))
        )
        rows.append((forced, compared, int(differs.argmax()) if bool(differs.any()) else None))
    return rows


def _written(setting: Setting, scheme: Scheme, ids: Tensor, steps: int, full: Written | None = None) -> Written:
    """Continue prompts through a cache.

    Args:
        setting: the setting of the check.
        scheme: the scheme of the cache.
        ids: (rows, tokens) the prompts.
        steps: number of tokens.
        full: what full precision wrote. Each prompt then has two rows: one reads these tokens, one goes on by itself.
    """
    tokens = []
    states = []
    with quantized(setting.model, scheme, exact=False, layers=setting.layers) as factory:
        cache: Any = factory()
        known = [] if full is None else [layer for layer in full[2].layers if isinstance(layer, QuantizedLayer)]
        needs_cos_sin = any(plan.needs_cos_sin for plan in factory.run.plans.values())
        if full is None or len(known) < len(cache.layers) or needs_cos_sin or setting.chunk:
            best = _best(setting, setting.reader.states(ids, cache, setting.chunk)[:, -1:])
        else:  # the prompts were read already
            for layer, other in zip(cache.layers, known, strict=True):
                layer.update(other.raw_keys, other.raw_values)
            best = full[0][:, :1]
        prompt = copy_cache(cache)
        if full is not None:
            cache.batch_repeat_interleave(2)
            best = best.repeat_interleave(2, 0)
        for step in range(steps):
            if full is not None:
                best[::2] = full[0][:, step, None]
            tokens.append(best)
            states.append(setting.reader.states(best, cache))
            best = _best(setting, states[-1])
    return torch.cat(tokens, 1), torch.cat(states, 1), prompt


def _best(setting: Setting, states: Tensor) -> Tensor:
    """Return the most probable token after each state (rows, 1, hidden)."""
    return setting.reader.score(states[:, 0], torch.zeros(len(states), dtype=torch.long))[1][:, None]


def kl_by_position(reader: Reader, plain: Tensor, rough: Tensor) -> Tensor:
    """Return KL and whether the first choice is the same, (2, tokens), a slice of positions at a time.

    Args:
        reader: the model, taken apart.
        plain: (tokens, hidden) last hidden states in full precision.
        rough: those through a quantized cache.
    """
    parts = []
    size = scored_at_once(len(plain), plain.device.type)
    for states in zip(torch.split(plain, size), torch.split(rough, size), strict=True):
        logits = [reader.own_logits(part) for part in states]
        few = rows_at_once(logits[0])
        for rows in zip(*(torch.split(each, few) for each in logits), strict=True):
            p, q = (part.float().log_softmax(-1) for part in rows)
            kl = (p.exp() * (p - q)).sum(-1)
            same = p.argmax(-1) == q.argmax(-1)
            parts.append(torch.stack([kl, same.to(kl.dtype)]))
    return torch.cat(parts, 1).cpu().double()
