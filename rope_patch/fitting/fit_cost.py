"""How much a fit reads."""

from __future__ import annotations

from rope_patch.evaluation.spec import DEFAULT_WINDOWS, SCALABLE, smaller, tokens_to_read
from rope_patch.fitting.draw_rows import step_tokens
from rope_patch.fitting.fit_run import checks
from rope_patch.options.evaluation import EvalSpec


def tokens_to_fit(spec: EvalSpec, steps: int, positions: str) -> int:
    """Return the tokens of all steps and evaluations of a fit.

    A table is evaluated at the start, at the checks, and once more where an average is one of several steps. Where none
    of these is better than the start, up to three others are.

    Args:
        spec: what tables are evaluated on; its first length is the trained one, its last one the target.
        steps: the number of steps.
        positions: of the rows, ``"full"`` or ``"pose"``.
    """
    evaluations = 1 + len(checks(steps)) + (steps - (steps + 1) // 2 > 1)
    # the windows of the second domain are as many as of the first
    once = tokens_to_read(spec) + (spec.windows or DEFAULT_WINDOWS) * spec.longest
    return steps * step_tokens(positions, spec.lengths[0], spec.longest) + evaluations * once


def affordable(spec: EvalSpec, steps: int, positions: str, most: int) -> EvalSpec:
    """Return a spec with as many windows and samples as a number of tokens allows, and at least the fewest."""
    specs = smaller(spec, SCALABLE)
    return next((one for one in specs if tokens_to_fit(one, steps, positions) <= most), specs[-1])
