"""Attention of a chunk that follows a context, against attention with a mask."""

import pytest
import torch
from torch import nn

from rope_patch.modeling import prefill
from rope_patch.modeling.prefill import prefill_attention

BEFORE = 300
CHUNK = 70


def states(dtype, heads=6, groups=2, value_width=16):
    generator = torch.Generator().manual_seed(0)

    def draw(several, tokens, size):
        return torch.randn(2, tokens, several, size, generator=generator).to(dtype).transpose(1, 2)

    return draw(heads, CHUNK, 16), draw(groups, BEFORE + CHUNK, 16), draw(groups, BEFORE + CHUNK, value_width)


def by_definition(query, key, value, scale):
    """Softmax over what a query may see, in float64."""
    shared = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(shared, 1) for each in (key, value))
    logits = query.double() @ key.mT * scale
    visible = torch.arange(BEFORE + CHUNK) <= torch.arange(BEFORE, BEFORE + CHUNK)[:, None]
    return logits.masked_fill(~visible, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize("value_width", [16, 8])
@torch.no_grad()
def test_a_chunk_attends_to_the_context_and_to_itself(dtype, tolerance, value_width):
    query, key, value = states(dtype, value_width=value_width)
    module = nn.Identity()
    module.num_key_value_groups = 3
    out, _ = prefill_attention(module, query, key, value, None, scaling=0.3)
    assert out.dtype == dtype and out.shape == (2, CHUNK, 6, value_width)
    true = by_definition(query, key, value, 0.3).transpose(1, 2)
    assert float((out.double() - true).abs().max()) < tolerance


@torch.no_grad()
def test_flash_attention_sees_the_same_tokens(monkeypatch):
    """On a CPU there is none: torch then makes the mask that its flash attention on a GPU does without."""
    monkeypatch.setattr(prefill, "can_use_flash_attention", lambda asked: True)
    query, key, value = states(torch.float64)
    out, _ = prefill.prefill_attention(nn.Identity(), query, key, value, None, scaling=0.3)
    true = by_definition(query, key, value, 0.3).transpose(1, 2)
    assert float((out - true).abs().max()) < 1e-12
