"""The options of ``rope-patch export``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.fields import contained, path, word
from rope_patch.options.shared import DTYPES, CommandOptions, Patching


@dataclass(frozen=True)
class ExportOptions(CommandOptions, command="export"):
    """Write a checkpoint so that another engine runs it with the same rotary tables, or explain why it cannot.

    The weights are copied, an adapter is merged into them, and weights of a GGUF file are dequantized. What is written
    also loads in plain transformers. ``export.json`` names the version of the engine that was checked to read these
    tables correctly, or says that no version was checked.

    Example: ``rope-patch export ./llama-yarn --to vllm -o ./llama-yarn-vllm``
    """

    model: str = shared.model()
    to: str = word(
        "The engine to export to: hf (transformers 5 and 4), vllm, sglang or gguf (llama.cpp).", metavar="ENGINE"
    )
    output: Path = shared.new_output(
        "The folder to write, or for gguf the file. It must be new or empty, unless --force is given.", "PATH"
    )
    method: str | None = shared.method()
    patching: Patching = contained(Patching)
    converter: Path | None = path(
        "With --to gguf: the path of llama.cpp's own convert_hf_to_gguf.py, which writes the weights. It is in "
        "llama.cpp's repository and in the package convert-hf-to-gguf.",
        None,
        metavar="FILE",
    )
    dtype: str = word(
        "The data type of merged weights, of weights read from a GGUF file, and of new GGUF files: auto, float32, "
        "float16 or bfloat16. With auto, weights of a GGUF file become bfloat16, half the size of float32; that "
        "moves the distribution of the next token by a KL divergence below .0001.",
        "auto",
        metavar="DTYPE",
        choices=DTYPES,
    )
    force: bool = shared.force()
