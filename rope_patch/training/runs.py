"""The output folder of a run: the run that it belongs to, and the checkpoint to resume from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME

from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import to_dict
from rope_patch.runtime.folders import HIDDEN_MARK, remove, write_atomically
from rope_patch.training.pack_rows import rows_per_step

SETTINGS_FILE = "run.json"
RESULTS_FILE = "results.json"


@dataclass(frozen=True)
class RunFolder:
    """A run's output folder, and what an earlier command left in it.

    Attributes:
        out: the folder that the adapter is written to.
        settings: the settings that identify the run: its options, and the number of rows in a step. The folder is not
            among them, since it may be moved.
        checkpoint: the checkpoint to resume from; None to start from the beginning.
        results: the results, if the run is finished; None otherwise.
    """

    out: Path
    settings: dict[str, Any]
    checkpoint: Path | None = None
    results: dict[str, Any] | None = None

    @property
    def work(self) -> Path:
        """The folder of rows, checkpoints and logs."""
        return self.out / "work"

    def begin(self) -> None:
        """Delete what an earlier run left and write the settings of this one, unless a checkpoint is resumed."""
        if self.checkpoint is None:
            # Results first: if this is interrupted, the folder must not look finished.
            remove(self.out / RESULTS_FILE)
            remove(self.work)
            self.work.mkdir(parents=True)
            write_atomically(self.work / SETTINGS_FILE, json.dumps(self.settings, indent=1) + "\n")


def inspect_folder(options: RecipeOptions, *, restart: bool = False) -> RunFolder:
    """Return what the output folder of a run holds; nothing is changed.

    Args:
        options: the options of the run.
        restart: whether to delete an earlier run of this folder.

    Raises:
        ValueError: the folder holds another run or other files.
    """
    out = options.output.expanduser()
    settings = {"rows_per_step": rows_per_step(options), **to_dict(options)}
    del settings["output"]
    path = out / "work" / SETTINGS_FILE
    if not path.is_file():
        # Hidden files are what an interrupted write of this package leaves, so they are no one's work.
        if out.exists() and (
            out.is_file() or any(HIDDEN_MARK not in file.name for file in out.rglob("*") if file.is_file())
        ):
            raise ValueError(f"output: {out} holds files that are not of a run: give a new or empty folder")
        return RunFolder(out, settings)
    earlier = json.loads(path.read_text(encoding="utf-8"))
    checkpoint, results = last_checkpoint(out / "work"), _finished(out)
    changes = _changes(_flat(earlier), _flat(settings))
    if restart or (changes and checkpoint is None and results is None):  # in the second case no work is lost
        return RunFolder(out, settings)
    if changes:
        raise ValueError(f"{out} holds a run with {changes}: choose another output, or --restart to delete that run")
    return RunFolder(out, settings, checkpoint, results)


def last_checkpoint(work: Path) -> Path | None:
    """Return the last complete checkpoint of a run, or None.

    Trainer writes its state after weights, optimizer and random state, so a checkpoint without it was cut short by a
    kill and is skipped. With several processes the kill may have come while another one wrote its random state; Trainer
    continues without that.
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
    """Return the results of a finished run, or None; one whose weights were deleted does not count."""
    if not (out / RESULTS_FILE).is_file() or not any(out.glob("*.safetensors")):
        return None
    results: dict[str, Any] = json.loads((out / RESULTS_FILE).read_text(encoding="utf-8"))
    return results


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the settings by their full names, such as ``train.steps``."""
    flat: dict[str, str] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": str(value)}
    return flat


def _changes(before: dict[str, str], now: dict[str, str]) -> str:
    """Return the settings that differ, such as ``train.steps=100 (now 200)``."""
    names = sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
    return "; ".join(f"{name}={before.get(name)} (now {now.get(name)})" for name in names)
