"""The training recipe: its tokenizer, its rows and their weights, its curriculum, and a short run of all of it."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import random
import re
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
from reference_recipe import SCRIPT, recipe
from tiny import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.evaluation import text as corpora
from rope_patch.evaluation.text import builtin_text

every_stage = pytest.mark.parametrize("stage", recipe.CURRICULUM, ids=lambda stage: stage.name)


@pytest.fixture(scope="session")
def tokenizer():
    """Enough documents for a full vocabulary."""
    return recipe.train_tokenizer(builtin_text("train").documents[:40])


@pytest.fixture(scope="session")
def stream(tokenizer):
    text = "\n\n".join(builtin_text("train").documents[40:50])
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def sampler(tokenizer, stream, seed=0):
    return recipe.Sampler(tokenizer, stream, random.Random(seed))


# --- tokenizer


def test_every_digit_is_a_token_of_its_own(tokenizer):
    for text in ("12345", "a12b345", "key 90210.", "x=007;", "1e-05"):
        tokens = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert [token for token in tokens if re.search(r"\d", token)] == re.findall(r"\d", text)
    assert {token for token in tokenizer.get_vocab() if re.search("[0-9]", token)} == set("0123456789")


def test_tokenizer_is_lossless_and_has_its_special_tokens_where_the_recipe_expects_them(tokenizer):
    text = "def f(x):\n\treturn  'déjà vu' + \"零\"  # 3.14 😀\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == recipe.BOS == tokenizer.bos_token_id == 0
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (recipe.EOS, recipe.PAD) == (1, 2)
    assert not {recipe.BOS, recipe.EOS, recipe.PAD} & set(ids[1:])
    assert tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False) == text
    assert len(tokenizer) == recipe.VOCABULARY == 1024
    assert tokenizer.model_max_length == recipe.LENGTH == 256
    assert len(tokenizer("the standard library")["input_ids"]) < 12  # merges were learnt: not one token per byte


# --- rows


@pytest.mark.parametrize(("length", "size"), [(64, 4), (64, 31), (65, 32), (128, 5), (256, 127), (16, 15), (16, 40)])
def test_repeated_rows_are_exact_and_weigh_nothing_before_the_second_copy(tokenizer, stream, length, size):
    rows_sampler = sampler(tokenizer, stream)
    for _ in range(10):
        ids, weights = rows_sampler.repeated(length, size)
        assert len(ids) == len(weights) == length
        assert ids[0] == recipe.BOS and recipe.BOS not in ids[1:]
        assert all(ids[i] == ids[i - size] for i in range(1 + size, length))
        # Position 0 is the start and 1 … size the first copy: no context tells those. All after them are told.
        assert weights == [0.0] * min(length, 1 + size) + [1.0] * max(0, length - 1 - size)


@every_stage
def test_every_row_of_a_stage_has_its_length(tokenizer, stream, stage):
    rows_sampler = sampler(tokenizer, stream)
    for _ in range(200):
        ids, weights = rows_sampler.row(stage)
        assert len(ids) == len(weights) == stage.length
        assert ids[0] == recipe.BOS
        assert all(isinstance(token, int) and 0 <= token < recipe.VOCABULARY for token in ids)
        assert sum(weights[1:]) > 0, "a row that counts for nothing"
        assert set(weights) <= {0.0, 1.0, recipe.ANSWER_WEIGHT}


def test_a_passkey_row_weighs_its_answer_five_times(tokenizer, stream):
    rows_sampler = sampler(tokenizer, stream)
    for _ in range(20):
        ids, weights = rows_sampler.row(recipe.Stage("p", 64, 1, text=0.0, repeat=0.0))
        answer = weights.count(5.0)
        assert weights == [1.0] * (64 - answer) + [5.0] * answer
        assert re.fullmatch(r" \d{5}", key := tokenizer.decode(ids[-answer:]))  # the space is a token of its own
        assert tokenizer.decode(ids).count(key) == 2  # in the needle and in the answer


# --- curriculum


def test_the_curriculum_ends_at_full_length_with_a_decay():
    names = [stage.name for stage in recipe.CURRICULUM]
    assert len(set(names)) == len(names)
    assert recipe.CURRICULUM[-1].length == recipe.LENGTH
    assert [stage.decay for stage in recipe.CURRICULUM] == [False] * (len(names) - 1) + [True]
    assert sum(stage.until_copying for stage in recipe.CURRICULUM) == 1


# --- models


class Copier(torch.nn.Module):
    """Predicts the token `lag` places before the wanted one: a perfect copier of strings of `lag` tokens."""

    def __init__(self, lag, wrong=()):
        super().__init__()
        self.lag, self.wrong = lag, wrong

    def forward(self, ids, use_cache):
        assert not self.training and not use_cache
        predicted = ids.roll(self.lag - 1, dims=1).clone()
        for position in self.wrong:
            predicted[:, position - 1] = recipe.PAD  # predicts `position`; no string has this token
        return SimpleNamespace(logits=torch.nn.functional.one_hot(predicted, recipe.VOCABULARY).float())


def test_copy_accuracy_counts_from_the_second_token_of_the_second_copy(tokenizer, stream):
    rows_sampler = sampler(tokenizer, stream)

    def accuracy(copier):
        value = recipe.copy_accuracy(copier.train(), rows_sampler, 64, 4, "cpu")
        assert copier.training, "the mode is put back"
        return value

    # (64 - 1) // 2 = 31 per copy: the second spans 32 … 62, and 63 starts a third; 33 … 63 count, 31 tokens.
    assert accuracy(Copier(31)) == 1.0
    assert accuracy(Copier(31, wrong=range(1, 33))) == 1.0
    assert accuracy(Copier(31, wrong=[33])) == pytest.approx(30 / 31)
    assert accuracy(Copier(31, wrong=[63])) == pytest.approx(30 / 31)
    assert accuracy(Copier(30)) < 0.3


# --- training


def options(**changes):
    return argparse.Namespace(**{"lr": 3e-3, "tokens_per_step": 128, "scale": 1.0, "device": "cpu", **changes})


def small_model():
    return tiny_model(vocab_size=recipe.VOCABULARY, bos_token_id=0, eos_token_id=1, pad_token_id=2)


def test_what_weighs_nothing_teaches_nothing(tokenizer, stream, monkeypatch, capsys):
    """Two rows that differ only in tokens of no weight, which are never context either: the same step."""

    class Fixed:
        def __init__(self, last):
            ids = torch.tensor([[0, 5, 6, 7, last]])
            self.row_and_weights = ids, torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]])

        def batch(self, *_):
            return self.row_and_weights

    monkeypatch.setattr(recipe, "CURRICULUM", (recipe.Stage("s", 5, 10, 1.0, 0.0),))
    trained = []
    for last in (8, 9):
        model = small_model()
        recipe.train(model, Fixed(last), options(tokens_per_step=5))
        trained.append(model.lm_head.weight.detach().clone())
    assert torch.equal(*trained)
    assert not torch.equal(trained[0], small_model().lm_head.weight)
    capsys.readouterr()


def short(split, whole=builtin_text):
    """The first documents of a split: reading and measuring all of it takes 15 s."""
    corpus = whole(split)
    size = 60_000 if split == "train" else 8_000
    count = sum(end < size for end in itertools.accumulate(map(len, corpus.documents)))
    return dataclasses.replace(corpus, documents=corpus.documents[: max(1, count)])


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.full)])
def smoked(request, tmp_path_factory):
    """The shape, the folder and the printed figures of a short run of the script."""
    shape, folder = request.param, tmp_path_factory.mktemp("smoke") / request.param
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(corpora, "builtin_text", short)
        patch.setattr(sys, "argv", [str(SCRIPT), shape, "-o", str(folder), "--smoke"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return shape, folder, json.loads(printed.getvalue())


@pytest.mark.slow
def test_smoke_run_writes_a_folder_that_loads(smoked):
    shape, folder, figures = smoked
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "training_log.json",
    } <= {path.name for path in folder.iterdir()}
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == {"llama": "llama", "gemma3": "gemma3_text"}[shape]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    fresh = recipe.build_model(shape)
    assert [p.shape for p in model.parameters()] == [p.shape for p in fresh.parameters()]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == recipe.VOCABULARY
    assert tokenizer.convert_ids_to_tokens(tokenizer("12")["input_ids"]) == ["<bos>", "1", "2"]
    log = json.loads((folder / "training_log.json").read_text())
    assert all(set(entry) == {"stage", "tokens", "loss", "copying"} for entry in log)

    card = (folder / "README.md").read_text()
    assert json.loads(re.search(r"```json\n(.*?)```", card, re.DOTALL)[1]) == figures
    assert f"python recipes/pretrain_reference.py {shape} -o {folder} --smoke" in card
    assert re.search(r"SHA-256 of the documents `[0-9a-f]{64}`", card)
    assert set(figures["passkey"]) == {"256", "512", "1024"}
    assert figures["passkey_prompts_per_length"] == 10
    assert figures["heldout_tokens"] > 0 and figures["heldout_tokens"] % 1023 == 0  # windows of 1024
    # 4 steps teach next to nothing: a little better than 1024 equally likely tokens.
    assert all(100 < value < 1100 for value in figures["heldout_perplexity"].values())
