"""One run of the recipe, from options to a verified adapter with its scores."""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from rope_patch import checkpoints
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.modeling.scoring import fingerprint
from rope_patch.options.finetune import RecipeOptions
from rope_patch.runtime.parallel import from_first
from rope_patch.training.estimate import GIB, memory_advice
from rope_patch.training.evaluating import Evaluations, suite_of
from rope_patch.training.models import load_model, prepare, resolve
from rope_patch.training.results import write_results
from rope_patch.training.runs import RunFolder, inspect_folder, one_command_in
from rope_patch.training.setup import arguments, build_trainer, check
from rope_patch.training.sources import make_rows, reading_processes
from rope_patch.training.trainer import LongTrainer

BEFORE = "before.json"
"""The evaluation before training, in the ``work`` folder of a run."""


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        folder: the adapter (or model), loaded by :func:`rope_patch.load`.
        results: the contents of ``results.json``: options, command, scores before and after, the curve. Empty in all
            processes but the first.
        finished_before: whether an earlier command finished this run, and nothing was trained now.
    """

    folder: Path
    results: dict[str, Any]
    finished_before: bool = False


def finetune(options: RecipeOptions, *, command: str = "", restart: bool = False) -> Result:
    """Train as the options say, and leave an adapter that cannot be loaded onto the wrong rotary table unnoticed.

    ``options.output`` gets the adapter (or model) with its patch record, the tokenizer, ``results.json``,
    ``evaluation.json`` (every prompt and window that was evaluated) and a model card. Its subfolder ``work`` gets rows,
    checkpoints and TensorBoard logs. A run that was interrupted is resumed from its last complete checkpoint; the
    results of a finished one are returned as they are.

    Args:
        options: the options of the run.
        command: the command that started it, for the card.
        restart: whether to delete what an earlier run left in the output folder.

    Raises:
        ValueError: options that do not fit the model or the data, or an output folder that holds another run.
        PatchError: the patch does not fit the model.
        BlockingIOError: another command works in the output folder.
        torch.OutOfMemoryError: with the predicted memory of a step, and what to change.
    """
    processes, source = reading_processes(), resolve(options.model.name)
    check(options)
    for warning in options.warnings():
        warnings.warn(warning, stacklevel=2)
    args = arguments(options, options.output.expanduser() / "work")

    def inspect(identity: str | None = None) -> RunFolder:
        return inspect_folder(options, processes, source=source, fingerprint=identity, restart=restart)

    PartialState()  # connects the processes
    run = from_first(inspect)
    if run.results is not None:
        return _finished(run)
    model, tokenizer = load_model(options.model, options.train.precision)
    identity = from_first(lambda: fingerprint(model))  # under FSDP the other processes may have no weights yet
    model = prepare(model, options)
    suite = suite_of(options, tokenizer)
    with contextlib.ExitStack() as stack:

        def begin() -> RunFolder:
            """Take the folder, which another command may have changed while the model was loaded."""
            stack.enter_context(one_command_in(run.work))
            mine = inspect(identity)
            if mine.results is None:
                mine.begin()
            return mine

        run = from_first(begin)
        if run.results is not None:
            return _finished(run)
        try:
            return _train(options, run, args, model, tokenizer, suite, command)
        except torch.OutOfMemoryError as error:
            cuda = args.device.type == "cuda"
            memory = torch.cuda.get_device_properties(args.device).total_memory / GIB if cuda else None
            raise torch.OutOfMemoryError(f"{error}\n{memory_advice(options, memory)}") from error


def _finished(run: RunFolder) -> Result:
    """Return the results of a finished run, in the first process alone."""
    return Result(run.out, run.results or {} if PartialState().is_main_process else {}, finished_before=True)


def _train(
    options: RecipeOptions,
    run: RunFolder,
    args: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    suite: EvalSuite,
    command: str,
) -> Result:
    """Train a prepared model, evaluate it and write the output folder."""
    processes, is_first, began = reading_processes(), PartialState().is_main_process, time.perf_counter()
    from_first(lambda: bool(make_rows(options, tokenizer, run.work, processes=processes)))  # packs them for all
    rows = make_rows(options, tokenizer, run.work, processes=processes)
    evaluations = Evaluations(suite, run.work / BEFORE)
    args.eval_on_start = options.evaluation.before and run.checkpoint is None
    trainer = build_trainer(model, args, rows, options, tokenizer, evaluations)
    if is_first:
        resumed = "" if run.checkpoint is None else f", from {run.checkpoint.name} on"
        text = f"trains on {rows.tokens(len(rows)):,} tokens in {options.train.steps} steps{resumed}"
        print(f"{text}; each evaluation reads {suite.tokens:,} tokens", file=sys.stderr)
    trainer.train(resume_from_checkpoint=None if run.checkpoint is None else str(run.checkpoint))
    trained: Any = trainer.model
    state = _gathered_weights(trainer)
    if is_first:  # saved before the last evaluation: if that fails, the adapter is there
        weights: dict[str, Any] = {} if state is None else {"state_dict": state}
        checkpoints.save(trained, run.out, tokenizer=tokenizer, **weights)
    final = evaluations.final(trained, trainer.state)
    trainer.accelerator.wait_for_everyone()
    if not is_first:
        return Result(run.out, {})
    seconds = None if run.checkpoint is not None else time.perf_counter() - began  # an earlier command's are unknown
    return Result(run.out, write_results(run.out, options, command, trainer, rows, evaluations, final, seconds))


def _gathered_weights(trainer: LongTrainer) -> dict[str, Any] | None:
    """Return the weights gathered from all devices, where each holds a share of them; else None."""
    if not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        return None
    state: dict[str, Any] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return state
