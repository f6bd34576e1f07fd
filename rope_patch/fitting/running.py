"""The fit from one start: its steps, its checks, and the state from which it is resumed."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.result_cache import key
from rope_patch.fitting.candidates import Candidate, Evaluator, best
from rope_patch.fitting.positions import consecutive_types
from rope_patch.fitting.rows import Rows
from rope_patch.methods import Method
from rope_patch.modeling.loss import token_loss
from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.scoring import Reader
from rope_patch.modeling.trainable_table import Constraint, TrainableTable
from rope_patch.patching.apply import apply
from rope_patch.patching.locate import device_of, find_rotary
from rope_patch.processes import from_first, processes

BETAS = (0.9, 0.95)
"""Adam's betas. With the usual 0.999 the first large gradients of answers would keep the steps small for long."""
MOMENTS = ("exp_avg", "exp_avg_sq")
BACK, ODDS = 0.5, 4.0
"""After a check that finds a table worse than its start: the parameters are multiplied by ``BACK``, and the odds of the
weight of answers (or of text, if only text is predicted worse) by ``ODDS``."""
WARM = 1 / 8
"""Share of the steps over which the learning rate rises: Adam's first steps follow the sign of a noisy gradient."""
WAYS = ("halfway", "quarter", "eighth")
"""Points between the start and the average, evaluated in turn until one is good enough."""
WORSE, WATCHED = 1.0, 5
"""A fit has diverged when the mean loss of text over the last ``WATCHED`` steps is ``WORSE`` nats above the first; of
twice as many steps where rows are of several texts, as some texts are harder than others."""


class FitRun:
    """The fit from one start."""

    def __init__(
        self,
        model: nn.Module,
        method: Method,
        rows: Rows,
        evaluator: Evaluator,
        constraint: Constraint,
        options: Mapping[str, Any],
        result_cache: MutableMapping[str, Any] | None,
        about: Mapping[str, Any],
        on_progress: Callable[[str, int], None],
    ) -> None:
        self.model, self.method, self.rows, self.evaluator = model, method, rows, evaluator
        self.options, self.result_cache, self.about, self.on_progress = options, result_cache, about, on_progress
        self.site = find_rotary(model)
        module: Any = self.site.module
        kinds = [kind for kind in module.tables if kind in self.site.record.layer_types]  # type: ignore[union-attr]
        self.table = TrainableTable(module, kinds, constraint).to(device_of(model))
        if rows.objective.positions == "pose":
            self.table.consecutive = consecutive_types(model, rows.target)
        self.parameters = [p for p in self.table.parameters() if p.requires_grad]
        self.parts = [[torch.zeros_like(p, requires_grad=True) for p in self.parameters] for _ in range(rows.goals)]
        self.adam = torch.optim.Adam([{"params": part} for part in self.parts], betas=BETAS)
        self.label, self.weight = str(method), rows.objective.retrieval
        self.losses: list[float] = []
        self.watched = WATCHED * min(2, len(rows.texts))
        self.stopped = ""

    def __call__(
        self, steps: int, learning_rate: float, checks: int, patience: int, checkpointing: bool
    ) -> tuple[Candidate, ...]:
        """Return the start and the candidates that were found from it."""
        table, parameters = self.table, self.parameters
        candidates = [self.evaluator("start", self.method, self.result_cache)]
        sums = [torch.zeros_like(p) for p in parameters]  # over the second half, for the average
        stops = sorted({round(steps * (i + 1) / checks) for i in range(checks)} - {0})
        least, waited, low, since = self.evaluator.loss(candidates[0]), 0, 0, (steps + 1) // 2
        for stop in stops:
            before = [total.clone() for total in sums]
            if not self._restore(stop, sums):
                with self._fitting(checkpointing):
                    for step in range(low, stop):
                        rate = learning_rate * min((step + 1) / math.ceil(WARM * steps), 1 - step / steps)
                        for group, share in zip(self.adam.param_groups, (1 - self.weight, self.weight), strict=False):
                            group["lr"] = rate * share
                        self.losses.append(self._step(step))
                        if self._diverged():
                            break
                        if step >= since:
                            for total, p in zip(sums, parameters, strict=True):
                                total += p.detach()
                if not self._diverged():
                    self._keep(stop, sums)
            if self._diverged():
                sums = before  # of the steps before ``low`` alone, as they are counted below
                self.stopped = f"diverged at step {len(self.losses)} (loss {self.losses[-1]:.3g})"
                break
            low = stop
            candidates.append(self._evaluate(f"step {stop}", table.method()))
            if stop < steps and self._steer(candidates[0], candidates[-1]):
                sums, since = [torch.zeros_like(p) for p in parameters], max(since, stop)
            loss = self.evaluator.loss(candidates[-1])
            least, waited = (loss, 0) if loss < least else (least, waited + 1)
            if waited >= patience and stop < steps:
                self.stopped = f"no better after step {stop}"
                break
        counted = low - since
        if counted > 1:
            for share, name in enumerate(("average", *WAYS)):
                with torch.no_grad():
                    for total, p in zip(sums, parameters, strict=True):
                        p.copy_(total / counted * 0.5**share)
                candidates.append(self._evaluate(name, table.method()))
                if best(candidates) is not candidates[0]:
                    break
        return tuple(candidates)

    def _steer(self, start: Candidate, now: Candidate) -> bool:
        """Move a table that is worse than its start halfway back, and give more weight to what got worse."""
        if not self.weight or now.never_worse(start):  # without a weight of answers only text is fitted
            return False
        odds = 1 / ODDS if now.finds_no_less(start) else ODDS
        self.weight *= odds / (1 + (odds - 1) * self.weight)
        with torch.no_grad():
            for p in itertools.chain(*self.parts):
                p.mul_(BACK)
        self._put()
        return True

    def _step(self, step: int) -> float:
        """Do one step, and return its mean loss of text [nats/token]."""
        rank, size = processes()
        reader = Reader(self.model)
        totals = torch.zeros(len(self.parts), dtype=torch.float64, device=reader.device)
        for goal, part in enumerate(self.parts):
            for p in self.parameters:
                p.grad = torch.zeros_like(p)
            for ids, labels, weights, positions in self.rows(step, goal, rank, size):
                inputs = {"input_ids": ids}
                if positions is not None:  # without a mask transformers would take a skip for the start of a text
                    inputs |= {"position_ids": positions, "attention_mask": torch.ones_like(ids)}
                inputs = {name: tensor.to(reader.device) for name, tensor in inputs.items()}
                hidden = reader.decoder(**inputs, use_cache=False).last_hidden_state
                loss, _ = token_loss(reader, hidden, labels.to(reader.device), weights.to(reader.device))
                torch.autograd.backward(loss)
                totals[goal] += loss.detach().to(totals)
                self.on_progress(f"{self.label}: fitting", ids.numel())
            for mine, p in zip(part, self.parameters, strict=True):
                mine.grad, p.grad = p.grad, None
        grads = [p.grad for p in itertools.chain(*self.parts) if p.grad is not None]
        if size > 1:
            for tensor in (*grads, totals):
                torch.distributed.all_reduce(tensor)
        if not all(bool(tensor.isfinite().all()) for tensor in (*grads, totals)):
            return math.inf
        self.adam.step()
        self._put()
        if not self.table.stateable():
            return math.inf
        return float(totals[0])

    def _put(self) -> None:
        """Set the table to the sum of the parts of text and answers."""
        with torch.no_grad():
            for p, *parts in zip(self.parameters, *self.parts, strict=True):
                p.copy_(torch.stack(parts).sum(0))

    def _diverged(self) -> bool:
        if self.losses and not math.isfinite(self.losses[-1]):
            return True
        early, late = self.losses[: self.watched], self.losses[-self.watched :]
        return len(self.losses) > self.watched and math.fsum(late) - math.fsum(early) > WORSE * self.watched

    @contextlib.contextmanager
    def _fitting(self, checkpointing: bool) -> Iterator[None]:
        """Put the trainable table in and freeze the weights, and undo both at the end."""
        model: Any = self.model
        requires_grad = [(p, p.requires_grad) for p in model.parameters()]
        with in_eval_mode(model), contextlib.ExitStack() as stack:
            for p, _ in requires_grad:
                p.requires_grad_(False)
            stack.callback(lambda: [p.requires_grad_(required) for p, required in requires_grad])
            if checkpointing:
                name = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
                if not _checkpointed(model):
                    stack.callback(getattr(model, f"{name}_checkpointing_disable"))
                getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": False})
                for module in _checkpointed(model):  # needs training mode; the dropout of attention stays off
                    module.training = True
            self.site.put(self.table)
            stack.callback(self.site.put, self.site.module)
            yield

    def _evaluate(self, name: str, method: Method) -> Candidate:
        apply(self.model, method, replace=True, **self.options)
        try:
            return self.evaluator(name, method, self.result_cache)
        finally:
            apply(self.model, self.method, replace=True, **self.options)

    def _keep(self, step: int, sums: Sequence[Tensor]) -> None:
        if self.result_cache is not None:
            self.result_cache[key(step=step, **self.about)] = {
                "parts": [
                    [p.tolist(), *(self.adam.state[p][name].tolist() for name in MOMENTS)]
                    for p in itertools.chain(*self.parts)
                ],
                "sums": [total.tolist() for total in sums],
                "losses": list(self.losses),
            }

    def _restore(self, step: int, sums: Sequence[Tensor]) -> bool:
        """Resume from the state that was saved at a step, if there is one."""
        saved = from_first(
            lambda: None if self.result_cache is None else self.result_cache.get(key(step=step, **self.about))
        )
        if saved is None:
            return False
        with torch.no_grad():
            for p, (value, *moments) in zip(itertools.chain(*self.parts), saved["parts"], strict=True):
                p.copy_(torch.tensor(value, dtype=p.dtype))
                self.adam.state[p] = {"step": torch.tensor(float(step))} | {
                    name: torch.tensor(moment, dtype=p.dtype, device=p.device)
                    for name, moment in zip(MOMENTS, moments, strict=True)
                }
            for total, summed in zip(sums, saved["sums"], strict=True):
                total.copy_(torch.tensor(summed, dtype=total.dtype))
        self._put()
        self.losses = list(saved["losses"])
        return True


def _checkpointed(model: nn.Module) -> list[nn.Module]:
    """The modules with activation checkpointing, which works while they are in training mode."""
    return [
        module
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False) or getattr(module, "activation_checkpointing", False)
    ]


@contextlib.contextmanager
def plain_weights(model: nn.Module) -> Iterator[None]:
    """Keep bitsandbytes from packing 4-bit weights for AVX-512 instructions, which have no backward pass."""
    modules: list[Any] = [module for module in model.modules() if getattr(module, "support_avx512bf16_for_cpu", False)]
    for module in modules:
        module.support_avx512bf16_for_cpu = False
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            module.state_dict()  # unpacks them in place
    try:
        yield
    finally:
        for module in modules:
            module.support_avx512bf16_for_cpu = True
