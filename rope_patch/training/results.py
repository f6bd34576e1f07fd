"""The files that a finished run leaves beside its adapter: results.json, evaluation.json and the model card."""

from __future__ import annotations

import json
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from rope_patch import __version__
from rope_patch.evaluation.suite import EvalResult, unpatched_missing
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.writing import to_dict
from rope_patch.patching.locate import locate
from rope_patch.patching.verify import trained_length
from rope_patch.runtime.folders import write_atomically
from rope_patch.training.card import card
from rope_patch.training.evaluating import Evaluations, best_step, changes, metrics
from rope_patch.training.models import resolve
from rope_patch.training.runs import RESULTS
from rope_patch.training.sources import PackedRows, reading_processes
from rope_patch.training.trainer import LongTrainer


def write_results(
    out: Path,
    options: RecipeOptions,
    command: str,
    trainer: LongTrainer,
    rows: PackedRows,
    evaluations: Evaluations,
    final: EvalResult,
    seconds: float | None,
) -> dict[str, Any]:
    """Write results, evaluations and card of a finished run; return the contents of ``results.json``.

    Args:
        out: the output folder.
        options: the options of the run.
        command: the command that started it.
        trainer: the trainer, after training.
        rows: the rows that were trained on.
        evaluations: the evaluations of the run.
        final: the evaluation of the model that was saved.
        seconds: the time of the whole run, evaluations included; None for a resumed one [s].
    """
    before = evaluations.before()
    compared = [] if before is None else changes(before, final)
    for change in compared:
        if change["verdict"] == "worse":
            warnings.warn(f"{change['sentence']}; the card says so", stacklevel=2)
    results = {
        **_description(options, command, trainer, rows),
        "seconds": None if seconds is None else round(seconds, 1),
        "before": None if before is None else metrics(before),
        "curve": _curve(trainer.state.log_history),
        "after": metrics(final),
        "changes": compared,
        "notes": _notes(trainer.model, before, final),
    }
    scores = {"before": None if before is None else before.to_dict(), "after": final.to_dict()}
    write_atomically(out / "evaluation.json", json.dumps(scores, allow_nan=False))
    write_atomically(out / "README.md", card(options, results, final))
    write_atomically(out / RESULTS, json.dumps(results, indent=1, allow_nan=False) + "\n")  # last: it means finished
    return results


def _curve(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the metrics of every evaluation during training, in order, as the Trainer logged them."""
    return [
        {name.removeprefix("eval_"): value for name, value in entry.items() if name != "epoch"}
        for entry in log
        if "eval_score" in entry
    ]


def _notes(model: Any, before: EvalResult | None, after: EvalResult) -> list[str]:
    """Return whether the task may be too hard for the unpatched model within its trained length."""
    record = locate(model).record
    if before is not None and (record is None or str(record.to_method()) == "default"):
        return before.warnings(trained_length(model))
    measured = [after] if before is None else [before, after]
    return unpatched_missing(measured, trained_length(model), "rope-patch compare MODEL --methods default measures it")


def _description(options: RecipeOptions, command: str, trainer: LongTrainer, rows: PackedRows) -> dict[str, Any]:
    """Return what was run, on what, and its losses."""
    model: Any = trainer.model
    state, record, source = trainer.state, locate(model).record, resolve(options.model.name)
    processes = reading_processes()
    items = state.global_step * options.train.batch * options.train.accumulate * processes
    return {
        "command": command or " ".join(sys.argv),
        "options": to_dict(options),
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
            "processes": processes,
        },
    }
