"""The figure of docs/concepts.md: by what methods divide the frequencies of SmolLM2's table for four times its context.

python benchmarks/tables_figure.py docs/tables.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM, LlamaConfig

import rope_patch
from rope_patch.plots.base import factors_by_wavelength

METHODS = ("pi", "ntk", "yarn", "mrrope", "p_rope:p=0.75")
CONTEXT, TARGET = 8192, 32768


def main() -> None:
    """Draw it, from a model of one layer with the rotary table of SmolLM2-135M."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="PNG to draw")
    output: Path = parser.parse_args().output
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 16}
    rotary = {"rope_type": "default", "rope_theta": 100000.0}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 64}
    config = LlamaConfig(max_position_embeddings=CONTEXT, rope_parameters=rotary, **shape, **heads)
    model = AutoModelForCausalLM.from_config(config)
    before, tables = rope_patch.inspect(model).tables[0].inv_freq, {}
    for name in METHODS:
        with rope_patch.patched(model, name, target_length=TARGET) as patch:
            tables[name] = patch.after[None].inv_freq
    title = "Factors on the wavelengths, for four times the context"
    factors_by_wavelength(tables, before=before, context=CONTEXT, title=title).savefig(
        output, dpi=110, bbox_inches="tight"
    )


if __name__ == "__main__":
    main()
