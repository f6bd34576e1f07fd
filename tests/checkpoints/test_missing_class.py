"""Patches by a method whose class is defined in a user's script: what is left of them where it is not."""

from __future__ import annotations

import json
import logging
import runpy
import sys

import pytest
import torch
from support.forks import forked
from support.tiny import ids, logits

import rope_patch
from rope_patch import METHODS
from rope_patch.patching.locate import locate
from rope_patch.patching.record import PatchRecord

SCRIPT = """
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from support.tiny import ids, logits, tiny_model

import rope_patch
from rope_patch.methods import Method


@dataclass(frozen=True)
class Bent(Method, name="of_a_script"):
    by: float = 3.0
    other: float | None = None

    def inv_freq(self, table):
        return table.inv_freq / torch.linspace(1, self.by, table.pairs)

    def scaling(self, table):
        return 1.1


@dataclass(frozen=True)
class Divided(Method, name="with_an_encoding"):
    by: float = 3.0

    def inv_freq(self, table):
        return table.inv_freq / self.by

    def rope_parameters(self, table):
        return {"rope_type": "linear", "rope_theta": table.rope_theta, "factor": self.by}


out = Path(sys.argv[1])
for name, method, family in (
    ("plain", "of_a_script:by=5", "llama"),
    ("encoded", "with_an_encoding", "llama"),
    ("chain", "of_a_script+p_rope:p=0.5", "llama"),
    ("layers", "of_a_script", "gemma3"),
):
    model = tiny_model(family)
    rope_patch.apply(model, method)
    rope_patch.save(model, out / name)
    torch.save(logits(model, ids()), out / name / "logits.pt")

base = tiny_model("llama")
base.save_pretrained(out / "base")
base = rope_patch.load(out / "base", "of_a_script:by=5")
tuned = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
rope_patch.save(tuned, out / "adapter")
torch.save(logits(tuned, ids()), out / "adapter" / "logits.pt")
"""

NAMES = ("plain", "encoded", "chain", "layers")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """What a script of another process saved."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "script.py").write_text(SCRIPT)

    def script():
        sys.argv = ["script.py", str(folder)]
        runpy.run_path(str(folder / "script.py"), run_name="__main__")

    assert forked(script) == 0
    assert "of_a_script" not in METHODS and "with_an_encoding" not in METHODS
    return folder


@pytest.fixture
def warnings(caplog):
    """Return the warnings that the test has logged; those of earlier tests are logged again."""
    logging.Logger.warning_once.cache_clear()
    return lambda: [record.message for record in caplog.records if "is not defined here" in record.message]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_loads_with_the_tables_of_its_record(root, name, warnings):
    model = rope_patch.load(root / name).eval()
    record = locate(model).record
    for table in locate(model).module.tables.values():
        recorded = record.tables[table.layer_type or "all"]
        assert torch.equal(table.inv_freq, torch.tensor(recorded.inv_freq))
        assert table.attention_scaling == recorded.attention_scaling
    assert torch.equal(logits(model, ids()), torch.load(root / name / "logits.pt"))
    assert len(warnings()) == 1
    assert "tables are taken from the patch record" in warnings()[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_and_its_model_verify(root, name):
    assert rope_patch.verify(root / name).record == rope_patch.verify(rope_patch.load(root / name)).record


def test_saving_again_keeps_the_record_and_the_config(root, tmp_path):
    for name in NAMES:
        rope_patch.save(rope_patch.load(root / name), tmp_path / name)
        first, second = (json.loads((folder / name / "config.json").read_text()) for folder in (root, tmp_path))
        assert first == second


def test_inspect_says_that_the_class_is_missing(root):
    shown = str(rope_patch.inspect(root / "chain"))
    assert "patched, of_a_script:by=3+p_rope:p=0.5" in shown
    assert "note: the class of the method 'of_a_script' is not defined here" in shown


def test_an_adapter_loads_with_the_table_of_its_record(root, warnings):
    model = rope_patch.load(root / "adapter").eval()
    assert torch.equal(logits(model, ids()), torch.load(root / "adapter" / "logits.pt"))
    assert len(warnings()) == 1
    assert rope_patch.verify(root / "adapter").method == "of_a_script:by=5"


def test_the_patch_is_undone_and_replaced(root):
    model = rope_patch.load(root / "plain")
    rope_patch.apply(model, "pi:factor=2", replace=True)
    assert rope_patch.verify(model).method == "pi:factor=2"
    other = rope_patch.load(root / "plain")
    rope_patch.restore(other)
    assert rope_patch.inspect(other).tables[0].is_geometric


def test_a_method_goes_on_top_of_the_recorded_table(root):
    model = rope_patch.load(root / "plain")
    before = rope_patch.inspect(model).tables[0].inv_freq
    rope_patch.apply(model, (locate(model).record.to_method(), "p_rope:p=0.5"), replace=True)
    after = rope_patch.inspect(model).tables[0].inv_freq
    half = len(after) // 2
    assert torch.equal(after[:half], before[:half]) and not after[half:].any()


def test_a_broken_step_beside_a_missing_one_is_still_an_error(root):
    data = locate(rope_patch.load(root / "chain")).record.to_dict()
    data["method"] = {"method": "chain", "steps": [{"by": 1.0}, {"method": "of_a_script"}]}
    with pytest.raises(ValueError, match="rope_patch"):
        PatchRecord.from_dict(data)
