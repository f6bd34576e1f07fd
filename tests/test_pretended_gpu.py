"""The main paths of the package on a pretended GPU: devices never mix, and the CPU waits as seldom as stated here."""

from __future__ import annotations

import os

import peft
import pytest
import torch
from accelerate import dispatch_model
from peft import LoraConfig, PeftModel, get_peft_model
from support import pretended_gpu as gpu
from support.gguf_files import write_toy
from support.patches import lora
from support.pretended_gpu import counted
from support.prompting import ENGLISH, TOKENIZER
from support.recipe_runs import needs_trl, script
from support.tiny import DYNAMIC, small
from transformers import PreTrainedModel

import rope_patch
from rope_patch import EvalSpec
from rope_patch.cli.loading import load_model
from rope_patch.kv_cache.cache import quantized
from rope_patch.options.finetune import ModelOptions
from rope_patch.options.kv_check import Limits
from rope_patch.options.shared import Machine
from rope_patch.patching.cache_argument import cache_argument

TEXT = rope_patch.data_path("assets") / "domains" / "english.txt"
IDS = TOKENIZER(ENGLISH, return_tensors="pt", verbose=False).input_ids[0, :1024]
SPEC = EvalSpec(lengths=[256], depths=[0.5], samples=1, windows=1, text=str(TEXT), haystack=str(TEXT))
FORMATS = ["int4.token;residual=4", "k=turboquant4.hadamard;v=uniform4", "k=int4.channel4.pre;v=fp8-scaled"]


def patched():
    """A small model on a GPU, under YaRN."""
    model = small().to("cuda")
    rope_patch.apply(model, "yarn:factor=4")
    return model


def waits_per_token(model, make_cache=lambda: None) -> float:
    """How often a decoded token waits for the GPU, the first ones aside."""
    prompt = IDS[None, :20].to("cuda")

    def decode(count):
        options = {"max_new_tokens": count, "min_new_tokens": count, cache_argument(model): make_cache()}
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    decode(1)
    return (counted(lambda: decode(7)) - counted(lambda: decode(2))) / 5


@gpu.on("cuda")
def test_devices_do_not_mix_and_waits_are_counted(tmp_path):
    there = torch.ones(3, device="cuda")
    here = torch.ones(3)
    assert there.device == torch.device("cuda:0")
    assert (there + here.sum()).is_cuda
    for other in (here, torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="different devices"):
            there + other
    for call in (there.tolist, there.sum().item, lambda: there[there > 0], lambda: here.to("cuda")):
        assert counted(call) == 1
    assert counted(lambda: there.to("cuda:1") * 2) == 0


@gpu.on("cuda")
def test_a_decoded_token_waits_once_for_generate_itself_and_never_for_a_patch(tmp_path):
    dynamic, frozen = (small(rope_parameters=DYNAMIC).to("cuda") for _ in range(2))
    rope_patch.apply(frozen, "default", freeze_at=128)
    # A dynamic table of transformers asks twice how long the text is.
    assert [waits_per_token(model) for model in (small().to("cuda"), patched(), dynamic, frozen)] == [1, 1, 3, 1]


@gpu.on("cuda")
def test_a_decoded_token_never_waits_for_a_quantized_cache(tmp_path):
    model = small().to("cuda")
    for scheme in FORMATS:
        with quantized(model, scheme) as cache:
            assert waits_per_token(model, cache) == 1, gpu.waits


@gpu.on("cuda")
def test_perplexity_waits_three_times_a_chunk_and_never_for_a_slice(tmp_path):
    with torch.no_grad():
        logits = small()(IDS[None, :512]).logits[0, :-1]
    expected = float(torch.nn.functional.cross_entropy(logits, IDS[1:512]))
    # In 16 bits chunks go to flash attention.
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        model = small().to("cuda", dtype)

        def read(tokens: int, chunk: int | None = None, model=model) -> float:
            return rope_patch.perplexity(model, IDS[:tokens], window=tokens, chunk=chunk).nll

        assert read(512) == pytest.approx(expected, rel=tolerance)
        assert read(512, 128) == pytest.approx(expected, rel=tolerance)
        assert counted(lambda: read(1024)) == counted(lambda: read(512)) == 4
        assert counted(lambda: read(1024, 128)) - counted(lambda: read(512, 128)) == 3 * 4, gpu.waits


@gpu.on("cuda")
def test_retrieval_and_compare_give_what_a_cpu_gives(tmp_path):
    here = small()
    there = small().to("cuda")
    options = {"lengths": [256], "depths": [0], "samples": 1, "chunk": 128, "haystack": TEXT}
    expected, got = (rope_patch.retrieval(model, TOKENIZER, "passkey", **options) for model in (here, there))
    assert got.cells[0].samples[0].logprob == pytest.approx(expected.cells[0].samples[0].logprob, rel=1e-4)
    expected, got = (rope_patch.compare(model, TOKENIZER, ["default", "yarn"], SPEC) for model in (here, there))
    for one, other in zip(expected.rows, got.rows, strict=True):
        assert other.scores.perplexity.nll == pytest.approx(one.scores.perplexity.nll, rel=1e-4)


@gpu.on("cuda")
def test_a_layer_attends_over_a_quantized_cache_in_few_blocks_of_kernels(tmp_path):
    model = small().to("cuda")
    with quantized(model, "int4.token;residual=8") as cache, torch.no_grad():
        counted(lambda: model(IDS[None].to("cuda"), **{cache_argument(model): cache()}, logits_to_keep=1))
    assert gpu.kernels["logsumexp"] == 2 * len(IDS) // 512 == 4, "two for each of two layers; 16 on a CPU"


@gpu.on("cuda")
def test_analyze_waits_as_often_for_long_rows_and_many(tmp_path):
    model = small().to("cuda")

    def measure(tokens: int, window: int) -> int:
        return counted(lambda: rope_patch.analyze(model, TOKENIZER, TEXT, window=window, tokens=tokens))

    assert measure(128, 128) == measure(256, 256), gpu.waits
    assert measure(256, 64) - measure(128, 64) == 2 * 2, "a row waits for its ids alone"


@gpu.on("cuda")
def test_a_patch_adds_no_wait_to_a_training_step(tmp_path):
    """A row is copied, and the model's own loss looks at its labels."""
    row = IDS[None, :512].to("cuda")

    def waits(model):
        model = get_peft_model(model.train(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})

        def step() -> None:
            model(input_ids=row, labels=row, num_items_in_batch=512).loss.backward()

        step()
        return counted(step), model

    plain, _ = waits(small().to("cuda"))
    found, model = waits(patched())
    assert found == plain <= 1, gpu.waits
    rope_patch.save(model.merge_and_unload(), tmp_path / "merged", tokenizer=TOKENIZER)
    rope_patch.verify(tmp_path / "merged")


@pytest.mark.parametrize("kind", ["folder", "adapter", "gguf"])
@gpu.on("cuda")
def test_a_command_reads_weights_onto_the_gpu_and_moves_no_model(tmp_path, kind):
    model = small()
    model.save_pretrained(tmp_path / "folder")
    rope_patch.save(lora(rope_patch.load(tmp_path / "folder", "yarn:factor=4")), tmp_path / "adapter")
    write_toy(model, tmp_path / "gguf.gguf")
    source = next(tmp_path.glob(f"{kind}*"))
    peft.peft_model.infer_device = lambda: "cpu"  # the code of safetensors knows no pretended GPU
    expected = rope_patch.load(source)(IDS[None, :64]).logits
    PreTrainedModel.to = PeftModel.to = lambda *_, **__: pytest.fail("it was held in host memory, and moved")
    loaded = load_model(str(source), Machine("auto", "float32"))
    assert {tensor.device for tensor in (*loaded.parameters(), *loaded.buffers())} == {torch.device("cuda:0")}
    torch.testing.assert_close(loaded(IDS[None, :64].to("cuda")).logits.cpu(), expected)


@needs_trl
@pytest.mark.parametrize("launched", [False, True])
@gpu.on("cuda")
def test_a_recipe_reads_weights_onto_the_gpu_unless_a_launcher_may_spread_them(tmp_path, launched):
    if launched:
        os.environ["WORLD_SIZE"] = "2"
    model = script()["load"](ModelOptions("llama"))
    assert model.device.type == ("cpu" if launched else "cuda")


@gpu.on("cuda")
def test_a_model_on_two_gpus(tmp_path):
    places = {"model.embed_tokens": "cuda:0", "model.rotary_emb": "cuda:0", "model.norm": "cuda:1", "lm_head": "cuda:0"}
    places |= {"model.layers.0": "cuda:0", "model.layers.1": "cuda:1"}
    model = dispatch_model(small(), places, force_hooks=True)
    rope_patch.apply(model, "yarn:factor=4")
    expected = rope_patch.perplexity(patched(), IDS[:256], window=256).nll
    assert rope_patch.perplexity(model, IDS[:256], window=256, chunk=64).nll == pytest.approx(expected, rel=1e-5)
    rope_patch.retrieval(model, TOKENIZER, "passkey", lengths=[256], depths=[0.5], samples=1, haystack=TEXT)
    with quantized(model, FORMATS[2]) as cache:
        rope_patch.perplexity(model, IDS[:128], window=128, cache=cache)
    rope_patch.save(model, tmp_path / "saved", tokenizer=TOKENIZER)
    rope_patch.verify(tmp_path / "saved")
    assert rope_patch.doctor(model).ok
    rope_patch.restore(model)
    assert torch.equal(model.model.rotary_emb.inv_freq.cpu(), small().model.rotary_emb.inv_freq)


@gpu.on("mps")
def test_a_gpu_without_float64(tmp_path):
    model = small().to("mps")
    with pytest.raises(TypeError, match="float64"):
        torch.ones(1, device="mps").double()
    rope_patch.apply(model, "yarn:factor=4")
    assert rope_patch.doctor(model).ok
    rope_patch.compare(model, TOKENIZER, ["default"], SPEC)
    rope_patch.kv_check(model, TOKENIZER, FORMATS[1:], SPEC, limits=Limits(tolerance=1.0))
    rope_patch.analyze(model, TOKENIZER, TEXT, window=128, tokens=256, p_values=[0.5])
