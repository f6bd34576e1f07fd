"""What is written: a folder for plain transformers, checked in a process of its own, its card, and exports."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rope_patch import checkpoints
from rope_patch.checkpoints.plain_reload import plain_logits, probe_logits
from rope_patch.evaluation.result_cache import finite
from rope_patch.exporting.run import export
from rope_patch.extending.card import card
from rope_patch.files import is_gguf, write_atomically
from rope_patch.patching.apply import patched

if TYPE_CHECKING:
    from rope_patch.extending.run import Extended, Run

RECORD = "rope_patch_extend.json"
SCHEMA = 1


def write_folder(run: Run, outcome: Extended, adapter: Path | None, *, overwrite: bool) -> list[Path]:
    """Write the checkpoint, its card and its record, and export it; return what is exported.

    Args:
        run: of the options and the model.
        outcome: what was chosen.
        adapter: folder of the trained adapter, which is merged; None where nothing was trained.
        overwrite: replace what an earlier run wrote.

    Raises:
        RuntimeError: plain transformers gives other logits from what was written.
    """
    out, options = run.output, run.options
    with extended_model(run, outcome, adapter) as model:
        checkpoints.save(model, out, tokenizer=run.tokenizer)
        ours, device = probe_logits(model), str(model.device)
    run.on_step(f"wrote {out}; loading it in a process without rope_patch")
    theirs = plain_logits(out, ours.shape[-1], device=device)
    if not torch.equal(ours, theirs):
        largest = float((ours.float() - theirs.float()).abs().max())
        raise RuntimeError(
            f"{out}: plain transformers gives other logits, by up to {largest:.3g}. Please report this; the folder is "
            "not to be used"
        )
    run.on_step("plain transformers gives the same logits, bit for bit")
    exports = list(write_exports(run, overwrite=overwrite))
    write_atomically(out / "extend.yaml", options.to_yaml())
    write_atomically(out / RECORD, json.dumps(record(run, outcome, exports), indent=1, allow_nan=False))
    write_atomically(out / "README.md", card(run, outcome, exports))
    return exports


@contextmanager
def extended_model(run: Run, outcome: Extended, adapter: Path | None) -> Iterator[Any]:
    """Give the chosen model within a ``with`` block: patched, or loaded with its adapter merged."""
    if adapter is None:
        with patched(run.model, outcome.verdict.method, target_length=run.options.length):
            yield run.model
        return
    loaded: Any = checkpoints.load(adapter, dtype=run.model.dtype).to(run.model.device)
    yield loaded.merge_and_unload().eval()


def write_exports(run: Run, *, overwrite: bool) -> Iterator[Path]:
    """Export the written folder to the engines of the options, each beside it."""
    for engine in run.options.to:
        out = run.output.with_name(f"{run.output.name}.gguf" if engine == "gguf" else f"{run.output.name}-{engine}")
        more: dict[str, Any] = {}
        if engine == "gguf" and is_gguf(run.options.model) and not run.options.train:
            more["base_gguf"] = run.options.model  # its quantized tensors are copied
        run.on_step(f"exporting to {out}")
        export(run.output, out, to=engine, overwrite=overwrite, **more)
        yield out


def record(run: Run, outcome: Extended, exports: list[Path]) -> dict[str, Any]:
    """Return the choices and their evidence, for JSON."""
    verdict, training = outcome.verdict, outcome.training
    return {
        "schema": SCHEMA,
        "options": json.loads(json.dumps(asdict(run.options))),
        "trained_length": run.trained_length,
        "length": run.options.length,
        "chosen": verdict.method,
        "reason": verdict.reason,
        "judged": finite([one.to_dict() for one in verdict.judged]),
        "training": None if training is None else {**asdict(training), "tokens": training.tokens},
        "exports": [str(path.name) for path in exports],
        "plain_transformers": "equal logits",
        "rounds": [json.loads(comparison.to_json()) for comparison in outcome.comparisons],
    }
