"""Patch, verify and restore checkpoint folders by their config alone; weights are copied, never loaded."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
from transformers import PreTrainedModel

from rope_patch.checkpoints.adapters import ADAPTER_FILE, RECORD_FILE, check_adapter_tensors, read_record
from rope_patch.checkpoints.load_gguf import unpack
from rope_patch.checkpoints.model_without_weights import base_without_weights, model_without_weights
from rope_patch.checkpoints.tokenizer_length import check_length, raise_length, restore_length, stated_length
from rope_patch.checkpoints.weight_files import check_weights, wrong_tensors
from rope_patch.methods import MethodLike
from rope_patch.patching.install import Patch, apply, reapply, restore
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.older_keys import add_older_keys
from rope_patch.patching.record import PatchRecord
from rope_patch.patching.verify import verify_model
from rope_patch.runtime import progress
from rope_patch.runtime.errors import in_one_line
from rope_patch.runtime.folders import folder_in_one_move, holds_files, is_gguf, link_or_copy, real_path

# The config is written anew. A record, and what export.json says, are about the folder that they are in.
_NOT_COPIED = ("config.json", RECORD_FILE, "export.json")
EXTEND_RECORD = "rope_patch_extend.json"
"""The file in which ``extend`` records its choice."""
BASE_CARD = "BASE_README.md"
"""The file in which ``extend`` keeps the card of the checkpoint that it extends, beside its own."""
TERMS = (
    "*[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*",
    "*[Nn][Oo][Tt][Ii][Cc][Ee]*",
    "*[Tt][Ee][Rr][Mm][Ss]*",
    "*[Uu][Ss][Ee]_[Pp][Oo][Ll][Ii][Cc][Yy]*",
)
"""Patterns of the names of files that hold the terms of a model, in capitals or not."""
_FROM_HUB = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]


def patch_folder(
    source: str | Path,
    method: MethodLike,
    out: str | Path,
    *,
    overwrite: bool = False,
    **options: Any,
) -> Patch:
    """Write a copy of a checkpoint with a patched config; its weights are the same bytes.

    The weights of a GGUF file are dequantized to float32; :func:`~rope_patch.gguf.patch.patch_gguf` writes
    another GGUF file.

    Args:
        source: folder or hub id of the checkpoint, or a GGUF file.
        method: the method that is applied, in any form that :func:`rope_patch.apply` takes.
        out: the folder that is written; it must be new or empty unless ``overwrite`` is set.
        overwrite: whether to write into a folder that holds files.
        **options: options of :func:`rope_patch.apply`.

    Returns:
        The patch.

    Raises:
        ValueError: the method or an option is wrong, or ``out`` is in the way.
        OSError: the source cannot be read, its weights are damaged, or ``out`` cannot be written.
    """
    model = model_without_weights(source)
    patch = apply(model, method, **options)
    _write_patched(model, patch.record, source, out, overwrite)
    return patch


def repair_folder(source: str | Path, out: str | Path) -> PatchRecord:
    """Write a copy of a patched checkpoint with the config that its patch record describes.

    Args:
        source: folder or hub id of a patched checkpoint whose rotary settings were changed after the patch.
        out: the folder that is written; it must be new or empty.

    Returns:
        The record.

    Raises:
        PatchError: the checkpoint carries no record, or one that was altered itself.
        ValueError: the source is a GGUF file.
        FileExistsError: ``out`` holds files.
        OSError: the source cannot be read, its weights are damaged, or ``out`` cannot be written.
    """
    if holds_files(Path(out)):
        raise FileExistsError(f"{out} is not empty: give a new folder")
    model, record = _before_patch(source)
    reapply(model, record)
    _write_patched(model, record, source, out)
    return record


def _before_patch(source: str | Path) -> tuple[PreTrainedModel, PatchRecord]:
    """Return a patched checkpoint's model without weights, as it was before the patch, and the record of the patch."""
    if is_gguf(source):
        raise ValueError(
            f"{source} is a GGUF file, and a patch of such a file is a copy: use the file from before the patch"
        )
    # Unchecked, since the record alone decides, whatever the other keys of the config say.
    model = model_without_weights(source, checked=False)
    record = locate(model).record
    restore(model)  # raises where there is no record
    assert record is not None
    return model, record


def _write_patched(
    model: PreTrainedModel,
    record: PatchRecord,
    source: str | Path,
    out: str | Path,
    overwrite: bool = False,
) -> None:
    """Write a copy of a checkpoint with the config of a patched model, as :func:`patch_folder` does."""
    with copy_with_new_config(source, out, overwrite=overwrite) as folder:
        model.config.save_pretrained(folder)
        add_older_keys(folder)
        raise_length(folder, record)
        # Verified while it has a temporary name, so that `out` is never a folder that fails.
        verify_folder(folder)


def restore_folder(source: str | Path, out: str | Path, *, overwrite: bool = False) -> None:
    """Write a copy of a patched checkpoint as it was before the patch, with the keys that transformers 4 reads.

    Args:
        source: folder or hub id of the patched checkpoint.
        out: the folder that is written; it must be new or empty unless ``overwrite`` is set.
        overwrite: whether to write into a folder that holds files.

    Raises:
        PatchError: the checkpoint carries no record, or the record or the tokenizer's settings hold more than a patch
            changes.
        ValueError: the source is a GGUF file, or ``out`` is in the way.
        OSError: the source cannot be read, its weights are damaged, or ``out`` cannot be written.
    """
    model, _ = _before_patch(source)
    stated_length(Path(source))  # settings that cannot be restored raise before the copy
    with copy_with_new_config(source, out, overwrite=overwrite) as folder:
        model.config.save_pretrained(folder)
        add_older_keys(folder, failing=False)  # which most checkpoints on the hub have
        restore_length(folder)
        if (folder / EXTEND_RECORD).exists():  # what extend wrote is of the patched model
            for name in (EXTEND_RECORD, "extend.yaml", "report.html", "README.md"):
                (folder / name).unlink(missing_ok=True)
            if (folder / BASE_CARD).is_file():
                (folder / BASE_CARD).rename(folder / "README.md")


def verify_folder(source: str | Path) -> PatchRecord:
    """Check a patched checkpoint or an adapter: its record, the config as transformers reads it, and whole weights.

    Raises:
        PatchError: there is no record, the tables differ from it, or the tokenizer cuts texts below the stated context.
        ValueError: the tensors of an adapter do not fit its base.
        OSError: the weights are damaged, tensors are not the model's, or nothing can be loaded.
    """
    folder = Path(source)
    if (folder / ADAPTER_FILE).is_file():
        record = read_record(source)
        if record is None:
            raise PatchError(f"the adapter {source} carries no {RECORD_FILE}: it was saved without its patch")
        model = base_without_weights(source)
        reapply(model, record)
        check_adapter_tensors(source, model)
    else:
        model = model_without_weights(source)
        record = verify_model(model)
        if folder.is_dir():
            check_weights(folder)
            wrong = wrong_tensors(folder, model)
            if wrong:
                raise OSError(
                    f"the weights files are not those of {type(model).__name__}: {wrong}. Is config.json the config of "
                    "another model?"
                )
    check_length(folder, record)
    return record


def check_new_folder(source: str | Path, out: str | Path, overwrite: bool) -> None:
    """Raise where the folder of a new checkpoint is in the way, before anything is loaded.

    Raises:
        ValueError: it is the checkpoint ``source`` itself, or named as a GGUF file.
        FileExistsError: it holds files, and ``overwrite`` is not set.
        FileNotFoundError: its path leads through a folder that does not exist.
    """
    if Path(source).resolve() == real_path(out):
        raise ValueError(f"{out} is the checkpoint itself: give another output folder")
    if is_gguf(out):
        raise ValueError(
            f"a folder is written, got {str(out)!r}: rope-patch export --to gguf --converter PATH makes a file of it"
        )
    if holds_files(Path(out)) and not overwrite:
        raise FileExistsError(f"{out} is not empty: give a new folder, or allow overwriting (--force)")


def card_and_terms(source: str | Path) -> Path:
    """Return a folder that holds the card and the terms of a checkpoint, as far as they can be had.

    Of a repository of the hub it is the one in the local cache, into which they are fetched if the hub can be reached.
    """
    if Path(source).exists():
        return Path(source)
    try:
        return Path(huggingface_hub.snapshot_download(str(source), allow_patterns=["README.md", BASE_CARD, *TERMS]))
    except Exception as error:  # whatever it is, a long run must not fail because of a card
        progress.say(f"the card and the terms of {source} are not copied, or not all: {in_one_line(error)}")
        return Path(getattr(error, "snapshot_path", source))  # what is there of an incomplete one


@contextlib.contextmanager
def copy_with_new_config(
    source: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    dtype: str = "float32",
    link_weights: bool = False,
) -> Iterator[Path]:
    """Yield a folder with a copy of a checkpoint's files, without its config and patch record, that becomes ``out``.

    Args:
        source: folder, hub id or GGUF file.
        out: the folder that is written, as for :func:`patch_folder`; nothing is left there if the block raises.
        overwrite: whether to write into a folder that holds files.
        dtype: data type of the weights of a GGUF file, which are dequantized.
        link_weights: whether to link the safetensors files instead, for a program that only reads them.

    Raises:
        ValueError: ``out`` is in the way.
        OSError: the source cannot be read, its weights are damaged, or ``out`` cannot be written.
    """
    check_new_folder(source, out, overwrite)
    with folder_in_one_move(out, overwrite=overwrite) as folder:
        if is_gguf(source):
            unpack(Path(source), folder, dtype)
            yield folder
            return
        if not Path(source).is_dir():
            card_and_terms(source)
            source = huggingface_hub.snapshot_download(str(source), allow_patterns=_FROM_HUB)
        check_weights(Path(source))
        for path in sorted(Path(source).iterdir()):
            if path.name.startswith("."):  # it belongs to git or to the hub's client
                continue
            if path.is_dir():
                progress.say(f"the subfolder {path.name} is not copied")
            elif path.is_file() and path.name not in _NOT_COPIED:
                progress.say(f"copying {path.name}")
                if link_weights and path.suffix == ".safetensors":
                    link_or_copy(path, folder / path.name)
                else:
                    shutil.copyfile(path, folder / path.name)
        yield folder
