"""Decoding with a quantized cache: it is what the streaming cache gives token by token, and its numbers follow."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.evaluated import check_cache
from support.prompting import ENGLISH, TOKENIZER, bold
from support.tiny import small
from transformers import DynamicCache

from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_evaluation.decoding import Decoding
from rope_patch.kv_evaluation.measure_format import tokens_to_check
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.cache_argument import cache_argument
from rope_patch.runtime.progress import listen
from rope_patch.texts.documents import spread_windows

PROMPT = 40
STEPS = 16
ASKED = {
    **{"lengths": (PROMPT,), "windows": 2, "depths": (0.0,), "samples": 1, "text": ENGLISH, "haystack": "noise"},
    **{"methods": ("default",), "decode": STEPS},
}
FORMATS = ("k=int2;v=int3;sinks=2", "k=int2.channel8.pre;v=int2.token8;residual=8;flush=8")


@torch.no_grad()
def token_by_token(model, cache, prompt, chunk, tokens=None):
    """The tokens (steps,) that a model writes or is given after a prompt, and its log-probabilities after each."""
    past = {cache_argument(model): cache}
    for part in prompt.split(chunk or PROMPT):
        best = int(model(part[None], **past).logits[0, -1].argmax())
    written = []
    logprobs = []
    for step in range(STEPS):
        written.append(best if tokens is None else int(tokens[step]))
        logprobs.append(model(torch.tensor([[written[-1]]]), **past).logits[0, -1].double().log_softmax(-1))
        best = int(logprobs[-1].argmax())
    return torch.tensor(written), torch.stack(logprobs)


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1)


@pytest.mark.parametrize(("family", "chunk"), [("llama", 16), ("gemma3", None)])
def test_decoding_equals_the_streaming_cache_token_by_token(family, chunk):
    model = bold(family)
    check = check_cache(model, TOKENIZER, FORMATS, chunk=chunk, **ASKED)
    windows, _ = spread_windows(TOKENIZER, ENGLISH, PROMPT, 2)
    for name, row in zip(FORMATS, check.rows[1:], strict=True):
        for i, window in enumerate(windows):
            plain, p = token_by_token(model, DynamicCache(config=model.config), window.ids, chunk)
            # Not exact: tokens that are read in one pass see each other in full precision.
            with quantized(model, name, exact=False) as factory:
                _, q = token_by_token(model, factory(), window.ids, chunk, plain)
                own, q_own = token_by_token(model, factory(), window.ids, chunk)
            _, p_own = token_by_token(model, DynamicCache(config=model.config), window.ids, chunk, own)
            torch.testing.assert_close(torch.tensor(row.decoding.forced[i]).double(), kl(p, q), rtol=0, atol=1e-4)
            torch.testing.assert_close(torch.tensor(row.decoding.own[i]).double(), kl(p_own, q_own), rtol=0, atol=1e-4)
            differ = (plain != own).nonzero()
            assert row.decoding.parted[i] == (int(differ[0]) if len(differ) else None)
    assert min(row.decoding.kl[0] for row in check.rows[1:]) > 1e-3
    if family == "llama":  # the tiny Gemma 3 writes the same tokens through any cache
        assert any(step is not None for row in check.rows[1:] for step in row.decoding.parted)


def test_decoding_is_in_the_result_and_counts_for_the_verdict():
    check = check_cache(small(), TOKENIZER, FORMATS[:1], tolerance=1.0, **ASKED)
    row = check.rows[1]
    numbers = re.findall(r"\b\d+(?:\.\d{4})?\b", check.summary()[-1].partition(" continue")[0].replace(row.format, ""))
    measured = [*row.decoding.kl, row.divergence.kl]
    assert numbers[:5] == [str(STEPS), str(PROMPT), *(f"{kl:.4f}" for kl in measured)]
    entry = json.loads(check.to_json())["rows"][1]["decoding"]
    assert entry["kl"] == list(row.decoding.kl) and entry["own"] == [list(steps) for steps in row.decoding.own]
    assert check.rows[0].decoding is None
    # Nothing is rounded while 40 tokens are read, but it is while they are continued.
    late = check_cache(small(), TOKENIZER, ["int2;sinks=36"], tolerance=1e-9, **ASKED)
    assert late.verdict(late.rows[1], PROMPT).kind == "unsafe"


def test_growth_and_means_by_hand():
    decoding = Decoding(((0.0, 0.2), (0.2, 0.4)), ((0.0, 0.1, 0.2, 0.3), (0.1, 0.2, 0.3, 0.6)), (1, None))
    assert decoding.kl == pytest.approx((0.2, 0.225))
    growth = decoding.growth()
    # 0.25 − 0.05 and 0.45 − 0.15; Student's quantile with one degree of freedom is 12.706.
    assert growth.estimate == pytest.approx(0.25)
    assert growth.high - growth.estimate == pytest.approx(12.706 * 0.05, rel=1e-3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"decode": 25}, "decode 25 tokens after prompts of 40: the context that the model states is 64 tokens.* 24"),
        ({"decode": 217, "methods": ("yarn:factor=4",)}, "yarn:factor=4.* 256 tokens.* 216"),
    ],
)
def test_a_continuation_that_does_not_fit_is_refused(asked, message):
    with pytest.raises(ValueError, match=message):
        check_cache(small(), TOKENIZER, FORMATS, **ASKED | asked)


def test_finished_prompts_are_not_decoded_again():
    kept = {}
    results = []
    spec = EvalSpec((PROMPT,), windows=2, depths=(0.0,), samples=1)
    for _ in range(2):
        progress = []
        more = []
        with listen(lambda stage, tokens, progress=progress: progress.append(tokens), on_more=more.append):
            results.append(check_cache(small(), TOKENIZER, FORMATS, resume=kept, **ASKED).to_json())
        assert sum(progress) == tokens_to_check(spec, 2, 1, STEPS) + sum(more)
    assert results[0] == results[1]
