"""The steps of a fit, and its checks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rope_patch.fitting.candidates import Candidate, Evaluator, best
from rope_patch.fitting.draw_rows import DrawnRows
from rope_patch.fitting.row_positions import consecutive_types
from rope_patch.methods import Method
from rope_patch.modeling.scoring import Reader
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.modeling.trainable_table import TrainableTable
from rope_patch.modeling.training_loss import token_loss
from rope_patch.patching.install import apply
from rope_patch.patching.locate import device_of, locate
from rope_patch.runtime import progress

LEARNING_RATE = 0.04
"""Learning rate of the logarithms of the frequencies, which text and answers share."""
WARMUP_SHARE = 1 / 8
"""Share of the steps over which the learning rate rises, because Adam's first steps follow the sign of a noisy
gradient. It falls to 0 after them."""
BETAS = (0.9, 0.95)
"""Adam's betas. With the usual 0.999 the first large gradients of answers would keep the steps small for long."""
SHRINK_FACTOR, ODDS_FACTOR = 0.5, 4.0
"""Factors after a check at which the table is worse than its start: the first multiplies the parameters, and the second
the odds of the weight of answers (or of text, if only text is predicted worse)."""
AVERAGES = ("average", "halfway", "quarter", "eighth")
"""Names of the average over the second half and of points between it and the start. They are evaluated in this order,
until one is good enough."""


def evaluation_steps(steps: int) -> list[int]:
    """Return the steps after which a table is evaluated: halfway, and at the end.

    >>> evaluation_steps(40), evaluation_steps(1), evaluation_steps(0)
    ([20, 40], [1], [])
    """
    return sorted({round(steps / 2), steps} - {0})


class FitRun:
    """A fit from one start, which is in place on the model.

    The parameters are the sum of one part for text and one for answers. Each part has moments of Adam of its own, so
    that the heavy tail of the answers' gradients does not dominate.

    Args:
        method: the method whose table is the start.
        rows: the rows of every step.
        evaluator: the evaluator of tables, which holds the model.
        retrieval: share of the learning rate for answers; text has the rest.

    Attributes:
        losses: loss of the text in each step so far [nats/token].
        stopped: the reason why the fit ended early; "" if it did not.
    """

    def __init__(self, method: Method, rows: DrawnRows, evaluator: Evaluator, retrieval: float) -> None:
        self.model, self.method, self.rows, self.evaluator = evaluator.model, method, rows, evaluator
        self.weight = retrieval
        self.site = locate(self.model)
        module: Any = self.site.module
        kinds = [kind for kind in module.tables if kind in self.site.record.layer_types]  # type: ignore[union-attr]
        self.table = TrainableTable(module, kinds).to(device_of(self.model))
        if rows.skipping:
            self.table.consecutive = consecutive_types(self.model, rows.target)
        self.parts = [torch.zeros_like(self._current(), requires_grad=True) for _ in range(rows.goals)]
        self.adam = torch.optim.Adam([{"params": [part]} for part in self.parts], betas=BETAS)
        self.losses: list[float] = []
        self.stopped = ""

    def __call__(self, steps: int) -> tuple[Candidate, ...]:
        """Fit for some steps, and return the start and the candidates that were fitted from it."""
        candidates = [self.evaluator("start", self.method)]
        # `total` is the sum of the parameters after each step from `since` on, of which the average is made.
        total, low, since = torch.zeros_like(self._current()), 0, (steps + 1) // 2
        for stop in evaluation_steps(steps):
            after = self._steps(range(low, stop), steps, since, total)
            if self.stopped:
                break
            low, total = stop, after
            candidates.append(self._evaluate(f"step {stop}"))
            # Steps before the table was moved back do not belong to the average.
            if stop < steps and self._steer(candidates[0], candidates[-1]):
                total, since = torch.zeros_like(total), max(since, stop)
        for share, name in enumerate(() if self.stopped or steps - since <= 1 else AVERAGES):
            self._put(total / (steps - since) * 0.5**share)
            candidates.append(self._evaluate(name))
            if best(candidates) is not candidates[0]:
                break
        return tuple(candidates)

    def _steps(self, numbers: range, steps: int, since: int, total: Tensor) -> Tensor:
        """Do some steps, and return the sum of the parameters after each of them; stop if the fit diverges.

        Args:
            numbers: numbers of the steps that are done.
            steps: number of steps of the whole fit.
            since: number of the step from which on parameters are added up.
            total: the sum so far, to which they are added.
        """
        with self._fitting():
            for step in numbers:
                rate = LEARNING_RATE * min((step + 1) / math.ceil(WARMUP_SHARE * steps), 1 - step / steps)
                for group, share in zip(self.adam.param_groups, (1 - self.weight, self.weight), strict=False):
                    group["lr"] = rate * share
                loss = self._step(step)
                if loss is None:
                    self.stopped = f"diverged at step {step + 1}"
                    break
                self.losses.append(loss)
                if step >= since:
                    total = total + self._current()
        return total

    def _steer(self, start: Candidate, now: Candidate) -> bool:
        """Move a table that is worse than its start halfway back, and give more weight to what got worse.

        Args:
            start: the candidate of the start.
            now: the candidate of the present table.

        Returns:
            Whether the table was moved.
        """
        if not self.weight or now.never_worse(start):  # without a weight of answers only text is fitted
            return False
        # If retrieval is no worse, it is text that got worse.
        odds = 1 / ODDS_FACTOR if now.finds_no_less(start) else ODDS_FACTOR
        self.weight *= odds / (1 + (odds - 1) * self.weight)
        for part in self.parts:
            part.data.mul_(SHRINK_FACTOR)
        self._put()
        return True

    def _step(self, step: int) -> float | None:
        """Do one step, and return its mean loss of text [nats/token]; None if numbers are no longer finite."""
        reader, parameters = Reader(self.model), list(self.table.parameters())
        text = 0.0
        for goal, part in enumerate(self.parts):
            for ids, labels, weights, positions in self.rows(step, goal):
                inputs = {"input_ids": ids}
                if positions is not None:  # without a mask transformers would take a skip for the start of a new text
                    inputs |= {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
                inputs = {name: tensor.to(reader.device) for name, tensor in inputs.items()}
                hidden = reader.decoder(**inputs, use_cache=False).last_hidden_state
                loss, _ = token_loss(reader, hidden, labels.to(reader.device), weights.to(reader.device))
                torch.autograd.backward(loss)
                text += 0.0 if goal else float(loss.detach())
                with progress.stage("fitting"):
                    progress.advance(ids.numel())
            # The table is the sum of the parts, so the gradient of a part is that of the table.
            part.grad = torch.cat([p.grad for p in parameters if p.grad is not None])
            self.table.zero_grad()
        self.adam.step()
        self._put()
        return text if math.isfinite(text) and self.table.stateable() else None

    def _current(self) -> Tensor:
        return parameters_to_vector(self.table.parameters()).detach()

    def _put(self, values: Tensor | None = None) -> None:
        """Set the parameters of the table, by default to the sum of the parts for text and answers."""
        values = torch.stack(self.parts).sum(0).detach() if values is None else values
        vector_to_parameters(values, self.table.parameters())

    @contextlib.contextmanager
    def _fitting(self) -> Iterator[None]:
        """Put the trainable table into the model and freeze the weights, and undo both at the end."""
        requires_grad = [(p, p.requires_grad) for p in self.model.parameters()]
        with in_eval_mode(self.model):
            try:
                self.model.requires_grad_(False)
                self.site.put(self.table)
                yield
            finally:
                self.site.put(self.site.module)
                for p, required in requires_grad:
                    p.requires_grad_(required)

    def _evaluate(self, name: str) -> Candidate:
        """Evaluate the table as it is now, applied as a patch, and return it as a candidate."""
        # As a patch, so that the table that is evaluated has the rounding of the one that is saved.
        method = self.table.method()
        apply(self.model, method, replace=True, target_length=self.rows.target)
        return self.evaluator(name, method)
