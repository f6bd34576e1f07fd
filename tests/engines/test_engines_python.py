"""vLLM's and SGLang's own Python, where it is installed, builds our tables from our folders; no kernel runs here.

`pip install --no-deps vllm sglang triton` in an environment beside this one, then what they say they lack. For
transformers 4: `pip install --no-deps --target FOLDER transformers==4.57.1 huggingface_hub==0.36.0 tokenizers==0.22.1`,
and TRANSFORMERS_4 set to that folder. For MLX: `pip install "mlx[cpu]" mlx-lm==0.32.2` in an
environment of its own, and MLX set to its Python.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.program_options import flags
from support.tiny import ARCHITECTURES, ids, logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.engines import export
from rope_patch.engines.verified_versions import ENGINES

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="not in the source distribution"),
    pytest.mark.filterwarnings("ignore"),  # theirs
]
METHODS = ["pi:factor=4", "yarn:factor=4", "p_rope:p=0.5", "yarn:factor=4+p_rope:p=0.5", "learned"]
VERSION_4 = [*(name for name in ARCHITECTURES if name not in ("phi3", "gemma4")), "phi", "stablelm", "gpt_neox"]
SHOWN = FOLDER / "results" / "engine_tables.json"


@pytest.fixture(params=["vllm", "sglang"])
def tables(request, monkeypatch):
    """The benchmark's module, and an engine that is installed."""
    monkeypatch.syspath_prepend(FOLDER)
    if importlib.import_module("engine_code").version(request.param) is None:
        pytest.skip(f"{request.param} cannot be imported here")
    return importlib.import_module("engine_tables"), request.param


@pytest.mark.parametrize("method", ["pi:factor=4", "yarn:factor=4", "p_rope:p=0.5"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_flags_give_our_table_on_the_unchanged_folder(tables, family, method, tmp_path):
    module, engine = tables
    base = module.checkpoint(family, tmp_path / "base")
    written = flags(base, module.method_of(method, base), engine, target_length=1024)
    overrides = json.loads(shlex.split(written.lines[0])[1])
    theirs = module.engine_code.tables(engine, base, 1024, overrides)
    for table in written.tables:
        angles = torch.arange(1024).float()[:, None] * table.inv_freq
        ours = torch.cat((angles.cos(), angles.sin()), dim=-1) * table.attention_scaling
        assert float((theirs.get(table.layer_type, theirs.get(None)) - ours).abs().max()) <= 1e-6


def test_vllm_takes_the_adapter(tables, tmp_path):
    if tables[1] != "vllm":
        pytest.skip("vLLM's own check")
    from vllm.config.lora import LoRAConfig
    from vllm.lora.peft_helper import PEFTHelper

    tiny_model().save_pretrained(tmp_path / "base")
    tuned = get_peft_model(
        rope_patch.load(tmp_path / "base", "pi:factor=4"), LoraConfig(r=8, target_modules=["q_proj"])
    )
    rope_patch.save(tuned, tmp_path / "adapter")
    export(tmp_path / "adapter", tmp_path / "out", to="vllm", lora=True)
    allowed = LoRAConfig(max_lora_rank=8, max_loras=1)
    PEFTHelper.from_local_dir(str(tmp_path / "out" / "adapter"), 64).validate_legal(allowed)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": ["embed_tokens"]}))
    with pytest.raises(ValueError, match="modules_to_save"):  # which we refuse, too
        PEFTHelper.from_local_dir(str(tmp_path / "adapter"), 64).validate_legal(allowed)


@pytest.mark.skipif("TRANSFORMERS_4" not in os.environ, reason="needs transformers 4 in a folder of its own")
@pytest.mark.parametrize("family", VERSION_4)
def test_transformers_4_gives_equal_logits(family, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("engine_tables")
    base = tmp_path / "base"
    if family in ARCHITECTURES:  # version 4 leaves out the soft caps of Gemma 2 unless its attention is eager
        capless = {"attn_logit_softcapping": None} if family == "gemma2" else {}
        tiny_model(family, **capless).save_pretrained(base)
    else:
        module.checkpoint(family, base)
    tokens = ids() % 60 + 3
    save_file({"ids": tokens}, tmp_path / "ids.safetensors")
    expected_logits = {}
    for number, name in enumerate(module.METHODS):
        method = module.method_of(name, base)
        export(base, tmp_path / str(number), to="hf", method=method, target_length=256)
        model = AutoModelForCausalLM.from_pretrained(base)
        rope_patch.apply(model, method, target_length=256)
        expected_logits[str(number)] = logits(model, tokens)
    script = Path(__file__).parents[1] / "support" / "stock_reload.py"
    environment = os.environ | {"PYTHONPATH": os.environ["TRANSFORMERS_4"]}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), *expected_logits],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    loaded_logits = load_file(tmp_path / "stock.safetensors")
    for number, expected in expected_logits.items():
        assert torch.allclose(loaded_logits[number], expected, atol=1e-6), module.METHODS[int(number)]


@pytest.mark.skipif("MLX" not in os.environ, reason="needs the Python of an environment with mlx-lm")
def test_mlx_builds_the_tables_that_our_rules_say(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    module = importlib.import_module("reading_rules")
    folders = list(module.folders(tmp_path, ["llama", "qwen3", "gemma3_text", "phi3"]))
    asked = [os.environ["MLX"], str(FOLDER / "reading_rules.py"), "mlx", "--read", str(tmp_path)]
    read_there = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    verdicts = {folder.name: module.verdict("mlx", folder, read_there)["verdict"] for folder in folders}
    assert [name for name, verdict in verdicts.items() if verdict == "WRONG"] == []
    assert list(verdicts.values()).count("equal") > 150


@pytest.mark.skipif(not SHOWN.is_file(), reason="not in the source distribution")
def test_claims_are_those_of_the_report():
    """What ``engines.py`` says was checked is what the committed report shows, and every figure in it is small."""
    report = json.loads(SHOWN.read_text())
    for name in ("vllm", "sglang"):
        engine = ENGINES[name]
        assert report["environment"][name] == engine.version
        rows = [row for row in report["rows"] if row["engine"] == name]
        ran = {row["family"] for row in rows if row["verdict"] == "runs"}
        assert ran - engine.reads <= {"olmo3"}, "whose keys SGLang reads in a way of its own"
        assert engine.reads <= ran
        assert all(row["difference"] <= 1e-6 for row in rows if row["verdict"] == "runs")
        for row in rows:
            if row["verdict"] == "refused" and "nothing but rope_theta" in row["reason"]:
                assert row["plain_folder"] > 0.1 or row["method"].startswith("longrope:factor=4")
                assert (row["family"], None) in engine.base_only
