"""What is asked before the first step: are the arguments known, what does a run do, is TRL's loss the model's own?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, TypeVar

import torch
from accelerate.parallelism_config import ParallelismConfig
from transformers import PreTrainedModel

from rope_patch.evaluation.suite import EvalSuite
from rope_patch.modeling.reader import CHECKED_TOKENS, fixed_ids, weights_at_hand
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.options.finetune import RecipeOptions
from rope_patch.patching.locate import base_of, locate
from rope_patch.runtime.text import did_you_mean
from rope_patch.training.runs import RunFolder

T = TypeVar("T")


def build(kind: type[T], section: str, values: Mapping[str, Any]) -> T:
    """Return a dataclass of TRL or PEFT from the values of a section of YAML.

    Args:
        kind: the class, such as TRL's ``SFTConfig``.
        section: the name of the section, for error messages.
        values: the values by name.

    Raises:
        ValueError: a name is unknown, a list is written as words, or the library refuses a value.
    """
    types = {one.name: str(one.type) for one in fields(kind)}  # type: ignore[arg-type]
    defaults = {one.name: one.default for one in fields(kind) if one.init}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in defaults:
            raise ValueError(f"{section}: {kind.__name__} has no {name!r}.{did_you_mean(name, defaults)}")
        if isinstance(defaults[name], Real) and not isinstance(value, Real | None):
            raise ValueError(f"{section}.{name} must be a number, or true or false, got {value!r}")
        if "list[str]" in types[name] and isinstance(value, str) and len(value.split()) > 1:
            raise ValueError(f"{section}.{name} takes a list, such as [{', '.join(value.split())}], got {value!r}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{section}: {error}") from error


def check_context_parallel(model: PreTrainedModel) -> None:
    """Refuse a model that context parallelism would train wrongly.

    Context parallelism drops every mask and attends causally over the whole row (accelerate 1.15,
    ``_attach_context_parallel_hooks``). TRL refuses packed rows; nobody refuses sliding windows.

    Raises:
        ValueError: devices share each row, and the model has sliding windows.
    """
    if ParallelismConfig().cp_size == 1:
        return
    text = model.config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if kinds - {"full_attention"} or (not kinds and getattr(text, "sliding_window", None)):
        raise ValueError(
            "rows that devices share are attended to in full, and this model has sliding windows: train on rows that "
            "one device holds (cp_size 1)"
        )


def description(options: RecipeOptions, args: Any, run: RunFolder, model: PreTrainedModel, suite: EvalSuite) -> str:
    """Return what a run does: its patch, its steps, and how often it is evaluated on what.

    Args:
        options: the options of the run.
        args: the ``SFTConfig`` of the run.
        run: the output folder.
        model: the patched model.
        suite: the texts and prompts of the evaluations.
    """
    record = locate(model).record
    text = ""
    if record is not None:
        text = f"patch: {record.to_method()} for {options.target_length} tokens\n"
    length = f"{args.max_steps} steps"
    if args.max_steps < 1:
        length = f"{args.num_train_epochs:g} epochs in steps"
    text += f"trains for {length} of {tokens_per_step(options, args):,} tokens"
    if run.checkpoint is not None:
        text += f", from {run.checkpoint.name} on"
    evaluations = 1
    if options.evaluation.before and options.lora_rank:
        evaluations += 1
        if record is not None:
            evaluations += record.changed
    if options.evaluation.every:
        evaluations += args.max_steps // options.evaluation.every
    text += f"; evaluations: {evaluations}, each of {suite.tokens:,} tokens"
    return f"{text}; perplexity is measured on {suite.text_name}"


def tokens_per_step(options: RecipeOptions, args: Any) -> int:
    """Return the number of tokens in a step, over all processes; those that share a row count as one."""
    readers = args.world_size // ParallelismConfig().non_data_parallel_size
    rows: int = args.per_device_train_batch_size * args.gradient_accumulation_steps * readers
    return rows * options.max_length


def check_loss(trainer: Any) -> None:
    """Compare the loss of TRL's head, which computes logits in pieces, with the model's own on a few tokens.

    TRL knows by name which models scale or cap their logits; a model with another head would be trained on a wrong loss
    in silence.

    Args:
        trainer: an ``SFTTrainer`` before its training.

    Raises:
        ValueError: the two losses differ.
    """
    base: Any = base_of(trainer.model)
    if not weights_at_hand(base):
        return
    predicted = base.config.get_text_config().vocab_size
    ids = fixed_ids(CHECKED_TOKENS, predicted).to(base.device)
    with torch.no_grad(), in_eval_mode(base):
        own = float(base(input_ids=ids, labels=ids, use_cache=False).loss)
        of_trl = math.nan
        with contextlib.suppress(AttributeError):  # TRL takes another module for the decoder
            of_trl = float(base(input_ids=ids, labels=ids, fused_lm_head=True).loss)
    if not abs(of_trl - own) <= 1e-2 * abs(own):
        raise ValueError(
            f"{type(base).__name__} has a loss of its own: {own:.4f} on a few tokens, and TRL would train on "
            f"{of_trl:.4f}"
        )
