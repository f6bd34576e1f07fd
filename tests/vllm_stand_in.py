"""A module in the place of ``vllm``: the part of its interface that is used, run by plain transformers.

Names, arguments and defaults are those of vLLM 0.33.0 (``vllm/entrypoints/llm.py``, ``sampling_params.py``,
``outputs.py``, ``logprobs.py``), and so is what it refuses. Arguments that it does not know raise, as there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

VERSION = "0.33.0"
OTHERS = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.92, "seed": 0, "enforce_eager": False}


@dataclass
class SamplingParams:
    temperature: float = 1.0
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    detokenize: bool = True
    allowed_token_ids: list[int] | None = None


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None


@dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True


def module() -> Any:
    """Return a new module ``vllm``, with the engines that were started in ``started``."""
    vllm: Any = ModuleType("vllm")
    vllm.__version__, vllm.started, vllm.requests = VERSION, [], []

    class LLM:
        def __init__(self, model: str, *, dtype: str = "auto", **kwargs: Any) -> None:
            longest = kwargs.pop("max_model_len", None)
            unknown = set(kwargs) - set(OTHERS)
            if unknown:
                raise TypeError(f"EngineArgs.__init__() got an unexpected keyword argument {min(unknown)!r}")
            # float32 weights run in 16 bits under "auto"
            kind = torch.float16 if dtype == "auto" else getattr(torch, dtype)
            self.model = AutoModelForCausalLM.from_pretrained(model, dtype=kind).eval()
            derived = self.model.config.get_text_config().max_position_embeddings
            if longest is not None and longest > derived:
                raise ValueError(f"User-specified max_model_len ({longest}) is greater than the derived ({derived})")
            self.longest, self.seen, self.past = longest or derived, tuple[int, ...](), DynamicCache()
            vllm.started.append({"model": model, "max_model_len": longest, "dtype": dtype, **kwargs})

        @torch.no_grad()
        def generate(
            self,
            prompts: Any,
            sampling_params: Any = None,
            *,
            use_tqdm: bool = True,
            lora_request: Any = None,
            priority: Any = None,
            tokenization_kwargs: Any = None,
            mm_processor_kwargs: Any = None,
        ) -> list[RequestOutput]:
            assert len(prompts) == len(sampling_params)
            return [self.run(str(i), *one) for i, one in enumerate(zip(prompts, sampling_params, strict=True))]

        def logits_after(self, *ids: int) -> torch.Tensor:
            pairs = enumerate(zip(self.seen, ids[:-1], strict=False))
            known = next((i for i, (a, b) in pairs if a != b), min(len(self.seen), len(ids) - 1))
            if known < len(self.seen):  # its prefix cache
                self.past.crop(known - len(self.seen))
            self.seen = ids
            new = torch.tensor([ids[known:]])
            return self.model(new, past_key_values=self.past, logits_to_keep=1).logits[0, -1].float()

        def run(self, name: str, prompt: dict[str, list[int]], params: SamplingParams) -> RequestOutput:
            ids = list(prompt["prompt_token_ids"])
            if len(ids) >= self.longest:
                raise ValueError("The decoder prompt plus the number of requested output tokens (at least 1) is longer")
            vllm.requests.append((len(ids), params))
            assert params.temperature == 0 and params.max_tokens is not None
            stop = set() if params.ignore_eos else {self.model.generation_config.eos_token_id}
            said: list[int] = []
            ranked: list[dict[int, Logprob]] = []
            while len(said) < min(params.max_tokens, self.longest - len(ids)):
                logits = self.logits_after(*ids, *said)
                raw = logits.log_softmax(-1)  # before anything is ruled out
                if params.allowed_token_ids is not None:
                    mask = torch.full_like(logits, -torch.inf)
                    mask[params.allowed_token_ids] = 0
                    logits = logits + mask
                token = int(logits.argmax())
                said.append(token)
                entry = {token: Logprob(float(raw[token]), int((raw >= raw[token]).sum()))}
                best = int(raw.argmax())
                ranked.append(entry | {best: Logprob(float(raw[best]), 1)})
                if token in stop:
                    break
            kept = None if params.logprobs is None else ranked
            return RequestOutput(name, ids, [CompletionOutput(0, "", said, None, kept)])

    vllm.LLM, vllm.SamplingParams = LLM, SamplingParams
    return vllm
