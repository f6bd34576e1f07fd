"""What a user writes becomes options, or one line that says what is wrong."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.commands import fail, invoke
from support.fresh import run_code

import rope_patch
from rope_patch.cli.parsing import parse_words
from rope_patch.options.evaluation import CompareOptions, EvalSpec
from rope_patch.options.fields import OptionSet, contained, flag, path, word
from rope_patch.options.finetune import FinetuneOptions
from rope_patch.options.shared import Machine
from rope_patch.options.yaml_and_json import stated


@dataclass(frozen=True)
class RunOptions(OptionSet):
    """OptionSet of a run, which files may hold."""

    model: str = word("The model.", metavar="MODEL", positional=True)
    evaluation: EvalSpec = contained(EvalSpec)
    config: tuple[Path, ...] = path("Files.", (), short=("-c", "--recipe"), repeated=True)
    machine: Machine = contained(Machine, section=True)
    train: bool = flag("Train.")
    report: bool = flag("Report.", True)


@dataclass(frozen=True)
class RecipeOptions(OptionSet):
    """Options of a recipe, whose files are arguments."""

    evaluation: EvalSpec = contained(EvalSpec)
    config: tuple[str, ...] = word("Files.", (), metavar="FILE.yaml | KEY=VALUE", positional=True, repeated=True)
    machine: Machine = contained(Machine, section=True)
    train: bool = flag("Train.")
    model: str | None = word("The model.", None)


COMPARE = ("./llama", "--methods", "default yarn", "--lengths", "1k")


def test_lists_are_one_word_and_lengths_may_be_in_thousands():
    options = parse_words(
        CompareOptions, ["m", "--methods", "default,yarn:factor=4", "--lengths", "8k 1000", "--chunk=2k"]
    )
    assert options.methods == ("default", "yarn:factor=4")
    assert options.evaluation == EvalSpec([1000, 8192], chunk=2048)


def test_flags_and_null():
    options = parse_words(CompareOptions, [*COMPARE, "--no-report", "--json", "--haystack", "null"])
    assert (options.report, options.as_json, options.evaluation.haystack) == (False, True, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*COMPARE, "--lenghts", "1k"), "unknown option --lenghts. Did you mean '--lengths'?"),
        (COMPARE[:3], "missing --lengths TOKENS: "),
        ((*COMPARE, "--chunk"), "--chunk needs a value"),
        ((*COMPARE, "--chunk", "8kk"), "--chunk: a length is a number of tokens such as 4096 or 4k, got '8kk'"),
        ((*COMPARE, "--samples", "many"), "samples must be a whole number, got 'many'"),
        ((*COMPARE, "--samples", "0"), "samples must be >= 1, got 0"),
        ((*COMPARE, "--chat-template", "yes"), "chat_template must be one of auto, on, off, got 'yes'"),
        ((*COMPARE, "other"), "unexpected argument 'other'"),
        ((*COMPARE, "--chunk", "8k", "--chunk", "4k"), "--chunk is given twice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_option_is_one_line(words, message):
    result = invoke("compare", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_a_parameter_with_dashes_and_a_method_in_capitals_are_told_how_to_write_them():
    assert "as in factor=4" in invoke("apply", "llama", "yarn", "--factor", "4", "-o", "out").stderr
    with pytest.raises(ValueError, match="Did you mean 'yarn'"):
        rope_patch.parse("YaRN")


def test_dashes_make_no_two_options_alike():
    assert invoke("kv-check", "--budget", "20s").stderr.startswith("error: unknown option --budget. rope-patch")


def test_what_finetune_misses_is_written_as_on_its_pages():
    line = "error: missing model.name=MODEL, train.max_length=TOKENS, output=FOLDER: "
    assert invoke("finetune").stderr.startswith(line)


def test_an_unknown_command_leads_to_the_nearest():
    assert "Did you mean 'compare'?" in fail("compere")


def test_the_module_is_the_command():
    ran = subprocess.run([sys.executable, "-m", "rope_patch", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["rope-patch", rope_patch.__version__]


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_without_a_command_all_are_listed(words):
    assert "  compare " in invoke(*words).stdout


def test_help_has_each_option_with_its_default():
    text = invoke("compare", "--help").stdout
    assert text.startswith("usage: rope-patch compare [options] MODEL\n\nCompare methods on one model")
    assert "(default: 16k)" in text and "--report, --no-report" in text and "{" not in text and "None" not in text


# --- files and key=value


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(
        "model: ./llama\nlengths: [1k, 2048]\nsamples: 2\ntrain: true\nchunk: 64\nmachine:\n  threads: 2\n"
    )
    (tmp_path / "two.yaml").write_text("samples: 3\nchat_template: off\nchunk: null\nmachine: {dtype: float32}\n")


def test_files_stack_and_flags_win(files):
    options = parse_words(RunOptions, ["-c", "one.yaml", "--samples", "5", "--recipe=two.yaml"])
    assert options.model == "./llama" and options.train and options.report
    assert options.evaluation == EvalSpec([1024, 2048], samples=5, chat_template="off")
    assert options.machine == Machine(dtype="float32", threads=2)


def test_positional_files_and_keys_apply_in_their_order(files):
    options = parse_words(
        RecipeOptions,
        ["samples=7", "--train", "one.yaml", "lengths=8k, 64", "two.yaml", "seed=3", "machine.threads=4"],
    )
    assert options.evaluation == EvalSpec([64, 8192], samples=3, seed=3, chat_template="off")
    assert options.train and options.machine == Machine(dtype="float32", threads=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [("samples: 2\nsamples: 3\n", "'samples' is stated twice"), ("a: " + 3000 * "[", "deep.yaml is no YAML")],
)
def test_a_file_with_a_key_twice_or_no_end_is_refused_by_name(text, message, files):
    Path("deep.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_words(RunOptions, ["./llama", "-c", "deep.yaml"])


def test_a_value_that_is_nested_thousands_deep_is_refused_by_name():
    with pytest.raises(ValueError, match=r"lora\.r is nested"):
        list(stated(FinetuneOptions, {"lora.r": 3000 * "[" + 3000 * "]"}))


def test_an_argument_that_is_written_replaces_that_of_a_file(files):
    assert parse_words(RunOptions, ["other", "-c", "one.yaml"]).model == "other"


def test_a_value_behind_a_flag_is_no_key(files):
    assert parse_words(RunOptions, ["-c", "one.yaml", "--text", "samples=3"]).evaluation.text == "samples=3"


def test_a_reader_that_ends_is_no_error():
    """As with ``| head``: rich then ends the process by itself."""
    code = """if True:
        import os, sys
        from rope_patch.cli import app
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        app.main()
    """
    done = run_code(code, "kv-check", "--list")
    assert (done.returncode, done.stderr) == (1, "")
