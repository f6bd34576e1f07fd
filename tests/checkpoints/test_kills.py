"""Commands that are killed at any moment: nothing that they leave loads, and the same command again gives the same.

A forked process is killed at its n-th change of the file system, for n over the whole run; the parent never writes.
"""

import shutil

import pytest
import torch
from support.forks import forked
from support.tiny import logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch


@pytest.mark.full
def test_a_kill_over_another_checkpoint_mixes_nothing(tmp_path):
    """What loads is the old one whole or the new one whole; in between it does not load."""
    out = tmp_path / "place" / "out"
    old = tiny_model(seed=5)
    new = tiny_model()
    rope_patch.apply(old, "yarn:factor=4")
    rope_patch.apply(new, "abf")
    either = [logits(old), logits(new)]
    outcomes = set()
    rope_patch.save(old, tmp_path / "before")
    for stop in range(1, 1000):
        shutil.rmtree(tmp_path / "place", ignore_errors=True)
        shutil.copytree(tmp_path / "before", out)
        status = forked(lambda: rope_patch.save(new, out), stop, tmp_path / "place")
        for load in (rope_patch.load, AutoModelForCausalLM.from_pretrained):  # the second has none of our checks
            try:
                output = logits(load(out).eval())
            except (OSError, ValueError):
                outcomes.add("none")
            else:
                outcomes.add(next((n for n, one in enumerate(either) if torch.equal(output, one)), "a mixture"))
        if status == 0:
            break
        assert forked(lambda: rope_patch.save(new, out)) == 0
        assert torch.equal(logits(rope_patch.load(out)), either[1])
    assert stop > 10
    assert outcomes == {0, 1, "none"}
