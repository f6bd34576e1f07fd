"""What is written: a folder for plain transformers, checked in a process of its own, and its card."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_patch import checkpoints
from rope_patch.checkpoints.folder_patch import BASE_CARD, EXTEND_RECORD, TERMS, card_and_terms, check_new_folder
from rope_patch.checkpoints.plain_reload import plain_logits, probe_logits
from rope_patch.checkpoints.source_files import like, placement
from rope_patch.evaluation.count_tokens import check_tasks
from rope_patch.extending.card import base_card, checkpoint_card
from rope_patch.extending.result import Extended
from rope_patch.extending.served_by import NAMES
from rope_patch.extending.train_adapter import free_weights
from rope_patch.methods import as_method
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.options.extend import ExtendSettings
from rope_patch.options.yaml_and_json import to_dict, to_yaml
from rope_patch.patching.install import patched
from rope_patch.runtime import progress
from rope_patch.runtime.errors import read_json
from rope_patch.runtime.folders import folder_in_one_move, write_atomically
from rope_patch.runtime.number_format import relative
from rope_patch.runtime.result_cache import finite

SCHEMA = 3


def write_extended(
    outcome: Extended,
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    overwrite: bool,
    owned: bool = False,
    report: Callable[[Extended, Path], object] = lambda *_: None,
) -> Extended:
    """Write the checkpoint, its card and its record.

    Args:
        outcome: the outcome of the run so far, with a chosen method.
        out: the folder to write.
        model: the model that was measured, without a patch, or the one that was trained under the method.
        tokenizer: the tokenizer of the model.
        overwrite: whether to replace what an earlier run wrote.
        owned: whether nobody needs the model any more when it is saved. Its weights are then freed, before the process
            that checks them loads its own.
        report: a function that writes the report of an outcome into a folder.

    Returns:
        The outcome with what was written.

    Raises:
        RuntimeError: plain transformers gives other logits from what was written.
    """
    options = outcome.options
    assert outcome.choice is not None and outcome.choice.chosen is not None  # a refusal writes nothing
    chosen = outcome.choice.chosen
    with folder_in_one_move(out, overwrite=overwrite) as folder:
        with contextlib.ExitStack() as stack:
            if not chosen.trained:  # otherwise it was loaded with its own table
                stack.enter_context(patched(model, chosen.method, target_length=options.length))
            ours = _save(model, folder, tokenizer)
        where = placement(model)
        if owned:
            free_weights(model)
        progress.say("the checkpoint is saved; loading it in a process without rope_patch")
        # A process of its own, in which no module of rope_patch can have changed transformers. It attends as the model
        # did: other attention gives other bits.
        theirs = plain_logits(folder, ours.shape[-1], where, attention=model.config._attn_implementation)
        if not torch.equal(ours, theirs):
            largest = float((ours.float() - theirs.float()).abs().max())
            raise RuntimeError(
                f"plain transformers gives other logits from what would be {out}, by up to {largest:.3g}. Please "
                "report this; nothing was written"
            )
        progress.say("plain transformers gives the same logits, bit for bit")
        outcome = replace(outcome, output=out)
        base = card_and_terms(options.model)
        for pattern in TERMS:  # which go with the weights
            for path in filter(Path.is_file, base.glob(pattern)):
                shutil.copyfile(path, folder / path.name)
        of_base = base_card(base)
        if of_base is not None:
            shutil.copyfile(of_base, folder / BASE_CARD)
        write_atomically(folder / "extend.yaml", to_yaml(options))
        rounds = [json.loads(comparison.to_json()) for comparison in outcome.comparisons]
        found = json.dumps(record(outcome) | {"rounds": rounds}, indent=1, allow_nan=False)
        write_atomically(folder / EXTEND_RECORD, found)
        write_atomically(folder / "README.md", checkpoint_card(outcome, base))
        report(outcome, folder)
    return outcome


def _save(model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Save a patched model, in the data type of its checkpoint, and return the logits of what was saved."""
    stored: Any = model.config.dtype  # saving changes it
    checkpoints.save(model, folder, tokenizer=tokenizer)
    if model.dtype == torch.float32 and stored in (torch.bfloat16, torch.float16):
        # Computed in float32, because the CPU is faster then. Casting the model itself would round its table.
        model = checkpoints.load(folder, **like(model) | {"dtype": stored})
        checkpoints.save(model, folder, tokenizer=tokenizer)
    with in_eval_mode(model):
        return probe_logits(model)


def check_output(options: ExtendSettings, out: Path, overwrite: bool) -> None:
    """Raise where a name is unknown or the output is in the way, before anything is loaded.

    Raises:
        ValueError, OSError: an unknown method, program or task, or an output that :func:`check_new_folder` refuses.
    """
    for method in options.methods:
        as_method(method)
    for program in options.for_programs:
        if program not in NAMES:
            raise ValueError(f"unknown program {program!r}. Known: {', '.join(NAMES)}")
    check_tasks(options.evaluation)
    check_new_folder(options.model, out, overwrite)


def trained_by_extend(folder: str | Path) -> bool | None:
    """Return whether an earlier run that wrote a folder trained its weights, too; None if none wrote it."""
    path = Path(folder) / EXTEND_RECORD
    if not path.is_file():
        return None
    return read_json(path).get("training") is not None


def record(outcome: Extended) -> dict[str, Any]:
    """Return the choice and its evidence as JSON values."""
    choice = outcome.choice
    evaluated = []
    for one in choice.order if choice else ():
        evaluated.append(
            {
                "method": one.label,
                "answered": one.answered,
                "prompts": len(one.retrieval),
                "logprob": -fmean(one.retrieval),
                "perplexity": 1 + relative(fmean(one.perplexity)),
                "change": one.price,
                "reaches": one.reaches,
                "served_by": dict(one.served_by),
            }
        )
    training = None
    if outcome.training is not None:
        training = {**asdict(outcome.training), "tokens": outcome.training.tokens}
    return {
        "schema": SCHEMA,
        "options": to_dict(outcome.options),
        "trained_length": outcome.trained_length,
        "length": outcome.options.length,
        "output": outcome.output and str(outcome.output),
        "chosen": choice and choice.label,
        "verdict": outcome.verdict,
        "evaluated": finite(evaluated),
        "dropped": choice and choice.dropped,
        "training": training,
    }
