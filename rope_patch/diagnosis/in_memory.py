"""Checks of a model in memory; for a folder they are made on its model without weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.generic import flatten_dict

from rope_patch import frequencies
from rope_patch.checkpoints.adapters import TABLES_ATTRIBUTE, check_adapters_in_model, saved_module
from rope_patch.diagnosis.causes import RELOAD, cause, plain
from rope_patch.diagnosis.check import DIFFERS, HOLDS, NOTE, UNKNOWN, Check
from rope_patch.patching.config_settings import settings_of, silent_transformers
from rope_patch.patching.encode import plan_from_record
from rope_patch.patching.locate import (
    Location,
    PatchError,
    device_of,
    holds_adapters_twice,
)
from rope_patch.patching.record import TableRecord, key_of
from rope_patch.patching.rotary import original_tables
from rope_patch.patching.verify import edits_since, measure, shortened
from rope_patch.tables import RotaryTable

LOAD_AGAIN = "load the patched folder again"
WRITE_AGAIN = "write the folder again from the model before the patch: rope-patch apply MODEL METHOD -o FOLDER"
REPAIR = "rope-patch doctor FOLDER --repair -o OUT writes a copy with the config that the patch record describes"


@dataclass(frozen=True, eq=False)
class Subject:
    """The model that is checked.

    Attributes:
        model: the model as it was given, with what is wrapped around it.
        location: the location of the model's rotary module.
        tokenizer_length: the length at which its tokenizer cuts texts [tokens]; None if no tokenizer is known.
        in_memory: whether the model is in memory with its numbers, and was not built without weights from a folder.
        stated: the contents of the config.json, or the whole config of a model in memory.
    """

    model: nn.Module
    location: Location
    tokenizer_length: float | None
    in_memory: bool
    stated: Mapping[str, Any]

    @cached_property
    def meant(self) -> Mapping[str | None, RotaryTable]:
        """The tables that the model should use: those of its patch record, or else those that its config describes."""
        record = self.location.record
        if record is None:
            return self.location.stated_tables
        meant = {}
        for kind, table in self.location.stated_tables.items():
            recorded = record.tables[key_of(kind)]
            rope_type = table.rope_type
            if kind in record.layer_types:
                rope_type = "patched"
            meant[kind] = replace(
                table,
                inv_freq=frequencies.table_of(recorded.inv_freq),
                attention_scaling=recorded.attention_scaling,
                rope_type=rope_type,
                max_position_embeddings=record.stated_length,
            )
        return meant

    def fix(self, in_memory: str, in_folder: str) -> str:
        """Return the fix that fits what was given to doctor: a model in memory, or a folder, whose files are named."""
        return in_memory if self.in_memory else in_folder


def unreadable(subject: Subject, reason: ValueError) -> Check:
    """Return a check that says why the tables of a model cannot be read.

    Args:
        subject: the model.
        reason: the error that reading them has raised.
    """
    location = subject.location
    parameters = settings_of(location.config).get("rope_parameters")
    own = location.rotary_class
    for name, base in flatten_dict(parameters or {}).items():
        if not name.endswith("rope_theta") or (isinstance(base, int | float) and base > 0):
            continue
        meaning = ""
        if base is None:
            meaning = "rope_scaling is the older name of rope_parameters: setting it on a config replaces all of them"
        return Check(
            "config",
            DIFFERS,
            f"the base rope_theta is {base}: {parameters}",
            "a number above 0, without which no table can be computed",
            meaning,
            subject.fix(
                "set config.rope_parameters, with rope_theta among them, before the model is built",
                "write rope_theta, the base that the model was trained with, into rope_parameters of config.json",
            ),
        )
    parent = next((cls for cls in own.__mro__ if cls.__module__.startswith("transformers.")), own)
    if parent is not own and type(location.decoder).__module__.startswith("transformers."):
        return Check(
            "rotary module",
            DIFFERS,
            str(reason),
            f"cos and sin as {parent.__name__} lays them out, from which {own.__name__} is derived",
            f"angles may go to other pairs of features than the attention of {type(location.decoder).__name__} turns",
            f"put {parent.__name__} back in its place",
        )
    return Check("rotary module", UNKNOWN, str(reason))


def _named(name: str, kind: str | None) -> str:
    """Return the name of a check with the layer type that it is about, if there are several."""
    return name if kind is None else f"{name} [{kind}]"


# --- the checks ------------------------------------------------------------------------------------------------------


def record_is_whole(subject: Subject) -> Iterator[Check]:
    """Check that the method of the record, applied to the base tables again, gives the tables of the record."""
    location = subject.location
    try:
        record = location.record
        if record is None:
            if location.patched is not None:
                yield Check(
                    "patch record",
                    DIFFERS,
                    "the rotary module is patched, but the config has lost its record",
                    "the record of the patch in config.rope_patch",
                    "a saved folder would be read with the table from before the patch",
                    "load the patched folder again, or apply the patch to the original model",
                )
            return
        location.check_base()
        recomputed = plan_from_record(location, record).record
        # The base tables were compared by check_base.
        wrong = [key for key, table in record.tables.items() if not table.matches(recomputed.tables[key])]
    except ValueError as error:
        yield Check("patch record", DIFFERS, str(error), fix=subject.fix(LOAD_AGAIN, WRITE_AGAIN))
        return
    if wrong:
        yield Check(
            "patch record",
            DIFFERS,
            f"{record.to_method()} does not give the tables of the record: {', '.join(wrong)}",
            meaning="the record was made on another model, or was altered",
            fix=subject.fix("apply the patch to the original model again", WRITE_AGAIN),
        )
    else:
        yield Check("patch record", HOLDS, f"{shortened(str(record.to_method()))} gives the recorded tables")


def config_describes_table(subject: Subject) -> Iterator[Check]:
    """Check that the config, as transformers alone reads it, gives the tables that are meant."""
    location = subject.location
    record = subject.location.record
    for kind, table in location.stated_tables.items():
        if record is None:
            yield from _formula(subject, kind, table)
            continue
        name = _named("config", kind)
        if record.tables[key_of(kind)].matches(TableRecord.of(table)):
            yield Check(name, HOLDS, "plain transformers computes the patched table from it")
        else:
            yield Check(
                name,
                DIFFERS,
                f"plain transformers computes table {table.fingerprint} from it ({table.rope_type})",
                f"table {record.tables[key_of(kind)].hash} of {record.to_method()}",
                "; ".join(["the config was changed after the patch", *edits_since(location)]),
                subject.fix(
                    "undo that change, or restore the model and patch it again; a saved folder would hold the wrong "
                    "table",
                    REPAIR,
                ),
            )
    if record is not None and location.config.max_position_embeddings != record.stated_length:
        yield Check(
            "context of the patch",
            DIFFERS,
            f"max_position_embeddings is {location.config.max_position_embeddings}",
            f"{record.stated_length}, which the patch record states",
            "the config was changed after the patch",
            subject.fix("set max_position_embeddings back", REPAIR),
        )


def _formula(subject: Subject, kind: str | None, table: RotaryTable) -> Iterator[Check]:
    """Compare the table that the model's class computes with that of transformers' own function for the rope type."""
    config = subject.location.config
    name = _named("config", kind)
    stated = str(dict(table.rope_parameters or {}).get("rope_type", "default"))
    # HunYuan calls a type of its own dynamic.
    if table.rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
        stated = table.rope_type
    build = ROPE_INIT_FUNCTIONS.get(stated)
    computed = plain(table.inv_freq, table)
    if build is None or "proportional" in stated:
        if stated != "default" or table.is_geometric or computed is None:
            computes = "a table of its own"
            if table.is_geometric:
                computes = f"plain RoPE of base {table.rope_theta:g}"
            yield Check(name, HOLDS, f"the model's class computes {computes} (rope_type {stated!r})")
            return
        expected = f"plain RoPE with a base of {table.rope_theta:g}"
    else:
        try:
            # A length of 1 gives the first state of a dynamic table.
            with torch.device("cpu"), silent_transformers():
                inv_freq, scaling = build(config, seq_len=1, layer_type=kind)
        except Exception as error:
            yield Check(name, NOTE, f"transformers cannot compute {stated!r}: {error}")
            return
        meant = replace(table, inv_freq=frequencies.zero_unrotated(inv_freq), attention_scaling=scaling)
        if TableRecord.of(meant).matches(TableRecord.of(table)):
            yield Check(name, HOLDS, f"the model's class computes the {stated} table that the config states")
            return
        expected = f"the {stated} table of the config, with attention factor {scaling:.6g}"
    difference = "another table" if computed is None else computed[0].partition(":")[0]
    yield Check(
        name,
        DIFFERS,
        f"the class of the rotary module does not compute what the config states: {difference}",
        expected,
        "this class reads rope_parameters in a way of its own, or leaves a part of it out",
        subject.fix("rope_patch.apply(model, METHOD)", "rope-patch apply FOLDER METHOD -o OUT")
        + " puts the table in place, whatever the class reads",
    )


def module_uses_table(subject: Subject) -> Iterator[Check]:
    """Check that the rotary module, when it is called, gives the angles of the tables that are meant."""
    location = subject.location
    if location.without_numbers:
        if subject.in_memory:
            yield Check(
                "table in use",
                UNKNOWN,
                "the rotary module lies on the meta device and holds no numbers",
                fix="load the weights, then ask again",
            )
        return
    for kind, table in subject.meant.items():
        yield from _in_use(subject, kind, table)


def _in_use(subject: Subject, kind: str | None, table: RotaryTable) -> Iterator[Check]:
    location = subject.location
    name = _named("table in use", kind)
    module = location.module
    context = table.max_position_embeddings
    if table.is_dynamic:
        # Far positions would change a dynamic table, so that a copy is asked, within the lengths of its first state.
        held = original_tables(module)[kind].detach().float().cpu()
        first = table.inv_freq
        # At the length of the context itself, transformers would not go back to the first state.
        module = copy.deepcopy(module)
        context = table.context - 1
        # A longrope module chooses its table anew in every forward pass, so that what it holds does not matter.
        moved = table.rope_type != "longrope" and held.shape == first.shape
        if moved and not torch.allclose(held, first, rtol=1e-5, atol=frequencies.UNROTATED):
            yield Check(
                f"dynamic {name}",
                DIFFERS,
                "the module holds the table of the longest text that it has read",
                "the table of a model that was just loaded",
                "the same text gives other logits than before, and keys that were cached before have another table",
                f"{RELOAD}, or rope_patch.apply(model, 'default', freeze_at=LENGTH) for one table at all lengths",
            )
    device = device_of(location.model)
    record = TableRecord.of(table)
    measured = measure(module, location.layout, key_of(kind), record, device, context=context)
    if measured.problem is None:
        yield Check(
            name,
            HOLDS,
            f"angles agree within {measured.angle_error:.2g} rad up to position {context - 1}",
            angle_error=measured.angle_error,
            position=measured.position,
        )
        return
    meaning, fix = cause(measured, table, location.record, subject.meant)
    yield Check(
        name,
        DIFFERS,
        str(measured.problem).partition("] ")[2],
        f"{table.rope_type}, rope_theta {table.rope_theta:g}, attention factor {table.attention_scaling:g}, "
        f"table {table.fingerprint}",
        meaning,
        fix,
        measured.angle_error,
        measured.position,
    )


def contexts_agree(subject: Subject) -> Iterator[Check]:
    """Check that the tokenizer cuts texts no earlier than at the context that the config states."""
    context = next(iter(subject.meant.values())).max_position_embeddings
    cut = subject.tokenizer_length
    if cut is not None and cut >= context:
        found = "it cuts no texts"
        if cut < 1e15:  # transformers gives a tokenizer that states no length one of 10**30 tokens
            found = f"it cuts texts at {int(cut)} tokens"
        yield Check("tokenizer", HOLDS, found)
    elif cut is not None:
        # Many published tokenizers cut earlier than their model; but an extended context is meant to be used.
        trained = min(table.original_max_position_embeddings or 0 for table in subject.meant.values())
        state = NOTE
        if subject.location.record is not None or cut <= trained:
            state = DIFFERS
        yield Check(
            "tokenizer",
            state,
            f"it cuts texts at {int(cut)} tokens",
            f"{context} tokens, the context of the config",
            "with truncation=True a text is cut before the model reads it",
            subject.fix(
                f"tokenizer.model_max_length = {context}", f"set model_max_length in tokenizer_config.json to {context}"
            ),
        )


def tables_can_be_patched(subject: Subject) -> Iterator[Check]:
    """Note the tables that cannot be patched, and why."""
    for kind, reason in subject.location.probe.refusals.items():
        yield Check(_named("layers", kind), NOTE, f"the model {reason}")


def settings_are_read(subject: Subject) -> Iterator[Check]:
    """Check that every rotary setting which the config states is read."""
    location = subject.location
    unread = location.unread_settings(subject.stated)
    if unread:
        where = ", ".join(f"rope_parameters.{kind}" if kind else "rope_parameters" for kind in location.tables)
        yield Check(
            "config keys",
            DIFFERS,
            f"nothing reads {', '.join(f'{name} = {value}' for name, value in unread.items())}",
            f"settings in {where} of {type(location.config).__name__}, which {location.rotary_class.__name__} reads",
            "it sets nothing: the tables in use are those above",
            subject.fix(
                f"set it in {where} of {type(location.config).__name__} before the model is built, or take it out",
                f"set it in {where} of {type(location.config).__name__}, or take it out of config.json; or "
                "rope-patch apply FOLDER METHOD -o OUT, which puts a table in place, whatever the class reads",
            ),
        )


def adapters_fit(subject: Subject) -> Iterator[Check]:
    """Check that adapters in the model were trained under its tables."""
    model = subject.model
    record = subject.location.record
    if holds_adapters_twice(model):
        yield Check(
            "adapters",
            DIFFERS,
            "a PeftModel lies inside another",
            meaning="the names in an adapter's file match nothing there",
            fix="wrap the base model once",
        )
    holder = saved_module(model)  # transformers puts adapters on a model without PEFT's model around
    if not hasattr(holder, "peft_config"):
        return
    adapters = ", ".join(holder.peft_config)
    trained = [name for name, config in holder.peft_config.items() if hasattr(config, TABLES_ATTRIBUTE)]
    if record is not None:
        try:
            check_adapters_in_model(holder, record)
        except PatchError as error:
            yield Check("adapters", DIFFERS, str(error))
        else:
            yield Check("adapters", HOLDS, f"{adapters} were trained here or carry the record of these tables")
    elif trained:
        method = getattr(holder.peft_config[trained[0]], TABLES_ATTRIBUTE).to_method()
        yield Check(
            "adapters",
            DIFFERS,
            f"the adapter {trained[0]!r} was trained under {method}, and the model is not patched",
            f"the table of {method}",
            "the adapter works on angles that it never saw",
            f"rope_patch.apply(model, {str(method)!r})",
        )
    else:
        yield Check("adapters", NOTE, f"nothing says under which tables {adapters} was trained")


CHECKS: tuple[Callable[[Subject], Iterator[Check]], ...] = (
    record_is_whole,
    config_describes_table,
    settings_are_read,
    module_uses_table,
    tables_can_be_patched,
    contexts_agree,
    adapters_fit,
)
"""Every check of a model, in the order in which they are made."""
