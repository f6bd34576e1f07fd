"""The setting of a check of quantized caches under one method, which all formats share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.analysis.outliers import KeyBias
from rope_patch.evaluation.finished_work import FinishedWork
from rope_patch.evaluation.read_across_processes import read_batches
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.inputs import tensor_hash
from rope_patch.modeling.reader import CacheFactory, Reader
from rope_patch.modeling.state_statistics import Capture
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.options.kv_check import Limits
from rope_patch.runtime.result_cache import key
from rope_patch.tables import RotaryTable

COMPARED_WINDOWS = 2
"""Number of windows whose distributions are compared, and on which the lengths of keys are measured."""
ERROR_TOKENS = 2048
"""Greatest length of the text on which attention errors are measured [tokens]."""


class WindowStates:
    """The last hidden states of windows of text, each read when it is asked for the first time.

    Args:
        reader: the model, taken apart.
        windows: (windows, tokens) token ids.
        chunk: number of tokens in a forward pass; by default as many as possible.
        cache: factory of the caches that are read through; by default the model reads in full precision.
        begin: function that returns the context in which a window is read.
    """

    def __init__(
        self,
        reader: Reader,
        windows: Tensor,
        chunk: int | None = None,
        cache: CacheFactory | None = None,
        begin: Callable[[Tensor], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.reader = reader
        self.windows = {tensor_hash(row): row for row in windows}
        self.chunk = reader.chunk(windows.shape[1], chunk, cache)
        if cache is None and self.chunk < windows.shape[1]:
            reader.check("pieces")  # now, and not while somebody watches the states
        self.cache = cache
        self.begin = begin
        self.known: dict[str, Tensor] = {}

    @torch.no_grad()
    def of(self, ids: Tensor) -> Tensor | None:
        """Return the states (tokens, features) of a window (tokens,); None if it is none of these windows."""
        name = tensor_hash(ids)
        if name in self.windows and name not in self.known:
            past = self.reader.past(len(ids), self.chunk, self.cache)
            with in_eval_mode(self.reader.model), self.begin(ids):
                self.known[name] = self.reader.states(ids[None], past, self.chunk)[0]
        return self.known.get(name)

    def all(self) -> list[Tensor]:
        """Return the states of all windows."""
        for row in self.windows.values():
            self.of(row)
        return [self.known[name] for name in self.windows]


@dataclass(eq=False)
class Setting:
    """The part of a check that is the same for all formats under a method, which is in place.

    Attributes:
        model: the model that is measured.
        suite: the suite of windows and prompts.
        limits: the limits of what a safe format may cost.
        work: the finished work of the model under this method; None if it is not stored.
        compared: (windows, tokens) the windows whose distributions are compared.
        biases: the pairs of biases that make outliers of the model's keys.
        layers: the attention layers of the model.
        method: the method string.
        tables: the rotary tables of the method, one for each layer type.
        capture: the statistics of queries and keys.
        states: last hidden states of the compared windows in full precision.
        reader: the model, taken apart.
    """

    model: nn.Module
    suite: EvalSuite
    limits: Limits
    work: FinishedWork | None
    compared: Tensor
    biases: Sequence[KeyBias]
    layers: Sequence[AttentionLayer]
    method: str
    tables: tuple[RotaryTable, ...]
    capture: Capture
    states: WindowStates
    reader: Reader

    @property
    def lengths(self) -> Sequence[int]:
        """Prompt lengths, rising [tokens]."""
        return self.suite.spec.lengths

    @property
    def chunk(self) -> int | None:
        """Number of tokens in a forward pass over text; None for whole windows."""
        return self.suite.spec.chunk

    def finished(self, tokens: int, measures: Mapping[str, Callable[[], Any]], **about: Any) -> dict[str, Any]:
        """Return results by their names, from the result cache or measured and stored there.

        Args:
            tokens: number of tokens that each measurement reads, for the progress.
            measures: functions that return the results as JSON values, by name; several processes share them.
            **about: further entries of the keys that tell the results from others of the same model.
        """
        values = read_batches(
            self.model,
            [[name] for name in measures],
            score=lambda names: [measures[name]() for name in names],
            name=lambda name, model: key(kind=name, model=model, **about),
            tokens=lambda _: tokens,
            work=self.work,
        )
        return dict(values)
