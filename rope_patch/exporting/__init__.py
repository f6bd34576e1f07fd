"""Export checkpoints to other engines: folders for transformers, vLLM and SGLang, files for llama.cpp."""

from rope_patch.exporting.run import export as export
