"""Save and load patched models and adapters so that the patch is never lost in silence."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.utils.hub import cached_file

from rope_patch.methods import MethodLike
from rope_patch.record import PatchRecord, same_tables
from rope_patch.sites import PatchError, find_rotary
from rope_patch.surgery import apply
from rope_patch.verification import verify

RECORD_FILE = "rope_patch.json"
ADAPTER_FILE = "adapter_config.json"


# --- writing ---------------------------------------------------------------------------------------------------------


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it: readers see the old content or the new, never a part.

    Raises:
        OSError: the folder cannot be written; nothing is left behind.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


# What an older checkpoint leaves in a folder that a loader would prefer to a model's new weights, or mix with them.
_STALE = ("model.safetensors*", "model-*-of-*.safetensors", "pytorch_model*.bin*", "adapter_model.*", ADAPTER_FILE)


@contextlib.contextmanager
def folder_in_one_move(out: str | Path) -> Iterator[Path]:
    """Give a temporary folder to fill; at the end it becomes ``out``, or vanishes after an error.

    A new ``out`` appears in one rename. Into a folder that exists, also a link or a mount point, the files are moved
    one by one after all are written, configs last. Before them, where a whole model is written, the weights and adapter
    of an older checkpoint are deleted: a loader would take them for the new ones. Other files stay.

    Raises:
        OSError: the place cannot be written.
    """
    out = Path(os.path.realpath(out))
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"{out} is a file: give a folder to save into")
    exists = out.is_dir()
    if exists and not os.access(out, os.W_OK):
        raise PermissionError(f"cannot write into {out}: choose another output folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = (out if exists else out.parent) / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
    temporary.mkdir()
    try:
        yield temporary
        if not exists:
            os.replace(temporary, out)
            return
        new = {path.name for path in temporary.iterdir()}
        if "config.json" in new:  # a whole model; an adapter leaves the base model beside it alone
            for stale in {path for pattern in _STALE for path in out.glob(pattern) if path.name not in new}:
                stale.unlink()
        for path in sorted(temporary.iterdir(), key=lambda p: (p.suffix == ".json", p.name)):
            if path.is_dir():
                shutil.copytree(path, out / path.name, dirs_exist_ok=True)
            else:
                os.replace(path, out / path.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save(model: nn.Module, out: str | Path, *, tokenizer: Any = None, **save_options: Any) -> Path:
    """Save a patched model or an adapter trained under a patch, with its record, atomically.

    A model's folder loads in plain transformers with equal logits. An adapter's folder says nothing about rotary
    embeddings by itself; ``rope_patch.json`` beside it does, and :func:`load` and :func:`load_adapter` read it.

    Args:
        model: a patched model of transformers, or a PEFT model over one.
        out: the folder. In one that exists, the weights of an older checkpoint are replaced and other files kept.
        tokenizer: saved beside it when given.
        **save_options: for ``save_pretrained``.

    Returns:
        The folder.

    Raises:
        PatchError: the model is not patched, or does not use what its record says.
        ValueError: ``push_to_hub``, which would upload before the folder is whole.
        OSError: the folder cannot be written, or the disk is full; ``out`` is then as it was.
    """
    if save_options.get("push_to_hub"):
        raise ValueError("save does not push: save first, then upload the folder (hf upload REPO FOLDER)")
    record = verify(model)
    if record.precision != "float32":
        warnings.warn(
            f"the angles of this model are computed in {record.precision}; no stock config can say so, and plain "
            "transformers will compute them in float32. rope_patch.load keeps it",
            stacklevel=2,
        )
    with folder_in_one_move(out) as folder:
        inner: Any = model if hasattr(model, "save_pretrained") else model.module  # DDP
        inner.save_pretrained(folder, **save_options)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        for path in (folder, *(file.parent for file in folder.glob(f"*/{ADAPTER_FILE}"))):  # adapters beyond the first
            write_record(record, path)
    return Path(out)


def write_record(record: PatchRecord, folder: str | Path) -> None:
    """Write ``rope_patch.json`` into a folder, atomically; one that says the same already is left alone."""
    path, text = Path(folder) / RECORD_FILE, json.dumps(record.to_dict(), indent=1) + "\n"
    if not path.is_file() or path.read_bytes() != text.encode():
        write_atomically(path, text)


class RopePatchCallback(TrainerCallback, ExportableState):
    """Write ``rope_patch.json`` into every checkpoint a Trainer saves, after checking that the patch is still there.

    The record also goes into the Trainer's own state, so that a run is only resumed under the patch it was begun with.
    ``trainer.save_model()`` fires no callback: save the final adapter with :func:`save`.
    """

    def __init__(self) -> None:
        self.record: dict[str, Any] | None = None

    def state(self) -> dict[str, Any]:
        """Return what the Trainer keeps of this callback in its checkpoints."""
        return {"args": {}, "attributes": {"record": self.record}}

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Refuse to train a model whose patch is missing or altered, or not the one that the run was begun under.

        Raises:
            PatchError: such a model.
        """
        record = verify(model)
        if state.global_step:  # resumed
            entry = state.stateful_callbacks.setdefault(type(self).__name__, self.state())  # Trainer looks for it
            entry = entry[-1] if isinstance(entry, list) else entry
            kept = entry["attributes"]["record"]
            begun = PatchRecord.from_dict(kept) if kept else None
            if begun is None:
                warnings.warn("the checkpoint says nothing of a patch: was the run begun under this one?", stacklevel=2)
            if begun is not None and not same_tables(begun.tables, record.tables):
                raise PatchError(
                    f"this run was begun under {begun.to_method()}, the model is patched with {record.to_method()}: "
                    "patch it as before, or start a run of its own in another output_dir"
                )
        self.record = record.to_dict()

    def on_save(self, args: Any, state: Any, control: Any, *, model: Any = None, **kwargs: Any) -> None:
        """Put the record beside the checkpoint's weights."""
        if not state.is_world_process_zero:
            return
        name, root = f"checkpoint-{state.global_step}", Path(args.output_dir)
        folders = [root / name] if (root / name).is_dir() else list(root.glob(f"run-*/{name}"))  # of a search
        if not folders:
            warnings.warn(f"found no {name} under {root} to write {RECORD_FILE} into", stacklevel=2)
            return
        self.put_beside(model, max(folders, key=lambda folder: folder.stat().st_mtime))

    def put_beside(self, model: Any, folder: Path) -> None:
        """Write the record of a model into a checkpoint's folder, after checking it."""
        write_record(verify(model), folder)


# --- reading ---------------------------------------------------------------------------------------------------------


def read_record(folder: str | Path) -> PatchRecord | None:
    """Return the record beside an adapter, or None where there is none.

    Raises:
        PatchError: a record that is broken, altered or from a newer version.
    """
    path = _find_file(folder, RECORD_FILE)
    if path is None:
        return None
    try:
        return PatchRecord.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        raise PatchError(f"{path}: {error}") from error


def _find_file(source: str | Path, name: str) -> Path | None:
    """A file of a folder or of a hub repository; None where it has none."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    with contextlib.suppress(OSError):
        found = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)
    return None


def is_adapter(source: str | Path) -> bool:
    """Tell whether a folder or hub id holds an adapter."""
    return _find_file(source, ADAPTER_FILE) is not None


def adapter_base(source: str | Path) -> str:
    """Return the folder or hub id of the model an adapter was trained on.

    Raises:
        PatchError: the adapter names none.
    """
    base = _adapter_config(source).base_model_name_or_path
    if not base:
        raise PatchError(f"{source}: its {ADAPTER_FILE} names no base model; load that and use load_adapter")
    return str(base)


def _adapter_config(source: str | Path) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_pretrained(str(source))


def load(
    source: str | Path,
    method: MethodLike | None = None,
    *,
    apply_options: dict[str, Any] | None = None,
    **from_pretrained: Any,
) -> PreTrainedModel | Any:
    """Load a model or an adapter with its patch in place and verified.

    Args:
        source: a folder or hub id: a model (patched or not), or an adapter with or without a record.
        method: a patch to apply to a model that has none.
        apply_options: options of :func:`rope_patch.apply` for ``method`` (``target_length``, ``layer_types`` …).
        **from_pretrained: for ``AutoModelForCausalLM.from_pretrained``; remote code is off unless asked for.

    Returns:
        The model; for an adapter, a ``PeftModel`` over its patched base.

    Raises:
        PatchError: the record does not fit what was loaded, or ``method`` meets a model that is patched already.
        OSError: nothing to load there; the message says what to do.
    """
    if is_adapter(source):
        base = adapter_base(source)
        record = read_record(source)
        revision = _adapter_config(source).revision
        if revision:
            from_pretrained.setdefault("revision", revision)  # of the base it was trained on
        if method is not None and record is not None:
            raise PatchError(f"{source} was trained under {record.to_method()}: load it without method=")
        model = _reaching_hub(base, lambda: AutoModelForCausalLM.from_pretrained(base, **from_pretrained))
        wanted = record or find_rotary(model).record  # an adapter's own patch may have replaced its base's
        if method is not None:
            apply(model, method, **(apply_options or {}))
        elif wanted is not None:
            reapply(model, wanted)
        else:
            warnings.warn(
                f"the adapter {source} carries no patch record: loaded onto the tables of its base model as they are",
                stacklevel=2,
            )
        return load_adapter(model, source)
    model = _reaching_hub(source, lambda: AutoModelForCausalLM.from_pretrained(str(source), **from_pretrained))
    own = find_rotary(model).record
    if method is not None:
        apply(model, method, **(apply_options or {}))
    elif own is not None:
        verify(model)  # what the stock loader built, before ours takes its place
        reapply(model, own)
    return model


def reapply(model: nn.Module, record: PatchRecord) -> None:
    """Apply what a record says to a model and check that the tables come out the same.

    Raises:
        PatchError: the model's base tables are not those the record was made on.
    """
    layer_types = None if record.layer_types == (None,) else tuple(str(kind) for kind in record.layer_types)
    patch = apply(
        model,
        record.to_method(),
        layer_types=layer_types,
        target_length=record.target_length,
        precision=record.precision,
        freeze_at=record.freeze_at,
        replace=True,
    )
    for name in ("base_tables", "tables"):
        wanted, got = getattr(record, name), getattr(patch.record, name)
        if not same_tables(wanted, got):
            patch.restore()
            raise PatchError(
                f"the record of {record.to_method()} was made on another model: its {name.replace('_', ' ')} "
                f"({_hashes(wanted)}) are not this model's ({_hashes(got)})"
            )


def _hashes(tables: Any) -> str:
    return ", ".join(f"{key} {table.hash}" for key, table in tables.items())


def load_adapter(model: nn.Module, adapter: str | Path, **peft_options: Any) -> Any:
    """Load an adapter onto a model in memory, after checking that both use the same rotary tables.

    Args:
        model: the base model, patched as the adapter's record says.
        adapter: folder or hub id of the adapter.
        **peft_options: for ``PeftModel.from_pretrained``.

    Returns:
        The ``PeftModel``.

    Raises:
        PatchError: the model is patched otherwise, or not at all, or is patched and the adapter was trained without.
    """
    from peft import PeftModel

    record, own = read_record(adapter), find_rotary(model).record
    if record is None:
        if own is not None:
            raise PatchError(
                f"the adapter {adapter} carries no patch record, but the model is patched with {own.to_method()}. If "
                "it was trained without a patch, restore the model first; if under this one, write the record with "
                "rope_patch.checkpoints.write_record"
            )
    else:
        if own is None:
            raise PatchError(
                f"the adapter {adapter} was trained under {record.to_method()}, and the model is not patched: "
                f"apply that first, or let rope_patch.load({str(adapter)!r}) do both"
            )
        if own.precision != record.precision or not same_tables(own.tables, record.tables):
            theirs, ours = (f"{r.to_method()} ({_hashes(r.tables)}, {r.precision})" for r in (record, own))
            raise PatchError(
                f"the adapter {adapter} was trained under {theirs}, and the model is patched with {ours}: restore it "
                "and apply the adapter's"
            )
        verify(model)
    return PeftModel.from_pretrained(model, str(adapter), **peft_options)


def load_config(source: str | Path, **options: Any) -> Any:
    """Return a checkpoint's config, from a folder or the hub; errors say what to do."""
    return _reaching_hub(source, lambda: AutoConfig.from_pretrained(str(source), **options))


def _reaching_hub(source: str | Path, load_it: Callable[[], Any]) -> Any:
    """Run a loader; turn its failures to reach a repository into one error that says what to do."""
    looks_local = Path(source).is_dir() or str(source).startswith((".", "/", "~"))
    if looks_local and not Path(source).is_dir():
        raise FileNotFoundError(f"no folder {source}")
    if Path(source).is_dir() and not (Path(source) / "config.json").is_file():
        raise FileNotFoundError(f"{source} has no config.json: it is not a Hugging Face checkpoint folder")
    try:
        return load_it()
    except SafetensorError as error:
        raise OSError(f"{source}: a weights file is truncated or damaged ({error}); copy it again") from error
    except OSError as error:
        if looks_local:
            raise
        hint = "check the name, or download it elsewhere and give the folder (HF_HUB_OFFLINE=1 works then)"
        if "gated" in str(error).lower() or "401" in str(error) or "403" in str(error):
            hint = f"accept the licence at https://huggingface.co/{source}, then run `hf auth login` or set HF_TOKEN"
        raise OSError(f"cannot load {source} from the hub: {hint}. ({str(error).splitlines()[0]})") from error
