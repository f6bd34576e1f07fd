"""How much a check of quantized caches reads: what is announced, and what progress adds up to.

Specs have a number of windows here, that of the suite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import nn

from rope_patch.evaluation.budget import default_tokens, suite_within
from rope_patch.evaluation.spec import SCALABLE, smallest, tokens_to_read
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.measuring import readings
from rope_patch.kv_evaluation.setting import COMPARED, ERRORS
from rope_patch.options.evaluation import EvalSpec


def tokens_to_measure(spec: EvalSpec, schemes: Collection[Scheme]) -> int:
    """Return the tokens that :func:`~rope_patch.kv_evaluation.measuring.measure` reads.

    These are the windows and prompts of each scheme, the compared windows in full precision and through each scheme,
    and the text on which attention errors are taken, once for each scheme.

    Args:
        spec: what is measured.
        schemes: measured together; full precision may be one of them.
    """
    quantizing = sum(scheme != Scheme() for scheme in schemes)
    compared = min(COMPARED, spec.windows or 0) * spec.longest
    each = compared + min(ERRORS, spec.longest)
    return len(schemes) * tokens_to_read(spec) + quantizing * each + bool(quantizing) * compared


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

    def suite_for(self, model: nn.Module, suite: EvalSuite, chosen: Collection[str] = ()) -> tuple[EvalSuite, int, str]:
        """Return a suite that suits the size of a model, how many windows costs are attributed on, and what is lost.

        Args:
            model: the model that reads.
            suite: what is measured with time enough.
            chosen: fields of the spec that stay as they are.
        """
        whole, most = replace(suite.spec, windows=len(suite.windows)), default_tokens(model)
        attributed = COMPARED if self.attribution(whole, COMPARED) <= most else 1
        scalable = [name for name in SCALABLE if name not in chosen]
        each = max(most / self.methods / len(self.schemes), tokens_to_read(smallest(whole, scalable)))
        smaller, lost = suite_within(suite, each, scalable)
        if attributed < min(COMPARED, len(smaller.windows)):
            once = "what each layer of an unsafe scheme costs alone is measured on 1 window"
            lost = f"{lost}; {once}" if lost else once
        return smaller, attributed, lost
