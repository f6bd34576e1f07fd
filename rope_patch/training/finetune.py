"""Runs the fine-tuning recipe once, from its options to a verified adapter with its scores."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from rope_patch import checkpoints
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.options.finetune import RecipeOptions
from rope_patch.patching.install import patched
from rope_patch.patching.verify import verify_model
from rope_patch.runtime.folders import locked_output
from rope_patch.runtime.parallel import from_first_process
from rope_patch.training.evaluate_run import evaluate_model, metrics, suite_of
from rope_patch.training.models import load_for_training, prepare_model
from rope_patch.training.pack_rows import held_out, make_rows, packed_rows, rows_per_step
from rope_patch.training.results import write_results
from rope_patch.training.runs import RunFolder, inspect_folder
from rope_patch.training.trainer import LongTrainer, check_training, training_arguments


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        folder: the folder of the adapter (or model), which :func:`rope_patch.load` loads.
        results: the contents of ``results.json``: options, command, scores before and after training. It is empty in
            all processes but the first.
        finished_before: whether an earlier command finished this run, so that nothing was trained now.
    """

    folder: Path
    results: dict[str, Any]
    finished_before: bool = False


def finetune(options: RecipeOptions, *, command: str = "", restart: bool = False, dry_run: bool = False) -> Result:
    """Train as the options say, and leave an adapter that cannot be loaded onto the wrong rotary table unnoticed.

    ``options.output`` gets the adapter (or model) with its patch record, the tokenizer, ``results.json``,
    ``evaluation.json`` (every prompt and window that was evaluated) and a model card. Its subfolder ``work`` gets rows,
    checkpoints and TensorBoard logs. A run that was interrupted is resumed from its last complete checkpoint; the
    results of a finished one are returned as they are.

    Args:
        options: the options of the run.
        command: the command that started the run; the model card shows it.
        restart: whether to delete what an earlier run left in the output folder.
        dry_run: whether to stop before the first step, without weights and without writing into the output folder: what
            a run refuses before its first step is refused in the same words. Only the rows of that step are packed.

    Raises:
        ValueError: the options do not fit the model or the data, or the output folder holds another run.
        PatchError: the patch does not fit the model.
        BlockingIOError: another command works in the output folder.
        torch.OutOfMemoryError: a step does not fit into memory.
    """
    check_training(options)
    folder = Path()
    if not dry_run:  # Trainer makes its folder at once, and a dry run must not make that of the run
        folder = options.output.expanduser() / "work"
    args = training_arguments(options, folder)
    PartialState()  # connects the processes, which from_first_process needs
    with contextlib.ExitStack() as stack:

        def claim() -> RunFolder:
            stack.enter_context(locked_output(options.output.expanduser()))
            return inspect_folder(options, restart=restart)

        # The first process alone locks the folder: a second process would be refused as another command.
        run = from_first_process(claim)
        if run.results is not None:
            results = {}
            if PartialState().is_main_process:
                results = run.results
            return Result(run.out, results, finished_before=True)
        model, tokenizer = load_for_training(options.model, options.train.precision, weights=not dry_run)
        model = prepare_model(model, options)
        texts = held_out(options, tokenizer, None if run.checkpoint is None else run.work)
        suite = suite_of(options, tokenizer, texts)
        if dry_run and run.checkpoint is None:
            rows: Any = [next(packed_rows(options, tokenizer, texts))]
        else:
            # Deletes an earlier run, so only now that the options are known to fit the model.
            from_first_process(lambda: run.begin(options))
            # The first process packs the rows into a file, which all of them open.
            from_first_process(lambda: bool(make_rows(options, tokenizer, run.work, texts)))
            rows = make_rows(options, tokenizer, run.work, texts)
        trainer = LongTrainer(model, args, rows, evaluator=lambda model: metrics(evaluate_model(suite, model)))
        if PartialState().is_main_process:
            print(_work(options, run, suite, is_patched=verify_model(model).changed), file=sys.stderr)
        if dry_run:
            trainer.create_optimizer_and_scheduler(options.train.steps)
            print("dry run: nothing was trained or written", file=sys.stderr)
            return Result(run.out, {})
        try:
            return _train(options, run, trainer, tokenizer, suite, command)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"a step does not fit: --dry-run predicts its memory and says what to change. {error}"
            ) from error


def _work(options: RecipeOptions, run: RunFolder, suite: EvalSuite, *, is_patched: bool) -> str:
    """Return what a run does, as a sentence: its steps, and how often it is evaluated on what."""
    tokens = rows_per_step(options) * options.data.length
    text = f"trains for {options.train.steps} steps of {tokens:,} tokens"
    if run.checkpoint is not None:
        text += f", from {run.checkpoint.name} on"
    asked = options.evaluation
    evaluations = 1
    if asked.before and options.lora.rank:
        evaluations += 1 + is_patched
    if asked.every:
        evaluations += options.train.steps // asked.every
    text += f"; evaluations: {evaluations}, each of {suite.tokens:,} tokens"
    return f"{text}; perplexity is measured on {suite.text_name}"


def _train(
    options: RecipeOptions,
    run: RunFolder,
    trainer: LongTrainer,
    tokenizer: PreTrainedTokenizerBase,
    suite: EvalSuite,
    command: str,
) -> Result:
    """Train a prepared model, evaluate it and write the output folder."""
    is_first = PartialState().is_main_process
    checkpoint = None
    if run.checkpoint is not None:
        checkpoint = str(run.checkpoint)
    trainer.train(resume_from_checkpoint=checkpoint)
    trained: Any = trainer.model
    gathered: dict[str, Any] = {}
    # Each device holds a share of the weights, so all processes take part in gathering them.
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        gathered["state_dict"] = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if is_first:  # saved before the last evaluation: if that fails, the adapter is there
        checkpoints.save(trained, run.out, tokenizer=tokenizer, **gathered)
    scores = {"after": evaluate_model(suite, trained)}
    if options.evaluation.before and options.lora.rank:
        with trained.disable_adapter():  # what is left is the model before training
            scores["before"] = evaluate_model(suite, trained)
            record = verify_model(trained)
            if record.changed:
                with patched(trained, "default", replace=True, freeze_at=record.freeze_at):
                    scores["unpatched"] = evaluate_model(suite, trained)
    trainer.accelerator.wait_for_everyone()
    if not is_first:
        return Result(run.out, {})
    return Result(run.out, write_results(run.out, options, command, trainer, scores, suite.text_name))
