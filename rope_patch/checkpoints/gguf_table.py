"""A rotary table in a GGUF file: how llama.cpp keeps one, written and read back.

llama.cpp turns pair ``i`` at position ``p`` by ``p * freq_base ** (-2 i / d) / factor[i]`` and multiplies cos and sin
by ``rope.scaling.attn_factor`` (``ggml_rope_cache_init`` and the constructor of ``llama_context``, in the release of
:data:`CHECKED`). The factors are a tensor, ``rope_freqs.weight``, which some graphs read and others do not; linear and
YaRN scaling are keys that the engine applies *besides*. So a table is written as factors, and the scaling type as
``none``, with which the engine ignores a ``--rope-freq-scale`` too.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.checkpoints.gguf_file import GGUFFile, Key, Piece, open_gguf
from rope_patch.checkpoints.gguf_reader import gguf
from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import PatchRecord, TableRecord
from rope_patch.patching.verify import Inspection
from rope_patch.tables import RotaryTable, other_keys

CHECKED = "0c1e57098, of llama-cpp-python 0.3.36"
"""The commit of llama.cpp whose source and behaviour the claims of this module were checked against."""

ROUNDED_TWICE = 2e-6
"""The relative difference that two roundings to float32 may make between a table in a file and a recorded one."""

UNROTATED_DIVISOR = 1e30
WIDEST = 65536
"""Features of a head; more is a damaged file."""
RECORD_KEY = "rope_patch.patching.record"
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (FREQS, LONG, SHORT)
EQUAL = "the table is equal to the recorded table within 1e-6"


@dataclass(frozen=True)
class Graph:
    """What a llama.cpp graph reads of a table.

    Attributes:
        architecture: its name in ``general.architecture``.
        tensors: the names under which it reads factors; it takes one by the length of the context, so all say the same.
        always: it does not load without them.
    """

    architecture: str
    tensors: tuple[str, ...] = (FREQS,)
    always: bool = False


GRAPHS = {
    "llama": Graph("llama"),
    "mistral": Graph("llama"),
    "phi3": Graph("phi3", (LONG, SHORT)),
    "gemma4_text": Graph("gemma4", always=True),
}
"""By transformers' ``model_type`` of the text decoder."""

_NO_FACTORS = ("qwen2", "qwen3", "gemma", "gemma2", "gemma3_text")

SCALING_TYPES = ("none", "linear", "yarn", "longrope")
"""Types of scaling that llama.cpp knows; it ends at any other."""

LAYERED = ("gemma3", "gemma3n", "gemma4")
"""Architectures that have a table for each layer type, of which a file describes one."""

_NO_ROTARY = (
    *("gpt2", "starcoder", "bert", "bloom", "mpt", "refact", "jais", "jina-bert-v2", "t5", "t5encoder", "clip"),
    *("mamba", "mamba2", "rwkv6", "rwkv7"),
)
"""Architectures that say heads and widths as others do, and place tokens otherwise."""


def graph_of(model_type: str) -> Graph:
    """Return what is known of llama.cpp's graph for a family.

    Raises:
        ValueError: its graph reads no factors, or it was never checked.
    """
    if model_type in _NO_FACTORS:  # no option reaches the sliding layers of Gemma 2, and no file those of Gemma 3 alone
        option = "give the engine --rope-freq-base"
        file = "rope-patch apply FILE.gguf METHOD -o OUT.gguf writes it into a file"
        raise ValueError(
            f"llama.cpp's graph for {model_type} reads no rotary factors (seen at {CHECKED}), so a file cannot "
            "hold this table. Options may: rope-patch doctor MODEL --method METHOD --for llama.cpp says which. A "
            f"plain table of another base needs no factors: {option if model_type == 'gemma3_text' else file}"
        )
    if model_type not in GRAPHS:
        raise ValueError(
            f"GGUF export does not know {model_type!r}: whether llama.cpp reads a table there was never checked. "
            f"Known: {', '.join(GRAPHS)}"
        )
    return GRAPHS[model_type]


def graph_in(architecture: str, table: RotaryTable) -> Graph:
    """Return what is known of llama.cpp's graph for the architecture of a file that is to take a table.

    Raises:
        ValueError: its graph reads no factors and the table needs them, or it was never checked.
    """
    for graph in GRAPHS.values():
        if graph.architecture == architecture:
            return graph
    if architecture not in _NO_FACTORS:
        known = [graph.architecture for graph in GRAPHS.values()] + [*_NO_FACTORS]
        raise ValueError(
            f"a GGUF of {architecture!r}: whether llama.cpp reads another table there was never checked. Known: "
            f"{', '.join(name for name in dict.fromkeys(known) if name not in (*LAYERED, 'gemma3_text'))}"
        )
    if not table.is_geometric:
        raise ValueError(
            f"llama.cpp's graph for {architecture} reads no rotary factors (seen at {CHECKED}), so this GGUF cannot "
            "carry the table. A method that changes the base alone can be applied (abf, ntk)"
        )
    return Graph(architecture, ())


def divisors(inv_freq: Tensor, rope_theta: float) -> np.ndarray[Any, Any]:
    """Return what llama.cpp divides the plain frequencies by: (pairs,) float32, 1e30 for an unrotated pair.

    Args:
        inv_freq: (pairs,) the table to write [rad/token].
        rope_theta: as ``rope.freq_base`` will say it; it is rounded to float32 there, and so here.
    """
    target = frequencies.zero_unrotated(inv_freq.float().cpu())
    ratio = _plain(rope_theta, len(target)) / target.double()
    ratio[frequencies.unrotated(target)] = UNROTATED_DIVISOR
    return ratio.float().numpy()


def table_keys(table: RotaryTable, graph: Graph, record: PatchRecord | None) -> list[Key]:
    """Return the keys that describe a table: its base, its scaling, its context and the record of the patch."""
    at = f"{graph.architecture}.{{}}".format
    keys = [
        Key.of(at("rope.freq_base"), float(np.float32(table.rope_theta))),
        Key.of(at("context_length"), table.max_position_embeddings),
        Key.of(at("rope.scaling.type"), "none"),
    ]
    if table.attention_scaling != 1.0:
        keys.append(Key.of(at("rope.scaling.attn_factor"), table.attention_scaling))
    if record is not None:
        keys.append(Key.of(RECORD_KEY, json.dumps(record.to_dict())))
    return keys


def replaced_by(key: str, architecture: str) -> bool:
    """Tell whether a base file's key would change the table once more, or states what :func:`table_keys` states."""
    own = (f"{architecture}.{name}" for name in ("rope.freq_base", "rope.scale_linear", "context_length"))
    return key == RECORD_KEY or key in own or key.startswith(f"{architecture}.rope.scaling.")


def table_pieces(table: RotaryTable, graph: Graph) -> Iterator[Piece]:
    """Yield the tensors of a table; none for plain RoPE where the graph does without."""
    if frequencies.is_geometric(table.inv_freq, table.rope_theta) and not graph.always:
        return
    factors = divisors(table.inv_freq, table.rope_theta)
    for name in graph.tensors:
        yield Piece(name, factors.shape, gguf().GGMLQuantizationType.F32, lambda: factors)


def read_gguf(path: str | Path) -> Inspection:
    """Read the rotary table of a GGUF file, as llama.cpp will use it.

    Args:
        path: any GGUF model; other tools' are read too.

    Returns:
        What :func:`rope_patch.inspect` returns of a model, with one table: ``inv_freq`` (pairs,) float32 [rad/token],
        ``attention_scaling``, ``rope_theta`` and ``max_position_embeddings``; the record where we wrote the file.

    Raises:
        FileNotFoundError, ValueError: no such file, no whole GGUF model, or a table that changes with the context.
    """
    return table_in(open_gguf(path), path)


def sliding_base(path: str | Path) -> float | None:
    """Return the base that a GGUF file states for layers with a sliding window; None where it states none."""
    opened = open_gguf(path)
    value = opened.value(f"{opened.value('general.architecture')}.rope.freq_base_swa")
    return float(value) if isinstance(value, int | float) else None


def table_in(opened: GGUFFile, path: str | Path) -> Inspection:
    """Read the table of an open file; as :func:`read_gguf`."""
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

    pairs, theta = _rotary_dim(value_in, path) // 2, number("rope.freq_base", 10000.0)
    if theta <= 0:
        raise ValueError(f"{path} has no table that can be read: {architecture}.rope.freq_base is {theta:g}")
    context = int(number("context_length", 0))
    factors = _factors(opened, pairs, path)
    scaling = float(number("rope.scaling.attn_factor", 1.0))
    original = int(number("rope.scaling.original_context_length", 0)) or None
    kind = str(value_in("rope.scaling.type", "linear"))
    if kind not in SCALING_TYPES:
        raise ValueError(
            f"{path} has no table that can be read: {architecture}.rope.scaling.type is {kind!r}, and llama.cpp knows "
            f"{', '.join(SCALING_TYPES)}"
        )
    stretch = float(number("rope.scaling.factor", number("rope.scale_linear", 0.0))) or 1.0
    if kind == "yarn" and stretch != 1.0:
        if theta <= 1:
            raise ValueError(f"{path} has no table that can be read: YaRN over a base of {theta:g}")
        if factors is not None or any(name.startswith(f"{architecture}.rope.scaling.yarn_") for name in opened.keys):
            raise ValueError(f"{path} leaves YaRN to the engine with settings of its own: its table cannot be read")
        if not (original or context):
            raise ValueError(f"{path} leaves YaRN to the engine and states no context: its table cannot be read")
        inv_freq = frequencies.yarn(theta, 2 * pairs, factor=stretch, context=original or context)
        scaling *= frequencies.yarn_scaling(stretch)
    elif factors is None and (kind == "none" or stretch == 1.0):
        inv_freq = frequencies.geometric(theta, 2 * pairs)  # to the last bit as transformers computes it
    else:
        divisor = torch.ones(pairs, dtype=torch.float64) if factors is None else factors.double()
        inv_freq = (_plain(theta, pairs) / divisor / (1.0 if kind == "none" else stretch)).float()
    table = RotaryTable(
        inv_freq=frequencies.zero_unrotated(inv_freq),
        attention_scaling=scaling,
        rope_theta=theta,
        rope_type="default" if frequencies.is_geometric(inv_freq, theta) and scaling == 1.0 else "custom",
        max_position_embeddings=context,
        original_max_position_embeddings=original,
        layer_type="full_attention" if value_in("attention.sliding_window_pattern") is not None else None,
        path="GGUF",
    )
    name = f"{architecture} in {Path(path).name}, {opened.weights} weights"
    record, warnings = _record(opened, table)
    recorded = None if record is None or warnings else table_of(record.tables)
    if record is not None and recorded is not None and recorded.matches(TableRecord.of(table)):
        return Inspection(name, (as_recorded(record, table),), record, (), (EQUAL,))
    return Inspection(name, (table,), record, tuple(warnings))


def _rotary_dim(value_in: Any, path: str | Path) -> int:
    rotary_dim = value_in("rope.dimension_count")
    if rotary_dim is None:
        width, heads = value_in("embedding_length"), value_in("attention.head_count")
        counted = isinstance(width, int) and isinstance(heads, int) and heads > 0
        rotary_dim = value_in("attention.key_length") or (width // heads if counted else 0)
    if not isinstance(rotary_dim, int) or not 2 <= rotary_dim <= WIDEST:
        raise ValueError(f"{path} does not say how many features rotate: it holds no rotary table")
    return rotary_dim


def _plain(rope_theta: float, pairs: int) -> Tensor:
    """Return the table of a base in double, from the base as float32 keeps it."""
    exponents = torch.arange(pairs, dtype=torch.float64, device="cpu") / pairs
    return torch.tensor(float(np.float32(rope_theta)), dtype=torch.float64, device="cpu") ** -exponents


def _factors(opened: GGUFFile, pairs: int, path: str | Path) -> Tensor | None:
    tensors = {piece.name: piece for piece in opened.pieces}
    factors = [torch.from_numpy(np.array(tensors[name].read())) for name in FACTOR_TENSORS if name in tensors]
    if not factors:
        return None
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
    except ValueError as error:
        return None, [f"its patch record cannot be read: {error}"]
    recorded = table_of(record.tables)
    if recorded is None or not TableRecord.of(table).matches(recorded, ROUNDED_TWICE):
        return record, [f"its patch record says another table: {record.to_method()}"]
    return record, []


def table_of(tables: Mapping[str, TableRecord]) -> TableRecord | None:
    """Return the table of a record that a file holds: that of full attention where there are several."""
    return tables.get("all", tables.get("full_attention"))


def base_in(record: PatchRecord, like: RotaryTable) -> RotaryTable:
    """Return the table before a patch, as its record describes it.

    Args:
        record: of the patch.
        like: the table in the file, which tells where it belongs.

    Raises:
        PatchError: the record describes none.
    """
    base, settings = table_of(record.base_tables), record.base_config["rope_parameters"]
    settings = settings.get("full_attention", settings)
    if base is None or not isinstance(settings.get("rope_theta"), int | float):
        raise PatchError(f"the record of {record.to_method()} does not describe the table before the patch")
    return replace(
        like,
        inv_freq=frequencies.table_of(base.inv_freq),
        attention_scaling=base.attention_scaling,
        rope_theta=float(settings["rope_theta"]),
        rope_type=str(settings.get("rope_type", "default")),
        max_position_embeddings=int(record.base_config["max_position_embeddings"]),
        original_max_position_embeddings=settings.get("original_max_position_embeddings"),
        rope_parameters=settings,
        other_keys=other_keys(settings),
    )


def as_recorded(record: PatchRecord, table: RotaryTable) -> RotaryTable:
    """Return the recorded numbers of a table that equals them, and the type that the method gives it."""
    recorded = table_of(record.tables)
    if recorded is None:
        return table
    kind = table.rope_type
    with contextlib.suppress(ValueError):  # a record on a base that its method would not take by itself
        kind = record.to_method()(base_in(record, table)).rope_type
    numbers = frequencies.table_of(recorded.inv_freq)
    return replace(table, inv_freq=numbers, attention_scaling=recorded.attention_scaling, rope_type=kind)
