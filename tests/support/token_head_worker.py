"""Run vLLM's kernels that store a scale for each token and head on a CPU, with Triton's interpreter.

``python token_head_worker.py vllm FOLDER`` reads ``jobs.json``, whose paths are arrays of states (tokens, heads,
features), and writes for each job and format ``NAME.FORMAT.npy``, the states as vLLM's attention reads them.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

TYPES = {"fp8": torch.float32, "int8": torch.int8, "int4": torch.uint8}
"""The type of a stored element. Of fp8 the cast is left to PyTorch: the interpreter makes 4 of 7.96."""


def stored(x, name):
    """Store states, keys and values alike, and return them as attention reads them, in float32."""
    from vllm.v1.attention.ops import int4_per_token_head as int4
    from vllm.v1.attention.ops import triton_reshape_and_cache_flash as kernels
    from vllm.v1.kv_cache_interface import KVQuantMode

    kernels._PER_TOKEN_HEAD_QUANT_PARAMS[torch.float32] = (kernels.FP8_MAX, kernels.FP8_MIN)
    tokens, heads, features = x.shape
    shape = (-(-tokens // 16), 16, heads, features // 2 if name == "int4" else features)
    cache = torch.zeros(shape, dtype=TYPES[name])
    scales = torch.zeros(shape[:3])
    mode = KVQuantMode[f"{name.upper()}_PER_TOKEN_HEAD"]
    kernels.triton_reshape_and_cache_flash_per_token_head_quant(
        x, x, cache, cache, scales, scales, torch.arange(tokens), mode
    )
    numbers = cache.flatten(0, 1)[:tokens]
    scale = scales.flatten(0, 1)[:tokens, :, None].contiguous()
    if name == "fp8":
        numbers = numbers.to(torch.float8_e4m3fn)
    if name != "int4":
        return numbers.float() * scale
    # As ``_attn_packed`` unpacks: the zero point is in the four lowest bits of the scale.
    bits = scale.view(torch.int32)
    steps = torch.stack(int4.unpack_int4_nibbles.fn(numbers), -1).flatten(-2).float() - (bits & 0xF).float()
    rotated = steps * (bits & -16).view(torch.float32)
    return int4.single_rht(rotated, inverse=True) / int4.largest_power_of_2_divisor(features)


def main():
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from triton.backends import backends

    # Without a backend for the CPU vLLM would not import Triton. The interpreter needs none.
    backends["cpu"] = SimpleNamespace(driver=object())
    folder = Path(sys.argv[2])
    for job in json.loads((folder / "jobs.json").read_text()):
        states = torch.from_numpy(np.load(job["path"])).to(getattr(torch, job["options"]["dtype"]))
        for name in TYPES:
            np.save(folder / f"{job['name']}.{name}.npy", stored(states, name).numpy())
    (folder / "answers.json").write_text("{}")


main()
