"""Options that several commands share mean the same in each, and as much as in Python."""

import json
import shutil

import pytest
import torch
from support.commands import MEASURE, fail, run
from support.tiny import LLAMA, tiny_model

import rope_patch
from rope_patch.checkpoints.source_files import on_device
from rope_patch.cli.loading import check_device, cpu_type, load_model
from rope_patch.options.shared import Machine

# --- the machine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "arguments"),
    [("cpu", {}), ("cpu:0", {}), ("cuda:1", {"device_map": "cuda:1"}), ("balanced", {"device_map": "balanced"})],
)
def test_weights_are_sent_to_a_device_but_not_to_a_cpu(device, arguments):
    assert on_device(device) == arguments
    if device != "balanced":
        assert on_device(torch.device(device)).keys() == arguments.keys()


@pytest.mark.parametrize(
    ("stored", "architecture", "has", "expected"),
    [
        (torch.bfloat16, "x86_64", "avx512_bf16", torch.bfloat16),
        (torch.bfloat16, "x86_64", "avx512_fp16", torch.float32),
        (torch.float16, "x86_64", "avx512_fp16", torch.float16),
        (torch.bfloat16, "arm64", "neon", torch.bfloat16),  # not known: as the checkpoint says
        (torch.float32, "x86_64", "avx512_bf16", torch.float32),
    ],
)
def test_auto_widens_16_bits_that_an_x86_cpu_has_no_instructions_for(stored, architecture, has, expected):
    assert cpu_type(stored, {"architecture": architecture, "avx512_f": True, has: True}) == expected


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it is about machines without a GPU")
def test_a_data_type_that_is_not_the_checkpoints_is_said(tmp_path, capsys):
    tiny_model().half().save_pretrained(tmp_path)
    dtype = next(load_model(str(tmp_path)).parameters()).dtype
    assert dtype == cpu_type(torch.float16, torch.cpu.get_capabilities())
    said = "read in float32, which this CPU computes faster than the checkpoint's float16" in capsys.readouterr().err
    assert said == (dtype == torch.float32)
    assert next(load_model(str(tmp_path), Machine(dtype="float16")).parameters()).dtype == torch.float16


@pytest.mark.skipif(torch.accelerator.is_available(), reason="it is about machines without a GPU")
def test_balanced_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="no device 'balanced': torch sees no GPU"):
        check_device("balanced")


# --- the patch -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    """The bundled checkpoint with a table that transformers recomputes as texts grow."""
    folder = tmp_path_factory.mktemp("dynamic") / "model"
    shutil.copytree(LLAMA, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def frozen(folder):
    return rope_patch.load(folder, "default", freeze_at=1024)


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (("compare", "--methods", "default", *MEASURE), "comparison.json"),
        (("kv-check", "--formats", "int8-token", *MEASURE), "kv-check.json"),
        (
            ("analyze", "--method", "default", "--tokens", "64", "--window", "32", "--p", "", "--no-report"),
            "analysis.json",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_dynamic_table_is_refused_unless_it_is_frozen(dynamic, tmp_path, words, file):
    command, *rest = words
    out = tmp_path / "out"
    assert "freeze" in fail(command, dynamic, *rest, "-o", out)
    run(command, dynamic, *rest, "-o", out, "--freeze-at", "1k")
    text = (out / file).read_text()
    (table,) = rope_patch.verify(frozen(dynamic)).record.tables.values()
    assert table.hash in text or f"{table.inv_freq[-1]}\n" in text


def test_export_freezes_a_table_and_patches_the_layer_type_that_it_is_told(dynamic, tmp_path):
    run("export", dynamic, "--to", "hf", "--method", "default", "--freeze-at", "1k", "-o", tmp_path / "frozen")
    exported = rope_patch.load(tmp_path / "frozen")
    assert rope_patch.verify(exported).record.tables == rope_patch.verify(frozen(dynamic)).tables
    tiny_model("gemma3").save_pretrained(tmp_path / "mixed")
    words = ("--to", "hf", "--method", "pi:factor=4", "--layer-type", "sliding_attention")
    run("export", tmp_path / "mixed", *words, "-o", tmp_path / "out")
    record = rope_patch.verify(rope_patch.load(tmp_path / "out")).record
    assert record.layer_types == ("sliding_attention",)
