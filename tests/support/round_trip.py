"""Check one patch on its way from the model to a folder that plain transformers loads, and in cached generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import rope_patch
from support.tiny import ids, logits

STATED_BY_SAVING = ("dtype", "architectures")


def assert_same(one: Any, other: Any) -> None:
    """Check that two models give equal logits, to the last bit."""
    assert torch.equal(logits(one), logits(other))


def assert_round_trip(model: Any, folder: Path, method: str) -> None:
    """Apply a method, save, load with plain transformers and with rope_patch, and undo: the logits are always right."""
    before = logits(model)
    config = model.config.to_dict()
    patch = rope_patch.apply(model, method)
    assert not torch.allclose(logits(model), before, atol=1e-5)
    rope_patch.save(model, folder)
    for load in (AutoModelForCausalLM.from_pretrained, rope_patch.load):
        assert_same(load(folder), model)
    patch.restore()
    assert torch.equal(logits(model), before)
    left = {key: value for key, value in model.config.to_dict().items() if key not in STATED_BY_SAVING}
    assert left == {key: value for key, value in config.items() if key not in STATED_BY_SAVING}


def assert_cached_equals_full(model: Any, prompt: torch.Tensor | None = None) -> None:
    """Check that generation token by token through a cache gives the logits of one pass over the whole text."""
    if prompt is None:
        prompt = ids(20)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "output_logits": True, "pad_token_id": 0}
    # Ordinary tokens alone: those of images and the like are the last ones of the vocabulary.
    options |= {"attention_mask": torch.ones_like(prompt), "suppress_tokens": [0, 1, 2, *range(90, 96)]}
    done = model.generate(prompt, **options, return_dict_in_generate=True)
    full = logits(model, done.sequences)[:, prompt.shape[1] - 1 : -1]
    torch.testing.assert_close(torch.stack(done.logits, 1), full, rtol=0, atol=1e-4)
