"""Commands take a GGUF file as MODEL: those that run it say what its weights are, those that write keep it a file."""

import json

import gguf
import pytest
from support.commands import MEASURE, fail, invoke, run
from support.gguf_files import quantized, write_toy
from support.prompting import TOKENIZER
from support.tiny import LLAMA, bundled_model, tiny_model


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The bundled Llama in Q8_0."""
    folder = tmp_path_factory.mktemp("gguf")
    plain = write_toy(bundled_model(), folder / "plain.gguf", TOKENIZER)
    return quantized(plain, folder / "model.gguf", "Q8_0")


def test_apply_writes_a_file_and_names_the_command_that_runs_it(file, tmp_path):
    out = tmp_path / "out.gguf"
    printed = run("apply", file, "yarn", "factor=4", "-o", out)
    assert printed.splitlines()[-1] == f"wrote {out}: llama-cli -m {out} -c 1024 runs it"
    fields = gguf.GGUFReader(out)
    assert fields.get_field("llama.rope.scaling.attn_factor") is not None
    assert fields.get_field("llama.context_length").contents() == 1024, "what llama-server lets a prompt have"
    assert run("doctor", out)
    based = run("apply", file, "abf", "factor=4", "-o", tmp_path / "abf.gguf")
    assert "the file states 256 tokens, and llama.cpp reads no more" in based


def test_wrong_files_and_places_are_named_in_one_line(file, tmp_path):
    (tmp_path / "text.gguf").write_text("no GGUF")
    (tmp_path / "taken.gguf").write_text("precious")
    for source, out, message in (
        ("text.gguf", "out.gguf", "is no GGUF file"),
        (file, "nowhere/out.gguf", "no folder"),
        (file, "out", "must be a file *.gguf"),
        (file, "taken.gguf", "--force"),
    ):
        line = fail("apply", tmp_path / source, "yarn:factor=4", "-o", tmp_path / out)
        assert line.count("\n") == 1 and message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["taken.gguf", "text.gguf"]
    assert (tmp_path / "taken.gguf").read_text() == "precious"


@pytest.mark.parametrize("command", ["doctor", "analyze", "compare", "kv-check", "plan"])
def test_a_missing_file_is_named_at_once_by_every_command(tmp_path, command):
    required = {
        "compare": ["--methods", "default", "--lengths", "64"],
        "kv-check": ["--formats", "int8", "--lengths", "64"],
        "plan": ["--length", "64"],
    }
    written = [] if command in ("doctor", "plan") else ["-o", tmp_path / "out"]
    line = fail(command, tmp_path / "m.gguf", *required.get(command, []), *written)
    assert line.splitlines()[-1] == f"error: no file {tmp_path / 'm.gguf'}" and not list(tmp_path.iterdir())


# --- commands that run the model


@pytest.mark.parametrize(
    ("words", "result"),
    [
        (("compare", "--methods", "default yarn:factor=2", *MEASURE), "comparison.json"),
        (("kv-check", "--formats", "int8", *MEASURE), "kv-check.json"),
        (("analyze", "--tokens", "128", "--p", "0.5", "--no-report"), "analysis.json"),
    ],
)
def test_what_measures_says_and_records_that_weights_are_dequantized(file, tmp_path, words, result):
    said = invoke(*words, file, "-o", tmp_path).stderr
    assert said.count(f"{file}: the weights are dequantized Q8_0\n") == 1
    assert json.loads((tmp_path / result).read_text())["environment"]["weights"] == "dequantized Q8_0"


def test_plan_reads_the_shape_of_a_file(file):
    of_file, of_folder = (json.loads(run("plan", source, "--length", "512", "--json")) for source in (file, LLAMA))
    assert of_file["parameters"] == of_folder["parameters"] and of_file["parts_bytes"] == of_folder["parts_bytes"]


def test_a_folder_is_not_written_under_the_name_of_a_gguf_file(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "folder")
    out = tmp_path / "out.gguf"
    line = fail("apply", tmp_path / "folder", "yarn:factor=4", "-o", out)
    assert "a folder is written" in line and "rope-patch export --to gguf" in line and not out.exists()
