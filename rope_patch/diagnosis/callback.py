"""``RopeDoctorCallback`` checks the model, its reference and its checkpoints during training, as ``doctor`` does."""

from __future__ import annotations

import warnings
from typing import Any

from transformers import TrainerCallback

from rope_patch.checkpoints.callback import saved_folder
from rope_patch.diagnosis.check import DIFFERS, UNKNOWN, Diagnosis
from rope_patch.diagnosis.doctor import doctor
from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import records_of, same_tables
from rope_patch.runtime.errors import in_one_line


class RopeDoctorCallback(TrainerCallback):
    """Run :func:`rope_patch.doctor` on the model of a Trainer at the start, at each save and at the end of training.

    At each save the main process also checks the saved folder, whose table must be that of the model. If something
    cannot be checked, it gives a warning.

    Args:
        action: what happens if a check differs: ``"raise"`` stops the training, ``"warn"`` lets it go on.
        ref_model: the reference model of a TRL trainer, whose table must be that of the model. It is known only when
            the trainer is built: ``trainer.add_callback(RopeDoctorCallback(ref_model=trainer.ref_model))``.

    Raises:
        ValueError: ``action`` is neither.
    """

    def __init__(self, action: str = "raise", *, ref_model: Any = None) -> None:
        if action not in ("raise", "warn"):
            raise ValueError(f"action must be 'raise' or 'warn', got {action!r}")
        self.action = action
        self.ref_model = ref_model

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Check the model and its reference.

        Raises:
            PatchError: a check differs.
        """
        self._model_and_reference(model)

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Check the model, its reference and, in the main process, the saved folder.

        Raises:
            PatchError: a check differs.
        """
        own = self._model_and_reference(model)
        if state.is_world_process_zero and (folder := saved_folder(args, state)) is not None:
            self._compare(
                f"the checkpoint {folder}",
                folder,
                own,
                "what loads it uses another table than the one trained under: add RopePatchCallback()",
            )

    on_train_end = on_train_begin

    def _model_and_reference(self, model: Any) -> Diagnosis:
        own = doctor(model)
        self._judge("the model", own)
        if self.ref_model is not None:
            self._compare(
                "the reference model",
                self.ref_model,
                own,
                "TRL loads it by the name in the config of the model. Save the patched model and train "
                "rope_patch.load(FOLDER), or pass that as ref_model= to the trainer",
            )
        return own

    def _compare(self, what: str, source: Any, own: Diagnosis, fix: str) -> None:
        try:
            other = doctor(source)
        except (OSError, ValueError) as error:  # the sharded checkpoint of FSDP has no config
            self._report(f"{what} cannot be checked: {in_one_line(error)}", differs=False)
            return
        self._judge(what, other)
        if other.tables and not same_tables(records_of(own.tables), records_of(other.tables)):
            self._report(f"{what} has another rotary table than the model: {fix}", differs=True)

    def _judge(self, what: str, diagnosis: Diagnosis) -> None:
        differing = diagnosis.found(DIFFERS)
        wrong = differing or diagnosis.found(UNKNOWN)
        if wrong:
            self._report("\n".join([f"{what}: {diagnosis.verdict}", *map(str, wrong)]), differs=bool(differing))

    def _report(self, message: str, *, differs: bool) -> None:
        if differs and self.action == "raise":
            raise PatchError(message)
        warnings.warn(message, stacklevel=2)
