"""Export checkpoints to other engines: folders for transformers, vLLM and SGLang, files for llama.cpp."""

from rope_patch.engines.write_export import export as export
