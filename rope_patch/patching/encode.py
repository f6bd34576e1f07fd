"""Encode tables in a config so that transformers rebuilds them, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.generic import flatten_dict

from rope_patch import frequencies
from rope_patch.methods import Method, Scaling
from rope_patch.methods.already_scaled import ORIGINAL, context_before, context_reached
from rope_patch.methods.longrope import longrope_form
from rope_patch.patching.config_settings import READ_GLOBAL, build_rotary, config_with, encoding_of, settings_of
from rope_patch.patching.locate import Location
from rope_patch.patching.older_keys import ROPE_TYPES
from rope_patch.patching.probe import copy_without_weights, values_kept_by_modules
from rope_patch.patching.record import PatchRecord, key_of, records_of
from rope_patch.patching.rotary import original_tables, scaling_of
from rope_patch.tables import RotaryTable, Tables, choose_layer_types


@dataclass(frozen=True)
class PatchRequest:
    """The options of :func:`rope_patch.apply`, which says what they mean.

    Raises:
        ValueError: ``target_length`` is not a whole number above 0.
    """

    layer_types: Sequence[str] | None = None
    target_length: int | None = None
    replace: bool = False
    freeze_at: int | None = None

    def __post_init__(self) -> None:
        length = self.target_length
        # Python's True is an int, and would be a context of one token.
        if length is not None and (type(length) is not int or length < 1):
            raise ValueError(f"target_length must be a whole number of tokens >= 1, got {length!r}")


@dataclass(frozen=True, eq=False, repr=False)
class TableChange:
    """The change that a patch makes in a model or in a file.

    Attributes:
        method: the method that is applied, with every parameter resolved.
        before: the tables before the patch, by layer type.
        after: the tables after the patch, by layer type; a table that is not patched is the same object as before.
        record: the patch record that ``config.rope_patch`` holds.
    """

    method: Method
    before: Tables
    after: Tables
    record: PatchRecord

    @property
    def unstated(self) -> str | None:
        """A warning if the tables reach further than the context that the config states; otherwise None."""
        reached = [self.method.reach(self.before[kind]) or 0 for kind in self.record.layer_types]
        stated = self.record.stated_length
        furthest = max(reached)
        if furthest <= stated:
            return None
        return (
            f"{self.method} reaches {furthest} tokens, the checkpoint still states a context of {stated}: "
            f"target_length={furthest} (--target-length) states the longer one"
        )

    def __str__(self) -> str:
        """Return the tables before and after, a line each."""
        lines = [f"patch {self.method}"]
        for kind, table in self.after.items():
            if table is self.before[kind]:
                lines.append(f"  {table}: left alone")
            else:
                lines += [f"  before  {self.before[kind]}", f"  after   {table}", *self._counts_from(kind)]
        stated = self.record.base_config["max_position_embeddings"]
        if self.record.stated_length != stated:
            lines.append(f"  context {stated} tokens before, {self.record.stated_length} after")
        elif self.unstated is not None:
            lines.append(f"  {self.unstated}")
        return "\n".join(lines)

    def _counts_from(self, kind: str | None) -> list[str]:
        """Return what the factor of the method counts from, where the checkpoint is scaled already."""
        before = self.before[kind]
        after = self.after[kind]
        if not isinstance(self.method, Scaling) or before.is_plain:
            return []
        reached = context_reached(before)
        line = f"  factor {self.method.stretch:g}, counted from the {reached} tokens that "
        line += "the config states" if reached == before.max_position_embeddings else "its own factor reaches"
        whole = original = None  # where the method works on top of the table as it is
        if before.rope_type == after.rope_type:
            stated = after.rope_parameters or {}
            whole = stated.get("factor")
            original = stated.get(ORIGINAL)
        elif self.method.recomputes:
            original = context_before(before, getattr(self.method, ORIGINAL, None))
            whole = self.method.stretch * reached / original
        if original not in (None, reached):
            line += f"; counted from the {original} tokens before any scaling it is {whole:g}"
        return [line]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.method}>"


@dataclass(frozen=True, eq=False, repr=False)
class PatchPlan(TableChange):
    """A patch that is not in place yet.

    Attributes:
        settings: the rotary settings that the config will hold.
    """

    settings: Mapping[str, Any]


def encode_tables(location: Location, method: Method, options: PatchRequest, *, recorded: bool = False) -> PatchPlan:
    """Apply a method to the base tables of a model, and find config settings that encode the new tables.

    From the settings the model's own rotary class rebuilds every table, to the last bit. The native encoding of each
    table is tried first, then the longrope form; an encoding is accepted if that class rebuilds the table from the
    config after a round trip through JSON. A table whose last bits no longrope factor reaches is replaced by the one
    that the nearest factors give.

    Args:
        location: the location of the model's rotary module.
        method: the method that makes the new tables.
        options: the options say which tables are patched, and which context they reach and the config states.
        recorded: whether the method comes from a patch record, so that its factor is resolved already.

    Raises:
        ValueError: the options are wrong, the method is not for these tables, no config of transformers gives the new
            tables, or none gives them without changing what other modules read.
    """
    before = location.static_tables(options.freeze_at)
    chosen = choose_layer_types(before, options.layer_types, method.named_layer_types)
    if not recorded:
        method = method.extended_to([before[kind] for kind in chosen], options.target_length)
    after = {**before, **{kind: method(before[kind]) for kind in chosen}}
    config = location.base_config
    base_settings = settings_of(config)
    length = options.target_length or int(config.max_position_embeddings)
    settings = settings_of(config) | {"max_position_embeddings": length}
    # Keys that some families need beside the tables, tried only after the settings without them.
    extras: list[dict[str, Any]] = [{}]
    if getattr(config, "is_heterogeneous", False):
        extras.append({READ_GLOBAL: True})
    # Mixtral's head_dim may be None, and transformers' own YaRN fails on that, since it multiplies by head_dim.
    if settings.get("head_dim", 0) is None:
        extras.append({"head_dim": config.hidden_size // config.num_attention_heads})
    for kind, table in list(after.items()):
        # A table that is left alone keeps its own encoding. One that was edited by hand or frozen has none that gives
        # it, so it is encoded although the method does not touch it.
        if table is not before[kind] or table.rope_parameters is None or location.tables[kind].is_dynamic:
            stated = replace(table, max_position_embeddings=length)
            starts = [settings | extra for extra in extras]
            follow = "mscale_all_dim" in (stated.rope_parameters or {})
            after[kind], settings = encode_table(location, [*_own_encodings(stated)], starts, follow=follow)
    # A setting that is stated twice is written as transformers takes it.
    parameters = settings["rope_parameters"]
    if None not in after:
        settings.pop(ORIGINAL, None)
    elif settings.get(ORIGINAL) is not None and ORIGINAL in parameters:  # in Phi-3
        settings[ORIGINAL] = parameters[ORIGINAL]
    for stated in (parameters, *parameters.values()):
        if isinstance(stated, dict) and stated.get("type") in ROPE_TYPES:
            stated["type"] = stated["rope_type"]
        if isinstance(stated, dict) and "max_position_embeddings" in stated:  # in Ministral 3
            stated["max_position_embeddings"] = length
    record = PatchRecord(
        method=method.to_dict(),
        layer_types=chosen,
        tables=records_of(after),
        base_tables=records_of(before),
        base_config=base_settings,
        target_length=options.target_length,
        freeze_at=options.freeze_at,
        edited=tuple(key_of(kind) for kind, table in before.items() if table.rope_parameters is None),
    )
    return PatchPlan(method, before, after, record, settings)


def plan_from_record(location: Location, record: PatchRecord) -> PatchPlan:
    """Return the plan of the patch that a record describes, computed again from the base tables."""
    kinds = [kind for kind in record.layer_types if kind is not None]
    options = PatchRequest(kinds or None, record.target_length, freeze_at=record.freeze_at)
    return encode_tables(location, record.to_method(), options, recorded=True)


def encode_table(
    location: Location, encodings: Sequence[RotaryTable], starts: Sequence[dict[str, Any]], *, follow: bool = False
) -> tuple[RotaryTable, dict[str, Any]]:
    """Return a table with its encoding, and the first settings from which the model's own code rebuilds it.

    Args:
        location: the location of the model's rotary module.
        encodings: the table that is encoded, with encodings that are tried in this order: each as it is, and then with
            keys that other readers may need.
        starts: alternative settings to which the encoding is added, tried in this order.
        follow: whether DeepSeek's attention, which applies a factor of its own from ``mscale_all_dim``, may take the
            one of the encoding: a table that states it means that, too.

    Raises:
        ValueError: no config of transformers gives the table, or none without changing what other modules read.
    """
    kind = encodings[0].layer_type
    # The reason of the attempt that failed last is the one that is shown.
    reason = "the table it rebuilds is another"
    for settings in starts:
        for candidate in _complete(location, encodings):
            parameters = dict(candidate.rope_parameters or {})
            if kind is not None:
                # What stands beside the tables is read by nobody here, and other programs may take it for a table.
                tables = {k: v for k, v in settings["rope_parameters"].items() if isinstance(v, Mapping | None)}
                parameters = {**tables, kind: parameters}
            trial = settings | {"rope_parameters": parameters}
            try:
                config = config_with(location.base_config, trial)
                rebuilt = build_rotary(location.rotary_class, config)
            except Exception as error:  # each family refuses a type in its own way: Phi-3 takes only longrope
                reason = f"{type(error).__name__}: {error}"
                continue
            if not _same_table(rebuilt, candidate):
                continue
            if (changed := change_for_readers(location, config, follow=follow)) is None:
                return candidate, trial
            reason = f"{changed}; a patch changes the table alone"
    raise ValueError(
        f"{location.name} cannot express this table in a config that plain transformers reads; nothing was changed. "
        f"The last encoding failed with {reason}"
    )


def _complete(location: Location, encodings: Sequence[RotaryTable]) -> Iterator[RotaryTable]:
    """Yield each encoding first as it is, and then with keys that other readers may need."""
    for candidate in encodings:
        for parameters in _completed(location, candidate.layer_type, candidate.rope_parameters or {}):
            yield replace(candidate, rope_parameters=parameters)


def _own_encodings(table: RotaryTable) -> Iterator[RotaryTable]:
    native = table.rope_parameters
    if native is not None:
        yield table
        # A family may ignore a partial_rotary_factor in plain RoPE, while the native type would obey it.
        if table.other_keys:
            yield replace(table, rope_parameters={k: v for k, v in native.items() if k not in table.other_keys})
    # The longrope form divides each pair by a factor of its own, so it states any table. The last bits follow from the
    # factors: the table is computed from them as the loader does it, and then compared with `torch.equal`.
    rebuilt, form = longrope_form(table)
    inv_freq = frequencies.zero_unrotated(rebuilt)
    scaling = {"short_mscale": table.attention_scaling, "long_mscale": table.attention_scaling}
    # Phi-MoE insists on short_mscale and long_mscale, even if they are 1.
    for own in (table.other_keys, {}, scaling):
        yield replace(table, inv_freq=inv_freq, rope_type="longrope", rope_parameters={**own, **form})


def _same_table(rotary: nn.Module, table: RotaryTable) -> bool:
    built = original_tables(rotary)[table.layer_type]
    # A native type leaves a tiny frequency where our tables hold 0: both mean an unrotated pair.
    return torch.equal(frequencies.zero_unrotated(built), table.inv_freq) and (
        scaling_of(rotary, table.layer_type) == table.attention_scaling
    )


# --- what else reads the config --------------------------------------------------------------------------------------


def _completed(location: Location, layer_type: str | None, encoding: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield an encoding as it is, then with more and more keys of the base config that other readers may need."""
    yield dict(encoding)
    looked_up = {keys[-1] for _, keys in location.probe.lookups}
    if looked_up or location.probe.builders:
        base = {key: value for key, value in encoding_of(location.base_config, layer_type).items() if key != "type"}
        yield {**{key: value for key, value in base.items() if key in looked_up}, **encoding}
        yield {**base, **encoding}
        # In the longrope form the lists and the attention factor describe the whole table, so other readers may have
        # the keys that the base config states.
        if encoding.get("rope_type") == "longrope":
            scaling_keys = ("factor", "original_max_position_embeddings")
            yield {**base, **encoding, **{key: base[key] for key in scaling_keys if key in base}}


def change_for_readers(location: Location, config: PreTrainedConfig, *, follow: bool = False) -> str | None:
    """Say what other readers of ``rope_parameters`` would do differently under a config; None if they do the same.

    Args:
        location: the location of the model's rotary module, with the probe that found the other readers.
        config: the config that would replace the one in place.
        follow: whether modules that read it as they are built may take what it says (:func:`attributes_that_follow`).
    """
    base = location.base_config
    probe = location.probe
    if config.rope_parameters == base.rope_parameters:
        return None
    old = flatten_dict(base.rope_parameters)
    new = flatten_dict(config.rope_parameters)
    for reader, keys in probe.lookups:
        if None in keys:
            return f"{reader} reads config.rope_parameters in a way that is not known"
        name = ".".join(map(str, keys))
        if old.get(name) != new.get(name):
            return f"{reader} would read {name} as {new.get(name)}, and it is {old.get(name)}"
    if not probe.builders or config.rope_parameters == location.config.rope_parameters:
        return None
    values = _values_kept(location, settings_of(config))
    if values is None or probe.reader_values is None:
        return f"{location.name} reads config.rope_parameters as it is built, and what it makes of them cannot be seen"
    if follow:
        return None
    for key in {**probe.reader_values, **values}:
        had = probe.reader_values.get(key)
        has = values.get(key)
        if had != has:
            name, attribute = key
            reader = f"{name} ({type(location.model.get_submodule(name)).__name__})"
            return f"{reader} would be built with a {attribute} of {has!r}, and it has {had!r}"
    return None


def attributes_that_follow(location: Location, settings: Mapping[str, Any]) -> list[tuple[nn.Module, str, Any, Any]]:
    """Return what modules took from the rotary settings as they were built, and would not take from other settings.

    Args:
        location: the location of the model's rotary module.
        settings: the other settings.

    Returns:
        Modules with the name of an attribute, its value under the settings in place, and that under the others.
    """
    if not location.probe.builders or settings["rope_parameters"] == location.config.rope_parameters:
        return []
    # The probe has seen an unpatched model's.
    old = location.probe.reader_values
    if location.record is not None:
        old = _values_kept(location, settings_of(location.config))
    new = _values_kept(location, settings)
    if old is None or new is None:
        return []
    return [
        (location.model.get_submodule(name), attribute, old[name, attribute], value)
        for (name, attribute), value in new.items()
        if old[name, attribute] != value
    ]


def _values_kept(location: Location, settings: Mapping[str, Any]) -> dict[tuple[str, str], Any] | None:
    """Return what the modules that read the rotary settings as they are built keep under some settings."""
    # What a module reads while it is built shows only in what it keeps, so the model is built once more.
    built = copy_without_weights(location.model, location.configs, settings, [])
    return None if built is None else values_kept_by_modules(built, location.probe.builders)
