"""Options of a training run: what goes over what, what is refused, and every YAML file of the recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.recipe_runs import recipe

from rope_patch.cli.finetune import smaller
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import options_from_dict, to_dict, to_yaml
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


def test_numbers_are_read_as_people_write_them(file):
    assert words(file("train:\n  learning_rate: 1e-4\n  warmup: 3\n")).train.learning_rate == 1e-4
    assert words("train.learning_rate=1e-4").train.learning_rate == 1e-4
    assert words(file("data: {config: 20231101.10}")).data.config == "20231101.10"
    assert words("patch.target_length=4096").target_length == words("patch.target_length=4k").target_length == 4096
    assert words(file("evaluation: {lengths: 4096}")).evaluation_lengths == (4096,)
    assert words("patch.target_length=2k").evaluation_lengths == (2048,)
    assert words("lora.target_modules=q_proj,v_proj") == words("lora.target_modules=q_proj v_proj")


@pytest.mark.parametrize(
    "text",
    [
        "1e10",
        "0123",
        "2023_11",
        "20231101.10",
        "yes",
        "off",
        "a: b",
        "[a]",
        "@x",
        "*x",
        "'a",
        "a #b",
        "a=b",
        "ü\u2028🙂",
    ],
)
def test_words_that_are_text_stay_as_they_were_typed(text, tmp_path):
    """YAML would make a number, a truth value or a list of a revision or a path; so what is written is read back."""
    parsed = words(f"model.revision={text}", f"data.source={text}", f"output={text}", "evaluation.depths=0.0 0.5")
    assert (parsed.model.revision, parsed.data.source, str(parsed.output)) == (text, text, text)
    (tmp_path / "a.yaml").write_text(to_yaml(parsed), encoding="utf-8")
    assert recipe(tmp_path / "a.yaml") == parsed == options_from_dict(RecipeOptions, to_dict(parsed))
    assert words("model.revision=null").model.revision is None


# --- what is refused


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("steps=3", "Did you mean 'train.steps'"),
        ("model.name=", "model.name is empty"),
        ("modle.name=x", "Did you mean 'model.name'"),
        ("train.learning_rate=0", "train.learning_rate"),
        ("train.steps=10 train.warmup=20", "train.warmup=20"),
        ("evaluation.depths=0.5,1.5", "depths"),
        ("evaluation.task=haystack", "unknown retrieval task"),
        ("patch.method=yarm", "yarn"),
        ("patch.target_length=256", "longer than patch.target_length"),
        ("data.positions=pose", "patch.target_length"),
        ("data.length=4k 8k", "data.length"),
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
