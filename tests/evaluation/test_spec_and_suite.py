"""What is measured is written down, and a metric that is entered appears everywhere."""

import json

import pytest
from support.evaluated import check_cache, compared, suite_of
from support.kv_rows import BASE, by_hand, off
from support.prompting import HAY
from support.scored import bold_model

import rope_patch
from rope_patch.evaluation.count_tokens import tokens_to_read
from rope_patch.evaluation.metrics import METRICS, Metric, PairedDifference
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.kv_evaluation.verdicts import verdict_of
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.kv_check import Limits
from rope_patch.reports import comparison as report
from rope_patch.runtime.page import render
from rope_patch.runtime.progress import listen
from rope_patch.texts.documents import encode

TEXT = "Some words to read, and some more of them. " * 90
ASKED = {"lengths": (96, 128), "windows": 3, "samples": 1, "depths": (0.2, 0.8), "text": TEXT, "haystack": HAY}


# --- the spec


def test_a_spec_survives_json():
    spec = EvalSpec([512, 256], tasks=["vt", "niah"], text="books", chunk=64, seed=3)
    again = EvalSpec(**json.loads(json.dumps(spec.to_dict())))
    assert again == spec and hash(again) == hash(spec)
    assert again.lengths == (256, 512) and again.longest == 512


@pytest.mark.parametrize(
    "changes",
    [
        {"lengths": []}, {"lengths": "4k"}, {"lengths": [1]}, {"lengths": [64, 64]},
        {"tasks": "passkey"}, {"tasks": ["niah", "niah"]},
        {"depths": [1.5]}, {"depths": (0.5, 0.5)},
        {"chunk": 0}, {"windows": -1}, {"samples": 1.5}, {"text": ["a"]}, {"chat_template": "yes"},
        {"tasks": [], "windows": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_spec_that_cannot_be_measured_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes)).partition("_")[0].rstrip("s")):
        EvalSpec(**{"lengths": [256], **changes})


def test_no_batch_and_no_range_of_positions_is_empty():
    spec = EvalSpec([20], batch_tokens=16)
    assert (spec.window_batch, spec.edges) == (1, list(range(0, 21, 2)))


def test_eight_windows_are_read_by_default_or_as_many_as_the_text_has_room_for(tokenizer):
    tokens = len(tokenizer(TEXT, add_special_tokens=False).input_ids)
    for length, windows in ((tokens // 20, 8), (tokens // 3 + 1, 3)):  # each begins with a special token
        suite = EvalSuite(EvalSpec([length], tasks=[]), tokenizer, text=TEXT)
        assert len(suite.windows) == windows
    with pytest.raises(ValueError, match=f"{4 * (tokens // 3)} tokens of text are needed"):
        EvalSuite(EvalSpec([length], windows=4, tasks=[]), tokenizer, text=TEXT)


# --- the suite


def test_a_suite_gives_what_its_parts_give(tokenizer):
    model = bold_model(vocab_size=len(tokenizer))
    lengths = (400, 512)
    suite = suite_of(tokenizer, tasks=["niah", "niah_multivalue"], **{**ASKED, "lengths": lengths})
    read = []
    with listen(lambda stage, tokens: read.append(tokens)):
        result = suite.run(model)
    assert result.perplexity == perplexity(model, suite.windows, window=512, buckets=suite.spec.edges, batch=128)
    for task in ("niah", "niah_multivalue"):
        alone = retrieval(model, tokenizer, task, lengths=lengths, depths=(0.2, 0.8), samples=1, haystack=HAY)
        assert result.retrieval[task] == alone
    assert sum(read) == suite.tokens == tokens_to_read(suite.spec)
    assert suite.tokens == 3 * 512 + (400 + 512) * (2 + 1)  # niah asks at each depth, niah_multivalue once
    prompts_alone = suite_of(tokenizer, **{**ASKED, "windows": 0})
    assert prompts_alone.run(model).perplexity is None and prompts_alone.text_sha256 == ""


def test_prompts_and_windows_are_made_once_for_several_models(tokenizer, monkeypatch):
    suite = suite_of(tokenizer, **ASKED)
    encoded = []
    first = suite.run(bold_model(vocab_size=len(tokenizer)))
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *texts, **_: encoded.append(texts))
    assert suite.run(bold_model(vocab_size=len(tokenizer))) == first and not encoded


def test_windows_are_spread_over_the_text_of_a_file(tokenizer, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    suite = EvalSuite(EvalSpec([64], windows=3, text=tmp_path / "text.txt", haystack=None), tokenizer)
    stream = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    starts = [0, round((len(stream) - 63) / 2), len(stream) - 63]  # spread over the text
    rows = [[tokenizer.bos_token_id, *stream[start : start + 63]] for start in starts]
    assert [window.ids.tolist() for window in suite.windows] == rows
    assert suite.prompts.haystack.text == TEXT, "without a haystack needles are hidden in the text"


# --- a metric


@pytest.fixture
def worst_window(monkeypatch):
    monkeypatch.setattr(METRICS, "data", dict(METRICS.data))

    class WorstWindow(Metric, name="worst_window"):
        """The loss of each window, of which the worst is shown."""

        unit = "nats/token"
        lower_is_better = True
        of_text = True

        def values(self, result, span):
            return [document.total_nll / document.total_tokens for document in result.perplexity.documents]

        def value(self, result, span):
            return max(self.values(result, span))

    return METRICS["worst_window"]


def test_a_metric_that_is_entered_is_in_the_comparison_and_its_report(worst_window, tokenizer):
    asked = {**ASKED, "tasks": ["niah", "niah_multivalue"], "lengths": (400,)}
    made = compared(bold_model(vocab_size=len(tokenizer)), tokenizer, ["default", "pi:factor=2"], **asked)
    assert {"ppl 0-400", "niah 400", "niah_multivalue 400"} <= {each.heading for each in made.columns()}, (
        "a column of each task"
    )
    column = made.columns()[-1]
    losses = [worst_window.values(row.scores, None) for row in made.rows]
    assert column.metric == "worst_window" and column.values == tuple(map(max, losses)) and column.differences
    assert json.loads(made.to_json())["columns"][-1]["metric"] == "worst_window"
    assert "worst_window" in render(report.page([made]))
    checked = check_cache(bold_model(vocab_size=len(tokenizer)), tokenizer, ["int4-token"], **asked)
    entry = json.loads(checked.to_json())["rows"][1]["lengths"]["400"]
    assert {"worst_window", "worst_window_change", "retrieval_niah", "retrieval_niah_multivalue_change"} <= set(entry)


def test_a_metric_that_is_entered_has_a_say_in_the_verdict(worst_window):
    base = by_hand("none", BASE)
    worse = by_hand("s", off(0.01, 0.011, 0.009, 0.01))
    verdict = verdict_of(worse, base, 8, Limits())
    assert verdict.kind == "unsafe", "one per cent of perplexity is tolerated, but this metric tolerates nothing"


@pytest.mark.parametrize(("estimate", "low", "high", "kind"), [(-1, -2, -0.5, "unsafe"), (-1, -2, 0.5, "undecided")])
def test_a_fall_is_for_the_worse_where_higher_is_better(estimate, low, high, kind):
    assert METRICS["logprob"].verdict(PairedDifference(estimate, low, high), 0.01) == kind


SMALL = EvalSpec([64], depths=[0.5], samples=1, windows=1)


TAKING_BOTH = {
    "compare": lambda model, tokenizer: rope_patch.compare(model, tokenizer, ["default"], SMALL),
    "retrieval": lambda model, tokenizer: retrieval(model, tokenizer, lengths=[64], depths=[0.5], samples=1),
    "kv_check": lambda model, tokenizer: rope_patch.kv_check(model, tokenizer, ["int8-token"], SMALL),
    "perplexity": lambda model, tokenizer: perplexity(model, encode(tokenizer, ["Some words."]), window=8),
}


@pytest.mark.parametrize("call", TAKING_BOTH.values(), ids=TAKING_BOTH)
def test_the_name_of_a_tokenizer_or_model_is_not_taken_for_one(tokenizer, call):
    with pytest.raises(ValueError, match="AutoTokenizer"):
        call(bold_model(vocab_size=len(tokenizer)), "org/name")
    with pytest.raises(TypeError, match="load"):
        call("org/name", tokenizer)
