"""Retrieval through vLLM's offline engine.

Written against the interface of vLLM 0.33.0, as its source code states it, and tested against a stand-in with that
interface: no release of vLLM itself was run with it yet.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import GenerationConfig

from rope_patch.checkpoints import config_json, load_config
from rope_patch.evaluation.answering import Answer, until
from rope_patch.evaluation.engine import AnsweringEngine
from rope_patch.evaluation.prompts import Prompt
from rope_patch.evaluation.result_cache import key
from rope_patch.modeling.scoring import ELSEWHERE

OURS = ("model", "max_model_len", "dtype")
"""Arguments of ``vllm.LLM`` that are given here."""


def vllm_version() -> str:
    """Return the version of vLLM that is installed.

    Raises:
        ImportError: none, or one that cannot be imported.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # by default its log is among what --json prints
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        raise ImportError(f'vLLM cannot be imported ({error}): pip install "rope_patch[vllm]"') from error


class VLLMEngine(AnsweringEngine):
    """A checkpoint folder that vLLM runs; it is loaded when the first prompt is asked.

    The answer is what vLLM generates greedily. Besides, each token of the right answer is asked for by a request of its
    own, after the prompt and the right tokens before it, which vLLM takes from its prefix cache: that gives the token
    that it would choose there, and the log-probability of the right one.

    Args:
        folder: a checkpoint with safetensors weights, such as ``rope-patch export --to vllm`` writes.
        max_length: of the longest prompt with its answer [tokens].
        dtype: of weights and activations, as vLLM names it; by default that of the checkpoint. vLLM's own ``"auto"``
            would run float32 weights in 16 bits.
        **options: other arguments of ``vllm.LLM``, such as ``tensor_parallel_size``.

    Raises:
        ImportError: no vLLM.
        ValueError: an option that is given here, or one that is no JSON value.

    Example:
        ``with VLLMEngine("llama-vllm", 16384) as engine: rope_patch.retrieval(engine, tokenizer, lengths=[16384], …)``
    """

    def __init__(self, folder: str | Path, max_length: int, dtype: str = "auto", **options: Any) -> None:
        self.name = f"vLLM {vllm_version()}"
        check_options(options)
        self.folder, self.max_length, self.options = Path(folder), max_length, options
        config = load_config(self.folder)
        stated = str(getattr(config, "dtype", None) or "auto").removeprefix("torch.")
        self.dtype = stated if dtype == "auto" else dtype
        self.vocabulary = int(config.get_text_config().vocab_size)
        try:
            generation = GenerationConfig.from_pretrained(self.folder)
        except OSError:  # no file of it
            generation = GenerationConfig.from_model_config(config)
        ids = generation.eos_token_id
        self.stops = tuple(int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None)
        self._llm: Any = None

    def __enter__(self) -> VLLMEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let vLLM go, which frees the memory of the GPU; it starts again when it is asked again."""
        self._llm = None
        gc.collect()

    @cached_property
    def identity(self) -> str:
        """Digest of the folder, the program and its settings."""
        settings = {"max_length": self.max_length, "dtype": self.dtype, "options": self.options}
        return key(engine=self.name, checkpoint=_fingerprint(self.folder), **settings)

    def answer(
        self, rows: Sequence[Sequence[Prompt]], stops: Sequence[int], on_progress: Callable[[int], None]
    ) -> list[list[Answer]]:
        """Answer every prompt of a grid; vLLM batches the requests itself."""
        columns = list(zip(*rows, strict=True))  # the prompts of one haystack follow each other
        asked = [[*_requests(prompt)] for column in columns for prompt in column]
        requests = list(itertools.chain(*asked))
        outputs = iter(self._generate([ids for ids, _ in requests], [options for _, options in requests]))
        answers = iter([self._answer(prompt, outputs, stops) for column in columns for prompt in column])
        return list(map(list, zip(*([next(answers) for _ in column] for column in columns), strict=True)))

    def _generate(self, prompts: Sequence[list[int]], options: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return what vLLM gives for each request."""
        vllm = importlib.import_module("vllm")
        if self._llm is None:
            settings = {"max_model_len": self.max_length, "dtype": self.dtype, **self.options}
            self._llm = vllm.LLM(model=str(self.folder), **settings)
        sampling = [vllm.SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, **each) for each in options]
        return list(self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False))

    def _answer(self, prompt: Prompt, outputs: Iterator[Any], stops: Sequence[int]) -> Answer:
        """Read the outputs of the requests of one prompt."""
        generated = until(list(next(outputs).outputs[0].token_ids), stops)
        predicted, logprobs = [], []
        for token in prompt.ids[len(prompt.ids) - prompt.answer :]:
            read = next(outputs).outputs[0]
            if list(read.token_ids) != [token]:
                raise ValueError(
                    f"{self.name} took token {list(read.token_ids)} where {token} alone was allowed: it is used in "
                    "another way than release 0.33.0; install that one"
                )
            ranked = read.logprobs[0]
            predicted.append(min(ranked, key=lambda candidate: ranked[candidate].rank))
            logprobs.append(float(ranked[token].logprob))
        if not all(map(math.isfinite, logprobs)):
            raise ValueError(
                f"{self.name} gives log-probabilities that are not finite for a prompt of {len(prompt.ids)} tokens "
                f"that asks for {', '.join(prompt.parts)}: try float32"
            )
        return Answer(generated, tuple(predicted), tuple(logprobs))


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for arguments of ``vllm.LLM`` that cannot be given.

    Raises:
        ValueError: one that is given here, or that is no JSON value.
    """
    for name in OURS:
        if name in options:
            raise ValueError(f"{name} is not an option of vLLM here: it follows from what is measured")
    try:
        json.dumps(options)
    except TypeError as error:
        raise ValueError(f"options of vLLM must be JSON values: {error}") from None


def _requests(prompt: Prompt) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield the ids and sampling parameters of each request: the answer, then each of its right tokens."""
    ids, asked = list(prompt.ids), len(prompt.ids) - prompt.answer
    yield ids[:asked], {"max_tokens": prompt.answer}
    for place in range(asked, len(ids)):
        # Log-probabilities are those before other tokens are ruled out (logprobs_mode "raw_logprobs", vLLM's default).
        yield ids[:place], {"max_tokens": 1, "logprobs": 1, "allowed_token_ids": [ids[place]]}


def _fingerprint(folder: Path) -> str:
    """Return a digest of a checkpoint's config and of a few rows of each of its tensors; it is no checksum."""
    config = {name: value for name, value in config_json(folder).items() if name not in ELSEWHERE}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors weights: convert the checkpoint to them")
    for path in files:
        with safe_open(path, framework="pt") as tensors:
            for name in sorted(tensors.keys()):
                part = tensors.get_slice(name)
                shape = part.get_shape()
                digest.update(f"{name}{shape}{part.get_dtype()}".encode())
                for row in sorted({0, shape[0] // 2}) if shape and 0 not in shape else ():
                    values = part[row : row + 1].double().flatten()
                    digest.update(values[:1024].numpy().tobytes())
    return digest.hexdigest()
