"""The table of a run: fitted before the weights are trained, or trained together with them."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import CONFIG_NAME

from rope_patch.checkpoints.adapters import RopePatchCallback, read_record, write_record
from rope_patch.files import write_atomically
from rope_patch.fitting import Constraint, Objective, Schedule, TrainableTable, fit, held_out_spec
from rope_patch.fitting.rows import LIMIT, VALIDATION
from rope_patch.methods import Method
from rope_patch.patching.apply import apply
from rope_patch.patching.locate import PatchError, find_rotary
from rope_patch.patching.record import PatchRecord, same_tables
from rope_patch.patching.verify import verify_model
from rope_patch.training.options import FIT, Options
from rope_patch.training.sources import open_source, plain_texts

TABLE_FILE = "rope_patch_table.safetensors"
"""Parameters of a table that is trained with the weights, in every checkpoint of such a run."""
FITTED, JOURNAL = "fit.json", "fit.jsonl"
"""What came of a fit, and its finished parts, in the ``work`` of a run."""
CHARACTERS, PER_TOKEN = 8_000_000, 6
"""Read of a run's text to fit a table to, at least; and what a token of the held-out windows is taken to need."""


# --- before the weights ----------------------------------------------------------------------------------------------


def check_table(model: Any, options: Options) -> None:
    """Refuse a table that cannot be fitted or trained on this model, before anything is written.

    Raises:
        PatchError: the model is patched already, or the start does not fit it.
        ValueError: a model whose weights are divided among processes.
    """
    if sharded():
        raise ValueError(
            "patch.method=fit and patch.trainable need whole models in every process, not FSDP or DeepSpeed: fit with "
            "`rope-patch fit` first, and train the folder it writes"
        )
    patch = options.patch
    if patch.trainable and not options.data.retrieval:
        warnings.warn(
            "patch.trainable on text alone: tables trained so have lost retrieval; data.retrieval=0.2 mixes prompts in",
            stacklevel=2,
        )
    if patch.method != FIT:
        return
    shared: dict[str, Any] = {"layer_types": patch.layer_types, "freeze_at": patch.freeze_at, "replace": patch.replace}
    for start in options.fit.init.split():
        apply(model, start, target_length=options.target_length, **shared).restore()


def sharded() -> bool:
    """Whether weights are divided among processes: what accelerate was told."""
    return any(os.environ.get(f"ACCELERATE_USE_{name}", "false") == "true" for name in ("FSDP", "DEEPSPEED"))


def fit_table(model: Any, tokenizer: Any, options: Options, work: Path) -> Method:
    """Fit the table of a run to its own text; the model is left as it was, weights and table.

    Args:
        model: bare, on any device; moved to this process's own.
        tokenizer: of it.
        options: ``fit`` and ``patch`` are read, and of ``data`` where the text comes from.
        work: folder in which finished parts are kept, and what was found is written.

    Returns:
        The table, as a method.
    """
    asked, patch = options.fit, options.patch
    needed = round(PER_TOKEN * asked.windows * options.target_length / VALIDATION)
    text = _first(
        min(LIMIT, max(CHARACTERS, needed)),
        plain_texts(tokenizer, open_source(options.data, options.train.seed), options.data),
    )
    device = PartialState().device
    if options.model.quantization == "none":
        model.to(device)
    found = fit(
        model,
        tokenizer,
        list(text),
        target_length=options.target_length,
        init=asked.init.split(),
        objective=Objective(asked.retrieval, asked.task),
        constraint=Constraint(asked.band, asked.monotone, asked.curve, asked.scaling),
        schedule=Schedule(
            steps=asked.steps,
            batch_tokens=asked.batch_tokens,
            learning_rate=asked.learning_rate,
            checkpointing=options.train.checkpointing,
            seed=options.train.seed,
        ),
        spec=held_out_spec(
            model,
            options.target_length,
            task=asked.task,
            seed=options.train.seed,
            freeze_at=patch.freeze_at,
            windows=asked.windows,
            samples=asked.samples,
        ),
        layer_types=patch.layer_types,
        freeze_at=patch.freeze_at,
        replace=patch.replace,
        resume=work / JOURNAL,
    )
    found.restore()
    if PartialState().is_main_process:
        write_atomically(work / FITTED, json.dumps(found.to_dict(), indent=1, allow_nan=False))
    return found.method


def _first(characters: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


def begun_with(checkpoint: Path) -> Method:
    """Return the table that the run of a checkpoint was begun with.

    Raises:
        PatchError: the checkpoint says nothing of it.
    """
    file = checkpoint / TABLE_FILE
    if file.is_file():
        with safe_open(file, framework="pt") as opened:
            return PatchRecord.from_dict(json.loads(opened.metadata()["begun"])).to_method()
    record = read_record(checkpoint)
    if record is None:
        raise PatchError(f"{checkpoint} carries no patch record")
    return record.to_method()


# --- with the weights ------------------------------------------------------------------------------------------------


class TableTraining(RopePatchCallback):
    """Train the patch's table with whatever else a run trains.

    A :class:`~rope_patch.fitting.TrainableTable` stands in for the rotary embedding while the Trainer is at work. What
    is judged, and what a checkpoint's record says, is the table as a patch in the form that a config can state; the
    parameters are beside it in ``TABLE_FILE``.

    Args:
        model: patched, bare or under PEFT.
        learning_rate: of the table's parameters, under the run's schedule.

    Raises:
        PatchError: the model is not patched.
        ValueError: a table in which nothing moves.
    """

    def __init__(self, model: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model, self.learning_rate = model, learning_rate
        self.begun = verify_model(model)
        self.site = find_rotary(model)
        self.settled: nn.Module = self.site.module
        start: Any = self.site.module
        self.table = TrainableTable(start, [kind for kind in start.tables if kind in self.begun.layer_types],
                                    Constraint())  # fmt: skip

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the table trained; at the end what it has become is the model's patch."""
        self.table.to(next(self.site.model.parameters()).device)
        self.site.put(self.table)
        try:
            yield
        except BaseException:
            with contextlib.suppress(FloatingPointError):  # it has said why
                self.settle()
            raise
        self.settle()

    def settle(self) -> PatchRecord:
        """Make what the table has become the model's patch.

        Raises:
            FloatingPointError: it has become none; the patch is the one before.
        """
        self.site.put(self.settled)
        if not self.table.stateable():
            raise FloatingPointError("the trained table is no longer finite: take a lower patch.learning_rate")
        kinds = self.begun.layer_types
        made = apply(
            self.model,
            self.table.method(),
            layer_types=None if kinds == (None,) else tuple(map(str, kinds)),
            target_length=self.begun.target_length,
            precision=self.begun.precision,
            freeze_at=self.begun.freeze_at,
            replace=True,
        )
        self.settled = find_rotary(self.model).module
        return made.record

    @contextlib.contextmanager
    def as_it_is(self) -> Iterator[PatchRecord]:
        """Look at the model under what its table has become."""
        record = self.settle()
        try:
            yield record
        finally:
            self.site.put(self.table)

    def groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the table's parameters a group of their own: its learning rate, no weight decay."""
        own = [p for p in self.table.parameters() if p.requires_grad]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if not any(p is mine for mine in own)]
        optimizer.add_param_group({"params": own, "lr": self.learning_rate, "weight_decay": 0.0})

    def put_beside(self, model: Any, folder: Path) -> None:
        """Write the record of the table as it is, and its parameters."""
        with self.as_it_is() as record:
            write_record(record, folder)
            if (folder / CONFIG_NAME).is_file():  # of a whole model: it was written under the table of the last look
                self.site.model.config.save_pretrained(folder)
        state = {name: value.detach().cpu().contiguous() for name, value in self.table.state_dict().items()}
        save_file(state, folder / TABLE_FILE, metadata={"begun": json.dumps(self.begun.to_dict())})

    def take_up(self, checkpoint: str | Path) -> None:
        """Go on with the table of a checkpoint.

        Raises:
            PatchError: it was begun with another table, or trained none.
        """
        file = Path(checkpoint) / TABLE_FILE
        if not file.is_file():
            raise PatchError(f"{checkpoint} is of a run that trained no table: choose another output")
        with safe_open(file, framework="pt") as opened:
            begun = PatchRecord.from_dict(json.loads(opened.metadata()["begun"]))
            if not same_tables(begun.tables, self.begun.tables):
                raise PatchError(f"{checkpoint} was begun with {begun.to_method()}, not {self.begun.to_method()}")
            self.table.load_state_dict({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Keep what the run was begun under; ``take_up`` has compared it."""
        if state.global_step:
            state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        self.record = self.begun.to_dict()

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Nothing: ``put_beside`` has written it."""
