"""What breaks first in a cache: answers are found and graded as greedy decoding writes them, and causes add up."""

from __future__ import annotations

import pytest
import torch
from support.tiny import small
from transformers import AutoTokenizer

import rope_patch
from rope_patch.modeling.attention_layers import find_attention_layers
from rope_patch.modeling.scoring import Reader

cache_damage = pytest.importorskip("cache_damage", reason="not in the source distribution")
graded_texts = pytest.importorskip("graded_texts", reason="not in the source distribution")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")


@pytest.mark.parametrize("workload", ["passkey", *graded_texts.WORKLOADS])
def test_the_tokens_of_an_answer_are_its_text(tokenizer, workload, monkeypatch):
    monkeypatch.setattr(graded_texts, "LENGTH", 1024)  # a tokenizer of 512 tokens needs more of them
    text = graded_texts.graded_text(tokenizer, workload, 1)
    assert len(text.ids) <= 1024
    assert len(text.answers) >= (1 if workload == "passkey" else 8)
    ends = [0, *(stop for _, stop in text.answers)]
    assert all(before <= start < stop for before, (start, stop) in zip(ends, text.answers, strict=False))
    answers = [tokenizer.decode(text.ids[start:stop]).strip() for start, stop in text.answers]
    whole = tokenizer.decode(text.ids)
    if workload in ("passkey", "lookup", "rows"):  # asked for again, word for word
        assert all(whole.count(answer) >= 2 for answer in answers)
    elif workload == "sums":
        assert all(answer.isdecimal() and f"= {answer}" in whole for answer in answers)
    else:
        stood = [tokenizer.decode(text.ids[:start]) for start, _ in text.answers]
        assert all(answer and answer in before for answer, before in zip(answers, stood, strict=True))


def test_an_answer_is_right_where_greedy_decoding_writes_it():
    model = small("llama")
    torch.manual_seed(0)
    begin = torch.randint(3, 64, (1, 8))
    written = model.generate(begin, max_new_tokens=4, do_sample=False, eos_token_id=None)[0]
    other = written.clone()
    other[-1] = (other[-1] + 1) % 64
    for ids, right in ((written, True), (other, False)):
        graded = cache_damage.grade(Reader(model), graded_texts.GradedText(ids, ((8, 12),)), None)
        assert [each for each, _ in graded] == [right]


@pytest.mark.parametrize("table", ["default", cache_damage.UNROTATED])
def test_causes_add_up_and_only_unrotated_pairs_are_taken_out(table):
    model = small("gemma3").eval()
    if table != "default":
        rope_patch.apply(model, table)
    ids = torch.randint(3, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    exact = [cache_damage.last_states(Reader(model), row, None) for row in ids]
    loaded = cache_damage.Loaded(model, None, find_attention_layers(model), ids, "", exact)
    measured = cache_damage.keys(loaded, cache_damage.Cell("keys", "gemma3", table, "3"))
    assert sum(measured["shares"].values()) == pytest.approx(1)
    assert (measured["share of unrotated pairs"] > 0) == (table != "default")
    assert all(len(by_window) == 2 and min(by_window) > 0 for by_window in measured["kl"].values())
    assert ("rope in full precision" in measured["kl"]) == (table != "default")
