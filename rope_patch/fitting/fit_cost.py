"""Count the tokens that a fit reads, and choose an evaluation that it can afford."""

from __future__ import annotations

from rope_patch.evaluation.spec import DEFAULT_WINDOWS, SCALABLE, smaller_specs, tokens_to_read
from rope_patch.fitting.draw_rows import step_tokens
from rope_patch.fitting.fit_run import evaluation_steps
from rope_patch.options.evaluation import EvalSpec


def tokens_to_fit(spec: EvalSpec, steps: int, positions: str) -> int:
    """Return the number of tokens of all steps and evaluations of a fit.

    Tables are evaluated at the start and at the checks, and the average is, if it is one of several steps. If none of
    these is better than the start, up to three more are evaluated, which are not counted here.

    Args:
        spec: the spec by which tables are evaluated; its first length is the trained one, its last one the target.
        steps: number of steps.
        positions: positions of the rows, ``"full"`` or ``"pose"``.
    """
    evaluations = 1 + len(evaluation_steps(steps)) + (steps - (steps + 1) // 2 > 1)
    # The second domain has as many windows as the first.
    once = tokens_to_read(spec) + (spec.windows or DEFAULT_WINDOWS) * spec.longest
    return steps * step_tokens(positions, spec.lengths[0], spec.longest) + evaluations * once


def spec_within_tokens(spec: EvalSpec, steps: int, positions: str, most: int) -> EvalSpec:
    """Return a spec with as many windows and samples as a number of tokens allows, but at least the fewest possible.

    Args:
        spec: the spec by which tables are evaluated if there is enough time.
        steps: number of steps.
        positions: positions of the rows, ``"full"`` or ``"pose"``.
        most: the number of tokens that the fit may read.
    """
    specs = smaller_specs(spec, SCALABLE)
    return next((one for one in specs if tokens_to_fit(one, steps, positions) <= most), specs[-1])
