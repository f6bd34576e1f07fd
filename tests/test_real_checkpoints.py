"""A real, trained checkpoint, used when it lies beside the repository: the cliff, and what each method does to it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation.perplexity.measure import perplexity

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
FOLDER = DATA / "checkpoints" / "llama2xs281K"
STORIES = DATA / "text" / "tinystories_val.txt"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the checkpoint llama2xs281K is not beside the repository"),
]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def rows():
    """Stories packed as in training, BOS story BOS story …: (24, 512)."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids: list[int] = []
    for story in STORIES.read_text(encoding="utf-8").split("<|endoftext|>"):
        if story.strip():
            ids += [tokenizer.bos_token_id, *tokenizer(story.strip(), add_special_tokens=False)["input_ids"]]
        if len(ids) > 24 * 512:
            break
    return torch.tensor(ids[: 24 * 512]).view(24, 512)


@pytest.fixture(scope="module")
def measured(model, rows):
    """Perplexity at positions 0-256 (trained), 256-384 and 384-512, by method."""

    def blocks(method):
        with rope_patch.patched(model, method):
            result = perplexity(model, rows, buckets=(0, 256, 384, 512))
        return [bucket.perplexity for bucket in result.buckets]

    return {name: blocks(name) for name in ("default", "yarn:factor=2", "yarn:factor=4")}


def test_the_cliff(measured):
    inside, near, far = measured["default"]
    assert inside == pytest.approx(8.5, rel=0.15)
    assert near / inside > 3
    assert far / near > 3


# Seen: default 8.9, 51, 217; YaRN x2 9.7, 9.9, 8.7; YaRN x4 17, 24, 21. With 4 pairs a ramp is coarse, so x4 costs
# twice the perplexity inside the window.
@pytest.mark.parametrize(("method", "cost"), [("yarn:factor=2", 1.2), ("yarn:factor=4", 2.2)])
def test_yarn_removes_it(measured, method, cost):
    inside, _, far = measured[method]
    assert far < 1.5 * inside
    assert far < measured["default"][2] / 5
    assert inside < cost * measured["default"][0]
