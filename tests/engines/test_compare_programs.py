"""What each program reads of a checkpoint: prepared folders whose tables are known, and the rules against the report.

The rules themselves are held against the programs by ``test_real_engines.py``, which needs them.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from support.commands import run
from support.gguf_files import write_toy
from support.patches import edit_json, patched_model, saved_with
from support.program_options import flags
from support.subsets import full
from support.tiny import ARCHITECTURES, PLAIN, YARN, tiny_model, without_base
from transformers import Gemma3Config

import rope_patch
from rope_patch.engines import export
from rope_patch.engines.compare_programs import compare_programs
from rope_patch.engines.programs import PROGRAMS
from rope_patch.gguf.patch import patch_gguf


def written(folder, family="llama", **changes):
    """A checkpoint as plain transformers saves it, with other keys in its config.json."""
    model = tiny_model(family)
    return saved_with(model, folder, **changes)


def patched(folder, method, family="llama", **options):
    return rope_patch.save(patched_model(method, family, **options), folder)


def rows(source, program):
    return {row.layer_type: row for row in compare_programs(source).rows if row.program == program}


def verdicts(source):
    return {row.program: row.verdict for row in compare_programs(source).rows if row.layer_type is None}


LINEAR = {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}
YARN = YARN | {"rope_theta": 5e4}
OWN = {"rope_type": "default", "rope_theta": 5e4}
WHOLE = {"max_position_embeddings": 256}
OLDER = {"rope_parameters": None, "rope_theta": 5e4}


def full_only(parameters):
    return {"full_attention": parameters, "sliding_attention": PLAIN}


# A family, the keys of its config, and by program the verdict and a part of what is found.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[str, str]]]] = {
    "vLLM obeys a factor of YaRN, and SGLang, llama.cpp and MLX compute their own": (
        "llama",
        OLDER | {"rope_scaling": without_base(YARN | {"attention_factor": 1.5}), **WHOLE},
        {
            "transformers-4": ("agrees", ""),
            "vllm": ("agrees", ""),
            "sglang": ("differs", "attention factor"),
            "llama.cpp": ("differs", "attention factor"),
            "mlx": ("differs", "attention factor"),
        },
    ),
    "llama.cpp's loader takes YaRN's usual ends of the ramp": (
        "llama",
        {"rope_parameters": YARN | {"beta_fast": 16.0}, **WHOLE},
        {"vllm": ("agrees", ""), "llama.cpp": ("differs", "other frequencies")},
    ),
    "transformers 4 and MLX look for a base at the top": (
        "llama",
        {"rope_parameters": OWN},
        {
            "transformers-4": ("differs", "base of its own"),
            "mlx": ("differs", "base of its own"),
            "vllm": ("agrees", ""),
        },
    ),
    "YaRN of factor 3 gives 192 positions, and the config states 256": (
        "llama",
        {"rope_parameters": YARN | {"factor": 3.0}, **WHOLE},
        {"vllm": ("differs", "context of 192 tokens"), "sglang": ("differs", "context of 192 tokens")},
    ),
    "a context that is multiplied": (
        "llama",
        {"rope_parameters": LINEAR, **WHOLE},
        dict.fromkeys(("vllm", "sglang"), ("differs", "context of 1024 tokens")),
    ),
    "a context that is not multiplied on Gemma 3, as every published one states it": (
        "gemma3",
        {"rope_parameters": full_only(LINEAR | {"factor": 8.0}), "max_position_embeddings": 512},
        {"vllm": ("agrees", "")},
    ),
    # vLLM takes the smallest, or model_max_length; SGLang the first of its list, before max_position_embeddings
    "other keys that engines take for the context": (
        "llama",
        {"rope_parameters": OWN, **WHOLE, "seq_length": 192, "max_sequence_length": 512},
        {"vllm": ("differs", "context of 192"), "sglang": ("differs", "context of 512")},
    ),
    "model_max_length is the context of vLLM": (
        "llama",
        {"rope_parameters": OWN, **WHOLE, "seq_length": 192, "model_max_length": 1024},
        {"vllm": ("differs", "context of 1024")},
    ),
    "a factor of linear that is an integer": (
        "llama",
        {"rope_parameters": LINEAR | {"factor": 4}},
        dict.fromkeys(("vllm", "sglang"), ("refuses", "")),
    ),
    "YaRN without its original context": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0}},
        {"llama.cpp": ("refuses", "original_max_position_embeddings")},
    ),
    "MLX scales nothing on GLM-4": (
        "glm4",
        OLDER | {"rope_scaling": without_base(YARN), "partial_rotary_factor": 0.5, **WHOLE},
        {"vllm": ("agrees", ""), "mlx": ("differs", "plain RoPE")},
    ),
    "a base that a program does not read may be its own": (
        "stablelm",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
        {"llama.cpp": ("unverified", "not asked")},
    ),
    "a window of all layers": (
        "mistral",
        {"rope_parameters": PLAIN, "sliding_window": 16},
        {
            **dict.fromkeys(("transformers-4", "vllm"), ("agrees", "")),
            **dict.fromkeys(("sglang", "llama.cpp", "mlx"), ("differs", "no sliding window")),
        },
    ),
    "a window as long as the context": (
        "mistral",
        {"rope_parameters": PLAIN, "sliding_window": 64},
        dict.fromkeys(PROGRAMS, ("agrees", "")),
    ),
    "a table that changes with the length": (
        "llama",
        {"rope_parameters": LINEAR | {"rope_type": "dynamic"}},
        dict.fromkeys(PROGRAMS, ("unverified", "--freeze-at")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_program_computes(tmp_path, case):
    family, changes, expected = CASES[case]
    folder = written(tmp_path / "model", family, **changes)
    for program, (verdict, part) in expected.items():
        found = rows(folder, program)
        row = found.get(None) or found["full_attention"]
        assert (row.verdict, part in row.found) == (verdict, True), (program, row)


def test_a_plain_table_is_read_alike_by_all(tmp_path):
    # transformers 5 writes the base into rope_parameters alone, and 10000 is what transformers 4 takes without one
    assert set(verdicts(written(tmp_path / "plain")).values()) == {"reference", "agrees"}


MENDED = {
    "vLLM obeys a factor of YaRN, and SGLang, llama.cpp and MLX compute their own": "sglang",
    "transformers 4 and MLX look for a base at the top": "transformers-4",
    "other keys that engines take for the context": "sglang",
    "a context that is multiplied": "vllm",
    "a factor of linear that is an integer": "vllm",
}


@pytest.mark.parametrize("case", MENDED)
def test_the_command_that_is_named_mends_a_difference(tmp_path, case):
    family, changes, _ = CASES[case]
    program = MENDED[case]
    row = rows(written(tmp_path / "a model", family, **changes), program)[None]
    assert row.verdict in ("differs", "refuses")
    command, _, then = row.fix.replace("OUT", str(tmp_path / "out")).partition(", which")
    assert shlex.split(command)[:2] == ["rope-patch", "export"] and then.endswith(f"--for {program}")
    run(*shlex.split(command)[1:])
    assert rows(tmp_path / "out", program)[None].verdict == "agrees"


def test_where_the_config_is_not_what_the_record_describes_that_is_repaired_first(tmp_path):
    folder = patched(tmp_path / "yarn", "yarn:factor=4")
    forms = ("rope_parameters", "rope_scaling")
    edit_json(folder / "config.json", lambda config: [config[form].update(attention_factor=1.5) for form in forms])
    assert "--repair" in rows(folder, "sglang")[None].fix


def test_p_rope_on_gemma_3_leaves_its_sliding_layers_alone_in_vllm(tmp_path):
    """The share of full attention at the top of config.json would be one of all layers."""
    folder = patched(tmp_path / "p", "p_rope:p=0.5", "gemma3")
    assert {row.verdict for row in rows(folder, "vllm").values()} == {"agrees"}
    export(folder, tmp_path / "out", to="vllm")


def test_a_scaling_that_is_not_read_is_missing_over_every_base(tmp_path):
    parameters = YARN | {"rope_theta": 1e4}
    assert rows(written(tmp_path, rope_parameters=parameters), "transformers-4")[None].found == "it computes plain RoPE"


def test_a_context_within_the_original_one_is_a_form_of_its_own(tmp_path):
    """Beyond it vLLM multiplies cos and sin of Phi-3 by a factor of its own."""
    assert verdicts(patched(tmp_path / "p", "p_rope:p=0.5", "phi3", target_length=256))["vllm"] == "agrees"


def test_a_program_that_fails_is_no_disagreement(tmp_path):
    folder = patched(tmp_path / "p", "p_rope:p=0.5")
    row = rows(folder, "transformers-4")[None]
    assert row.verdict == "refuses" and "'proportional'" in row.found
    assert verdicts(folder)["sglang"] == "agrees"  # the share stands at the top of its config, too


def test_scaled_sliding_layers_of_gemma_3_are_caught(tmp_path):
    folder = patched(tmp_path / "both", "pi:factor=4", "gemma3", layer_types=("full_attention", "sliding_attention"))
    assert {row.verdict for row in rows(folder, "vllm").values()} == {"agrees"}
    read = rows(folder, "sglang")
    assert (read["full_attention"].verdict, read["sliding_attention"].verdict) == ("agrees", "differs")
    assert "plain RoPE" in read["sliding_attention"].found


def test_a_gemma_3_file_whose_sliding_layers_are_scaled_too_is_caught(tmp_path):
    """llama.cpp has one factor on cos and sin for all layers."""
    scaled = {"rope__freq_base": 1e6, "rope__freq_base_swa": 1e4, "rope__scaling__attn_factor": 1.25}
    file = write_toy(tiny_model("gemma3"), tmp_path / "gemma3.gguf", **scaled)
    sliding = rows(file, "llama.cpp")["sliding_attention"]
    assert sliding.verdict == "differs" and "attention factor 1.25" in sliding.found
    assert "one factor on cos and sin for all layers" in sliding.reason


def test_the_text_config_of_a_multimodal_checkpoint_is_read(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = tiny_model("gemma3").config.to_dict()
    text["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0}
    Gemma3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path / "whole")
    read = {name: rows(tmp_path / "whole", name)["full_attention"].verdict for name in PROGRAMS}
    assert (read["vllm"], read["sglang"], read["llama.cpp"]) == ("agrees", "agrees", "unverified")
    assert (read["transformers-4"], read["mlx"]) == ("differs", "differs")


def test_a_family_that_was_not_compared_is_unverified(tmp_path):
    tiny_model("olmo_hybrid").save_pretrained(tmp_path)
    assert set(verdicts(tmp_path).values()) == {"reference", "unverified"}


@pytest.mark.parametrize(
    "family", [family if family in ("llama", "phi3", "gemma4") else full(family) for family in ARCHITECTURES]
)
def test_what_is_exported_agrees_where_it_is_claimed(family, tmp_path):
    export(patched_model("yarn:factor=4:attention_factor=1.5", family, target_length=256), tmp_path / "out", to="vllm")
    assert {row.verdict for row in rows(tmp_path / "out", "vllm").values()} == {"agrees"}


def test_a_gguf_file_is_read_from_its_header(tmp_path):
    plain = write_toy(tiny_model(), tmp_path / "plain.gguf")
    patch_gguf(plain, "yarn:factor=4", tmp_path / "yarn.gguf")
    found = compare_programs(tmp_path / "yarn.gguf")
    read = {row.program: row for row in found.rows}
    told = {name: read[name].verdict for name in ("llama.cpp", "transformers-5", "vllm")}
    assert told == {"llama.cpp": "reference", "transformers-5": "differs", "vllm": "unverified"}
    assert "attention factor 1," in read["transformers-5"].found  # its own table is plain
    assert [row.verdict for row in compare_programs(plain).rows[:2]] == ["reference", "agrees"]


def test_layers_that_run_otherwise_are_named():
    """The toy Gemma 3, every second layer of which is full attention: real MLX differs by up to 2.5 nats."""
    toy = rope_patch.data_path("assets") / "gemma3"
    read = rows(toy, "mlx")
    assert "does not read layer_types" in read["full_attention"].found
    assert read["full_attention"].fix.startswith(f"rope-patch export {toy} --to hf -o OUT")


def test_options_are_refused_where_layers_would_run_otherwise(tmp_path):
    folder = written(tmp_path, "mistral", rope_theta=1e4, sliding_window=16)
    with pytest.raises(ValueError, match="no sliding window"):
        flags(folder, "abf", "sglang", target_length=256)
    assert flags(folder, "abf", "vllm", target_length=256).lines


def test_what_apply_and_export_write_was_asked_about_on_the_families_that_people_have(tmp_path):
    """On these the page, the action and the cards can answer without the engine."""
    for family in ("llama", "qwen2", "qwen3", "gemma3", "granite"):
        folder = patched(tmp_path / family, "yarn:factor=4", family)
        read = {name: rows(folder, name) for name in ("transformers-4", "vllm", "mlx")}
        assert {row.verdict for each in read.values() for row in each.values()} == {"agrees"}, family
