"""Export: one config that transformers 5 and 4 read alike, the same table back, adapters, refusals."""

import pytest
import torch
import transformers
from support.commands import fail, fail_without_a_trace, invoke, run
from support.gguf_files import write_toy
from support.patches import config_of, edit_json, lora, read_json, saved_with
from support.prompting import TOKENIZER
from support.subsets import byte_level_llama, covering
from support.tiny import ARCHITECTURES, YARN, bundled_model, logits, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
import rope_patch.engines
from rope_patch.checkpoints.folder_patch import verify_folder
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.engines import export
from rope_patch.engines.programs import PROGRAMS, UNVERIFIED
from rope_patch.gguf.patch import patch_gguf
from rope_patch.patching.verify import inspect_model

METHODS = ["pi:factor=4", "abf", "yarn:factor=5:attention_factor=1.5", "p_rope:p=0.5", "truncated"]


def strong_model(family):
    """A random model whose logits feel every weight, norms and biases included."""
    model = tiny_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.3)
    return model


@pytest.fixture
def base(tmp_path):
    return saved_with(strong_model("llama"), tmp_path / "base")


@pytest.fixture
def adapter(base, tmp_path):
    model = lora(rope_patch.load(base, "p_rope:p=0.5"))
    rope_patch.save(model, tmp_path / "adapter")
    return tmp_path / "adapter", logits(model)


def version_of(to):
    return transformers.__version__ if to == "hf" else PROGRAMS[to].version


TO = [*((family, "vllm") for family in ARCHITECTURES), ("llama", "hf"), ("gemma3", "hf"), ("phi3", "sglang")]


@covering(family_to=TO, method=METHODS)
def test_the_same_table_is_read_back(family_to, method, tmp_path):
    family, to = family_to
    first = saved_with(strong_model(family), tmp_path / "base")
    out = tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(first)
    try:
        rope_patch.apply(model, method, target_length=256)
        report = export(first, out, to=to, method=method, target_length=256)
    except ValueError as refused:
        assert not out.exists()
        reasons = ("nothing but rope_theta", "gemma4", "recomputes")
        assert any(reason in str(refused) for reason in reasons)
        return
    assert report == read_json(out / "export.json")
    assert report["checked_against"] == version_of(to)
    plain = AutoModelForCausalLM.from_pretrained(out)
    # transformers' own types are said as they are to it; the longrope form may miss the last bit of a frequency.
    assert torch.allclose(logits(plain), logits(model), rtol=1e-4, atol=1e-4 if to != "hf" else 0.0)
    for read_back, table in zip(
        inspect_model(model_without_weights(out)).tables, inspect_model(model).tables, strict=True
    ):
        assert torch.allclose(read_back.inv_freq, table.inv_freq, rtol=3e-7, atol=0)
        assert read_back.attention_scaling == pytest.approx(table.attention_scaling)
    assert verify_folder(out).to_method() == rope_patch.inspect(model).record.to_method()
    assert plain.config.max_position_embeddings == 256
    assert (out / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_both_encodings_and_the_keys_of_engines(base, tmp_path):
    export(base, tmp_path / "out", to="sglang", method="yarn:factor=5:attention_factor=1.5", target_length=256)
    config = config_of(tmp_path / "out")
    new = config["rope_parameters"]
    old = config["rope_scaling"]
    assert new == old and config["rope_theta"] == new["rope_theta"] == 10000.0
    assert new["rope_type"] == "longrope" and new["short_factor"] == new["long_factor"]
    assert new["short_mscale"] == new["long_mscale"] == new["attention_factor"] == 1.5
    assert new["original_max_position_embeddings"] == config["max_position_embeddings"] == 256
    assert config["rope_patch"]["method"]["method"] == "yarn"


def test_yarn_stays_native_where_the_tables_of_engines_are_long_enough(tmp_path):
    for factor, kind in ((4.0, "yarn"), (2.0, "longrope")):  # 64 * factor positions, for a context of 256
        stated = tiny_model(rope_parameters=YARN | {"factor": factor}, max_position_embeddings=256)
        report = export(saved_with(stated, tmp_path / f"base-{factor}"), tmp_path / str(factor), to="vllm")
        assert [table["rope_type"] for table in report["tables"]] == [kind]


def test_a_share_that_transformers_ignores_is_not_passed_on(tmp_path):
    # vLLM would rotate half of each head where transformers' Llama rotates all of it.
    encoded = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    first = saved_with(tiny_model(rope_parameters=encoded), tmp_path / "base")
    assert inspect_model(model_without_weights(first)).tables[0].rotary_dim == 16
    export(first, tmp_path / "out", to="vllm")
    config = config_of(tmp_path / "out")
    assert "partial_rotary_factor" not in config and "partial_rotary_factor" not in config["rope_parameters"]
    assert inspect_model(model_without_weights(tmp_path / "out")).tables[0].rotary_dim == 16


def test_an_unknown_family_is_unverified(tmp_path):
    first = saved_with(tiny_model("doge"), tmp_path / "base")
    report = export(first, tmp_path / "out", to="vllm", method="pi:factor=2")
    assert report["checked_against"] == UNVERIFIED


# --- adapters


def test_an_adapter_is_merged(adapter, tmp_path):
    folder, expected = adapter
    report = export(folder, tmp_path / "out", to="vllm")
    assert report["tables"][0]["rope_type"] == "longrope"
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), expected, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


def test_a_model_in_memory_is_exported_as_its_folder_is(base, tmp_path):
    model = rope_patch.load(base, "p_rope:p=0.5")
    written = rope_patch.export(model, tmp_path / "out", to="vllm")
    assert written == rope_patch.export(base, tmp_path / "copy", to="vllm", method="p_rope:p=0.5")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(plain), logits(model), rtol=1e-4, atol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "copy", "out"]


def test_an_unpatched_model_in_memory_takes_a_method_and_its_tokenizer_along(tmp_path):
    model = bundled_model()
    rope_patch.export(model, tmp_path / "out", to="sglang", method="pi", target_length=1024)
    assert config_of(tmp_path / "out")["max_position_embeddings"] == 1024
    assert AutoTokenizer.from_pretrained(tmp_path / "out").model_max_length == 1024
    assert rope_patch.inspect(model).record is None


def test_an_adapter_is_served_with_its_base_under_the_method_that_doctor_names(adapter, base, tmp_path):
    """The two commands of docs/serving.md."""
    from peft import PeftModel

    folder, expected = adapter
    method = run("doctor", folder).partition("trained under ")[2].partition(",")[0]
    run("export", base, "--to", "vllm", "--method", method, "-o", tmp_path / "out")
    served = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), folder)
    assert torch.equal(logits(served), expected)


@byte_level_llama
@pytest.mark.parametrize(("words", "dtype"), [((), torch.bfloat16), (("--dtype", "float32"), torch.float32)])
def test_a_gguf_file_becomes_a_folder_of_transformers(tmp_path, words, dtype):
    """With its table, its vocabulary, and weights in bfloat16 or as asked for; the memory is said first."""
    plain = tmp_path / "plain.gguf"
    first = tmp_path / "a.gguf"
    out = tmp_path / "out"
    text = "Once upon a time, there was a dog."
    write_toy(bundled_model(), plain, TOKENIZER)
    patch_gguf(plain, "yarn:factor=4", first, target_length=1024)
    assert "dequantizing" in invoke("export", first, "--to", "hf", *words, "-o", out).stderr.splitlines()[0]
    stock = AutoModelForCausalLM.from_pretrained(out)
    assert stock.dtype == dtype
    assert torch.equal(logits(stock), logits(rope_patch.load(first, dtype=dtype)))
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == TOKENIZER(text).input_ids
    with pytest.raises(ValueError, match="GGUF"):
        export(first, tmp_path / "b.gguf", to="gguf")


@pytest.mark.filterwarnings("ignore:Could not find a config file")  # PEFT, of the base
def test_an_adapter_over_a_gguf_file_is_written_in_bfloat16_too(tmp_path):
    model = rope_patch.load(write_toy(tiny_model(vocab_size=1024), tmp_path / "m.gguf"), "yarn", target_length=256)
    rope_patch.save(lora(model), tmp_path / "adapter")
    for dtype in ("auto", "float32"):
        export(tmp_path / "adapter", tmp_path / dtype, dtype=dtype, to="hf")
    dtypes = [AutoModelForCausalLM.from_pretrained(tmp_path / name).dtype for name in ("auto", "float32")]
    assert dtypes == [torch.bfloat16, torch.float32]


def test_an_adapter_and_its_base_are_not_overwritten(adapter, base, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for out in (adapter[0], base):
        words = ("export", adapter[0], "--to", "vllm", "-o", out, "--force")
        assert "is the model itself or the base of the adapter" in fail(*words)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


# --- refusals and bad input


def test_tables_that_sglang_would_lose_are_refused(tmp_path):
    first = saved_with(tiny_model("gemma2"), tmp_path / "base")
    with pytest.raises(ValueError, match="plain RoPE"):
        export(first, tmp_path / "out", to="sglang", method="yarn:factor=4")
    assert not (tmp_path / "out").exists()
    assert export(first, tmp_path / "abf", to="sglang", method="abf")["checked_against"] == version_of("sglang")


def test_one_table_of_two_is_checked_by_its_layer_type(tmp_path):
    first = saved_with(tiny_model("gemma3"), tmp_path / "base")
    export(first, tmp_path / "full", to="sglang", method="pi:factor=4")
    full = config_of(tmp_path / "full")
    assert (full["rope_local_base_freq"], full["rope_scaling"]["rope_type"]) == (10000.0, "longrope")
    options = {"method": "pi:factor=4", "layer_types": ["sliding_attention"]}
    with pytest.raises(ValueError, match="sliding_attention"):
        export(first, tmp_path / "out", to="sglang", **options)
    assert any("transformers 4" in note for note in export(first, tmp_path / "out", to="vllm", **options)["notes"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("{base}", "--to", "tgi", "-o", "{out}"), "sglang"),
        (("{base}", "--to", "vllm", "-o", "{full}"), "empty"),
        (("{base}", "--to", "vllm", "-o", "{base}"), "base"),
        (("{base}", "--to", "vllm", "--dtype", "float16", "-o", "{out}"), "dtype"),
    ],
)
def test_errors_are_one_line_and_write_nothing(base, arguments, word):
    fail_without_a_trace(base, ("export", *arguments), word)


def test_an_altered_record_is_not_exported(base, tmp_path):
    rope_patch.save(rope_patch.load(base, "pi:factor=4"), base)
    edit_json(base / "config.json", lambda config: config["rope_patch"]["method"].update(factor=3.0))
    with pytest.raises(rope_patch.PatchError, match="tables"):
        export(base, tmp_path / "out", to="vllm")


def test_force_replaces(base, tmp_path):
    out = tmp_path / "out"
    export(base, out, to="vllm", method="pi:factor=4")
    export(base, out, to="vllm", method="abf", overwrite=True)
    assert config_of(out)["rope_parameters"]["rope_type"] == "default"
