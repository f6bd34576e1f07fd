"""The figures of docs/concepts.md and docs/methods: by what methods divide the frequencies of SmolLM2's table.

    python benchmarks/tables_figure.py           # docs/tables.png, and a PNG file for each page of docs/methods

All are for four times its context of 8192 tokens; the fitted table is the bundled Llama's, for four times its 256.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import rope_patch
from pages import ROOT, results
from rope_patch.plots.base import factors_by_wavelength

CONTEXT, FACTOR = 8192, 4
TITLE, LONGER = "Factors on the wavelengths", ", for four times the context"
OVERVIEW = ("pi", "ntk", "yarn", "mrrope", "p_rope:p=0.75")
LONGROPE = "longrope:factors=" + "/".join(["1"] * 16 + ["4"] * 16)
"""An example of a list, not one that a search found."""
PAGES = {
    "abf": ("abf:rope_theta=500000",),
    "cope": ("cope", "p_rope:p=0.6875"),
    "llama3": ("llama3", "yarn"),
    "longrope": (LONGROPE,),
    "mrrope": ("mrrope", "yarn"),
    "ntk": ("ntk",),
    "p_rope": ("p_rope:p=0.75", "p_rope_reversed:p=0.75", "nope"),
    "partial": ("partial:p=0.75", "p_rope:p=0.75"),
    "pi": ("pi",),
    "resonance": ("resonance",),
    "truncated": ("truncated", "p_rope:p=0.5"),
    "yarn": ("yarn",),
}
"""Page of docs/methods to the methods that its figure compares with the table as it was."""


def smollm2(context: int = CONTEXT) -> PreTrainedModel:
    """Return a model of one small layer with the rotary table of SmolLM2-135M."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 16}
    rotary = {"rope_type": "default", "rope_theta": 100000.0}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    config = LlamaConfig(max_position_embeddings=context, rope_parameters=rotary, **shape, **heads)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def scales(method: str) -> bool:
    """Whether a method takes its factor from the length."""
    return rope_patch.methods.parse(method).needs_target


def tables(model: PreTrainedModel, methods: tuple[str, ...], target_length: int) -> dict[str, Tensor]:
    """Return the frequencies that methods give a model [rad/token], each (pairs,)."""
    frequencies = {}
    for method in methods:
        with rope_patch.patched(model, method, target_length=target_length if scales(method) else None) as patch:
            frequencies[method.partition(":factors")[0]] = patch.after[None].inv_freq
    return frequencies


def fitted() -> tuple[dict[str, Tensor], Tensor, int]:
    """Return tables of the bundled Llama for four times its context, YaRN's and a fitted one; its own; its context."""
    model = AutoModelForCausalLM.from_pretrained(rope_patch.data_path("assets") / "llama")
    rows = results("fit")["rows"]
    row = next(row for row in rows if (row["checkpoint"], row["factor"], row["seed"]) == ("llama", FACTOR, 0))
    before, context = rope_patch.inspect(model).tables[0].inv_freq, model.config.max_position_embeddings
    values = row["method"].partition("values=")[2].partition(":")[0]
    yarn = tables(model, ("yarn",), FACTOR * context)
    return yarn | {"fitted": torch.tensor([float(value) for value in values.split("/")])}, before, context


def main() -> None:
    """Draw them all."""
    model = smollm2()
    before = rope_patch.inspect(model).tables[0].inv_freq
    drawn = tables(model, OVERVIEW, FACTOR * CONTEXT)
    figure = factors_by_wavelength(drawn, before=before, context=CONTEXT, title=TITLE + LONGER)
    figure.savefig(ROOT / "docs" / "tables.png", dpi=110, bbox_inches="tight")
    pages = {page: (tables(model, methods, FACTOR * CONTEXT), before, CONTEXT) for page, methods in PAGES.items()}
    for page, (others, plain, context) in {**pages, "table": fitted()}.items():
        title = TITLE + (LONGER if page == "table" or any(map(scales, PAGES[page])) else "")
        figure = factors_by_wavelength({"default": plain, **others}, before=plain, context=context, title=title)
        figure.set_size_inches(7.5, 3.4)
        path = ROOT / "docs" / "methods" / f"{page}.png"
        figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    main()
