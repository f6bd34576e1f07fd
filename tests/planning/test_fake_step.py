"""The plan of every recipe at full size, against one real training step on fake tensors, which hold no numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.live_bytes import LiveBytes
from support.recipe_runs import recipe
from support.subsets import full
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from rope_patch.modeling.training_loss import fuse
from rope_patch.packaged import data_path
from rope_patch.training.models import target_pattern, training_plan

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
PATHS = [path for path in sorted(CONFIGS.glob("*.yaml")) if re.search(r"-\d+k$", path.stem)]
CASES = [path if path.stem == "llama-3.2-1b-32k" else full(path) for path in PATHS]  # half a minute each


class FakeLiveBytes(LiveBytes):
    """Counts on fake tensors, whose entries are unknown: every label counts."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.index.Tensor and args[1][0].dtype is torch.bool:
            args = (args[0], [torch.arange(len(args[1][0]))])
        return super().__torch_dispatch__(function, types, args, kwargs)


def flash(module, query, key, value, attention_mask, scaling=None, **_):
    """What flash attention keeps, by torch's own kernel: the window and the soft cap change no size."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def on_fake_tensors(model):
    """Give a model on the meta device fake tensors on the CPU; tied weights stay tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in made:
                made[id(p)] = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
            module._parameters[name] = None if p is None else made[id(p)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_the_plan_of_a_recipe_is_what_a_step_takes(path):
    AttentionInterface.register("counted", flash)
    AttentionMaskInterface.register("counted", lambda *_, **__: None)
    options = recipe(path)
    planned = training_plan(options).but(attention="flash")
    values = json.loads((data_path("assets") / "configs" / f"{planned.shape.name}.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**values), dtype=torch.bfloat16, attn_implementation="counted"
        ).train()
        targets = target_pattern(model, options.lora.target_modules)
        model = get_peft_model(model, LoraConfig(r=options.lora.rank, target_modules=targets))
    with FakeTensorMode(allow_non_fake_inputs=True):
        originals = list(model.parameters())  # held, so that no id is given twice
        on_fake_tensors(model)
        del originals
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        fuse(model)
        stored = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.grad = torch.zeros_like(p)
        ids = torch.zeros(1, options.data.length, dtype=torch.long)
        with FakeLiveBytes(model) as live:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
        with torch.no_grad(), model.disable_adapter(), FakeLiveBytes(model) as reading:
            _read = model.eval()(input_ids=ids, use_cache=True, logits_to_keep=1)
    adam = sum(12 * p.numel() for p in trained)  # gradients and two moments in float32
    assert planned.total - planned.parts["overhead"] == pytest.approx(stored + adam + live.peak, rel=0.02)
    parts = planned.inference
    assert parts["KV cache"] + parts["prefill in one pass"] == pytest.approx(reading.peak, rel=0.03)
