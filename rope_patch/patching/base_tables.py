"""The tables that a model's config describes and its rotary embedding holds, as they are or were before a patch."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_patch import frequencies
from rope_patch.errors import blamed_on
from rope_patch.methods import longrope_parameters
from rope_patch.patching.layout import RotaryLayout, layout_of
from rope_patch.patching.locate import PatchError, RotaryLocation, original_tables
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.record import TableRecord, key_of, same_tables
from rope_patch.tables import RotaryTable, other_keys

Tables = dict[str | None, RotaryTable]


READ_GLOBAL = "allow_global_per_layer_attribute_access"
"""On configs whose head_dim varies by layer (Gemma 4), transformers' own check of the longrope form reads the global
head_dim, which such a config refuses unless it says this. The rotary class itself reads the right one."""


CONFIG_KEYS = ("rope_parameters", "max_position_embeddings", "original_max_position_embeddings", READ_GLOBAL)
"""The keys of a config that a patch may set. The original context Phi-3 owns, and Phi-MoE copies it out of
``rope_parameters`` whenever those are checked."""


def base_of(location: RotaryLocation) -> tuple[nn.Module, PreTrainedConfig]:
    """Return the original module and config as they are, or were before the patch."""
    module = location.module.original if isinstance(location.module, PatchedRotary) else location.module
    record = location.record
    if record is None:
        return module, location.config
    with blamed_on("the rope_patch record was altered: transformers cannot build the table of its base_config"):
        config = config_with(location.config, record.base_config)
        return (module if isinstance(location.module, PatchedRotary) else original_rotary(type(module), config)), config


def config_with(config: PreTrainedConfig, settings: Mapping[str, Any]) -> PreTrainedConfig:
    """Return what transformers makes of the config with other rotary settings: through its JSON form, no record."""
    own = {name_in(config, key): key for key in (*CONFIG_KEYS, "rope_patch")}
    data = {k: v for k, v in _decoded(json.loads(config.to_json_string())).items() if k not in own}
    with quiet():
        given = {name_in(config, key): copy.deepcopy(value) for key, value in settings.items()}
        return type(config).from_dict(data | given)


def _decoded(value: Any) -> Any:
    """Read the infinities of a config as transformers writes them."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: _decoded(v) for k, v in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def name_in(config: PreTrainedConfig, key: str) -> str:
    """Return what a family calls a key of its config."""
    return str(config.attribute_map.get(key, key))


def settings_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a copy of the config's rotary settings, an open ``head_dim`` among them."""
    own = {key: name_in(config, key) for key in CONFIG_KEYS}
    if config.__dict__.get("head_dim", 0) is None:
        own["head_dim"] = "head_dim"
    return {key: copy.deepcopy(config.__dict__[name]) for key, name in own.items() if name in config.__dict__}


def original_rotary(rotary_class: type[nn.Module], config: PreTrainedConfig) -> nn.Module:
    """Build the model's own rotary class from a config, on the CPU."""
    with torch.device("cpu"), quiet():
        return rotary_class(config)


# transformers calls these two keys of the longrope form unrecognized each time a config is read. vLLM takes the
# attention scaling from them alone, so they are right where they are, and nobody needs the warning.
_OUR_KEYS = re.compile(r"Unrecognized keys in .*: \{'(?:short|long)_mscale', '(?:short|long)_mscale'\}")
logging.getLogger("transformers.modeling_rope_utils").addFilter(lambda r: not _OUR_KEYS.fullmatch(r.getMessage()))

_silent: contextvars.ContextVar[bool] = contextvars.ContextVar("silent", default=False)


def _unless_silent(record: logging.LogRecord) -> bool:
    return not _silent.get()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' logging of trial configs and models, in this thread alone."""
    names = ("modeling_rope_utils", "configuration_utils", "modeling_utils")
    speakers = [logging.getLogger(f"transformers.{name}") for name in names]
    for place in (*speakers, *logging.getLogger("transformers").handlers):
        if _unless_silent not in place.filters:
            place.addFilter(_unless_silent)
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def encoding_of(config: PreTrainedConfig, layer_type: str | None) -> Mapping[str, Any]:
    """Return the part of ``rope_parameters`` that encodes one table."""
    parameters: Mapping[str, Any] = config.rope_parameters
    return parameters if layer_type is None else parameters[layer_type]


def read_tables(
    location: RotaryLocation, *, freeze_at: int | None = None, strict: bool = True
) -> tuple[Tables, list[str]]:
    """Read the base tables of a model, with warnings of what is unusual about them.

    A buffer that a cast has rounded is read as the table its config describes, one that was edited by hand as it is.

    Args:
        location: from :func:`~rope_patch.patching.locate.find_rotary`.
        freeze_at: length at which to freeze a dynamic table [tokens].
        strict: refuse dynamic tables; otherwise warn of them.

    Raises:
        ValueError: a dynamic table that is not frozen, or a rotary embedding of another kind.
    """
    module, config = base_of(location)
    try:
        original = original_rotary(type(module), config)
        described = {kind: buffer.float() for kind, buffer in original_tables(original).items()}
        for kind, inv_freq in described.items():
            _check_kind(original, kind, inv_freq, encoding_of(config, kind))
    except Exception as error:
        raise ValueError(
            f"{type(location.model).__name__} has a rotary embedding of another kind ({type(module).__name__}): "
            f"rope_patch needs cos and sin of position x inv_freq, one angle per pair ({error})"
        ) from error
    context = _context_of(location, config)
    tables: Tables = {}
    warnings: list[str] = []
    frozen_any = False
    for kind, inv_freq in described.items():
        encoding = encoding_of(config, kind)
        table = RotaryTable(
            inv_freq=frequencies.zero_unrotated(inv_freq),
            attention_scaling=scaling_of(original, kind),
            rope_theta=float(encoding["rope_theta"]),
            rope_type=rope_type_of(original, kind, encoding),
            max_position_embeddings=context,
            original_max_position_embeddings=encoding.get("original_max_position_embeddings"),
            layer_type=kind,
            path=location.path,
            rope_parameters=encoding,
            other_keys=other_keys(encoding),
        )
        if is_dynamic(encoding, table.rope_type):
            if freeze_at is not None:
                table, frozen_any = _freeze(table, config, freeze_at), True
            elif strict:
                raise ValueError(
                    f"{table.path} has a dynamic table (rope_type {table.rope_type!r}): it changes with the length "
                    "during generation and breaks cached keys. Pass freeze_at=LENGTH to fix it as it is at that length"
                )
            else:
                warnings.append(f"{where(table)} changes with the length during generation: pass freeze_at to patch it")
        elif location.record is not None and key_of(kind) in location.record.edited:
            base = location.record.base_tables[key_of(kind)]
            numbers, scaling = frequencies.table_of(base.inv_freq), base.attention_scaling
            table = replace(
                table, inv_freq=numbers, attention_scaling=scaling, rope_type="custom", rope_parameters=None
            )
        else:
            table, table_warnings = _as_in_use(table, original_tables(module)[kind], scaling_of(module, kind))
            warnings += table_warnings
        tables[kind] = table
    if freeze_at is not None and not frozen_any:
        raise ValueError(f"freeze_at is for dynamic tables; {location.path} has none")
    return tables, warnings


def _context_of(location: RotaryLocation, config: PreTrainedConfig) -> int:
    """Return the context that a config states [tokens]."""
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise ValueError(
            f"the config of {type(location.model).__name__} states no max_position_embeddings: not supported"
        )
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ValueError(f"the config's max_position_embeddings must be a number of tokens >= 1, got {context!r}")
    return context


def check_base(location: RotaryLocation) -> None:
    """Raise PatchError unless the base a patched model's record describes is the base it was made on."""
    record = location.record
    if record is not None:
        base = {
            key_of(kind): TableRecord.of(table)
            for kind, table in read_tables(location, freeze_at=record.freeze_at)[0].items()
        }
        if not same_tables(base, record.base_tables):
            raise PatchError("the rope_patch record was altered: its base_config does not give its base tables")


def _check_kind(rotary: nn.Module, kind: str | None, inv_freq: Tensor, encoding: Mapping[str, Any]) -> None:
    """Raise unless calling the module gives cos and sin of position x inv_freq, in a layout that is known."""
    if not torch.isfinite(inv_freq).all():
        raise ValueError("its table holds numbers that are not finite")
    dynamic = is_dynamic(encoding, rope_type_of(rotary, kind, encoding))
    positions = _PROBES[:, :4] if dynamic else _PROBES  # far positions would change a dynamic table
    layout, scaling = layout_in_use(rotary, kind), scaling_of(rotary, kind)
    cos, sin = layout.parts(_call(rotary, kind, positions))
    angles = positions[..., None].float() * inv_freq
    if cos.shape != layout.spread(angles).shape:
        raise ValueError(f"its cos has {cos.shape[-1]} features for {len(inv_freq)} pairs, not two for each")
    for name, got, pairs in (("cos", cos, angles.cos()), ("sin", sin, angles.sin())):
        if not torch.allclose(got, layout.spread(pairs) * scaling, atol=1e-5):
            raise ValueError(f"its {name} is another function of the position")


_PROBES = torch.tensor([[0, 1, 2, 3, 5, 17, 101, 211]], device="cpu")


def call_rotary(module: nn.Module, kind: str | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each pair: (1, positions, pairs) float32, from an original module or a patched one."""
    return layout_in_use(module, kind).pairs(_call(module, kind, positions))


def _call(module: nn.Module, kind: str | None, positions: Tensor) -> Any:
    x = torch.zeros(1, dtype=torch.float32, device=positions.device)
    return module(x, positions) if kind is None else module(x, positions, layer_type=kind)


def layout_in_use(module: nn.Module, kind: str | None) -> RotaryLayout:
    """Return how a rotary module, original or patched, lays out cos and sin."""
    return (
        module.layout
        if isinstance(module, PatchedRotary)
        else layout_of(module, kind, len(original_tables(module)[kind]))
    )


def scaling_of(module: nn.Module, kind: str | None) -> float:
    """Return a rotary module's factor on cos and sin."""
    return float(getattr(module, "attention_scaling" if kind is None else f"{kind}_attention_scaling"))


def rope_type_of(module: nn.Module, kind: str | None, encoding: Mapping[str, Any]) -> str:
    """Return the type of a table: what its module calls it (HunYuan knows a static kind of dynamic), or its config."""
    named = getattr(module, "rope_type", None)
    named = named.get(kind) if isinstance(named, Mapping) else named
    return named if isinstance(named, str) else str(encoding.get("rope_type", "default"))


def keeps_float32(module: nn.Module, kinds: Sequence[str | None]) -> bool:
    """Tell whether a rotary module returns float32 whatever the model computes in (OLMo's), or casts (Llama's)."""
    positions = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    half = torch.zeros(1, dtype=torch.bfloat16, device="cpu")
    kind = next(iter(kinds))
    returned = module(half, positions) if kind is None else module(half, positions, layer_type=kind)
    return bool(layout_in_use(module, kind).parts(returned)[0].dtype == torch.float32)


def is_dynamic(encoding: Mapping[str, Any], rope_type: str | None = None) -> bool:
    """Tell whether a table of this encoding, and of this type by its module, changes during the forward pass."""
    rope_type = rope_type or str(encoding.get("rope_type", "default"))
    return "dynamic" in rope_type or (rope_type == "longrope" and encoding["short_factor"] != encoding["long_factor"])


def _freeze(table: RotaryTable, config: PreTrainedConfig, length: int) -> RotaryTable:
    """The table a dynamic type uses at ``length`` tokens."""
    if length < 1:
        raise ValueError(f"freeze_at must be >= 1 token, got {length}")
    with torch.device("cpu"), quiet():
        build = ROPE_INIT_FUNCTIONS[table.rope_type]
        now, _ = build(config, seq_len=1, layer_type=table.layer_type)
        inv_freq, scaling = build(config, seq_len=length, layer_type=table.layer_type)
    if not torch.equal(frequencies.zero_unrotated(now), table.inv_freq):
        raise ValueError(f"{where(table)} builds its {table.rope_type} table in a way of its own: it cannot be frozen")
    encoding = table.rope_parameters or {}
    if table.rope_type == "longrope":
        factors = encoding["long_factor" if length > table.context else "short_factor"]
        native = longrope_parameters(factors, table, attention_scaling=scaling)
    else:
        grown = encoding["factor"] * max(length, table.max_position_embeddings) / table.max_position_embeddings
        theta = frequencies.ntk_theta(table.rope_theta, grown - (encoding["factor"] - 1), table.rotary_dim)
        native = {"rope_type": "default", "rope_theta": theta}
    frozen = table.becomes(inv_freq, rope_parameters=native, attention_scaling=scaling)
    return replace(frozen, rope_theta=table.rope_theta)  # a method that starts anew starts there


def _as_in_use(table: RotaryTable, buffer: Tensor, scaling: float) -> tuple[RotaryTable, list[str]]:
    """Reconcile what the config describes with what the buffer holds."""
    if buffer.is_meta:
        return table, []
    in_use = buffer.detach().float().cpu()
    if (
        torch.allclose(in_use, table.inv_freq, rtol=1e-6, atol=frequencies.UNROTATED)
        and scaling == table.attention_scaling
    ):
        return table, []
    error = float(((in_use - table.inv_freq).abs() / table.inv_freq.clamp_min(frequencies.UNROTATED)).max())
    for dtype in (torch.bfloat16, torch.float16):
        if scaling == table.attention_scaling and torch.equal(in_use, table.inv_freq.to(dtype).float()):
            warning = f"{where(table)} was rounded to {dtype} by a cast (up to {error:.2%} off)"
            return table, [f"{warning}; a patch starts from the float32 table of the config"]
    warning = (
        f"{where(table)} is not the table its config describes (up to {error:.2%} off, attention_scaling {scaling:g} "
        f"for {table.attention_scaling:g}); saving without a patch would lose it"
    )
    table = replace(table, inv_freq=frequencies.zero_unrotated(in_use), attention_scaling=scaling)
    return replace(table, rope_type="custom", rope_parameters=None), [warning]


def where(table: RotaryTable) -> str:
    """Name a table in a message."""
    return table.path if table.layer_type is None else f"{table.path} [{table.layer_type}]"
