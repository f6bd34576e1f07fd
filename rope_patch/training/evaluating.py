"""Evaluations of a run: measured with a progress bar, kept on disk, and compared with the one before training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rope_patch.evaluation.intervals import independent_count, paired_means, paired_shares
from rope_patch.evaluation.journal import Journal, finite
from rope_patch.evaluation.prompts import TASKS
from rope_patch.processes import from_first, processes
from rope_patch.training.judging import Judge, Judgement
from rope_patch.training.recipe import RecipeOptions


def evaluation_tokens(options: RecipeOptions) -> tuple[int, int]:
    """Return the tokens of the windows and of the prompts of one evaluation, every prompt counted whole."""
    asked = options.evaluation
    return asked.windows * max(options.evaluation_lengths), prompts_per_length(options) * sum(
        options.evaluation_lengths
    )


def prompts_per_length(options: RecipeOptions) -> int:
    """Return the prompts of one evaluation at each length; some tasks ask for all needles in one prompt."""
    asked = options.evaluation
    return asked.samples * (1 if TASKS[asked.task].joined else len(asked.depths))


class RecordedEvaluations:
    """Evaluates a model, and keeps every result on disk, so that a resumed run has the first one.

    Args:
        evaluator: measures a model.
        path: of the file of results.
        tokens: of one evaluation, for the progress bar.
    """

    def __init__(self, evaluator: Judge, path: Path, tokens: int) -> None:
        self.evaluator, self.file, self.tokens = evaluator, Journal(path), tokens
        self.by_step: dict[int, Judgement] = {}

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        """Evaluate a model, and return the numbers that the Trainer logs."""
        result = self.by_step[step] = self._measure(model)

        def record() -> dict[str, float]:
            self.file[str(step)] = {"metrics": result.metrics(), "evaluation": to_json(result)}
            return result.metrics()

        return from_first(record)  # all processes choose the best checkpoint by the same numbers

    def _measure(self, model: Any) -> Judgement:
        with tqdm(
            desc="evaluating", total=self.tokens, unit="tok", unit_scale=True, leave=False, disable=processes()[0] > 0
        ) as bar:
            return self.evaluator(model, bar.update)

    @property
    def before(self) -> dict[str, Any]:
        """The result before training; empty where the model was not evaluated then."""
        result: dict[str, Any] = self.file.get("0", {})
        return result

    def curve(self, last: int) -> list[dict[str, float]]:
        """Return the metrics of every evaluation up to a step, in order."""
        steps = sorted(step for step in map(int, self.file) if step <= last)
        return [{"step": step, **self.file[str(step)]["metrics"]} for step in steps]

    def final(self, model: Any, state: Any) -> Judgement:
        """Return the result of the model that is saved: the best checkpoint has been evaluated already."""
        step = best_step(state)
        step = state.global_step if step is None else step
        return self.by_step[step] if step in self.by_step else self._measure(model)


def best_step(state: Any) -> int | None:
    """Return the step of the checkpoint that Trainer loads at the end; None where it loads none."""
    best = state.best_model_checkpoint
    return None if best is None else int(Path(best).name.rpartition("-")[2])


def to_json(result: Judgement) -> dict[str, Any]:
    """Return an evaluation as JSON: every prompt, every position bucket of every window."""
    return {
        "retrieval": asdict(result.retrieval),
        "perplexity": None if result.perplexity is None else asdict(result.perplexity),
    }


@dataclass(frozen=True)
class Change:
    """How one measure changed over a run, paired by prompt or by window of text.

    Attributes:
        measure: ``"retrieval"`` (share of prompts answered) or ``"perplexity"`` (mean loss of text [nats/token]).
        before: its value before training.
        after: its value after training.
        low: lower end of the 95 % interval of ``after - before``.
        high: upper end.
        count: prompts or windows.
    """

    measure: str
    before: float
    after: float
    low: float
    high: float
    count: int

    @property
    def verdict(self) -> str:
        """``"better"`` or ``"worse"`` where the interval excludes 0, else ``"no significant difference"``."""
        higher_is_better = self.measure == "retrieval"
        if self.low > 0 or self.high < 0:
            return "better" if (self.low > 0) == higher_is_better else "worse"
        return "no significant difference"

    def __str__(self) -> str:
        """One sentence.

        >>> print(Change("retrieval", 0.9, 0.5, -0.55, -0.24, 40))
        retrieval is significantly lower than before training (-0.4 over 40 prompts, 95 % interval -0.55 to -0.24)
        >>> print(Change("perplexity", 2.5, 2.55, -math.inf, math.inf, 1))
        no significant difference in the loss of text from before training (one window gives no interval)
        """
        name = "retrieval" if self.measure == "retrieval" else "the loss of text"
        if self.count == 1 and not math.isfinite(self.low):
            return f"no significant difference in {name} from before training (one window gives no interval)"
        unit = "prompts" if self.measure == "retrieval" else "windows, in nats/token"
        interval = f"95 % interval {self.low:+.2g} to {self.high:+.2g}"
        found = f"{self.after - self.before:+.2g} over {self.count} {unit}, {interval}"
        if self.verdict == "no significant difference":
            return f"no significant difference in {name} from before training ({found})"
        direction = "higher" if self.low > 0 else "lower"
        return f"{name} is significantly {direction} than before training ({found})"

    def to_dict(self) -> dict[str, Any]:
        """Return the change for JSON, with its sentence; None for a number that is not finite."""
        values: dict[str, Any] = finite({**asdict(self), "verdict": self.verdict, "sentence": str(self)})
        return values


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[Change]:
    """Compare two evaluations of the same prompts and windows, each as :func:`to_json` gives it.

    Answers to one haystack may depend on each other, so they count as :func:`independent_count` says.

    Args:
        before: the evaluation before training.
        after: the evaluation after training.

    Returns:
        The change of retrieval over all prompts, and of the loss of text where there are windows.
    """
    theirs, ours = (_haystacks(result["retrieval"]) for result in (before, after))
    a, b = ([correct for haystack in side for correct in haystack] for side in (ours, theirs))
    if TASKS[after["retrieval"]["task"]].joined:
        count = float(len(ours))
    else:
        pairs = zip(ours, theirs, strict=True)
        count = independent_count([[float(p) - float(q) for p, q in zip(x, y, strict=True)] for x, y in pairs])
    found = [Change("retrieval", sum(b) / len(b), sum(a) / len(a), *paired_shares(a, b, count=count), len(a))]
    if before["perplexity"] and after["perplexity"]:
        b_nll, a_nll = (
            [window["total_nll"] / window["total_tokens"] for window in result["perplexity"]["documents"]]
            for result in (before, after)
        )
        earlier, later = (math.fsum(values) / len(values) for values in (b_nll, a_nll))
        found.append(Change("perplexity", earlier, later, *paired_means(a_nll, b_nll), len(a_nll)))
    return found


def _haystacks(retrieval: dict[str, Any]) -> Sequence[Sequence[bool]]:
    """Which prompts were answered: by haystack (length and sample), the depths of each."""
    lengths = sorted({cell["length"] for cell in retrieval["cells"]})
    return [
        [sample["correct"] for sample in haystack]
        for length in lengths
        for haystack in zip(*(cell["samples"] for cell in retrieval["cells"] if cell["length"] == length), strict=True)
    ]
