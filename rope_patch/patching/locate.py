"""Where a model has its rotary module, and everything that is known about it, read once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.generic import flatten_dict

from rope_patch import frequencies
from rope_patch.methods.longrope import longrope_parameters
from rope_patch.methods.ntk import ntk_theta
from rope_patch.patching.config_settings import build_rotary, config_with, encoding_of, settings_of, silent_transformers
from rope_patch.patching.probe import Probe, probe
from rope_patch.patching.record import PatchRecord, key_of, records_of, same_tables
from rope_patch.patching.rotary import (
    PatchedRotary,
    RotaryLayout,
    call,
    fits,
    layout_of,
    original_tables,
    scaling_of,
)
from rope_patch.runtime.errors import as_value_error
from rope_patch.tables import RotaryTable, Tables, other_keys

_POSITIONS = torch.tensor([[0, 1, 2, 3, 5, 17, 101, 211]], device="cpu")
# Keys of a config.json that change a table: those of its older and newer rotary dictionaries, and those beside them.
_CHANGES_TABLE = re.compile(
    r"(text_config\.)?(rope_\w+(\.\w+)*\.(rope_theta|rope_type|\w*factor)|rope_\w+|partial_rotary_factor)"
)
# A probe builds the model's layers again, which takes longer than all other steps of a patch together.
_probes: dict[Any, Probe] = {}


class PatchError(ValueError):
    """A patch is missing, doubled or altered, or it is not what the model really uses."""


@dataclass(frozen=True, eq=False)
class Location:
    """Where a model has its rotary module, and everything that is known about it.

    What costs time is read when it is first asked for, and stored: a location describes the model as it was then.

    Attributes:
        model: the model of transformers, without PEFT's and other wrappers.
        decoder: the text decoder of the model, which runs the rotary embedding.
        path: the name of the rotary module in the model.
        module: the rotary module, original or patched.
        configs: the configs that hold rotary settings; the text decoder's comes first.
        record_data: the ``rope_patch`` entry of the text decoder's config; None on an unpatched model.
    """

    model: PreTrainedModel
    decoder: PreTrainedModel
    path: str
    module: nn.Module
    configs: tuple[PreTrainedConfig, ...]
    record_data: Any

    @property
    def config(self) -> PreTrainedConfig:
        """The text decoder's config."""
        return self.configs[0]

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    @cached_property
    def record(self) -> PatchRecord | None:
        """The patch record of the config, checked; None on an unpatched model.

        Raises:
            PatchError: the record is malformed, or it was altered.
        """
        if self.record_data is None:
            return None
        try:
            return PatchRecord.from_dict(self.record_data)
        except ValueError as error:
            raise PatchError(f"{self._source}: {error}") from error

    @property
    def _source(self) -> str:
        """The file that holds the record, for messages; the model's class if it came from no checkpoint."""
        return f"config.json of {self.model.config.name_or_path or self.name}"

    @cached_property
    def base_config(self) -> PreTrainedConfig:
        """The text decoder's config as it is on an unpatched model, or as it was before the patch."""
        if self.record is None:
            return self.config
        with as_value_error(f"{self._source}: {_ALTERED}"):
            return config_with(self.config, self.record.base_config)

    @property
    def patched(self) -> PatchedRotary | None:
        """The rotary module, if it is a patched one; otherwise None."""
        return self.module if isinstance(self.module, PatchedRotary) else None

    @property
    def without_numbers(self) -> bool:
        """Whether the rotary module is on the meta device, so that its table is known from the config alone."""
        return any(buffer.is_meta for buffer in self.module.buffers())

    @property
    def rotary_class(self) -> type[nn.Module]:
        """The model's own rotary class."""
        if self.patched is not None:
            return type(self.patched.original)
        return type(self.module)

    @cached_property
    def rebuilt(self) -> nn.Module:
        """A module that :attr:`rotary_class` builds from the base config."""
        return build_rotary(self.rotary_class, self.base_config)

    @cached_property
    def stated_tables(self) -> Tables:
        """The tables that the config in force describes, as the model's own class computes them."""
        return _described(build_rotary(self.rotary_class, self.config), self.config, self.path)

    @cached_property
    def original(self) -> nn.Module:
        """The original module: the one in place on an unpatched model, or the one from before the patch."""
        if self.patched is not None:
            return self.patched.original
        if self.record is None:
            return self.module
        # A patched folder that plain transformers loaded: the module in place is transformers' own, with our table.
        with as_value_error(f"{self._source}: {_ALTERED}"):
            return self.rebuilt

    @cached_property
    def layout(self) -> RotaryLayout:
        """The layout in which the rotary module returns cos and sin."""
        kind, inv_freq = next(iter(original_tables(self.original).items()))
        return layout_of(self.original, kind, len(inv_freq)) or RotaryLayout.HALVES

    @cached_property
    def _base(self) -> tuple[Tables, tuple[str, ...]]:
        return _read_base(self)

    @property
    def tables(self) -> Tables:
        """The base tables: those in use, or those in use before the patch.

        Raises:
            ValueError: the rotary embedding is of another kind, or the config does not state its context.
        """
        return self._base[0]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what is unusual about the base tables, and about the layers that use them."""
        return tuple(filter(None, (*self._base[1], self.windowed)))

    def static_tables(self, freeze_at: int | None) -> Tables:
        """Return the base tables from which a patch starts; none of them changes with the length.

        Args:
            freeze_at: the length at which a dynamic table is frozen [tokens].

        Raises:
            ValueError: there is a dynamic table and no length, or a length and no dynamic table.
        """
        dynamic = [table for table in self.tables.values() if table.is_dynamic]
        if freeze_at is not None and not dynamic:
            raise ValueError(f"freeze_at is for dynamic tables; {self.path} has none")
        if freeze_at is None and dynamic:
            raise ValueError(
                f"{dynamic[0].path} has a dynamic table (rope_type {dynamic[0].rope_type!r}): it changes with the "
                "length during generation and breaks cached keys. Pass freeze_at=LENGTH to fix it as it is at that "
                "length"
            )
        frozen = {table.layer_type: _table_at_length(table, self.base_config, freeze_at or 0) for table in dynamic}
        return {**self.tables, **frozen}

    def check_base(self) -> None:
        """Raise PatchError unless the record's ``base_config`` gives the base tables that the record holds."""
        record = self.record
        if record is not None and not same_tables(records_of(self.static_tables(record.freeze_at)), record.base_tables):
            raise PatchError(
                f"{self._source}: the rope_patch record was altered: its base_config does not give its base tables"
            )

    def check_contexts(self) -> None:
        """Raise ValueError where a ``linear`` factor counts from ``max_position_embeddings``, as that of Vicuna 16k."""
        config = self.base_config
        parameters: Any = getattr(config, "rope_parameters", None) or {}
        stated = getattr(config, "max_position_embeddings", None)
        trained = getattr(config, "max_sequence_length", None)
        if parameters.get("rope_type") != "linear" or stated is None or trained in (None, stated):
            return
        if trained == stated * parameters["factor"]:
            raise ValueError(
                f"the config of {self.name} states two contexts, max_position_embeddings {stated} and "
                f"max_sequence_length {trained}, which is as far as its factor {parameters['factor']:g} reaches. Write "
                f"{trained} into max_position_embeddings, and original_max_position_embeddings {stated} into its "
                "rotary settings: a factor is the new context over the stated one"
            )

    @cached_property
    def probe(self) -> Probe:
        """What a copy of the model without weights shows; a probe of an equal model is used again."""
        base = self.base_config
        settings = settings_of(base)
        # The whole config is part of the key, since it decides which layers there are; as it was before any patch.
        whole = base if type(self.model.config) is type(base) else self.model.config
        key = (type(self.model), whole.to_json_string(use_diff=False), str(settings))
        if key not in _probes:
            if len(_probes) == 256:  # a process may go through any number of models
                _probes.clear()
            _probes[key] = probe(self.model, self.decoder, self.path, self.configs, settings, self.tables)
        return _probes[key]

    @property
    def windowed(self) -> str | None:
        """A sentence that says so if no layer that rotates sees the whole stated context; None if one does."""
        window = self.probe.window
        context = self.base_config.max_position_embeddings
        if window > context:
            return None
        return (
            f"no layer of {self.name} that rotates sees beyond its window of {window} tokens, and a context of "
            f"{context} is stated: a longer context needs no other table. rope-patch apply MODEL default "
            "--target-length N -o OUT states it"
        )

    def check_windowed(self) -> None:
        """Raise ValueError where no layer that rotates sees the whole context, so that a longer one needs no table."""
        if self.windowed is not None:
            raise ValueError(self.windowed)

    def unread_settings(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """Return the rotary settings of an unpatched model that nothing in it reads, by their paths.

        The probe shows which keys of ``rope_parameters`` the model's code looks up, so that no family is named here. A
        setting that repeats a value which is read is left out. A patched model uses the tables of its record.

        Args:
            stated: what states the settings: the contents of a config.json, or the whole config as a dict.
        """
        if self.record is not None:
            return {}
        config = self.config
        # A look-up of None is one of all keys. Settings of a layer type that no layer has are for nobody to read.
        used = [
            value
            for name, value in flatten_dict(config.rope_parameters).items()
            if {name, re.sub(r"\w+$", "None", name)} & self.probe.read
            or ("." in name and not {name.partition(".")[0], None} & self.tables.keys())
        ]
        return {
            name: value
            for name, value in flatten_dict(dict(stated)).items()
            if used
            and _CHANGES_TABLE.fullmatch(name)
            and not hasattr(type(config), name)
            and value not in [*used, None, False, 1, "default", {}]
        }

    def cos_sin(self, layer_type: str | None, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of each pair as the module in place computes them: (1, positions, pairs) float32."""
        return self.layout.pairs(call(self.module, layer_type, position_ids))


_ALTERED = "the rope_patch record was altered: transformers cannot build the table of its base_config"


def locate(model: nn.Module) -> Location:
    """Find the one rotary embedding of a model's text decoder, through PEFT, ``torch.compile`` and DDP wrappers.

    Raises:
        TypeError: it is not a model of transformers.
        ValueError: the model has no rotary table, or several modules with tables of their own.
    """
    base = base_of(model)
    decoder: Any = base.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # ModernBERT calls its output layer a decoder
        decoder = base
    modules = [
        module
        for module in decoder.modules()
        if isinstance(module, PatchedRotary) or (module._buffers and original_tables(module))
    ]
    if not modules:
        raise ValueError(
            f"found no rotary table in {type(base).__name__}: rope_patch needs a module with an 'inv_freq' buffer"
        )
    if len(modules) > 1:
        raise ValueError(
            f"{type(base).__name__} has {len(modules)} rotary modules of its own ({type(modules[0]).__name__}, …): "
            "rope_patch patches decoders with one shared rotary embedding"
        )
    module = modules[0]
    path = next(name for name, child in base.named_modules() if child is module)
    # Mostly one object, but after a copy or in a multimodal model they can be several, and each has to say the same.
    configs = (base.config.get_text_config(), getattr(module, "config", None), decoder.config)
    distinct: dict[int, Any] = {id(config): config for config in configs if config is not None}
    return Location(base, decoder, path, module, tuple(distinct.values()), getattr(configs[0], "rope_patch", None))


def base_of(model: nn.Module) -> PreTrainedModel:
    """Return the model of transformers inside PEFT, ``torch.compile`` and DDP wrappers.

    Raises:
        TypeError: there is none.
    """
    *_, base = _layers_of(model)
    if not isinstance(base, PreTrainedModel):
        hint = ""
        if isinstance(base, str | PathLike):
            hint = f": load it with rope_patch.load({str(base)!r})"
        raise TypeError(f"expected a transformers model, got {type(base).__name__}{hint}")
    return base


def _layers_of(model: Any) -> Iterator[Any]:
    """Yield a model and the models inside its wrappers, down to the model of transformers."""
    while True:
        yield model
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()
        elif not isinstance(model, PreTrainedModel) and isinstance(getattr(model, "module", None), nn.Module):  # DDP
            model = model.module
        else:
            return


def holds_adapters_twice(model: nn.Module) -> bool:
    """Tell whether a PEFT model is inside another one, so that an adapter's weights are not found by their names."""
    return sum(hasattr(layer, "get_base_model") and not hasattr(layer, "_orig_mod") for layer in _layers_of(model)) > 1


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter that is not on the meta device."""
    devices = (parameter.device for parameter in model.parameters())
    return next((device for device in devices if device.type != "meta"), torch.device("cpu"))


# --- the base tables -------------------------------------------------------------------------------------------------


def _read_base(location: Location) -> tuple[Tables, tuple[str, ...]]:
    """Return the base tables of a model, and warnings of what is unusual about them.

    A buffer that a cast has rounded is read as the table that its config describes. One that was edited by hand is read
    as it is.

    Raises:
        ValueError: the rotary embedding is of another kind, or the config does not state its context.
    """
    original = location.original
    config = location.base_config
    context: Any = getattr(config, "max_position_embeddings", None)
    try:
        # Of a module that was just built: the model's own may be rounded, on another device or on none.
        tables = _described(location.rebuilt, config, location.path)
        for kind, buffer in original_tables(location.rebuilt).items():
            _check_kind(location, tables[kind], buffer.float())
    except Exception as error:
        raise ValueError(
            f"{location.name} has a rotary embedding of another kind ({location.rotary_class.__name__}): rope_patch "
            f"needs cos and sin of position x inv_freq, one angle per pair ({error})"
        ) from error
    if type(context) is not int or not 1 <= context < 2**63:  # torch has no larger integers
        source = config.name_or_path or location.name
        raise ValueError(f"{source}: max_position_embeddings must be a number of tokens from 1 on, got {context!r}")
    warnings = []
    held = original_tables(original)
    for kind, table in tables.items():
        if location.record is not None and key_of(kind) in location.record.edited:
            base = location.record.base_tables[key_of(kind)]
            tables[kind] = _by_numbers(table, frequencies.table_of(base.inv_freq), base.attention_scaling)
        elif not table.is_dynamic:
            tables[kind], table_warnings = _as_in_use(table, held[kind], scaling_of(original, kind))
            warnings += table_warnings
    return tables, tuple(warnings)


def _described(module: nn.Module, config: Any, path: str) -> dict[str | None, RotaryTable]:
    """Return the tables of a module that was built from a config, with what that config says about them."""
    context: Any = getattr(config, "max_position_embeddings", None)  # the caller checks it
    tables = {}
    for kind, buffer in original_tables(module).items():
        encoding = encoding_of(config, kind)
        tables[kind] = RotaryTable(
            inv_freq=frequencies.zero_unrotated(buffer.float()),
            attention_scaling=scaling_of(module, kind),
            rope_theta=float(encoding["rope_theta"]),
            rope_type=_rope_type(module, kind, encoding),
            max_position_embeddings=context,
            original_max_position_embeddings=encoding.get("original_max_position_embeddings"),
            layer_type=kind,
            path=path,
            rope_parameters=encoding,
            other_keys=other_keys(encoding),
        )
    return tables


def _rope_type(module: nn.Module, kind: str | None, encoding: Mapping[str, Any]) -> str:
    """Return the type of a table as its module names it, or else its config.

    The module comes first, since HunYuan's has a static kind of the type that its config calls dynamic.
    """
    named = getattr(module, "rope_type", None)
    if isinstance(named, Mapping):
        named = named.get(kind)
    if isinstance(named, str):
        return named
    return str(encoding.get("rope_type", "default"))


def _check_kind(location: Location, table: RotaryTable, inv_freq: Tensor) -> None:
    """Raise ValueError unless calling the module gives cos and sin of position x inv_freq, in a known layout."""
    if not torch.isfinite(inv_freq).all():
        raise ValueError("its table holds numbers that are not finite")
    # Far positions would change a dynamic table.
    positions = _POSITIONS[:, :4] if table.is_dynamic else _POSITIONS
    learned = [name for name in location.original.state_dict() if not name.endswith("inv_freq")]
    if learned:
        raise ValueError(f"the weights file holds a part of its table, {', '.join(learned)}, which no config states")
    returned = call(location.rebuilt, table.layer_type, positions)
    if not fits(location.layout, returned, positions[..., None].float() * inv_freq, table.attention_scaling):
        raise ValueError("its cos and sin are another function of the position, or in another layout")


def _as_in_use(table: RotaryTable, buffer: Tensor, scaling: float) -> tuple[RotaryTable, list[str]]:
    """Return the table that a patch has to start from, and warnings.

    Args:
        table: the table that the config describes.
        buffer: the ``inv_freq`` that the model's module holds: (pairs,) [rad/token].
        scaling: the attention factor that this module holds.
    """
    if buffer.is_meta:
        return table, []
    in_use = buffer.detach().float().cpu()
    same_scaling = scaling == table.attention_scaling
    if same_scaling and torch.allclose(in_use, table.inv_freq, rtol=1e-6, atol=frequencies.UNROTATED):
        return table, []
    error = float(((in_use - table.inv_freq).abs() / table.inv_freq.clamp_min(frequencies.UNROTATED)).max())
    # Rounding is an accident of `.to(bfloat16)`, so it is undone; any other difference is taken as intended.
    for dtype in (torch.bfloat16, torch.float16):
        if same_scaling and torch.equal(in_use, table.inv_freq.to(dtype).float()):
            warning = f"{table.name} was rounded to {dtype} by a cast (up to {error:.2%} off)"
            return table, [f"{warning}; a patch starts from the float32 table of the config"]
    warning = (
        f"{table.name} is not the table its config describes (up to {error:.2%} off, attention_scaling {scaling:g} "
        f"for {table.attention_scaling:g}); saving without a patch would lose it"
    )
    return _by_numbers(table, frequencies.zero_unrotated(in_use), scaling), [warning]


def _by_numbers(table: RotaryTable, inv_freq: Tensor, scaling: float) -> RotaryTable:
    """Return a table with other numbers, which no config describes."""
    return replace(table, inv_freq=inv_freq, attention_scaling=scaling, rope_type="custom", rope_parameters=None)


def _table_at_length(table: RotaryTable, config: PreTrainedConfig, length: int) -> RotaryTable:
    """Return the table that a dynamic type uses at ``length`` tokens.

    Args:
        table: the table that changes with the length.
        config: the config from which transformers builds it.
        length: the length at which it is taken [tokens].

    Raises:
        ValueError: ``length`` is below 1, or the model builds its table in a way of its own.
    """
    if length < 1:
        raise ValueError(f"freeze_at must be >= 1 token, got {length}")
    with torch.device("cpu"), silent_transformers():
        build = ROPE_INIT_FUNCTIONS[table.rope_type]
        now, _ = build(config, seq_len=1, layer_type=table.layer_type)
        inv_freq, scaling = build(config, seq_len=length, layer_type=table.layer_type)
    # Some families have a function of their own under the same type: transformers' would give another table.
    if not torch.equal(frequencies.zero_unrotated(now), table.inv_freq):
        raise ValueError(f"{table.name} builds its {table.rope_type} table in a way of its own: it cannot be frozen")
    encoding = table.rope_parameters or {}
    if table.rope_type == "longrope":
        factors = encoding["long_factor" if length > table.context else "short_factor"]
        native = longrope_parameters(factors, table, attention_scaling=scaling)
    else:
        # The base of transformers' _compute_dynamic_ntk_parameters, from which "default" builds the same table.
        grown = encoding["factor"] * max(length, table.max_position_embeddings) / table.max_position_embeddings
        theta = ntk_theta(table.rope_theta, grown - (encoding["factor"] - 1), table.rotary_dim)
        native = {"rope_type": "default", "rope_theta": theta}
    frozen = table.becomes(inv_freq, rope_parameters=native, attention_scaling=scaling)
    # A method that recomputes a table from its base starts from the model's own base, not from the grown one.
    return replace(frozen, rope_theta=table.rope_theta)
