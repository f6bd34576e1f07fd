"""LongPPL through lm-eval: against our own evaluation, and against lm-eval's own model."""

from __future__ import annotations

import math
import shutil

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from support.scored import spy_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.evaluation import key_tokens
from rope_patch.evaluation.documents import TokenDocument
from rope_patch.evaluation.metrics import METRICS, Span
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.harness.longppl import key_token_documents
from rope_patch.harness.model import RopePatchLM
from rope_patch.options.evaluation import EvalSpec

LLAMA = str(rope_patch.data_path("assets") / "llama")
TASKS = str(rope_patch.data_path("eval_tasks"))
NAMES = "The keys are qzvurt, wolmkex and brygdaf. "
TEXT = (
    "\n\n".join(
        f"{NAMES}Part {i}: the road\nleads\n\n    to the house of “their” neighbour, who waits. " * 8
        + "Again: qzvurt, wolmkex and brygdaf.\n"
        for i in range(7)
    )
    * 2
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(LLAMA)


@pytest.fixture(scope="module")
def yarn():
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    rope_patch.apply(model, "yarn:factor=4", target_length=1024)
    return model


@pytest.fixture
def options(tmp_path):
    """What the documents are made of."""
    (tmp_path / "text.txt").write_text(TEXT)
    metadata = {"pretrained": LLAMA, "dtype": "float32", "windows": 2, "text": str(tmp_path / "text.txt")}
    return metadata | {"resume": str(tmp_path / "keys.jsonl")}


@pytest.fixture
def many(monkeypatch):
    """Let all tokens be key tokens whose loss falls at all with the long context."""
    monkeypatch.setattr(key_tokens, "GAIN", 0.0)
    monkeypatch.setattr(key_tokens, "LOSS", 99.0)


def documents(options, length=320, **changes):
    return key_token_documents(length=length, **{"evaluator": None, "short_context": None} | options | changes)


def measured(kind, model, tokenizer, metadata):
    metadata = metadata | {"max_seq_lengths": 256}
    manager = TaskManager(include_defaults=False, include_path=TASKS, metadata=metadata)
    own = kind(pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=8)
    return lm_eval.simple_evaluate(
        own, tasks=["rope_longppl"], task_manager=manager, log_samples=True, bootstrap_iters=0
    )


def windows_of(rows, tokenizer):
    """The windows of documents, with the tokens marked that are asked for."""
    found = []
    for i, row in enumerate(rows):
        coded = tokenizer(row["prompt"], return_offsets_mapping=True)
        asked = {stop for _, _, stop in row["spans"]}
        marks = torch.tensor([stop in asked for _, stop in coded["offset_mapping"]])
        found.append(TokenDocument(f"window {i}", torch.tensor(coded["input_ids"]), None, (0,), marks))
    return found


def longppl(model, tokenizer, windows, length):
    """LongPPL of our own evaluation, over windows whose key tokens are marked."""
    suite = EvalSuite(EvalSpec([length], windows=1, samples=1, depths=[0.5], longppl=True), tokenizer)
    suite.windows, suite.key_tokens = windows, object()
    return METRICS["longppl"].value(suite.run(model), Span("longppl", length, 0))


def test_the_score_is_that_of_the_evaluation_and_of_hf(yarn, tokenizer, options, many):
    options["windows"] = 1  # lm-eval's own model reads all that stands before a key token for each
    found = {kind: measured(kind, yarn, tokenizer, options) for kind in (RopePatchLM, HFLM)}
    samples = [sample["doc"] for sample in found[HFLM]["samples"]["rope_longppl"]]
    engine = longppl(yarn, tokenizer, windows_of(samples, tokenizer), 256)
    spans = [span for doc in samples for span in doc["spans"]]
    assert len(spans) > 40 and sum(start > context for context, start, _ in spans) > 5, "some stand behind a space"
    for results in found.values():
        assert results["results"]["rope_longppl"]["256,none"] == pytest.approx(engine, rel=1e-5)
    assert engine > 2


def test_the_key_tokens_are_those_of_the_evaluation_but_for_those_left_out(yarn, tokenizer, options, many, capfd):
    rows = documents(options)
    windows = windows_of(rows, tokenizer)
    assert [len(window.ids) for window in windows] == [320, 320]
    suite = EvalSuite(EvalSpec([320], windows=1, samples=1, depths=[0.5], longppl=True), tokenizer)
    suite.windows = windows
    keys = suite.choose_key_tokens(yarn, context=256)
    left = sum(int((all_ != asked).sum()) for all_, asked in zip(*map(marks, (suite.windows, windows)), strict=True))
    assert all(bool((a | ~b).all()) for a, b in zip(*map(marks, (suite.windows, windows)), strict=True))
    assert rows[0]["key_token_share"] == keys.share
    assert 0 < left < 0.1 * keys.tokens and rows[0]["left_out_share"] == pytest.approx(left / keys.tokens)
    said = capfd.readouterr().err
    assert f"LongPPL, 320 tokens in 2 windows: {keys.tokens} of 638 tokens" in said
    assert f"256 tokens of context against 64; {left} of them are left out" in said
    for row in rows:  # what is asked for is one token, whatever stands before it
        for context, start, stop in row["spans"]:
            before = tokenizer(row["prompt"][:start])["input_ids"]
            assert tokenizer(row["prompt"][:stop])["input_ids"][: len(before)] == before
            assert len(tokenizer(row["prompt"][:stop])["input_ids"]) == len(before) + 1
            assert not row["prompt"][context - 1].isspace()


def marks(windows):
    return [window.key_tokens for window in windows]


def test_the_evaluator_is_the_model_without_its_patch_and_chooses_once(yarn, tokenizer, options, tmp_path, monkeypatch):
    monkeypatch.setattr("rope_patch.harness.longppl.HF_HOME", str(tmp_path / "hub"))
    first = documents(options)
    kept = (tmp_path / "keys.jsonl").read_text()
    assert len(kept.splitlines()) == 2
    other = options | {"method": "pi", "target_length": 1024}  # arguments of the next method's model
    assert documents(other) == first
    assert (tmp_path / "keys.jsonl").read_text() == kept, "found in the file"
    folder = tmp_path / "patched"
    rope_patch.save(yarn, folder, tokenizer=tokenizer)
    assert documents(options, pretrained=str(folder), resume=None) == first
    assert (tmp_path / "hub" / "rope_patch" / "key_tokens.jsonl").is_file()
    named = documents(options, pretrained=None, tokenizer=LLAMA, evaluator=str(folder))
    assert named == first


def test_a_window_is_read_once_whatever_its_key_tokens(yarn, tokenizer, options, many):
    (row, _) = documents(options)
    requests = [
        Instance("loglikelihood", {}, (row["prompt"][:start], row["prompt"][start:stop]), 0)
        for _, start, stop in row["spans"]
        if not row["prompt"][start - 1].isspace()
    ]
    model = RopePatchLM(pretrained=yarn, tokenizer=tokenizer, device="cpu")
    with spy_ids(yarn) as read:
        together = model.loglikelihood(requests, disable_tqdm=True)
    assert len(read) == 1 and read[0].numel() <= 320 and len(requests) > 30
    alone = [model.loglikelihood([request], disable_tqdm=True)[0] for request in requests[::20]]
    for (score, hit), (wanted, best) in zip(together[::20], alone, strict=True):
        assert score == pytest.approx(wanted, abs=1e-4) and hit == best


def test_requests_on_both_sides_of_two_tables_are_read_apart(tokenizer):
    """The short text begins the long one; together, under the long table, it would score otherwise."""
    model = RopePatchLM(LLAMA, method="yarn:factor=4@256", target_length=1024, dtype="float32", device="cpu")
    words = TEXT.split(" ")
    pairs = [(" ".join(words[:count]), f" {words[count]}") for count in (20, 30, 300)]
    requests = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    with spy_ids(model.model) as read:
        together = model.loglikelihood(requests, disable_tqdm=True)
    assert len(read) == 2
    alone = [model.loglikelihood([request], disable_tqdm=True)[0][0] for request in requests]
    assert [score for score, _ in together] == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(
    ("length", "changes", "message"),
    [
        (64, {}, "short context"),
        (320, {"short_context": 30}, "an eighth to a half"),
        (320, {"windows": 90}, "windows="),
        (320, {"windows": 0}, "windows"),
        (320, {"evaluater": "x"}, "Did you mean 'evaluator'"),
        (320, {"pretrained": None, "tokenizer": LLAMA}, "evaluator="),
    ],
)
def test_what_cannot_be_measured_is_said(options, length, changes, message):
    with pytest.raises(ValueError, match=message):
        documents(options, length, **changes)


def test_a_text_without_key_tokens_is_refused(options, monkeypatch):
    monkeypatch.setattr(key_tokens, "GAIN", math.inf)
    with pytest.raises(ValueError, match="0 of 638 tokens"):
        documents(options)


def test_an_evaluator_of_another_vocabulary_is_refused(options, tokenizer, tmp_path):
    other = shutil.copytree(LLAMA, tmp_path / "other")
    larger = AutoTokenizer.from_pretrained(LLAMA)
    larger.add_tokens("another word")
    larger.save_pretrained(other)
    with pytest.raises(ValueError, match="vocabulary"):
        documents(options, evaluator=str(other))


def test_a_chat_template_is_refused(yarn, tokenizer, options):
    manager = TaskManager(include_defaults=False, include_path=TASKS, metadata=options | {"max_seq_lengths": 256})
    model = RopePatchLM(pretrained=yarn, tokenizer=tokenizer, device="cpu")
    with pytest.raises(ValueError, match="plain text"):
        lm_eval.simple_evaluate(
            model, tasks=["rope_longppl"], task_manager=manager, system_instruction="Be brief.", bootstrap_iters=0
        )
