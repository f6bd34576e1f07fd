"""Compare the cos and sin tables that vLLM's and SGLang's own Python builds from our folders with ours.

    pip install --no-deps vllm sglang triton    # their Python alone; then what it says it lacks, without dependencies
    OMP_NUM_THREADS=1 python benchmarks/engine_tables.py -o benchmarks/results/engine_tables.json

For small random checkpoints of every family and for every method, two folders are read by an engine's own config
loader and model class (``engine_code.py`` says how): the one that ``rope-patch export --to ENGINE`` writes, and as a
control the one that ``rope-patch apply`` writes, which speaks to transformers alone. The figure is the largest
difference between the engine's cos and sin and ours, over all positions of the context, with the factor on both.
Differences of the control show what an engine would have done in silence. Kernels, attention and logits are not run
here.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

import engine_code
from measuring import command, environment, write
from rope_patch.checkpoints.folder_patch import patch_folder
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.engines import export
from rope_patch.engines.verified_versions import UNVERIFIED
from rope_patch.methods import MethodLike, Table, as_method
from rope_patch.patching.verify import inspect_model

CONTEXT, TARGET = 256, 1024
SIZE = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 64},
    "phi3": {"original_max_position_embeddings": CONTEXT},
    "gemma": {"head_dim": 64},
    "gemma2": {"head_dim": 64, "hidden_act": "gelu_pytorch_tanh"},  # as in hub configs; SGLang reads this key
    "gemma3_text": {"head_dim": 64, **MIXED},
    "gemma4_text": {"head_dim": 64, "global_head_dim": 128, "vocab_size_per_layer_input": 64, **MIXED},
    "olmo3": MIXED,
    "phi": {},
    "stablelm": {},
    "gpt_neox": {},
}
METHODS = (
    "default",
    "pi:factor=4",
    "abf:rope_theta=500000",
    "ntk:factor=4",
    "yarn:factor=4",
    "yarn:factor=3",
    "yarn:factor=4:attention_factor=1.5",
    "mrrope:factor=4",
    "llama3:factor=4",
    "longrope:factor=4",
    "p_rope:p=0.5",
    "p_rope_reversed:p=0.5",
    "nope",
    "partial:p=0.5",
    "truncated:context=256",
    "abf:rope_theta=500000+p_rope:p=0.5",
    "yarn:factor=4+p_rope:p=0.5",
    "learned",
)
SCALED = "replace_scaling=true"  # Gemma 4's own table is p-RoPE, which these methods would otherwise refuse


def checkpoint(family: str, folder: Path) -> Path:
    """Save a small random checkpoint."""
    torch.manual_seed(0)
    sizes = {k: v for k, v in SIZE.items() if family != "gpt_neox" or k != "num_key_value_heads"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | FAMILIES[family]))).save_pretrained(folder)
    return folder


def method_of(name: str, base: Path) -> MethodLike:
    """Return a method; "learned" is a table that no formula gives, with a scaling of its own."""
    slot = inspect_model(model_without_weights(base)).tables[0]
    if name == "learned":
        rough = [f * (1 + 0.2 * math.sin(3 * i)) for i, f in enumerate(slot.inv_freq.tolist())]
        return Table(values=tuple(rough), attention_scaling=1.07)
    head, plus, tail = name.partition("+")
    replaces = head.startswith(("abf", "ntk", "yarn", "mrrope", "llama3", "partial")) and slot.layer_type is not None
    return as_method(f"{head}:{SCALED}{plus}{tail}" if replaces else name)


def difference(engine: str, folder: Path) -> float:
    """Return the largest difference between an engine's cos and sin and ours, over the context of a folder."""
    slots = inspect_model(model_without_weights(folder)).tables
    context = slots[0].max_position_embeddings
    theirs = engine_code.tables(engine, folder, context)
    worst = 0.0
    for slot in slots:
        angles = torch.arange(context).float()[:, None] * slot.inv_freq
        ours = torch.cat((angles.cos(), angles.sin()), dim=-1) * slot.attention_scaling
        table = theirs[slot.layer_type] if slot.layer_type in theirs else theirs[None]
        if table.shape != ours.shape:
            raise ValueError(f"{engine} turns {table.shape[-1] // 2} pairs, we {slot.pairs}")
        worst = max(worst, float((table - ours).abs().max()))
    return worst


def rows(engine: str, families: tuple[str, ...], methods: tuple[str, ...], root: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each family and method."""
    for family in tqdm(families, desc=engine):
        base = checkpoint(family, root / family)
        for number, name in enumerate(methods):
            # Every folder has a name of its own: SGLang remembers configs by path.
            out, plain = (root / f"{engine}-{family}-{number}-{kind}" for kind in ("export", "plain"))
            row: dict[str, Any] = {"engine": engine, "family": family, "method": name}
            try:
                method = method_of(name, base)
                patch_folder(base, method, plain, target_length=TARGET)
                row["plain_folder"] = _tried(engine, plain)
                exported = export(base, out, to=engine, method=method, target_length=TARGET)
            except ValueError as error:
                yield row | {"verdict": "refused", "reason": str(error)}
                continue
            row["written_as"] = [table["rope_type"] for table in exported["tables"]]
            if exported["checked_against"] == UNVERIFIED:
                yield row | {"verdict": "unverified"}
                continue
            row |= {"verdict": "runs", "difference": _tried(engine, out)}
            if engine == "vllm":
                row["context"] = engine_code.longest(out)
            yield row


def _tried(engine: str, folder: Path) -> float | str:
    try:
        return difference(engine, folder)
    except Exception as error:  # an engine may raise anything; its message is the result
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def summary(engine_rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of each verdict, and the worst figure of an engine."""
    counts = {v: sum(row["verdict"] == v for row in engine_rows) for v in ("runs", "refused", "unverified")}
    ran = [row["difference"] for row in engine_rows if row["verdict"] == "runs"]
    control = [row.get("plain_folder") for row in engine_rows if row["verdict"] != "unverified"]
    wrong = [value for value in control if isinstance(value, str) or (value is not None and value > 1e-4)]
    return {
        **counts,
        "largest_difference": max(ran) if all(isinstance(value, float) for value in ran) else "failed",
        "plain_folders_read_otherwise": f"{len(wrong)} of {sum(value is not None for value in control)}",
        "contexts": sorted({row["context"] for row in engine_rows if "context" in row}),
    }


def main() -> None:
    """Compare tables for every engine that is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument("--quick", action="store_true", help="one family, two methods")
    given = parser.parse_args()
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()
    versions = {engine: engine_code.version(engine) for engine in engine_code.ENGINES}
    families, methods = (("llama",), ("pi:factor=4", "p_rope:p=0.5")) if given.quick else (tuple(FAMILIES), METHODS)
    all_rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        for engine, version in versions.items():
            if version is not None:
                all_rows += rows(engine, families, methods, Path(root))
    summaries = {
        engine: summary([row for row in all_rows if row["engine"] == engine]) if version else "not installed"
        for engine, version in versions.items()
    }
    report = {
        "benchmark": "engine_tables",
        "command": command(),
        "what": "largest difference between an engine's own cos and sin for our folders, and ours",
        "summary": summaries,
        "settings": {"size": SIZE, "families": FAMILIES, "context": CONTEXT, "target_length": TARGET},
        "environment": environment() | {engine: version for engine, version in versions.items() if version},
        "rows": all_rows,
    }
    write(report, given.output)


if __name__ == "__main__":
    main()
