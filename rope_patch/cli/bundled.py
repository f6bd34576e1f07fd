"""``rope-patch demo``: every method at four times the trained context, on the bundled checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch import checkpoints
from rope_patch.checkpoints.plain_reload import plain_logits, probe_logits
from rope_patch.cli.loading import in_cpu_type
from rope_patch.evaluation.compare import Comparison, compare
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.files import write_atomically
from rope_patch.packaged import data_path
from rope_patch.patching.apply import patched

FACTOR = 4
SHAPES = ("llama", "gemma3")
METHODS = (
    "default",
    f"yarn:factor={FACTOR}",
    f"mrrope:factor={FACTOR}",
    f"yarn:factor={FACTOR}+resonance",
    f"ntk:factor={FACTOR}",
    "abf:factor=50",
    f"llama3:factor={FACTOR}",
    f"longrope:factor={FACTOR}",
    "p_rope:p=0.5",
    "cope:share=0.5",
    "truncated",
    "partial:p=0.5",
    f"pi:factor={FACTOR}",
    "p_rope_reversed:p=0.5",
    "nope",
)
"""Every method at four times the trained context; ``table`` alone is missing, since it is whatever one gives it."""


@dataclass(frozen=True)
class Demo:
    """The result on one checkpoint.

    Attributes:
        shape: of the checkpoint, ``llama`` or ``gemma3``.
        comparison: the scores.
        saved: the folder of the best method's checkpoint; plain transformers gave the same logits from it.
    """

    shape: str
    comparison: Comparison
    saved: Path


def run(
    shape: str,
    out: Path,
    *,
    quick: bool = False,
    device: str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    seed: int = 0,
    on_progress: Any = lambda method, tokens: None,
) -> Demo:
    """Compare the methods on a bundled checkpoint, save the best, and reload it plainly.

    Args:
        shape: ``"llama"`` or ``"gemma3"``.
        out: folder for the JSON and the saved checkpoint.
        quick: three methods and few prompts, in seconds.
        device: to run on.
        dtype: of the weights; ``"auto"`` for the one they are stored in, if the CPU has instructions for it.
        seed: of the prompts.
        on_progress: called with the method and the number of tokens it has just read.

    Raises:
        RuntimeError: the saved checkpoint does not reload with equal logits.
    """
    source = data_path("assets") / shape
    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    if dtype == "auto" and device == "cpu":
        model = in_cpu_type(shape, model)
    model = model.to(device).eval()
    comparison = compare(model, tokenizer, methods(quick), spec(quick, seed), on_progress=on_progress)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / f"{shape}.json", comparison.to_json())
    best = comparison.best()
    saved = out / f"{shape}-{best.method.replace(':', '-').replace('=', '')}"
    with patched(model, best.method, target_length=max(comparison.lengths)):
        checkpoints.save(model, saved, tokenizer=tokenizer)
        if not reloads_equal(model, saved):
            raise RuntimeError(f"{saved} does not give the same logits in plain transformers: please report this")
    return Demo(shape, comparison, saved)


def methods(quick: bool) -> tuple[str, ...]:
    """Return the methods a run compares."""
    return METHODS[:2] + METHODS[-1:] if quick else METHODS


def spec(quick: bool, seed: int = 0) -> EvalSpec:
    """Return what a run measures."""
    if quick:
        return EvalSpec((256, 1024), windows=2, depths=(0.1, 0.9), samples=2, seed=seed)
    return EvalSpec((256, 512, 1024), windows=10, samples=3, seed=seed)


def tokens_to_read(quick: bool) -> int:
    """Return the tokens a checkpoint's comparison reads, for the progress bar."""
    return len(methods(quick)) * spec(quick).tokens_to_read()


def reloads_equal(model: Any, folder: Path) -> bool:
    """Tell whether plain transformers, in a process of its own, gives bit-equal float32 logits from the folder."""
    reference = model.to("cpu", torch.float32)  # a patched table does not mind the cast
    return torch.equal(plain_logits(folder, model.config.vocab_size, dtype="float32"), probe_logits(reference))
