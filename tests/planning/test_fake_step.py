"""Plans at full size, against a real training step and real measurements on fake tensors, which hold no numbers."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.live_bytes import LiveBytes, tiles_are_folded_in_place
from support.recipe_runs import arguments, recipe
from support.subsets import full
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoModelForCausalLM

from rope_patch.evaluation.retrieval import generate_answers
from rope_patch.evaluation.retrieval.generate_answers import answer_prompts
from rope_patch.evaluation.retrieval.prompts import Prompt
from rope_patch.modeling import reader
from rope_patch.modeling.read_at_once import scored_at_once
from rope_patch.modeling.reader import Reader, losses
from rope_patch.planning import plan
from rope_patch.runtime.packaged import data_path
from rope_patch.training.models import lora_arguments, training_plan

CONFIGS = Path(__file__).parents[2] / "recipes" / "configs"
PATHS = [CONFIGS / f"{name}.yaml" for name in ("first_run", "32k", "pose", "several_gpus")]


class FakeLiveBytes(LiveBytes):
    """Counts on fake tensors, whose entries are unknown: every label counts, and what is read is 0, False or "all"."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function is aten.index.Tensor and getattr(args[1][0], "dtype", None) is torch.bool:
            args = (args[0], [torch.arange(len(args[1][0]))])
        if function is aten._unique2.default:
            return args[0].flatten(), args[0], args[0]
        if function is aten.nonzero.default:
            return torch.zeros(args[0].numel(), args[0].ndim, dtype=torch.long)
        if function is aten._local_scalar_dense.default:
            return getattr(args[0], "whether_all", args[0].dtype is not torch.bool and 0)
        out = super().__torch_dispatch__(function, types, args, kwargs)
        if function is aten.all.default:
            out.whether_all = True
        return out


def flash(module, query, key, value, attention_mask, scaling=None, **_):
    """What flash attention keeps, by torch's own kernel: the window and the soft cap change no size."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


def on_fake_tensors(model):
    """Give a model on the meta device fake tensors on the CPU; tied weights stay tied."""
    originals = list(model.parameters())  # held, so that no id is given twice
    made = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in made:
                made[id(p)] = torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=p.requires_grad)
            module._parameters[name] = None if p is None else made[id(p)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty(buffer.shape, dtype=buffer.dtype)
    del originals


def shipped(name, **changes):
    """Build a model whose config ships with the package, with some values changed."""
    AttentionInterface.register("counted", flash)
    AttentionMaskInterface.register("counted", lambda *_, **__: None)
    values = json.loads((data_path("assets") / "configs" / f"{name}.json").read_text(encoding="utf-8")) | changes
    if "layer_types" in values:
        values["layer_types"] = values["layer_types"][: values["num_hidden_layers"]]
    config = AutoConfig.for_model(**values)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="counted")


@pytest.mark.full  # half a minute each
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_plan_of_a_recipe_is_what_a_step_takes(path, monkeypatch):
    options = recipe(path)
    tiles_are_folded_in_place(monkeypatch)
    from trl.trainer.utils import add_fused_lm_head

    planned = training_plan(options, arguments(options)).but(attention="flash")
    with torch.device("meta"):
        model = shipped(planned.shape.name).train()
        model = get_peft_model(model, LoraConfig(**lora_arguments(model, options)))
    with FakeTensorMode(allow_non_fake_inputs=True):
        on_fake_tensors(model)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "is_top1"))
        stored = sum(p.numel() * p.element_size() for p in model.parameters())
        trained = [p for p in model.parameters() if p.requires_grad]
        for p in trained:
            p.grad = torch.zeros_like(p)
        ids = torch.zeros(1, options.max_length, dtype=torch.long)
        with FakeLiveBytes(model) as live:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids, fused_lm_head=True).loss
            loss.backward()
    adam = sum(12 * p.numel() for p in trained)  # gradients and two moments in float32
    assert planned.total - planned.parts["overhead"] == pytest.approx(stored + adam + live.peak, rel=0.02)


def read_text(model, length):
    reader = Reader(model)
    chunk = reader.chunk(length)
    losses(reader, torch.zeros(1, length).long(), [1], chunk=None if chunk == length else chunk)


def answer(model, length):
    """Answer two prompts, which part near their end."""
    prompt = Prompt("", "", (0,) * length, 6, ("",), (6,), (0.5,))
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(generate_answers, "_trunk", lambda ids: (1, [length - length // 64, length]))
        answer_prompts(Reader(model), [[prompt], [prompt]])


MEASUREMENTS = {"perplexity": read_text, "retrieval": answer}


@pytest.mark.parametrize(
    ("measurement", "name", "layers", "length"),
    [
        ("perplexity", "Llama-3.1-8B", 4, 32),
        full("perplexity", "Llama-3.1-8B", 32, 128),
        full("perplexity", "gemma-3-4b", 6, 16),
        ("retrieval", "Llama-3.1-8B", 4, 128),
        full("retrieval", "Llama-3.1-8B", 32, 128),
        full("retrieval", "gemma-3-4b", 6, 16),
    ],
)
def test_the_plan_of_a_measurement_is_what_it_takes(measurement, name, layers, length, monkeypatch):
    # As on a GPU: more tokens at once, and all logits of a slice.
    monkeypatch.setattr(reader, "rows_at_once", len)
    monkeypatch.setattr(reader, "scored_at_once", lambda tokens, device: scored_at_once(tokens, "cuda"))
    with torch.device("meta"):
        model = shipped(name, num_hidden_layers=layers).eval()
    planned = plan(model, length=length * 1024)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        on_fake_tensors(model)
        with FakeLiveBytes(model) as live:
            MEASUREMENTS[measurement](model, length * 1024)
    assert planned.reading[measurement] - planned.reading["weights"] == pytest.approx(live.peak, rel=0.05)
