"""Checkpoints that several files here read, and none changes."""

import pytest
import torch
from support.patches import lora
from support.tiny import logits, tiny_model

import rope_patch


@pytest.fixture(scope="session")
def two_adapters(tmp_path_factory):
    """A base, the same patched, two adapters trained under YaRN and one under ABF, with their logits."""
    root = tmp_path_factory.mktemp("adapters")
    tiny_model().save_pretrained(root / "base")
    rope_patch.save(rope_patch.load(root / "base", "yarn:factor=4"), root / "patched")
    expected = {}
    for seed, (name, method) in enumerate((("one", "yarn:factor=4"), ("two", "yarn:factor=4"), ("abf", "abf")), 1):
        tuned = lora(rope_patch.load(root / "base", method), seed)
        rope_patch.save(tuned, root / name)
        expected[name] = logits(tuned)
    assert not torch.allclose(expected["one"], expected["two"], atol=0.1)
    return root, expected


@pytest.fixture
def expected(two_adapters):
    return two_adapters[1]


@pytest.fixture(scope="session")
def root(two_adapters):
    return two_adapters[0]
