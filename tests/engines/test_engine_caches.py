"""Caches that ``kv-check`` simulates, against the engines' own kernels, token by token: `make test-engines`.

An engine reads a public checkpoint with a float32 cache and with a quantized one, once as a whole prompt and once a
token at a time, and transformers reads it through ``rope_patch.kv_cache.cache.quantized``. KL is that of the next
token's distribution from the one with the float32 cache. `make smollm2-checkpoint` and its like write the folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_folders import checkpoint, prompt
from support.engines import ROOT, Case, answers, report
from support.prompting import ENGLISH
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.formats import FP8_MAX, Format
from rope_patch.kv_evaluation.calibration import calibrated, write_scales
from rope_patch.modeling.attention_layers import find_attention_layers

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
TOKENS = 256
MODELS = {
    "SmolLM2-135M": ROOT / "build" / "smollm2" / "SmolLM2-135M-Instruct",
    "Gemma 3 270M": ROOT / "build" / "gemma3" / "gemma-3-270m-q4_k_m",
}
VLLM: dict[str, Any] = {"kv_cache_memory_bytes": 1 << 28, "max_model_len": 2 * TOKENS}


class CutFP8(Format, name="fp8-cut"):
    """Float8 e4m3 as vLLM's kernel for a CPU writes it: digits are cut off, where its kernels for GPUs round."""

    bits = 8
    scales = 0

    def round(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Keep the upper three bits of the fraction; 2^-120 gives float32 the exponents of e4m3, small ones too."""
        bits = (x.float().clamp(-FP8_MAX, FP8_MAX) * 2.0**-120).view(torch.int32) & ~0xFFFFF
        return (bits.view(torch.float32) * 2.0**120).to(x.dtype)


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm:fp8": ("vllm", {"kv_cache_dtype": "fp8", **VLLM}),
    "llama.cpp:q8_0": ("llama.cpp", {"cache": "q8_0", "flash_attn": True}),
    "llama.cpp:q4_0": ("llama.cpp", {"cache": "q4_0", "flash_attn": True}),
}
AS_THE_KERNEL = {"vllm:fp8": "k=fp8-cut;v=fp8-cut"}
"""What a kernel rounds to where it is not what ``kv-check`` simulates."""
PROMPTS = {"vllm": "max_num_batched_tokens", "llama.cpp": "n_ubatch"}
"""The option of each engine that says how many tokens it reads at once."""


def divergence(exact: np.ndarray, rough: np.ndarray) -> np.ndarray:
    """Return the KL divergence of each position [nats]."""
    return np.array([float((np.exp(p, dtype=np.float64) * (p - q)).sum()) for p, q in zip(exact, rough, strict=True)])


@torch.no_grad()
def simulated(folder: Path, ids: list[int], scheme: str) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities with a float32 cache and with a simulated one, without those of the last position."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    exact = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    with quantized(model, scheme) as cache:
        rough = model(torch.tensor([ids]), past_key_values=cache()).logits[0, :-1].log_softmax(-1)
    return exact.numpy(), rough.numpy()


@pytest.mark.parametrize("scheme", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_a_simulated_cache_costs_what_the_kernel_costs(name, scheme, tmp_path):
    if not MODELS[name].exists():
        pytest.skip(f"no {MODELS[name]}: make smollm2-checkpoint gemma3-checkpoint writes it")
    engine, options = FORMATS[scheme]
    folder = tmp_path / "model"
    folder.mkdir()
    for file in MODELS[name].iterdir():  # llama.cpp's converter writes beside them
        (folder / file.name).symlink_to(file)
    ids = list(AutoTokenizer.from_pretrained(folder)(ENGLISH).input_ids[:TOKENS])
    once, each = ({PROMPTS[engine]: size} for size in (2 * TOKENS, 1))
    plain = {key: value for key, value in options.items() if key in VLLM}
    cases = [
        Case("exact", folder, ids, options=plain | once),
        Case("prompt", folder, ids, options=options | once),
        Case("decoded", folder, ids, options=options | each),
    ]
    found = answers(engine, tmp_path, cases)
    assert not any("error" in found[case.name] for case in cases), found
    exact, *rough = (np.load(tmp_path / f"{case.name}.npy")[: TOKENS - 1] for case in cases)
    results: dict[str, Any] = {"versions": found["versions"]}
    simulations = {"simulated": scheme}
    if scheme in AS_THE_KERNEL:
        simulations["as the kernel"] = AS_THE_KERNEL[scheme]
    for simulation, text in simulations.items():
        ours, ours_rough = simulated(folder, ids, text)
        results[simulation] = {"kl": float(divergence(ours, ours_rough).mean())}
    for case, logprobs in zip(cases[1:], rough, strict=True):
        results[case.name] = {
            "kl": float(divergence(exact, logprobs).mean()),
            "kl_between": float(divergence(logprobs, ours_rough).mean()),
        }
    report(f"{scheme} {name}", results)
    ratio = results["decoded"]["kl"] / results[simulation]["kl"]
    if scheme in AS_THE_KERNEL:  # the same numbers are stored; a number at the edge of a step is cut to either side
        assert 0.9 < ratio < 1.1
        assert results["decoded"]["kl_between"] < 0.2 * results[simulation]["kl"]
    # llama.cpp rounds queries too, and orders the features of Llama's heads in another way.
    assert 1 / 3 < ratio < 3


def test_vllm_reads_the_scales_that_a_check_writes(tmp_path):
    """Keys a thousand times as large and queries as much smaller: scale 1 clips, and scales of a text do not."""
    plain = tmp_path / "plain"
    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama", plain))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 1000
            layer.self_attn.q_proj.weight /= 1000
    model.save_pretrained(plain)
    ids = prompt()[:TOKENS]
    scales = calibrated(model, find_attention_layers(model), [torch.tensor(ids)])
    write_scales(plain, tmp_path / "scaled", scales)
    cases = [
        Case("exact", plain, ids, options=VLLM),
        Case("clipped", plain, ids, options=VLLM | {"kv_cache_dtype": "fp8"}),
        Case("scaled", tmp_path / "scaled", ids, options=VLLM | {"kv_cache_dtype": "fp8"}),
        Case("by its config", tmp_path / "scaled", ids, options=VLLM),
    ]
    found = answers("vllm", tmp_path, cases)
    assert not any("error" in found[case.name] for case in cases), found
    exact, *rough = (np.load(tmp_path / f"{case.name}.npy") for case in cases)
    clipped, scaled, by_config = (float(divergence(exact, logprobs).mean()) for logprobs in rough)
    assert scaled < clipped / 10 and by_config == scaled
    report("scales of vllm:fp8", {"clipped": clipped, "scaled": scaled})
