"""Adapters and their patch records, on the disk, in memory and in a Trainer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from rope_patch.checkpoints.tokenizer_length import raise_length
from rope_patch.checkpoints.weight_files import in_words, outlines
from rope_patch.patching.locate import PatchError
from rope_patch.patching.older_keys import add_older_keys
from rope_patch.patching.probe import copy_without_weights
from rope_patch.patching.record import PatchRecord, hashes, same_tables
from rope_patch.patching.verify import shortened
from rope_patch.runtime.errors import as_value_error, read_json
from rope_patch.runtime.folders import check_source, is_gguf, write_atomically

RECORD_FILE = "rope_patch.json"
CONFIG_FILE = "config.json"
ADAPTER_FILE = "adapter_config.json"
CARD_FILE = "README.md"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
WEIGHTS_KEY = "adapter_weights"
"""Key in ``rope_patch.json`` of the hash of the adapter's weights to which the record belongs."""


def write_record(record: PatchRecord, folder: str | Path) -> None:
    """Write ``rope_patch.json`` into a folder, atomically.

    If the folder holds an adapter, the record is tied to its weights by a hash, so that it is refused beside weights
    that somebody saves there later.
    """
    folder = Path(folder)
    data = record.to_dict()
    if (weights := _adapter_weights(folder)) is not None:
        data[WEIGHTS_KEY] = file_hash(weights)
    write_atomically(folder / RECORD_FILE, json.dumps(data, indent=1) + "\n")


def write_patch_files(record: PatchRecord, model: nn.Module, folder: Path, beside: Path | None = None) -> None:
    """Write a record beside a checkpoint and every adapter in it, and bring the checkpoint's other files into line.

    The config gets the keys that transformers 4 reads, and the tokenizer the context that the patch states.

    Args:
        record: the patch record of the model.
        model: the model that was saved, whose adapters are in the folder. Others in it may have other records.
        folder: the folder of the checkpoint.
        beside: the folder that it will be moved over, if there is one.
    """
    # PEFT writes every adapter but the one named "default" into a subfolder.
    for name in ("", *getattr(saved_module(model), "peft_config", ())):
        path = folder / name
        if path.is_dir():
            write_record(record, path)
            _note_in_card(record, path)
    if (folder / CONFIG_FILE).is_file():
        add_older_keys(folder)
    raise_length(folder, record, beside)


_NOTE = "> **Rotary patch:**"
"""The beginning of the line that is added to a model card."""


def _note_in_card(record: PatchRecord, folder: Path) -> None:
    """Say in an adapter's model card, which PEFT writes, under which patch it was trained and how it is loaded."""
    card = folder / CARD_FILE
    if not (folder / ADAPTER_FILE).is_file() or not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    header = re.match(r"---\n.*?\n---\n", text, re.DOTALL)
    start = header.end() if header else 0
    body = "\n".join(line for line in text[start:].splitlines() if not line.startswith(_NOTE)).strip("\n")
    note = (
        f"{_NOTE} this adapter was trained under `{shortened(str(record.to_method()))}`. Load it with "
        '`rope_patch.load("FOLDER")`: PEFT alone puts it on the wrong rotary table.'
    )
    write_atomically(card, f"{text[:start]}\n{note}\n\n{body}\n")


def _adapter_weights(source: str | Path, **hub: Any) -> Path | None:
    paths = (find_file(source, name, **hub) for name in ADAPTER_WEIGHTS)
    return next(filter(None, paths), None)


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_record(folder: str | Path, **hub: Any) -> PatchRecord | None:
    """Return the record beside an adapter, or None if there is none.

    Args:
        folder: folder or hub id of the adapter.
        **hub: options of a hub repository, as loaders take them: ``subfolder``, ``revision``, ``token`` …

    Raises:
        PatchError: the record is broken, altered, from a newer version, or belongs to other weights than the adapter's.
    """
    path = find_file(folder, RECORD_FILE, **hub)
    if path is None:
        return None
    try:
        data = read_json(path)
    except OSError as error:
        raise PatchError(str(error)) from error
    try:
        tied = data.pop(WEIGHTS_KEY, None)
        record = PatchRecord.from_dict(data)
        weights = _adapter_weights(folder, **hub)
        if weights is not None and tied != file_hash(weights):
            raise ValueError(
                f"this record of {record.to_method()} does not belong to the adapter beside it: its weights were "
                "saved here later, without rope_patch. If they were trained without a patch, delete the record. If "
                "they were trained under this one, put them on the patched model with PEFT, and save that: "
                "rope_patch.save(peft_model, FOLDER, trust_adapters=['default'])"
            )
        return record
    except (ValueError, OSError) as error:
        raise PatchError(f"{path}: {error}") from error


HUB_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download", "proxies")


def find_file(source: str | Path, name: str, **hub: Any) -> Path | None:
    """Return the path of a file of a folder or hub repository; None if there is none, or the hub cannot be reached.

    Args:
        source: a folder, hub id or GGUF file.
        name: the name of the file.
        **hub: options of a loader; those that do not concern the hub are ignored.

    Raises:
        ValueError: ``source`` is neither a folder nor the name of a repository.
    """
    if Path(source).is_dir():
        path = Path(source, hub.get("subfolder") or "", name)
        return path if path.is_file() else None
    check_source(source)
    if is_gguf(source):
        return None
    options = {key: value for key, value in hub.items() if key in HUB_OPTIONS}
    # A repository that cannot be reached counts as one without the file: the loader then says what is wrong.
    with contextlib.suppress(OSError):
        cached = cached_file(str(source), name, _raise_exceptions_for_missing_entries=False, **options)
        return None if cached is None else Path(cached)
    return None


def check_adapter_tables(adapter: str | Path, record: PatchRecord | None, own: PatchRecord | None) -> None:
    """Raise PatchError unless an adapter was trained under the tables of the model that it is loaded onto.

    Args:
        adapter: folder or hub id of the adapter, for the message.
        record: the adapter's record; None if it carries none.
        own: the model's record; None if it is not patched.

    Raises:
        PatchError: only one of them has a record, or their tables differ.
    """
    if record is None:
        if own is not None:
            raise PatchError(
                f"the adapter {adapter} carries no patch record, but the model is patched with {own.to_method()}. If "
                "it was trained without a patch, restore the model first. If it was trained under this one, put it "
                "on the model with PEFT, and save that: rope_patch.save(peft_model, FOLDER, "
                "trust_adapters=['default'])"
            )
    elif own is None:
        raise PatchError(
            f"the adapter {adapter} was trained under {record.to_method()}, and the model is not patched: apply that "
            f"method first, or let rope_patch.load({str(adapter)!r}) do both"
        )
    elif not same_tables(own.tables, record.tables):
        theirs, ours = (f"{r.to_method()} ({hashes(r.tables)})" for r in (record, own))
        raise PatchError(
            f"the adapter {adapter} was trained under {theirs}, and the model is patched with {ours}: restore the "
            "model and apply the adapter's method"
        )


def check_adapter_tensors(adapter: str | Path, model: nn.Module, **hub: Any) -> None:
    """Raise ValueError unless an adapter holds exactly the tensors that PEFT makes on a model for its config.

    PEFT loads an adapter that fits nothing without an error, and the model then answers as its base. PEFT itself
    compares here, as in a real load, so that tensors that it renames or joins count; but without numbers.

    Args:
        adapter: folder or hub id of the adapter.
        model: the base model, with or without weights and adapters; it is not changed.
        **hub: options of a hub repository, as for :func:`read_record`.

    Raises:
        ValueError: tensors are missing, unknown to the model or of another shape, or PEFT cannot use the config.
        OSError: there are no weights, or the file is damaged.
    """
    from peft import PeftModel, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    weights = _adapter_weights(adapter, **hub)
    if weights is None:
        raise OSError(f"{adapter} holds no weights ({' or '.join(ADAPTER_WEIGHTS)}): save or download it again")
    base = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    name = type(base).__name__
    loaded = None
    with warnings.catch_warnings(), as_value_error(f"{adapter}: PEFT cannot put this adapter onto {name}"):
        warnings.simplefilter("ignore")  # PEFT gives them again when it loads the adapter
        if weights.suffix == ".bin":
            stored = load_peft_weights(str(weights.parent), device="meta")
        else:
            stored = dict(outlines(weights))
        bare: Any = copy_without_weights(base, (), {}, [])
        # PEFT computes a few kinds from the weights of the base, and a few classes take more than a config.
        with contextlib.suppress(NotImplementedError):
            if bare is None:
                raise NotImplementedError
            holder = PeftModel(bare, adapter_config(adapter, **hub), low_cpu_mem_usage=True)
            # PEFT also reports tensors of the base, and shared ones: those that it reports of what it saves itself.
            own = get_peft_model_state_dict(holder, save_embedding_layers=False)
            usual = set_peft_model_state_dict(holder, own, low_cpu_mem_usage=True)
            loaded = set_peft_model_state_dict(holder, stored, low_cpu_mem_usage=True)
    if loaded is None:
        warnings.warn(f"the tensors of {adapter} were not compared with those of {name}", stacklevel=3)
        return
    names = {
        "missing": {*loaded.missing_keys} - {*usual.missing_keys},
        "unknown to the model": {*loaded.unexpected_keys} - {*usual.unexpected_keys},
    }
    wrong = in_words(names).replace(".default", "")  # the name of the adapter, which PEFT adds to those in the file
    if wrong:
        raise ValueError(
            f"{adapter} does not fit {name}: {wrong}. Give the base that it was trained on, or save it again"
        )


def is_adapter(source: str | Path, **hub: Any) -> bool:
    """Tell whether a folder or hub id holds an adapter; ``hub`` holds options as for :func:`read_record`."""
    return find_file(source, ADAPTER_FILE, **hub) is not None


def adapter_base(source: str | Path, **hub: Any) -> str:
    """Return the folder or hub id of the model that an adapter was trained on.

    If the adapter's own folder holds a model, too, it is that folder.

    Raises:
        PatchError: the adapter names no base model.
    """
    if (Path(source) / CONFIG_FILE).is_file():
        return str(source)
    base = adapter_config(source, **hub).base_model_name_or_path
    if not base or not isinstance(base, str):
        raise PatchError(
            f"{source}: its {ADAPTER_FILE} names no base model: load the base yourself, and call "
            "rope_patch.load_adapter(model, FOLDER)"
        )
    return str(base)


@contextlib.contextmanager
def naming_base(adapter: str | Path) -> Iterator[None]:
    """Say in errors of a ``with`` block, which loads the base of an adapter, that the adapter names this base."""
    try:
        yield
    except (OSError, ValueError) as error:
        error.args = (f"the base that {adapter} names: {error}",)
        raise


def adapter_config(source: str | Path, **hub: Any) -> Any:
    """Return an adapter's config; ``hub`` holds options as for :func:`read_record`.

    Raises:
        OSError: there is none, or it is damaged.
        ValueError: PEFT cannot read it.
    """
    from peft import PeftConfig

    # Read here first: the error of a damaged file then names the file.
    if (path := find_file(source, ADAPTER_FILE, **hub)) is not None:
        read_json(path)
    with as_value_error(f"{source}: PEFT cannot read its {ADAPTER_FILE}"):
        return PeftConfig.from_pretrained(str(source), **hub)


TABLES_ATTRIBUTE = "_rope_patch_record"
"""Attribute of an adapter's config in memory for the record that it was loaded with. Saving the config ignores it."""


def peft_model(model: Any) -> Any:
    """Return the PeftModel in a model, inside ``torch.compile`` and DDP; None if there is none."""
    holder = saved_module(model)
    return holder if hasattr(holder, "get_base_model") else None


def saved_module(model: nn.Module) -> Any:
    """Return the PeftModel or model of transformers whose ``save_pretrained`` saves a model, inside all wrappers."""
    # Of the class, since FSDP passes look-ups of an object on to the module inside.
    return next((module for module in model.modules() if hasattr(type(module), "save_pretrained")), None)


def refuse_bare_adapter_layers(model: nn.Module) -> None:
    """Raise PatchError if a model holds an adapter's layers, but is not given as the ``PeftModel`` around them.

    ``save_pretrained`` of ``peft_model.get_base_model()`` writes weights under names that no loader knows, and
    transformers gives random values to those that it then misses.

    Raises:
        PatchError: the model is of this kind.
    """
    if peft_model(model) is not None or getattr(model, "_hf_peft_config_loaded", False):
        return
    if any(hasattr(module, "active_adapters") and hasattr(module, "merge") for module in model.modules()):
        raise PatchError(
            "this model holds the layers of an adapter, without the PeftModel around them: save the PeftModel for the "
            "adapter alone, or peft_model.merge_and_unload() or peft_model.unload() for the whole model"
        )


def check_adapters_in_model(
    model: nn.Module, record: PatchRecord, trusted: Sequence[str] = (), selected: Sequence[str] | None = None
) -> None:
    """Raise PatchError unless every adapter of a model is known to belong to its tables.

    An adapter that :func:`rope_patch.load_adapter` loaded has its record with it, and one that is trained here belongs
    to the tables that it is trained under. An adapter that PEFT loaded for inference may have been trained under any
    tables, and so may adapters that were combined.

    Args:
        model: a model that may hold adapters.
        record: the patch record of the model.
        trusted: names of adapters that the user vouches for.
        selected: names of the adapters that are saved; None for all.

    Raises:
        PatchError: an adapter was trained under other tables, or nothing shows its tables.
        ValueError: ``trusted`` names an adapter that the model does not hold.
    """
    known: dict[str, Any] = getattr(saved_module(model), "peft_config", {})
    for name in trusted:
        if name not in known:
            raise ValueError(f"trust_adapters: no adapter {name!r}. Known: {', '.join(known)}")
    saved = [name for name in known if not selected or name in selected]
    for name in saved:
        own = getattr(known[name], TABLES_ATTRIBUTE, None)
        if own is not None and name not in trusted and not same_tables(own.tables, record.tables):
            raise PatchError(
                f"the adapter {name!r} was trained under {own.to_method()}, and the model is patched with "
                f"{record.to_method()} since: patch it as before; or, if the adapter was trained further under the "
                f"new tables, save(…, trust_adapters=[{name!r}])"
            )
    # PEFT sets inference_mode on adapters that it loads, not on those that are trained here. Beside a loaded one, any
    # adapter without a record may have been combined from it.
    unknown = [name for name in known if not hasattr(known[name], TABLES_ATTRIBUTE) and name not in trusted]
    loaded = [name for name in unknown if known[name].inference_mode]
    doubtful = [name for name in unknown if name in saved]
    if loaded and doubtful:
        raise PatchError(
            f"nothing shows under which tables the adapter {doubtful[0]!r} was trained: PEFT loaded {loaded[0]!r}, or "
            f"combined it from adapters that were loaded. If it belongs to {record.to_method()}, say so: "
            f"save(…, trust_adapters=[{doubtful[0]!r}]). Adapters that rope_patch.load_adapter(model, FOLDER, "
            "adapter_name=…) loads are checked"
        )
