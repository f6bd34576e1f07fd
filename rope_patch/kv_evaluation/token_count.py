"""Count the tokens that ``kv-check`` will read, for the announcement and the progress bar.

Every spec here states a number of windows, that of the suite.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from rope_patch.evaluation.smaller_specs import SCALABLE, smallest_spec, tokens_to_read
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.evaluation.time_budget import default_tokens, suite_within
from rope_patch.kv_evaluation.check_setting import COMPARED_WINDOWS, ERROR_TOKENS
from rope_patch.kv_evaluation.decoding import tokens_to_decode
from rope_patch.kv_evaluation.measure_format import passes_of_attribution
from rope_patch.options.evaluation import EvalSpec


def _compared(spec: EvalSpec) -> int:
    return min(COMPARED_WINDOWS, spec.windows or 0) * spec.longest


def tokens_to_check(spec: EvalSpec, formats: int, methods: int, decode: int = 0) -> int:
    """Return the number of tokens that a check reads if no format is unsafe.

    Under each method these are the windows and prompts, in full precision and through each format; and the compared
    windows, likewise and once more for the statistics of keys.

    Args:
        spec: the spec of the check.
        formats: number of formats besides full precision.
        methods: number of methods under which the formats are checked.
        decode: number of tokens by which each window is continued.
    """
    decoded = (spec.windows or 0) * tokens_to_decode(spec.longest, decode, formats)
    return methods * ((1 + formats) * tokens_to_read(spec) + (2 + formats) * _compared(spec) + decoded)


def tokens_to_attribute(spec: EvalSpec, layers: int) -> int:
    """Return the number of tokens that each unsafe format adds under each method, at most."""
    return passes_of_attribution(layers) * _compared(spec) + min(ERROR_TOKENS, spec.longest)


def suite_for(
    model: nn.Module, suite: EvalSuite, formats: int, methods: int, chosen: Collection[str]
) -> tuple[EvalSuite, str]:
    """Return a suite that suits the size of a model, and a sentence on what it leaves out.

    Args:
        model: the model that reads.
        suite: the suite that is measured if there is enough time.
        formats: number of formats besides full precision.
        methods: number of methods under which the formats are checked.
        chosen: fields of the spec that stay as they are, since the user chose them.
    """
    scalable = [name for name in SCALABLE if name not in chosen]
    least = tokens_to_read(smallest_spec(replace(suite.spec, windows=len(suite.windows)), scalable))
    return suite_within(suite, max(default_tokens(model) / methods / (1 + formats), least), scalable)
