"""The setting of a check, which all methods and formats share, and the method that is in place."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.analysis.outliers import KeyBias
from rope_patch.evaluation.read_across_processes import read_batches
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.scoring import model_hash
from rope_patch.modeling.state_statistics import Capture
from rope_patch.options.kv_check import Limits
from rope_patch.runtime.result_cache import finite, key
from rope_patch.tables import RotaryTable

COMPARED_WINDOWS = 2
"""Number of windows whose distributions are compared, and on which the lengths of keys are measured."""
ERROR_TOKENS = 2048
"""Greatest length of the text on which attention errors are measured [tokens]."""


@dataclass(eq=False)
class Setting:
    """The part of a check that is the same for all methods and formats.

    Attributes:
        model: the model that is measured.
        suite: the suite of windows and prompts.
        limits: the limits of what a safe format may cost.
        result_cache: the result cache in which finished work is stored; None if it is not stored.
        layers: the attention layers of the model.
        biases: the pairs of biases that make outliers of its keys.
        decode: number of tokens by which each window is continued through each format; 0 for none.
    """

    model: nn.Module
    suite: EvalSuite
    limits: Limits
    result_cache: MutableMapping[str, Any] | None
    layers: Sequence[AttentionLayer]
    biases: Sequence[KeyBias]
    decode: int = 0

    @property
    def compared(self) -> Tensor:
        """The windows whose distributions are compared: (windows, tokens)."""
        return torch.stack([window.ids for window in self.suite.windows[:COMPARED_WINDOWS]])

    @property
    def lengths(self) -> Sequence[int]:
        """Prompt lengths, rising [tokens]."""
        return self.suite.spec.lengths

    @property
    def chunk(self) -> int | None:
        """Number of tokens in a forward pass over text; None for whole windows."""
        spec = self.suite.spec
        return None if spec.chunk is None else min(spec.chunk, spec.longest)

    def finished(self, tokens: int, measure: Callable[[], Any], **about: Any) -> Any:
        """Return a result from the result cache, or measure it and store it there.

        Args:
            tokens: number of tokens that the measurement reads, for the progress.
            measure: function that returns the result as JSON values.
            **about: entries of the key that tell the result from others of the same model.
        """
        identity = "" if self.result_cache is None else model_hash(self.model)
        ((_, value),) = read_batches(
            self.model,
            [[measure]],
            score=lambda items: [finite(item()) for item in items],
            name=lambda _: key(model=identity, **about),
            tokens=lambda _: tokens,
            cache=self.result_cache,
        )
        return value


@dataclass(eq=False)
class MethodInPlace:
    """A method that is in place, and measurements of the model under it.

    Attributes:
        method: the method string.
        tables: the rotary tables of the method, one for each layer type.
        capture: the statistics of queries and keys.
        states: last hidden states of the compared windows in full precision: (tokens, features) each.
    """

    method: str
    tables: tuple[RotaryTable, ...]
    capture: Capture
    states: list[Tensor] = field(default_factory=list)
