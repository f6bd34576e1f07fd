"""What is measured is written down, and a metric that is entered appears everywhere."""

from __future__ import annotations

import json
import math
import statistics

import pytest
import torch
from evaluated import check_cache, compared, suite_of
from kv_rows import BASE, by_hand, off
from prompting import HAY
from scored import bold_model, spy_ids
from transformers import AutoTokenizer

import rope_patch
from rope_patch.evaluation.documents import encode
from rope_patch.evaluation.metrics import METRICS, Metric, Span
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.retrieval import retrieval
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.kv_evaluation.verdicts import Limits, find_verdict
from rope_patch.reports import comparison as report
from rope_patch.reports.page import render

TEXT = "Some words to read, and some more of them. " * 90
ASKED = {"lengths": (96, 128), "windows": 3, "samples": 2, "depths": (0.2, 0.8), "text": TEXT, "haystack": HAY}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")


# --- the spec


def test_a_spec_survives_json():
    spec = EvalSpec([512, 256], tasks=["vt", "niah"], text="books", chunk=64, seed=3)
    again = EvalSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec and again.sha256 == spec.sha256 and hash(again) == hash(spec)
    assert again.lengths == (256, 512) and again.longest == 512


def test_every_field_of_a_spec_is_part_of_its_digest():
    base = EvalSpec([256])
    changes = {"lengths": [128], "depths": [0.5], "samples": 2, "windows": 3, "tasks": ["niah"], "mode": "multikey"}
    changes |= {
        "text": "a",
        "haystack": "builtin",
        "chat_template": "off",
        "bucket": 8,
        "chunk": 9,
        "batch_tokens": 10,
        "seed": 1,
    }
    digests = {EvalSpec(**{"lengths": [256], name: value}).sha256 for name, value in changes.items()}
    changes |= {"longppl": True, "short_context": 8}  # the second is of the first
    digests |= {EvalSpec([256], longppl=True, short_context=short).sha256 for short in (None, 8)}
    assert set(changes) == set(base.to_dict())
    assert len(digests | {base.sha256}) == len(changes) + 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": "4k"}, "lengths must be a list of numbers, got '4k'"),
        ({"lengths": [1]}, "lengths must be at least 2 tokens, got 1"),
        ({"tasks": "passkey"}, "tasks must be a list of names, got 'passkey'"),
        ({"tasks": ["niah", "niah"]}, "differ from each other"),
        ({"tasks": ["niahs"]}, "Did you mean 'niah'"),
        ({"tasks": ["vt"], "mode": "multikey"}, "task 'vt' has no mode 'multikey'"),
        ({"depths": [1.5]}, "depth must be in \\[0, 1\\], got 1.5"),
        ({"bucket": 0}, "bucket must be >= 1, got 0"),
        ({"batch_tokens": 0}, "batch_tokens must be >= 1, got 0"),
        ({"windows": -1}, "windows must be >= 0, got -1"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"samples": 1.5}, "samples must be a whole number, got 1.5"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"windows": "2"}, "windows must be a whole number, got '2'"),
        ({"lengths": 256}, "lengths must be a list of numbers, got 256"),
        ({"lengths": ["256"]}, "lengths must be numbers, got \\['256'\\]"),
        ({"depths": [math.nan]}, "depths must be numbers, got \\[nan\\]"),
        ({"tasks": None}, "tasks must be a list of names, got None"),
        ({"text": ["a"]}, "text must be a path or a name, got \\['a'\\]"),
    ],
)
def test_a_spec_that_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EvalSpec(**{"lengths": [256], **changes})


def test_an_unknown_field_is_named():
    with pytest.raises(ValueError, match="EvalSpec has no lenghts"):
        EvalSpec.from_dict({"lenghts": [4]})


@pytest.mark.parametrize("name", ["text", "haystack"])
def test_files_that_are_not_there_are_said(tokenizer, tmp_path, name):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        EvalSuite(EvalSpec([256], **{name: tmp_path / "nowhere"}), tokenizer)


def test_without_a_haystack_needles_are_hidden_in_the_text(tokenizer):
    suite = EvalSuite(EvalSpec([64], windows=1, haystack=None), tokenizer, text=TEXT)
    assert suite.prompts.haystack.text == TEXT


# --- the suite


def test_a_suite_gives_what_its_parts_give(tokenizer):
    model, suite = bold_model(vocab_size=len(tokenizer)), suite_of(tokenizer, tasks=["niah", "vt"], **ASKED)
    result = suite.run(model)
    assert result.perplexity == perplexity(model, suite.windows, window=128, buckets=suite.spec.edges, batch=128)
    for task in ("niah", "vt"):
        alone = retrieval(model, tokenizer, task, lengths=(96, 128), depths=(0.2, 0.8), samples=2, haystack=HAY)
        assert result.retrieval[task] == alone


def test_its_tokens_are_those_that_it_tells_of(tokenizer):
    model, read = bold_model(vocab_size=len(tokenizer)), []
    suite = suite_of(tokenizer, tasks=["niah", "vt"], **ASKED)
    suite.run(model, on_progress=read.append)
    assert sum(read) == suite.tokens == suite.spec.tokens_to_read()
    assert suite.tokens == 3 * 128 + 2 * (96 + 128) * (2 + 1)  # niah asks at each depth, vt once


class Counting:
    """A tokenizer that counts how often it encodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.calls = tokenizer, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.tokenizer(*args, **kwargs)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def test_prompts_and_windows_are_made_once_for_several_models(tokenizer):
    counting = Counting(tokenizer)
    suite = suite_of(counting, **ASKED)
    made = counting.calls
    first = suite.run(bold_model(vocab_size=len(tokenizer)))
    once = counting.calls
    assert once > made, "the second haystack of each length"
    assert suite.run(bold_model(vocab_size=len(tokenizer))) == first and counting.calls == once


def test_without_windows_there_is_no_perplexity(tokenizer):
    suite = suite_of(tokenizer, **{**ASKED, "windows": 0})
    assert suite.run(bold_model(vocab_size=len(tokenizer))).perplexity is None and suite.text_sha256 == ""


def test_finished_units_are_kept_by_content_and_shared_between_suites(tokenizer):
    """A longer list of tasks, another seed of the object, the same windows: nothing is read twice."""
    model, kept = bold_model(vocab_size=len(tokenizer)), {}
    suite_of(tokenizer, tasks=["niah"], **ASKED).run(model, resume=kept)
    with spy_ids(model) as ids:
        suite_of(tokenizer, tasks=["niah"], **ASKED).run(model, resume=kept)
    assert not ids
    before = set(kept)
    suite_of(tokenizer, tasks=["vt", "niah"], **ASKED).run(model, resume=kept)
    assert len(set(kept) - before) == 4  # two haystacks at each of two lengths


def test_a_suite_of_files_is_one_of_the_same_text_in_memory(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "hay.txt").write_text(HAY.text)
    spec = EvalSpec([64], windows=2, text=tmp_path / "text.txt", haystack=tmp_path / "hay.txt")
    suite = EvalSuite(spec, tokenizer)
    held = suite_of(tokenizer, lengths=[64], windows=2, text=TEXT, haystack=HAY)
    assert suite.text_sha256 == held.text_sha256
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(suite.windows, held.windows, strict=True))
    assert suite.prompts.haystack.sha256 == held.prompts.haystack.sha256


# --- a metric


class WorstWindow(Metric):
    """The loss of each window, of which the worst is shown."""

    name, unit, lower_is_better = "worst_window", "nats/token", True

    def spans(self, spec):
        return [Span(self.name, spec.longest, 0)]

    def at(self, spec, length):
        return self.spans(spec)

    def values(self, result, span):
        return [document.total_nll / document.total_tokens for document in result.perplexity.documents]

    def value(self, result, span):
        return max(self.values(result, span))


@pytest.fixture
def worst_window(monkeypatch):
    monkeypatch.setitem(METRICS, "worst_window", WorstWindow())


def test_a_metric_that_is_entered_is_in_the_comparison_and_its_report(worst_window, tokenizer):
    made = compared(bold_model(vocab_size=len(tokenizer)), tokenizer, ["default", "pi:factor=2"], **ASKED)
    column = made.columns()[-1]
    losses = [
        [document.total_nll / document.total_tokens for document in row.scores.perplexity.documents]
        for row in made.rows
    ]
    assert column.metric == "worst_window" and column.values == tuple(map(max, losses))
    means = [statistics.fmean(each) for each in losses]
    other = 1 - column.best
    assert column.differences[0].estimate == pytest.approx(means[other] - means[column.best])
    assert json.loads(made.to_json())["columns"][-1]["metric"] == "worst_window"
    page = render(report.page([made]))
    assert "Worst_window at positions [tokens]" in page and "Worst_window at positions [tokens], nats/token" in page


def test_a_metric_that_is_entered_has_a_say_in_the_verdict(worst_window):
    base, worse = by_hand("none", BASE), by_hand("s", off(0.01, 0.011, 0.009, 0.01))
    verdict = find_verdict(worse, base, 8, Limits())
    assert verdict.kind == "unsafe", "one per cent of perplexity is tolerated, but this metric tolerates nothing"
    assert "worst_window +0.01 (+0.01 to +0.01)" in verdict.measured


def test_a_metric_that_is_entered_is_in_the_table_of_caches(worst_window, tokenizer):
    made = check_cache(bold_model(vocab_size=len(tokenizer)), tokenizer, ["int4-token"], **ASKED)
    line = made.table()[-1]
    assert {"worst_window", "worst_window_change", "worst_window_low", "worst_window_high"} <= set(line)
    assert "worst_window_change" in json.loads(made.to_json())["rows"][1]["lengths"]["128"]


SMALL = EvalSpec([64], depths=[0.5], samples=1, windows=1)
TAKING_A_TOKENIZER = {
    "compare": lambda model, suite, name: rope_patch.compare(model, name, ["default"], SMALL),
    "compare with a suite": lambda model, suite, name: rope_patch.compare(model, name, ["default"], suite),
    "perplexity": lambda model, suite, name: perplexity(model, encode(name, ["Some words."]), window=8),
    "retrieval": lambda model, suite, name: retrieval(model, name, lengths=[64], depths=[0.5], samples=1),
    "retrieval with prompts": lambda model, suite, name: retrieval(
        model, name, lengths=[64], depths=[0.5], samples=1, haystack=suite.prompts
    ),
    "kv_check": lambda model, suite, name: rope_patch.kv_check(model, name, ["int8-token"], SMALL),
    "EvalSuite": lambda model, suite, name: EvalSuite(SMALL, name),
}


@pytest.mark.parametrize("call", TAKING_A_TOKENIZER.values(), ids=TAKING_A_TOKENIZER)
def test_the_name_of_a_tokenizer_is_not_taken_for_one(tokenizer, call):
    model = bold_model(vocab_size=len(tokenizer))
    with pytest.raises(ValueError) as error:
        call(model, EvalSuite(SMALL, tokenizer), "org/name")
    assert str(error.value) == (
        "tokenizer must be a transformers tokenizer, got a string: load it with "
        "AutoTokenizer.from_pretrained('org/name')"
    )


TAKING_A_MODEL = {
    "EvalSuite.run": lambda name, tokenizer: EvalSuite(SMALL, tokenizer).run(name),
    "compare": lambda name, tokenizer: rope_patch.compare(name, tokenizer, ["default"], SMALL),
    "perplexity": lambda name, tokenizer: perplexity(name, torch.arange(8)),
    "retrieval": lambda name, tokenizer: retrieval(name, tokenizer, lengths=[64], depths=[0.5], samples=1),
}


@pytest.mark.parametrize("call", TAKING_A_MODEL.values(), ids=TAKING_A_MODEL)
def test_the_name_of_a_model_is_not_taken_for_one(tokenizer, call):
    with pytest.raises(TypeError) as error:
        call("org/name", tokenizer)
    assert str(error.value) == "expected a transformers model, got str: load it with rope_patch.load('org/name')"


def test_every_task_has_columns_of_its_own(tokenizer):
    made = compared(bold_model(vocab_size=len(tokenizer)), tokenizer, ["default"], tasks=["niah", "vt"], **ASKED)
    headings = [column.heading for column in made.columns()]
    assert headings == ["ppl 0-96", "ppl 96-128", "niah 96", "niah 128", "vt 96", "vt 128"]
    page = render(report.page([made]))
    assert "Retrieval, niah, at length [tokens]" in page and "Retrieval, vt, at length [tokens]" in page
    checked = check_cache(
        bold_model(vocab_size=len(tokenizer)), tokenizer, ["int4-token"], tasks=["niah", "vt"], **ASKED
    )
    assert {"retrieval_niah", "retrieval_vt_change"} <= set(checked.table()[-1])
