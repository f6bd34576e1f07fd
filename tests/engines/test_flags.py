"""Options for other programs: what is printed is parsed again, and transformers builds the method's table from it."""

import json
import shlex

import pytest
import torch
from support.commands import fail
from support.gguf_files import write_toy
from support.patches import edit_json, patched_model, saved_with
from support.program_options import flags
from support.subsets import covering
from support.tiny import SIZE, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, Gemma4Config, Qwen3_5Config

import rope_patch
from rope_patch.engines.programs import PROGRAMS, UNVERIFIED
from rope_patch.gguf.patch import patch_gguf
from rope_patch.patching.verify import inspect_model

METHODS = [
    "pi:factor=4",
    "abf",
    "yarn:factor=4:attention_factor=1.5",
    "yarn:factor=5",
    "p_rope:p=0.5",
    "nope",
    "truncated",
]


@pytest.fixture
def base(tmp_path):
    return saved_with(tiny_model(), tmp_path / "base")


def option(lines, name):
    words = shlex.split(" ".join(lines))
    return words[words.index(name) + 1]


def expected(method, family="llama"):
    model = patched_model(method, family, target_length=256)
    return {table.layer_type: table for table in inspect_model(model).tables}


def read_by_transformers(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {table.layer_type: table for table in inspect_model(model).tables}


def assert_same(read, tables):
    assert set(read) == set(tables)
    for kind, table in tables.items():
        assert torch.allclose(read[kind].inv_freq, table.inv_freq, rtol=3e-7, atol=0.0)
        assert read[kind].attention_scaling == pytest.approx(table.attention_scaling)
        assert read[kind].max_position_embeddings == 256


OPTIONS = {"vllm": ("--hf-overrides", "--max-model-len"), "sglang": ("--json-model-override-args", "--context-length")}


@covering(program=list(OPTIONS), method=METHODS)
def test_overrides_of_engines_give_the_table_in_transformers(base, program, method):
    """vLLM sets a key in the place of the old one, and SGLang merges a dictionary into it."""
    written = flags(base, method, program, target_length=256)
    config = AutoConfig.from_pretrained(base)
    overrides, length = OPTIONS[program]
    for key, value in json.loads(option(written.lines, overrides)).items():
        merges = program == "sglang" and isinstance(value, dict)
        setattr(config, key, {**getattr(config, key), **value} if merges else value)
    assert_same(read_by_transformers(config), expected(method))
    assert option(written.lines, length) == "256"
    # Without a length, the context that the method reaches: 4 and 5 times 64; one that reaches no further keeps 64.
    reached = {"pi:factor=4": 256, "yarn:factor=4:attention_factor=1.5": 256, "yarn:factor=5": 320}.get(method, 64)
    written = flags(base, method, program)
    assert (written.settings["max_position_embeddings"], option(written.lines, length)) == (reached, str(reached))


def test_llama_cpp_takes_a_base_linear_scaling_and_yarn(base):
    yarn = flags(base, "yarn:factor=4", "llama.cpp", target_length=256).lines
    words = {"--rope-scaling": "yarn", "--rope-scale": "4", "--yarn-orig-ctx": "64", "--yarn-beta-fast": "32"}
    assert {name: option(yarn, name) for name in words} == words
    assert "--override-kv llama.context_length=int:256" in yarn
    assert flags(base, "yarn:factor=4", "llama.cpp").lines == yarn, "what the method reaches"
    assert "--rope-freq-base 500000" in flags(base, "abf", "llama.cpp", target_length=256).lines
    assert "--rope-scaling linear" in flags(base, "pi:factor=4", "llama.cpp", target_length=256).lines


@pytest.mark.parametrize(
    "method", ["p_rope:p=0.5", "yarn:factor=4:attention_factor=1.5", "truncated", "llama3:factor=4"]
)
def test_llama_cpp_refuses_what_its_options_cannot_express(base, method):
    with pytest.raises(ValueError, match="rope-patch apply"):
        flags(base, method, "llama.cpp", target_length=256)


def test_a_gguf_with_a_table_of_its_own_is_refused(tmp_path):
    write_toy(tiny_model(), tmp_path / "plain.gguf")
    assert "--rope-scale 4" in flags(tmp_path / "plain.gguf", "yarn:factor=4", "llama.cpp", target_length=256).lines
    patch_gguf(tmp_path / "plain.gguf", "truncated", tmp_path / "p.gguf")
    with pytest.raises(ValueError, match="patched"):
        flags(tmp_path / "p.gguf", "yarn:factor=4", "llama.cpp", target_length=256)
    with pytest.raises(ValueError, match="folder"):
        flags(tmp_path / "plain.gguf", "yarn:factor=4", "vllm", target_length=256)


def test_wrong_arguments_say_what_to_do(base, tmp_path):
    words = ("settings", base, "abf", "--for")
    assert "sglang" in fail(*words, "tgi")
    rope_patch.checkpoints.folder_patch.patch_folder(base, "abf", tmp_path / "patched")
    assert "patched already" in fail("settings", tmp_path / "patched", "abf")


@pytest.mark.parametrize("method", ["abf", "pi:factor=4", "yarn:factor=4"])
def test_options_that_reach_every_other_layer_are_refused(method, tmp_path):
    """llama.cpp's models/gemma2.cpp takes base and scale of sliding layers from the file, whatever is on its line."""
    tiny_model("gemma2").save_pretrained(tmp_path / "gemma2")
    with pytest.raises(ValueError, match="gemma2"):
        flags(tmp_path / "gemma2", method, "llama.cpp", target_length=256)
    tiny_model("gemma").save_pretrained(tmp_path / "gemma")
    assert flags(tmp_path / "gemma", method, "llama.cpp", target_length=256).lines


@pytest.mark.parametrize("program", OPTIONS)
def test_every_key_that_an_engine_takes_for_the_context_is_given(program, tmp_path):
    tiny_model("llama", seq_length=64, model_max_length=64).save_pretrained(tmp_path / "llama")
    settings = flags(tmp_path / "llama", "yarn:factor=4", program, target_length=256).settings
    assert (settings["seq_length"], settings["model_max_length"]) == (256, 256)


def test_a_share_that_sglang_may_not_see_is_not_vouched_for(tmp_path):
    """Its code fails there: 6 factors, and 8 pairs of features that it rotates."""
    share = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    tiny_model("phi3", partial_rotary_factor=0.75, rope_parameters=share).save_pretrained(tmp_path / "phi3")
    # It stays in rope_parameters, where transformers 5 reads it.
    edit_json(tmp_path / "phi3" / "config.json", lambda config: config.pop("partial_rotary_factor"))
    assert UNVERIFIED in flags(tmp_path / "phi3", "pi:factor=4", "sglang", target_length=256).shown_by


def multimodal(folder, family="gemma3", **changes):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    whole = {"gemma3": Gemma3Config, "gemma4": Gemma4Config}[family]
    whole(text_config=tiny_model(family, **changes).config.to_dict(), vision_config=vision).save_pretrained(folder)
    return folder


@covering(method=["yarn:factor=4", "p_rope:p=0.5"], family=["gemma3", "gemma4"])
def test_options_of_vllm_reach_the_text_config_of_a_multimodal_checkpoint(family, method, tmp_path):
    """vLLM 0.33.0 merges what stands there into the dictionaries of the config (``ModelConfig._update_nested``)."""
    written = flags(multimodal(tmp_path, family), method, "vllm", target_length=256)
    assert written.shown_by.startswith(f"vLLM {PROGRAMS['vllm'].version}")
    stated = json.loads(option(written.lines, "--hf-overrides"))
    assert list(stated) == ["text_config"]
    config = AutoConfig.from_pretrained(tmp_path).text_config
    for key, value in stated["text_config"].items():
        setattr(config, key, merged(getattr(config, key), value) if isinstance(value, dict) else value)
    assert_same(read_by_transformers(config), expected(method, family))


@covering(method=["yarn:factor=4", "p_rope:p=0.5"], family=["gemma3", "gemma4"])
def test_settings_reach_the_text_config_of_a_multimodal_checkpoint(family, method, tmp_path):
    keys = rope_patch.settings(multimodal(tmp_path, family), method, target_length=256)
    config = AutoConfig.from_pretrained(tmp_path, **keys).text_config
    assert_same(read_by_transformers(config), expected(method, family))


def merged(old, new):
    return old | {key: merged(old.get(key, {}), each) if isinstance(each, dict) else each for key, each in new.items()}


def test_options_of_sglang_replace_the_tables_of_a_text_config(tmp_path):
    written = flags(multimodal(tmp_path), "yarn:factor=4", "sglang", target_length=256)
    stated = json.loads(option(written.lines, "--json-model-override-args"))["text_config"]
    config = AutoConfig.from_pretrained(tmp_path).text_config
    config.update(stated)
    assert_same(read_by_transformers(config), expected("yarn:factor=4", "gemma3"))


@pytest.mark.parametrize("program", OPTIONS)
def test_what_was_not_compared_on_a_multimodal_checkpoint_is_unverified(program, tmp_path):
    """transformers builds the text model alone of Qwen3.5, and its table is stated in text_config all the same."""
    layers = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "linear_key_head_dim": 8}
    Qwen3_5Config(text_config={**SIZE, **layers, "linear_value_head_dim": 8}).save_pretrained(tmp_path)
    written = flags(tmp_path, "yarn:factor=4", program, target_length=256)
    assert written.shown_by.startswith("unverified")
    assert list(json.loads(option(written.lines, OPTIONS[program][0]))) == ["text_config"]


def test_options_of_llama_cpp_are_refused_where_it_gives_windows_to_other_layers(tmp_path):
    """It takes every sixth layer of Gemma 3 for full attention."""
    with pytest.raises(ValueError, match="layer_types"):
        flags(multimodal(tmp_path), "yarn:factor=4", "llama.cpp", target_length=256)


def test_options_of_llama_cpp_need_no_text_config(tmp_path):
    written = flags(
        multimodal(tmp_path, num_hidden_layers=6, layer_types=None), "yarn:factor=4", "llama.cpp", target_length=256
    )
    assert written.settings["--rope-scale"] == 4.0
