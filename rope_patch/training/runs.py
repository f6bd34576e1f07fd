"""The output folder of a run: which run it belongs to, the checkpoint to go on from, and one command at a time."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers.trainer import TRAINER_STATE_NAME

from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.writing import from_dict, to_dict
from rope_patch.runtime.folders import write_atomically

SETTINGS = "run.json"
RESULTS = "results.json"
LOCK = ".lock"


@dataclass(frozen=True)
class RunFolder:
    """A run's output folder, and what an earlier command left in it.

    Attributes:
        out: the folder that the adapter is written to.
        settings: what identifies the run: its options (except the folder, which may move), the number of processes
            that read rows, and the fingerprint of the base model once that is loaded.
        checkpoint: the one to resume from; None to begin at the start.
        results: the results of a finished run; None for any other.
    """

    out: Path
    settings: dict[str, Any]
    checkpoint: Path | None = None
    results: dict[str, Any] | None = None

    @property
    def work(self) -> Path:
        """Folder of rows, checkpoints and logs."""
        return self.out / "work"

    def begin(self) -> None:
        """Delete what earlier commands left, unless there is a checkpoint to go on from, and say whose folder it is."""
        if self.checkpoint is None:
            self.out.joinpath(RESULTS).unlink(missing_ok=True)
            for path in self.work.iterdir():
                if path.name != LOCK:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            write_atomically(self.work / SETTINGS, json.dumps(self.settings, indent=1) + "\n")


def inspect_folder(
    options: RecipeOptions, processes: int, *, source: str, fingerprint: str | None = None, restart: bool = False
) -> RunFolder:
    """Return what the output folder of a run holds; nothing is changed.

    Args:
        options: the options of the run.
        processes: the number of processes that read rows of their own.
        source: folder or id of the model.
        fingerprint: the fingerprint of the base model; None before it is loaded.
        restart: whether to delete an earlier run of this folder.

    Raises:
        ValueError: the folder is the model's own, or holds another run or other files.
        NotADirectoryError: the path is a file.
    """
    out = options.output.expanduser()
    asked = _without_output(options)
    settings = {"processes": processes, "options": asked, "model": fingerprint}
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"output: {str(out)!r} is a file: give a folder")
    if Path(source).is_dir() and out.exists() and out.samefile(source):
        raise ValueError(f"output: {out} is the folder of the model itself: give another")
    path = out / "work" / SETTINGS
    if not path.is_file():
        # Hidden files are a lock, or what a killed command was about to write.
        if any(file.is_file() and not file.name.startswith(".") for file in out.rglob("*")):
            raise ValueError(f"output: {out} holds files that are not of a run: give a new or empty folder")
        return RunFolder(out, settings)
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(earlier, dict) or earlier.keys() != settings.keys():
        raise ValueError(f"output: {path} is not of a run of this version: give another folder")
    with contextlib.suppress(ValueError):  # an option that is gone, which is shown as it is
        known = from_dict(RecipeOptions, {**earlier["options"], "output": str(out)})
        earlier["options"] = _without_output(known)  # an earlier version may have written words in place of lists
    checkpoint, results = last_checkpoint(out / "work"), _finished(out)
    changes = "; ".join(_changes(earlier, settings if fingerprint else {**settings, "model": earlier["model"]}))
    if restart or (changes and checkpoint is None and results is None):  # in the second case nothing is lost
        return RunFolder(out, settings)
    if changes:
        raise ValueError(f"{out} holds a run with {changes}: choose another output, or --restart to delete that run")
    return RunFolder(out, settings, checkpoint, results)


def _without_output(options: RecipeOptions) -> dict[str, Any]:
    """Return all options but the folder, which may move."""
    return {name: values for name, values in to_dict(options).items() if name != "output"}


def last_checkpoint(work: Path) -> Path | None:
    """Return the last complete checkpoint of a run, or None.

    Trainer writes its state after weights, optimizer and random state, so a checkpoint without it was cut short by a
    kill and is skipped. With several processes another one may still have been writing its random state then; Trainer
    goes on without it.
    """
    steps = {int(path.name.rpartition("-")[2]): path for path in work.glob("checkpoint-*") if _has_state(path)}
    return steps[max(steps)] if steps else None


def _has_state(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _finished(out: Path) -> dict[str, Any] | None:
    """Return the results of a finished run whose weights are still there."""
    if not (out / RESULTS).is_file() or not any(out.glob("*.safetensors")):
        return None
    results: dict[str, Any] = json.loads((out / RESULTS).read_text(encoding="utf-8"))
    return results


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return which settings differ, such as ``train.steps=100 (now 200)``."""
    changes = []
    for name in sorted({*old, *new}):
        before, now = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            changes += _changes(before, now, "" if name == "options" else f"{prefix}{name}.")
        elif str(before) != str(now):
            changes.append(f"{prefix}{name}={before} (now {now})")
    return changes


@contextlib.contextmanager
def one_command_in(work: Path) -> Iterator[None]:
    """Keep other commands out of a folder; the operating system releases it when this process ends or is killed.

    Raises:
        BlockingIOError: another command works in the folder.
    """
    work.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(work / LOCK, timeout=0):
            yield
    except Timeout:
        raise BlockingIOError(f"another command works in {work.parent}: wait for it") from None
