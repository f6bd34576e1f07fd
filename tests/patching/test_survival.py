"""The table in use is the one applied, whatever is done to the model: shown by calling the module."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from peft import prepare_model_for_kbit_training
from support.patches import FITTING, cos_sin, lora, method_for, module_of, patched_model
from support.subsets import full
from support.tiny import ids, logits, tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import rope_patch

SOME = pytest.mark.parametrize(
    ("family", "name"), [("llama", "yarn"), ("llama", "p_rope"), ("gemma3", "yarn"), ("gemma3", "truncated")]
)


def assert_table(model, patch):
    """Call the module and compare with cos and sin computed here from the applied table."""
    positions = torch.arange(0, 3000, 37)[None]
    for kind, slot in patch.after.items():
        cos, sin = cos_sin(model, positions, kind)
        angles = positions[..., None].float() * slot.inv_freq
        pairs = slot.pairs
        for got, want in ((cos, angles.cos()), (sin, angles.sin())):
            assert torch.equal(got[..., :pairs], want * slot.attention_scaling)
            assert torch.equal(got[..., pairs:], got[..., :pairs])
    assert rope_patch.verify(model).record == patch.record


@SOME
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts(family, name, dtype):
    model = tiny_model(family)
    patch = rope_patch.apply(model, method_for(name))
    assert_table(model.to(dtype), patch)
    assert_table(model.half().float(), patch)


@SOME
def test_meta_to_empty_and_load(family, name):
    model = tiny_model(family)
    weights = model.state_dict()
    patch = rope_patch.apply(model, method_for(name))
    expected = logits(model)
    with torch.device("meta"):
        model = tiny_model(family)
    assert rope_patch.apply(model, method_for(name)).record == patch.record
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    model.tie_weights()
    assert_table(model, patch)
    embed_scale = getattr(model.model.embed_tokens, "scalar_embed_scale", None)
    if embed_scale is not None:  # Gemma's own non-persistent buffer is lost on the way, as in stock models
        model.model.embed_tokens.embed_scale.fill_(embed_scale)
    assert torch.equal(logits(model), expected)


@SOME
def test_copies_and_pickles(family, name):
    model = tiny_model(family)
    keys = list(model.state_dict())
    patch = rope_patch.apply(model, method_for(name))
    assert list(model.state_dict()) == keys  # a patch adds no key
    twin = copy.deepcopy(model)
    whole = io.BytesIO()
    torch.save(model, whole)
    whole.seek(0)
    assert_table(torch.load(whole, weights_only=False), patch)
    assert_table(twin, patch)
    rope_patch.restore(twin)  # the copy is undone on its own
    assert_table(model, patch)


def test_a_table_that_a_tracer_saw_first():
    model = tiny_model()
    patch = rope_patch.apply(model, "yarn:factor=4")
    twin = copy.deepcopy(model)  # whose module has computed nothing yet
    with FakeTensorMode():
        cos_sin(twin, torch.arange(4)[None])
    assert_table(twin, patch)


@SOME
def test_reinitialised_weights(family, name):
    model = tiny_model(family)
    patch = rope_patch.apply(model, method_for(name))
    for module in model.modules():
        module._is_hf_initialized = False
    model.init_weights()
    model.apply(model._init_weights)
    assert_table(model, patch)


@pytest.fixture
def one_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@SOME
def test_fsdp2_on_a_cpu_mesh(family, name, one_process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = tiny_model(family)
    patch = rope_patch.apply(model, method_for(name))
    expected = logits(model)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert torch.allclose(logits(model), expected, atol=1e-6)
    assert_table(model, patch)
    other = tiny_model(family)
    patch = rope_patch.apply(other, method_for(name))
    fully_shard(other, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    other(ids(), use_cache=False).logits.sum().backward()
    assert_table(other, patch)


# --- under wrappers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["patch", "lora"])
def test_under_peft(first):
    model = tiny_model()
    if first == "patch":
        patch = rope_patch.apply(model, method_for("yarn"))
        tuned = lora(model)
    else:
        tuned = lora(model)
        patch = rope_patch.apply(tuned, method_for("yarn"))
    assert_table(tuned, patch)
    changed = logits(tuned)
    with tuned.disable_adapter():
        assert not torch.equal(logits(tuned), changed)
        assert_table(tuned, patch)
    merged = tuned.merge_and_unload()
    assert torch.allclose(logits(merged), changed, atol=1e-4)
    assert_table(merged, patch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), BitsAndBytesConfig(load_in_8bit=True)],
    ids=["4 bits", "8 bits"],
)
def test_quantized(tmp_path, config):
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, device_map="cpu")
    before = logits(model)
    with rope_patch.patched(model, method_for("yarn")) as patch:
        assert_table(model, patch)
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)
    patch = rope_patch.apply(model, method_for("yarn"))
    assert_table(lora(prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)), patch)


def test_dispatched_over_devices(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model")
    spread = {"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map={**spread, "lm_head": "cpu"}, offload_folder=tmp_path / "off"
    )
    stock = module_of(model)
    assert hasattr(stock, "_hf_hook")
    before = logits(model)
    with rope_patch.patched(model, "yarn:factor=4") as patch:
        assert module_of(model)._hf_hook is stock._hf_hook
        assert torch.allclose(logits(model), logits(patched_model("yarn:factor=4")), atol=1e-6)
        assert_table(model, patch)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gradients_with_and_without_checkpointing(family):
    def gradients(checkpointing):
        model = tiny_model(family).train()
        rope_patch.apply(model, method_for("yarn"))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids(), labels=ids(), use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = gradients(False)
    checkpointed = gradients(True)
    for name in plain:
        assert torch.allclose(plain[name], checkpointed[name], atol=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [case if case == ("gemma3", "p_rope") else full(*case) for case in FITTING],
)
def test_compiled(family, name):
    """One graph, no break, no recompilation with the length or from step to step."""
    from torch._dynamo.testing import CompileCounter

    model = patched_model(method_for(name), family)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)  # raises where the graph breaks
    for length in (20, 21, 33, 48):
        assert torch.allclose(logits(compiled, ids(length)), logits(model, ids(length)), atol=1e-6)
    assert counter.frame_count <= 2  # as many as the original model
    rope_patch.verify(compiled)
