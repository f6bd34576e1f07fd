"""Releases by the names that people know: their table, what doubles their context, and who reads the result.

    python benchmarks/releases.py    # writes docs/releases.md; a test compares each of its rows

Each row is made by running its command on a tiny random model with the rotary settings of the release, which were read
from public config files in November 2026.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from family_models import tiny_config
from rope_patch.cli.app import dispatch
from rope_patch.engines.compare_programs import AGREES, UNVERIFIED, ProgramComparison, compare_programs
from rope_patch.engines.programs import PROGRAMS
from rope_patch.patching.locate import locate
from rope_patch.patching.verify import trained_length

PAGE = Path(__file__).parents[1] / "docs" / "releases.md"
HEAD = """\
# By release

Commands that double the context that a release states; add `-o FOLDER`. For another length change `--target-length`.
`llama3` ×16 over 8k is a factor of 16 over an original context of 8k. A model that was fine-tuned from a release mostly
has its table: `rope-patch doctor` shows the table, and [`rope-patch settings`](settings.md) the keys.

Each command was run on a tiny random model with the rotary settings of the release. [`rope-patch extend`](extend.md)
measures whether your checkpoint then reads so far. On a scaled table the method is the one that was ahead on
[toys](results/tables.md#checkpoints-that-are-scaled-already).

| release | its table | to double its context | becomes | programs that read the same |
|---|---|---|---|---|
"""
TAIL = """
The last column names programs that read the same table and context as transformers 5 from the new folder. *All*:
transformers 4, vLLM, SGLang, llama.cpp and MLX ([engines](engines.md)). Of other programs `doctor FOLDER` says whether
they differ or were not compared; `rope-patch export` writes a form for more of them.

`python benchmarks/releases.py` writes this page.
"""
METHODS = {"llama3": "llama3", "linear": "abf factor=4", "proportional": "default"}
"""By the type of the table: the method that doubles the context of a release; `yarn` for all others."""


def plain(theta: float, **more: Any) -> dict[str, Any]:
    """Return the settings of a table without scaling."""
    return {"rope_type": "default", "rope_theta": theta, **more}


def llama3(theta: float, factor: float) -> dict[str, Any]:
    """Return the settings of Llama 3.1's scaling."""
    bounds = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **bounds}


def yarn(theta: float, factor: float, original: int, **more: Any) -> dict[str, Any]:
    """Return the settings of YaRN's scaling."""
    return {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": original,
        **more,
    }


def mixed(**full: Any) -> dict[str, Any]:
    """Return the settings of a Gemma: those of the full layers, and the plain table of the sliding ones."""
    return {"sliding_attention": plain(1e4), "full_attention": {"rope_theta": 1e6, **full}}


# Which layers of Gemma 3 slide is a part of what other programs read.
FIVE_OF_SIX = {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
BOTH_MSCALE = {**BETAS, "mscale": 1.0, "mscale_all_dim": 1.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
LONGROPE |= {"partial_rotary_factor": 0.75, "short_factor": [1.0] * 12, "long_factor": [1.0 + i / 2 for i in range(12)]}


@dataclass(frozen=True)
class Release:
    """A release with what its config says of the table.

    Attributes:
        name: the name by which people know it.
        hub: the id of one of its checkpoints on the hub.
        model_type: the ``model_type`` of its language model.
        context: the context that it states [tokens].
        rope_parameters: its rotary settings, in the form of transformers 5.
        more: further settings on which it depends who uses the table.
    """

    name: str
    hub: str
    model_type: str
    context: int
    rope_parameters: Mapping[str, Any]
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scaled(self) -> Mapping[str, Any]:
        """The settings of the table that is patched: that of the full layers where there are two."""
        return self.rope_parameters.get("full_attention", self.rope_parameters)

    def words(self, reached: int) -> list[str]:
        """Return the words of the command that doubles the context that a model reaches [tokens]."""
        method, length = METHODS.get(self.scaled["rope_type"], "yarn"), thousands(2 * reached)
        output = f"{self.hub.split('/')[-1]}-{length}"
        return ["apply", self.hub, *method.split(), "--target-length", length, "-o", output]

    def model(self) -> PreTrainedModel:
        """Return a tiny random model with the rotary settings of the release."""
        small = tiny_config(self.model_type)
        settings = small.to_dict()
        text = settings.get("text_config", settings)
        text |= {"max_position_embeddings": self.context, "rope_parameters": dict(self.rope_parameters), **self.more}
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(type(small).from_dict(settings)).eval()


RELEASES = (
    Release("Llama 3 8B, 70B", "meta-llama/Meta-Llama-3-8B", "llama", 8192, plain(5e5)),
    Release("Llama 3.1 8B to 405B, 3.3 70B", "meta-llama/Llama-3.1-8B", "llama", 131072, llama3(5e5, 8.0)),
    Release("Llama 3.2 1B, 3B", "meta-llama/Llama-3.2-1B", "llama", 131072, llama3(5e5, 32.0)),
    Release("Gemma 2 2B to 27B", "google/gemma-2-2b", "gemma2", 8192, plain(1e4)),
    Release("Gemma 3 270M, 1B", "google/gemma-3-1b-it", "gemma3_text", 32768, mixed(rope_type="default"), FIVE_OF_SIX),
    Release(
        "Gemma 3 4B to 27B",
        "google/gemma-3-4b-it",
        "gemma3",
        131072,
        mixed(rope_type="linear", factor=8.0),
        FIVE_OF_SIX,
    ),
    Release(
        "Gemma 4 31B",
        "google/gemma-4-31B-it",
        "gemma4",
        262144,
        mixed(rope_type="proportional", partial_rotary_factor=0.25),
    ),
    Release("Qwen2.5 Instruct 0.5B to 72B", "Qwen/Qwen2.5-7B-Instruct", "qwen2", 32768, plain(1e6)),
    Release("Qwen3 0.6B to 32B, of April 2025", "Qwen/Qwen3-8B", "qwen3", 40960, plain(1e6)),
    Release("Qwen3 with the YaRN of its card", "FOLDER", "qwen3", 40960, yarn(1e6, 4.0, 32768)),
    Release("Qwen3.5", "Qwen/Qwen3.5-9B", "qwen3_5", 262144, plain(1e7, partial_rotary_factor=0.25)),
    Release("Mistral 7B 0.1", "mistralai/Mistral-7B-v0.1", "mistral", 32768, plain(1e4), {"sliding_window": 4096}),
    Release("Mistral 7B 0.3", "mistralai/Mistral-7B-v0.3", "mistral", 32768, plain(1e6), {"sliding_window": None}),
    Release(
        "Ministral 3 3B to 14B",
        "mistralai/Ministral-3-8B-Base-2512",
        "ministral3",
        262144,
        yarn(1e6, 16.0, 16384, **BOTH_MSCALE, llama_4_scaling_beta=0.1),
    ),
    Release(
        "gpt-oss 20b, 120b",
        "openai/gpt-oss-20b",
        "gpt_oss",
        131072,
        yarn(150000.0, 32.0, 4096, **BETAS, truncate=False),
    ),
    Release(
        "Phi-4 14B", "microsoft/phi-4", "phi3", 16384, plain(250000.0), {"original_max_position_embeddings": 16384}
    ),
    Release(
        "Phi-4-mini",
        "microsoft/Phi-4-mini-instruct",
        "phi3",
        131072,
        LONGROPE,
        {"original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75},
    ),
    Release(
        "OLMo 3 7B, 32B",
        "allenai/Olmo-3-1025-7B",
        "olmo3",
        65536,
        {
            "sliding_attention": plain(5e5),
            "full_attention": yarn(5e5, 8.0, 8192, **BETAS, attention_factor=1.2079441541679836),
        },
    ),
    Release("SmolLM2 135M, 360M", "HuggingFaceTB/SmolLM2-135M-Instruct", "llama", 8192, plain(1e5)),
    Release("SmolLM3 3B", "HuggingFaceTB/SmolLM3-3B", "smollm3", 65536, plain(5e6)),
    Release("DeepSeek V3, R1", "deepseek-ai/DeepSeek-V3", "deepseek_v3", 163840, yarn(1e4, 40.0, 4096, **BOTH_MSCALE)),
    Release(
        "Granite 4.0 micro",
        "ibm-granite/granite-4.0-micro",
        "granitemoehybrid",
        131072,
        plain(1e7),
        {"position_embedding_type": "rope"},
    ),
    Release(
        "Granite 4.0 H",
        "ibm-granite/granite-4.0-h-tiny",
        "granitemoehybrid",
        131072,
        plain(1e4),
        {"position_embedding_type": "nope"},
    ),
    Release("GLM-4 9B 0414", "zai-org/GLM-4-9B-0414", "glm4", 32768, plain(1e4, partial_rotary_factor=0.5)),
    Release("GLM-4.5, 4.5 Air", "zai-org/GLM-4.5-Air", "glm4_moe", 131072, plain(1e6, partial_rotary_factor=0.5)),
    Release("Apertus 8B, 70B", "swiss-ai/Apertus-8B-2509", "apertus", 65536, llama3(12e6, 8.0)),
)
"""The releases, in the order of the page."""


def thousands(tokens: int) -> str:
    """Return a number of tokens as the command line takes it.

    >>> thousands(262144)
    '256k'
    """
    return f"{tokens // 1024}k"


def row(release: Release, work: Path) -> str:
    """Return the row of a release, made by running its command on a tiny model.

    Args:
        release: the release.
        work: an empty folder for the tiny checkpoint and what the command writes.
    """
    source, output, model = work / "source", work / "output", release.model()
    model.save_pretrained(source)
    try:
        shown_words = release.words(trained_length(model))
        folders = {release.hub: str(source), shown_words[-1]: str(output)}
        with contextlib.redirect_stdout(io.StringIO()):
            dispatch([folders.get(word, word) for word in shown_words])
    except ValueError as error:
        reason = str(error).replace(str(source), "it").partition(": ")[0]
        return f"| {release.name} | {table_of(release)} | refused: {reason} | | |"
    comparison = compare_programs(output)
    before, after = (text_settings(folder) for folder in (source, output))
    old, new = (one["rope_parameters"].get("full_attention", one["rope_parameters"]) for one in (before, after))
    becomes = kind_of(new)
    if after["max_position_embeddings"] != release.context * 2:
        becomes += f", states {thousands(after['max_position_embeddings'])}"
    if new["rope_theta"] != old["rope_theta"]:
        becomes = f"base {new['rope_theta']:g}, {becomes}"
    if release.scaled["rope_type"] == "proportional":
        becomes += ": no table limits it, since all pairs that rotate make many turns"
    if locate(model).windowed:
        return f"| {release.name} | {table_of(release)} | nothing does: all layers slide, and none sees further | | |"
    command = f"`rope-patch {' '.join(shown_words[:-2])}`"
    return f"| {release.name} | {table_of(release)} | {command} | {becomes} | {readers(comparison)} |"


def text_settings(folder: Path) -> dict[str, Any]:
    """Return what the config.json of a folder says of the language model."""
    config = json.loads((folder / "config.json").read_text())
    settings: dict[str, Any] = config.get("text_config", config)
    return settings


def kind_of(parameters: Mapping[str, Any]) -> str:
    """Return the type, the factor and the original context of a table."""
    kind, factor = parameters["rope_type"], parameters.get("factor")
    original = parameters.get("original_max_position_embeddings")
    text = "plain" if kind == "default" else f"`{kind}`"
    if factor is not None:
        text += f" ×{factor:g}"
    if original is not None:
        text += f" over {thousands(original)}"
    return text


def table_of(release: Release) -> str:
    """Return what the table of a release is, and the context that it states."""
    if release.more.get("position_embedding_type") == "nope":
        return f"none, states {thousands(release.context)}"
    where = " on full layers" if "full_attention" in release.rope_parameters else ""
    return f"{kind_of(release.scaled)}{where}, states {thousands(release.context)}"


def readers(comparison: ProgramComparison) -> str:
    """Return which programs compute the same table from a folder as transformers 5."""
    verdicts = {name: {one.verdict for one in comparison.rows if one.program == name} for name in PROGRAMS}
    same = [PROGRAMS[name].name for name, found in verdicts.items() if found == {AGREES}]
    if all(UNVERIFIED in found for found in verdicts.values()):
        return "not compared"
    if len(same) == len(verdicts):
        return "all"
    return ", ".join(same or ["none"])


def page() -> str:
    """Return the page."""
    rows = []
    for release in RELEASES:
        with tempfile.TemporaryDirectory() as work:
            rows.append(row(release, Path(work)))
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())
