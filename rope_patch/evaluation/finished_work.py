"""Finished measurements of a model, found again as long as the model is the one that was measured."""

from __future__ import annotations

import itertools
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.modeling.identity import differs, fixed_logits, model_hash, weights_digest
from rope_patch.modeling.reader import CacheFactory
from rope_patch.runtime import progress
from rope_patch.runtime.parallel import from_first_process
from rope_patch.runtime.result_cache import key, open_cache


@dataclass(frozen=True, eq=False)
class FinishedWork:
    """A result cache and the model whose results are looked up in it.

    The weights are hashed once, however many patches the model is measured under.

    Attributes:
        values: results by key.
        weights: digest of the model's weights.
        identity: text by which keys tell the model apart, under the patch that it has; "" before :func:`finished_work`.
    """

    values: MutableMapping[str, Any]
    weights: str
    identity: str = ""


Resume = str | Path | MutableMapping[str, Any] | FinishedWork | None
"""Where finished work is stored: a file, or a mapping in memory. Within the package, a :class:`FinishedWork`."""


def open_work(model: nn.Module, resume: Resume) -> FinishedWork | None:
    """Return the finished work that ``resume`` names for a model under any patch; None if nothing is stored.

    Raises:
        ValueError: a file that is no result cache.
    """
    if resume is None or isinstance(resume, FinishedWork):
        return resume
    values = open_cache(resume)
    return FinishedWork(values, weights_digest(model))


def finished_work(
    model: nn.Module, resume: Resume, longest: int, cache: CacheFactory | None = None
) -> FinishedWork | None:
    """Return the finished work that ``resume`` names for a model as it is now; None if nothing is stored.

    Results are those of this model if it is the same in every bit that can be compared, and answers fixed tokens as it
    did when they were measured.

    Args:
        model: a causal language model, under the patch that is measured.
        resume: where finished work is stored. Work that has an identity is returned as it is.
        longest: length of the longest text that is measured [tokens].
        cache: factory of the caches that the model reads through, if it is not the usual one.

    Raises:
        ValueError: a file that is no result cache.
    """
    work = open_work(model, resume)
    if work is None or work.identity:
        return work
    exact = model_hash(model, work.weights), getattr(cache, "identity", None)
    logits, tolerance = fixed_logits(model, longest, cache)

    def known() -> str:
        """Return the key of the stored logits that the model gives now, and store them if there are none."""
        for number in itertools.count():
            name = key(logits_of=exact, lengths=list(logits), number=number)
            if name not in work.values:
                break
            if not differs(work.values[name], logits, tolerance):
                return name
        if number:
            progress.say(
                "the model gives other logits for a fixed text than when the stored results were measured: it is "
                "measured again"
            )
        work.values[name] = logits
        return name

    return replace(work, identity=from_first_process(known))
