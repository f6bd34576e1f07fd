"""Save and load patched models and adapters so that the patch is never lost in silence."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from rope_patch.checkpoints.adapters import (
    ADAPTER_FILE,
    CARD_FILE,
    CONFIG_FILE,
    HUB_OPTIONS,
    TABLES_ATTRIBUTE,
    adapter_base,
    adapter_config,
    check_adapter_tables,
    check_adapter_tensors,
    check_adapters_in_model,
    is_adapter,
    naming_base,
    peft_model,
    read_record,
    refuse_bare_adapter_layers,
    saved_module,
    write_patch_files,
)
from rope_patch.checkpoints.load_gguf import forget_quantization, load_gguf
from rope_patch.checkpoints.source_files import auto_class, check_older_keys, config_json, explained
from rope_patch.checkpoints.tokenizer_files import copy_tokenizer
from rope_patch.checkpoints.weight_files import refuse_repacked_weights, wrong_tensors, wrong_tensors_in_load
from rope_patch.methods import MethodLike, as_method
from rope_patch.patching.install import apply, reapply
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.older_keys import text_part
from rope_patch.patching.record import PatchRecord
from rope_patch.patching.verify import verify_model
from rope_patch.runtime.folders import HIDDEN_MARK, check_source, folder_in_one_move, is_gguf, link_or_copy
from rope_patch.runtime.parallel import processes


# Half of it is the docstring; the steps stand together, since each relies on the order of those before it.
def save(
    model: nn.Module,
    out: str | Path,
    *,
    tokenizer: Any = None,
    trust_adapters: str | Sequence[str] = (),
    **save_options: Any,
) -> Path:
    """Save a patched model or an adapter trained under a patch, with its record, atomically.

    A model's folder loads in plain transformers with equal logits. An adapter's folder says nothing about rotary
    embeddings by itself; ``rope_patch.json`` beside it does, and :func:`load` and :func:`load_adapter` read it.

    A model that is saved whole gets the folder as its ``name_or_path``: PEFT names that as the base of an adapter that
    is trained afterwards, and TRL loads a reference model from there. ``Patch.restore`` puts the old name back.

    Several processes may call it, as they call ``save_pretrained``: the first one writes, and the others take part in
    gathering the weights. They do not wait until it has written (``accelerator.wait_for_everyone()`` does).

    Args:
        model: a patched model of transformers, or a PEFT model over one.
        out: the folder that is written. If it exists, the weights of an older checkpoint in it are replaced, and other
            files stay.
        tokenizer: the tokenizer that is saved beside the model. By default the tokenizer's files are copied from the
            folder that the model came from, or from the hub repository as far as they are in the local cache; False
            leaves the tokenizer out. In the folder its ``model_max_length`` is raised to the context that the patch
            states.
        trust_adapters: names of adapters that belong to the model's tables although nothing shows it, because PEFT
            itself loaded them, or combined them from such adapters.
        **save_options: arguments of ``save_pretrained``.

    Returns:
        The folder.

    Raises:
        PatchError: the model is not patched or does not use what its record says, an adapter may have been trained
            under other tables, or the model holds an adapter's layers without the PeftModel around it.
        ValueError: ``push_to_hub`` is given, which would upload before the folder is whole, or
            ``distributed_checkpoint``; tensors that the config's model has are missing or have other shapes (a part of
            a ``state_dict``, pruned layers, weights quantized in place, layers compiled one by one); or bitsandbytes
            has repacked 4-bit weights for the CPU. ``out`` is then as it was.
        OSError: the folder cannot be written, or the disk is full; ``out`` is then as it was.
    """
    for name, instead in (
        ("push_to_hub", "save first, then upload the folder (hf upload REPO FOLDER)"),
        ("distributed_checkpoint", "it writes whole checkpoints; leave it out"),
    ):
        if save_options.get(name):
            raise ValueError(f"save takes no {name}: {instead}")
    if tokenizer not in (None, False) and not hasattr(tokenizer, "save_pretrained"):
        raise TypeError(f"tokenizer must be a tokenizer of transformers, False, or left out, got {tokenizer!r}")
    record = verify_model(model)
    refuse_bare_adapter_layers(model)
    if isinstance(trust_adapters, str):
        trust_adapters = [trust_adapters]
    check_adapters_in_model(model, record, trust_adapters, save_options.get("selected_adapters"))
    whole = peft_model(model) is None  # of a PeftModel only the adapter is written
    if whole:
        refuse_repacked_weights(model)
    forget_quantization(locate(model).model)
    inner = saved_module(model)
    write = type(inner).save_pretrained  # not the model's own under RopePatchCallback, which trusts no adapters
    if processes()[0] > 0 or not save_options.get("is_main_process", True):
        # Sharded weights are gathered by all processes together: without this call the first one would wait forever.
        with tempfile.TemporaryDirectory() as nowhere:
            write(inner, nowhere, **(save_options | {"is_main_process": False}))
    else:
        with folder_in_one_move(out) as folder:
            if (card := Path(out) / CARD_FILE).is_file() and not whole:
                shutil.copyfile(card, folder / CARD_FILE)  # PEFT adds to a card that is there, or writes its template
            write(inner, folder, **save_options)
            # The tokenizer comes before the record, whose context raises the length in the tokenizer's settings.
            if tokenizer is None:
                copy_tokenizer(locate(model).model, folder, beside=Path(out))
            elif tokenizer is not False:
                tokenizer.save_pretrained(folder)
            write_patch_files(record, model, folder, beside=Path(out))
            if (folder / CONFIG_FILE).is_file() and (wrong := wrong_tensors(folder, locate(model).model)):
                raise ValueError(
                    f"plain transformers would not load these weights as they are: {wrong}. Save the whole model: "
                    "adapters merged or unloaded, no part of a state_dict, layers as transformers builds them"
                )
    # An adapter that PEFT saves later then names a base with this table. Folders of ours are soon renamed or deleted.
    if whole and HIDDEN_MARK not in str(out):
        inner.name_or_path = inner.config.name_or_path = str(out)
    return Path(out)


def load(
    source: str | Path,
    method: MethodLike | None = None,
    *,
    layer_types: Sequence[str] | None = None,
    target_length: int | None = None,
    replace: bool = False,
    freeze_at: int | None = None,
    **from_pretrained: Any,
) -> PreTrainedModel | Any:
    """Load a model or an adapter with its patch in place and verified.

    Args:
        source: folder or hub id of a model (patched or not) or of an adapter (with or without a record), or a GGUF
            file, whose table is read, too (transformers' ``gguf_file=`` reads only its base).
        method: a method that is applied to a model without a patch, in any form that :func:`rope_patch.apply` takes.
            Parameters are written into the method: ``"yarn:factor=4"``.
        layer_types: layer types whose tables ``method`` patches, as :func:`rope_patch.apply` chooses them.
        target_length: context that ``method`` reaches and the config will state [tokens].
        replace: whether ``method`` replaces the patch that the model has.
        freeze_at: length at which a table that changes with the context is frozen before ``method`` [tokens].
        **from_pretrained: arguments of ``AutoModelForCausalLM.from_pretrained``; remote code is off unless it is asked
            for. For an adapter also ``adapter_name`` and ``is_trainable``. ``revision`` and ``subfolder`` belong to an
            adapter on the hub itself; for an adapter in a folder on this disk, ``revision`` belongs to its base.

    Returns:
        The model; for an adapter, a ``PeftModel`` over its patched base.

    Raises:
        PatchError: the record does not fit what was loaded, or the model is patched already and ``method`` is given.
        ValueError: the method is wrong, options of a patch are given without a method, or there is no such folder or no
            checkpoint in it.
        OSError: nothing can be loaded, the weights are not the model's, or there is no such repository; the message
            says what to do.
    """
    options = {
        "layer_types": layer_types,
        "target_length": target_length,
        "replace": replace,
        "freeze_at": freeze_at,
    }
    if method is None:
        if given := [name for name, value in options.items() if value]:
            raise ValueError(f"{given[0]} goes with a method: name one, or leave {given[0]} out")
        return _load(source, None, from_pretrained)
    chosen = as_method(method)  # a wrong method is reported before the model is loaded, which may take long
    for name in [field.name for field in fields(chosen) if field.name in from_pretrained]:
        raise TypeError(f"load takes no {name}=: write it into the method, load(source, '{chosen.name}:{name}=…')")
    return _load(source, lambda model: apply(model, chosen, **options), from_pretrained)  # type: ignore[arg-type]


def _load(source: str | Path, patch: Callable[[Any], Any] | None, from_pretrained: dict[str, Any]) -> Any:
    """Load the model or adapter of a source.

    Args:
        source: a folder, hub id or GGUF file.
        patch: a function that applies the caller's method to a model; None to load the model as it is.
        from_pretrained: arguments of transformers' loader.
    """
    if is_gguf(source):
        model = load_gguf(source, **from_pretrained)
        if patch is not None:
            patch(model)
        return model
    source, from_pretrained = _in_subfolder(source, from_pretrained)
    hub = {}
    if not Path(source).is_dir():
        hub = {key: value for key, value in from_pretrained.items() if key in HUB_OPTIONS}
    if is_adapter(source, **hub):
        return _load_under_adapter(source, patch, from_pretrained, hub)
    config = config_json(source, **from_pretrained)
    model, loaded = _from_pretrained(source, from_pretrained)
    saved_as = (model.config.architectures or [""])[0]
    head = saved_as.partition("For")[2]
    loaded_head = type(model).__name__.partition("For")[2]
    # A LlamaModel has no output weights, which a LlamaForCausalLM would get at random.
    headless = saved_as and not head and wrong_tensors_in_load(loaded)
    if headless or head not in ("", loaded_head):
        warnings.warn(
            f"{source} was saved as {saved_as} and is loaded as {type(model).__name__}, without its head: load it with "
            "its own class of transformers, and rope_patch.verify that model",
            stacklevel=3,
        )
    else:
        _check_loaded(source, model, loaded)
    own = locate(model).record
    if (stated := text_part(config).get("rope_patch")) is not None:
        if own is None or own.to_dict() != PatchRecord.from_dict(stated).to_dict():
            raise PatchError(
                f"{source} is patched with {PatchRecord.from_dict(stated).to_method()}, and the config given in place "
                "of its own does not say so: leave config= out, or edit what rope_patch.checkpoints.load_config returns"
            )
        check_older_keys(config, source)
    if patch is not None:
        patch(model)
    elif own is not None:
        # This checks the module that transformers built, before ours takes its place.
        verify_model(model)
        reapply(model, own)
    return model


def _from_pretrained(source: str | Path, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return a model that transformers loaded, and what its loader reports of tensors that did not match."""
    with explained(source):
        given = getattr(options.get("config"), "model_type", None)
        loader = auto_class(given or config_json(source, **options).get("model_type"))
        model, loaded = loader.from_pretrained(str(source), output_loading_info=True, **options)
    if options.get("ignore_mismatched_sizes"):  # the caller has allowed them
        loaded = {**loaded, "mismatched_keys": ()}
    return model, loaded


def _check_loaded(source: str | Path, model: Any, loaded: Mapping[str, Any]) -> None:
    if wrong := wrong_tensors_in_load(loaded):
        raise OSError(
            f"{source} does not hold the weights of {type(model).__name__}: {wrong}. Is its config.json the config of "
            "another model?"
        )


def _load_under_adapter(
    source: str | Path, patch: Callable[[Any], Any] | None, from_pretrained: dict[str, Any], hub: dict[str, Any]
) -> Any:
    """Load an adapter's base model, patch it as the adapter's record says, and load the adapter onto it."""
    base = adapter_base(source, **hub)
    record = read_record(source, **hub)
    if not Path(source).is_dir():  # on the hub they are the adapter's
        for name in ("revision", "subfolder"):
            from_pretrained.pop(name, None)
    if revision := adapter_config(source, **hub).revision:
        from_pretrained.setdefault("revision", revision)  # the revision of the base that it was trained on
    for_peft = {key: from_pretrained.pop(key) for key in ("adapter_name", "is_trainable") if key in from_pretrained}
    if patch is not None and record is not None:
        raise PatchError(f"{source} was trained under {record.to_method()}: load it without method=")
    with naming_base(source):
        if is_gguf(base):
            model = load_gguf(base, **from_pretrained)
        else:
            with _without_adapter(base) as bare:
                model, loaded = _from_pretrained(bare, from_pretrained)
            _check_loaded(base, model, loaded)
    # Not the temporary folder: the name tells later where the tokenizer is.
    model.name_or_path = model.config.name_or_path = base
    # The adapter's record comes first: its patch may have replaced that of the base.
    recorded = record or locate(model).record
    if patch is not None:
        patch(model)
    elif recorded is not None:
        reapply(model, recorded)
    else:
        warnings.warn(
            f"the adapter {source} carries no patch record: loaded onto the tables of its base model as they are",
            stacklevel=4,
        )
    return load_adapter(model, source, **for_peft, **hub)


def _in_subfolder(source: str | Path, options: dict[str, Any]) -> tuple[str | Path, dict[str, Any]]:
    """Return a source with its ``subfolder`` joined, if it is a folder on this disk, and the remaining options."""
    inner = options.get("subfolder")
    if not inner or not Path(source).is_dir():
        return source, options
    return Path(source, inner), {key: value for key, value in options.items() if key != "subfolder"}


@contextlib.contextmanager
def _without_adapter(base: str) -> Iterator[str]:
    """Yield a folder that holds the files of a model without an adapter among them.

    transformers would load an adapter that it finds beside a model, onto tables that are not patched yet.
    """
    if not (Path(base) / ADAPTER_FILE).is_file():
        yield base
        return
    with tempfile.TemporaryDirectory() as folder:
        for path in Path(base).iterdir():
            if path.is_file() and not path.name.startswith("adapter_"):
                link_or_copy(path, Path(folder) / path.name)
        yield folder


def load_adapter(model: nn.Module, adapter: str | Path, **peft_options: Any) -> Any:
    """Load an adapter onto a model in memory, after checking that both use the same rotary tables.

    Args:
        model: the base model, patched as the adapter's record says; or a model that holds adapters already, beside
            which the new one is loaded. ``model.set_adapter(name)`` then makes it the active one, as in PEFT.
        adapter: folder or hub id of the adapter.
        **peft_options: arguments of ``PeftModel.from_pretrained``, or of ``PeftModel.load_adapter`` if the model holds
            adapters: ``adapter_name``, ``is_trainable`` …

    Returns:
        The ``PeftModel``, which is ``model`` itself if it holds adapters already.

    Raises:
        PatchError: the model has another patch than the adapter's record says, or none; or it is patched and the
            adapter was trained without a patch.
        ValueError: the model holds an adapter of this name, the adapter's tensors are not those of its config on this
            model, or there is no such folder or no adapter in it.
    """
    from peft import PeftModel

    name = str(peft_options.pop("adapter_name", "default"))
    holder = peft_model(model)
    if holder is not None and name in holder.peft_config:
        raise ValueError(
            f"the model holds an adapter {name!r} already: give another adapter_name, and put it to use with "
            "model.set_adapter(adapter_name)"
        )
    if holder is None and getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            "this model holds adapters of transformers' own (model.load_adapter): load its base with rope_patch.load, "
            "and the adapters onto that"
        )
    adapter, peft_options = _in_subfolder(adapter, peft_options)
    check_source(adapter, [ADAPTER_FILE])
    hub = {key: value for key, value in peft_options.items() if key in HUB_OPTIONS}
    record = read_record(adapter, **hub)
    own = locate(model).record
    check_adapter_tables(adapter, record, own)
    if record is not None:
        verify_model(model)
    check_adapter_tensors(adapter, model, **hub)
    if holder is None:
        model = holder = PeftModel.from_pretrained(model, str(adapter), adapter_name=name, **peft_options)
    else:
        holder.load_adapter(str(adapter), name, **peft_options)
    # `save` checks by it that the adapter still belongs to the tables.
    if record is not None:
        setattr(holder.peft_config[name], TABLES_ATTRIBUTE, record)
    return model
