"""What a folder holds is what its config describes: no tensor is missing, foreign, or of another shape."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.patches import lora, patched_model, read_json
from support.tiny import logits, tiny_model
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForSequenceClassification,
    LlamaModel,
)

import rope_patch
from rope_patch import PatchError
from rope_patch.checkpoints.weight_files import wrong_tensors


def without_a_tensor(weights):
    del weights["model.layers.1.self_attn.q_proj.weight"]


def with_another_shape(weights):
    weights["model.norm.weight"] = torch.ones(32)


@pytest.mark.parametrize("damage", [without_a_tensor, with_another_shape])
def test_a_folder_that_lacks_what_its_config_describes_is_refused(damage, root, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(root / "patched", folder)
    weights = load_file(folder / "model.safetensors")
    damage(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(OSError, match="another model"):
        rope_patch.verify(folder)
    with pytest.raises((OSError, ValueError), match="another model"):
        rope_patch.load(folder)


def test_an_unpatched_folder_that_lacks_a_tensor_is_not_loaded_and_one_that_holds_more_is(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"of_another_program": torch.ones(4)}, file, metadata={"format": "pt"})
    rope_patch.load(tmp_path / "plain", "p_rope")
    without_a_tensor(weights)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(OSError, match="q_proj"):
        rope_patch.load(tmp_path / "plain", "p_rope")


def test_tensors_that_transformers_leaves_out_are_warned_of(tmp_path):
    """A head of somebody's own, or layers of a later use: nothing is lost that a plain load would have."""
    model = patched_model("p_rope")
    model.value_head = torch.nn.Linear(64, 1)
    for act in (lambda folder: rope_patch.save(model, folder), rope_patch.verify):
        with pytest.warns(UserWarning, match="value_head"):
            act(tmp_path / "saved")
    rope_patch.load(tmp_path / "saved")


def test_a_check_that_cannot_be_made_loses_no_model(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ImportError("flash_attn is not installed")

    model = patched_model("p_rope")
    monkeypatch.setattr(type(model), "from_pretrained", fail)
    with pytest.warns(UserWarning, match="flash_attn"):
        rope_patch.save(model, tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").is_file()


def test_a_model_without_its_head_loads_with_a_warning(tmp_path):
    LlamaModel(tiny_model("llama").config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="LlamaModel"):
        rope_patch.load(tmp_path, "p_rope")


def without_part_of_the_state_dict(model):
    return {"state_dict": {name: value for name, value in model.state_dict().items() if "mlp" not in name}}


def with_a_narrower_layer(model):
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 100, bias=False)
    return {}


def with_parts_of_a_weight(model):
    """As quanto quantizes in place: the weight's parts are saved under names of their own."""
    linear = model.model.layers[0].mlp.up_proj
    linear.register_buffer("scale", linear.weight.detach().abs().amax(1))
    linear.register_buffer("data", linear.weight.detach().to(torch.int8))
    del linear.weight
    return {}


@pytest.mark.parametrize("change", [without_part_of_the_state_dict, with_a_narrower_layer, with_parts_of_a_weight])
def test_a_model_that_plain_transformers_would_load_otherwise_is_not_saved(change, tmp_path):
    model = patched_model("p_rope")
    options = change(model)
    with pytest.raises(ValueError, match=r"missing|shape"):
        rope_patch.save(model, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_the_base_inside_a_peft_model_is_saved_when_the_adapter_is_merged_or_unloaded(tmp_path):
    model = lora(patched_model("p_rope"))
    with pytest.raises(PatchError, match="merge_and_unload"):
        rope_patch.save(model.get_base_model(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    rope_patch.save(model.merge_and_unload(), tmp_path / "out")
    rope_patch.verify(tmp_path / "out")


def test_names_that_transformers_changes_on_the_way_are_followed(tmp_path):
    """Mixtral's experts are one tensor in memory, and one each in the folder; shards are read as one."""
    model = tiny_model("mixtral", num_local_experts=4)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    index = read_json(tmp_path / "model.safetensors.index.json")
    assert any("experts.3." in name for name in index["weight_map"]) and len(set(index["weight_map"].values())) > 1
    assert wrong_tensors(tmp_path, model) == ""


def test_another_head_than_that_of_a_language_model_is_its_own(tmp_path):
    model = LlamaForSequenceClassification(tiny_model("llama").config)
    rope_patch.apply(model, "p_rope", p=0.5)
    rope_patch.save(model, tmp_path)
    rope_patch.verify(tmp_path)


def test_a_later_save_leaves_no_weights_of_a_variant(tmp_path):
    for options in ({}, {"max_shard_size": "50KB"}):
        rope_patch.save(patched_model("p_rope"), tmp_path, variant="fp16", **options)
        rope_patch.verify(tmp_path)
    assert len(list(tmp_path.glob("model.fp16*.safetensors"))) > 1
    rope_patch.save(patched_model("p_rope"), tmp_path)
    assert not list(tmp_path.glob("*fp16*"))


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.filterwarnings("ignore")  # bitsandbytes' own
def test_weights_that_bitsandbytes_repacked_are_not_saved(double, tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_model().save_pretrained(tmp_path / "base")
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=nf4, device_map="cpu")
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "before")
    expected = logits(model)
    assert torch.equal(logits(rope_patch.load(tmp_path / "before", device_map="cpu")), expected)
    if not getattr(model.model.layers[0].mlp.up_proj.weight.quant_state, "packing_format_for_cpu", False):
        pytest.skip("this CPU has no AVX512-BF16, for which bitsandbytes repacks")
    with pytest.raises(ValueError, match="repacked"):
        rope_patch.save(model, tmp_path / "after")
    assert not (tmp_path / "after").exists()
    assert torch.equal(logits(model), expected)  # not repacked back, either
    rope_patch.save(lora(model), tmp_path / "adapter")  # which holds no such weights
