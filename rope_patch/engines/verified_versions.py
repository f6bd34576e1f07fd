"""The versions in which engines were seen to read tables, by family, and the tables that they would lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.tables import RotaryTable

UNVERIFIED = "unverified"


@dataclass(frozen=True)
class Program:
    """A program whose reading of checkpoints is known.

    Attributes:
        name: the name of the program, as its users write it.
        version: the version whose code was read; another may read the same folder differently.
        families: the model types on which its own code built every table that was tried as it is computed here.
        ran: the version that ``make test-engines`` runs; empty if there is no package of it for a CPU.
        multimodal: the model types of multimodal checkpoints whose ``text_config`` it reads as the same config alone;
            of vLLM and SGLang this was read in their source, of the others it was compared.
    """

    name: str
    version: str
    families: frozenset[str]
    ran: str = ""
    multimodal: frozenset[str] = frozenset()


_LLAMA_LIKE = frozenset({"llama", "mistral", "qwen2", "qwen3", "phi3"})

ENGINES: dict[str, Program] = {
    "hf": Program(
        "transformers",
        "5.23.0 and 4.57.1",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "gemma4_text", "phi", "stablelm", "gpt_neox"},
    ),
    # From 0.30.0 on (PR #56446) it obeys attention_factor, mscale and mscale_all_dim of YaRN.
    "vllm": Program(
        "vLLM",
        "0.33.0",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "gemma4_text", "stablelm"},
        "0.32.0",
        frozenset({"gemma3", "gemma4"}),
    ),
    # Run with transformers 5.19, which it asks for.
    "sglang": Program(
        "SGLang",
        "0.5.23",
        _LLAMA_LIKE | {"gemma", "gemma2", "gemma3_text", "phi", "stablelm"},
        multimodal=frozenset({"gemma3"}),
    ),
}
"""The programs for which folders are written, by the name that ``export --to`` takes."""

SGLANG_BASE_ONLY = (
    ("gemma", None),
    ("gemma2", None),
    ("phi", None),
    ("stablelm", None),
    ("gemma3_text", "sliding_attention"),
)
"""The model types, each with a layer type if it has a table for each, on which SGLang's code reads nothing but
``rope_theta`` and the rotated share of a head, so that any other table would be lost in silence."""


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
        if to == "sglang" and (model_type, table.layer_type) in SGLANG_BASE_ONLY and not table.is_geometric:
            where = model_type
            if table.layer_type:
                where = f"the {table.layer_type} table of {model_type}"
            raise ValueError(
                f"{engine.name} {engine.version} reads nothing but rope_theta on {where}: this table "
                f"({table.rope_type}) would be lost there without a word. What changes the base alone runs there (abf, "
                "ntk); other engines may read the table"
            )
    return engine.version if model_type in engine.families else UNVERIFIED
