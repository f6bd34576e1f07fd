"""How much a check of quantized caches reads, and how long that takes: what is announced, and what progress adds up to.

Specs have a number of windows here, that of the suite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rope_patch.evaluation.compare import under
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.measuring import readings
from rope_patch.kv_evaluation.noise import PASSES
from rope_patch.kv_evaluation.setting import COMPARED, ERRORS
from rope_patch.methods import Method
from rope_patch.modeling.budget import MEASURING, Pace, pace_of_reading
from rope_patch.patching.locate import find_rotary


def tokens_to_measure(spec: EvalSpec, schemes: Collection[Scheme]) -> int:
    """Return the tokens that :func:`~rope_patch.kv_evaluation.measuring.measure` reads.

    These are the windows and prompts of each scheme, the compared windows in full precision and through each scheme,
    the text on which attention errors are taken, and the passes that tell the noise of a loss, both of each scheme.

    Args:
        spec: what is measured.
        schemes: measured together; full precision may be one of them.
    """
    quantizing = sum(scheme != Scheme() for scheme in schemes)
    compared = min(COMPARED, spec.windows or 0) * spec.longest
    each = compared + min(ERRORS, spec.longest) + PASSES * min(1, spec.windows or 0) * spec.longest
    return len(schemes) * spec.tokens_to_read() + quantizing * each + bool(quantizing) * compared


@dataclass(frozen=True)
class CheckReading:
    """What a check reads of any spec.

    Attributes:
        schemes: that are checked by name, full precision among them.
        methods: how many methods they are checked under.
        layers: of the model.
        calibration: tokens that mean keys are taken over under each method.
    """

    schemes: Mapping[str, Scheme]
    methods: int
    layers: int
    calibration: int = 0

    def tokens(self, spec: EvalSpec) -> int:
        """Return the tokens that are read where no scheme is unsafe."""
        compared = min(COMPARED, spec.windows or 0) * spec.longest
        return self.methods * (self.calibration + compared + tokens_to_measure(spec, self.schemes.values()))

    def attribution(self, spec: EvalSpec, attributed: int) -> int:
        """Return the most tokens that unsafe schemes add, where every scheme is unsafe under every method.

        Args:
            spec: what is measured.
            attributed: windows that costs are attributed on.
        """
        windows = min(attributed, spec.windows or 0)
        quantizing = sum(scheme != Scheme() for scheme in self.schemes.values())
        return self.methods * quantizing * readings(self.layers) * windows * spec.longest

    def seconds(self, spec: EvalSpec, pace: Pace) -> float:
        """Return how long :meth:`tokens` take [s].

        Args:
            spec: what is measured.
            pace: from :func:`pace_of`.
        """
        suites = self.methods * len(self.schemes)
        others = self.tokens(spec) - suites * spec.tokens_to_read()
        return suites * spec.seconds(pace) + pace.seconds(others, spec.longest)


def pace_of(model: nn.Module, method: Method, schemes: Collection[Scheme], spec: EvalSpec, **options: Any) -> Pace:
    """Measure how long a model takes to read a window of a spec under a method, mean over schemes.

    Args:
        model: to be measured.
        method: with its factor, from :func:`~rope_patch.patching.targets.for_target`.
        schemes: that will be checked. The mean that one centres keys by takes hardly any time, and is left out.
        spec: what will be read.
        **options: ``layer_types`` and ``freeze_at`` of :func:`~rope_patch.kv_evaluation.run.kv_check`.
    """
    pace, seconds = Pace(0.0), 2 * MEASURING / len(schemes)
    chunk = None if spec.chunk is None else min(spec.chunk, spec.longest)
    with under(model, method, find_rotary(model).record is not None, options):
        for scheme in schemes:
            with quantized(model, replace(scheme, key=replace(scheme.key, centre=""))) as factory:
                cache = None if scheme == Scheme() else factory
                pace += pace_of_reading(model, spec.longest, chunk=chunk, cache=cache, seconds=seconds)
    return pace * (1 / len(schemes))
