"""The hash of a model: what finished work is kept under."""

from __future__ import annotations

import functools

import pytest
import torch
from support.scored import bold_model
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from rope_patch.modeling import scoring


class Steering:
    """A hook whose vector is in a slot, one of which is unset."""

    __slots__ = ("unset", "vector")

    def __init__(self, strength):
        self.vector = torch.full((64,), strength)

    def __call__(self, module, args, output):
        return output + self.vector


@torch.no_grad()
def changed(change, dtype=torch.float32):
    """A small model after one change of its weights, or with a hook on a layer."""
    model = tiny_model().to(dtype)
    hook, layer = model.model.layers[0].register_forward_hook, model.model.layers[1]
    strength = 2.0 if "stronger" in change else 1.0
    vector, ablated = torch.full((64,), strength), {"heads": [int(strength)]}
    match change.removesuffix(", stronger"):
        case "two rows swapped":
            model.lm_head.weight[[3, 90]] = model.lm_head.weight[[90, 3]]
        case "the last bit":
            weight = layer.mlp.down_proj.weight
            weight[-1, -1] = torch.nextafter(weight[-1, -1], weight.new_tensor(9.0))
        case "written to data":  # as PEFT merges: no version counter of torch sees it
            model.model.embed_tokens.weight.data[[1, 2, 3, 5]] += 0.5
        case "a hook with a constant":
            hook(lambda module, args, output: output * 3)
        case "a hook over a tensor":
            hook(lambda module, args, output: output + vector)
        case "a hook over a list":
            hook(lambda module, args, output: output * len(ablated["heads"]))
        case "an object as a hook":
            hook(functools.partial(Steering(strength)))
    return model


CHANGES = ["none", "two rows swapped", "the last bit", "written to data", "a hook with a constant"]
CHANGES += [f"{kind}{more}" for kind in ("a hook over a tensor", "a hook over a list", "an object as a hook")
            for more in ("", ", stronger")]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_change_of_a_model_gives_another_fingerprint(dtype):
    changes = CHANGES if dtype == torch.float32 else CHANGES[:2]
    assert len({scoring.model_hash(changed(change, dtype)) for change in changes}) == len(changes)


@pytest.mark.parametrize("change", ["a hook over a list", "an object as a hook"])
def test_equal_models_have_one_fingerprint(tmp_path, change):
    one = changed(change)
    before = scoring.model_hash(one)
    one.save_pretrained(tmp_path)
    assert scoring.model_hash(one) == before == scoring.model_hash(changed(change))


@pytest.mark.parametrize("bits", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_scales_of_quantized_weights_are_part_of_a_fingerprint(bits, tmp_path):
    """Codes of a weight and of its double are equal, and only the scales differ."""

    def quantized(factor):
        model = tiny_model()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight *= factor
        model.save_pretrained(tmp_path / str(factor))
        config = BitsAndBytesConfig(**bits)
        return AutoModelForCausalLM.from_pretrained(tmp_path / str(factor), quantization_config=config)

    once = scoring.model_hash(quantized(1))
    assert scoring.model_hash(quantized(1)) == once != scoring.model_hash(quantized(2))


def test_tables_changed_by_hand_are_told_apart():
    model = bold_model()
    seen = {scoring.model_hash(model)}
    model.model.rotary_emb.inv_freq[1::2] *= 0.5
    seen.add(scoring.model_hash(model))
    model.model.rotary_emb.attention_scaling = 1.7
    assert len(seen | {scoring.model_hash(model)}) == 3


def test_adapters_are_told_apart():
    from peft import IA3Config, LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(bold_model(), config)
    model.add_adapter("other", config)
    seen = [scoring.model_hash(model)]
    with model.disable_adapter():
        seen.append(scoring.model_hash(model))
    model.set_adapter("other")
    seen.append(scoring.model_hash(model))
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["other"] *= 3
    seen.append(scoring.model_hash(model))
    assert len(set(seen)) == 4
    unscaled = get_peft_model(bold_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    on = scoring.model_hash(unscaled)
    with unscaled.disable_adapter():
        assert scoring.model_hash(unscaled) != on


def test_weights_that_were_offloaded_are_part_of_a_fingerprint():
    from accelerate import cpu_offload

    prints = []
    for change in (0.25, 0.25, 0.5):
        model = tiny_model()
        with torch.no_grad():
            model.model.norm.weight[7] += change
        prints.append(scoring.model_hash(cpu_offload(model, execution_device="cpu")))
    assert prints[0] == prints[1] != prints[2]
