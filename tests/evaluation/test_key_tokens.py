"""Key tokens against an evaluator that reads every context by itself, and LongPPL over them."""

from __future__ import annotations

import math

import pytest
import torch
from support.patches import lora
from support.scored import bold_model, naive
from support.tiny import ids

import rope_patch
from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.documents import TokenDocument
from rope_patch.evaluation.key_tokens import choose_key_tokens, tokens_to_choose
from rope_patch.evaluation.metrics import METRICS, Span, value_text
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.suite import EvalResult, EvalSuite
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.install import patched
from rope_patch.runtime.progress import listen


def chosen(model, window, context, short, **options):
    settings = {"batch_tokens": 64, "evaluator": "model"} | options
    (marked,), keys = choose_key_tokens(model, [window], context=context, short_context=short, **settings)
    return marked.key_tokens.nonzero().flatten().tolist(), keys


@torch.no_grad()
def loss_of(model, row, start, position):
    """Loss of one token given those from ``start`` on, by the whole model."""
    logits = model(row[None, start:position]).logits[0, -1].float()
    return float(torch.nn.functional.cross_entropy(logits, row[position]))


def by_hand(model, row, context, short):
    """Key tokens, one context at a time: a quarter of a context is shared by the tokens that follow it."""
    keys = []
    for t in range(short, len(row)):
        own = (t - short) // (short // 4) * (short // 4)
        far = 0 if t < context else (t - context) // (context // 4) * (context // 4) + context // 4
        full, less = loss_of(model, row, far, t), loss_of(model, row, own, t)
        if less - full > 2 and full < 2:
            keys.append(t)
    return keys


def test_key_tokens_are_those_of_the_paper_and_the_evaluator_stays_within_its_context(bundled):
    model, tokenizer = bundled
    text = rope_patch.data_path("assets").joinpath("domains", "english.txt").read_text()
    row = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:160])
    sizes = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    keys, _ = chosen(model, TokenDocument("text", row), 128, 20)
    hook.remove()
    assert max(length for _, length in sizes) == 128
    assert sum(rows * length for rows, length in sizes) >= tokens_to_choose(160, 128, 20)
    assert keys == by_hand(model, row, 128, 20) and keys


def test_the_special_tokens_stand_in_front_of_every_context():
    model, seen = bold_model(), []
    row = ids(64, 1)[0]
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.extend(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    chosen(model, TokenDocument("text", row, None, (int(row[0]),)), 64, 16)
    hook.remove()
    assert {one[0] for one in seen} == {int(row[0])}


def test_finished_windows_are_not_read_again():
    model, window, cache, read = bold_model(), TokenDocument("text", ids(64, 1)[0]), {}, []
    first = chosen(model, window, 64, 16, result_cache=cache)
    model.model.forward = None  # cannot be read any more
    with listen(lambda stage, tokens: read.append(tokens)):
        assert chosen(model, window, 64, 16, result_cache=cache) == first
    assert sum(read) == tokens_to_choose(64, 64, 16)


def test_longppl_is_the_perplexity_over_the_key_tokens():
    model, rows, spec = bold_model(), ids(40, 2), EvalSpec([20, 40], longppl=True)
    metric, span = METRICS["longppl"], Span(40, 20)

    def scores(*places):
        """Of windows whose key tokens stand at these positions."""
        windows = []
        for i, (row, place) in enumerate(zip(rows, places, strict=True)):
            mask = torch.zeros(40, dtype=torch.bool)
            mask[place] = True
            windows.append(TokenDocument(f"w{i}", row, key_tokens=mask))
        result = perplexity(model, windows, window=40, buckets=(0, 20, 40))
        return EvalResult(spec, result, {}, key_tokens=object())

    found, nll = scores([3, 30], [25, 26, 27]), naive(model, rows)
    assert [d.key_tokens for d in found.perplexity.documents] == [(1, 1), (0, 3)]
    keys = [nll[0, 29], *nll[1, 24:27]]  # the loss of the token at position 30 stands at 29
    assert metric.value(found, span) == pytest.approx(math.exp(sum(keys) / 4), rel=1e-5)
    empty = scores([], [])
    assert value_text(metric, metric.value(empty, span)) == "–"
    assert not metric.difference(empty, empty, span).significant
    with pytest.raises(ValueError, match="LongPPL"):
        metric.value(EvalResult(EvalSpec([20, 40]), found.perplexity, {}), span)


def test_finished_losses_are_of_the_same_key_tokens():
    model, row, result_cache = bold_model(), ids(12, 1)[0], {}
    for first in (9, 5):
        window = TokenDocument("a", row, key_tokens=torch.arange(12) >= first)
        result = perplexity(model, [window], window=12, resume=result_cache)
        assert result == perplexity(model, [window], window=12)
        assert result.documents[0].key_tokens == (12 - first,)


def test_windows_with_more_key_tokens_weigh_more_in_a_difference():
    """Losses 1 and 4 over 1 and 3 tokens: (1 + 4) / 4 = 1.25 each; the deviations are -.25 and .25, so that the
    interval is 12.706 * sqrt(2 * (.0625 + .0625)) / 4 = 1.588 wide to each side."""
    from rope_patch.evaluation.intervals import ratio_of_sums

    mean, low, high = ratio_of_sums([1.0, 4.0], [1, 3])
    assert (mean, high - mean) == pytest.approx((1.25, 1.588), rel=1e-3) and mean - low == pytest.approx(high - mean)
    assert ratio_of_sums([1.0], [2]) == (0.5, -math.inf, math.inf)
    assert math.isnan(ratio_of_sums([], [])[0])


def test_all_methods_of_a_comparison_share_the_key_tokens_of_the_unpatched_model(bundled):
    model, tokenizer = bundled
    spec = EvalSpec([256, 512], windows=2, samples=1, depths=[0.5], longppl=True)
    with patched(model, "yarn:factor=2"):  # whatever the model is patched with
        alone = EvalSuite(spec, tokenizer).choose_key_tokens(model)
    result = compare(model, tokenizer, ["pi", "default"], spec)
    assert {row.scores.key_tokens for row in result.rows} == {alone}
    assert alone.context == 256 and alone.short_context == 64
    columns = {(c.metric, c.span.stop): c for c in result.columns()}
    assert columns["longppl", 512].values[0] > columns["longppl", 512].values[1]
    assert columns["longppl", 256].values[1] < columns["perplexity", 256].values[1]


def test_an_adapter_does_not_choose(bundled):
    model = bold_model()
    suite = EvalSuite(EvalSpec([96], windows=1, samples=1, depths=[0.5], longppl=True), bundled[1])
    suite.windows = [TokenDocument("text", torch.cat([ids(48, 1)[0]] * 2))]  # said again: the far ones are needed
    before = suite.choose_key_tokens(model, context=96)
    assert suite.choose_key_tokens(lora(model), context=96).sha256 == before.sha256 and before.tokens
