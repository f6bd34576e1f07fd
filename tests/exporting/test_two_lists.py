"""Patches of two tables as folders with two lists of the type longrope."""

from __future__ import annotations

import json

import pytest
import torch
from tiny import ids, logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.exporting import export
from rope_patch.exporting.audit import audit
from rope_patch.exporting.flags import flags

METHOD = "abf:factor=8@64"


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_plain_transformers_reads_both_tables(folder, tmp_path):
    written = export(folder, tmp_path / "out", to="hf", form="two-lists", method=METHOD, target_length=256)
    assert written["tables"][0]["rope_type"] == "longrope"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ours = rope_patch.load(folder, METHOD, target_length=256)
    for size in (10, 64, 65, 200):
        torch.testing.assert_close(logits(plain, ids(size)), logits(ours, ids(size)), atol=1e-5, rtol=0)
    assert (logits(plain, ids(64)) - logits(rope_patch.load(folder, "abf:factor=8"), ids(64))).abs().max() > 1e-4


def test_a_patched_folder_is_exported_too(folder, tmp_path):
    rope_patch.save(rope_patch.load(folder, METHOD, target_length=256), tmp_path / "patched")
    export(tmp_path / "patched", tmp_path / "out", to="hf", form="two-lists")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_parameters"]["short_factor"] != config["rope_parameters"]["long_factor"]
    assert config["rope_parameters"]["original_max_position_embeddings"] == 64
    assert config["max_position_embeddings"] == 256
    assert "rope_patch" not in config and config["rope_scaling"] == config["rope_parameters"]


def test_engines_that_were_not_run_on_two_lists_are_unverified(folder, tmp_path):
    written = export(folder, tmp_path / "out", to="vllm", form="two-lists", method=METHOD, target_length=256)
    assert written["checked_against"] == "unverified"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "yarn:factor=4@64"}, r"share one factor on cos and sin, .* 1, the long one 1\.13863"),
        ({"method": "abf"}, "is for a patch with a short and a long table"),
        ({"method": METHOD, "to": "gguf"}, "a GGUF file holds one table"),
    ],
    ids=str,
)
def test_what_two_lists_cannot_say_is_refused(folder, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        export(folder, tmp_path / "out", **{"to": "hf", "form": "two-lists"} | options)
    assert not (tmp_path / "out").exists()


def test_another_form_says_that_the_short_table_is_left_out(folder, tmp_path):
    written = export(folder, tmp_path / "out", to="hf", method=METHOD, target_length=256)
    assert any("other programs use the long table for all texts" in note for note in written["notes"])
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), ids(30)),
        logits(rope_patch.load(folder, "abf:factor=8", target_length=256), ids(30)),
    )


def test_audit_and_flags_say_that_other_programs_have_the_long_table_alone(folder, tmp_path):
    rope_patch.save(rope_patch.load(folder, METHOD, target_length=256), tmp_path / "patched")
    expected = "the method has two tables, one of them for texts of up to 64 tokens; other programs use the long table "
    expected += "for all texts"
    assert expected in audit(tmp_path / "patched").notes
    assert expected in flags(folder, METHOD, "vllm", target_length=256).notes
