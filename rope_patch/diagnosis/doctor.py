"""``rope_patch.doctor`` makes every check of a model in memory, of a folder, an adapter, or a GGUF file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch import checkpoints
from rope_patch.checkpoints.adapters import adapter_base, check_adapter_tensors, is_adapter, read_record
from rope_patch.checkpoints.model_without_weights import base_without_weights, model_without_weights
from rope_patch.checkpoints.source_files import config_json
from rope_patch.checkpoints.tokenizer_length import stated_length
from rope_patch.diagnosis import in_memory as in_memory_checks
from rope_patch.diagnosis import on_disk
from rope_patch.diagnosis.check import DIFFERS, HOLDS, NOTE, UNKNOWN, Check, Diagnosis
from rope_patch.diagnosis.in_memory import LOAD_AGAIN, WRITE_AGAIN, Subject, unreadable
from rope_patch.diagnosis.programs import programs_agree
from rope_patch.engines.asking import MODULES, python_of
from rope_patch.engines.programs import PROGRAMS
from rope_patch.gguf.table import FACTOR_TENSORS
from rope_patch.patching.install import reapply
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.verify import shortened
from rope_patch.runtime.errors import in_one_line
from rope_patch.runtime.folders import is_gguf
from rope_patch.runtime.gguf_file import open_gguf
from rope_patch.runtime.gguf_headers import cached_headers


def doctor(
    model: nn.Module | str | Path,
    tokenizer: Any = None,
    *,
    for_programs: Sequence[str] = (),
    config_only: bool = False,
    python: str | Path | None = None,
) -> Diagnosis:
    """Check whether the rotary table in use is the table that was meant, for any model.

    For a model in memory, the rotary module is called, and its angles are compared with the table that the config
    describes, or the patch record if the model is patched. For a folder, hub id, adapter or GGUF file, the config and
    the headers of files are read, and the tables that other programs compute from it are listed. It takes seconds and
    needs no GPU. Code that comes with a checkpoint is never run.

    Args:
        model: a model of transformers, with or without PEFT, quantization, FSDP or ``torch.compile`` around it; or a
            folder, a hub id, an adapter's folder, or a GGUF file.
        tokenizer: the tokenizer whose length is compared with the context; by default that of the folder.
        for_programs: other programs whose tables count for the verdict, such as ``["vllm"]``; by default none does.
        config_only: whether the weights files of a folder are left out, which may not be there, as in a repository.
        python: the Python of the environment in which the one program of ``for_programs`` is installed: it is asked
            what it computes from these very files. A program that is installed beside this package is found.

    Returns:
        The diagnosis; ``ok`` and ``status`` hold the verdict, and ``print`` shows everything.

    Raises:
        TypeError: it is not a model of transformers.
        ValueError: a program is unknown, does not answer, or is given for a model in memory or an adapter, or there is
            no such folder.
        OSError: there is nothing that can be read.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=1, vocab_size=8)
        >>> model = LlamaForCausalLM(config)
        >>> doctor(model).ok, doctor(model.bfloat16()).ok  # a cast rounds the table
        (True, False)
    """
    for name in for_programs:
        if name not in PROGRAMS:
            raise ValueError(f"unknown program {name!r}. Known: {', '.join(PROGRAMS)}")
    pythons = _pythons(for_programs, python)
    if isinstance(model, nn.Module):
        if for_programs:
            raise ValueError("for_programs goes with a folder or file: other programs do not read models in memory")
        length = None if tokenizer is None else getattr(tokenizer, "model_max_length", None)
        return _of_model(type(model).__name__, model, length, in_memory=True)
    if is_gguf(model):
        with cached_headers(model):
            diagnosed = _of_gguf(model, pythons)
    elif is_adapter(model):
        if for_programs:
            raise ValueError(
                "for_programs (--for) goes with a whole model: what a program computes depends on its base"
            )
        return _of_adapter(str(model))
    else:
        diagnosed = _of_folder(str(model), tokenizer, config_only, pythons)
    return diagnosed.counting(tuple(for_programs))


def _pythons(for_programs: Sequence[str], python: str | Path | None) -> dict[str, str | Path]:
    """Return the Python by program in which each program is asked, for those that can be."""
    if python is not None:
        asked = [name for name in PROGRAMS if name in MODULES]
        if len(for_programs) != 1 or for_programs[0] not in asked:
            raise ValueError(f"python (--python) goes with one program in for_programs (--for), of {', '.join(asked)}")
        return {for_programs[0]: python}
    found = {name: python_of(name) for name in for_programs}
    return {name: path for name, path in found.items() if path is not None}


def _of_model(
    source: str, model: nn.Module, tokenizer_length: float | None, *, in_memory: bool, more: Sequence[Check] = ()
) -> Diagnosis:
    """Make every check of a model.

    Args:
        source: the model's class, folder or hub id, for the diagnosis.
        model: the model, with what is wrapped around it.
        tokenizer_length: the length at which its tokenizer cuts texts [tokens]; None if no tokenizer is known.
        in_memory: whether the model holds its numbers, and is not made from a folder's config.
        more: checks that were made of its folder.
    """
    subject = None
    try:
        location = locate(model)
        stated = location.model.config.to_dict() if in_memory else config_json(source)
        subject = Subject(model, location, tokenizer_length, in_memory, stated)
        record = location.record
        tables = location.tables
    except PatchError as error:
        fix = WRITE_AGAIN
        if in_memory:
            fix = LOAD_AGAIN
        return _unread(source, Check("patch record", DIFFERS, str(error), fix=fix), *more)
    except ValueError as error:
        unknown = Check("rotary module", UNKNOWN, str(error))
        if subject is not None:
            unknown = unreadable(subject, error)
        return _unread(source, unknown, *more)
    checks = [check for function in in_memory_checks.CHECKS for check in _made(function, subject)]
    method = None if record is None else shortened(str(record.to_method()))
    with contextlib.suppress(ValueError):  # the checks say why
        tables = subject.meant
    return Diagnosis(source, method, tables, (*checks, *more))


def _unread(source: str, *checks: Check) -> Diagnosis:
    return Diagnosis(source, None, {}, checks)


def _made(function: Callable[..., Iterator[Check]], *args: Any) -> list[Check]:
    """Return the results of a check function; if it fails itself, a check that says so."""
    # One check that fails must not hide what the others find.
    try:
        return list(function(*args))
    except Exception as error:
        return [Check(function.__name__.replace("_", " "), UNKNOWN, f"this check failed: {in_one_line(error)}")]


def _programs(source: str | Path, pythons: Mapping[str, str | Path]) -> list[Check]:
    if pythons:  # a program that was to be asked and does not answer is an error
        return list(programs_agree(source, pythons))
    return _made(programs_agree, source)


def _of_folder(source: str, tokenizer: Any, config_only: bool, pythons: Mapping[str, str | Path]) -> Diagnosis:
    # Unchecked, since contradicting keys of config.json are a check of their own here, and no error.
    model = model_without_weights(source, checked=False, trust_remote_code=False)
    folder = Path(source)
    length = stated_length(folder)
    if tokenizer is not None:
        length = tokenizer.model_max_length
    more = [Check("weights files", NOTE, f"{source} is no folder, and its weights are not downloaded")]
    if folder.is_dir():
        more = _on_disk(folder, model, config_only)
    found = _of_model(source, model, length, in_memory=False, more=more)
    if found.tables:
        return replace(found, checks=(*found.checks, *_programs(source, pythons)))
    return found


def _on_disk(folder: Path, model: nn.Module, config_only: bool = False) -> list[Check]:
    functions = [one for one in on_disk.CHECKS if not (config_only and one is on_disk.tensors_are_there)]
    return [check for function in functions for check in _made(function, folder, model)]


def _of_adapter(source: str) -> Diagnosis:
    """Check an adapter's folder, and whether its record fits the base model that it names."""
    base = adapter_base(source)
    model = base_without_weights(source, trust_remote_code=False)
    try:
        check_adapter_tensors(source, model)
        record = read_record(source)
    except (ValueError, OSError) as error:
        return _unread(source, Check("adapter", DIFFERS, str(error)))
    beside = _on_disk(Path(source), model) if base == source else []
    try:
        if record is not None:
            reapply(model, record)
    except PatchError as error:
        wrong = Check(
            "adapter",
            DIFFERS,
            str(error),
            f"the base {base} has the tables that the record of the adapter was made on",
            "the adapter works on angles that it never saw",
            "give the base model that it was trained on",
        )
        return _unread(source, wrong, *beside)
    if record is None:
        state = UNKNOWN
        if locate(model).record is None:
            state = NOTE
        own = Check("adapter", state, f"no record says under which tables it was trained; its base is {base}")
    else:
        own = Check("adapter", HOLDS, f"trained under {record.to_method()}, whose tables fit the base {base}")
    return _of_model(source, model, stated_length(Path(source)), in_memory=False, more=[own, *beside])


def _of_gguf(source: str | Path, pythons: Mapping[str, str | Path]) -> Diagnosis:
    """Check a GGUF file: its record against its keys and factors, and which table each program reads."""
    try:
        inspection = checkpoints.inspect(source)
    except PatchError as error:
        return _unread(str(source), Check("rotary factors", DIFFERS, str(error), fix="convert the model again"))
    checks = [Check("weights file", HOLDS, f"every tensor lies within the file: {inspection.model_class}")]
    if inspection.record or inspection.warnings:  # a record that cannot be read is a warning
        try:
            checks.append(Check("patch record", HOLDS, str(checkpoints.verify(source))))
        except ValueError as error:
            checks.append(Check("patch record", DIFFERS, str(error), fix="write the patched file again"))
    opened = open_gguf(source)
    scaling = opened.value(f"{opened.value('general.architecture')}.rope.scaling.type")
    if scaling == "longrope" and not {piece.name for piece in opened.pieces}.intersection(FACTOR_TENSORS):
        checks.append(
            Check("rotary factors", NOTE, "it states longrope and holds no factors, so that longrope does nothing")
        )
    checks += _programs(source, pythons)
    tables = {table.layer_type: table for table in inspection.tables}
    return Diagnosis(str(source), inspection.method, tables, tuple(checks))
