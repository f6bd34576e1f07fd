"""Inspect and verify a model in memory, a checkpoint's or adapter's folder, or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from rope_patch.checkpoints.adapters import RECORD_FILE, is_adapter, read_record
from rope_patch.checkpoints.folder_patch import verify_folder
from rope_patch.checkpoints.model_without_weights import base_without_weights, model_without_weights
from rope_patch.gguf.patch import verify_gguf
from rope_patch.gguf.table import read_gguf
from rope_patch.patching.install import reapply
from rope_patch.patching.record import PatchRecord, TableRecord, hashes
from rope_patch.patching.verify import Inspection, inspect_model, shortened, verify_model
from rope_patch.runtime.folders import is_gguf


@dataclass(frozen=True, repr=False)
class Verification:
    """The result of a successful :func:`verify`; ``print`` shows the tables of the patch.

    Attributes:
        source: the class of the model, or the folder or file.
        record: the patch record.
    """

    source: str
    record: PatchRecord

    @property
    def method(self) -> str:
        """The method string of the patch."""
        return str(self.record.to_method())

    @property
    def tables(self) -> Mapping[str, TableRecord]:
        """Every table in use, by layer type (``"all"`` if there is one for all layers)."""
        return self.record.tables

    def __repr__(self) -> str:
        return f"<Verification of {self.source}: patched with {shortened(self.method)}, as recorded>"

    def __str__(self) -> str:
        return f"{self.source}: patched with {self.method}, as recorded (tables: {hashes(self.tables)})"


def inspect(source: nn.Module | str | Path) -> Inspection:
    """Return the rotary tables of a model, patched or not; ``print`` shows them.

    Of a folder only the config is read, and of a GGUF file its header, so it takes no longer for a large model.

    Args:
        source: a model of transformers, a folder or hub id, an adapter's folder (for the tables that the adapter is
            loaded onto), or a GGUF file.

    Raises:
        OSError: nothing can be read; the message says what to do.
        ValueError: there is no such folder, no checkpoint in it, or no rotary table in the model.
        PatchError: an adapter's record does not fit its base model.
    """
    if isinstance(source, nn.Module):
        return inspect_model(source)
    if is_gguf(source):
        return read_gguf(source)
    if not is_adapter(source):
        return inspect_model(model_without_weights(source))
    model = base_without_weights(source)
    record = read_record(source)
    if record is not None:
        reapply(model, record)
        return inspect_model(model)
    inspection = inspect_model(model)
    warning = f"the adapter {source} carries no {RECORD_FILE}: these are the tables of its base model"
    return replace(inspection, warnings=(*inspection.warnings, warning))


def verify(source: nn.Module | str | Path) -> Verification:
    """Check that a model really uses the tables that its patch record describes.

    The method is applied again to the base table, and the config is read as transformers alone would read it. The
    rotary module of a model in memory is called, and its cos and sin are compared. The weights files of a folder are
    checked to be whole, without loading them.

    Args:
        source: a model of transformers, a folder or hub id, an adapter's folder, or a GGUF file, whose keys and factors
            are compared.

    Raises:
        PatchError: there is no record, or any difference.
        OSError: the weights are damaged, or nothing can be read.
        ValueError: there is no such folder, or no checkpoint in it.
    """
    if isinstance(source, nn.Module):
        return Verification(type(source).__name__, verify_model(source))
    if is_gguf(source):
        return Verification(str(source), verify_gguf(source))
    return Verification(str(source), verify_folder(source))
