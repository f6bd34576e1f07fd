"""Options of a training run: what goes over what, what is refused in which words, and every YAML file of the recipe."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tiny import tiny_model

import rope_patch
from rope_patch.cli.finetune import smoke_options
from rope_patch.evaluation.tasks import TASKS
from rope_patch.methods import as_method
from rope_patch.training.estimate import describe
from rope_patch.training.models import prepare
from rope_patch.training.options import DataOptions, ModelOptions
from rope_patch.training.reading import REQUIRED, SECTIONS, read
from rope_patch.training.recipe import RecipeOptions
from rope_patch.training.setup import collator
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


def refused(message, *given, files=(), error=ValueError):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        read(files, given, BASE)


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


def test_two_reads_share_nothing():
    first, second = words(), words()
    first.evaluation.depths.append(2.0)
    assert second.evaluation.depths == words().evaluation.depths == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_an_empty_file_and_an_empty_section_change_nothing(file):
    assert read([file("# nothing\n"), file("train:\n#  steps: 3\n", "b.yaml")], base=BASE) == words()


def test_numbers_are_read_as_people_write_them(file):
    assert read([file("train:\n  learning_rate: 1e-4\n  warmup: 3\n")], base=BASE).train.learning_rate == 1e-4
    assert words("train.learning_rate=1e-4").train.learning_rate == 1e-4
    assert words("data.lengths=1k").stages == words("data.lengths=1024").stages == ((1024, 1.0),)
    assert words("patch.target_length=4096").target_length == words("patch.target_length=4k").target_length == 4096
    assert words("evaluation.lengths=4096").evaluation_lengths == (4096,)
    assert read([file("evaluation: {lengths: 4096}")], base=BASE).evaluation_lengths == (4096,)
    assert words("evaluation.lengths=32k, 4k").evaluation_lengths == (4096, 32768)
    assert words("patch.target_length=2k").evaluation_lengths == (2048,)


def test_lists_and_names_of_projections():
    assert words("lora.target_modules=[q_proj,v_proj]").lora.target_modules == ["q_proj", "v_proj"]
    assert words("lora.target_modules=q_proj").lora.target_modules == "q_proj"
    assert words("patch.layer_types=[full_attention]").patch.layer_types == ["full_attention"]


@pytest.mark.parametrize(
    "text", ["1e10", "0123", "2023_11", "20231101.10", "yes", "off", "a: b", "[a]", "@x", "*x", "'a", "a #b", "a=b"]
)
def test_words_that_are_text_stay_as_they_were_typed(text):
    """YAML would make a number, a truth value or a list of a revision or a path."""
    parsed = words(f"model.revision={text}", f"data.source={text}", f"output={text}")
    assert (parsed.model.revision, parsed.data.source, parsed.output) == (text, text, text)
    assert words("model.revision=null").model.revision is None


# --- what is refused


TOP = "Known in the file: model, patch, lora, data, train, evaluation, output"
TRAIN = f"Known in train: {', '.join(f.name for f in dataclasses.fields(SECTIONS['train']))}"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stepps=3", f"unknown option 'stepps'. Did you mean 'train.steps'? {TOP}"),
        ("steps=3", f"unknown option 'steps'. Did you mean 'train.steps'? {TOP}"),
        ("train.stepps=3", f"unknown option 'train.stepps'. Did you mean 'train.steps'? {TRAIN}"),
        ("modle.name=x", f"unknown option 'modle'. Did you mean 'model.name'? {TOP}"),
        ("zzz=1", f"unknown option 'zzz'. {TOP}"),
        ("ouput=1", f"unknown option 'ouput'. Did you mean 'output'? {TOP}"),
        ("=3", f"unknown option ''. {TOP}"),
        ("train.steps", "expected key=value or a .yaml file, got 'train.steps'"),
        ("train=3", "train is a section of options, not a value: got 3"),
        ("train.steps=", "train.steps: Incompatible value 'None' for field of type 'int'"),
        ("train.steps=many", "train.steps: Value 'many' of type 'str' could not be converted to Integer"),
        ("train.steps=1.5", "train.steps: Value '1.5' of type 'float' could not be converted to Integer"),
        ("train.steps=true", "train.steps: Value 'True' of type 'bool' could not be converted to Integer"),
        ("train.steps={a: 1}", "train.steps: Value '{'a': 1}' of type 'DictConfig' could not be converted to Integer"),
        ("train.learning_rate=x", "train.learning_rate: Value 'x' of type 'str' could not be converted to Float"),
        ("train.liger=maybe", "train.liger: Value 'maybe' is not a valid bool (type str)"),
        ("model.dtype=int8", "model.dtype: Invalid value 'int8', expected one of ['bfloat16', 'float16', 'float32']"),
        (
            "data.lengths=1e3",
            "data.lengths: Value '1000.0' of type 'float' is incompatible with type hint 'Union[str, int]'",
        ),
        ("lora.rank=[", "lora.rank: no YAML value: while parsing a flow node"),
    ],
)
def test_bad_words_are_named(word, message):
    if message.endswith("flow node"):  # the parser goes on to say where
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            words(word)
    else:
        refused(message, word)


def test_bad_files_are_named(file, tmp_path):
    refused(f"no config file '{tmp_path / 'no.yaml'}'", files=[tmp_path / "no.yaml"], error=FileNotFoundError)
    refused(f"no config file '{tmp_path}'", files=[tmp_path], error=FileNotFoundError)
    path = file("- a\n- b\n")
    refused(f"{path} holds no options: expected sections such as 'model:'", files=[path])
    path = file("train: 3\n")
    refused(f"{path}: train is a section of options, not a value: got 3", files=[path])
    path = file("train:\n  stepps: 3\n")
    refused(f"{path}: unknown option 'train.stepps'. Did you mean 'train.steps'? {TRAIN}", files=[path])
    path = file("train:\n  steps: many\n")
    refused(f"{path}: train.steps: Value 'many' of type 'str' could not be converted to Integer", files=[path])
    path = file("data:\n  config: 20231101.10\n")
    refused(
        f"{path}: data.config must be text, and YAML reads 20231101.1 here: put it in quotes",
        files=[path],
    )
    assert read([file("data:\n  config: '20231101.10'\n")], base=BASE).data.config == "20231101.10"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("train: [1\n", 'while parsing a flow sequence in ".*", line 1, column 8'),
        ("train: {steps: 1\n\tbatch: 2}", "found a tab character"),
        ("train:\n  steps: 1\ntrain:\n  steps: 2\n", "found duplicate key train"),
        ("train: !!python/object/apply:os.abort []\n", "could not determine a constructor for the tag"),
        ("\x00", "control characters are not allowed"),
    ],
)
def test_what_is_no_yaml_is_said_with_its_place(file, text, where):
    path = file(text)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is no YAML: .*{where}") as caught:
        read([path], base=BASE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.name", "data.lengths", "output"])
def test_an_option_without_default_is_required(name):
    given = {"model.name": "llama", "data.lengths": "512", "output": "x"}
    del given[name]
    with pytest.raises(
        ValueError, match=f"^{re.escape(f'{name} is required: give {REQUIRED[name]}, here or in a YAML file')}$"
    ):
        read(overrides=[f"{key}={value}" for key, value in given.items()])


@pytest.mark.parametrize("text", ["${oc.env:HOME}", "${model.name}", "${nope}", "a${", "???"])
@pytest.mark.parametrize("key", ["output", "train.steps", "model.revision"])
def test_no_value_stands_for_another(file, key, text):
    """A file of someone else's could read the environment, and the card would print it."""
    section, _, last = key.rpartition(".")
    path = file(f"{section}:\n  {last}: '{text}'\n" if section else f"{last}: '{text}'\n")
    if text == "a${":  # no YAML to OmegaConf, but in a word that is text
        ways = [([], [f"{key}={text}"], key), ([path], [], f"{path} is no YAML")]
    else:
        expected_message = f"{key}: {text!r} would be replaced by another value: give that value itself"
        ways = [([], [f"{key}={text}"], expected_message), ([path], [], f"{path}: {expected_message}")]
    for files, typed, message in ways:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
            read(files, typed, BASE)
        assert "\n" not in str(caught.value)


def test_a_list_that_stands_for_another_value_is_refused(file):
    path = file("lora:\n  target_modules: ['${model.name}']\n")
    refused(
        f"{path}: lora.target_modules: '${{model.name}}' would be replaced by another value: give that value itself",
        files=[path],
    )


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("patch.freeze_at=0", "patch.freeze_at must be >= 1, got 0"),
        ("lora.rank=-1", "lora.rank must be >= 0, got -1"),
        ("lora.alpha=0", "lora.alpha must be >= 1, got 0"),
        ("lora.dropout=1.5", "lora.dropout must be in [0, 1], got 1.5"),
        ("data.chunks=0", "data.chunks must be >= 1, got 0"),
        ("data.retrieval=-0.1", "data.retrieval must be in [0, 1], got -0.1"),
        ("data.retrieval=nan", "data.retrieval must be finite, got nan"),
        ("data.answer_weight=-1", "data.answer_weight must be >= 0, got -1"),
        ("data.answer_weight=.inf", "data.answer_weight must be finite, got inf"),
        ("train.steps=0", "train.steps must be >= 1, got 0"),
        ("train.batch=0", "train.batch must be >= 1, got 0"),
        ("train.accumulate=0", "train.accumulate must be >= 1, got 0"),
        ("train.learning_rate=0", "train.learning_rate must be > 0, got 0.0"),
        ("train.learning_rate=.nan", "train.learning_rate must be finite, got nan"),
        ("train.warmup=-1", "train.warmup must be >= 0, got -1"),
        ("train.warmup=.nan", "train.warmup must be finite, got nan"),
        ("train.weight_decay=-1", "train.weight_decay must be >= 0, got -1"),
        ("train.max_grad_norm=-1", "train.max_grad_norm must be >= 0, got -1"),
        ("train.save_every=0", "train.save_every must be >= 1, got 0"),
        ("train.keep=0", "train.keep must be >= 1, got 0"),
        ("train.log_every=0", "train.log_every must be >= 1, got 0"),
        ("evaluation.every=-1", "evaluation.every must be >= 0, got -1"),
        ("evaluation.windows=-1", "evaluation.windows must be >= 0, got -1"),
        ("evaluation.patience=-1", "evaluation.patience must be >= 0, got -1"),
        ("evaluation.samples=0", "evaluation: samples must be >= 1, got 0"),
        ("evaluation.chunk=0", "evaluation: chunk must be >= 1 tokens, got 0"),
        ("evaluation.depths=[]", "evaluation: depths is empty"),
        ("evaluation.depths=[0.5,1.5]", "evaluation: depths must be in [0, 1], got [0.5, 1.5]"),
        ("evaluation.depths=[0.5,0.5]", "evaluation: depths must differ from each other, got [0.5, 0.5]"),
        (
            "evaluation.lengths=4k four",
            "evaluation: lengths: a length is a number of tokens such as 4096 or 4k, got 'four'",
        ),
        ("evaluation.lengths=4k 4096", "evaluation: lengths must differ from each other, got [4096, 4096]"),
        ("evaluation.lengths= ", "evaluation: lengths is empty"),
        (
            "evaluation.task=haystack",
            f"evaluation: unknown task 'haystack' in mode 'single'. Known: {', '.join(TASKS)}",
        ),
        ("patch.target_length=x", "patch.target_length: a length is a number of tokens such as 4096 or 4k, got 'x'"),
        (
            "patch.target_length=256",
            "rows of 512 tokens are longer than patch.target_length=256, the context that the model is patched for: "
            "give shorter data.lengths or a longer patch.target_length",
        ),
        ("patch.method=yarn:factor=x", "factor must be a number, got 'x'"),
        ("data.positions=pose", "data.positions=pose needs patch.target_length: positions are drawn from below it"),
        (
            "data.positions=randpos",
            "data.positions=randpos needs patch.target_length: positions are drawn from below it",
        ),
        ("evaluation.patience=2", "evaluation.patience needs evaluation.every: without it only the end is evaluated"),
    ],
)
def test_values_out_of_range_are_named(word, message):
    refused(message, word)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["data.positions=pose", "patch.target_length=1k", "data.boundaries=apart"],
            "data.positions=pose needs data.boundaries=join or whole, not apart",
        ),
        (
            ["data.positions=pose", "patch.target_length=1k", "data.lengths=8", "data.chunks=9"],
            "data.chunks=9 is more than the tokens of a row, 8",
        ),
        (
            ["lora.rank=0", "model.quantization=nf4"],
            "lora.rank=0 trains every weight: that excludes model.quantization, and lora.long_lora adds nothing",
        ),
        (
            ["lora.long_lora=true", "model.dtype=float16"],
            "lora.long_lora trains the model's own weights, and float16 would round their small updates away: set "
            "model.dtype=float32 (train.precision still sets the arithmetic)",
        ),
        (
            ["lora.rank=0"],
            "lora.rank=0 trains the model's own weights, and bfloat16 would round their small updates away: set "
            "model.dtype=float32 (train.precision still sets the arithmetic)",
        ),
        (
            ["lora.rank=0", "lora.long_lora=true"],
            "lora.rank=0 trains every weight: that excludes model.quantization, and lora.long_lora adds nothing",
        ),
        (
            ["evaluation.every=100", "train.save_every=150"],
            "train.save_every=150 must equal evaluation.every=100, or be left out: the checkpoint with the best "
            "evaluation can only be kept if it is saved",
        ),
        (
            ["evaluation.mode=multikey", "evaluation.task=vt"],
            "evaluation: task 'vt' has no mode 'multikey'. Tasks that have it: json_kv, niah, niah_multikey_2, "
            "niah_multikey_3, passage_retrieval, passkey, qa1, qa2, qa3",
        ),
        (
            ["data.retrieval=0.1", "data.task=needle"],
            f"data.task: unknown task 'needle' in mode 'single'. Known: {', '.join(TASKS)}",
        ),
    ],
)
def test_values_that_exclude_each_other_are_named(given, message):
    refused(message, *given)


@pytest.mark.parametrize("section", ["model: {name: ''}", "data: {source: ''}", "output: ''"])
def test_empty_names_are_refused(file, section):
    """An empty path would be the folder one stands in."""
    with pytest.raises(ValueError, match=r"^[a-z.]+ is empty: leave it out, or give a value$"):
        read([file(section)], base=BASE)


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
        ("4k:0.25,16k:0.25,32k:0.5", ((4096, 0.25), (16384, 0.25), (32768, 0.5))),
        ("32K:0.5  8k", ((32768, 0.5), (8192, 0.5))),
        ("100:0.1 100:0.2 300", ((100, 0.1), (100, 0.2), (300, 0.7))),
        ("512:1", ((512, 1.0),)),
    ],
)
def test_schedules(lengths, stages):
    parsed = read(base={**BASE, "data": {"lengths": lengths}})
    assert [length for length, _ in parsed.stages] == [length for length, _ in stages]
    assert [share for _, share in parsed.stages] == pytest.approx([share for _, share in stages], abs=1e-12)
    assert parsed.target_length == max(length for length, _ in stages)


SHARES = "data.lengths: each share must be > 0, and together at most 1, got"
WHOLE = "data.lengths: the shares must add up to 1, got"


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("4k 8k", "data.lengths: all stages but the last need a share of the steps, '4k' has none"),
        ("4k:x 8k", "data.lengths: a stage is LENGTH or LENGTH:SHARE, got '4k:x'"),
        ("4k:0 8k", f"{SHARES} ['4k:0', '8k']"),
        ("4k:-1 8k", f"{SHARES} ['4k:-1', '8k']"),
        ("4k:1 8k", f"{SHARES} ['4k:1', '8k']"),
        ("4k:2 8k", f"{SHARES} ['4k:2', '8k']"),
        ("4k:nan 8k", f"{SHARES} ['4k:nan', '8k']"),
        ("4k:inf 8k", f"{SHARES} ['4k:inf', '8k']"),
        ("4k:0.7 8k:0.2 16k:0.1 32k", f"{SHARES} ['4k:0.7', '8k:0.2', '16k:0.1', '32k']"),  # 3e-17 are left
        ("4k:0.2 8k:0.2", f"{WHOLE} ['4k:0.2', '8k:0.2']: leave out the last one"),
        ("8k:0.5", f"{WHOLE} ['8k:0.5']: leave out the last one"),
        ("3k:0.5 8k", "data.lengths: 3072 does not divide the longest row, 8192"),
        ("1:0.5 8k", "data.lengths: a row must have at least 2 tokens, got 1"),
        ("0", "data.lengths: a row must have at least 2 tokens, got 0"),
        ("-4", "data.lengths: a length is a number of tokens such as 4096 or 4k, got '-4'"),
        ("4M", "data.lengths: a length is a number of tokens such as 4096 or 4k, got '4M'"),
        (" , ", "data.lengths is empty: give the length of a row, such as 32k"),
    ],
)
def test_schedules_that_make_no_sense_are_named(lengths, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read(base={**BASE, "data": {"lengths": lengths}})


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


def test_a_stage_without_a_whole_step_is_refused():
    options = words("data.lengths=64:0.01 128", "train.steps=10")
    with pytest.raises(ValueError, match=r"^data.lengths: the stage of 64 tokens has less than one of the 10 steps$"):
        plan_stages(options)


# --- there and back


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12).filter(
    lambda text: "${" not in text and text != "???"
)


@settings(deadline=None, max_examples=12)
@given(name=TEXT, output=TEXT, rate=st.floats(1e-9, 1e3), depths=st.lists(st.floats(0, 1), min_size=1, unique=True))
@example(name="1e10", output="null", rate=1e-4, depths=[0.0])
@example(name="yes", output="~", rate=1e-05, depths=[1e-5])
@example(name="2023_11", output="- a", rate=3.0, depths=[0.1])
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


def test_options_can_be_made_without_a_file():
    parsed = RecipeOptions(ModelOptions("llama"), data=DataOptions(lengths="512"), output="x")
    assert parsed == words()


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


def test_the_first_config_alone_does_not_choose_the_length_of_the_rows():
    with pytest.raises(ValueError, match=r"^data\.lengths is required: give the length of the rows to train on"):
        read([CONFIGS / "lora.yaml"])
    assert read([CONFIGS / "lora.yaml"], ["data.lengths=1k"]).target_length == 1024


@every_config
def test_a_config_reads_and_is_planned_from_here(path):
    """No hub is asked: tests run offline, see conftest."""
    parsed = read([path], base=BASE)
    own = OmegaConf.to_container(OmegaConf.load(path))
    assert own, "it changes something"
    if parsed.patch.method is not None:
        assert as_method(parsed.patch.method)
    plan = describe(parsed, 141)
    assert re.search(r"^memory of one GPU, predicted: [0-9.]+ GiB, fits into 141$", plan, re.MULTILINE), plan
    assert plan.startswith(parsed.to_yaml())


@every_config
def test_its_smoke_run_keeps_the_method_and_is_small(path):
    parsed = read([path], base=BASE)
    small = read(base=smoke_options(parsed))
    assert small.patch.method == parsed.patch.method and small.lora == parsed.lora
    assert small.data.positions == parsed.data.positions and len(small.stages) <= len(parsed.stages)
    assert small.model.name in ("llama", "gemma3") and small.data.source == "builtin"
    assert small.train.steps <= 4 and small.target_length == 1024 and small.output != parsed.output
    assert plan_stages(small)


PAIRS = [
    (path, other)
    for other in sorted(CONFIGS.glob("*.yaml"))
    for path in re.findall(r"recipes/configs/(\S+)\.yaml recipes/configs/\S+\.yaml", other.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("first", "second"), PAIRS, ids=lambda value: getattr(value, "stem", value))
def test_the_pairs_that_the_headers_name_go_together(first, second):
    parsed = read([CONFIGS / f"{first}.yaml", second])
    assert "fits into 141" in describe(parsed, 141)
    assert parsed.output == f"build/{first}"


def test_training_has_one_table():
    with pytest.raises(ValueError, match="one table"):
        read(overrides=["patch.method=yarn:factor=4@256"], base=BASE)
    model, options = tiny_model(), read(base=BASE)
    rope_patch.apply(model, "yarn:factor=4@64")
    with pytest.raises(ValueError, match="one table"):  # of a checkpoint that is patched already
        prepare(model, options)


def test_a_rising_range_of_positions_needs_positions_that_skip():
    tokenizer = SimpleNamespace(pad_token_id=0)
    rising = ["data.position_range=rising", "patch.target_length=1024"]
    with pytest.raises(ValueError, match="position_range"):
        read(overrides=rising, base=BASE)
    skipping = [*rising, "data.positions=randpos"]
    assert collator(read(overrides=skipping, base=BASE), tokenizer, 40).rows == 40
    assert collator(read(overrides=skipping[1:], base=BASE), tokenizer, 40).rows is None


@every_config
def test_the_header_names_the_file_itself(path):
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert f"recipes/configs/{path.name}" in header
