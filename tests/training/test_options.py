"""Options of a training run: what goes over what, what is refused in which words, and every YAML file of the recipe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rope_patch.cli.finetune import smoke_options
from rope_patch.training.reading import REQUIRED, SECTIONS, read
from rope_patch.training.sources import plan_stages

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
BASE = {"model": {"name": "llama"}, "data": {"lengths": "512"}, "output": "x"}
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
    return read(overrides=given, base=BASE)


# --- what goes over what


def test_words_go_over_files_later_files_over_earlier_ones_and_all_over_the_base(file):
    first = file("train: {steps: 1, batch: 2, accumulate: 3, seed: 4}\nlora:\n  rank: 5\n")
    second = file("train:\n  steps: 11\n  batch: 12\n", "b.yaml")
    base = {**BASE, "train": {"steps": 21, "log_every": 22}, "evaluation": {"depths": [0.1, 0.2, 0.3]}}
    parsed = read([first, second], ["train.steps=31", "evaluation.depths=[0.5]", "train.steps=32"], base)
    train = parsed.train
    assert (train.steps, train.batch, train.accumulate, train.seed, train.log_every) == (32, 12, 3, 4, 22)
    assert parsed.lora.rank == 5 and parsed.evaluation.depths == [0.5], "lists are replaced, not joined"
    assert parsed.train.learning_rate == 2e-4, "the rest is at its default"
    assert base["train"] == {"steps": 21, "log_every": 22}, "what was given is not changed"


def test_numbers_are_read_as_people_write_them(file):
    assert read([file("train:\n  learning_rate: 1e-4\n  warmup: 3\n")], base=BASE).train.learning_rate == 1e-4
    assert words("train.learning_rate=1e-4").train.learning_rate == 1e-4
    assert words("data.lengths=1k").stages == words("data.lengths=1024").stages == ((1024, 1.0),)
    assert words("patch.target_length=4096").target_length == words("patch.target_length=4k").target_length == 4096
    assert words("evaluation.lengths=4096").evaluation_lengths == (4096,)
    assert read([file("evaluation: {lengths: 4096}")], base=BASE).evaluation_lengths == (4096,)
    assert words("evaluation.lengths=32k, 4k").evaluation_lengths == (4096, 32768)
    assert words("patch.target_length=2k").evaluation_lengths == (2048,)


@pytest.mark.parametrize(
    "text", ["1e10", "0123", "2023_11", "20231101.10", "yes", "off", "a: b", "[a]", "@x", "*x", "'a", "a #b", "a=b"]
)
def test_words_that_are_text_stay_as_they_were_typed(text):
    """YAML would make a number, a truth value or a list of a revision or a path."""
    parsed = words(f"model.revision={text}", f"data.source={text}", f"output={text}")
    assert (parsed.model.revision, parsed.data.source, parsed.output) == (text, text, text)
    assert words("model.revision=null").model.revision is None


# --- what is refused


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("steps=3", "Did you mean 'train.steps'"),
        ("modle.name=x", "Did you mean 'model.name'"),
        ("train.steps", "expected key=value"),
        ("train=3", "section"),
        ("train.steps=many", "train.steps"),
        ("model.dtype=int8", "model.dtype"),
        ("lora.rank=[", "no YAML value"),
        ("lora.rank=-1", "lora.rank must be >= 0"),
        ("data.retrieval=nan", "finite"),
        ("train.learning_rate=0", "train.learning_rate"),
        ("evaluation.patience=2", "evaluation.every"),
        ("evaluation.depths=[0.5,1.5]", "depths"),
        ("evaluation.task=haystack", "unknown task"),
        ("patch.target_length=256", "longer than patch.target_length"),
        ("data.positions=pose", "patch.target_length"),
        ("data.lengths=4k 8k", "share"),
        ("data.lengths=4k:x 8k", "LENGTH:SHARE"),
        ("data.lengths=8k:0.5", "add up to 1"),
        ("data.lengths=3k:0.5 8k", "divide"),
        ("lora.rank=0", "model.dtype=float32"),
        ("lora.rank=0 model.quantization=nf4", "model.quantization"),
        ("evaluation.every=100 train.save_every=150", "train.save_every"),
        ("data.positions=pose patch.target_length=1k data.boundaries=apart", "data.boundaries"),
        ("data.positions=pose patch.target_length=1k data.lengths=8 data.chunks=9", "data.chunks"),
    ],
)
def test_wrong_values_are_named(word, named):
    given = re.split(r" (?=\w+\.)", word)
    with pytest.raises(ValueError, match=re.escape(named)):
        words(*given)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- a\n", "holds no options"),
        ("train: 3\n", "section"),
        ("train:\n  stepps: 3\n", "Did you mean 'train.steps'"),
        ("data:\n  config: 20231101.10\n", "quotes"),
        ("train: [1\n", "line 1"),
        ("model: {name: ''}", "empty"),
    ],
)
def test_wrong_files_are_named_with_what_is_wrong(file, text, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        read([file(text)], base=BASE)
    with pytest.raises(FileNotFoundError):
        read(["no.yaml"], base=BASE)


@pytest.mark.parametrize("name", ["model.name", "data.lengths", "output"])
def test_an_option_without_default_is_required(name):
    given = {"model.name": "llama", "data.lengths": "512", "output": "x"}
    del given[name]
    with pytest.raises(ValueError, match=f"{name} is required"):
        read(overrides=[f"{key}={value}" for key, value in given.items()])


def test_what_looks_like_those_is_allowed():
    assert words("evaluation.every=100").save_every == 100, "by default where it is evaluated"
    assert words("train.steps=50").save_every == 10 and words("train.steps=3").save_every == 1
    assert words("data.positions=pose", "patch.target_length=1k", "data.boundaries=whole").data.chunks == 2
    assert words("lora.rank=0", "model.dtype=float32").lora.rank == 0
    assert words("data.task=needle").data.retrieval == 0, "not asked for"
    assert words("evaluation.lengths=64k").evaluation_lengths == (65536,), "beyond the target: that may be the point"


# --- stages


@pytest.mark.parametrize(
    ("lengths", "stages"),
    [
        ("4k:0.25 16k:0.25 32k", ((4096, 0.25), (16384, 0.25), (32768, 0.5))),
        ("32K:0.5  8k", ((32768, 0.5), (8192, 0.5))),
        ("512:1", ((512, 1.0),)),
    ],
)
def test_schedules(lengths, stages):
    parsed = read(base={**BASE, "data": {"lengths": lengths}})
    assert [length for length, _ in parsed.stages] == [length for length, _ in stages]
    assert [share for _, share in parsed.stages] == pytest.approx([share for _, share in stages], abs=1e-12)
    assert parsed.target_length == max(length for length, _ in stages)


@settings(deadline=None, max_examples=30)
@given(
    shares=st.lists(st.floats(0.05, 0.3), min_size=0, max_size=3),
    steps=st.integers(40, 600),
    accumulate=st.integers(1, 3),
    processes=st.integers(1, 3),
)
def test_every_step_sees_as_many_tokens(shares, steps, accumulate, processes):
    """Items of a stage hold as many tokens as a row of the longest length, and all steps are shared out."""
    words = [f"{2**i * 64}:{share}" for i, share in enumerate(shares)] + ["512"]
    given = {**BASE, "data": {"lengths": " ".join(words)}, "train": {"steps": steps, "accumulate": accumulate}}
    stages = plan_stages(read(base=given), processes)
    assert all(length * per == 512 for length, _, per in stages)
    assert sum(items for _, items, _ in stages) == steps * accumulate * processes
    assert all(items % (accumulate * processes) == 0 for _, items, _ in stages)


# --- there and back


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda text: "${" not in text and text != "???"
)


@settings(deadline=None, max_examples=12)
@given(name=TEXT, output=TEXT, rate=st.floats(1e-9, 1e3), depths=st.lists(st.floats(0, 1), min_size=1, unique=True))
@example(name="1e10", output="null", rate=1e-4, depths=[0.0])
def test_to_yaml_is_read_back(tmp_path_factory, name, output, rate, depths):
    parsed = read(
        base={
            **BASE,
            "model": {"name": name, "revision": name},
            "output": output,
            "train": {"learning_rate": rate},
            "evaluation": {"depths": depths},
        }
    )
    path = tmp_path_factory.mktemp("yaml") / "a.yaml"
    path.write_text(parsed.to_yaml(), encoding="utf-8")
    assert read([path]) == parsed == read(base=parsed.to_dict())


# --- the files of the recipe


def test_the_first_config_names_every_option_with_its_default():
    text = (CONFIGS / "lora.yaml").read_text(encoding="utf-8")
    for name in REQUIRED:
        line = next(line for line in text.splitlines() if re.match(rf" *#? *{name.rpartition('.')[2]}: ", line))
        assert "required" in line, line
    documented = yaml.safe_load(text.replace("  # lengths: 32k ", "  lengths: 32k "))
    expected = words().to_dict()
    assert list(documented) == list(expected)
    for section in SECTIONS:
        assert list(documented[section]) == list(expected[section]), section
        for name, value in expected[section].items():
            if f"{section}.{name}" not in REQUIRED:
                assert documented[section][name] == value, f"{section}.{name}"
                assert isinstance(value, bool) == isinstance(documented[section][name], bool), f"{section}.{name}"


@every_config
def test_its_smoke_run_keeps_the_method_and_is_small(path):
    parsed = read([path], base=BASE)
    small = read(base=smoke_options(parsed))
    method = parsed.patch.method
    if method is not None and "@" in method:  # two tables switch where the bundled checkpoint does
        method = f"{method.partition('@')[0]}@256"
    assert small.patch.method == method and small.lora == parsed.lora
    assert small.data.positions == parsed.data.positions and len(small.stages) <= len(parsed.stages)
    assert small.model.name in ("llama", "gemma3") and small.data.source == "builtin"
    assert small.train.steps <= 4 and small.target_length == 1024 and small.output != parsed.output
    assert plan_stages(small)
