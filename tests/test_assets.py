"""The bundled checkpoints meet their bars on text and prompts they never saw."""

import random

import pytest
from support.reference_recipe import load_recipe
from support.tiny import bundled_model
from transformers import AutoTokenizer

import rope_patch
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.texts.builtin_text import builtin_text

DEPTHS = [i / 9 for i in range(10)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def bundled(request):
    tokenizer = AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / request.param)
    return request.param, bundled_model(request.param), tokenizer


@pytest.mark.full
def test_retrieval_within_the_trained_length_and_beyond_it_with_a_patch_alone(bundled):
    shape, model, tokenizer = bundled
    near = retrieval(model, tokenizer, lengths=[256], depths=DEPTHS, samples=10, seed=77)
    far = retrieval(model, tokenizer, lengths=[1024], depths=DEPTHS, samples=3, seed=77)
    least, most = {"llama": (0.95, 0.2), "gemma3": (0.9, 0.5)}[shape]
    assert near.accuracy(256) >= least
    assert far.accuracy(1024) <= most
    with rope_patch.patched(model, "yarn", factor=4):
        far = retrieval(model, tokenizer, lengths=[1024], depths=DEPTHS, samples=3, seed=78)
    assert far.accuracy(1024) >= 0.85


def test_copying(bundled):
    _, model, tokenizer = bundled
    recipe = load_recipe()
    stream = tokenizer(builtin_text("heldout").text[:20_000], add_special_tokens=False, verbose=False)["input_ids"]
    sampler = recipe.Sampler(tokenizer, stream, random.Random(5))
    assert recipe.copy_accuracy(model, sampler, 256, 8, "cpu") >= 0.8
