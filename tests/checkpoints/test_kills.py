"""Commands that are killed at any moment: nothing that they leave loads, and the same command again gives the same.

A forked process is killed at its n-th change of the file system, for n over the whole run; the parent never writes.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from forks import forked
from patches import lora
from tiny import logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A base, the same patched, and an adapter on it."""
    root = tmp_path_factory.mktemp("sources")
    tiny_model().save_pretrained(root / "base")
    tuned = lora(rope_patch.load(root / "base", "yarn:factor=4"))
    rope_patch.save(tuned, root / "adapter")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("new", ["model", "adapter"])
def test_a_kill_over_another_checkpoint_mixes_nothing(sources, tmp_path, new, every):
    """What loads is the old one whole or the new one whole; in between it does not load."""
    out = tmp_path / "place" / "out"
    old = rope_patch.load(sources / "base", "yarn:factor=4").eval()
    if new == "model":
        with torch.no_grad():
            old.model.embed_tokens.weight.mul_(3)
    fresh = rope_patch.load(sources / "adapter" if new == "adapter" else sources / "base").eval()
    if new == "model":
        rope_patch.apply(fresh, "abf")
    before = lora(old, seed=5) if new == "adapter" else old
    either = [logits(before), logits(fresh)]
    outcomes = set()
    rope_patch.save(before, tmp_path / "before")
    for stop in range(1, 1000, every):
        shutil.rmtree(tmp_path / "place", ignore_errors=True)
        shutil.copytree(tmp_path / "before", out)
        status = forked(lambda: rope_patch.save(fresh, out), stop, tmp_path / "place")
        try:
            output = logits(rope_patch.load(out).eval())
        except (OSError, ValueError):
            outcomes.add("none")
        else:
            outcomes.add(next((n for n, one in enumerate(either) if torch.equal(output, one)), "a mixture"))
        if new == "model" and (out / "config.json").exists() and (out / "model.safetensors").exists():
            plain = logits(AutoModelForCausalLM.from_pretrained(out).eval())  # a loader without our checks
            assert any(torch.equal(plain, one) for one in either)
        if status == 0:
            break
        assert forked(lambda: rope_patch.save(fresh, out)) == 0
        assert torch.equal(logits(rope_patch.load(out).eval()), either[1])
    assert stop > 10
    assert outcomes == {0, 1, "none"}
