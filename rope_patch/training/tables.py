"""Training a rotary table together with the weights."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import CONFIG_NAME

from rope_patch.checkpoints.adapters import RopePatchCallback, write_record
from rope_patch.modeling.trainable_table import TrainableTable
from rope_patch.patching.apply import apply
from rope_patch.patching.locate import PatchError, find_rotary
from rope_patch.patching.record import PatchRecord, same_tables
from rope_patch.patching.verify import verify_model

if TYPE_CHECKING:
    from rope_patch.training.recipe import RecipeOptions

TABLE_FILE = "rope_patch_table.safetensors"
"""Parameters of a table that is trained with the weights, in every checkpoint of such a run."""


def check_table(options: RecipeOptions) -> None:
    """Refuse a table that cannot be trained with these options, before anything is written.

    Raises:
        ValueError: a model whose weights are divided among processes.
    """
    if sharded():
        raise ValueError("patch.trainable needs whole models in every process, not FSDP or DeepSpeed")
    if not options.data.retrieval:
        warnings.warn(
            "patch.trainable on text alone: tables that were trained without prompts have lost retrieval; "
            "data.retrieval=0.2 adds retrieval prompts to the rows",
            stacklevel=2,
        )


def sharded() -> bool:
    """Return whether weights are divided among processes, as accelerate's environment variables say."""
    return any(os.environ.get(f"ACCELERATE_USE_{name}", "false") == "true" for name in ("FSDP", "DEEPSPEED"))


class TableTraining(RopePatchCallback):
    """Train the patch's table together with the weights of a run.

    A :class:`~rope_patch.modeling.trainable_table.TrainableTable` replaces the rotary module while the Trainer runs.
    Evaluations and the record of a checkpoint use the table as a patch, in the precision that a config can state; the
    float64 parameters are beside the record in ``TABLE_FILE``.

    Args:
        model: patched, bare or under PEFT.
        learning_rate: of the table's parameters, under the run's schedule.

    Raises:
        PatchError: the model is not patched.
        ValueError: a table in which every pair is unrotated.
    """

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model, self.learning_rate = model, learning_rate
        self.start = verify_model(model)
        self.site = find_rotary(model)
        self.current: nn.Module = self.site.module
        module: Any = self.site.module
        kinds = [kind for kind in module.tables if kind in self.start.layer_types]
        self.table = TrainableTable(module, kinds)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the trainable table in; at the end its values are the model's patch."""
        self.table.to(next(self.site.model.parameters()).device)
        self.site.put(self.table)
        try:
            yield
        except BaseException:
            with contextlib.suppress(FloatingPointError):  # that error has been raised already
                self.apply_current()
            raise
        self.apply_current()

    def apply_current(self) -> PatchRecord:
        """Make the current values of the table the model's patch.

        Raises:
            FloatingPointError: the values are not finite; the patch stays the previous one.
        """
        self.site.put(self.current)
        if not self.table.stateable():
            raise FloatingPointError("the trained table is no longer finite: use a lower patch.learning_rate")
        kinds = self.start.layer_types
        patch = apply(
            self.model,
            self.table.method(),
            layer_types=None if kinds == (None,) else tuple(map(str, kinds)),
            target_length=self.start.target_length,
            precision=self.start.precision,
            freeze_at=self.start.freeze_at,
            replace=True,
        )
        self.current = find_rotary(self.model).module
        return patch.record

    @contextlib.contextmanager
    def as_patch(self) -> Iterator[PatchRecord]:
        """Use the model with the current values of its table as its patch."""
        record = self.apply_current()
        try:
            yield record
        finally:
            self.site.put(self.table)

    def add_group(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the table's parameters a parameter group: their own learning rate, no weight decay."""
        own = [p for p in self.table.parameters() if p.requires_grad]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not any(p is other for other in own)]
        optimizer.add_param_group({"params": own, "lr": self.learning_rate, "weight_decay": 0.0})

    def put_beside(self, model: Any, folder: Path) -> None:
        """Write the record of the table's current values, and its parameters."""
        with self.as_patch() as record:
            write_record(record, folder)
            if (folder / CONFIG_NAME).is_file():  # of a whole model: it was written with an earlier state of the table
                self.site.model.config.save_pretrained(folder)
        state = {name: value.detach().cpu().contiguous() for name, value in self.table.state_dict().items()}
        save_file(state, folder / TABLE_FILE, metadata={"begun": json.dumps(self.start.to_dict())})

    def load(self, checkpoint: str | Path) -> None:
        """Load the table of a checkpoint.

        Raises:
            PatchError: its run started with another table, or trained none.
        """
        file = Path(checkpoint) / TABLE_FILE
        if not file.is_file():
            raise PatchError(f"{checkpoint} is of a run that trained no table: choose another output folder")
        with safe_open(file, framework="pt") as opened:
            start = PatchRecord.from_dict(json.loads(opened.metadata()["begun"]))
            if not same_tables(start.tables, self.start.tables):
                raise PatchError(f"{checkpoint} started with {start.to_method()}, not {self.start.to_method()}")
            self.table.load_state_dict({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Keep the record of the run's first table; ``load`` has compared it."""
        if state.global_step:
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.record = self.start.to_dict()

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Do nothing: ``put_beside`` has written the record."""
