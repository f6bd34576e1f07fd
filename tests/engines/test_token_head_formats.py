"""The formats with a scale for each token and head, against vLLM's own kernels bit for bit: `make test-engines`."""

import numpy as np
import pytest
import torch
from support.engines import Case, answers

from rope_patch.kv_cache.blocks import fake_quantize
from rope_patch.kv_cache.schemes import Scheme

pytestmark = [pytest.mark.engines, pytest.mark.slow]
DTYPES = ("float32", "bfloat16", "float16")
HEAD_SIZES = (32, 64, 80, 96, 128, 192, 256)


def states(size):
    """Random states (tokens, heads, features) from 2^-8 to 2^8 with a long feature; the first tokens are extreme."""
    x = torch.randn(64, 2, size, generator=torch.Generator().manual_seed(size))
    x *= torch.linspace(-8, 8, 64)[:, None, None].exp2()
    x[..., 3] *= 30
    x[:3] = torch.tensor([0, 1e-9, 3.7])[:, None, None]
    x[3] *= 1e4
    x[4] *= 1e-7
    x[5] = torch.arange(size) - size / 2  # ties
    x[6:8] = 0
    x[6, 0, 1] = 5.0
    x[7, :, 2] = 1e-3
    return x


def test_a_scale_for_each_token_and_head_is_vllms_bit_for_bit(tmp_path):
    cases = []
    for size in HEAD_SIZES:
        path = tmp_path / f"{size}.npy"
        np.save(path, states(size).numpy())
        cases += [Case(f"{size}-{dtype}", path, [], options={"dtype": dtype}) for dtype in DTYPES]
    answers("vllm", tmp_path, cases, "token_head_worker.py")
    for case in cases:
        dtype = getattr(torch, case.options["dtype"])
        given = torch.from_numpy(np.load(case.path)).to(dtype)
        for name in ("fp8", "int8", "int4"):
            expected = torch.from_numpy(np.load(tmp_path / f"{case.name}.{name}.npy")).to(dtype)
            scheme = Scheme.parse(f"vllm:{name}_per_token_head")
            for side in (scheme.key, scheme.value):
                assert torch.equal(fake_quantize(given, side), expected), (case.name, name)
