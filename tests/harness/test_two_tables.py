"""Patches of two tables through lm-eval: each request is read under the table for its length."""

from __future__ import annotations

import pytest
from harness.instances import requests

import rope_patch
from rope_patch.evaluation.builtin_text import builtin_text
from rope_patch.evaluation.documents import documents
from rope_patch.harness.model import RopePatchLM

LLAMA = str(rope_patch.data_path("assets") / "llama")
LONG = "yarn:factor=4"


def model(method, **options):
    return RopePatchLM(pretrained=LLAMA, dtype="float32", device="cpu", batch_size=4, **method, **options)


@pytest.fixture(scope="module")
def models():
    both = model({"method": f"{LONG}@256", "target_length": 1024})
    return both, model({}, max_length=1024), model({"method": LONG, "target_length": 1024})


@pytest.fixture(scope="module")
def texts(models):
    """A text of fewer than 256 tokens and one of more."""
    text = next(iter(documents(builtin_text("heldout")))).text
    tokenizer = models[0].tokenizer
    return [tokenizer.decode(tokenizer(text)["input_ids"][:count]) for count in (100, 400)]


def scores(lm, texts):
    asked = requests("loglikelihood", *((text[:-20], text[-20:]) for text in texts))
    return [score for score, _ in lm.loglikelihood(asked, disable_tqdm=True)]


def test_requests_of_one_batch_are_scored_under_their_own_tables(models, texts):
    both, plain, long = (scores(lm, texts) for lm in models)
    assert both[0] == pytest.approx(plain[0], abs=1e-4) and both[0] != pytest.approx(long[0], abs=1e-2)
    assert both[1] == pytest.approx(long[1], abs=1e-4) and both[1] != pytest.approx(plain[1], abs=1e-2)


def test_generation_takes_the_table_for_the_prompt_and_its_answer(models, texts):
    options = {"until": [], "max_gen_toks": 24, "do_sample": False}
    asked = requests("generate_until", *((text, options) for text in texts))
    both, plain, long = (lm.generate_until(asked, disable_tqdm=True) for lm in models)
    assert both == [plain[0], long[1]]
    assert plain[1] != long[1]
