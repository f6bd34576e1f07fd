"""What a fit reports of its answers, and of the unpatched model where no table answers within the trained length."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from evaluated import answered, result_of
from fits import ALONE, ASSETS, TEXT, candidate, fit_by_name, fitted
from prompting import TOKENIZER
from tiny import small
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.cli.fit_tables import print_fit
from rope_patch.evaluation.answers import EXACT_MATCH, FIRST_CHOICE
from rope_patch.evaluation.losses import Bucket, DocumentScore, PerplexityResult
from rope_patch.evaluation.retrieval import RetrievalCell, RetrievalResult
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.fitting import Candidate, Objective, held_out_spec
from rope_patch.fitting.card import card, retrieval_of
from rope_patch.fitting.texts import SecondDomain, fit_texts
from rope_patch.methods import Default

FIELDS = {"windows": 1, "samples": 2, "depths": (0.0, 0.5, 1.0)}


@pytest.fixture(scope="module")
def llama():
    return AutoModelForCausalLM.from_pretrained(ASSETS / "llama").eval()


def scores(first_choice):
    """At 64 tokens one of two answers is right, at 128 none; so many at each length are first choice."""
    cells = [
        RetrievalCell(n, depth, (answered("7", f"{n} at {depth}", right, 1.0, -1.0),))
        for n, depth, right in ((64, 0.0, False), (64, 1.0, True), (128, 0.0, False), (128, 1.0, False))
    ]
    cells = [
        RetrievalCell(c.length, c.depth, tuple(type(s)(**{**vars(s), "first_choice": first_choice}) for s in c.samples))
        for c in cells
    ]
    document = DocumentScore("a", (63, 64), (63.0, 64.0), 127, 127.0, None)
    buckets = (Bucket(0, 64, 63, 1.0, None), Bucket(64, 128, 64, 1.0, None))
    text = PerplexityResult(1.0, None, 127, None, 1, 128, 128, 128, (), 0, buckets, (document,))
    return result_of(text, RetrievalResult("passkey", "single", tuple(cells), 0, "text", "", None, ()))


def test_a_candidate_keeps_a_few_answers_and_the_share_that_is_first_choice():
    one = Candidate.from_scores("start", Default(), scores(True))
    assert one.retrieval == {64: 0.5, 128: 0.0} and one.first_choice == {64: 1.0, 128: 1.0}
    assert [(a.output, a.correct) for a in one.answers_given] == [
        ("64 at 0.0", False),
        ("64 at 1.0", True),
        ("128 at 0.0", False),
    ]
    assert [a.output for a in one.few_answers] == ["64 at 0.0", "64 at 1.0"]
    entry = one.to_dict()
    assert entry["first_choice"] == {"64": 1.0, "128": 1.0} and entry["answers_given"][1]["output"] == "64 at 1.0"
    assert Candidate.from_scores("start", Default(), scores(False)).first_choice == {64: 0.0, 128: 0.0}


def patch_of(winner, **fields):
    """A fit whose table in use is a start, as it was chosen."""
    given = {
        "chosen": "yarn, start",
        "texts": fit_texts(TEXT, 0.0),
        "winner": (winner, winner),
        "second": SecondDomain(),
    }
    return SimpleNamespace(**{**given, "warnings": (), "unpatched": (), **fields})


def test_the_card_names_exact_match_shows_answers_and_says_it_of_the_unpatched_model():
    one = Candidate.from_scores("start", Default(), scores(True))
    text = card("tiny", patch_of(one, unpatched=("the task is hard",)), 128, None, rows="64 tokens", on_hub=False)
    assert text.count(EXACT_MATCH) == text.count(FIRST_CHOICE) == 1
    assert "this share is 1.00 at 64 tokens, 1.00 at 128 tokens" in text
    assert '| passkey | 64 | 0 % | 7 | `` "64 at 0.0" `` | wrong |\n| passkey | 64 | 100 % | 7 |' in text
    assert "**Note**: the task is hard.\n" in text, "also of a start that was kept"


def test_a_candidate_without_answers_says_what_it_goes_by():
    sentence = retrieval_of(candidate("start", (10, 5), (2.0, 3.0)))
    assert sentence.startswith(EXACT_MATCH) and FIRST_CHOICE not in sentence


def test_a_fit_prints_answers_and_says_that_the_unpatched_model_fails(capsys):
    """Random weights answer nothing, patched or not."""
    patch = fitted(small(), TOKENIZER, steps=0)
    print_fit(patch)
    printed = capsys.readouterr().out
    (answer,) = patch.winner[0].few_answers
    assert f"this share is 0.00 at 64 tokens, 0.00 at 96 tokens. Answers under it:\n  {answer}\n" in printed
    assert "(wrong)" in str(answer) and str(answer).startswith("passkey, 64 tokens, depth 0 %: asked for ")
    (sentence,) = patch.unpatched
    assert sentence.startswith("without a patch the model answers 0% of the passkey prompts of 64 tokens, within its ")
    assert f"Warning: {sentence}.\n" in printed and patch.to_dict()["unpatched"] == [sentence]


def read_by(llama, init, task):
    """A comparison of starts: what was read of the unpatched model, and what is said of it."""
    read = {}

    def note(stage, tokens):
        read[stage] = read.get(stage, 0) + tokens

    options = {"target_length": 512, "steps": 0, "objective": Objective(task=task, mix=0.0), "second": False, **FIELDS}
    patch = fit_by_name(llama, TOKENIZER, TEXT, init=init, on_progress=note, **options)
    used = str(rope_patch.inspect(llama).method)
    patch.restore()
    return read.get("unpatched: evaluation", 0), patch.unpatched, used


def test_the_unpatched_model_is_not_asked_where_a_table_answers(llama):
    assert read_by(llama, ["yarn", "pi:factor=4"], "passkey") == (0, (), "yarn:factor=2")


def test_of_a_table_that_answers_nothing_the_unpatched_model_is_asked_within_its_trained_length(llama):
    """Interpolated it answers no passkey; unpatched all of 256 tokens, so nothing is said."""
    assert read_by(llama, "pi:factor=4", "passkey") == (6 * 256, (), "pi:factor=4")


def test_what_is_said_is_measured_without_a_patch(llama):
    assert rope_patch.inspect(llama).record is None
    spec = held_out_spec(llama, 512, task="multivalue", **FIELDS)
    suite = EvalSuite(spec, TOKENIZER, text=fit_texts(TEXT, ALONE.mix).held_out)
    share = suite.run(llama).retrieval["multivalue"].accuracy(256)
    tokens, (sentence,), used = read_by(llama, "pi:factor=4", "multivalue")
    assert 0 < share < 0.75 and tokens == 2 * 256 and used == "pi:factor=4"
    assert sentence.startswith(f"without a patch the model answers {share:.0%} of the multivalue prompts of 256 tokens")
