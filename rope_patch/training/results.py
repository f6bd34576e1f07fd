"""The files that a finished run leaves beside its adapter: results.json, evaluation.json and the model card."""

from __future__ import annotations

import json
import platform
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from rope_patch import __version__
from rope_patch.evaluation.answers import first_choice, shortest_of_each
from rope_patch.evaluation.suite import EvalResult, unpatched_missing
from rope_patch.files import write_atomically
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.verify import trained_length
from rope_patch.training.card import card
from rope_patch.training.evaluating import RecordedEvaluations, best_step, to_json
from rope_patch.training.models import resolve
from rope_patch.training.recipe import RecipeOptions
from rope_patch.training.runs import RESULTS, RunFolder
from rope_patch.training.scores import RecipeScores
from rope_patch.training.sources import PackedRows
from rope_patch.training.trainer import LongTrainer

SCHEMA = 1


@dataclass(frozen=True)
class RunContext:
    """What does not change during a run.

    Attributes:
        options: of the run.
        run: its folder, as it was when the command began.
        model_fingerprint: of the base model, before its patch.
        command: that started it.
        processes: number of processes that read rows of their own.
        is_first: this is the first process, which writes the files.
    """

    options: RecipeOptions
    run: RunFolder
    model_fingerprint: str
    command: str
    processes: int
    is_first: bool


def write_results(
    context: RunContext,
    trainer: LongTrainer,
    rows: PackedRows,
    evaluations: RecordedEvaluations,
    final: RecipeScores,
    seconds: float,
) -> dict[str, Any]:
    """Write results, evaluations and card of a finished run; return the contents of ``results.json``."""
    out, before, after = context.run.out, evaluations.before, to_json(final)
    changes = evaluations.changes(final)
    worse = [change for change in changes if change.verdict == "worse"]
    for change in worse:
        warnings.warn(f"{change}; the card says so", stacklevel=2)
    results = {
        **_description(context, trainer, rows),
        "worse": bool(worse),
        "changes": [change.to_dict() for change in changes],
        "seconds": round(seconds, 1),
        "before": before.get("metrics"),
        "curve": evaluations.curve(trainer.state.global_step),
        "after": final.metrics(),
        **_of_answers(context, trainer.model, evaluations.scores_before(final), final.scores),
    }
    scores = {"before": before.get("evaluation"), "after": after}
    write_atomically(out / "evaluation.json", json.dumps(scores, allow_nan=False))
    write_atomically(out / "README.md", card(results, final))
    write_atomically(out / RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")
    return results


def _of_answers(context: RunContext, model: Any, before: EvalResult | None, after: EvalResult) -> dict[str, Any]:
    """Shares that are first choice by length, a wrong answer and a right one, and what to know of the unpatched model.

    Args:
        context: of the run.
        model: after training.
        before: the evaluation before training; None where there was none.
        after: the one at the end.
    """
    record = None if model is None else find_rotary(model).record
    trained = 0 if model is None else trained_length(model)
    if before is not None and (record is None or str(record.to_method()) == "default"):
        notes = before.warnings(trained)
    else:
        measured = [after] if before is None else [before, after]
        notes = unpatched_missing(measured, trained, "rope-patch compare MODEL --methods default measures it")
    results = {"before": before, "after": after}
    return {
        "first_choice": {name: scores and first_choice(scores) for name, scores in results.items()},
        "answers": [asdict(answer) for _, answer in shortest_of_each([("", after)])],
        "notes": notes,
    }


def _description(context: RunContext, trainer: LongTrainer, rows: PackedRows) -> dict[str, Any]:
    """What was run, on what, and its losses."""
    options, state, model = context.options, trainer.state, trainer.model
    record = None if model is None else find_rotary(model).record
    source = resolve(options.model.name)
    items = state.global_step * options.train.batch * options.train.accumulate * context.processes
    return {
        "schema": SCHEMA,
        "command": context.command or " ".join(sys.argv),
        "options": options.to_dict(),
        "base": source if options.model.name != source else None,
        "patch": None if record is None else str(record.to_method()),
        "steps": state.global_step,
        "best_step": best_step(state),
        "target_length": (record.target_length if record else None) or options.target_length,
        "tokens": rows.tokens(items),
        "losses": [{"step": e["step"], "loss": e["loss"]} for e in state.log_history if "loss" in e],
        "environment": {
            "rope_patch": __version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
            "processes": context.processes,
        },
    }
