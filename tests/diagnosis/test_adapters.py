"""``doctor`` on adapters and on models that were merged from them."""

import shutil

import pytest
from support.patches import edit_json, lora, patched_model, read_json
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch import doctor


def found(diagnosis, name, state="differs"):
    """The checks of a name and state."""
    return [check for check in diagnosis.checks if check.name == name and check.state == state]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    """An adapter that was trained under YaRN, with its record."""
    return rope_patch.save(lora(rope_patch.load(base, "yarn:factor=4")), tmp_path_factory.mktemp("adapter"))


def beside(base, adapter, folder, *names):
    """The files of an adapter in the folder of a model."""
    shutil.copytree(base, folder)
    for name in ("adapter_config.json", "adapter_model.safetensors", *names):
        shutil.copy(adapter / name, folder)
    return folder


def test_an_adapter_beside_a_model_that_has_not_its_patch(base, adapter, tmp_path):
    """Plain transformers loads both from the folder, and the patch from neither."""
    folder = beside(base, adapter, tmp_path / "both", "rope_patch.json")
    (leftover,) = found(doctor(folder), "leftovers")
    assert "without the patch" in leftover.found
    patched = rope_patch.save(rope_patch.load(base, "yarn:factor=4"), tmp_path / "patched")
    assert doctor(beside(patched, adapter, tmp_path / "both patched", "rope_patch.json")).ok
    (tmp_path / "both patched" / "model.safetensors").write_bytes(b"")
    assert found(doctor(tmp_path / "both patched"), "weights files")


def test_an_adapter_that_transformers_put_on_a_model(base, adapter, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(beside(base, adapter, tmp_path / "both"))
    assert found(doctor(plain), "adapters", "note")
    rope_patch.apply(plain, "pi:factor=4")
    assert found(doctor(plain), "adapters")


@pytest.mark.parametrize("load", [rope_patch.load, AutoModelForCausalLM.from_pretrained])
def test_a_merged_model_is_healthy(base, load, tmp_path):
    merged = lora(rope_patch.load(base, "yarn:factor=4")).merge_and_unload()
    rope_patch.save(merged, tmp_path)
    for model in (merged, tmp_path, load(tmp_path)):
        assert doctor(model).ok and doctor(model).method == "yarn:factor=4"


@pytest.mark.parametrize("taken", ["rope_patch", "rope_parameters", "max_position_embeddings"])
def test_a_merge_whose_config_takes_a_key_from_the_other_model(taken, tmp_path):
    yarn = rope_patch.save(patched_model("yarn:factor=4", target_length=256), tmp_path / "yarn")
    other = rope_patch.save(patched_model("pi:factor=2", target_length=128), tmp_path / "pi")
    assert doctor(yarn).ok
    theirs = read_json(other / "config.json")
    edit_json(yarn / "config.json", lambda config: config.update({taken: theirs[taken]}))
    assert doctor(yarn).status == 1
