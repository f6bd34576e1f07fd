"""What is written: a folder for plain transformers, checked in a process of its own, and its card."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_patch import checkpoints
from rope_patch.checkpoints.folder_patch import BASE_CARD, EXTEND_RECORD, TERMS, card_and_terms, check_new_folder
from rope_patch.checkpoints.plain_reload import plain_logits, probe_logits
from rope_patch.checkpoints.source_files import on_device
from rope_patch.diagnosis.check import DIFFERS, UNKNOWN
from rope_patch.diagnosis.programs import programs_agree
from rope_patch.evaluation.count_tokens import check_tasks
from rope_patch.extending.card import base_card, checkpoint_card
from rope_patch.extending.result import Extended
from rope_patch.methods import as_method
from rope_patch.options.extend import ExtendSettings
from rope_patch.options.yaml_and_json import to_dict, to_yaml
from rope_patch.patching.install import patched
from rope_patch.runtime import progress
from rope_patch.runtime.errors import read_json
from rope_patch.runtime.folders import folder_in_one_move, write_atomically
from rope_patch.runtime.result_cache import finite

SCHEMA = 2


def write_extended(
    outcome: Extended,
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapter: Path | None,
    *,
    overwrite: bool,
) -> Extended:
    """Write the checkpoint, its card and its record.

    Args:
        outcome: the outcome of the run so far, with a chosen method.
        out: the folder to write.
        model: the model that was measured, without a patch.
        tokenizer: the tokenizer of the model.
        adapter: the folder of the trained adapter, which is merged; None where nothing was trained.
        overwrite: whether to replace what an earlier run wrote.

    Returns:
        The outcome with what was written.

    Raises:
        RuntimeError: plain transformers gives other logits from what was written.
    """
    loaded_in = model.config.dtype  # saving changes it
    chosen: Any = model
    with folder_in_one_move(out, overwrite=overwrite) as folder, contextlib.ExitStack() as stack:
        if adapter is None:
            assert outcome.choice.method is not None  # a refusal writes nothing
            stack.enter_context(patched(model, outcome.choice.method, target_length=outcome.options.length))
        else:  # it is loaded with its own table
            adapted: Any = checkpoints.load(adapter, dtype=model.dtype, **on_device(model.device))
            chosen = adapted.merge_and_unload().eval()
        checkpoints.save(chosen, folder, tokenizer=tokenizer)
        if adapter is None and chosen.dtype == torch.float32 and loaded_in in (torch.bfloat16, torch.float16):
            # Computed in float32, because the CPU is faster then. Casting the model itself would round its table.
            chosen = checkpoints.load(folder, dtype=loaded_in, **on_device(chosen.device)).eval()
            checkpoints.save(chosen, folder, tokenizer=tokenizer)
        ours = probe_logits(chosen)
        stack.close()  # the caller's model is again as it was
        progress.say("the checkpoint is saved; loading it in a process without rope_patch")
        # A process of its own, in which no module of rope_patch can have changed transformers.
        theirs = plain_logits(folder, ours.shape[-1], str(chosen.device))
        if not torch.equal(ours, theirs):
            largest = float((ours.float() - theirs.float()).abs().max())
            raise RuntimeError(
                f"plain transformers gives other logits from what would be {out}, by up to {largest:.3g}. Please "
                "report this; nothing was written"
            )
        progress.say("plain transformers gives the same logits, bit for bit")
        programs = tuple(sentence.replace(str(folder), str(out)) for sentence in other_programs(folder))
        for sentence in programs:
            progress.say(f"note: {sentence}")
        outcome = replace(outcome, output=out, programs=programs)
        base = card_and_terms(outcome.options.model)
        for pattern in TERMS:  # which go with the weights
            for path in filter(Path.is_file, base.glob(pattern)):
                shutil.copyfile(path, folder / path.name)
        if (of_base := base_card(base)) is not None:
            shutil.copyfile(of_base, folder / BASE_CARD)
        write_atomically(folder / "extend.yaml", to_yaml(outcome.options))
        write_atomically(folder / EXTEND_RECORD, json.dumps(record(outcome), indent=1, allow_nan=False))
        write_atomically(folder / "README.md", checkpoint_card(outcome, base))
    return outcome


def other_programs(source: str | Path) -> tuple[str, ...]:
    """Return which programs compute another table than transformers 5, and what to run instead, a sentence each.

    Args:
        source: the folder of the checkpoint.
    """
    sentences: dict[str, list[str]] = {}
    try:
        for check in programs_agree(source):
            if check.state in (DIFFERS, UNKNOWN):
                meaning = check.meaning[:1].upper() + check.meaning[1:]
                parts = [check.found, meaning, check.fix and f"Run: {check.fix}"]
                sentence = ". ".join(part for part in parts if part)
                sentences.setdefault(sentence, []).append(check.name)
    except ValueError as error:  # a family that nothing is known of
        return (f"what other programs compute from its config is not known: {error}",)
    return tuple(f"{', '.join(names)}: {sentence}" for sentence, names in sentences.items())


def check_output(options: ExtendSettings, out: Path, overwrite: bool) -> None:
    """Raise where a name is unknown or the output is in the way, before anything is loaded.

    Raises:
        ValueError, OSError: an unknown method or task, or an output that :func:`check_new_folder` refuses.
    """
    for method in options.methods:
        as_method(method)
    check_tasks(options.evaluation)
    check_new_folder(options.model, out, overwrite)


def trained_by_extend(folder: str | Path) -> bool | None:
    """Return whether an earlier run that wrote a folder trained its weights, too; None if none wrote it."""
    path = Path(folder) / EXTEND_RECORD
    if not path.is_file():
        return None
    return read_json(path).get("training") is not None


def record(outcome: Extended) -> dict[str, Any]:
    """Return the choice and its evidence, for JSON."""
    choice = outcome.choice
    training = None
    if outcome.training is not None:
        training = {**asdict(outcome.training), "tokens": outcome.training.tokens}
    return {
        "schema": SCHEMA,
        "options": to_dict(outcome.options),
        "trained_length": outcome.trained_length,
        "length": outcome.options.length,
        "chosen": choice.label,
        "reason": choice.reason,
        "cost": choice.cost,
        "unconfirmed": choice.unconfirmed,
        "evaluated": finite([asdict(one) | {"method": one.label} for one in choice.evaluated]),
        "training": training,
        "plain_transformers": "equal logits",
        "other_programs": list(outcome.programs),
        "rounds": [json.loads(comparison.to_json()) for comparison in outcome.comparisons],
    }
