"""The output folder of a run: which run it belongs to, what it holds, and what may be deleted from it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_patch import checkpoints
from rope_patch.files import holds_files, remove, write_atomically
from rope_patch.training.recipe import RecipeOptions
from rope_patch.training.resuming import REPLACED, STAGING, latest_checkpoint

SCHEMA = 2
CLAIM = "run.json"
RESULTS = "results.json"
EVALUATIONS = "evaluations.jsonl"


@dataclass(frozen=True)
class RunFolder:
    """A run's output folder, and what an earlier command left in it.

    Attributes:
        out: the folder, which the adapter is written to.
        settings: what identifies the run: its options (except the folder, which may move) and the number of processes
            that read rows.
        checkpoint: the one to resume from; None to begin at the start.
        rows_file: name of the file of rows that the checkpoint was trained on.
        model_fingerprint: of the base model that the checkpoint was trained on.
        results: of the run, where it is finished.
        restart: delete what an earlier run left when this one begins.
    """

    out: Path
    settings: dict[str, Any]
    checkpoint: Path | None = None
    rows_file: str | None = None
    model_fingerprint: str | None = None
    results: dict[str, Any] | None = None
    restart: bool = False

    @property
    def work(self) -> Path:
        """Folder of rows, checkpoints and logs."""
        return self.out / "work"


def inspect_folder(options: RecipeOptions, processes: int, *, source: str, restart: bool = False) -> RunFolder:
    """Return what the output folder of a run holds; nothing is changed.

    Args:
        options: of the run.
        processes: number of processes that read rows of their own.
        source: folder or id of the model.
        restart: delete an earlier run of this folder.

    Raises:
        ValueError: the folder is the model's own, or holds another run or other files.
        NotADirectoryError: the path is a file.
    """
    out = Path(options.output).expanduser()
    settings = {name: values for name, values in options.to_dict().items() if name != "output"}
    settings = {"schema": SCHEMA, "processes": processes, "options": settings}
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"output: {str(out)!r} is a file: give a folder")
    if Path(source).is_dir() and out.exists() and out.samefile(source):
        raise ValueError(f"output: {out} is the folder of the model itself: give another")
    path = out / "work" / CLAIM
    if not path.is_file():
        if holds_files(out) and not _only_begun(out):
            raise ValueError(f"output: {out} holds files that are not of a run: give a new or empty folder")
        return RunFolder(out, settings)
    try:
        claim = json.loads(path.read_text(encoding="utf-8"))
        known = claim["asked"]["schema"] == SCHEMA and {"model", "rows"} <= claim.keys()
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ValueError(f"output: {path} is not of a run of this version: give another folder")
    if restart:
        return RunFolder(out, settings, restart=True)
    checkpoint, results = latest_checkpoint(out / "work"), _finished(out)
    changes = "; ".join(_changes(claim["asked"], settings))
    if changes and (results or checkpoint is not None):
        raise ValueError(f"{out} holds a run with {changes}: choose another output, or --restart to delete that run")
    if changes:  # it has no checkpoint yet: nothing is lost
        return RunFolder(out, settings, restart=True)
    return RunFolder(out, settings, checkpoint, claim["rows"], claim["model"], results)


def _only_begun(out: Path) -> bool:
    """Whether the folder holds only what a run writes before it is killed without a claim."""
    work = out / "work"
    names = [path.name for path in work.iterdir()] if work.is_dir() else []
    only_ours = all(name == "lock" or name.startswith((f".{CLAIM}.", ".rows-", ".nfs")) for name in names)
    return only_ours and [path.name for path in out.iterdir()] == ["work"]


def _finished(out: Path) -> dict[str, Any] | None:
    """The results of a finished run whose adapter or model is still there."""
    weights = [*out.glob("adapter_model.*"), *out.glob("model*.safetensors")]
    if not (out / RESULTS).is_file() or not weights or (checkpoints.read_record(out) is None and _is_adapter(out)):
        return None
    results: dict[str, Any] = json.loads((out / RESULTS).read_text(encoding="utf-8"))
    return results


def _is_adapter(out: Path) -> bool:
    return (out / checkpoints.ADAPTER_FILE).is_file()


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    changes = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            changes += _changes(a, b, "" if name == "options" else f"{prefix}{name}.")
        elif str(a) != str(b):
            changes.append(f"{prefix}{name}={a} (now {b})")
    return changes


def check_base(run: RunFolder, model: Any, fingerprint: str) -> None:
    """Refuse to resume from a checkpoint of another base model.

    Args:
        run: of :func:`inspect_folder`.
        model: to be trained, bare or under PEFT.
        fingerprint: of the base model, before its patch.

    Raises:
        ValueError: another model, or the same with other weights.
    """
    if run.checkpoint is None:
        return
    file = run.checkpoint / checkpoints.ADAPTER_FILE
    if file.exists() and hasattr(model, "get_base_model"):
        theirs = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
        ours = model.get_base_model().config.name_or_path
        if theirs != ours:
            raise ValueError(f"{run.checkpoint} belongs to {theirs}, this run trains {ours}: choose another output")
    if fingerprint != run.model_fingerprint:
        raise ValueError(
            f"{run.checkpoint} was trained on other weights than the model has now: choose another output, or "
            "--restart to delete that run"
        )


OURS = ("checkpoint-*", "rows-*.arrow", "runs", EVALUATIONS, "seconds.json", STAGING, REPLACED)
"""What a run writes into its ``work``, beside the claim."""


@contextlib.contextmanager
def hold_folder(run: RunFolder, fingerprint: str, inspect_again: Callable[[], RunFolder]) -> Iterator[None]:
    """Lock the folder while a run works in it; a new folder in which nothing was finished is deleted again.

    Only the first of several processes calls it.

    Args:
        run: of :func:`inspect_folder`.
        fingerprint: of the base model.
        inspect_again: calls :func:`inspect_folder` once more: loading the model may have taken minutes.

    Raises:
        BlockingIOError: another command works in the folder, or has done so since.
    """
    new = not run.out.exists()
    run.work.mkdir(parents=True, exist_ok=True)
    with _locked(run.work / "lock"):
        try:
            if inspect_again() != run:
                raise BlockingIOError(f"{run.out} changed while the model was loaded: give the command again")
            if run.restart:  # the claim stays until the new one replaces it: a folder without one belongs to no run
                for path in (*(p for name in OURS for p in run.work.glob(name)), run.out / RESULTS):
                    remove(path)
            for leftover in run.work.glob(".rows-*"):  # of a killed run
                remove(leftover)
            if run.checkpoint is None:
                write_claim(run, fingerprint, rows_file=None)
            yield
        except BaseException:
            if new and {path.name for path in run.work.iterdir()} <= {CLAIM, "lock"}:
                shutil.rmtree(run.work, ignore_errors=True)
                with contextlib.suppress(OSError):
                    run.out.rmdir()
            raise


def write_claim(run: RunFolder, fingerprint: str, rows_file: str | None) -> None:
    """Write which run the folder belongs to and what it is trained on, for the command that resumes it."""
    claim = {"asked": run.settings, "model": fingerprint, "rows": rows_file}
    write_atomically(run.work / CLAIM, json.dumps(claim, indent=1) + "\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the operating system releases it when the process ends or is killed."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"another command works in {path.parent.parent}: wait for it") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)
