"""What is written: a folder for plain transformers, checked in a process of its own, its card, and exports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from rope_patch import checkpoints
from rope_patch.checkpoints.plain_reload import plain_logits, probe_logits
from rope_patch.evaluation.result_cache import finite
from rope_patch.exporting.run import export
from rope_patch.extending.card import card
from rope_patch.extending.options import ExtendOptions
from rope_patch.extending.result import Extended
from rope_patch.files import is_gguf, write_atomically
from rope_patch.patching.apply import patched

RECORD = "rope_patch_extend.json"
SCHEMA = 1


def write(
    outcome: Extended,
    out: Path,
    model: Any,
    tokenizer: Any,
    adapter: Path | None,
    *,
    overwrite: bool,
    on_step: Callable[[str], None],
) -> Extended:
    """Write the checkpoint, its card and its record, and export it.

    Args:
        outcome: what was chosen.
        out: folder to write.
        model: that was measured, without a patch.
        tokenizer: its own.
        adapter: folder of the trained adapter, which is merged; None where nothing was trained.
        overwrite: replace exports of an earlier run.
        on_step: called with a sentence about each step.

    Returns:
        The outcome with what was written.

    Raises:
        RuntimeError: plain transformers gives other logits from what was written.
    """
    with extended_model(outcome, model, adapter) as chosen:
        checkpoints.save(chosen, out, tokenizer=tokenizer)
        ours, device = probe_logits(chosen), str(chosen.device)
    on_step(f"wrote {out}; loading it in a process without rope_patch")
    theirs = plain_logits(out, ours.shape[-1], device=device)
    if not torch.equal(ours, theirs):
        largest = float((ours.float() - theirs.float()).abs().max())
        raise RuntimeError(
            f"{out}: plain transformers gives other logits, by up to {largest:.3g}. Please report this; the folder is "
            "not to be used"
        )
    on_step("plain transformers gives the same logits, bit for bit")
    exports = tuple(write_exports(out, outcome.options, overwrite=overwrite, on_step=on_step))
    outcome = replace(outcome, output=out, exports=exports)
    write_atomically(out / "extend.yaml", outcome.options.to_yaml())
    write_atomically(out / RECORD, json.dumps(record(outcome), indent=1, allow_nan=False))
    write_atomically(out / "README.md", card(outcome))
    return outcome


@contextmanager
def extended_model(outcome: Extended, model: Any, adapter: Path | None) -> Iterator[Any]:
    """Give the chosen model within a ``with`` block: patched, or loaded with its adapter merged."""
    if adapter is None:
        with patched(model, outcome.choice.method, target_length=outcome.options.length):
            yield model
        return
    loaded: Any = checkpoints.load(adapter, dtype=model.dtype).to(model.device)
    yield loaded.merge_and_unload().eval()


def write_exports(
    out: Path, options: ExtendOptions, *, overwrite: bool, on_step: Callable[[str], None]
) -> Iterator[Path]:
    """Export the written folder to the engines of the options, each beside it."""
    for engine in options.to:
        path = out.with_name(f"{out.name}.gguf" if engine == "gguf" else f"{out.name}-{engine}")
        more: dict[str, Any] = {}
        if engine == "gguf" and is_gguf(options.model) and not options.train:
            more["base_gguf"] = options.model  # its quantized tensors are copied
        on_step(f"exporting to {path}")
        export(out, path, to=engine, overwrite=overwrite, **more)
        yield path


def record(outcome: Extended) -> dict[str, Any]:
    """Return the choice and its evidence, for JSON."""
    choice, training = outcome.choice, outcome.training
    return {
        "schema": SCHEMA,
        "options": json.loads(json.dumps(asdict(outcome.options))),
        "trained_length": outcome.trained_length,
        "length": outcome.options.length,
        "chosen": choice.method,
        "reason": choice.reason,
        "judged": finite([one.to_dict() for one in choice.judged]),
        "training": None if training is None else {**asdict(training), "tokens": training.tokens},
        "exports": [path.name for path in outcome.exports],
        "plain_transformers": "equal logits",
        "rounds": [json.loads(comparison.to_json()) for comparison in outcome.comparisons],
    }
