"""``rope-patch kv-check``: what it writes and prints, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import fail, invoke, run
from support.patches import config_of, read_json
from support.prompting import ENGLISH, TOKENIZER
from support.tiny import small

from rope_patch.kv_cache.schemes import PRESETS, Scheme
from rope_patch.kv_evaluation.calibration import own_scales, write_scales
from rope_patch.reports import kv as kv_report

NAME = "model.layers.1.self_attn.k_scale"
FORMATS = ["int4-token", "k=int2.token8;v=int8.token"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("kv") / "tiny<b>"
    small().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


def command(*arguments):
    return run("kv-check", *arguments)


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
    data = read_json(out / "kv-check.json")
    assert [(row["method"], row["format"]) for row in data["rows"]] == [
        (method, name) for method in ("default", "p_rope:p=0.5") for name in ("none", *FORMATS)
    ]
    assert data["text"] == "a.txt" and "3 windows of 56 tokens" in printed
    for sentence in data["summary"]:
        assert " ".join(sentence.split()) in " ".join(printed.split())
    before = (out / "finished.jsonl").read_bytes()
    again = command(folder, *given, "-o", out, "--no-report", "--json")
    assert json.loads(again) == data and (out / "finished.jsonl").read_bytes() == before


FP8 = ("--formats", "vllm:fp8", "--lengths", "40", "--windows", "1", "--tasks", "", "--no-report")


def formats_in(out):
    """The rows of a check: the text of each format, by its name."""
    return {row["format"]: row["format_text"] for row in read_json(out / "kv-check.json")["rows"]}


def test_scales_of_a_checkpoint_are_named_and_used(folder, tmp_path):
    base = Path(shutil.copytree(folder, tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.self_attn.k_scale"] = torch.tensor([0.25])
    weights["model.layers.1.self_attn.attn.v_scale"] = torch.tensor(0.5)
    weights["model.layers.1.self_attn.k_scale"] = torch.tensor([0.25, 0.5])  # of heads
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    assert "files hold: model.layers.0.self_attn.k_scale" in invoke("kv-check", base, *FP8, "-o", tmp_path).stderr
    assert formats_in(tmp_path) == {
        "none": "none",
        "vllm:fp8": "k=fp8;v=fp8",
        "vllm:fp8 with its own scales": "k=fp8;v=fp8;scales=0:0.25:1+1:1:0.5",
    }


def test_calibrated_scales_are_written_where_vllm_reads_them(folder, given, tmp_path):
    command(folder, *FP8, "--calibrate", given[-1], "-o", tmp_path)
    scales = Scheme.parse(formats_in(tmp_path)["vllm:fp8 calibrated"]).scales
    written = load_file(tmp_path / "vllm-fp8" / "scales.safetensors")
    assert written == {
        f"model.layers.{layer}.self_attn.{which}_scale": torch.tensor(scale)
        for layer, *both in scales
        for which, scale in zip("kv", both, strict=True)
    }
    config = config_of(tmp_path / "vllm-fp8")
    quantization = config.pop("quantization_config")
    assert config == config_of(folder)
    assert (quantization["quant_method"], quantization["kv_cache_scheme"]["num_bits"]) == ("compressed-tensors", 8)
    assert own_scales(tmp_path / "vllm-fp8") == tuple(map(pytest.approx, scales))
    index = read_json(tmp_path / "vllm-fp8" / "model.safetensors.index.json")["weight_map"]
    assert index.keys() - written.keys() == load_file(folder / "model.safetensors").keys()
    assert not (tmp_path / "vllm-fp8" / "model.safetensors").exists(), "transformers would read no other file"
    small().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    write_scales(tmp_path / "shards", tmp_path / "served", scales)
    index = read_json(tmp_path / "served" / "model.safetensors.index.json")["weight_map"]
    assert index["model.layers.1.self_attn.v_scale"] == "scales.safetensors" and len(index) > len(written)


def test_written_scales_replace_those_of_a_checkpoint_which_stay_as_they_are(tmp_path):
    """vLLM loads all files in the order of their names, so that the last tensor of a name counts."""
    small().save_pretrained(tmp_path / "plain")
    source = tmp_path / "plain"
    for name, scale in (("first", 0.5), ("second", 0.25)):
        write_scales(source, tmp_path / name, ((0, scale, 1.0), (1, scale, 1.0)))
        source = tmp_path / name
    shipped = load_file(source / "model-00001-of-00001.safetensors") | {NAME: torch.tensor(2.0)}
    (source / "model-00001-of-00001.safetensors").unlink()
    save_file(shipped, source / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    write_scales(source, tmp_path / "third", ((0, 0.125, 1.0), (1, 0.125, 1.0)))
    for name, scale in (("first", 0.5), ("second", 0.25), ("third", 0.125)):
        loaded = {}
        for path in sorted((tmp_path / name).glob("*.safetensors")):
            loaded |= load_file(path)
        assert loaded[NAME] == scale


def test_calibration_is_refused_where_it_cannot_be_written_or_means_nothing(folder, given, tmp_path):
    asked = ("--lengths", "40", "--calibrate", "builtin", "-o", tmp_path / "out")
    assert "add vllm:fp8" in fail("kv-check", folder, "--formats", "kivi-2", *asked)
    config = config_of(folder) | {"quantization_config": {"quant_method": "awq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "awq" in fail("kv-check", tmp_path, "--formats", "vllm:fp8", *asked)


def test_calibration_says_early_what_is_wrong_with_its_text_and_that_no_folder_is_written(folder, given, tmp_path):
    asked = ("kv-check", folder, *FP8, "-o", tmp_path / "out", "--calibrate")
    assert "no .txt" in fail(*asked, tmp_path)
    (tmp_path / "short.txt").write_text("a word")
    assert "(calibrate, --calibrate)" in invoke(*asked, tmp_path / "short.txt").stderr
    result = invoke(*asked, given[-1], "--methods", "p_rope:p=0.5")
    assert result.exit_code == 0 and "vllm-fp8 is not written" in result.stderr
    assert not (tmp_path / "out" / "vllm-fp8").exists()


def test_a_page_that_fails_costs_nothing(folder, tmp_path, monkeypatch):
    def without_figure(*_, **__):
        raise ValueError("no such figure")

    monkeypatch.setattr(kv_report, "page", without_figure)
    asked = ("--formats", "fp8", "--lengths", "40", "--windows", 2, "--samples", 1, "--depths", "0", "-o", tmp_path)
    result = invoke("kv-check", folder, *asked)
    assert "no such figure" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"finished.jsonl", "kv-check.json"}
    result = invoke("kv-check", folder, *asked, "--json")
    assert result.exit_code == 2 and json.loads(result.stdout)["spec"]["lengths"] == [40]


def test_help_and_list_name_every_preset():
    printed = command("--list")
    helped = " ".join(command("--help").replace("│", " ").split())
    for name, preset in PRESETS.items():
        assert name in printed and preset.text in printed and name in helped
    assert "4.25" in printed and "arXiv:2402.02750" in printed


@pytest.mark.parametrize("existing", ["file", "file/out", "out/kv-check.html/", "out/finished.jsonl/"])
def test_output_that_cannot_be_written_is_refused_before_loading(folder, given, tmp_path, monkeypatch, existing):
    monkeypatch.setattr("rope_patch.cli.kv_check.load_tokenizer", lambda *_: pytest.fail("a tokenizer was loaded"))
    if existing.endswith("/"):
        (tmp_path / existing).mkdir(parents=True)
    else:
        (tmp_path / "file").touch()
    out = tmp_path / ("out" if existing.endswith("/") else existing)
    message = {"file": "is a file", "file/out": "not a directory"}.get(existing, "is a folder: remove it")
    assert message in fail("kv-check", folder, *given, "-o", out)
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
        assert f"no device '{device}'" in fail(*asked)
    assert not list(tmp_path.iterdir())
