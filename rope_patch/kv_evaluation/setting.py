"""What is measured, on what, and where the results are kept."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.suite import EvalSuite
from rope_patch.modeling.statistics import Capture
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.kv_check import Limits
from rope_patch.tables import RotaryTable

COMPARED = 2
"""Windows whose distributions are compared, and whose statistics tell radii and outliers."""
ERRORS = 2048
"""Tokens of the text at which attention errors are taken, at most [tokens]."""


@dataclass(eq=False)
class Setting:
    """What is the same for all methods and schemes.

    Attributes:
        model: that is measured.
        suite: windows and prompts.
        limits: what a scheme may cost.
        result_cache: finished work; None where none is kept.
        attributed: windows that the cost of an unsafe scheme is attributed on; 0 for none.
    """

    model: nn.Module
    suite: EvalSuite
    limits: Limits
    result_cache: MutableMapping[str, Any] | None
    attributed: int = COMPARED

    @property
    def spec(self) -> EvalSpec:
        """What is measured, with the number of windows that there are."""
        return replace(self.suite.spec, windows=len(self.suite.windows))

    @property
    def compared(self) -> Tensor:
        """The windows whose distributions are compared: (windows, tokens)."""
        return torch.stack([window.ids for window in self.suite.windows[:COMPARED]])

    @property
    def lengths(self) -> Sequence[int]:
        """Prompt lengths, rising [tokens]."""
        return self.suite.spec.lengths

    @property
    def chunk(self) -> int | None:
        """Tokens per forward pass over text; None for whole windows."""
        spec = self.suite.spec
        return None if spec.chunk is None else min(spec.chunk, spec.longest)


@dataclass(frozen=True, eq=False)
class MethodInPlace:
    """A method that is in place, and what is known of the model's keys under it.

    Attributes:
        method: as a method string.
        tables: its rotary tables, by layer type.
        means: mean key of each head before rotation, by layer; None where no scheme centres keys.
        capture: statistics of queries and keys.
        long_pairs: pairs of long mean keys, by layer.
    """

    method: str
    tables: tuple[RotaryTable, ...]
    means: Mapping[int, Tensor] | None
    capture: Capture
    long_pairs: Mapping[int, Tensor]

    def plan_options(self, setting: Setting) -> dict[str, Any]:
        """Return what :func:`~rope_patch.kv_cache.plans.plan_layers` needs besides the scheme."""
        return {"means": self.means, "context": setting.limits.context}
