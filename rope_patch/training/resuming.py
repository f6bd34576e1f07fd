"""Checkpoints that are complete at every moment, whenever a run is killed, and the latest one to resume from."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rope_patch.checkpoints.adapters import RopePatchCallback, read_record
from rope_patch.patching.locate import PatchError, find_rotary

STAGING = ".saving"
"""Folder beside the checkpoints in which a new one is written, and into which one is moved to be deleted."""

REPLACED = ".replaced"
"""Folder beside the checkpoints that holds an older one of the same step until the new one is in its place."""

_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")

# What a run cannot be resumed without, under the names that Trainer, FSDP and DeepSpeed (global_step*) use.
_REQUIRED: dict[str, tuple[str, ...]] = {
    "Trainer's state": (TRAINER_STATE_NAME,),
    "weights": (
        *("adapter_model.safetensors", "adapter_model.bin", "*/adapter_model.safetensors", "*/adapter_model.bin"),
        *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
        *("pytorch_model_fsdp.bin", "pytorch_model_fsdp_*/.metadata", "global_step*/*"),
    ),
    "optimizer state": ("optimizer.pt", "optimizer.bin", "optimizer_*/.metadata", "global_step*/*"),
    "scheduler state": ("scheduler.pt", "global_step*/*"),
    "state of the random numbers": ("rng_state.pth", "rng_state_*.pth"),
}


# --- reading ---------------------------------------------------------------------------------------------------------


def latest_checkpoint(folder: str | Path) -> Path | None:
    """Return the latest complete checkpoint of a run.

    A plain Trainer that is killed while it saves, or a copy that was cut short, leaves incomplete checkpoints: they are
    skipped, with a warning that says what is wrong.

    Args:
        folder: ``output_dir`` of the run.

    Returns:
        The complete ``checkpoint-N`` with the highest N; None if there is none, or no such folder.
    """
    candidates = _steps(Path(folder) / REPLACED) | _steps(Path(folder))
    for _, path in sorted(candidates.items(), reverse=True):
        problem = flaw(path)
        if problem is None:
            return path
        warnings.warn(f"skipped the broken checkpoint {path}: {problem}", stacklevel=2)
    return None


def flaw(checkpoint: str | Path) -> str | None:
    """Return why a run cannot be resumed from a checkpoint as if it had never stopped; None for a complete one.

    Nothing is unpickled and no tensor is read: JSON is parsed, a safetensors header says how long its file must be,
    and torch's files are zip archives, whose directory is at their end.

    Args:
        checkpoint: a folder that Trainer wrote.
    """
    folder = Path(checkpoint)
    for part, names in _REQUIRED.items():
        if not any(True for name in names for _ in folder.glob(name)):
            return f"it has no {part} ({names[0]})"
    for path in sorted(folder.rglob("*")):
        try:
            _check(path)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile, SafetensorError) as error:
            return f"{path.relative_to(folder)} is damaged ({error})"
    try:
        read_record(folder)
    except PatchError as error:
        return str(error)
    return None


def _check(path: Path) -> None:
    if path.suffix == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        if path.name == TRAINER_STATE_NAME and not isinstance(content["global_step"], int):
            raise ValueError("its global_step is no number")
        if path.name.endswith(".index.json"):
            missing = sorted({name for name in content["weight_map"].values() if not (path.parent / name).is_file()})
            if missing:
                raise ValueError(f"it names {', '.join(missing)}, not found here")
    elif path.suffix == ".safetensors":
        with safe_open(path, framework="pt"):
            pass
    elif path.suffix in (".pt", ".pth", ".bin") and path.is_file():
        with zipfile.ZipFile(path):
            pass


def _steps(folder: Path) -> dict[int, Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return {int(match[1]): path for path in paths if (match := _NAME.fullmatch(path.name)) and path.is_dir()}


# --- writing ---------------------------------------------------------------------------------------------------------


def publish(staged: Path, final: Path) -> None:
    """Turn a written folder into a checkpoint with one rename, after all its files are on the disk.

    A folder cannot be renamed onto another one. So an older checkpoint of the same step is in ``REPLACED`` between two
    renames; :func:`latest_checkpoint` finds it there, and :func:`tidy` moves it back.

    Args:
        staged: the folder with all files, on the same filesystem.
        final: ``checkpoint-N``.
    """
    for path in (*staged.rglob("*"), staged):
        _to_disk(path)
    aside = final.parent / REPLACED / final.name
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(exist_ok=True)
        os.replace(final, aside)
    os.replace(staged, final)
    _to_disk(final.parent)
    shutil.rmtree(aside.parent, ignore_errors=True)


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # not every network filesystem can flush a folder
            raise
    finally:
        os.close(handle)


def rotate(folder: Path, limit: int | None, keep: Collection[Path]) -> None:
    """Delete the oldest checkpoints beyond a limit.

    Each is renamed before its files are deleted, so that no incomplete checkpoint keeps its name.

    Args:
        folder: of the run.
        limit: number of checkpoints to keep, those of ``keep`` among them; None or 0 keeps all.
        keep: checkpoints that are not deleted.
    """
    checkpoints, protected = _steps(folder), {path.resolve() for path in keep}
    # By age first: a new run in an old folder counts its steps from 0.
    old = sorted(checkpoints, key=lambda step: (int(checkpoints[step].stat().st_mtime), step))
    old = [step for step in old if checkpoints[step].resolve() not in protected]
    excess = len(checkpoints) - limit if limit and limit > 0 else 0
    for step in old[: max(0, excess)]:
        deleted = folder / STAGING / f"deleted-{step}"
        deleted.parent.mkdir(exist_ok=True)
        os.replace(checkpoints[step], deleted)
    shutil.rmtree(folder / STAGING, ignore_errors=True)


def tidy(folder: Path) -> None:
    """Delete what a killed run left half written or half deleted, and move back what it was about to replace."""
    for path in _steps(folder / REPLACED).values():
        if not (folder / path.name).exists():
            os.replace(path, folder / path.name)
    for name in (STAGING, REPLACED):
        shutil.rmtree(folder / name, ignore_errors=True)


class WholeCheckpoints(Trainer):
    """A Trainer whose checkpoints appear in one rename, with everything in them.

    Trainer's own code writes them into ``STAGING``; the patch's record is added, all files are flushed to the disk, and
    the folder gets its name. So a run that is killed at any moment, also while it saves, leaves no broken checkpoint
    and loses only the steps since the last one. Two runs cannot use one ``output_dir`` at the same time.
    """

    _saving = False

    def train(
        self, resume_from_checkpoint: str | Path | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from the start or from a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint, or True for the latest complete one.
            trial: of a hyperparameter search.
            *args: as Trainer takes them.
            **kwargs: as Trainer takes them.

        Raises:
            ValueError: no complete checkpoint to resume from.
            PatchError: the checkpoint was trained under another patch than the model's.
        """
        run = Path(self._get_output_dir(trial))
        if self.args.should_save:
            tidy(run)
        self.accelerator.wait_for_everyone()
        resume: Any = resume_from_checkpoint or None
        if resume is True:
            resume = latest_checkpoint(str(self.args.output_dir))
            if resume is None:
                raise ValueError(f"found no complete checkpoint in {self.args.output_dir} to resume from")
        elif resume is not None and not Path(resume).exists() and Path(resume).parent == run / REPLACED:
            resume = run / Path(resume).name  # found before it was moved back
        if resume is not None:
            self._refuse_lost_patch(Path(resume))
        return super().train(None if resume is None else str(resume), trial, *args, **kwargs)

    def _refuse_lost_patch(self, checkpoint: Path) -> None:
        """Refuse an unpatched model for a patched run: it has no RopePatchCallback, which compares patches."""
        model: Any = self.model
        record = read_record(checkpoint) if checkpoint.is_dir() else None
        if record is not None and not self._guards() and find_rotary(model).record is None:
            raise PatchError(
                f"this run was started with the patch {record.to_method()}, and the model is not patched: apply that "
                "patch, or start another run in another output_dir"
            )

    def _guards(self) -> list[RopePatchCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, RopePatchCallback)]

    def _get_output_dir(self, trial: Any) -> str:
        folder: str = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._saving else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trained: Any = self.model
        run = Path(self._get_output_dir(trial))
        final = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        try:
            self._saving = True
            super()._save_checkpoint(model, trial)
            self._saving = False
            self.accelerator.wait_for_everyone()  # every process has written its part
            self._note_best(run, final)
            if self.args.should_save:
                staged = run / STAGING / final.name
                for guard in self._guards():
                    guard.put_beside(trained, staged)
                self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
                publish(staged, final)
                rotate(run, self.args.save_total_limit, self._protected(final))
        except BaseException:  # such as a full disk: delete what was written
            self._saving = False
            if self.args.should_save:
                shutil.rmtree(run / STAGING, ignore_errors=True)
            raise
        self.accelerator.wait_for_everyone()  # no process looks for the checkpoint before it exists
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

    def _note_best(self, run: Path, final: Path) -> None:
        """Set the path of the best checkpoint, which Trainer looked for in the staging folder it wrote to."""
        if self.state.best_global_step:
            best = run / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
            if best == final or best.is_dir():
                self.state.best_model_checkpoint = str(best)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._saving:  # an upload reads the folder during training: only after it has its name
            super()._push_from_checkpoint(checkpoint_folder)

    def _protected(self, *others: Path) -> set[Path]:
        best = self.state.best_model_checkpoint
        return {*others, Path(best)} if best is not None else set(others)

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Delete the last checkpoint in one rename where only the best one is kept; Trainer deletes it file by file."""
        run = Path(self._get_output_dir(trial))
        self._note_best(run, run)  # the folder may have moved since the last save
        best = self.state.best_model_checkpoint
        if self.args.should_save and best is not None and self.args.save_total_limit == 1 and flaw(best) is None:
            rotate(Path(self._get_output_dir(trial)), 1, self._protected())
        return super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]
