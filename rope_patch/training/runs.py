"""The output folder of a run: whose it is, what it holds, and what may be deleted from it."""

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
from rope_patch.claims import remove
from rope_patch.files import holds_files, write_atomically
from rope_patch.training.options import Options
from rope_patch.training.resuming import REPLACED, STAGING, latest_checkpoint

SCHEMA = 2
CLAIM = "run.json"
RESULTS = "results.json"


@dataclass(frozen=True)
class Run:
    """A run and its folder.

    Attributes:
        out: folder of the adapter.
        asked: what the run is: options (but for the folder, which may move) and the processes that read rows.
        checkpoint: the one to go on from; None for the start.
        rows: file name of the rows that the checkpoint was trained on.
        model: fingerprint of the base model that the checkpoint was trained on.
        results: of the run where it is finished.
        restart: throw away what is there when the run begins.
    """

    out: Path
    asked: dict[str, Any]
    checkpoint: Path | None = None
    rows: str | None = None
    model: str | None = None
    results: dict[str, Any] | None = None
    restart: bool = False

    @property
    def work(self) -> Path:
        """Folder of rows, checkpoints and logs."""
        return self.out / "work"


def look(options: Options, processes: int, *, source: str, restart: bool = False) -> Run:
    """Look at the output folder of a run; nothing is changed.

    Args:
        options: of the run.
        processes: that read rows of their own.
        source: folder or id of the model.
        restart: an earlier run there is to be thrown away.

    Raises:
        ValueError: the folder is the model's own, holds another run or something else.
        NotADirectoryError: it is a file.
    """
    out = Path(options.output).expanduser()
    asked = {name: values for name, values in options.to_dict().items() if name != "output"}
    asked = {"schema": SCHEMA, "processes": processes, "options": asked}
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"output: {str(out)!r} is a file: give a folder")
    if Path(source).is_dir() and out.exists() and out.samefile(source):
        raise ValueError(f"output: {out} is the folder of the model itself: give another")
    claim = out / "work" / CLAIM
    if not claim.is_file():
        if holds_files(out) and not _only_begun(out):
            raise ValueError(f"output: {out} holds files, and no run of ours: give a new or empty folder")
        return Run(out, asked)
    try:
        kept = json.loads(claim.read_text(encoding="utf-8"))
        ours = kept["asked"]["schema"] == SCHEMA and {"model", "rows"} <= kept.keys()
    except (ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise ValueError(f"output: {claim} is of no run of this version: give another folder")
    if restart:
        return Run(out, asked, restart=True)
    checkpoint, done = latest_checkpoint(out / "work"), _finished(out)
    changed = "; ".join(_changes(kept["asked"], asked))
    if changed and (done or checkpoint is not None):
        raise ValueError(f"{out} holds a run with {changed}: choose another output, or --restart to throw it away")
    if changed:  # it never got to a checkpoint: nothing is lost
        return Run(out, asked, restart=True)
    return Run(out, asked, checkpoint, kept["rows"], kept["model"], done)


def _only_begun(out: Path) -> bool:
    """A run was killed before it could say what it is."""
    work = out / "work"
    names = [path.name for path in work.iterdir()] if work.is_dir() else []
    begun = all(name == "lock" or name.startswith((f".{CLAIM}.", ".rows-", ".nfs")) for name in names)
    return begun and [path.name for path in out.iterdir()] == ["work"]


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
    made = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            made += _changes(a, b, "" if name == "options" else f"{prefix}{name}.")
        elif str(a) != str(b):
            made.append(f"{prefix}{name}={a} (now {b})")
    return made


def check_base(run: Run, model: Any, fingerprint: str) -> None:
    """Refuse to go on from a checkpoint on another base model than its own.

    Args:
        run: as it was found.
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
    if fingerprint != run.model:
        raise ValueError(
            f"{run.checkpoint} was trained on other weights than the model has now: choose another output, or "
            "--restart to throw it away"
        )


OURS = ("checkpoint-*", "rows-*.arrow", "runs", "judged.jsonl", "seconds.json", "fit.json*", STAGING, REPLACED)
"""What a run writes into its ``work``, beside the claim."""


@contextlib.contextmanager
def begun(run: Run, fingerprint: str, again: Callable[[], Run]) -> Iterator[None]:
    """Hold the folder while a run is at work in it; a folder that nothing came of is removed again.

    For the first of several processes alone.

    Args:
        run: as it was found.
        fingerprint: of the base model.
        again: looks once more: minutes may have gone by since.

    Raises:
        BlockingIOError: another command is at work in the folder, or was since.
    """
    new = not run.out.exists()
    run.work.mkdir(parents=True, exist_ok=True)
    with _locked(run.work / "lock"):
        try:
            if again() != run:
                raise BlockingIOError(f"{run.out} changed while the model was loaded: give the command again")
            if run.restart:  # the claim stays until the new one replaces it: a folder without one is nobody's
                for path in (*(p for name in OURS for p in run.work.glob(name)), run.out / RESULTS):
                    remove(path)
            for rest in run.work.glob(".rows-*"):  # of a killed run
                remove(rest)
            if run.checkpoint is None:
                note(run, fingerprint, rows=None)
            yield
        except BaseException:
            if new and {path.name for path in run.work.iterdir()} <= {CLAIM, "lock"}:
                shutil.rmtree(run.work, ignore_errors=True)
                with contextlib.suppress(OSError):
                    run.out.rmdir()
            raise


def note(run: Run, fingerprint: str, rows: str | None) -> None:
    """Write what a run is and what it is trained on, for whoever goes on with it."""
    claim = {"asked": run.asked, "model": fingerprint, "rows": rows}
    write_atomically(run.work / CLAIM, json.dumps(claim, indent=1) + "\n")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file that another process on this machine cannot hold at the same time; a killed one lets it go."""
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
            raise BlockingIOError(f"another command is at work in {path.parent.parent}: wait for it") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)
