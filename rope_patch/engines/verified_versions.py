"""The versions in which engines were seen to read tables, by family, and the tables that they would lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.tables import RotaryTable

UNVERIFIED = "unverified"


@dataclass(frozen=True)
class Engine:
    """An engine, and what was checked about it.

    Attributes:
        name: the name of the engine, as its users write it.
        version: the version that was checked; another may read the same folder differently.
        reads: the model types on which its own code built every table that was tried as transformers does.
        base_only: the model types, each with a layer type if it has a table for each, on which its code reads nothing
            but ``rope_theta`` and the rotated share of a head, so that any other table would be lost in silence.
    """

    name: str
    version: str
    reads: frozenset[str]
    base_only: frozenset[tuple[str, str | None]] = frozenset()


_LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3"})

ENGINES: dict[str, Engine] = {
    "hf": Engine(
        "transformers",
        "5.23.0 and 4.57.1",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "gemma4_text", "phi", "stablelm", "gpt_neox"},
    ),
    "vllm": Engine(
        "vLLM",
        "0.33.0",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "gemma4_text", "stablelm"},
    ),
    "sglang": Engine(
        "SGLang",
        "0.5.23",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "phi", "stablelm"},
        base_only=frozenset(
            {
                ("gemma", None),
                ("gemma2", None),
                ("phi", None),
                ("stablelm", None),
                ("gemma3_text", "sliding_attention"),
            }
        ),
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
    for table in tables:
        if (model_type, table.layer_type) in engine.base_only and not table.is_geometric:
            where = model_type
            if table.layer_type:
                where = f"the {table.layer_type} table of {model_type}"
            raise ValueError(
                f"{engine.name} {engine.version} reads nothing but rope_theta on {where}: this table "
                f"({table.rope_type}) would be lost there without a word. What changes the base alone runs there (abf, "
                "ntk); other engines may read the table"
            )
    return engine.version if model_type in engine.reads else UNVERIFIED
