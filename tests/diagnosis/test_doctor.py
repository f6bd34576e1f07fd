"""``doctor`` on models that were broken by hand, in memory and as folders, and on what is wrapped around a model."""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.commands import fail, invoke, run
from support.patches import config_of, edit_json, lora, module_of, patched_model
from support.tiny import PLAIN, SIZE, YARN, tiny_config, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaForCausalLM,
)

import rope_patch
from rope_patch import Diagnosis, doctor
from rope_patch.checkpoints.folder_patch import patch_folder
from rope_patch.diagnosis.check import Check
from rope_patch.patching.older_keys import stated_twice

BROKEN = {}
"""For each function that breaks a model: the check that differs, and a part of what it says."""


def broken(check, said):
    def enter(build):
        BROKEN[build] = (check, said)
        return build

    return enter


@pytest.fixture
def folder(tmp_path):
    """A healthy checkpoint."""
    tiny_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_the_verdict_names_each_other_program_that_computes_another_table_once():
    kinds = ("MLX 0.32 [full]", "MLX 0.32 [sliding]")
    others = [Check(kind, "differs", "plain", program="mlx", counts=False) for kind in kinds]
    healthy = Diagnosis("model", None, {}, (Check("config", "holds", "plain RoPE"), *others))
    verdict = str(healthy).splitlines()[1]
    assert verdict.startswith("OK: 1 of 1") and verdict.count("MLX") == 1
    assert healthy.counting(("mlx",)).verdict.startswith("NOT OK: 2 of 3")


# --- in memory --------------------------------------------------------------------------------------------------------


@broken("config", "changed after the patch")
def a_patched_model_whose_config_is_edited(folder):
    model = patched_model("yarn:factor=4")
    model.config.rope_parameters["factor"] = 8.0
    return model


@broken("context of the patch", "changed after the patch")
def a_patched_model_whose_context_is_edited(folder):
    model = patched_model("yarn:factor=4", target_length=256)
    model.config.max_position_embeddings = 512
    return model


@broken("table in use", "the patch is lost")
def the_second_model_of_one_config(folder):
    first = tiny_model()
    second = LlamaForCausalLM(first.config)
    rope_patch.apply(first, "yarn:factor=4")
    return second


@broken("patch record", "lost its record")
def a_patched_model_without_its_record(folder):
    model = patched_model("yarn:factor=4")
    del model.config.rope_patch
    return model


@broken("patch record", "altered")
def a_patched_model_with_an_altered_record(folder):
    model = patched_model("yarn:factor=4")
    model.config.rope_patch["method"]["factor"] = 2.0
    return model


@broken("table in use", "plain RoPE with a base (rope_theta) of 20000")
def a_buffer_of_another_base(folder):
    model = tiny_model()
    module_of(model).inv_freq.copy_(1 / 20000 ** (torch.arange(8) / 8))
    return model


@broken("table in use", "differs first at pair 2")
def a_buffer_in_which_one_pair_is_wrong(folder):
    model = tiny_model(rope_parameters=YARN, max_position_embeddings=256)
    module_of(model).inv_freq[2].mul_(0.999)
    return model


@broken("adapters", "abf")
def an_adapter_of_another_patch(folder):
    model = an_adapter_under_yarn(folder)
    rope_patch.apply(model, "abf", replace=True)
    return model


@broken("adapters", "never saw")
def an_adapter_whose_patch_is_undone(folder):
    model = an_adapter_under_yarn(folder)
    rope_patch.restore(model)
    return model


def adapter_of(folder):
    return rope_patch.save(lora(rope_patch.load(folder, "yarn:factor=4")), folder / "adapter")


def an_adapter_under_yarn(folder):
    return rope_patch.load(adapter_of(folder))


@broken("adapters", "match nothing")
def an_adapter_within_an_adapter(folder):
    with warnings.catch_warnings(action="ignore"):  # PEFT only warns
        return get_peft_model(lora(tiny_model()), LoraConfig(r=2, target_modules=["q_proj"]))


# --- folders ----------------------------------------------------------------------------------------------------------


def with_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@broken("weights files", "random values")
def a_folder_without_a_tensor(folder):
    return with_weights(folder, lambda weights: weights.pop("model.norm.weight"))


@broken("weights files", "refuses to load")
def a_folder_with_the_weights_of_another_model(folder):
    return with_weights(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(3)}))


@broken("config", "rope_theta is 0")
def a_folder_with_a_base_of_0(folder):
    edit_json(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=0))
    return folder


@broken("leftovers", "model.safetensors.index.json are both there")
def a_folder_of_two_saves(folder):
    tiny_model().save_pretrained(folder / "shards", max_shard_size="100KB")
    (folder / "model.safetensors").rename(folder / "shards" / "model.safetensors")
    return folder / "shards"


@broken("leftovers", "nothing of a patch")
def a_folder_over_a_patched_one(folder):
    rope_patch.save(rope_patch.load(folder, "yarn:factor=4"), folder / "patched")
    tiny_model().save_pretrained(folder / "patched")
    return folder / "patched"


@broken("adapter", "never saw")
def an_adapter_on_another_base(folder):
    adapter = adapter_of(folder)
    edit_json(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=5e5))
    return adapter


@broken("adapter", "adapter_model.safetensors")
def an_adapter_that_was_cut(folder):
    adapter = adapter_of(folder)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    return adapter


@pytest.mark.parametrize("build", BROKEN)
def test_what_is_broken_is_named(build, folder):
    found = doctor(build(folder))
    check, part = BROKEN[build]
    assert found.status == 1 and not found.found("unknown")
    assert any(each.name == check and part in f"{each.found} {each.meaning}" for each in found.found("differs")), found


UNREAD = [
    ("gemma3", YARN, "rope_parameters.factor = 4.0"),
    ("olmo3", YARN, "rope_parameters.rope_theta = 10000.0"),
    ("llama", {"full_attention": YARN}, "rope_parameters.full_attention.rope_type = yarn"),
    ("llama", {"rope_theta": 10000.0, "factor": 4.0}, "rope_parameters.factor = 4.0"),
    ("llama", {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
]


@pytest.mark.parametrize(("family", "stated", "said"), UNREAD)
def test_a_setting_that_nothing_reads_is_named_and_a_patch_takes_its_place(family, stated, said, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "plain")
    edit_json(tmp_path / "plain" / "config.json", lambda config: config.update(rope_parameters=stated))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    for source in (tmp_path / "plain", plain):
        (check,) = doctor(source).found("differs")
        assert said in check.found
    patch_folder(tmp_path / "plain", "yarn:factor=2", tmp_path / "patched")
    assert doctor(tmp_path / "patched").ok


LAYERED = {"sliding_attention": PLAIN, "full_attention": YARN}
TWICE = {
    "base": ("llama", {"rope_parameters": PLAIN}, {"rope_theta": 1e4}, {"rope_theta": 5e5}),
    "base beside rope_scaling": ("llama", {"rope_scaling": YARN}, {"rope_theta": 1e4}, {"rope_theta": 5e5}),
    "share": (
        "phi",
        {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.25},
    ),
    "original context": (
        "llama",
        {"rope_parameters": YARN},
        {"original_max_position_embeddings": 64},
        {"original_max_position_embeddings": 32},
    ),
    "original context of a layer type": (
        "gemma3",
        {"rope_parameters": LAYERED},
        {"original_max_position_embeddings": 64},
        {"original_max_position_embeddings": 32},
    ),
    "type": ("llama", {}, {"rope_parameters": YARN | {"type": "yarn"}}, {"rope_parameters": YARN | {"type": "linear"}}),
    "type of a layer type": (
        "gemma3",
        {},
        {"rope_parameters": LAYERED},
        {"rope_parameters": LAYERED | {"full_attention": YARN | {"type": "default"}}},
    ),
}
"""What a config.json states, an equal value under another key of that meaning, and a value that disagrees."""


@pytest.mark.parametrize("name", TWICE)
def test_a_setting_that_is_stated_twice_is_named_where_the_values_disagree(name, tmp_path):
    family, stated, equal, other = TWICE[name]
    tiny_model(family, max_position_embeddings=256).save_pretrained(tmp_path / "base")
    config = config_of(tmp_path / "base")
    del config["rope_parameters"]
    for values, status in ((equal, 0), (other, 1)):
        (tmp_path / "base" / "config.json").write_text(json.dumps(config | stated | values))
        assert doctor(tmp_path / "base").status == status, doctor(tmp_path / "base")
    (check,) = [check for check in doctor(tmp_path / "base").found("differs") if check.name == "config.json"]
    (key,) = other
    if key == "rope_parameters":
        key = "type"
    assert check.found.count(f"{key} is ") == 2
    said = " ".join(check.found for check in doctor(tmp_path / "base").checks)
    assert len(set(re.findall(r"transformers uses ([^\s;]+)", said))) == 1, "the rows of programs say so, too"
    patch_folder(tmp_path / "base", "default", tmp_path / "out", target_length=512)
    assert doctor(tmp_path / "out").ok, doctor(tmp_path / "out")


@pytest.mark.parametrize(("older", "newer"), [("su", "longrope"), ("mrope", "default")])
def test_another_name_of_a_type_disagrees_with_nothing(older, newer):
    stated = {"rope_scaling.type": older, "rope_scaling.rope_type": newer}
    assert not stated_twice(stated, {"rope_type": newer})


def test_a_base_that_nothing_states_is_a_note(folder):
    assert not [check for check in doctor(folder).checks if check.name == "base"]
    edit_json(folder / "config.json", lambda config: config.pop("rope_parameters"))
    found = doctor(folder)
    (check,) = [check for check in found.checks if check.name == "base"]
    assert found.ok and "10000 is the default of LlamaConfig" in check.found


def test_a_familys_own_base_needs_no_statement(tmp_path):
    tiny_model("gemma3").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.pop("rope_parameters"))
    assert not [check for check in doctor(tmp_path).checks if check.name == "base"]


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("dual_chunk_attention_config", {"chunk_size": 32, "local_size": 8}, True),
        ("sparse_attn_window", 16, True),
        ("use_dual_chunk_attention", False, False),
        ("attention_dropout", 0.1, False),  # which the class knows
        ("intermediate_note", 16, False),
    ],
)
def test_a_key_of_attention_that_engines_alone_may_read_is_named(key, value, named, tmp_path):
    tiny_model("qwen2").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda config: config.update({key: value, "rope_theta": 1e4}))
    found = doctor(tmp_path, for_programs=["vllm"])
    notes = [check for check in found.checks if check.state == "note" and key in check.found]
    assert len(notes) == named and found.status == (3 if named else 0)
    assert doctor(tmp_path).ok


@pytest.mark.parametrize(
    ("tensor", "scheme", "said"),
    [
        ("self_attn.k_scale", None, ["k_scale"]),
        ("mlp.block_scale", None, []),
        ("mlp.block_scale", {"num_bits": 8, "type": "float"}, ["kv_cache_scheme"]),
    ],
)
def test_scales_of_a_cache_are_said_to_be_left_out(tensor, scheme, said, folder):
    with_weights(folder, lambda weights: weights.update({f"model.layers.0.{tensor}": torch.tensor(0.02)}))
    quantization = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    edit_json(folder / "config.json", lambda config: config.update(quantization_config=quantization))
    found = doctor(folder)
    checks = [check.found for check in found.checks if check.name == "cache scales"]
    assert found.ok and [word in sentence for word, sentence in zip(said, checks, strict=True)] == [True] * len(said)


def test_code_that_comes_with_a_checkpoint_is_neither_run_nor_asked_about(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    adapter = adapter_of(folder)
    for place in (folder, adapter):
        (place / "own.py").write_text("raise SystemExit('it was run')")
    own = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Tokenizer", None]}
    edit_json(folder / "config.json", lambda config: config.update(model_type="own", auto_map=own))
    for source in (folder, adapter):
        with pytest.raises(ValueError, match="not run"):
            doctor(source)


def test_settings_beside_those_of_the_text_decoder_are_named(tmp_path):
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    config = AutoConfig.for_model("qwen3_5", text_config=SIZE | linear)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config.save_pretrained(tmp_path)
    assert doctor(tmp_path).ok
    edit_json(tmp_path / "config.json", lambda stated: stated.update(rope_theta=54321.0))
    (check,) = doctor(tmp_path).found("differs")
    assert "rope_theta = 54321.0" in check.found


# --- what is no fault, and what cannot be known -----------------------------------------------------------------------


def compiled(model):
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [lora, torch.nn.DataParallel, compiled])
def test_what_is_wrapped_around_a_model_is_looked_through(wrap):
    assert doctor(wrap(patched_model("yarn:factor=4"))).ok
    wrapped = wrap(tiny_model())
    assert doctor(wrapped).ok
    wrapped.bfloat16()
    assert doctor(wrapped).status == 1


def test_quantized_weights_do_not_matter(folder):
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    assert doctor(AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)).ok


def test_a_changed_folder_is_repaired_from_its_record(folder, tmp_path):
    patched = tmp_path / "patched"
    repaired = tmp_path / "repaired"
    patch_folder(folder, "abf:rope_theta=100000", patched, target_length=256)
    written = (patched / "config.json").read_bytes()

    def wrong_base_and_context(config):
        config["rope_parameters"]["rope_theta"] = 10000.0
        config["max_position_embeddings"] = 64

    edit_json(patched / "config.json", wrong_base_and_context)
    found = doctor(patched)
    (first, *others) = found.found("differs")
    assert "rope_theta is 10000.0, the record says 100000.0" in first.meaning
    assert all("--repair" in check.fix for check in (first, *others))
    # Which of the two bases other programs take was not asked.
    assert {check.state for check in found.checks if check.program} == {"unknown"}
    run("doctor", patched, "--repair", "-o", repaired)
    assert (repaired / "config.json").read_bytes() == written
    assert doctor(repaired).ok


def test_a_config_is_checked_without_the_weights(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")  # as a clone may hold it
    assert doctor(folder).status == 1
    assert doctor(folder, config_only=True).ok
    root = Path(__file__).parents[2]
    if not (root / ".pre-commit-hooks.yaml").is_file():
        pytest.skip("not in the source distribution")
    (hook,) = yaml.safe_load((root / ".pre-commit-hooks.yaml").read_text())
    program, *words = hook["entry"].split()
    assert program == "rope-patch"
    run(*words, folder, "--for", "vllm")
    edit_json(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=-1))
    assert invoke(*words, str(folder)).exit_code == 1


def test_a_repair_needs_a_record_and_a_folder_to_write(folder, tmp_path):
    for words, message in (
        (("-o", tmp_path / "out"), "record"),
        ((), "-o FOLDER"),
        (("--config-only", "-o", tmp_path / "out"), "alone"),
        (("-o", folder), "empty"),
    ):
        assert message in fail("doctor", folder, "--repair", *words)
    assert not (tmp_path / "out").exists()


def test_a_context_that_another_program_multiplies_is_no_other_table(folder):
    linear = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    edit_json(folder / "config.json", lambda config: config.update(rope_parameters=linear))
    (check,) = doctor(folder, for_programs=["vllm"]).found("differs")
    assert "the same table, for a context of 256 tokens and not of 64" in check.found


def test_what_cannot_be_known_is_no_fault(folder):
    with torch.device("meta"):
        unfilled = LlamaForCausalLM(tiny_config("llama"))
        other = tiny_model("gpt2")
    learned = tiny_model()
    module_of(learned).alpha = torch.nn.Parameter(torch.zeros(8))  # as Mistral Large 4 has it
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    reasons = {unfilled: "meta device", other: "no rotary table", learned: "alpha", folder: "not opened"}
    for model, reason in reasons.items():
        found = doctor(model)
        assert found.status == 3 and reason in found.found("unknown")[0].found


def test_an_adapter_without_a_record_on_a_patched_base(folder):
    rope_patch.save(rope_patch.load(folder, "yarn:factor=4"), folder / "patched")
    lora(AutoModelForCausalLM.from_pretrained(folder / "patched")).save_pretrained(folder / "adapter")
    assert doctor(folder / "adapter").status == 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((torch.nn.Linear(1, 1), ()), TypeError),
        ((tiny_model(), ("vllm",)), ValueError),
        (("gpt2", ("tgi",)), ValueError),
    ],
)
def test_what_doctor_refuses(arguments, error):
    model, programs = arguments
    with pytest.raises(error):
        doctor(model, for_programs=programs)


def test_a_patched_phi_3_states_one_original_context(tmp_path):
    plain = tiny_model("phi3", max_position_embeddings=256, original_max_position_embeddings=256)
    plain.save_pretrained(tmp_path / "base")
    for method in ("yarn", "p_rope:p=0.5", "pi"):
        patch_folder(tmp_path / "base", method, tmp_path / method, target_length=512)
        assert doctor(tmp_path / method).ok, doctor(tmp_path / method)
