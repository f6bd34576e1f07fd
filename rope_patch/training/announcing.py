"""What a run says of its length: the tokens before it begins, the time once its first steps are measured."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback

from rope_patch.modeling.budget import duration_text
from rope_patch.training.estimate import evaluations, tokens_read
from rope_patch.training.recipe import RecipeOptions
from rope_patch.training.sources import plan_stages

MEASURED = 5.0
"""How long steps are measured before their time is said, about, the first step left out [s]."""


class Announcement(TrainerCallback):
    """Prints how many tokens a run reads, and after its first steps how long those that are left take.

    The first step is not measured, as it compiles kernels and allocates memory. The time of evaluations is that of the
    latest one, and is not said before there was one.

    Args:
        options: of the run.
        processes: that read rows of their own.
    """

    def __init__(self, options: RecipeOptions, processes: int) -> None:
        self.options = options
        self.tokens = sum(items * rows * length for length, items, rows in plan_stages(options, processes))
        self._last = self._measured_from = self._evaluating = 0.0
        self._first_step = 0
        self._said = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how much is read."""
        self._last, self._first_step = time.perf_counter(), state.global_step
        left = (state.max_steps - state.global_step) / max(1, state.max_steps)
        count, once = evaluations(self.options), tokens_read(self.options)
        text = f"trains on {round(left * self.tokens):,} tokens in {state.max_steps - state.global_step} steps"
        if once:
            times = "once" if count == 1 else f"{'up to ' * bool(self.options.evaluation.patience)}{count} times"
            text += f", and evaluates the model {times} on about {once:,} tokens"
        _say(state, f"{text}; the time follows once the first steps are measured")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure an evaluation, which is no part of a step."""
        self._evaluating = time.perf_counter() - self._last
        self._measured_from += self._evaluating

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say how long the steps that are left take, once it is known."""
        done, now = state.global_step - self._first_step, time.perf_counter()
        self._last = now
        if done == 1:
            self._measured_from = now
        if self._said or done < 2 or now - self._measured_from < MEASURED:
            return
        self._said = True
        left = state.max_steps - state.global_step
        seconds = left * (now - self._measured_from) / (done - 1)
        every = self.options.evaluation.every
        more = max(1, state.max_steps // every - state.global_step // every) if every else 1
        text = f"the {left} steps that are left take about {duration_text(seconds)}"
        if self._evaluating:
            text += f", and {more} evaluation{'s' * (more > 1)} {duration_text(more * self._evaluating)}"
        _say(state, text)


def _say(state: Any, text: str) -> None:
    """Print a line above the progress bar, in the first process."""
    if state.is_world_process_zero:
        tqdm.write(text, file=sys.stderr)
