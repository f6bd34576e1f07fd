"""The callback that keeps a patch together with the checkpoints of a Trainer.

It has a module of its own, since the import of transformers' Trainer imports PEFT and the packages that PEFT finds.
That takes seconds, for which no other command should wait.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rope_patch.checkpoints.adapters import RECORD_FILE, check_adapters_in_model, write_patch_files
from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import PatchRecord, same_tables
from rope_patch.patching.verify import verify_model


def saved_folder(args: Any, state: Any) -> Path | None:
    """Return the folder that a Trainer has just saved; None if there is none.

    In a hyperparameter search it lies in the folder of a run.
    """
    name = f"checkpoint-{state.global_step}"
    root = Path(args.output_dir)
    folders = [*root.glob(name), *root.glob(f"run-*/{name}")]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


class RopePatchCallback(TrainerCallback, ExportableState):
    """Write ``rope_patch.json`` into every checkpoint a Trainer saves, after checking that the patch is still there.

    The record also goes into the Trainer's own state, so that a run is resumed only under the patch that it was begun
    with. ``trainer.save_model()`` calls no callback: save the final adapter with :func:`rope_patch.save`.

    Attributes:
        record: the record of the patch that the run was begun under, as a dict; None before training begins.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer stores of this callback in its checkpoints."""
        return {"args": {}, "attributes": {"record": self.record}}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Refuse to train a model whose patch is missing or altered, or not the one that the run was begun under.

        Raises:
            PatchError: the model is of this kind.
        """
        record = verify_model(model)
        check_adapters_in_model(model, record)  # now, and not after hours of training, when a checkpoint is saved
        if state.global_step:  # the run is resumed
            # A run that was begun without this callback has no entry, and Trainer looks for one when it saves.
            entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
            if isinstance(entry, list):
                entry = entry[-1]
            saved = entry["attributes"]["record"]
            if saved is None:
                warnings.warn("the checkpoint says nothing of a patch: was the run begun under this one?", stacklevel=2)
            else:
                begun = PatchRecord.from_dict(saved)
                if not same_tables(begun.tables, record.tables):
                    raise PatchError(
                        f"this run was begun under {begun.to_method()}, the model is patched with "
                        f"{record.to_method()}: patch it as before, or start a run of its own in another output_dir"
                    )
        self.record = record.to_dict()

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Write the record beside the weights of the checkpoint that was just saved."""
        if not state.is_world_process_zero:
            return
        if (folder := saved_folder(args, state)) is None:
            warnings.warn(f"found no checkpoint under {args.output_dir} to write {RECORD_FILE} into", stacklevel=2)
            return
        self.put_beside(model, folder)

    def put_beside(self, model: Any, folder: Path) -> None:
        """Write the record of a model into a checkpoint's folder, after checking the model and its adapters."""
        record = verify_model(model)
        check_adapters_in_model(model, record)
        write_patch_files(record, folder)
