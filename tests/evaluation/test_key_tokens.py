"""Key tokens: found as LongPPL finds them, measured apart, the same for all methods."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from support.scored import spy_ids

from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.metrics import METRICS, Span
from rope_patch.evaluation.perplexity.key_tokens import mark_key_tokens
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.kv_evaluation.kv_check import kv_check
from rope_patch.modeling.identity import FIXED_TOKENS
from rope_patch.options.evaluation import EvalSpec
from rope_patch.reports import comparison as report
from rope_patch.runtime.page import render
from rope_patch.runtime.progress import listen
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.texts.documents import TokenDocument, whole_text

SPEC = EvalSpec((128, 256, 512), tasks=(), windows=4, short_context=32)
METHODS = ["yarn", "default", "p_rope:p=0.5"]


@pytest.fixture(scope="module")
def rows(tokenizer):
    """Five rows (5, 256) of the held-out text, without special tokens."""
    ids = tokenizer(whole_text(builtin_text("heldout"))[:20000], add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: 5 * 256]).view(5, 256)


@pytest.fixture(scope="module")
def measured(bundled):
    """A comparison, and the work that is finished after it."""
    stored = {}
    return compare(*bundled, METHODS, SPEC, resume=stored), stored


# What compute_longppl(text, model, model, tokenizer, tokenizer, trunc_len=32, sliding_window=8) of longppl 0.3.0, the
# package of Fang et al., gives for the same rows: the number of key tokens and their perplexity.
LONGPPL = [(2, 2.1105459), (4, 1.703856), (3, 2.9487896), (3, 3.2916462), (1, 1.4411244)]


def test_each_row_has_the_key_tokens_and_the_perplexity_of_the_authors_package(bundled, rows):
    model, _ = bundled
    for row, (tokens, expected) in zip(rows, LONGPPL, strict=True):
        marked = mark_key_tokens(model, [TokenDocument("row", row)], short=32, longest=256)
        found = perplexity(model, marked, window=256).key_tokens
        assert found.tokens == tokens
        assert found.perplexity == pytest.approx(expected, rel=1e-5)


def test_beyond_the_context_a_token_is_read_with_as_much_as_the_model_was_trained_on(bundled, rows):
    model, _ = bundled
    document = TokenDocument("rows", rows.flatten()[:512])
    (marked,) = mark_key_tokens(model, [document], short=32, longest=256)

    def losses(low: int, stop: int) -> torch.Tensor:
        with torch.no_grad():
            logits = model(document.ids[None, low:stop]).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, document.ids[low + 1 : stop], reduction="none")

    key = []
    # All that were marked, and some that may not be.
    looked_at = sorted({*marked.key_tokens.nonzero()[:, 0].tolist(), *range(40, 512, 15)})
    for position in looked_at:
        # Windows of 256 begin every 128 tokens, and those of 40 every 8; both score the tokens that are new.
        long_start = max(0, math.ceil((position + 1 - 256) / 128) * 128)
        short_start = max(0, math.ceil((position + 1 - 40) / 8) * 8)
        long, short = losses(long_start, position + 1)[-1], losses(short_start, position + 1)[-1]
        key.append(bool(short - long > 2 and long < 2))
    assert sum(key) > 3
    assert marked.key_tokens[looked_at].tolist() == key


def test_all_methods_are_measured_on_the_key_tokens_of_the_unpatched_model(bundled, measured):
    comparison, _ = measured
    yarn, default, _ = (row.scores.perplexity.key_tokens for row in comparison.rows)
    assert [one.tokens for one in yarn.buckets] == [one.tokens for one in default.buckets]
    beyond = Span(512, 256)
    change = comparison.difference("yarn:factor=2", "default", "key_perplexity", beyond)
    plain = comparison.difference("yarn:factor=2", "default", "perplexity", beyond)
    # What is lost beyond the context is lost where the context is needed.
    assert change.estimate < 2 * plain.estimate < 0
    model, tokenizer = bundled
    words = render(report.page([comparison]))
    assert f"4 windows, {default.tokens} key tokens of {comparison.rows[0].scores.perplexity.tokens}" in words
    suite = EvalSuite(SPEC, tokenizer)
    assert suite.run(model).perplexity.key_tokens == default
    assert sum(window.key_tokens.sum() for window in suite.windows) == default.tokens


def test_a_change_is_that_of_all_key_tokens_though_windows_have_unequal_numbers_of_them(measured):
    comparison = replace(measured[0], rows=measured[0].rows[1:])
    for span in METRICS["key_perplexity"].spans(SPEC):
        default, rotated = (METRICS["key_perplexity"].value(row.scores, span) for row in comparison.rows)
        change = comparison.difference("p_rope:p=0.5", "default", "key_perplexity", span)
        assert change.estimate == pytest.approx(math.log(rotated / default))
        assert change.low + change.high == pytest.approx(2 * change.estimate)
    # Where all tokens of the windows count, it is Student's interval, which perplexity has.
    whole = [row.scores.perplexity for row in comparison.rows]
    every = [
        replace(row.scores, perplexity=replace(text, key_tokens=text))
        for row, text in zip(comparison.rows, whole, strict=True)
    ]
    by_sums, by_windows = (
        METRICS[name].difference(*every, Span(512, 256)) for name in ("key_perplexity", "perplexity")
    )
    assert by_sums == pytest.approx(by_windows)


@pytest.mark.parametrize("chunk", [None, 100])
def test_what_is_announced_is_read_in_passes_that_are_asked_for(bundled, chunk):
    model, tokenizer = bundled
    suite = EvalSuite(replace(SPEC, windows=2, chunk=chunk), tokenizer)
    announced = []
    done = []
    with listen(lambda _, tokens: done.append(tokens), on_more=announced.append), spy_ids(model) as seen:
        suite.mark_key_tokens(model)
    # The long context is read in windows of 256 every 128, and the short one in windows of 40 every 8.
    assert sum(announced) == sum(done) == suite.tokens_to_mark(model) == 2 * (3 * 256 + 60 * 40)
    assert max(row.shape[1] for row in seen if row.shape[1] != FIXED_TOKENS) == (chunk or 256)
    assert sum(int(window.key_tokens.sum()) for window in suite.windows) == 24


def test_logits_that_are_not_finite_are_said_to_be(rows, bundled):
    model = copy.deepcopy(bundled[0])
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(math.nan)
    with pytest.raises(ValueError, match="not finite"):
        mark_key_tokens(model, [TokenDocument("row", rows[0])], short=32, longest=256)


def test_a_range_without_a_key_token_has_no_value_and_is_no_number_in_json(bundled):
    spec = EvalSpec((33, 512), tasks=(), windows=2, short_context=32)
    comparison = compare(*bundled, ["default", "pi"], spec)
    nothing, beyond = (column for column in comparison.columns() if column.metric == "key_perplexity")
    assert all(map(math.isnan, nothing.values))
    assert nothing.winner is None
    assert all(map(math.isfinite, beyond.values))
    columns = json.loads(comparison.to_json())["columns"]
    assert [column["values"] for column in columns if column["stop"] == 33][-1] == [None, None]


def test_no_column_below_the_short_context_and_none_unless_asked_for():
    metric = METRICS["key_perplexity"]
    assert metric.spans(EvalSpec((32, 64), short_context=32)) == [Span(64, 32)]
    assert metric.spans(EvalSpec((32, 64))) == []


def test_marked_windows_are_stored_and_not_read_again(bundled, measured):
    first, stored = measured
    with spy_ids(bundled[0]) as seen:
        again = compare(*bundled, METHODS, SPEC, resume=stored)
    assert again.columns() == first.columns()
    assert {row.shape[1] for row in seen} == {FIXED_TOKENS}


@pytest.mark.parametrize(("short", "words"), [(224, "below 256"), (200, "no token of the text")])
def test_a_short_context_that_finds_nothing_is_refused(bundled, rows, short, words):
    model, _ = bundled
    with pytest.raises(ValueError, match=words):
        mark_key_tokens(model, [TokenDocument("row", rows[4])], short=short, longest=256)


def test_key_tokens_need_text_and_are_not_for_caches(bundled):
    with pytest.raises(ValueError, match="key tokens are tokens of text"):
        EvalSpec((64,), windows=0, short_context=32)
    with pytest.raises(ValueError, match="leave short_context out"):
        kv_check(*bundled, ["kivi-4"], SPEC)
