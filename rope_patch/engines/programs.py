"""The programs of which it is known what they do with a config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rope_patch.engines.known_answers import known_answers

UNVERIFIED = "unverified"


@dataclass(frozen=True)
class Program:
    """A program that reads checkpoints.

    Attributes:
        name: its name, as its users write it.
        multimodal: the model types of multimodal checkpoints whose ``text_config`` it reads as the same config alone.
    """

    name: str
    multimodal: Sequence[str] = ()

    @property
    def version(self) -> str:
        """The version that was asked, or of SGLang, which has no package for a CPU, read."""
        return str(known_answers()[self.name]["version"])


PROGRAMS = {
    "transformers-4": Program("transformers 4", ("gemma3",)),
    "vllm": Program("vLLM", ("gemma3", "gemma4")),
    "sglang": Program("SGLang", ("gemma3",)),
    # What its own converter, convert_hf_to_gguf.py, makes of a folder.
    "llama.cpp": Program("llama.cpp"),
    "mlx": Program("MLX", ("gemma3", "gemma4")),
}
"""The programs, by the name that ``rope-patch doctor --for`` takes."""

ENGINES = {"hf": "transformers", "vllm": "vLLM", "sglang": "SGLang"}
"""The names of the programs for which folders are written, by the name that ``export --to`` takes."""
