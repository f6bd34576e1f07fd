"""The callback that keeps a patch together with the checkpoints of a Trainer.

It has a module of its own, since the import of transformers' Trainer imports PEFT and the packages that PEFT finds.
That takes seconds, for which no other command should wait.
"""

from __future__ import annotations

import functools
import math
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from rope_patch.checkpoints.adapters import RECORD_FILE, check_adapters_in_model, saved_module, write_patch_files
from rope_patch.checkpoints.tokenizer_length import FOUND_KEY, LENGTH_KEY
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


def _save_with_record(model: Any, save_directory: str | Path, *args: Any, **options: Any) -> None:
    """Call ``save_pretrained`` of a model, and write its record beside, in the process that writes the weights."""
    writes = options.get("is_main_process", True)
    if writes:
        record = verify_model(model)
        folder = Path(save_directory)
        check_adapters_in_model(model, record)
        if not (folder / RECORD_FILE).exists():  # so that a kill leaves no adapter without a record
            folder.mkdir(parents=True, exist_ok=True)
            write_patch_files(record, model, folder)
    type(model).save_pretrained(model, save_directory, *args, **options)
    if writes:
        write_patch_files(record, model, folder)


class RopePatchCallback(TrainerCallback, ExportableState):
    """Write ``rope_patch.json`` beside everything a Trainer saves, after checking that the patch is still there.

    From the start of the training on ``save_pretrained`` of the model itself writes it, so that checkpoints have it and
    what ``trainer.save_model()`` writes, which calls no callback; and the tokenizer cuts texts at the context that the
    patch states. The record also goes into the Trainer's own state, so that a run is resumed only under the patch that
    it was begun with.

    Attributes:
        record: the record of the patch that the run was begun under, as a dict; None before training begins.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return the state that the Trainer stores of this callback in its checkpoints."""
        return {"args": {}, "attributes": {"record": self.record}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, processing_class: Any = None, **kwargs: Any
    ) -> None:
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
                warnings.warn(
                    "the checkpoint does not say under which patch it was trained: was it the current patch?",
                    stacklevel=2,
                )
            else:
                begun = PatchRecord.from_dict(saved)
                if not same_tables(begun.tables, record.tables):
                    raise PatchError(
                        f"this run was begun under {begun.to_method()}, the model is patched with "
                        f"{record.to_method()}: patch it as before, or start a new run in another output_dir"
                    )
        self.record = record.to_dict()
        inner = saved_module(model)
        inner.save_pretrained = functools.partial(_save_with_record, inner)  # which a copy or pickle of the model keeps
        # It is saved after the model, so that nothing could raise its length then. A processor holds one.
        tokenizer = getattr(processing_class, "tokenizer", processing_class)
        own = getattr(tokenizer, LENGTH_KEY, math.inf)
        if own < (record.target_length or 0):
            tokenizer.init_kwargs.setdefault(FOUND_KEY, {LENGTH_KEY: own})
            tokenizer.model_max_length = record.target_length
