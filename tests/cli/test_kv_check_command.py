"""``rope-patch kv-check``: what it writes and prints, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import invoke
from support.patches import lora
from support.prompting import ENGLISH, TOKENIZER
from support.report_pages import Page
from support.tiny import small

import rope_patch
from rope_patch.kv_cache.schemes import PRESETS
from rope_patch.reports import kv as kv_report

FORMATS = ["int4-token", "k=int2.token8;v=int8.token", "kivi-2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("kv") / "tiny<b>"
    small().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


def command(*arguments):
    result = invoke("kv-check", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "a.txt"
    path.write_text(ENGLISH)
    asked = ["--windows", "3", "--samples", "1", "--depths", "0,1", "--haystack", "noise"]
    methods = ("--methods", "default p_rope:p=0.5", "--lengths", "40 56")
    return ("--formats", " ".join(FORMATS), *methods, *asked, "--text", path)


def test_the_command_writes_what_it_says(folder, given, tmp_path):
    out = tmp_path / "deep" / "out"
    printed = command(folder, *given, "-o", out)
    written = {"finished.jsonl", "kv-check.html", "kv-check.json"}
    assert {path.name for path in out.iterdir()} == written
    data = json.loads((out / "kv-check.json").read_text())
    assert [(row["method"], row["format"]) for row in data["rows"]] == [
        (method, name) for method in ("default", "p_rope:p=0.5") for name in ("none", *FORMATS)
    ]
    assert data["text"] == "a.txt" and "3 windows of 56 tokens" in printed
    for sentence in data["summary"]:
        assert " ".join(sentence.split()) in " ".join(printed.split())
    before = (out / "finished.jsonl").read_bytes()
    again = command(folder, *given, "-o", out, "--no-report", "--json")
    assert json.loads(again) == data and (out / "finished.jsonl").read_bytes() == before


def test_scales_of_a_cache_are_said_to_be_left_out(folder, tmp_path):
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    asked = ("--formats", "vllm:fp8", "--lengths", "40", "--windows", "1", "--tasks", "", "--no-report")
    assert "scale 1" not in invoke("kv-check", base, *asked, "-o", tmp_path / "without").stderr
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.self_attn.k_scale"] = torch.tensor(0.02)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    said = invoke("kv-check", base, *asked, "-o", tmp_path / "with").stderr
    assert "scale 1: model.layers.0.self_attn.k_scale" in said


def test_a_page_that_fails_costs_nothing(folder, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ValueError("no such figure")

    monkeypatch.setattr(kv_report, "page", fail)
    asked = ("--formats", "fp8", "--lengths", "40", "--windows", 2, "--samples", 1, "--depths", "0", "-o", tmp_path)
    result = invoke("kv-check", folder, *asked)
    assert "no such figure" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"finished.jsonl", "kv-check.json"}
    result = invoke("kv-check", folder, *asked, "--json")
    assert result.exit_code == 2 and json.loads(result.stdout)["spec"]["lengths"] == [40]


def test_an_adapter_is_named_with_its_patch_and_one_is_singular(folder, tmp_path):
    rope_patch.save(lora(rope_patch.load(folder, "yarn:factor=4")), tmp_path / "tuned")
    asked = ("--formats", "kivi-2", "--lengths", "40", "--windows", 1, "--samples", 1, "--depths", "0")
    printed = command(tmp_path / "tuned", *asked, "-o", tmp_path / "out")
    data = json.loads((tmp_path / "out" / "kv-check.json").read_text())
    assert data["model"] == "tuned" and data["methods"]["default"]["patch"] == "yarn:factor=4"
    page_text = "".join(Page((tmp_path / "out" / "kv-check.html").read_text()).text)
    assert all("default: yarn:factor=4, as loaded" in text for text in (printed, page_text))
    assert "rounds nothing" in printed and "undecided" not in printed
    assert not re.search(r"\b1 (windows|samples|tokens|prompts)\b", printed + page_text)


def test_help_and_list_name_every_preset():
    printed = command("--list")
    helped = " ".join(command("--help").replace("│", " ").split())
    for name, preset in PRESETS.items():
        assert name in printed and preset.text in printed and name in helped
    assert "4.25" in printed and "arXiv:2402.02750" in printed


def assert_refused(arguments, message):
    """The command fails in one line, as for other words that are wrong."""
    result = invoke(*arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("existing", ["file", "file/out", "out/kv-check.html/", "out/finished.jsonl/"])
def test_output_that_cannot_be_written_is_refused_before_loading(folder, given, tmp_path, monkeypatch, existing):
    monkeypatch.setattr("rope_patch.cli.kv_check.load_tokenizer", lambda *_: pytest.fail("a tokenizer was loaded"))
    if existing.endswith("/"):
        (tmp_path / existing).mkdir(parents=True)
    else:
        (tmp_path / "file").touch()
    out = tmp_path / ("out" if existing.endswith("/") else existing)
    message = {"file": "is a file", "file/out": "not a directory"}.get(existing, "is a folder: remove it")
    assert_refused(("kv-check", folder, *given, "-o", out), message)
    assert len(list(tmp_path.rglob("*"))) == (2 if existing.endswith("/") else 1)


@pytest.mark.parametrize(
    "words",
    [
        ("analyze",),
        ("compare", "--methods", "default", "--lengths", "40"),
        ("kv-check", "--formats", "fp8", "--lengths", "40"),
    ],
    ids=lambda words: words[0],
)
def test_a_device_that_is_not_there_is_refused_before_loading(tmp_path, words):
    for device in ("cuda:99", "gpu", "meta"):
        asked = (words[0], tmp_path / "nowhere", *words[1:], "--device", device, "-o", tmp_path / "out")
        assert_refused(asked, f"no device '{device}'")
    assert not list(tmp_path.iterdir())
