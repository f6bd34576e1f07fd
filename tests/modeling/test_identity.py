"""By what a model is known: what it is made of, bit by bit, and what it answers to fixed tokens."""

import functools
from pathlib import Path

import pytest
import torch
from support.scored import bold_model
from support.tiny import LLAMA, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.llama import modeling_llama

import rope_patch
from rope_patch.modeling import identity


@torch.no_grad()
def changed(change, dtype=torch.float32):
    """A small model after one change of its weights."""
    model = tiny_model().to(dtype)
    layer = model.model.layers[1]
    match change:
        case "two rows swapped":
            model.lm_head.weight[[3, 90]] = model.lm_head.weight[[90, 3]]
        case "the last bit":
            weight = layer.mlp.down_proj.weight
            weight[-1, -1] = torch.nextafter(weight[-1, -1], weight.new_tensor(9.0))
        case "written to data":  # as PEFT merges: no version counter of torch sees it
            model.model.embed_tokens.weight.data[[1, 2, 3, 5]] += 0.5
        case "negated":
            layer.mlp.down_proj.weight *= -1
    return model


CHANGES = ["none", "two rows swapped", "the last bit", "written to data", "negated"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_smallest_change_of_a_model_gives_another_hash(dtype):
    assert len({identity.model_hash(changed(change, dtype)) for change in CHANGES}) == len(CHANGES)


def test_equal_models_have_one_hash(tmp_path):
    one = changed("negated")
    before = identity.model_hash(one)
    one.save_pretrained(tmp_path)
    assert identity.model_hash(one) == before == identity.model_hash(changed("negated"))


class Printed(torch.nn.SiLU):
    """A module whose printed form holds an address."""

    def extra_repr(self):
        return str(object())


def test_a_hash_does_not_depend_on_how_a_model_is_printed():
    one = changed("none")
    other = changed("none")
    for model in (one, other):
        model.model.layers[0].mlp.act_fn = Printed()
    assert identity.model_hash(one) == identity.model_hash(other)


def with_another_version(model, monkeypatch, package):
    # Of the module that is in use: transformers may be imported twice, and puts another object in its place.
    monkeypatch.setattr(getattr(identity, package), "__version__", "99.0")
    identity._versions.cache_clear()


def with_edited_sources(model, monkeypatch):
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"# edited" * (path.name == "reader.py"))
    identity._versions.cache_clear()


SETTINGS = {
    "transformers": functools.partial(with_another_version, package="transformers"),
    "torch": functools.partial(with_another_version, package="torch"),
    "the code of this package": with_edited_sources,
    "the kernel of attention": lambda model, monkeypatch: model.set_attn_implementation("eager"),
    "a setting of the config": lambda model, monkeypatch: setattr(model.config, "rms_norm_eps", 1e-5),
    "the table": lambda model, monkeypatch: rope_patch.apply(model, "yarn", factor=2),
    "a table by hand": lambda model, monkeypatch: model.model.rotary_emb.inv_freq[-1:].mul_(0.5),
    "the attention factor by hand": lambda model, monkeypatch: setattr(
        model.model.rotary_emb, "attention_scaling", 1.01
    ),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_what_can_be_compared_exactly_is_part_of_the_hash(setting, monkeypatch):
    model = changed("none")
    before = identity.model_hash(model)
    SETTINGS[setting](model, monkeypatch)
    now = identity.model_hash(model)
    monkeypatch.undo()
    identity._versions.cache_clear()
    assert now != before


def ablated(model, monkeypatch):
    monkeypatch.setattr(model.model.layers[1].mlp, "forward", torch.zeros_like)


def with_a_banned_token(model, monkeypatch):
    ban = torch.tensor([7])
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, ban, -torch.inf))


def with_a_patched_library(model, monkeypatch):  # as Liger does it
    plain = modeling_llama.apply_rotary_pos_emb
    edited = lambda q, k, cos, sin, *args: plain(q, k, 0.7 * cos, sin, *args)  # noqa: E731
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", edited)


IN_MEMORY = {
    "a causal model that looks ahead": lambda model, _: setattr(model.model.layers[1].self_attn, "is_causal", False),
    "a replaced forward": ablated,
    "a hook on one logit": with_a_banned_token,
    "a patched library": with_a_patched_library,
}


@pytest.mark.parametrize("change", IN_MEMORY)
def test_what_was_changed_in_memory_shows_in_the_logits_of_fixed_tokens(change, monkeypatch):
    model = bold_model()
    before, tolerance = identity.fixed_logits(model, 64)
    IN_MEMORY[change](model, monkeypatch)
    now, _ = identity.fixed_logits(model, 64)
    assert identity.differs(before, now, tolerance)


def test_an_ablated_mlp_shows_in_16_bits_too(monkeypatch):
    model = rope_patch.load(LLAMA, dtype=torch.bfloat16)
    before, tolerance = identity.fixed_logits(model, 64)
    assert tolerance == identity.TOLERANCE_16
    ablated(model, monkeypatch)
    assert identity.differs(before, identity.fixed_logits(model, 64)[0], tolerance)


def test_rounding_of_another_machine_is_no_change():
    """As a cache in chunks rounds otherwise in float32, and float32 otherwise than bfloat16 does."""
    model = rope_patch.load(LLAMA, dtype=torch.float32)
    before, tolerance = identity.fixed_logits(model, 64)
    assert tolerance == identity.TOLERANCE_32 and not identity.differs(before, before, tolerance)
    double, _ = identity.fixed_logits(model.double(), 64)
    assert double != before and not identity.differs(before, double, tolerance)
    half, tolerance = identity.fixed_logits(model.bfloat16(), 64)
    assert identity.differs(before, half, identity.TOLERANCE_32) and not identity.differs(before, half, tolerance)


@pytest.mark.parametrize(("longest", "shows"), [(400, True), (140, True), (128, False)])
def test_a_window_that_a_patched_library_forgets_shows_where_texts_are_longer(longest, shows, monkeypatch):
    model = bold_model("gemma3", sliding_window=128)
    before, tolerance = identity.fixed_logits(model, longest)
    monkeypatch.setattr(modeling_gemma3, "create_sliding_window_causal_mask", modeling_gemma3.create_causal_mask)
    now, _ = identity.fixed_logits(model, longest)
    assert identity.differs(before, now, tolerance) == shows


@pytest.mark.parametrize("bits", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_scales_of_quantized_weights_are_part_of_a_hash(bits, tmp_path):
    """Codes of a weight and of its double are equal, and only the scales differ."""

    def quantized(factor):
        model = tiny_model()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight *= factor
        model.save_pretrained(tmp_path / str(factor))
        config = BitsAndBytesConfig(**bits)
        return AutoModelForCausalLM.from_pretrained(tmp_path / str(factor), quantization_config=config)

    once = identity.model_hash(quantized(1))
    assert identity.model_hash(quantized(1)) == once != identity.model_hash(quantized(2))


def test_adapters_are_told_apart():
    from peft import IA3Config, LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(bold_model(), config)
    model.add_adapter("other", config)
    seen = [identity.model_hash(model)]
    with model.disable_adapter():
        seen.append(identity.model_hash(model))
    model.set_adapter("other")
    seen.append(identity.model_hash(model))
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["other"] *= 3
    seen.append(identity.model_hash(model))
    assert len(set(seen)) == 4
    unscaled = get_peft_model(bold_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    on = identity.model_hash(unscaled)
    with unscaled.disable_adapter():
        assert identity.model_hash(unscaled) != on


def test_weights_that_were_offloaded_are_part_of_a_hash():
    from accelerate import cpu_offload

    prints = []
    for change in (0.25, 0.25, 0.5):
        model = tiny_model()
        with torch.no_grad():
            model.model.norm.weight[7] += change
        prints.append(identity.model_hash(cpu_offload(model, execution_device="cpu")))
    assert prints[0] == prints[1] != prints[2]
