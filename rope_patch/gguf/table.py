"""Write and read the rotary table of a GGUF file, as llama.cpp stores it.

llama.cpp turns pair ``i`` at position ``p`` by ``p * freq_base ** (-2 i / d) / factor[i]`` and multiplies cos and sin
by ``rope.scaling.attn_factor`` (``ggml_rope_cache_init`` and the constructor of ``llama_context``, in the release of
:data:`CHECKED`). The factors are a tensor, ``rope_freqs.weight``, which some graphs read and others do not; linear and
YaRN scaling are keys that the engine applies *in addition*. So a table is written as factors where the graph reads
them, and the scaling type as ``none``, with which the engine ignores a ``--rope-freq-scale``, too. For other graphs,
linear scaling and YaRN are written as keys. The engine then computes YaRN's attention factor, ``0.1 ln(factor) + 1``,
itself, and multiplies it by ``attn_factor``. No graph that is known here reads ``yarn_beta_fast`` and its like.

In Gemma 3, sliding layers have a base of their own and a scale of 1, with which YaRN changes neither a frequency nor
cos and sin; only ``attn_factor`` reaches them (``llama_model::get_rope_freq_scale``, ``rope_yarn``).
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.methods.already_scaled import ORIGINAL
from rope_patch.methods.yarn import yarn_scaling, yarn_table
from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import PatchRecord, TableRecord
from rope_patch.patching.verify import Inspection
from rope_patch.runtime.gguf_file import GGUFFile, Key, Piece, open_gguf
from rope_patch.runtime.gguf_headers import gguf
from rope_patch.tables import RotaryTable, other_keys

CHECKED = "0c1e57098, of llama-cpp-python 0.3.36"
"""The commit of llama.cpp whose source and behaviour the claims of this module were checked against."""

ROUNDED_TWICE = 2e-6
"""The relative difference that two roundings to float32 may make between a table in a file and a recorded one."""

UNROTATED_DIVISOR = 1e30
"""Factor of an unrotated pair. It is the value that llama.cpp itself uses, and unlike the 1e39 of a longrope encoding
it is finite in float32, the type of the tensor."""

WIDEST = 65536
"""Greatest number of features of a head; a file that states more is damaged."""
RECORD_KEY = "rope_patch.patching.record"
FREQS = "rope_freqs.weight"
LONG = "rope_factors_long.weight"
SHORT = "rope_factors_short.weight"
FACTOR_TENSORS = (FREQS, LONG, SHORT)


@dataclass(frozen=True)
class Graph:
    """What a llama.cpp graph reads of a table.

    Attributes:
        architecture: name of the graph in ``general.architecture``.
        tensors: names of the tensors of factors that the graph reads; if there are two, it chooses one by the length
            of the context, so the same factors are written into both. Without any, it computes the table from keys.
        always: whether the graph does not load a file without these tensors.
    """

    architecture: str
    tensors: tuple[str, ...] = (FREQS,)
    always: bool = False


GRAPHS = {
    "llama": Graph("llama"),
    "mistral": Graph("llama"),
    "phi3": Graph("phi3", (LONG, SHORT)),
    "gemma4_text": Graph("gemma4", always=True),
    **{name: Graph(name, ()) for name in ("qwen2", "qwen3", "gemma", "gemma2", "starcoder2", "stablelm", "smollm3")},
    "qwen2_moe": Graph("qwen2moe", ()),
    "qwen3_moe": Graph("qwen3moe", ()),
    "gemma3_text": Graph("gemma3", ()),
}
"""The graphs that were checked, by transformers' ``model_type`` of the text decoder. Those without tensors apply the
keys of a file at every rotation (``src/models/*.cpp``), Gemma 2 in its sliding layers, too."""

_READS_YARN_KEYS = ("grok", "mistral3", "deepseek2", "deepseek32")
"""Architectures for which llama.cpp reads ``rope.scaling.yarn_*``."""

SCALING_TYPES = ("none", "linear", "yarn", "longrope")
"""Types of scaling that llama.cpp knows; at any other type it stops with an error."""

LAYERED = ("gemma3", "gemma3n", "gemma4")
"""Architectures with a second, plain table for layers with a sliding window."""

_NO_ROTARY = (
    "gpt2",
    "starcoder",
    "bert",
    "bloom",
    "mpt",
    "refact",
    "jais",
    "jina-bert-v2",
    "t5",
    "t5encoder",
    "clip",
    "mamba",
    "mamba2",
    "rwkv6",
    "rwkv7",
)
"""Architectures without rotary embeddings, although they state heads and widths as others do."""


def graph_of(family: str) -> Graph:
    """Return what is known about llama.cpp's graph for a family.

    Args:
        family: transformers' ``model_type`` of the text decoder, or ``general.architecture`` of a file.

    Raises:
        ValueError: the graph was never checked.
    """
    known = {graph.architecture: graph for graph in GRAPHS.values()} | GRAPHS
    if family not in known:
        raise ValueError(
            f"whether llama.cpp reads another table on {family!r} was never checked. Known: {', '.join(known)}"
        )
    return known[family]


def scaling_keys(table: RotaryTable, graph: Graph) -> dict[str, Any]:
    """Return the keys below ``rope.scaling`` with which a graph computes a table.

    Args:
        table: the table that is written.
        graph: the graph that reads it.

    Raises:
        ValueError: the graph reads no factors and the table needs them, or sliding layers would be scaled, too.
    """
    keys: dict[str, Any] = {"type": "none"}
    attention = table.attention_scaling
    if not graph.tensors and not frequencies.is_geometric(table.inv_freq, table.rope_theta):
        encoded = table.rope_parameters or {}
        kind = "yarn" if encoded.get("rope_type") == "yarn" else "linear"
        keys = {"type": kind, "factor": float(encoded.get("factor") or 1.0)}
        original = int(encoded.get("original_max_position_embeddings") or table.context)
        built, own = _scaled(**keys, theta=table.rope_theta, rotary_dim=table.rotary_dim, original=original)
        if not torch.allclose(built, table.inv_freq, rtol=ROUNDED_TWICE, atol=0):
            raise ValueError(
                f"llama.cpp's graph for {graph.architecture} reads no rotary factors (seen at {CHECKED}), so a GGUF "
                "file cannot hold this table. It can hold another base (abf, ntk), pi, and yarn with beta_fast=32 and "
                "beta_slow=1"
            )
        if kind == "yarn":
            keys["original_context_length"] = original
        attention /= own
    if abs(attention - 1) > 1e-6:
        if graph.architecture in LAYERED:
            raise ValueError(
                f"the {table.layer_type} table multiplies cos and sin by {table.attention_scaling:g}: llama.cpp has "
                "one such factor for all layers, and would scale the sliding ones too"
            )
        keys["attn_factor"] = attention
    return keys


def _scaled(type: str, factor: float, theta: float, rotary_dim: int, original: int) -> tuple[Tensor, float]:
    """Return the frequencies and the attention factor that llama.cpp computes from keys alone.

    Args:
        type: the scaling type, ``"linear"`` or ``"yarn"``.
        factor: the factor of the scaling.
        theta: the base of the table.
        rotary_dim: number of features that rotate.
        original: the original context, of YaRN [tokens].
    """
    if type == "yarn":
        return yarn_table(theta, rotary_dim, factor=factor, context=original), yarn_scaling(factor)
    return frequencies.geometric(theta, rotary_dim) / factor, 1.0


def divisors(inv_freq: Tensor, rope_theta: float) -> np.ndarray[Any, Any]:
    """Return the factors by which llama.cpp divides the plain frequencies: (pairs,) float32, 1e30 if unrotated.

    Args:
        inv_freq: (pairs,) frequencies of the table that is written [rad/token].
        rope_theta: base that ``rope.freq_base`` will state; it is rounded to float32 there, and therefore here, too.
    """
    target = frequencies.zero_unrotated(inv_freq.float().cpu())
    ratio = _plain(rope_theta, len(target)) / target.double()
    ratio[frequencies.unrotated(target)] = UNROTATED_DIVISOR
    return ratio.float().numpy()


def with_table(opened: GGUFFile, table: RotaryTable, graph: Graph, record: PatchRecord | None) -> GGUFFile:
    """Return a file with another table.

    Args:
        opened: a file that is not patched.
        table: the table that is put in, with the context that the file will state.
        graph: what llama.cpp's graph reads of a table.
        record: the record of the patch; None if there is none.
    """
    at = f"{graph.architecture}.{{}}".format
    scaling = at("rope.scaling.")
    added = [
        Key.of(at("rope.freq_base"), float(np.float32(table.rope_theta))),
        Key.of(at("context_length"), table.max_position_embeddings),
        *(Key.of(f"{scaling}{name}", value) for name, value in scaling_keys(table, graph).items()),
    ]
    if record is not None:
        added.append(Key.of(RECORD_KEY, json.dumps(record.to_dict())))
    new = {key.name: key for key in added}
    # What would change the table once more, or states what a new key states, is left out. In a union, keys that are in
    # the file already keep their places in its order.
    replaced = {RECORD_KEY, at("rope.scale_linear")}
    keys = {
        name: key
        for name, key in opened.keys.items()
        if name in new or not (name in replaced or name.startswith(scaling))
    }
    pieces = [piece for piece in opened.pieces if piece.name not in FACTOR_TENSORS]
    # Plain RoPE needs no factors, unless the graph does not load without them.
    if graph.always or not frequencies.is_geometric(table.inv_freq, table.rope_theta):
        factors = divisors(table.inv_freq, table.rope_theta)
        kind = gguf().GGMLQuantizationType.F32
        pieces = [*(Piece(name, factors.shape, kind, lambda: factors) for name in graph.tensors), *pieces]
    return replace(opened, keys=keys | new, pieces=tuple(pieces))


def read_gguf(path: str | Path) -> Inspection:
    """Read the rotary table of a GGUF file, as llama.cpp will use it.

    Args:
        path: path of a GGUF model, written by rope_patch or any other program.

    Returns:
        An inspection as :func:`rope_patch.inspect` returns it of a model, with the table of full attention first:
        ``inv_freq`` (pairs,) float32 [rad/token], ``attention_scaling``, ``rope_theta`` and
        ``max_position_embeddings``; and the record, if rope_patch wrote the file.

    Raises:
        FileNotFoundError, ValueError: there is no such file, it is not a whole GGUF model, or its table changes with
            the context.
    """
    return table_in(open_gguf(path))


# One function, since the keys of a file decide together and in the order in which llama.cpp's loader reads them.
def table_in(opened: GGUFFile) -> Inspection:
    """Return the inspection of an open file, as :func:`read_gguf` does."""
    path = opened.path
    architecture = str(opened.value("general.architecture", ""))
    if opened.value("general.type", "model") != "model" or not architecture:
        raise ValueError(f"{path} is a GGUF file, but no model: it holds no rotary table")
    if architecture in _NO_ROTARY:
        raise ValueError(f"{path} is a GGUF of {architecture!r}, which has no rotary embeddings")

    def value_in(name: str, default: Any = None) -> Any:
        return opened.value(f"{architecture}.{name}", default)

    def number(name: str, default: float) -> float:
        value = value_in(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{path} has no table that can be read: {architecture}.{name} is {value!r}, no number")
        return value

    pairs = _rotary_dim(value_in, path) // 2
    theta = number("rope.freq_base", 10000.0)
    if theta <= 1:
        raise ValueError(f"{path} has no table that can be read: {architecture}.rope.freq_base is {theta:g}")
    context = int(number("context_length", 0))
    factors = _factors(opened, pairs)
    attn_factor = scaling = float(number("rope.scaling.attn_factor", 1.0))
    original = int(number("rope.scaling.original_context_length", 0)) or None
    kind = str(value_in("rope.scaling.type", "linear"))
    if kind not in SCALING_TYPES:
        raise ValueError(
            f"{path} has no table that can be read: {architecture}.rope.scaling.type is {kind!r}, and llama.cpp knows "
            f"{', '.join(SCALING_TYPES)}"
        )
    # As llama.cpp's loader does: scale_linear is the older name of the key, and a factor of 0 means none.
    stretch = float(number("rope.scaling.factor", number("rope.scale_linear", 0.0))) or 1.0
    if kind == "none":
        stretch = 1.0
    stated: dict[str, Any] = {}
    if kind == "yarn" and stretch != 1.0:
        own = architecture in _READS_YARN_KEYS and any(".rope.scaling.yarn_" in name for name in opened.keys)
        if factors is not None or own:
            raise ValueError(f"{path} leaves YaRN to the engine with settings of its own: its table cannot be read")
        if not (original or context):
            raise ValueError(f"{path} leaves YaRN to the engine and states no context: its table cannot be read")
        original = original or context
        inv_freq, own_factor = _scaled(kind, stretch, theta, 2 * pairs, original)
        scaling *= own_factor
        stated = {"rope_type": "yarn", ORIGINAL: original}
        if attn_factor != 1.0:
            stated["attention_factor"] = scaling
    elif factors is None:
        inv_freq = frequencies.geometric(theta, 2 * pairs) / stretch  # the very bits that transformers computes
        if attn_factor == 1.0:
            stated = {"rope_type": "linear"}
    else:
        inv_freq = (_plain(theta, pairs) / factors.double() / stretch).float()
    table = RotaryTable(
        inv_freq=frequencies.zero_unrotated(inv_freq),
        attention_scaling=scaling,
        rope_theta=theta,
        rope_type="default" if frequencies.is_geometric(inv_freq, theta) and scaling == 1.0 else "custom",
        max_position_embeddings=context,
        original_max_position_embeddings=original,
        path="GGUF",
    )
    # Keys alone state a table of a type of transformers, so that a method treats it as that of a folder.
    if stated and stretch > 1:
        stated |= {"rope_theta": theta, "factor": stretch}
        table = replace(table, rope_type=stated["rope_type"], rope_parameters=stated)
    name = f"{architecture} in {path.name}, {opened.weights} weights"
    others = []
    if architecture in LAYERED and (window := int(number("attention.sliding_window", 0))):
        name += f", sliding window {window}"
        base = number("rope.freq_base_swa", 1e4)
        width = int(number("rope.dimension_count_swa", 2 * pairs))
        plain = table.becomes(
            frequencies.geometric(base, width),
            rope_parameters={"rope_type": "default", "rope_theta": base},
            attention_scaling=attn_factor,
        )
        others = [replace(plain, layer_type="sliding_attention")]
        table = replace(table, layer_type="full_attention")
    record, warnings = _record(opened, table)
    if record is not None and not warnings:
        table = _as_recorded(record, table)
    return Inspection(name, (table, *others), record, tuple(warnings))


def _rotary_dim(value_in: Any, path: Path) -> int:
    rotary_dim = value_in("rope.dimension_count")
    if rotary_dim is None:
        width = value_in("embedding_length")
        heads = value_in("attention.head_count")
        rotary_dim = value_in("attention.key_length")
        if not rotary_dim and isinstance(width, int) and isinstance(heads, int) and heads > 0:
            rotary_dim = width // heads
    if not isinstance(rotary_dim, int) or not 2 <= rotary_dim <= WIDEST:
        raise ValueError(f"{path} does not say how many features rotate: it holds no rotary table")
    return rotary_dim


def _plain(rope_theta: float, pairs: int) -> Tensor:
    """Return the geometric table of a base, rounded to float32 as a file stores it: (pairs,) float64 [rad/token]."""
    exponents = torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
    return torch.tensor(float(np.float32(rope_theta)), dtype=torch.float64, device="cpu") ** -exponents


def _factors(opened: GGUFFile, pairs: int) -> Tensor | None:
    path = opened.path
    tensors = {piece.name: piece for piece in opened.pieces}
    factors = [torch.from_numpy(np.array(tensors[name].read())) for name in FACTOR_TENSORS if name in tensors]
    if not factors:
        return None
    for values in factors:
        # llama.cpp divides by them; its own way to stop a pair is a factor of 1e30.
        if not bool((values.isfinite() & (values > 0)).all()):
            raise PatchError(f"{path} has rotary factors that are no finite numbers above 0: {values.tolist()}")
    if len(factors[0]) != pairs:
        raise ValueError(f"{path} has {len(factors[0])} rotary factors for {pairs} pairs")
    if any(not torch.equal(factors[0], other) for other in factors[1:]):
        raise ValueError(f"{path} has two tables, one for short and one for long contexts: there is no one table")
    return factors[0]


def _record(opened: GGUFFile, table: RotaryTable) -> tuple[PatchRecord | None, list[str]]:
    text = opened.value(RECORD_KEY)
    if text is None:
        return None, []
    try:
        record = PatchRecord.from_dict(json.loads(text))
        recorded = recorded_table(record.tables)
    except ValueError as error:
        return None, [f"its patch record cannot be read: {error}"]
    if not TableRecord.of(table).matches(recorded, ROUNDED_TWICE):
        return record, [f"its patch record says another table: {record.to_method()}"]
    return record, []


def recorded_table(tables: Mapping[str, TableRecord]) -> TableRecord:
    """Return the table of a record that a file holds: the one of full attention if there are several.

    Raises:
        PatchError: there is neither a single table nor one of full attention.
    """
    for key in ("all", "full_attention"):
        if key in tables:
            return tables[key]
    raise PatchError(f"the record holds no table of full attention, but {', '.join(tables)}")


def base_in(record: PatchRecord, like: RotaryTable) -> RotaryTable:
    """Return the table before a patch, as its record describes it.

    Args:
        record: the record of the patch.
        like: the table in the file, from which layer type and path are taken.

    Raises:
        PatchError: the record does not describe the table before the patch.
    """
    base = recorded_table(record.base_tables)
    settings = record.base_config["rope_parameters"]
    settings = settings.get("full_attention", settings)
    if not isinstance(settings.get("rope_theta"), int | float):
        raise PatchError(f"the record of {record.to_method()} does not describe the table before the patch")
    return replace(
        like,
        inv_freq=frequencies.table_of(base.inv_freq),
        attention_scaling=base.attention_scaling,
        rope_theta=float(settings["rope_theta"]),
        rope_type=str(settings.get("rope_type", "default")),
        max_position_embeddings=record.base_config["max_position_embeddings"],
        original_max_position_embeddings=settings.get("original_max_position_embeddings"),
        rope_parameters=settings,
        other_keys=other_keys(settings),
    )


def _as_recorded(record: PatchRecord, table: RotaryTable) -> RotaryTable:
    """Return a table with the recorded numbers, which it equals up to rounding, and the type that the method gives it.

    Args:
        record: the record of the patch.
        table: the table that was computed from the file's base and factors.
    """
    recorded = recorded_table(record.tables)
    kind = table.rope_type
    with contextlib.suppress(ValueError):  # the method may refuse a base that it was applied to in a chain
        kind = record.to_method()(base_in(record, table)).rope_type
    numbers = frequencies.table_of(recorded.inv_freq)
    return replace(table, inv_freq=numbers, attention_scaling=recorded.attention_scaling, rope_type=kind)
