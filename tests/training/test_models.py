"""What a run decides about its model: loading, its own patch, the projections that get an adapter."""

import copy
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.recipe_runs import needs_trl, recipe, script
from support.scored import bold_model
from support.tiny import ARCHITECTURES, ids, tiny_config
from transformers import AutoModelForCausalLM, Gemma3Config

import rope_patch
from rope_patch.checkpoints.adapters import read_record
from rope_patch.options.finetune import ModelOptions
from rope_patch.patching.locate import PatchError, locate
from rope_patch.planning.shapes import shape_of
from rope_patch.training.models import is_quantized, lora_arguments, patch_arguments


def asked_for(*words):
    """YaRN on every family: Gemma 4's full layers are scaled already."""
    method = "yarn:factor=4"
    plain = ["model.name=x", "model.dtype=float32", "train.max_length=64", "output=out", f"patch.method={method}"]
    return recipe(*plain, *words)


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def hit(model):
    """The modules that PEFT gives an adapter, by their names before."""
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**lora_arguments(model, asked_for("lora.r=2"))))
    return {name for name, module in adapted.get_base_model().named_modules() if hasattr(module, "lora_A")}


def prepared(model, *words):
    """The model as the recipe patches it and adds adapters."""
    asked = asked_for("lora.r=2", *words)
    patch = patch_arguments(model, asked)
    if patch is not None:
        rope_patch.apply(model, asked.patch.method or "default", **patch)
    return get_peft_model(model, LoraConfig(**lora_arguments(model, asked)))


def loaded(**options):
    return script()["load"](ModelOptions(**options))


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_targets_are_read_from_the_model(family):
    model = bold_model(family)
    every = {name.rpartition(".")[2] for name in hit(model)}
    fused = {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    assert every == (fused if family == "phi3" else LINEAR)
    assert every == {x.name for layer in shape_of(model).kinds for x in layer.linears}
    inside = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (".self_attn." in name or ".mlp." in name)
    }
    assert hit(model) == inside


def seeing():
    """Gemma 3 with a vision tower beside the decoder."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 95, "boi_token_index": 93, "eoi_token_index": 94}
    config = Gemma3Config(text_config=tiny_config("gemma3").to_dict(), vision_config=vision, **tokens)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def test_a_vision_tower_is_left_alone():
    model = seeing()
    towers = {name for name, _ in model.named_modules() if "vision" in name}
    assert any(name.endswith("q_proj") for name in towers), "there is something to hit"
    names = hit(model)
    assert names and all("language_model." in name for name in names), sorted(names)[:5]


def test_without_a_method_a_model_keeps_its_own_table_and_says_so():
    with pytest.warns(UserWarning, match=r"no patch\.method"):
        model = prepared(bold_model(), "patch.method=null")
    record = locate(model).record
    assert str(record.to_method()) == "default" and record.target_length == 64
    patched = bold_model()
    rope_patch.apply(patched, "yarn", factor=2)
    assert str(locate(prepared(patched, "patch.method=null")).record.to_method()) == "yarn:factor=2"
    again = bold_model()
    rope_patch.apply(again, "yarn", factor=2)
    with pytest.raises(PatchError):
        prepared(again)
    assert str(locate(prepared(again, "patch.replace=true")).record.to_method()) == "yarn:factor=4"


def test_arguments_of_peft_are_those_of_the_options_over_defaults():
    model = bold_model()
    arguments = lora_arguments(model, asked_for("lora.r=8", "lora.use_dora=true", "lora.target_modules=[q_proj]"))
    config = LoraConfig(**arguments)
    assert (config.r, config.lora_alpha, config.use_dora, config.task_type) == (8, 16, True, "CAUSAL_LM")
    assert config.target_modules == {"q_proj"}
    assert lora_arguments(model, asked_for("lora.lora_alpha=3"))["lora_alpha"] == 3


@needs_trl
@pytest.mark.slow
def test_a_checkpoint_is_loaded_as_asked():
    model = loaded(name="llama", dtype="float32", attention="eager")
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager"
    model = loaded(name="llama")
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="nothing-here"):
        loaded(name="./nothing-here")


@needs_trl
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")  # of Linear8bitLt, at every call
@pytest.mark.parametrize("quantization", ["nf4", "8bit"])
def test_quantized_weights_are_packed_and_adapters_on_them_learn(quantization, tmp_path):
    import bitsandbytes

    model = loaded(name="llama", dtype="float32", quantization=quantization)
    kind = {"nf4": bitsandbytes.nn.Linear4bit, "8bit": bitsandbytes.nn.Linear8bitLt}[quantization]
    packed = {name for name, module in model.named_modules() if isinstance(module, kind)}
    assert packed == hit(model), "every projection, and nothing else"
    if quantization == "nf4":
        weight = model.model.layers[0].mlp.up_proj.weight
        assert weight.quant_state.quant_type == "nf4" and weight.quant_state.nested
        assert weight.dtype == torch.float32, "stored as the others are, for FSDP"
    model = prepared(model)
    loss = model(input_ids=ids(24), labels=ids(24)).loss
    loss.backward()
    assert 0 < loss < 20
    learned = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned and all("lora_" in name for name in learned), "frozen weights stay"
    rope_patch.save(model, tmp_path / "adapter")
    assert read_record(tmp_path / "adapter") is not None


def test_what_is_quantized_already_is_not_quantized_again(tmp_path):
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)
    message = f"{tmp_path} is quantized already: set model.quantization=none"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        is_quantized(ModelOptions(str(tmp_path), quantization="nf4"))
