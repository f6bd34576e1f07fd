"""What each program reads of a checkpoint: prepared folders whose tables are known, and the rules against the report.

The rules themselves are held against the programs by ``test_real_engines.py``, which needs them.
"""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.gguf_files import write_toy
from support.patches import edit_json, patched_model, saved_with
from support.program_options import flags
from support.subsets import full
from support.tiny import ARCHITECTURES, LLAMA3, PLAIN, YARN, tiny_model
from transformers import Gemma3Config

import rope_patch
from rope_patch.engines import export
from rope_patch.engines.compare_programs import OTHER_KEYS, compare_programs
from rope_patch.engines.tables_by_program import PROGRAMS
from rope_patch.gguf.patch import patch_gguf

SHOWN = Path(__file__).parents[2] / "benchmarks" / "results" / "engines.json"


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


def says(verdict, reason="", **numbers):
    """What is expected of a row: its verdict, a part of its reasons, and numbers of its table."""
    return verdict, reason, numbers


LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
LISTS = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}
L4 = math.log(4)
YARN_SCALING = 0.1 * L4 + 1
WHOLE = {"max_position_embeddings": 256}
TOP = {"rope_parameters": None, "rope_theta": 1e4}


def without(parameters, *keys):
    return {key: value for key, value in parameters.items() if key not in keys}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[str, str, dict[str, float]]]]] = {
    "vLLM obeys a factor of YaRN from 0.30.0 on, by PR #56446; llama.cpp computes its own": (
        "llama",
        {"rope_parameters": YARN | {"attention_factor": 1.5}, **WHOLE},
        {
            "vllm": says("agrees", attention_scaling=1.5),
            "sglang": says("differs", "ignores attention_factor", attention_scaling=YARN_SCALING, difference=0.0),
            "llama.cpp": says("differs", attention_scaling=YARN_SCALING),
        },
    ),
    # src/models/llama.cpp reads no yarn_beta_fast, which the converter writes: 32 and 1 are in llama-hparams.h
    "llama.cpp's loader takes YaRN's usual ends of the ramp": (
        "llama",
        {"rope_parameters": YARN | {"beta_slow": 0.1}, **WHOLE},
        {"vllm": says("agrees"), "llama.cpp": says("differs", "ignores beta_fast")},
    ),
    "a longrope factor is ignored by every vLLM": (
        "llama",
        {"rope_parameters": LISTS | {"attention_factor": 1.25, "factor": 1.0, "original_max_position_embeddings": 64}},
        dict.fromkeys(("vllm", "sglang"), says("differs", "short_mscale", attention_scaling=1.0)),
    ),
    # pair 7 of 8: 10000 ** -(7/8) against 500000 ** -(7/8), so 50 ** -(7/8) = 0.0326 of it
    "transformers 4 looks for another base at the top": (
        "llama",
        {"rope_parameters": PLAIN | {"rope_theta": 5e5}},
        {"transformers-4": says("differs", difference=1 - 50 ** (-7 / 8))},
    ),
    "YaRN of factor 3 gives 192 positions, and the config states 256": (
        "llama",
        {"rope_parameters": YARN | {"factor": 3.0}, **WHOLE},
        {"vllm": says("differs", difference=0.0, positions=192)},
    ),
    "a context that is multiplied": (
        "llama",
        {"rope_parameters": LINEAR, **WHOLE},
        dict.fromkeys(("vllm", "sglang"), says("differs", difference=0.0, context=1024)),
    ),
    "a context that is not multiplied on Gemma 3, as every published one states it": (
        "gemma3",
        {
            "rope_parameters": {"full_attention": LINEAR | {"factor": 8.0}, "sliding_attention": PLAIN},
            "max_position_embeddings": 512,
        },
        {"vllm": says("agrees", context=512)},
    ),
    "the recipe for YaRN in the documentation of Qwen": (
        "qwen2",
        {"rope_parameters": YARN},
        {"vllm": says("agrees", context=64), "sglang": says("agrees")},
    ),
    "a context of Phi-3 outside its table": (
        "phi3",
        {"rope_parameters": LISTS, **WHOLE},
        {"vllm": says("differs", "unless --max-model-len says more", context=64, positions=256)},
    ),
    # vLLM takes the smallest, or model_max_length; SGLang the first of its list, before max_position_embeddings
    "other keys that engines take for the context": (
        "llama",
        {**WHOLE, "seq_length": 192, "max_sequence_length": 512},
        {"vllm": says("differs", context=192), "sglang": says("differs", "takes max_sequence_length", context=512)},
    ),
    "model_max_length is the context of vLLM": (
        "llama",
        {**WHOLE, "seq_length": 192, "model_max_length": 1024},
        {"vllm": says("differs", context=1024)},
    ),
    "a share that SGLang looks for at the top alone": (
        "llama",
        {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}, **WHOLE},
        {"sglang": says("differs", "at the top of config.json alone", pairs=8)},
    ),
    "a share that vLLM obeys and transformers ignores": (
        "qwen2",
        {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
        {"vllm": says("differs", "it obeys partial_rotary_factor 0.5", pairs=4)},
    ),
    "p-RoPE that SGLang reads as plain": (
        "qwen2",
        {"rope_parameters": PLAIN | {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
        {"sglang": says("differs", "ignores the share 0.5 of p-RoPE", difference=1.0, pairs=8)},
    ),
    "a factor of linear that is an integer": (
        "llama",
        {"rope_parameters": LINEAR | {"factor": 4}},
        dict.fromkeys(("vllm", "sglang"), says("refuses", "write 4.0")),
    ),
    "YaRN without its original context": (
        "llama",
        {"rope_parameters": without(YARN, "original_max_position_embeddings")},
        {"llama.cpp": says("refuses")},
    ),
    "llama3 without its original context": (
        "llama",
        TOP | {"rope_scaling": without(LLAMA3, "rope_theta", "original_max_position_embeddings")},
        {"transformers-4": says("refuses", "original_max_position_embeddings")},
    ),
    "a key of YaRN that only some engines know": (
        "llama",
        {"rope_parameters": YARN | {"extrapolation_factor": 0.5}, **WHOLE},
        {
            "vllm": says("agrees"),
            "sglang": says("unverified", "keys of YaRN that transformers does not know"),
            "llama.cpp": says("agrees"),
        },
    ),
    "llama.cpp's converter writes factors for Llama, not for Qwen": (
        "qwen3",
        {"rope_parameters": LLAMA3, **WHOLE},
        {"llama.cpp": says("differs", "plain RoPE")},
    ),
    "a key that transformers 5 drops and others miss": (
        "gemma3",
        {"rope_parameters": {"type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}},
        {"llama.cpp": says("unverified", "KeyError: 'factor'")},
    ),
    "a table that transformers 5 drops on Gemma 3": (
        "gemma3",
        {"rope_parameters": LINEAR | {"rope_theta": 1e6}},
        {"llama.cpp": says("differs", OTHER_KEYS)},
    ),
    # (1 + 0.07 ln 4) / (1 + 0.05 ln 4)
    "MLX obeys mscale and mscale_all_dim of YaRN, and no attention_factor": (
        "qwen3",
        {"rope_parameters": YARN | {"attention_factor": 1.0, "mscale": 0.7, "mscale_all_dim": 0.5}, **WHOLE},
        {"mlx": says("differs", "ignores attention_factor", attention_scaling=(1 + 0.07 * L4) / (1 + 0.05 * L4))},
    ),
    "MLX obeys mscale alone": (
        "qwen3",
        {"rope_parameters": YARN | {"mscale": 2.0}, **WHOLE},
        {"mlx": says("unverified", "without the other")},
    ),
    "MLX reads the keys of transformers 4, but on Qwen3": (
        "llama",
        {"rope_parameters": LINEAR | {"rope_theta": 5e5}},
        {"mlx": says("differs", "not rope_parameters", fastest=1.0)},
    ),
    # Layer 1 of two is full attention, and both have one table and no difference but the window.
    "the sixth layer is full attention of Gemma 3 in MLX and llama.cpp": (
        "gemma3",
        {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}, "rope_theta": 1e4},
        {
            **dict.fromkeys(("mlx", "llama.cpp"), says("differs", "does not read layer_types", difference=0.0)),
            **dict.fromkeys(("transformers-4", "vllm", "sglang"), says("agrees")),
        },
    ),
    "MLX reads which layer of Gemma 3 is full attention from another key": (
        "gemma3",
        {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "sliding_window_pattern": 2},
        {"mlx": says("agrees")},
    ),
    "the second layer is full attention of Gemma 2 in llama.cpp and SGLang": (
        "gemma2",
        {"rope_theta": 1e4, "layer_types": ["full_attention", "sliding_attention"]},
        {
            **dict.fromkeys(("llama.cpp", "sglang"), says("differs", "does not read layer_types", difference=0.0)),
            **dict.fromkeys(("transformers-4", "vllm"), says("agrees")),
            "mlx": says("differs", "no sliding window"),
        },
    ),
    "a window of all layers": (
        "mistral",
        {"rope_theta": 1e4, "sliding_window": 16},
        {
            **dict.fromkeys(("transformers-4", "vllm"), says("agrees")),
            **dict.fromkeys(("sglang", "llama.cpp", "mlx"), says("differs", "no sliding window", difference=0.0)),
        },
    ),
    "a window as long as the context": (
        "mistral",
        {"rope_theta": 1e4, "sliding_window": 64},
        dict.fromkeys(PROGRAMS, says("agrees")),
    ),
    "a window of some layers": (
        "qwen2",
        {
            "rope_theta": 1e4,
            "layer_types": None,
            "sliding_window": 16,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
        {
            "transformers-4": says("agrees"),
            "vllm": says("refuses", "sliding window"),
            **dict.fromkeys(("sglang", "llama.cpp", "mlx"), says("differs", "no sliding window")),
        },
    ),
    "a table that changes with the length": (
        "llama",
        {"rope_parameters": LINEAR | {"rope_type": "dynamic"}},
        dict.fromkeys(PROGRAMS, says("unverified", "--freeze-at")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_program_computes(tmp_path, case):
    family, changes, expected = CASES[case]
    folder = written(tmp_path / "model", family, **changes)
    for program, (verdict, reason, numbers) in expected.items():
        found = rows(folder, program)
        row = found.get(None) or found["full_attention"]
        assert (row.verdict, reason in " ".join(row.reasons)) == (verdict, True), (program, row.reasons)
        if numbers:
            inv_freq = row.built.inv_freq
            computed = vars(row.built) | {"pairs": len(inv_freq), "fastest": float(inv_freq[0])}
            computed |= {"difference": row.difference}
            assert {name: computed[name] for name in numbers} == pytest.approx(numbers, rel=1e-5), program


def test_a_plain_table_is_read_alike_by_all(tmp_path):
    # transformers 5 writes the base into rope_parameters alone, and 10000 is what transformers 4 takes without one
    assert set(verdicts(written(tmp_path / "plain")).values()) == {"reference", "agrees"}


@pytest.mark.parametrize(
    ("case", "program"),
    [
        (CASES["vLLM obeys a factor of YaRN from 0.30.0 on, by PR #56446; llama.cpp computes its own"], "sglang"),
        (CASES["p-RoPE that SGLang reads as plain"], "sglang"),
        (CASES["transformers 4 looks for another base at the top"], "transformers-4"),
        (CASES["other keys that engines take for the context"], "sglang"),
        (CASES["transformers 4 looks for another base at the top"], "mlx"),
        (("llama", {"rope_parameters": YARN | {"type": "linear"}, **WHOLE}), "vllm"),
    ],
)
def test_the_command_that_is_named_mends_a_difference(tmp_path, case, program):
    row = rows(written(tmp_path / "a model", case[0], **case[1]), program)[None]
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


def test_a_program_that_fails_is_no_disagreement(tmp_path):
    folder = patched(tmp_path / "p", "p_rope:p=0.5")
    row = rows(folder, "transformers-4")[None]
    assert (row.verdict, row.built) == ("refuses", None)
    assert "'proportional'" in row.reasons[0]
    assert verdicts(folder)["sglang"] == "agrees"  # the share stands at the top of its config, too


def test_scaled_sliding_layers_of_gemma_3_are_caught(tmp_path):
    folder = patched(tmp_path / "both", "pi:factor=4", "gemma3", layer_types=("full_attention", "sliding_attention"))
    assert {row.verdict for row in rows(folder, "vllm").values()} == {"agrees"}
    read = rows(folder, "sglang")
    assert read["full_attention"].verdict == "agrees"
    sliding = read["sliding_attention"]
    assert sliding.verdict == "differs"
    assert sliding.difference == pytest.approx(0.75)  # 1 where transformers turns by a quarter
    assert "nothing but rope_theta" in sliding.reasons[0]


def test_a_gemma_3_file_whose_sliding_layers_are_scaled_too_is_caught(tmp_path):
    """llama.cpp has one factor on cos and sin for all layers."""
    scaled = {"rope__freq_base": 1e6, "rope__freq_base_swa": 1e4, "rope__scaling__attn_factor": 1.25}
    file = write_toy(tiny_model("gemma3"), tmp_path / "gemma3.gguf", **scaled)
    sliding = rows(file, "llama.cpp")["sliding_attention"]
    assert (sliding.verdict, sliding.difference, sliding.built.attention_scaling) == ("differs", 0.0, 1.25)
    assert "one factor on cos and sin for all layers" in sliding.reasons[0]


def test_the_text_config_of_a_multimodal_checkpoint_is_read(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    text = tiny_model("gemma3").config.to_dict()
    text["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    Gemma3Config(text_config=text, vision_config=vision).save_pretrained(tmp_path / "whole")
    read = {name: rows(tmp_path / "whole", name)["full_attention"].verdict for name in PROGRAMS}
    assert (read["vllm"], read["sglang"], read["llama.cpp"]) == ("agrees", "agrees", "unverified")
    assert (read["transformers-4"], read["mlx"]) == ("differs", "differs")


def test_a_family_that_was_not_compared_is_unverified(tmp_path):
    tiny_model("granite").save_pretrained(tmp_path)
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
    assert read["llama.cpp"].built.attention_scaling == pytest.approx(YARN_SCALING)
    assert [row.verdict for row in compare_programs(plain).rows[:2]] == ["reference", "agrees"]


def test_layers_that_run_otherwise_are_named():
    """The toy Gemma 3, every second layer of which is full attention: real MLX differs by up to 2.5 nats."""
    toy = rope_patch.data_path("assets") / "gemma3"
    read = rows(toy, "mlx")
    assert "layers 1, 3 as sliding_attention over 64" in read["full_attention"].moved
    assert (read["sliding_attention"].verdict, read["sliding_attention"].moved) == ("agrees", "")
    assert read["full_attention"].fix.startswith(f"rope-patch export {toy} --to hf -o OUT")
    printed = " ".join(run("doctor", toy).split())
    assert "MLX 0.32.2 [full_attention]: it runs layers 1, 3 as sliding_attention" in printed


def test_options_are_refused_where_layers_would_run_otherwise(tmp_path):
    folder = written(tmp_path, "mistral", rope_theta=1e4, sliding_window=16)
    with pytest.raises(ValueError, match="no sliding window"):
        flags(folder, "abf", "sglang", target_length=256)
    assert flags(folder, "abf", "vllm", target_length=256).lines


@pytest.mark.skipif(not SHOWN.is_file(), reason="not in the source distribution")
@pytest.mark.parametrize("name", [name for name, program in PROGRAMS.items() if program.ran])
def test_the_rules_are_those_that_the_programs_confirmed(name):
    """Every rule was held against the program itself, on every family that it is said to hold for."""
    report = json.loads(SHOWN.read_text())[name]
    assert report["wrong"] == {}
    assert any(PROGRAMS[name].ran.split()[-1] == version for version in report["versions"].values())
    families = {row.partition(" ")[0] for row in report["rows"]}
    assert families >= PROGRAMS[name].families
    shown = {row["said"].split()[0] for row in report["rows"].values()}
    assert shown >= {"agrees", "differs", "refuses"}
