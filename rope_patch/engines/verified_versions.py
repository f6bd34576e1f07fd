"""The versions in which engines were seen to read tables, by family, and the reasons why they cannot read others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rope_patch.tables import RotaryTable

UNVERIFIED = "unverified"


@dataclass(frozen=True)
class Engine:
    """An engine, and what was checked about it.

    Attributes:
        name: the name of the engine, as its users write it.
        version: the version that was checked; another may read the same folder differently.
        shown_by: the command or test that showed which tables it reads.
        reads: the model types on which its own code built every table that was tried as transformers does.
        base_only: the model types, each with a layer type if it has a table for each, on which its code reads nothing
            but ``rope_theta`` and the rotated share of a head, so that any other table would be lost in silence.
        one_base: the model types on which it has one ``rope_theta`` for all layers and scales only full attention; it
            reads both from the top of config.json.
        refused: the reason why it cannot run a model type at all, by model type.
    """

    name: str
    version: str
    shown_by: str
    reads: frozenset[str]
    base_only: frozenset[tuple[str, str | None]] = frozenset()
    one_base: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)


_LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3"})

ENGINES: dict[str, Engine] = {
    "hf": Engine(
        "transformers",
        "5.23.0 and 4.57.1",
        "tests/engines/test_export.py",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "gemma4_text", "phi", "stablelm", "gpt_neox"},
    ),
    "vllm": Engine(
        "vLLM",
        "0.33.0",
        "benchmarks/engine_tables.py",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "gemma4_text", "stablelm"},
    ),
    "sglang": Engine(
        "SGLang",
        "0.5.23",
        "benchmarks/engine_tables.py",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "olmo3", "phi", "stablelm"},
        base_only=frozenset(
            {
                ("gemma", None),
                ("gemma2", None),
                ("phi", None),
                ("stablelm", None),
                ("gemma3_text", "sliding_attention"),
                ("olmo3", "sliding_attention"),
            }
        ),
        one_base=frozenset({"olmo3"}),
        refused={"gemma4_text": "its config loader fails on text-only Gemma 4 folders"},
    ),
}


def check_version(to: str, model_type: str, tables: Sequence[RotaryTable]) -> str:
    """Return the version in which an engine was seen to read such tables on such a model, or ``UNVERIFIED``.

    Args:
        to: the engine, a key of ``ENGINES``.
        model_type: the model type in the checkpoint's config.
        tables: the tables of the checkpoint.

    Raises:
        ValueError: the engine cannot express a table, with the reason.
    """
    engine = ENGINES[to]
    if reason := engine.refused.get(model_type):
        raise ValueError(f"{engine.name} {engine.version} cannot run {model_type}: {reason}")
    for table in tables:
        if (model_type, table.layer_type) in engine.base_only and not table.is_geometric:
            where = f"the {table.layer_type} table of {model_type}" if table.layer_type else model_type
            raise ValueError(
                f"{engine.name} {engine.version} reads nothing but rope_theta on {where}: this table "
                f"({table.rope_type}) would be lost there without a word. What changes the base alone runs there (abf, "
                "ntk); other engines may read the table"
            )
    bases = sorted({table.rope_theta for table in tables})
    if model_type in engine.one_base and len(bases) > 1:
        raise ValueError(
            f"{engine.name} {engine.version} has one rope_theta for all layers of {model_type}, and these tables have "
            f"{' and '.join(f'{base:g}' for base in bases)}: give the method to both layer types "
            '(--layer-types "full_attention sliding_attention"), or take one that leaves the base as it is'
        )
    return engine.version if model_type in engine.reads else UNVERIFIED
