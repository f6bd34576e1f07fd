"""The setting of a check of quantized caches under one method, which all formats share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from rope_patch.analysis.outliers import KeyBias
from rope_patch.evaluation.finished_work import FinishedWork
from rope_patch.evaluation.read_across_processes import read_batches
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.reader import Reader
from rope_patch.modeling.state_statistics import Capture
from rope_patch.options.kv_check import Limits
from rope_patch.runtime.result_cache import key
from rope_patch.tables import RotaryTable

COMPARED_WINDOWS = 2
"""Number of windows whose distributions are compared, and on which the lengths of keys are measured."""
ERROR_TOKENS = 2048
"""Greatest length of the text on which attention errors are measured [tokens]."""


@dataclass(eq=False)
class Setting:
    """The part of a check that is the same for all formats under a method, which is in place.

    Attributes:
        model: the model that is measured.
        suite: the suite of windows and prompts.
        limits: the limits of what a safe format may cost.
        work: the finished work of the model under this method; None if it is not stored.
        decode: number of tokens by which each window is continued through each format; 0 for none.
        compared: (windows, tokens) the windows whose distributions are compared.
        biases: the pairs of biases that make outliers of the model's keys.
        layers: the attention layers of the model.
        method: the method string.
        tables: the rotary tables of the method, one for each layer type.
        capture: the statistics of queries and keys.
        states: last hidden states of the compared windows in full precision: (tokens, features) each.
    """

    model: nn.Module
    suite: EvalSuite
    limits: Limits
    work: FinishedWork | None
    decode: int
    compared: Tensor
    biases: Sequence[KeyBias]
    layers: Sequence[AttentionLayer]
    method: str
    tables: tuple[RotaryTable, ...]
    capture: Capture
    states: list[Tensor] = field(default_factory=list)

    @functools.cached_property
    def reader(self) -> Reader:
        """The model, taken apart."""
        return Reader(self.model)

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
