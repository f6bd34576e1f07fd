"""Plans against published counts, hand-computed figures, and what autograd really keeps."""

import contextlib
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.commands import fail, run
from support.live_bytes import LiveBytes, tiles_are_folded_in_place
from support.subsets import covering
from support.tiny import tiny_config, tiny_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_outputs import BaseModelOutput

from rope_patch.planning import plan
from rope_patch.planning.shapes import shape_of
from rope_patch.runtime.packaged import data_path

GIB = 2**30

# --- shapes ----------------------------------------------------------------------------------------------------------

# As the model cards and the files' indices give them; gemma-3 text models from the Keras presets' "params".
PUBLISHED = {
    "Llama-3-8B": 8_030_261_248,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_099_328 + 64 * 2560,  # the Hugging Face vocabulary has 64 more rows, for images
    "gemma-3-12b": 11_765_788_416 + 64 * 3840,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name):
    assert shape_of(name).parameters == PUBLISHED[name]


def test_names_and_a_folder_of_that_name(tmp_path, monkeypatch):
    assert {path.stem for path in (data_path("assets") / "configs").iterdir()} == set(PUBLISHED)
    assert shape_of("meta-llama/Meta-Llama-3-8B-Instruct").name == "Llama-3-8B"
    tiny_model().save_pretrained(tmp_path / "Llama-3.1-8B")
    monkeypatch.chdir(tmp_path)
    assert shape_of("Llama-3.1-8B").parameters < 1e6


# --- against hand-computed figures -----------------------------------------------------------------------------------


def test_llama_3_8b_at_128k():
    """The issue's figures: LoRA r16, checkpointing, fused loss ~85 GiB.

    N = 131072 tokens, h = 4096, f = 14336, 32 layers, V = 128256; 1 KiB per token is 0.125 GiB.

    weights              8.03e9 x 2 B                                             = 15.0 GiB
    inputs of layers     32 x N x 4096 x 2 B                                      = 32.0
    one layer, saved     norms 2 x 4h = 32 KiB; q, k, v, out 20; log-sums 0.1; gate, up, act 3 x 2f = 84;
                         copies adapters make of their inputs: q, k, v, o, gate, up 6 x 2h = 48, down 2f = 28;
                         7 x 16 x 2 B = 0.2                     = 212.3 KiB         26.5
    and at work          down's adapter casts its input: (2 + 4)f = 84, 5 x 2h = 40 = 124 KiB  15.5
    adapters             41.9 M x (4 + 4 + 8) B                                   =  0.6
    allowance                                                                     =  2.0
                                                                            sum     91.6, 8 % above the issue's ~85
    With adapters on attention only: no copies of gate's, up's and down's inputs (-44 KiB), and the peak moves to the
    gated product: 82.7, 3 % below. "~85" does not say which; both are within 10 %.
    """
    everything = plan("Llama-3-8B", length=131072, lora_rank=16)
    assert everything.parts["weights"] / GIB == pytest.approx(14.96, abs=0.01)
    assert everything.parts["activations"] == 32 * GIB
    assert everything.parts["layer"] / GIB == pytest.approx(26.5 + 15.5, abs=0.1)
    assert everything.parts["optimizer"] == 8 * 41_943_040
    assert everything.total / GIB == pytest.approx(91.6, abs=0.1)
    attention = everything.but(target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    assert attention.total / GIB == pytest.approx(85, rel=0.1)


def test_reading():
    weights = 2 * 8_030_261_248
    cache = 2 * 131072 * 32 * 1024 * 2
    one_pass = 131072 * 2 * (4 * 4096 + 3 * 14336)
    reading = plan("Llama-3-8B", length=131072).reading
    assert (reading["weights"], reading["KV cache"]) == (weights, cache)
    assert reading["perplexity"] == weights + one_pass
    assert reading["retrieval"] == weights + cache + one_pass
    # gemma-3-12b: 40 layers hold 1024 positions, 8 all of them
    assert plan("gemma-3-12b", length=131072).reading["KV cache"] == 2 * 2048 * 2 * (40 * 1024 + 8 * 131072)


# --- against what runs -----------------------------------------------------------------------------------------------

TOKENS = 512
SIZE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
}
RUNS = [
    ("llama", "float32", None),
    ("llama", "bfloat16", 4),
    ("qwen2", "bfloat16", 4),
    ("qwen3", "bfloat16", 4),
    ("phi3", "bfloat16", 4),
    ("gemma3", "bfloat16", None),
    ("gemma3-64", "bfloat16", 4),  # a window of 64 tokens: sdpa needs masks
    ("llama-apart", "bfloat16", 4),  # documents of 128 tokens apart
]


def prepared(family, dtype, rank, *, checkpointing, attention="sdpa", **changes):
    """A tiny model ready to train, the plan of the same step, and the context to run it in."""
    size = SIZE | changes
    family, _, special = family.partition("-")
    boundaries = "join"
    if special == "apart":
        boundaries = special
        special = "64"
    if family.startswith("gemma"):
        kinds = ["full_attention", "sliding_attention"] * (size["num_hidden_layers"] // 2)
        size |= {"sliding_window": int(special or 1024), "layer_types": kinds}
    if family.startswith("qwen"):
        size |= {"layer_types": None}
    config = tiny_config(family, **size)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if attention == "flash" else attention, dtype=getattr(torch, dtype)
    ).train()
    options = {"attention": attention, "dtype": dtype, "lora_rank": rank, "boundaries": boundaries}
    planned = plan(model, length=TOKENS, checkpointing=checkpointing, **options)
    if rank is not None:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
        model.enable_input_require_grads()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    autocast = rank is not None and dtype == "bfloat16"  # as Trainer's bf16=True
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    return model, planned, context


def measured(model, context, loss):
    """Run forward and backward; return the counter, its peak that of the backward pass or of the loss, and what the
    forward pass kept."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    with LiveBytes(model) as live:
        with context:
            total = loss()
        retained = live.now
        live.peak = live.now
        total.backward()
    return live, retained


def decoder(model):
    return model.get_base_model().model if hasattr(model, "get_base_model") else model.model


def read(model, planned):
    """The last hidden states; positions of documents apart begin at 0 in each."""
    positions = torch.arange(TOKENS)[None]
    if planned.options.boundaries == "apart":
        positions = positions % 128
    return decoder(model)(IDS, position_ids=positions, use_cache=False).last_hidden_state


IDS = torch.randint(3, 96, (1, TOKENS), generator=torch.Generator().manual_seed(0))


@covering(run=RUNS, checkpointing=[True, False])
def test_peak_of_the_decoder(run, checkpointing):
    """Checkpointing saves outside the reach of hooks, so live tensors are counted: after the forward, and at most."""
    family, dtype, rank = run
    model, planned, context = prepared(family, dtype, rank, checkpointing=checkpointing, num_hidden_layers=8)
    live, counted = measured(model, context, lambda: read(model, planned).sum())
    last_norm = (
        TOKENS * 64 * (4 + planned.options.element * (2 if rank is None else 1))
    )  # by hand: input, normed, output
    predicted = planned.parts["masks"] * checkpointing + planned.parts["activations"] + last_norm
    assert predicted == pytest.approx(counted, rel=0.1)
    assert planned.parts["masks"] + planned.parts["activations"] + planned.parts["layer"] == pytest.approx(
        live.peak, rel=0.1
    )


def test_adapters_on_weights_in_4_bits_copy_no_input(monkeypatch, tmp_path):
    """On an H100 a plan with a copy for each adapter was 24 % above the peak of a step on rows of 32k tokens."""
    tiny_model("llama", **SIZE).save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=nf4, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).train()
    model.requires_grad_(False)
    planned = plan(tmp_path, length=TOKENS, lora_rank=4, quantization="nf4", attention="sdpa")
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # PEFT asks whether CUDA's autocast is on, by naming no device, so on a CPU it copies the inputs all the same.
    enabled = torch.is_autocast_enabled
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: not device or enabled(*device))
    context = torch.autocast("cpu", torch.bfloat16)
    live, _ = measured(model, context, lambda: decoder(model)(IDS, use_cache=False).last_hidden_state.sum())
    assert planned.parts["activations"] + planned.parts["layer"] == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize(("family", "tokens"), [("llama", 4096), ("gemma2", 512)])
def test_peak_at_the_loss(family, tokens, monkeypatch):
    """The loss of TRL, whose kernels for a GPU fold a tile of logits without a copy: here a tile is folded in place."""
    tiles_are_folded_in_place(monkeypatch)
    from trl.trainer.utils import add_fused_lm_head

    attention = "flash" if family == "gemma2" else "sdpa"
    changes = {"vocab_size": 8192, "num_hidden_layers": 2}
    model, planned, context = prepared(family, "bfloat16", 4, checkpointing=True, attention=attention, **changes)
    hidden = torch.randn(1, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(3, 96, (1, tokens))
    base = model.get_base_model()
    base.base_model.forward = lambda *_, **__: BaseModelOutput(last_hidden_state=base.model.norm(hidden))
    add_fused_lm_head(base, outputs=("log_probs", "entropy", "is_top1"))
    live, _ = measured(model, context, lambda: base(labels=labels, fused_lm_head=True).loss)
    assert planned.but(length=tokens).parts["loss"] == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize(("family", "targets"), [("gemma3", ("o_proj", "down_proj")), ("phi3", ("all-linear",))])
def test_adapter_is_as_large_as_peft_makes_it(family, targets):
    model = tiny_model(family)
    planned = plan(model, length=64, lora_rank=8, target_modules=targets)
    target_modules = targets[0] if targets == ("all-linear",) else list(targets)
    adapted = get_peft_model(model, LoraConfig(r=8, target_modules=target_modules))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    assert planned.parts["adapter"] == planned.parts["gradients"] == sum(4 * p.numel() for p in trained)
    optimizer = torch.optim.AdamW(trained)
    for p in trained:
        p.grad = torch.ones_like(p)
    optimizer.step()
    states = sum(t.numel() * 4 for state in optimizer.state.values() for t in state.values() if t.ndim)
    assert planned.parts["optimizer"] == states


def test_nf4_is_as_large_as_bitsandbytes_packs_it():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(256, 1024)
    packed, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    stored = packed.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    per_weight = stored / weight.numel()
    model = "Llama-3.1-8B"
    shape = shape_of(model)
    linear = shape.total(lambda layer: layer.matmul_weights)
    expected = linear * per_weight + (shape.parameters - linear) * 2
    assert plan(model, length=1024, quantization="nf4").parts["weights"] == pytest.approx(expected, rel=1e-3)
    rows = 32 * (4096 + 1024 + 1024 + 4096 + 14336 + 14336 + 4096)
    assert (
        plan(model, length=1024, quantization="8bit").parts["weights"]
        == linear + 4 * rows + (shape.parameters - linear) * 2
    )


# --- options ---------------------------------------------------------------------------------------------------------


def test_full_fine_tuning_takes_16_bytes_per_parameter():
    """ZeRO, section 3.1: 2 for the weight, 2 for its gradient, 12 for master and moments."""
    planned = plan("Qwen2.5-0.5B", length=1024, lora_rank=None)
    assert planned.parts["weights"] + planned.parts["gradients"] + planned.parts["optimizer"] == 16 * 494_032_768
    assert planned.parts["adapter"] == 0
    assert planned.but(optimizer="adamw_8bit").parts["optimizer"] == int(494_032_768 * (2 + 8 / 256))
    assert planned.but(optimizer="sgd").parts["optimizer"] == 0


def test_gpus_divide_what_they_divide():
    one = plan("Llama-3.1-8B", length=32768)
    eight = one.but(gpus=8)
    for name in ("weights", "adapter", "gradients", "optimizer"):
        assert eight.parts[name] == one.parts[name] // 8
    # a layer has 218.1 M parameters, twice in bfloat16; embeddings, head and last norm 1050.7 M once
    assert eight.parts["gathered"] == pytest.approx(2 * (2 * 218.11e6 + 1050.68e6), rel=1e-4)
    full = eight.but(lora_rank=None)  # and each layer's gradients, until they are divided
    assert full.parts["gathered"] == pytest.approx(2 * (3 * 218.11e6 + 1050.68e6), rel=1e-4)
    assert eight.parts["activations"] == one.parts["activations"]
    shared = one.but(gpus=8, context_parallel=8)
    assert shared.parts["activations"] == one.parts["activations"] // 8
    assert shared.parts["layer"] == one.parts["layer"] // 8
    assert one.but(batch=2).parts["activations"] == 2 * one.parts["activations"]


def test_advice_is_replanned_in_order_until_it_fits():
    planned = plan("Llama-3-8B", length=131072, batch=2, checkpointing=False)
    steps = planned.advice(100)
    assert [step.option for step in steps] == ["--checkpointing", "--batch 1"]
    assert [step.fits for step in steps] == [False, True]
    assert steps[0].total == planned.but(checkpointing=True).total
    assert steps[1].total == planned.but(checkpointing=True, batch=1).total <= 100 * GIB
    assert planned.but(checkpointing=True, batch=1).advice(100) == []
    floats = plan("Llama-3-8B", length=32768, dtype="float32").advice(60)
    assert floats[0].option == "--dtype bfloat16"
    endless = plan("Llama-3-8B", length=2**30, checkpointing=False)
    assert [(step.option, step.fits) for step in endless.advice(1)] == [("--checkpointing", False)]


def test_gpus_that_are_there_share_a_sequence_before_anything_is_rounded():
    """FSDP leaves the activations of a sequence whole on each GPU: 80.8 GiB of 80."""
    planned = plan("Llama-3.1-8B", length=131072, gpus=8)
    assert not planned.fits(80)
    (step,) = planned.advice(80)
    assert (step.option, step.fits) == ("--context-parallel 2", True)
    assert step.total == planned.but(context_parallel=2).total and "the same gradients" in step.cost
    assert planned.but(gpus=7).advice(80)[0].option == "--quantization nf4"  # 7 form no groups of 2 or 4


def test_rows_of_a_model_with_sliding_windows_are_not_shared():
    (step,) = plan("gemma-3-12b", length=8192).advice(14)
    assert step.option == "--gpus 8"
    (step,) = plan("gemma-3-12b", length=8192, gpus=8).advice(12)
    assert step.option == "--quantization nf4"


def test_longest_fits_and_the_next_does_not():
    planned = plan("Llama-3.1-8B", length=4096)
    longest = planned.longest(80)
    assert longest % 1024 == 0
    assert planned.but(length=longest).fits(80)
    assert not planned.but(length=longest + 1024).fits(80)
    assert planned.longest(10) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length"),
        ({"quantization": "nf5"}, "Did you mean 'nf4'"),
        ({"gpus": 4, "context_parallel": 3}, "divide gpus"),
        ({"lora_rank": None, "quantization": "8bit"}, "quantized weights"),
        ({"target_modules": ("qproj",)}, "Known: all-linear, attention, q_proj"),
        ({"target_modules": "q_proj"}, "list"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        plan("gemma-2-2b", **{"length": 4096} | options)


def test_models_that_no_plan_covers(tmp_path):
    with pytest.raises(ValueError, match=r"one of .*Llama-3.1-8B"):
        shape_of("lama-3.1-8b")
    with pytest.raises(OSError, match="from the hub"):
        shape_of("nobody/llama-3.1-8b")  # not the organisation whose config ships
    with pytest.raises(ValueError, match=r"config\.json"):
        shape_of(tmp_path)
    with torch.device("meta"):
        model = tiny_model("mixtral")
    with pytest.raises(ValueError, match="MixtralDecoderLayer"):
        shape_of(model)


# --- the command -----------------------------------------------------------------------------------------------------


def test_command():
    printed = run("plan", "llama-3.1-8b", "--length", "128k", "--gpu-memory", "80")
    assert "91.63" in printed and "KV cache 16.00" in printed and "--quantization nf4" in printed
    data = json.loads(run("plan", "gemma-2-2b", "--length", "8k", "--full", "--gpus", "8", "--json"))
    parts = data["parts_bytes"]
    assert data["total_bytes"] == sum(parts.values()) - min(parts["layer"], parts["loss"])
    assert data["options"]["lora_rank"] is None and data["fits"] is True
    assert "gpu_memory" in fail("plan", "Llama-3-8B", "--length", "4k", "--gpu-memory", "0")
