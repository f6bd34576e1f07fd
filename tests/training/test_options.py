"""Options of a training run: what goes over what, what is refused, and every YAML file of the recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.recipe_runs import recipe

from rope_patch.cli.finetune import smaller
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import from_dict, to_dict, to_yaml
from rope_patch.training.trainer import check_training

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
BASE = ("model.name=llama", "data.length=512", "output=x")
every_config = pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)


@pytest.fixture
def file(tmp_path):
    """Writes a YAML file of that text."""

    def write(text, name="a.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def words(*given):
    return recipe(*BASE, *given)


# --- what goes over what


def test_later_words_and_files_go_over_earlier_ones(file):
    first = file("train: {steps: 1, batch: 2, accumulate: 3, seed: 4}\nlora:\n  rank: 5\npatch:\n")
    second = file("train:\n  steps: 11\n  batch: 12\n", "b.yaml")
    parsed = words("train.log_every=22", first, second, "train.steps=31", "evaluation.depths=0.5", "train.steps=32")
    train = parsed.train
    assert (train.steps, train.batch, train.accumulate, train.seed, train.log_every) == (32, 12, 3, 4, 22)
    assert parsed.lora.rank == 5 and parsed.evaluation.spec.depths == (0.5,), "lists are replaced, not joined"
    assert parsed.train.learning_rate == 2e-4, "the rest is at its default"


def test_numbers_are_read_as_people_write_them(file):
    assert words(file("train:\n  learning_rate: 1e-4\n  warmup: 3\n")).train.learning_rate == 1e-4
    assert words("train.learning_rate=1e-4").train.learning_rate == 1e-4
    assert words(file("data: {config: 20231101.10}")).data.config == "20231101.10"
    assert words("data.length=1k").data.length == words(file("data: {length: 1024}")).data.length == 1024
    assert words("patch.target_length=4096").target_length == words("patch.target_length=4k").target_length == 4096
    assert words("evaluation.lengths=4096").evaluation_lengths == (4096,)
    assert words(file("evaluation: {lengths: 4096}")).evaluation_lengths == (4096,)
    assert words("evaluation.lengths=32k, 4k").evaluation_lengths == (4096, 32768)
    assert words("patch.target_length=2k").evaluation_lengths == (2048,)
    assert words("lora.target_modules=q_proj,v_proj") == words("lora.target_modules=q_proj v_proj")


@pytest.mark.parametrize(
    "text", ["1e10", "0123", "2023_11", "20231101.10", "yes", "off", "a: b", "[a]", "@x", "*x", "'a", "a #b", "a=b"]
)
def test_words_that_are_text_stay_as_they_were_typed(text):
    """YAML would make a number, a truth value or a list of a revision or a path."""
    parsed = words(f"model.revision={text}", f"data.source={text}", f"output={text}")
    assert (parsed.model.revision, parsed.data.source, str(parsed.output)) == (text, text, text)
    assert words("model.revision=null").model.revision is None


# --- what is refused


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("steps=3", "Did you mean 'train.steps'"),
        ("model.name=", "model.name is empty"),
        ("modle.name=x", "Did you mean 'model.name'"),
        ("train.steps", "train.steps"),
        ("train=3", "section"),
        ("train.steps=many", "train.steps"),
        ("model.dtype=int8", "model.dtype"),
        ("train.liger=maybe", "train.liger"),
        ("lora.rank=-1", "lora.rank must be >= 0"),
        ("train.learning_rate=0", "train.learning_rate"),
        ("train.steps=10 train.warmup=20", "train.warmup=20"),
        ("evaluation.depths=0.5,1.5", "depths"),
        ("evaluation.task=haystack", "unknown retrieval task"),
        ("patch.method=yarm", "yarn"),
        ("patch.target_length=256", "longer than patch.target_length"),
        ("data.positions=pose", "patch.target_length"),
        ("data.length=4k 8k", "data.length"),
        ("data.length=[512]", "a length is a number of tokens"),
        ("data.lengths=4k", "Did you mean 'data.length'"),
        ("lora.rank=0", "model.dtype=float32"),
        ("lora.rank=0 model.quantization=nf4", "model.quantization"),
        ("evaluation.every=100 train.save_every=150", "train.save_every"),
        ("data.positions=pose patch.target_length=1k data.boundaries=apart", "data.boundaries"),
    ],
)
def test_wrong_values_are_named(word, named):
    given = re.split(r" (?=\w+\.)", word)
    with pytest.raises((ValueError, OSError), match=re.escape(named)):
        check_training(words(*given))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- a\n", "must hold options"),
        ("train: 3\n", "section"),
        ("train:\n  stepps: 3\n", "Did you mean 'train.steps'"),
        ("train: [1\n", "line 1"),
    ],
)
def test_wrong_files_are_named_with_what_is_wrong(file, text, named):
    with pytest.raises(ValueError, match=rf"a\.yaml(.|\n)*{named}"):
        words(file(text))
    with pytest.raises(FileNotFoundError):
        words("no.yaml")


def test_what_looks_like_those_is_allowed():
    assert words("evaluation.every=100").save_every == 100, "by default where it is evaluated"
    assert words("train.steps=50").save_every == 10 and words("train.steps=3").save_every == 1
    assert words("lora.rank=0", "model.dtype=float32").lora.rank == 0
    assert words("evaluation.lengths=64k").evaluation_lengths == (65536,), "beyond the target: that may be the point"


# --- there and back


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@settings(deadline=None, max_examples=12)
@given(name=TEXT, output=TEXT, rate=st.floats(1e-9, 1e3), depths=st.lists(st.floats(0, 1), min_size=1, unique=True))
@example(name="1e10", output="null", rate=1e-4, depths=[0.0])
def test_what_a_run_writes_is_read_back(tmp_path_factory, name, output, rate, depths):
    sections = {"model": {"name": name, "revision": name}, "data": {"length": "512"}, "train": {"learning_rate": rate}}
    parsed = from_dict(RecipeOptions, {**sections, "evaluation": {"depths": depths}, "output": output})
    path = tmp_path_factory.mktemp("yaml") / "a.yaml"
    path.write_text(to_yaml(parsed), encoding="utf-8")
    assert recipe(path) == parsed == from_dict(RecipeOptions, to_dict(parsed))


# --- the files of the recipe


@every_config
def test_its_smoke_run_keeps_the_method_and_is_small(path):
    parsed = words(path)
    small = words(path, *smaller(parsed))
    # The context of the checkpoint that the bundled one replaces is no part of the method here.
    assert small.patch.method == (parsed.patch.method and parsed.patch.method.partition(":original")[0])
    assert small.lora == parsed.lora
    assert small.data.positions == parsed.data.positions
    assert small.model.name in ("llama", "gemma3") and small.data.source == "builtin"
    assert small.train.steps <= 4 and small.target_length == 1024 and small.output != parsed.output
