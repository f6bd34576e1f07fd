"""The training recipe: its tokenizer, its rows and their weights, its curriculum, and a short run of all of it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import random
import re
import runpy
import sys

import pytest
import torch
from support.reference_recipe import SCRIPT, recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_patch.texts import builtin_text as corpora
from rope_patch.texts.builtin_text import builtin_text

every_stage = pytest.mark.parametrize("stage", recipe.CURRICULUM + recipe.SCALED_CURRICULUM, ids=str)


@pytest.fixture(scope="session")
def tokenizer():
    """Enough documents for a full vocabulary."""
    return recipe.train_tokenizer(builtin_text("train").documents[:40])


@pytest.fixture(scope="session")
def stream(tokenizer):
    text = "\n\n".join(builtin_text("train").documents[40:50])
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def sampler(tokenizer, stream):
    return recipe.Sampler(tokenizer, stream, random.Random(0))


# --- tokenizer


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


# --- training


def short(split, whole=builtin_text):
    """The first documents of a split: reading and measuring all of it takes 15 s."""
    corpus = whole(split)
    size = 60_000 if split == "train" else 15_000
    count = sum(end < size for end in itertools.accumulate(map(len, corpus.documents)))
    return dataclasses.replace(corpus, documents=corpus.documents[: max(1, count)])


RUNS = ["llama", *(pytest.param(each, marks=pytest.mark.full) for each in ("gemma3", "gemma3 --scaled linear"))]


def smoke(arguments, folder):
    """Run the script for a few steps, and return the figures that it prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(corpora, "builtin_text", short)
        patch.setattr(sys, "argv", [str(SCRIPT), *arguments.split(), "-o", str(folder), "--smoke"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return json.loads(printed.getvalue())


@pytest.fixture(scope="module", params=RUNS)
def smoked(request, tmp_path_factory):
    """The arguments, the folder and the printed figures of a short run of the script."""
    folder = tmp_path_factory.mktemp("smoke") / request.param.split()[0]
    return request.param, folder, smoke(request.param, folder)


@pytest.mark.slow
def test_smoke_run_writes_a_folder_that_loads(smoked):
    arguments, folder, figures = smoked
    shape, *scaled = arguments.split()
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == {"llama": "llama", "gemma3": "gemma3_text"}[shape]
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == recipe.VOCABULARY
    assert tokenizer.convert_ids_to_tokens(tokenizer("12")["input_ids"]) == ["<bos>", "1", "2"]
    assert tokenizer.model_max_length == model.config.max_position_embeddings == (1024 if scaled else 256)
    log = json.loads((folder / "training_log.json").read_text())
    curriculum = recipe.SCALED_CURRICULUM if scaled else recipe.CURRICULUM
    assert [entry["stage"] for entry in log] == [stage.name for stage in curriculum]

    card = (folder / "README.md").read_text()
    assert json.loads(re.search(r"```json\n(.*?)```", card, re.DOTALL)[1]) == figures
    assert f"python recipes/pretrain_reference.py {arguments} -o {folder} --smoke" in card
    if scaled:  # from trained weights
        full, sliding = (model.config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
        assert (full["rope_type"], full["factor"], sliding["rope_type"]) == ("linear", 4.0, "default")
        assert figures["heldout_perplexity"]["0-1024"] < 100
    else:  # 4 steps teach next to nothing: a little better than 1024 equally likely tokens.
        assert all(100 < value < 1100 for value in figures["heldout_perplexity"].values())


@pytest.mark.full
@pytest.mark.parametrize("smoked", ["llama"], indirect=True)
def test_a_patch_is_in_place_from_the_first_step_on(smoked, tmp_path):
    plain = json.loads((smoked[1] / "training_log.json").read_text())
    smoke("llama --patch nope", tmp_path / "nope")
    patched = json.loads((tmp_path / "nope" / "training_log.json").read_text())
    assert patched[0]["loss"] != plain[0]["loss"], "of the random weights, which no step has changed"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "nope")
    assert not model.model.rotary_emb.inv_freq.any()
    assert "llama under nope" in (tmp_path / "nope" / "README.md").read_text()
