"""Options of a training run: what goes over what, what is refused, and every YAML file of the recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.recipe_runs import recipe

from rope_patch.cli.finetune import smaller
from rope_patch.options.finetune import RENAMED, RecipeOptions
from rope_patch.options.yaml_and_json import options_from_dict, to_dict, to_yaml
from rope_patch.training.checks import build
from rope_patch.training.runs import run_folder

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
BASE = ("model.name=llama", "train.max_length=512", "output=x")
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
    assert words(file("train:\n  learning_rate: 1e-4\n  warmup_steps: 3\n")).train["learning_rate"] == 1e-4
    assert words("train.learning_rate=1e-4").train["learning_rate"] == 1e-4
    assert words("train.max_length=32k", "patch.target_length=64k").max_length == 32768
    assert words(file("train:\n  bf16: false\n")).train == words("train.bf16=false").train
    assert words(file("data: {config: 20231101.10}")).data.config == "20231101.10"
    assert words("patch.target_length=4096").target_length == words("patch.target_length=4k").target_length == 4096
    assert words(file("evaluation: {lengths: 4096}")).evaluation_lengths == (4096,)
    assert words("patch.target_length=2k").evaluation_lengths == (2048,)
    assert words("lora.target_modules=[q_proj, v_proj]").lora == {"target_modules": ["q_proj", "v_proj"]}
    assert words('train.gradient_checkpointing_kwargs={"use_reentrant": false}').train[
        "gradient_checkpointing_kwargs"
    ] == {"use_reentrant": False}


def test_lists_are_written_as_in_yaml_or_as_words():
    plain = words("evaluation.lengths=128 256", "patch.layer_types=full_attention")
    assert plain == words("evaluation.lengths=[128, 256]", "patch.layer_types=[full_attention]")
    assert plain == words("evaluation.lengths=128,256", "patch.layer_types=full_attention")


def test_keys_of_a_section_of_trl_stack_one_by_one(file):
    first = file("train:\n  max_steps: 5\n  seed: 1\nlora:\n  r: 4\n")
    second = file("train:\n  max_steps: 9\n", "b.yaml")
    asked = words(first, second, "lora.lora_alpha=3")
    assert asked.train == {"max_length": 512, "max_steps": 9, "seed": 1} and asked.lora == {"r": 4, "lora_alpha": 3}


@pytest.mark.parametrize("old", RENAMED)
def test_a_name_of_the_earlier_version_raises_with_the_new_one(old, file):
    section, _, key = old.partition(".")
    new = re.search(r"(?:train|lora)\.\w+", RENAMED[old])[0]
    with pytest.raises(ValueError, match=re.escape(new)):
        words(f"{old}=1")
    with pytest.raises(ValueError, match=re.escape(new)):
        words(file(f"{section}:\n  {key}: 1\n"))


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
    assert str(words("output=x", "output_dir=y").output) == "y", "TRL's name of it"


# --- what is refused


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("steps=3", "unknown option 'steps'"),
        ("model.name=", "model.name is empty"),
        ("modle.name=x", "Did you mean 'model.name'"),
        ("train=3", "train is a section"),
        ("evaluation.depths=0.5,1.5", "depths"),
        ("evaluation.task=haystack", "unknown retrieval task"),
        ("patch.method=yarm", "yarn"),
        ("patch.target_length=256", "longer than patch.target_length"),
        ("data.positions=pose", "patch.target_length"),
        ("train.output_dir=y", "write output"),
        ('train.model_init_kwargs={"dtype": "float16"}', "write model.dtype"),
        ("train.max_length=null", "train.max_length"),
        ("train.max_steps=many", "train.max_steps must be a whole number"),
        ("lora.r=0", "model.dtype=float32"),
        ("lora.r=0 model.quantization=nf4", "model.quantization"),
        ("data.positions=pose patch.target_length=1k train.packing_strategy=bfd", "train.packing_strategy"),
    ],
)
def test_wrong_values_are_named(word, named):
    given = re.split(r" (?=\w+\.)", word)
    with pytest.raises(ValueError, match=re.escape(named)), run_folder(words(*given)) as run:
        assert run.out.name == "x" and words(*given).max_steps


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- a\n", "must hold options"),
        ("train: 3\n", "section"),
        ("data:\n  sauce: 3\n", "Did you mean 'data.source'"),
        ("train: [1\n", "line 1"),
    ],
)
def test_wrong_files_are_named_with_what_is_wrong(file, text, named):
    with pytest.raises(ValueError, match=rf"a\.yaml(.|\n)*{named}"):
        words(file(text))
    with pytest.raises(FileNotFoundError):
        words("no.yaml")


def test_what_looks_like_those_is_allowed():
    assert words("lora.r=0", "model.dtype=float32").lora_rank == 0
    assert words("evaluation.lengths=64k").evaluation_lengths == (65536,), "beyond the target: that may be the point"


@dataclass
class Foreign:
    """Stands for a class of TRL, whose import takes seconds."""

    max_steps: int = 1
    modules: list[str] | None = None

    def __post_init__(self):
        if self.max_steps + 0 < 0:
            raise ValueError("max_steps is negative")


def test_what_a_library_refuses_is_said_with_the_name_of_the_section():
    assert build(Foreign, "train", {"max_steps": 3}) == Foreign(3)
    with pytest.raises(ValueError, match=r"train: Foreign has no 'max_step'\. Did you mean 'max_steps'"):
        build(Foreign, "train", {"max_step": 3})
    for wrong in (-1, "many"):
        with pytest.raises(ValueError, match="max_steps"):
            build(Foreign, "train", {"max_steps": wrong})
    with pytest.raises(ValueError, match=r"train\.modules takes a list, such as \[q_proj, v_proj\]"):
        build(Foreign, "train", {"modules": "q_proj v_proj"})


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
    assert small.train["max_steps"] <= 4 and small.target_length == 1024 and small.output != parsed.output
