"""The training recipe of the bundled checkpoints: a short run of all of it, which takes a minute or more."""

import json
import re
import runpy
import sys
import sysconfig

import pytest
import torch
from support.reference_recipe import SCRIPT, recipe
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def short_library(tmp_path, monkeypatch):
    """A standard library of one file, beside the topics of the reference: measuring on all of it takes 15 s."""
    (tmp_path / "one.py").write_text("x = 1\n" * 50)
    real = sysconfig.get_path

    def get_path(name, *scheme):
        if name == "stdlib":
            return str(tmp_path)
        return real(name, *scheme)

    monkeypatch.setattr(sysconfig, "get_path", get_path)


@pytest.mark.full
@pytest.mark.usefixtures("short_library")
def test_smoke_run_writes_a_folder_that_loads(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "gemma3"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "gemma3", "--scaled", "linear", "-o", str(folder), "--smoke"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    figures = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "def f(x):\n\treturn  'déjà vu' + \"零\"  # 3.14 😀\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"][1:], clean_up_tokenization_spaces=False) == text
    assert tokenizer.model_max_length == model.config.max_position_embeddings == 1024
    log = json.loads((folder / "training_log.json").read_text())
    assert [entry["stage"] for entry in log] == [stage.name for stage in recipe.SCALED_CURRICULUM]
    card = (folder / "README.md").read_text()
    assert json.loads(re.search(r"```json\n(.*?)```", card, re.DOTALL)[1]) == figures
    assert f"python recipes/pretrain_reference.py gemma3 --scaled linear -o {folder} --smoke" in card
    full, sliding = (model.config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    assert (full["rope_type"], full["factor"], sliding["rope_type"]) == ("linear", 4.0, "default")
    assert figures["heldout_perplexity"]["0-1024"] < 100, "it goes on from trained weights"
