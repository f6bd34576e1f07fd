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


def only(stage, **shares):
    """The stage with one kind of row."""
    return recipe.Stage(stage.name, stage.length, stage.tokens, **{"text": 0.0, "repeat": 0.0, **shares})


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


def test_repeated_strings_are_random_digits_or_random_tokens(tokenizer, stream):
    rows_sampler = sampler(tokenizer, stream)
    rows = [rows_sampler.repeated(64, 31)[0][1:32] for _ in range(100)]
    digits = set(tokenizer.convert_tokens_to_ids(list("0123456789")))
    of_digits = [set(row) <= digits for row in rows]
    assert 30 <= sum(of_digits) <= 70  # half of them; 4 standard deviations
    assert len({tuple(row) for row in rows}) == 100
    assert all(recipe.PAD < token < recipe.VOCABULARY for row in rows for token in row)


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


def test_a_text_row_is_a_stretch_of_the_stream_and_counts_everywhere(tokenizer, stream):
    rows_sampler = sampler(tokenizer, stream)
    text = " ".join(map(str, stream))
    rows = [rows_sampler.row(recipe.Stage("t", 64, 1, text=1.0, repeat=0.0)) for _ in range(20)]
    for ids, weights in rows:
        assert f" {' '.join(map(str, ids[1:]))} " in f" {text} "
        assert weights == [1.0] * 64
    assert len({tuple(ids) for ids, _ in rows}) > 10


def test_a_repeat_row_has_at_least_two_copies(tokenizer, stream):
    rows_sampler = sampler(tokenizer, stream)
    sizes = set()
    for _ in range(300):
        ids, weights = rows_sampler.row(recipe.Stage("r", 64, 1, text=0.0, repeat=1.0))
        size = weights.count(0.0) - 1
        assert 4 <= size <= 31  # 1 + 2·31 = 63 <= 64: two whole copies fit
        assert ids[1 : 1 + size] == ids[1 + size : 1 + 2 * size]
        sizes.add(size)
    assert {4, 31} <= sizes


def test_a_passkey_row_weighs_its_answer_five_times(tokenizer, stream):
    rows_sampler = sampler(tokenizer, stream)
    for _ in range(20):
        ids, weights = rows_sampler.row(recipe.Stage("p", 64, 1, text=0.0, repeat=0.0))
        answer = weights.count(5.0)
        assert weights == [1.0] * (64 - answer) + [5.0] * answer
        assert re.fullmatch(r" \d{5}", key := tokenizer.decode(ids[-answer:]))  # the space is a token of its own
        assert tokenizer.decode(ids).count(key) == 2  # in the needle and in the answer


def test_the_same_seed_gives_the_same_rows(tokenizer, stream):
    stage = recipe.CURRICULUM[-1]
    one, two, other = (sampler(tokenizer, stream, seed) for seed in (3, 3, 4))
    first = [one.row(stage) for _ in range(8)]
    assert first == [two.row(stage) for _ in range(8)] != [other.row(stage) for _ in range(8)]


def test_the_shares_are_those_of_the_stage(tokenizer, stream):
    rows_sampler = sampler(tokenizer, stream)
    stage = recipe.Stage("mix", 64, 1, text=0.2, repeat=0.5)
    kinds = {"text": 0, "repeat": 0, "passkey": 0}
    for _ in range(600):
        _, weights = rows_sampler.row(stage)
        kinds["repeat" if 0.0 in weights else "passkey" if 5.0 in weights else "text"] += 1
    # Binomial(600, share): standard deviations 9.8, 12.2 and 11.2.
    assert kinds["text"] == pytest.approx(120, abs=40)
    assert kinds["repeat"] == pytest.approx(300, abs=49)
    assert kinds["passkey"] == pytest.approx(180, abs=45)


def test_a_batch_is_ids_and_weights(tokenizer, stream):
    ids, weights = sampler(tokenizer, stream).batch(recipe.CURRICULUM[1], 5, "cpu")
    assert ids.shape == weights.shape == (5, recipe.CURRICULUM[1].length)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32


# --- curriculum


@every_stage
def test_the_shares_of_a_stage_are_valid(tokenizer, stream, stage):
    assert 0 <= stage.text <= 1 and 0 <= stage.repeat <= 1
    assert stage.text + stage.repeat <= 1
    assert stage.tokens > 0
    assert 0 < stage.length <= recipe.LENGTH
    if stage.until_copying:
        assert stage.repeat > 0, "copying is measured in stages that have repeats only: it would never end"
    if stage.text + stage.repeat < 1:
        sampler(tokenizer, stream).row(only(stage))  # raises if a passkey prompt does not fit


def test_the_curriculum_ends_at_full_length_with_a_decay():
    names = [stage.name for stage in recipe.CURRICULUM]
    assert len(set(names)) == len(names)
    assert recipe.CURRICULUM[-1].length == recipe.LENGTH
    assert [stage.decay for stage in recipe.CURRICULUM] == [False] * (len(names) - 1) + [True]
    assert sum(stage.until_copying for stage in recipe.CURRICULUM) == 1


def test_steps():
    stage = recipe.Stage("s", 64, 10_000, 1.0, 0.0)
    assert recipe.steps(stage, 4096) == 2
    assert recipe.steps(stage, 20_000) == 1  # never none


# --- models


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_shapes(shape):
    model = recipe.build_model(shape)
    config = model.config
    assert config.model_type == {"llama": "llama", "gemma3": "gemma3_text"}[shape]
    assert (config.vocab_size, config.max_position_embeddings, config.head_dim) == (1024, 256, 32)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (recipe.BOS, recipe.EOS, recipe.PAD)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert 1.5e6 < sum(p.numel() for p in model.parameters()) < 2.5e6
    if shape == "gemma3":
        assert config.layer_types == ["sliding_attention", "full_attention"] * 3
        assert config.sliding_window < recipe.LENGTH
        assert set(config.rope_parameters) == {"sliding_attention", "full_attention"}


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


def test_training_logs_every_25_steps_and_stops_when_copying_appears(tokenizer, stream, monkeypatch, capsys):
    stages = (
        recipe.Stage("text", 32, 128 * 30, 1.0, 0.0),
        recipe.Stage("copying", 32, 128 * 60, 0.0, 1.0, until_copying=True),
        recipe.Stage("full", 64, 128 * 50, 0.5, 0.5, decay=True),
    )
    monkeypatch.setattr(recipe, "CURRICULUM", stages)
    copying = iter((0.5, 0.96, 0.99, 0.5))
    monkeypatch.setattr(recipe, "copy_accuracy", lambda *_: next(copying))
    model = small_model()
    before = model.lm_head.weight.detach().clone()
    log = recipe.train(model, sampler(tokenizer, stream), options())
    assert not torch.equal(before, model.lm_head.weight)
    logged = [(entry["stage"], entry["tokens"], entry["copying"]) for entry in log]
    # 30 steps of text: the 25th and the last are logged; the second stage ends at its 50th; the last runs to its end.
    assert logged == [
        ("text", 3200, 0.0),
        ("text", 3840, 0.0),
        ("copying", 7040, 0.5),
        ("copying", 10240, 0.96),
        ("full", 13440, 0.99),
        ("full", 16640, 0.5),
    ]
    assert all(0 < entry["loss"] < 10 for entry in log)
    assert log[0]["loss"] < 6.93  # ln 1024, that of a fresh model
    capsys.readouterr()


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


def test_texts_of_the_user_are_read_in_order(tmp_path):
    (tmp_path / "inner").mkdir()
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("inner/c.txt", "third"), ("no.md", "left out")):
        (tmp_path / name).write_text(text)
    assert list(recipe.numbered(tmp_path)) == ["first", "second", "third"]


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


@pytest.mark.slow
def test_smoke_run_logs_every_stage(smoked):
    log = json.loads((smoked[1] / "training_log.json").read_text())
    assert [entry["stage"] for entry in log] == [stage.name for stage in recipe.CURRICULUM]


def test_an_unknown_shape_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "gpt2", "-o", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        recipe.main()
    assert "invalid choice: 'gpt2'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
