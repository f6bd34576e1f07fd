"""What is written: a folder for plain transformers, checked in a process of its own, its card, and exports."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_patch import checkpoints
from rope_patch.checkpoints.gguf_patch import patch_gguf
from rope_patch.checkpoints.offline import check_free
from rope_patch.checkpoints.plain_reload import plain_logits, probe_logits
from rope_patch.evaluation.spec import check_tasks
from rope_patch.exporting.run import TARGETS, export
from rope_patch.extending.card import card
from rope_patch.extending.looking import other_programs
from rope_patch.extending.result import Extended
from rope_patch.methods import as_method
from rope_patch.methods.two_tables import check_one_table
from rope_patch.options.extend import ExtendSettings
from rope_patch.options.writing import to_dict, to_yaml
from rope_patch.patching.install import patched
from rope_patch.runtime import progress
from rope_patch.runtime.finished import finite
from rope_patch.runtime.folders import (
    file_in_one_move,
    folder_in_one_move,
    holds_files,
    is_gguf,
    write_atomically,
)

RECORD = "rope_patch_extend.json"
SCHEMA = 1


def write(
    outcome: Extended,
    out: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    adapter: Path | None,
    *,
    overwrite: bool,
) -> Extended:
    """Write the checkpoint, its card and its record, and export it.

    Args:
        outcome: what was chosen.
        out: folder to write.
        model: that was measured, without a patch.
        tokenizer: its own.
        adapter: folder of the trained adapter, which is merged; None where nothing was trained.
        overwrite: replace what an earlier run wrote.

    Returns:
        The outcome with what was written.

    Raises:
        RuntimeError: plain transformers gives other logits from what was written.
    """
    staged = outcome.work / "written" / out.name  # so that an interrupted run leaves no half of an output
    shutil.rmtree(staged.parent, ignore_errors=True)
    loaded_in = model.config.dtype  # saving changes it
    with extended_model(outcome, model, adapter) as chosen:
        checkpoints.save(chosen, staged, tokenizer=tokenizer)
        if adapter is None and chosen.dtype == torch.float32 and loaded_in in (torch.bfloat16, torch.float16):
            # Computed in float32, because the CPU is faster then. Casting the model itself would round its table.
            chosen = checkpoints.load(staged, dtype=loaded_in).to(chosen.device).eval()
            checkpoints.save(chosen, staged, tokenizer=tokenizer)
        ours, device = probe_logits(chosen), str(chosen.device)
    progress.say("the checkpoint is saved; loading it in a process without rope_patch")
    theirs = plain_logits(staged, ours.shape[-1], device=device)
    if not torch.equal(ours, theirs):
        largest = float((ours.float() - theirs.float()).abs().max())
        raise RuntimeError(
            f"{staged}: plain transformers gives other logits, by up to {largest:.3g}. Please report this; the folder "
            "is not to be used"
        )
    progress.say("plain transformers gives the same logits, bit for bit")
    programs = tuple(sentence.replace(str(staged), str(out)) for sentence in other_programs(staged))
    for sentence in programs:
        progress.say(f"note: {sentence}")
    exports = []
    for engine in outcome.options.exports:
        path = export_path(out, engine)
        if engine == "gguf" and adapter is not None:
            progress.say(f"note: the weights were trained, so that {path.name} is to be converted: {_conversion(out)}")
            continue
        progress.say(f"exporting to {path}")
        if engine == "gguf":
            method, length = str(outcome.choice.method), outcome.options.length
            patch_gguf(outcome.options.model, method, staged.with_name(path.name), target_length=length)
        else:
            export(staged, staged.with_name(path.name), to=engine)
        exports.append(path)
    outcome = replace(outcome, output=out, exports=tuple(exports), programs=programs)
    write_atomically(staged / "extend.yaml", to_yaml(outcome.options))
    write_atomically(staged / RECORD, json.dumps(record(outcome), indent=1, allow_nan=False))
    write_atomically(staged / "README.md", card(outcome))
    for path in (*exports, out):
        move(staged.with_name(path.name), path, overwrite=overwrite)
    shutil.rmtree(staged.parent)
    return outcome


def _conversion(out: Path) -> str:
    """Return the command that writes a GGUF file of a folder."""
    return f"rope-patch export {out} --to gguf --converter PATH -o {export_path(out, 'gguf')}"


def check(options: ExtendSettings, out: Path, overwrite: bool) -> None:
    """Raise where a name is unknown or what will be written is in the way, before anything is loaded.

    Raises:
        ValueError: an unknown method, task or engine; the output is the checkpoint itself, or no folder, or a GGUF file
            is asked for of a folder.
        FileExistsError: the folder or an export exists, and ``overwrite`` is not set.
    """
    for method in options.methods:
        check_one_table(as_method(method), "a folder for plain transformers")
    for engine in options.exports:
        if engine not in TARGETS:
            raise ValueError(f"unknown engine {engine!r}. Known: {', '.join(TARGETS)}")
    check_tasks(options.evaluation)
    if is_gguf(out):
        raise ValueError(f"a folder is written, got {str(out)!r}: --export gguf writes a GGUF file beside it")
    if Path(options.model).resolve() == out.resolve():
        raise ValueError(f"{out} is the checkpoint itself: give another output folder")
    if "gguf" in options.exports and not is_gguf(options.model):
        raise ValueError(
            f"--export gguf patches a GGUF file that is extended, and {options.model} is none: leave it out, then run "
            f"{_conversion(out)}"
        )
    check_free(out, overwrite)
    for path in (export_path(out, engine) for engine in options.exports):
        if Path(options.model).resolve() == path.resolve():
            raise ValueError(f"the export would replace {path}, the checkpoint itself: give another output folder")
        if (path.exists() if is_gguf(path) else holds_files(path)) and not overwrite:
            raise FileExistsError(f"{path} exists: give another output folder, or allow overwriting (--force)")


def export_path(out: Path, engine: str) -> Path:
    """Return where an export is written: beside the folder."""
    return out.with_name(f"{out.name}.gguf" if engine == "gguf" else f"{out.name}-{engine}")


def move(source: Path, out: Path, *, overwrite: bool) -> None:
    """Move a file or a folder to where it belongs, in place of what an older run wrote there."""
    if source.is_file():
        with file_in_one_move(out, overwrite=overwrite) as file:
            os.replace(source, file)
        return
    with folder_in_one_move(out, overwrite=overwrite) as folder:
        for path in source.iterdir():
            os.replace(path, folder / path.name)


@contextmanager
def extended_model(outcome: Extended, model: PreTrainedModel, adapter: Path | None) -> Iterator[Any]:
    """Give the chosen model within a ``with`` block: patched, or loaded with its adapter merged."""
    if adapter is None:
        assert outcome.choice.method is not None  # a refusal has no model to give
        with patched(model, outcome.choice.method, target_length=outcome.options.length):
            yield model
        return
    loaded: Any = checkpoints.load(adapter, dtype=model.dtype)
    yield loaded.to(model.device).merge_and_unload().eval()


def record(outcome: Extended) -> dict[str, Any]:
    """Return the choice and its evidence, for JSON."""
    choice, training = outcome.choice, outcome.training
    return {
        "schema": SCHEMA,
        "options": to_dict(outcome.options),
        "trained_length": outcome.trained_length,
        "length": outcome.options.length,
        "chosen": choice.label,
        "reason": choice.reason,
        "evaluated": finite([one.to_dict() for one in choice.evaluated]),
        "training": None if training is None else {**asdict(training), "tokens": training.tokens},
        "exports": [path.name for path in outcome.exports],
        "plain_transformers": "equal logits",
        "other_programs": list(outcome.programs),
        "rounds": [json.loads(comparison.to_json()) for comparison in outcome.comparisons],
    }
