"""One run of the recipe, from options to a verified adapter with its scores."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainingArguments

from rope_patch import checkpoints
from rope_patch.files import write_atomically
from rope_patch.modeling.scoring import fingerprint
from rope_patch.processes import from_first
from rope_patch.training.announcing import Announcement
from rope_patch.training.evaluating import RecordedEvaluations
from rope_patch.training.models import load_model, prepare, resolve
from rope_patch.training.recipe import RecipeOptions
from rope_patch.training.results import RunContext, write_results
from rope_patch.training.runs import EVALUATIONS, RunFolder, check_base, hold_folder, inspect_folder, write_claim
from rope_patch.training.scores import RecipeEvaluator
from rope_patch.training.setup import arguments, build_trainer, check_device
from rope_patch.training.sources import PackedRows, make_rows, reading_processes
from rope_patch.training.tables import TableTraining, check_table
from rope_patch.training.trainer import LongTrainer


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        folder: the adapter (or model), loaded by :func:`rope_patch.load`.
        results: the contents of ``results.json``: options, command, scores before and after, the curve. Empty in all
            processes but the first.
        finished_before: an earlier command finished this run, and nothing was trained now.
    """

    folder: Path
    results: dict[str, Any]
    finished_before: bool = False


def finetune(options: RecipeOptions, *, command: str = "", restart: bool = False) -> Result:
    """Train as the options say, and leave an adapter that cannot be loaded onto the wrong rotary table unnoticed.

    ``options.output`` gets the adapter (or model) with its patch record, the tokenizer, ``results.json``,
    ``evaluation.json`` (every prompt and window that was evaluated) and a model card. Its subfolder ``work`` gets rows,
    checkpoints and TensorBoard logs. A run that was interrupted is resumed from its last whole checkpoint; the results
    of a finished one are returned as they are.

    Args:
        options: of the run.
        command: that started it, for the card.
        restart: delete what an earlier run left in the output folder.

    Raises:
        ValueError: options that do not fit the model or the data, or an output folder that holds another run.
        PatchError: the patch does not fit the model.
        torch.OutOfMemoryError: with advice from the plan.
    """
    processes = reading_processes()
    is_first = int(os.environ.get("RANK", 0)) == 0
    check_device(options)
    for warning in options.warnings():
        warnings.warn(warning, stacklevel=2)
    source = resolve(options.model.name)
    args = arguments(options, Path(options.output).expanduser() / "work")

    def inspect() -> RunFolder:
        return inspect_folder(options, processes, source=source, restart=restart)

    PartialState()  # connects the processes
    run = from_first(inspect)
    if run.results is not None:
        return Result(run.out, run.results if is_first else {}, finished_before=True)
    model, tokenizer = load_model(options.model, options.train.precision)
    identity = from_first(lambda: fingerprint(model))  # under FSDP the other processes may have no weights yet
    if options.patch.trainable:
        check_table(options)
    model = prepare(model, options)
    if options.patch.trainable:
        TableTraining(model, options.patch.learning_rate)  # refuses what cannot be trained before anything is written
    check_base(run, model, identity)
    evaluator = RecipeEvaluator(options.evaluation, options.evaluation_lengths, tokenizer)
    with contextlib.ExitStack() as stack:
        from_first(lambda: stack.enter_context(hold_folder(run, identity, inspect)))
        context = RunContext(options, run, identity, command, processes, is_first)
        return _train(context, args, model, tokenizer, evaluator)


def _train(
    context: RunContext, args: TrainingArguments, model: Any, tokenizer: Any, evaluator: RecipeEvaluator
) -> Result:
    """Train a prepared model, evaluate it and write the output folder."""
    options, run = context.options, context.run
    rows = _packed_rows(context, tokenizer)
    evaluations = RecordedEvaluations(evaluator, run.work / EVALUATIONS)
    args.eval_on_start = options.evaluation.before and run.checkpoint is None
    trainer = build_trainer(model, args, rows, options, tokenizer, evaluations, run.checkpoint)
    clock = Clock(run.work / "seconds.json", run.checkpoint is not None)
    trainer.add_callback(clock)
    trainer.add_callback(Announcement(options, context.processes))
    trainer.train(resume_from_checkpoint=None if run.checkpoint is None else str(run.checkpoint))
    trained: Any = trainer.model
    state = _gathered_weights(trainer)
    if context.is_first:  # saved before the last evaluation: if that fails, the adapter is there
        weights: dict[str, Any] = {} if state is None else {"state_dict": state}
        checkpoints.save(trained, run.out, tokenizer=tokenizer, **weights)
    final = evaluations.final(trained, trainer.state)
    trainer.accelerator.wait_for_everyone()
    if not context.is_first:
        return Result(run.out, {})
    return Result(run.out, write_results(context, trainer, rows, evaluations, final, clock.seconds))


def _packed_rows(context: RunContext, tokenizer: Any) -> PackedRows:
    """Return the rows of a run, which the first process packs for all."""
    options, run, processes = context.options, context.run, context.processes

    def pack() -> str:
        rows = make_rows(options, tokenizer, run.work, processes=processes, rows_file=run.rows_file)
        if run.checkpoint is None:
            write_claim(run, context.model_fingerprint, rows_file=rows.name)
        return rows.name

    return make_rows(options, tokenizer, run.work, processes=processes, rows_file=from_first(pack))


class Clock(TrainerCallback):
    """Counts the seconds of a run over all commands that worked on it, without what was lost when one was killed.

    Args:
        path: of the file that keeps the seconds.
        resumed: the run is resumed from a checkpoint.
    """

    def __init__(self, path: Path, resumed: bool) -> None:
        self.path = path
        earlier = json.loads(path.read_text(encoding="utf-8")) if resumed and path.is_file() else 0.0
        self.start = time.time() - earlier

    @property
    def seconds(self) -> float:
        """Seconds so far, evaluations included."""
        return time.time() - self.start

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the seconds with each checkpoint."""
        if state.is_world_process_zero:
            write_atomically(self.path, json.dumps(round(self.seconds, 1)))


def _gathered_weights(trainer: LongTrainer) -> dict[str, Any] | None:
    """The weights gathered from all devices, where each holds a share of them; else None."""
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        return None
    state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return state
