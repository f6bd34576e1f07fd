"""Compute the table, attention factor and context of each layer type that programs read from a whole checkpoint config.

A program reads the config in its own way before it builds a table: transformers 4 reads keys at the top, vLLM and
SGLang the config that transformers 5 completes, and llama.cpp the keys that its converter writes into a GGUF file. Some
model classes leave things out. A table that is right in the wrong layers is a wrong table, too: some programs take
every second or sixth layer for full attention whatever ``layer_types`` says, and some know no sliding window on a
family. There are rules only for families on which they were compared with the program's own code, by
``make test-engines`` or, of SGLang's layers, by reading it (0.5.23, ``srt/models``); on any other family a program is
"unverified", and nothing is guessed. These are functions of dictionaries, without models;
:mod:`~rope_patch.engines.dialect_tables` builds the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rope_patch import frequencies
from rope_patch.engines.dialect_tables import DIALECTS, SHARE, Built, RefusesError, table_of_parameters
from rope_patch.engines.program_contexts import kind_of
from rope_patch.engines.stated_config import ALL_SLIDE, FULL, SLIDING, LayerReach, StatedConfig
from rope_patch.engines.verified_versions import ENGINES, SGLANG_BASE_ONLY, Program
from rope_patch.tables import RotaryTable, changes_with_length

_UNSCALED: dict[str, Any] = {"rope_type": "default"}


_OLDER = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "olmo3"), (1e4, 1.0)),
    "gemma3_text": (1e6, 1.0),
    "phi": (1e4, 0.5),
    "stablelm": (1e4, 0.25),
    "gpt_neox": (1e4, 0.25),
}
"""The base and the rotated share of a head that transformers 4.57.1 uses if a config states none, by model type."""

_PHI3_CONTEXT = 4096
"""``original_max_position_embeddings`` that transformers 4 uses for a Phi-3 whose config.json states none [tokens]."""

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The parameters of llama3 that llama.cpp's converter and mlx-lm use if a config leaves them out."""

_NO_KEYS = ("gemma", "gemma2")
"""Families for which llama.cpp's converter writes no key of the table, not even its base."""

_CONVERTED = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "olmo3", *_NO_KEYS})

PROGRAMS: dict[str, Program] = {
    "transformers-4": Program(
        "transformers 4", "4.57.1", frozenset(_OLDER), "4.57.1", multimodal=frozenset({"gemma3"})
    ),
    "vllm": ENGINES["vllm"],
    "sglang": ENGINES["sglang"],
    # What its own converter, convert_hf_to_gguf.py, makes of a folder.
    "llama.cpp": Program("llama.cpp", "0c1e57098", _CONVERTED, "of llama-cpp-python 0.3.36"),
    "mlx": Program(
        # The package mlx-lm.
        "MLX",
        "0.32.2",
        frozenset({*_OLDER, "gemma4_text"}),
        "0.32.2",
        frozenset({"gemma3", "gemma4"}),
    ),
}
"""The programs whose reading is known, by the name that ``rope-patch doctor --for`` takes."""


@dataclass(frozen=True)
class Reading:
    """The reading of a config by a program.

    Attributes:
        tables: the tables that the program builds, by layer type; empty if it refuses the config or is not verified.
        layers: the layers as the program runs them; empty like the tables.
        moved: the reason why layers are others than those of transformers; empty if none is.
        refused: the reason why the program fails on the config; empty if it does not.
        unverified: the reason why it is not known what the program computes; empty if it is known.
    """

    tables: Mapping[str | None, Built] = field(default_factory=dict)
    layers: tuple[LayerReach, ...] = ()
    moved: str = ""
    refused: str = ""
    unverified: str = ""

    def agrees(self, stated: StatedConfig) -> bool:
        """Tell whether the program computes the tables of transformers 5 in the layers of transformers 5."""
        tables = all(built.is_table(stated.tables[kind]) for kind, built in self.tables.items())
        return bool(self.tables) and tables and self.layers == stated.layers


def reading_of(program: str, stated: StatedConfig) -> Reading:
    """Return the reading of a config by a program.

    Args:
        program: the program, a key of :data:`PROGRAMS`.
        stated: the config that the program reads.
    """
    known = PROGRAMS[program]
    if stated.outer_type not in (stated.model_type, *known.multimodal):
        return Reading(unverified=f"its code for {stated.outer_type} checkpoints was not compared")
    if stated.model_type not in known.families:
        return Reading(unverified=f"its code for {stated.model_type} was not compared")
    if stated.unread:
        return Reading(unverified=f"whether it reads {', '.join(stated.unread)} was not checked")
    every = [stated.parameters(kind) for kind in stated.tables]
    if any(changes_with_length({**parameters, "rope_type": kind_of(parameters)}) for parameters in every):
        return Reading(
            unverified="the table changes with the length of the text: there is no one table to compare. Fix it "
            "with rope-patch apply MODEL default --freeze-at LENGTH -o FOLDER"
        )
    read = {"transformers-4": _older, "sglang": _sglang, "llama.cpp": _llama_cpp, "mlx": _mlx}.get(program, _vllm)
    try:
        layers, moved = _layers_of(program, stated)
        return Reading({kind: read(stated, kind) for kind in stated.tables}, layers, moved)
    except RefusesError as error:
        return Reading(refused=str(error))
    except (KeyError, TypeError, ValueError) as error:  # a missing factor, or one that is a string
        return Reading(unverified=f"its code was not compared on such a config ({type(error).__name__}: {error})")


def _plain(theta: float, rotary_dim: int, context: int, *reasons: str) -> Built:
    return Built(frequencies.geometric(float(theta), rotary_dim), 1.0, context, None, reasons)


# --- vLLM and SGLang, which load the config through transformers 5 ---------------------------------------------------


def _vllm(stated: StatedConfig, kind: str | None) -> Built:
    parameters = stated.parameters(kind)
    head_dim = stated.head_dim(kind)
    older = parameters.get("type")
    newer = parameters.get("rope_type")
    if older is not None and older != newer and (older, newer) not in (("su", "longrope"), ("mrope", "default")):
        raise RefusesError(f"it fails where rope_type and its older name type disagree: {newer!r} and {older!r}")
    share = parameters.get(SHARE, 1.0)
    built = table_of_parameters(
        parameters,
        int(head_dim * share),
        stated.context,
        DIALECTS["vllm"],
        head_dim=head_dim,
        config=stated.complete,
    )
    if len(built.inv_freq) != stated.tables[kind].pairs:
        reason = f"it obeys {SHARE} {share:g}, which transformers ignores on {stated.model_type}"
        return replace(built, reasons=(reason, *built.reasons))
    return built


_TOP_SHARE = ("llama", "mistral", "phi3", "phi", "stablelm")
"""Families on which SGLang can rotate a share of a head, which it reads only at the top of config.json."""


def _sglang(stated: StatedConfig, kind: str | None) -> Built:
    parameters = stated.parameters(kind)
    table = stated.tables[kind]
    family = stated.model_type
    if family == "gemma3_text" and kind != SLIDING:  # its model calls transformers' functions, on one dictionary
        return table_of_parameters(parameters, table.rotary_dim, stated.context, DIALECTS["transformers-5"])
    if {"attn_factor", "extrapolation_factor"} & set(parameters):
        raise ValueError("it obeys keys of YaRN that transformers does not know")
    dialect = DIALECTS["sglang"]
    head_dim = stated.head_dim(kind)
    share = 1.0
    reading = f"it reads no {SHARE}"
    if family in _TOP_SHARE:
        share = stated.raw.get(SHARE, _OLDER[family][1])
        reading = f"it reads {SHARE} at the top of config.json alone"
    dims = int(head_dim * share)
    reasons = []
    reads_all = (family, kind) not in SGLANG_BASE_ONLY
    if reads_all and kind_of(parameters) == "proportional":
        dims = head_dim  # every pair is in that table, and the share says how many of them turn
        if share < 1.0:
            parameters = {**parameters, SHARE: share}
            dialect = replace(dialect, proportional_share=True)
    if dims != table.rotary_dim:
        reasons.append(f"{reading}, and takes {share:g}")
    if reads_all:
        return table_of_parameters(parameters, dims, stated.context, dialect, config=stated.complete, reasons=reasons)
    if kind_of(parameters) != "default":
        where = f"{family} models"
        if kind:
            where = f"the {kind} layers of {family}"
        reasons.append(f"it reads nothing but rope_theta on {where}, and computes plain RoPE")
    context, why = dialect.context(stated.complete)
    return _plain(parameters["rope_theta"], dims, context, *reasons, *why)


# --- transformers 4, which reads keys at the top of config.json ------------------------------------------------------


def _older(stated: StatedConfig, kind: str | None) -> Built:
    raw = stated.raw
    family = stated.model_type
    scaling = _older_scaling(raw, family)
    theta, share, reasons = _at_the_top(raw, family, kind, *_OLDER[family])
    dims = int(stated.head_dim(kind) * share)
    if kind == SLIDING:
        scaling = _UNSCALED
    parameters = {**scaling, "rope_theta": theta}
    if kind_of(scaling) == "longrope":
        # For longrope, transformers 4 looks for the original context at the top of config.json alone.
        parameters.pop("original_max_position_embeddings", None)
        if original := raw.get("original_max_position_embeddings"):
            parameters["original_max_position_embeddings"] = original
        elif scaling.get("attention_factor") is None and scaling.get("factor") is None:
            raise RefusesError(
                "it fails on a longrope without factor, attention_factor, or original_max_position_embeddings at the "
                "top of config.json"
            )
    context = int(raw.get("max_position_embeddings", stated.context))
    return table_of_parameters(parameters, dims, context, DIALECTS["transformers-4"], reasons=reasons)


def _at_the_top(
    raw: Mapping[str, Any], family: str, kind: str | None, base: float, share: float
) -> tuple[Any, float, list[str]]:
    """Return the base and the share at the top of config.json, or their defaults, and sentences on keys not read."""
    base_key = "rope_theta"
    share_key = SHARE
    if family == "gpt_neox":  # it has names of its own
        base_key = "rotary_emb_base"
        share_key = "rotary_pct"
    if family == "gemma3_text" and kind == SLIDING:
        base_key = "rope_local_base_freq"
        base = 1e4
    theta = raw.get(base_key, base)
    share = raw.get(share_key, share)
    if base_key not in raw and "rope_parameters" in raw:
        reason = (
            f"it reads rope_theta and rope_scaling at the top of config.json, and not rope_parameters: its base is "
            f"{base:g}, and it scales nothing"
        )
    elif kind == SLIDING:
        reason = "it has one scaling, for full attention: its sliding layers are plain"
    elif "rope_scaling" not in raw:
        reason = "it reads rope_scaling at the top of config.json, which is not there, and scales nothing"
    else:
        return theta, share, []
    return theta, share, [reason]


_TYPE_WINS = ("llama", "qwen2", "qwen3", "phi", "stablelm", "gpt_neox")
"""Families on which transformers 4 obeys ``type`` even if ``rope_type`` is there, too."""

_OLDER_KEYS = {
    "linear": {"factor"},
    "yarn": {"factor"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "longrope": {"short_factor", "long_factor"},
}
"""The keys without which transformers 4 fails on a rope type."""


def _older_scaling(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the scaling that transformers 4 reads.

    Raises:
        RefusesError: transformers 4 fails on the scaling.
    """
    scaling = raw.get("rope_scaling")
    if not scaling:
        return _UNSCALED
    if family == "phi3":  # Phi-3 takes its table by the older names alone
        if set(scaling) != {"type", "short_factor", "long_factor"} or scaling["type"] not in ("longrope", "su", "yarn"):
            raise RefusesError(
                "it takes a rope_scaling of Phi-3 with the three keys type, short_factor and long_factor alone, and "
                "fails on this one"
            )
        return {**scaling, "type": "longrope"}
    if family in _TYPE_WINS and "type" in scaling:
        scaling = {**scaling, "rope_type": scaling["type"]}
    if family in ("gemma3_text", "olmo3") and "rope_type" not in scaling:
        raise RefusesError(f"it fails on a rope_scaling of {family} without rope_type")
    if missing := _OLDER_KEYS.get(kind_of(scaling), set()) - set(scaling):
        raise RefusesError(f"it fails on a {kind_of(scaling)} without {' and '.join(sorted(missing))}")
    return dict(scaling)


# --- MLX, which reads the keys of transformers 4, in its own way for each model --------------------------------------

_MLX_NEEDS = {
    "olmo3": {"rope_theta"},
    "stablelm": {"rope_theta", SHARE},
    "gpt_neox": {"rotary_emb_base", "rotary_pct"},
}
"""The keys at the top of config.json without which its models cannot be made."""

_MLX_UNSCALED = ("gemma", "gemma2", "phi", "stablelm", "gpt_neox")
"""Families whose models there read a base, some a share of a head, and no scaling."""


def _mlx(stated: StatedConfig, kind: str | None) -> Built:
    raw = dict(stated.raw)
    family = stated.model_type
    head_dim = stated.head_dim(kind)
    written = raw.get("rope_parameters")
    if family == "gemma4_text":  # its own defaults are those of transformers
        parameters = written.get(kind, {}) if written else stated.parameters(kind)
        # transformers 5 saves no global_head_dim, but a per_layer_config.
        head_dim = raw.get("global_head_dim") or 512
        if kind == SLIDING:
            head_dim = raw.get("head_dim") or 256
        if head_dim != stated.head_dim(kind):
            raise RefusesError(f"it takes {head_dim} features for a head, which config.json does not state, and fails")
        return _mlx_rope(stated, {"rope_theta": 1e4, **parameters}, head_dim, [])
    if missing := _MLX_NEEDS.get(family, set()) - set(raw):
        raise RefusesError(f"it fails on a config.json without {' and '.join(sorted(missing))} at its top")
    if family == "qwen3" and written:
        raw["rope_theta"] = raw.get("rope_theta") or written.get("rope_theta")
        raw["rope_scaling"] = raw.get("rope_scaling") or written
    base, share = {**_OLDER, "qwen2": (1e6, 1.0), "phi": (1e4, 0.4)}[family]
    theta, share, reasons = _at_the_top(raw, family, kind, base, share)
    scaling = raw.get("rope_scaling") or _UNSCALED
    if family == "phi3" and raw.get("rope_scaling"):
        if not {"type", "long_factor"} <= set(scaling):
            raise RefusesError("it fails on a rope_scaling of Phi-3 without type and long_factor")
        original = raw.get("original_max_position_embeddings", _PHI3_CONTEXT)
        longrope = {**scaling, "type": "longrope", "original_max_position_embeddings": original}
        scaling = {"longrope": longrope, "su": longrope, "linear": scaling}.get(scaling["type"], _UNSCALED)
    elif family in _MLX_UNSCALED and kind_of(scaling) != "default":
        reasons.append(f"it scales nothing on {family} models, and computes plain RoPE")
    if family in _MLX_UNSCALED or kind == SLIDING:
        scaling = _UNSCALED
    turned = head_dim  # Llama and its like turn all
    if family in (*_MLX_UNSCALED, "phi3"):
        turned = int(head_dim * share)
    if turned % 2:
        raise RefusesError(f"it fails on an odd number of features that rotate: {turned}, a share of {share:g}")
    return _mlx_rope(stated, {**scaling, "rope_theta": theta}, turned, reasons)


def _mlx_rope(stated: StatedConfig, parameters: Mapping[str, Any], dims: int, reasons: list[str]) -> Built:
    """Return what its ``initialize_rope`` makes of a dictionary."""
    kind = parameters.get("type") or kind_of(parameters)
    parameters = {**parameters, "rope_type": kind}
    if kind == "llama3":
        parameters = {**_LLAMA3, **parameters}
    elif kind == "yarn":
        parameters.setdefault("original_max_position_embeddings", 4096)
    elif kind == "longrope" and "original_max_position_embeddings" not in parameters:
        raise RefusesError("it fails on a longrope without original_max_position_embeddings in rope_scaling")
    elif kind == "proportional":
        rotated = int(dims * parameters.get(SHARE, 1.0))
        parameters[SHARE] = (rotated + rotated % 2 + 0.5) / dims  # an odd number of features is rounded up
    if kind == "yarn" and ("mscale" in parameters) != ("mscale_all_dim" in parameters):
        raise ValueError("it obeys one of mscale and mscale_all_dim without the other")
    return table_of_parameters(parameters, dims, stated.context, DIALECTS["mlx"], reasons=reasons)


# --- llama.cpp, by way of the keys that its converter writes ---------------------------------------------------------


def _llama_cpp(stated: StatedConfig, kind: str | None) -> Built:
    raw = stated.raw
    family = stated.model_type
    context = stated.context
    table = stated.tables[kind]
    if family in _NO_KEYS:
        reason = f"its converter writes no base and no scaling for {family}: it takes 10000, and scales nothing"
        return _plain(1e4, stated.head_dim(kind), context, reason)
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if not any(name in parameters for name in (FULL, SLIDING)):
        local = raw.get("rope_local_base_freq")
        if local is not None:
            parameters[SLIDING] = {"rope_theta": local}
        if "type" in parameters:  # rope_scaling has gone through transformers 4 before the converter reads it
            wins = family in _TYPE_WINS and not raw.get("rope_parameters")
            if wins or "rope_type" not in parameters:
                parameters["rope_type"] = parameters["type"]
        for key in ("rope_theta", SHARE, "original_max_position_embeddings"):
            if raw.get(key) is not None:
                parameters.setdefault(key, raw[key])
    base = 1e4
    if family == "gemma3_text":
        base = 1e6
    full = {"rope_theta": base, **(parameters.get(FULL) or parameters)}
    if "rope_type" not in full:  # the older name, which it reads where all layers share one dictionary
        full.pop("type", None)
    if full.get("rope_type") == "yarn" and "original_max_position_embeddings" not in full:
        raise RefusesError("its converter fails on YaRN without original_max_position_embeddings")
    sliding = parameters.get(SLIDING) or {}
    if kind == SLIDING:
        base = full["rope_theta"]
        if family == "gemma3_text":
            base = 1e4
        reasons = []
        if sliding.get("rope_type", "default") != "default":
            reasons.append("its sliding layers are plain: it has no keys for their scaling")
        return _plain(sliding.get("rope_theta", base), stated.head_dim(kind), context, *reasons)
    if family == "phi3":
        return _phi3_converted(full, raw, table, context)
    dialect = DIALECTS["llama.cpp"]
    if full.get("rope_type") == "llama3" and family in ("llama", "mistral"):  # their converter writes factors
        dialect = replace(dialect, types=dialect.types | {"llama3"}, ignored=dialect.ignored - {"llama3"})
        full = {**_LLAMA3, **full}
    return table_of_parameters(full, stated.head_dim(kind), context, dialect)


def _phi3_converted(parameters: Mapping[str, Any], raw: Mapping[str, Any], table: RotaryTable, context: int) -> Built:
    """Return what the converter's factors for Phi-3 give: its own factor on cos and sin, and no other type."""
    if "original_max_position_embeddings" not in parameters:
        try:
            _older_scaling(raw, "phi3")
        except RefusesError:  # the converter then reads config.json itself
            missing = "its converter fails on a Phi-3 config without original_max_position_embeddings"
            raise RefusesError(missing) from None
        parameters = {**parameters, "original_max_position_embeddings": _PHI3_CONTEXT}
    if parameters.get("rope_type", "default") != "longrope":
        return _plain(
            parameters["rope_theta"], table.rotary_dim, context, "its converter reads longrope alone on Phi-3"
        )
    own = {key: value for key, value in parameters.items() if key not in ("attention_factor", "long_mscale")}
    built = table_of_parameters(own, table.rotary_dim, context, DIALECTS["vllm"])
    reason = "its converter ignores attention_factor of longrope, and computes one from the contexts"
    return Built(built.inv_freq, built.attention_scaling, context, None, (reason,))


# --- which table each layer uses, and how far it attends --------------------------------------------------------------

_QWEN = ("qwen2", "qwen3")
_WINDOWLESS = {
    "sglang": (*ALL_SLIDE, *_QWEN),
    "llama.cpp": (*ALL_SLIDE, *_QWEN),
    "mlx": (*ALL_SLIDE, *_QWEN, "gemma2"),
}
"""Families on which every layer of a program attends to the whole context."""

_PERIODS = {
    ("mlx", "gemma3_text"): 6,
    ("llama.cpp", "gemma3_text"): 6,
    ("llama.cpp", "gemma2"): 2,
    ("sglang", "gemma2"): 2,
}
"""The number of layers of which a program takes the last for full attention."""


def _layers_of(program: str, stated: StatedConfig) -> tuple[tuple[LayerReach, ...], str]:
    """Return the layers as a program runs them, and the reason if they are others than those of transformers.

    Raises:
        RefusesError: the program fails on such layers.
    """
    own = stated.layers
    family = stated.model_type
    if family in _WINDOWLESS.get(program, ()):
        return tuple(LayerReach(layer.kind, None) for layer in own), f"it knows no sliding window on {family}"
    if program == "vllm" and family in _QWEN and len(set(own)) > 1:
        raise RefusesError(f"it fails on a {family} some of whose layers have a sliding window")
    period = _PERIODS.get((program, family))
    if period is None:
        return own, ""
    if program == "mlx":
        period = int(stated.raw.get("sliding_window_pattern") or period)
    types = [SLIDING if i % period else FULL for i in range(1, len(own) + 1)]
    reason = f"it takes one of {period} layers for full attention, and does not read layer_types"
    return tuple(stated.layer(each) for each in types), reason
