"""What each program reads of a checkpoint: prepared folders whose tables are known, and the rules against the report.

The rules themselves are held against the programs' own code by ``benchmarks/reading_rules.py``, which needs them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import fail
from support.gguf_files import write_toy
from tiny import ARCHITECTURES, LLAMA3, SIZE, YARN, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, GraniteConfig, Olmo3Config, PhiConfig
from typer.testing import CliRunner

import rope_patch
from rope_patch.checkpoints.gguf_patch import patch_gguf
from rope_patch.cli import app as cli
from rope_patch.exporting import export
from rope_patch.exporting.audit import OTHER_KEYS, audit
from rope_patch.exporting.readings import PROGRAMS

SHOWN = Path(__file__).parents[2] / "benchmarks" / "results" / "reading_rules.json"
BUNDLED = rope_patch.data_path("assets") / "llama"


def written(folder: Path, family: str = "llama", **changes: Any) -> Path:
    """A checkpoint as plain transformers saves it, with other keys in its config.json."""
    tiny_model(family).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def patched(folder: Path, method: str, family: str = "llama", **options: Any) -> Path:
    model = tiny_model(family)
    rope_patch.apply(model, method, **options)
    rope_patch.save(model, folder)
    return folder


def rows(source: Path, program: str) -> dict[str | None, Any]:
    return {row.layer_type: row for row in audit(source, [program]).rows if row.program == program}


def verdicts(source: Path) -> dict[str, str]:
    return {row.program: row.verdict for row in audit(source).rows if row.layer_type is None}


def test_a_plain_table_is_read_alike_by_all(tmp_path):
    # transformers 5 writes the base into rope_parameters alone, and 10000 is what transformers 4 takes without one
    assert set(verdicts(written(tmp_path / "plain")).values()) == {"reference", "agrees"}


def test_a_factor_that_vllm_ignores_is_caught(tmp_path):
    folder = written(tmp_path / "yarn", rope_parameters=YARN | {"attention_factor": 1.5}, max_position_embeddings=256)
    older = rows(folder, "vllm-0.29")[None]
    assert older.verdict == "differs"
    assert older.difference == 0.0  # the frequencies are those of YaRN all the same
    assert older.built.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    assert "ignores attention_factor" in older.reasons[0]
    assert older.fix == f"rope-patch export {folder} --to vllm -o FOLDER"
    newer = rows(folder, "vllm")[None]  # from 0.30.0 on, by PR #56446
    assert (newer.verdict, newer.built.attention_scaling) == ("agrees", 1.5)
    export(folder, tmp_path / "out", to="vllm")
    assert rows(tmp_path / "out", "vllm-0.29")[None].verdict == "agrees"


def test_a_longrope_factor_is_ignored_by_every_vllm(tmp_path):
    form = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}
    form |= {"attention_factor": 1.25, "factor": 1.0, "original_max_position_embeddings": 64}
    folder = written(tmp_path / "long", rope_parameters=form)
    for program in ("vllm", "vllm-0.29", "sglang"):
        row = rows(folder, program)[None]
        assert (row.verdict, row.built.attention_scaling) == ("differs", 1.0), program
        assert "short_mscale" in row.reasons[0]


def test_p_rope_that_sglang_reads_as_plain_is_caught(tmp_path):
    folder = patched(tmp_path / "p", "p_rope:p=0.5", "qwen2")
    row = rows(folder, "sglang")[None]
    assert (row.verdict, row.difference) == ("differs", 1.0)
    plain = torch.tensor([10000.0 ** (-i / 8) for i in range(8)])  # 8 pairs, every one of which rotates
    assert torch.allclose(row.built.inv_freq, plain, rtol=1e-6)
    assert "ignores the share 0.5 of p-RoPE" in row.reasons[0]
    export(folder, tmp_path / "out", to="sglang")
    assert verdicts(tmp_path / "out")["sglang"] == "agrees"


def test_scaled_sliding_layers_of_gemma_3_are_caught(tmp_path):
    folder = patched(tmp_path / "both", "pi:factor=4", "gemma3", layer_types=("full_attention", "sliding_attention"))
    assert {row.verdict for row in rows(folder, "vllm").values()} == {"agrees"}
    read = rows(folder, "sglang")
    assert read["full_attention"].verdict == "agrees"
    sliding = read["sliding_attention"]
    assert (sliding.verdict, sliding.layers) == ("differs", (0,))
    assert sliding.difference == pytest.approx(0.75)  # 1 where transformers turns by a quarter
    assert "nothing but rope_theta" in sliding.reasons[0]
    assert sliding.fix.startswith("none: ")


def test_a_gemma_3_file_whose_sliding_layers_are_scaled_too_is_caught(tmp_path):
    """llama.cpp has one factor on cos and sin for all layers."""
    scaled = {"rope__freq_base": 1e6, "rope__freq_base_swa": 1e4, "rope__scaling__attn_factor": 1.25}
    file = write_toy(tiny_model("gemma3"), tmp_path / "gemma3.gguf", **scaled)
    sliding = rows(file, "llama.cpp")["sliding_attention"]
    assert (sliding.verdict, sliding.difference, sliding.built.attention_scaling) == ("differs", 0.0, 1.25)
    assert "one factor on cos and sin for all layers" in sliding.reasons[0]


def test_what_transformers_4_cannot_see_is_caught(tmp_path):
    abf = written(tmp_path / "abf", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    row = rows(abf, "transformers-4")[None]
    assert row.verdict == "differs"
    # pair 7 of 8: 10000 ** -(7/8) against 500000 ** -(7/8), so 50 ** -(7/8) = 0.0326 of it
    assert row.difference == pytest.approx(1 - 50 ** (-7 / 8), rel=1e-5)
    export(abf, tmp_path / "out", to="hf")
    assert rows(tmp_path / "out", "transformers-4")[None].verdict == "agrees"


def test_a_program_that_fails_is_no_disagreement(tmp_path):
    folder = patched(tmp_path / "p", "p_rope:p=0.5")
    row = rows(folder, "transformers-4")[None]
    assert (row.verdict, row.built) == ("refuses", None)
    assert "'proportional'" in row.reasons[0]
    assert audit(folder, ["transformers-4"]).agrees


def test_too_few_positions_are_a_difference(tmp_path):
    yarn = YARN | {"factor": 3.0}  # 3 times 64 positions, and the config states 256
    row = rows(written(tmp_path / "short", rope_parameters=yarn, max_position_embeddings=256), "vllm")[None]
    assert (row.verdict, row.difference, row.built.positions) == ("differs", 0.0, 192)


def test_a_context_that_is_multiplied_is_a_difference(tmp_path):
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    folder = written(tmp_path / "pi", rope_parameters=linear, max_position_embeddings=256)
    for program in ("vllm", "sglang"):
        row = rows(folder, program)[None]
        assert (row.verdict, row.difference, row.built.context) == ("differs", 0.0, 1024), program


def test_a_share_that_sglang_looks_for_at_the_top_alone(tmp_path):
    # as its own code built them: of these, half the pairs turn where config.json states the share outside, too
    top = patched(tmp_path / "top", "p_rope:p=0.5")
    assert json.loads((top / "config.json").read_text())["partial_rotary_factor"] == 0.5
    assert verdicts(top)["sglang"] == "agrees"
    yarn = YARN | {"partial_rotary_factor": 0.5}
    inside = written(tmp_path / "inside", rope_parameters=yarn, max_position_embeddings=256)
    row = rows(inside, "sglang")[None]
    assert (row.verdict, len(row.built.inv_freq)) == ("differs", 8)  # of 16 features; transformers 5 builds 4 pairs
    assert "at the top of config.json alone" in " ".join(row.reasons)


def test_a_share_on_which_attention_fails_is_said(tmp_path):
    """transformers builds YaRN for a share of each head, and attention of these families turns whole heads."""
    for family in ("llama", "qwen2"):
        folder = written(tmp_path / family, family, rope_parameters=YARN | {"partial_rotary_factor": 0.5})
        with pytest.raises(RuntimeError, match="size of tensor"):
            AutoModelForCausalLM.from_pretrained(folder)(torch.zeros(1, 4, dtype=torch.long))
        first = audit(folder).rows[0]
        assert (first.program, first.verdict, len(first.built.inv_freq)) == ("transformers-5", "refuses", 4)
        assert "builds 4 of 8 pairs for partial_rotary_factor" in first.reasons[0]
    printed = invoke(folder)
    assert printed.exit_code == 3
    assert "take partial_rotary_factor out of config.json" in printed.stdout
    AutoModelForCausalLM.from_config(PhiConfig(**SIZE)).save_pretrained(
        tmp_path / "phi"
    )  # whose attention turns a share
    assert audit(tmp_path / "phi").rows[0].verdict == "reference"
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 0}
    AutoConfig.for_model("glm4_moe", **SIZE, **experts).save_pretrained(tmp_path / "experts")
    assert audit(tmp_path / "experts").rows[0].verdict == "reference"  # whose experts cannot run without weights


def test_the_context_that_a_program_serves(tmp_path):
    """Numbers of vLLM's and SGLang's own code for such configs."""
    linear = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    local = {"rope_type": "default", "rope_theta": 1e4}
    nested = {"full_attention": linear, "sliding_attention": local}
    gemma = written(tmp_path / "gemma", "gemma3", rope_parameters=nested, max_position_embeddings=512)
    assert {row.built.context for row in rows(gemma, "vllm").values()} == {512}  # as every published Gemma 3 has it
    recipe = written(tmp_path / "recipe", "qwen2", rope_parameters=YARN)  # as Qwen's documentation has it
    assert [rows(recipe, name)[None].built.context for name in ("vllm", "vllm-0.29", "sglang")] == [64, 256, 64]
    assert rows(recipe, "vllm-0.29")[None].verdict == "differs"
    leftover = written(tmp_path / "leftover", rope_parameters=local | {"factor": 2.0})
    assert [rows(leftover, name)[None].built.context for name in ("vllm", "vllm-0.29", "sglang")] == [128] * 3
    lists = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}
    phi = written(tmp_path / "phi", "phi3", rope_parameters=lists, max_position_embeddings=256)
    row = rows(phi, "vllm")[None]
    assert (row.built.context, row.built.positions) == (64, 256)
    assert "unless --max-model-len says more" in " ".join(row.reasons)
    third = written(tmp_path / "third", rope_parameters=YARN | {"factor": 3.7}, max_position_embeddings=236)
    assert rows(third, "vllm")[None].built.positions == 237  # 236.8


def test_what_programs_fail_on(tmp_path):
    whole = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4}
    folder = written(tmp_path / "whole", rope_parameters=whole)
    for name in ("vllm", "vllm-0.29", "sglang"):
        row = rows(folder, name)[None]
        assert (row.verdict, "write 4.0" in row.reasons[0]) == ("refuses", True), name
    two = YARN | {"type": "linear"}
    assert rows(written(tmp_path / "two", rope_parameters=two), "vllm")[None].verdict == "refuses"
    unset = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    assert rows(written(tmp_path / "unset", rope_parameters=unset), "llama.cpp")[None].verdict == "refuses"
    older = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    folder = written(tmp_path / "older", rope_parameters=None, rope_theta=1e4, rope_scaling=older)
    assert "original_max_position_embeddings" in rows(folder, "transformers-4")[None].reasons[0]
    lists = {"type": "longrope", "short_factor": [2.0] * 8, "long_factor": [2.0] * 8}
    folder = written(tmp_path / "lists", rope_parameters=None, rope_theta=1e4, rope_scaling=lists)
    assert rows(folder, "transformers-4")[None].verdict == "refuses"


def test_another_key_that_an_engine_takes_for_the_context(tmp_path):
    """vLLM takes the smallest, or model_max_length; SGLang the first of its list, before max_position_embeddings."""
    folder = written(tmp_path / "keys", max_position_embeddings=256, seq_length=192, max_sequence_length=512)
    found = {name: rows(folder, name)[None] for name in ("vllm", "sglang")}
    assert {name: (row.verdict, row.built.context) for name, row in found.items()} == {
        "vllm": ("differs", 192),
        "sglang": ("differs", 512),
    }
    assert "takes max_sequence_length, 512 tokens, for the context" in found["sglang"].reasons[0]
    export(folder, tmp_path / "out", to="sglang")
    assert {name: rows(tmp_path / "out", name)[None].verdict for name in found} == dict.fromkeys(found, "agrees")
    assert (
        "seq_length and max_sequence_length" in json.loads((tmp_path / "out" / "export.json").read_text())["notes"][0]
    )
    cohere = written(tmp_path / "cohere", max_position_embeddings=256, seq_length=192, model_max_length=1024)
    assert rows(cohere, "vllm")[None].built.context == 1024


def olmo3(folder: Path, **changes: Any) -> Path:
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    AutoModelForCausalLM.from_config(Olmo3Config(**SIZE, **layers)).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def test_sglang_reads_olmo_3_at_the_top_of_its_config(tmp_path):
    """Its own config class leaves rope_parameters out; numbers of its code for such folders."""
    yarn = {key: value for key, value in YARN.items() if key != "rope_theta"}
    published = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": yarn, "max_position_embeddings": 256}
    assert {row.verdict for row in rows(olmo3(tmp_path / "published", **published), "sglang").values()} == {"agrees"}
    kinds = {
        "full_attention": YARN | {"rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    }
    saved = rows(olmo3(tmp_path / "saved", rope_parameters=kinds, max_position_embeddings=256), "sglang")
    assert {kind: row.verdict for kind, row in saved.items()} == dict.fromkeys(kinds, "differs")
    plain = torch.tensor([10000.0 ** (-i / 8) for i in range(8)])  # base 10000 where it looks for one
    assert all(torch.allclose(row.built.inv_freq, plain, rtol=1e-6) for row in saved.values())
    assert "not rope_parameters" in saved["full_attention"].reasons[0]
    one = rows(olmo3(tmp_path / "one", **(published | {"rope_scaling": {"factor": 2.0}})), "sglang")
    assert {row.verdict for row in one.values()} == {"refuses"}


def test_olmo_3_is_exported_to_sglang_with_one_base(tmp_path):
    base = olmo3(tmp_path / "base")
    written_as = export(base, tmp_path / "out", to="sglang", method="yarn:factor=4", target_length=256)
    assert written_as["checked_against"] == PROGRAMS["sglang"].version
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]["rope_type"]) == (500000.0, "yarn")  # the base of OLMo 3
    for program in ("sglang", "transformers-4"):
        assert {row.verdict for row in rows(tmp_path / "out", program).values()} == {"agrees"}, program
    assert rope_patch.inspect(rope_patch.load(tmp_path / "out")).method == "yarn:factor=4"
    both = ("full_attention", "sliding_attention")
    export(base, tmp_path / "abf", to="sglang", method="abf:rope_theta=1000000", layer_types=both)
    assert {row.verdict for row in rows(tmp_path / "abf", "sglang").values()} == {"agrees"}
    with pytest.raises(ValueError, match="has one rope_theta for all layers of olmo3"):
        export(base, tmp_path / "no", to="sglang", method="abf:rope_theta=1000000", layer_types=both[:1])
    with pytest.raises(ValueError, match="nothing but rope_theta on the sliding_attention table of olmo3"):
        export(base, tmp_path / "no", to="sglang", method="pi:factor=4", layer_types=both)


def test_keys_that_only_engines_know(tmp_path):
    half = YARN | {"extrapolation_factor": 0.5}
    folder = written(tmp_path / "half", rope_parameters=half, max_position_embeddings=256)
    found = {name: rows(folder, name)[None] for name in ("vllm", "vllm-0.29", "sglang", "llama.cpp")}
    assert {name: row.verdict for name, row in found.items()} == {
        "vllm": "agrees",
        "vllm-0.29": "differs",
        "sglang": "differs",
        "llama.cpp": "agrees",
    }
    # the fastest pair: half of it is interpolated by 4, and half is left
    assert found["sglang"].built.inv_freq[0] == pytest.approx(0.5 * 1 + 0.5 / 4)


def test_llama_cpp_reads_the_older_name_of_a_type(tmp_path):
    llama3 = {key: value for key, value in LLAMA3.items() if key != "rope_type"} | {"type": "llama3"}
    folder = written(tmp_path / "named", rope_parameters=llama3)
    assert rows(folder, "llama.cpp")[None].verdict == "agrees"


def test_llama_cpp_reads_what_its_converter_writes(tmp_path):
    folder = written(tmp_path / "yarn", rope_parameters=YARN | {"attention_factor": 1.5}, max_position_embeddings=256)
    row = rows(folder, "llama.cpp")[None]
    assert row.verdict == "differs"
    assert row.built.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    qwen = patched(tmp_path / "qwen", "llama3:factor=4", "qwen3", target_length=256)
    assert "plain RoPE" in rows(qwen, "llama.cpp")[None].reasons[0]
    assert rows(patched(tmp_path / "l3", "llama3:factor=4", target_length=256), "llama.cpp")[None].verdict == "agrees"


def test_a_key_that_transformers_5_drops_and_others_miss_is_unverified(tmp_path):
    without_factor = {"type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    row = rows(written(tmp_path, "gemma3", rope_parameters=without_factor), "llama.cpp")["full_attention"]
    assert (row.verdict, "KeyError: 'factor'" in row.reasons[0]) == ("unverified", True)


def test_truncate_that_transformers_5_ignores_is_said(tmp_path):
    nested = {"full_attention": YARN | {"truncate": False}, "sliding_attention": {"rope_type": "default"}}
    folder = written(tmp_path, "gemma3", rope_parameters=nested, max_position_embeddings=256)
    assert "transformers 5 ignores truncate=false in the parameters of full_attention" in audit(folder).notes[0]
    assert rows(folder, "vllm")["full_attention"].verdict == "differs"


def test_every_difference_has_a_reason(tmp_path):
    linear = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}  # which transformers 5 drops on Gemma 3
    row = rows(written(tmp_path, "gemma3", rope_parameters=linear), "llama.cpp")["full_attention"]
    assert (row.verdict, row.reasons) == ("differs", (OTHER_KEYS,))


def test_a_table_that_changes_with_the_length_is_unverified(tmp_path):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    found = audit(written(tmp_path / "dynamic", rope_parameters=dynamic))
    assert {row.verdict for row in found.rows} == {"reference", "unverified"}
    assert "--freeze-at" in found.rows[-1].reasons[0]


def test_a_family_that_was_not_compared_is_unverified(tmp_path):

    AutoModelForCausalLM.from_config(GraniteConfig(**SIZE)).save_pretrained(tmp_path / "granite")
    found = audit(tmp_path / "granite")
    assert {row.verdict for row in found.rows} == {"reference", "unverified"}
    assert found.agrees


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_is_exported_agrees_where_it_is_claimed(family, tmp_path):
    replaces = ":replace_scaling=true" * (family == "gemma4")
    base = patched(tmp_path / "yarn", f"yarn:factor=4:attention_factor=1.5{replaces}", family, target_length=256)
    export(base, tmp_path / "out", to="vllm")
    for program in ("vllm", "vllm-0.29"):
        assert {row.verdict for row in rows(tmp_path / "out", program).values()} == {"agrees"}


def test_a_gguf_file_is_read_from_its_header(tmp_path):
    plain = write_toy(tiny_model(), tmp_path / "plain.gguf")
    patch_gguf(plain, "yarn:factor=4", tmp_path / "yarn.gguf")
    found = audit(tmp_path / "yarn.gguf")
    read = {row.program: row for row in found.rows}
    assert read["llama.cpp"].verdict == "reference"
    assert read["transformers-5"].verdict == "differs" and "takes the base" in read["transformers-5"].reasons[0]
    assert found.agrees
    assert [row.verdict for row in audit(plain, ["llama.cpp"]).rows] == ["reference", "agrees"]
    assert read["llama.cpp"].built.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    assert read["vllm"].verdict == "unverified"
    assert found.method == "yarn:factor=4"


def invoke(*words: str | Path) -> Any:
    return CliRunner().invoke(cli.app, ["audit", *map(str, words)], catch_exceptions=False)


def test_the_exit_status_says_whether_they_agree(tmp_path):
    folder = patched(tmp_path / "p", "p_rope:p=0.5", "qwen2")
    assert invoke(folder, "--engine", "vllm").exit_code == 0
    differs = invoke(folder, "--engine", "vllm", "--engine", "sglang")
    assert differs.exit_code == 3
    assert f"fix: rope-patch export {folder} --to sglang -o FOLDER" in differs.stdout


def test_the_side_of_a_change_that_a_version_stands_on_is_printed(tmp_path):
    yarn = YARN | {"attention_factor": 1.5}
    folder = written(tmp_path, rope_parameters=yarn, rope_scaling=yarn, rope_theta=1e4, max_position_embeddings=256)
    printed = invoke(folder, "--engine", "vllm", "--engine", "vllm-0.29").stdout
    assert "note: vLLM (0.29.0): before PR #56446" in printed
    assert "vLLM (0.33.0): after" not in printed  # which agrees
    sides = [row["about_version"] for row in json.loads(invoke(folder, "--json").stdout)["rows"]]
    assert sides[0] is None
    assert any((side or "").startswith("after PR #56446") for side in sides)


def test_json_holds_every_row(tmp_path):
    found = json.loads(invoke(patched(tmp_path / "p", "p_rope:p=0.5"), "--json").stdout)
    assert [row["program"] for row in found["rows"]] == ["transformers-5", *PROGRAMS]
    assert found["agrees"] is False
    first = found["rows"][0]
    assert (first["pairs"], first["unrotated"], first["context"], first["layers"]) == (8, 4, 64, [0, 1])
    assert first["table"] == rope_patch.inspect(tmp_path / "p").tables[0].fingerprint


def test_layers_are_printed_as_ranges(tmp_path):
    printed = invoke(patched(tmp_path / "g", "abf", "gemma3", target_length=256), "--engine", "vllm").stdout
    assert "full_attention (layer 1)" in printed
    assert "sliding_attention (layer 0)" in printed


def test_wrong_arguments_say_what_to_do(tmp_path, monkeypatch, capsys):
    assert "unknown engine 'tgi'. Known: transformers-4, vllm" in fail(
        monkeypatch, capsys, "audit", BUNDLED, "--engine", "tgi"
    )
    assert "nowhere" in fail(monkeypatch, capsys, "audit", tmp_path / "nowhere")


@pytest.mark.skipif(not SHOWN.is_file(), reason="not in the source distribution")
def test_the_rules_are_those_of_the_report():
    """Every rule was compared with the program's own code on every family that it is said to hold for."""
    report = json.loads(SHOWN.read_text())
    assert set(report) == set(PROGRAMS)
    for name, program in PROGRAMS.items():
        assert report[name]["version"] == program.version
        outcomes = report[name]["rows"]
        compared = {family.partition("-")[0] for family, row in outcomes.items() if row["verdict"] == "equal"}
        assert {row["verdict"] for row in outcomes.values()} <= {"equal", "unverified", "not read by transformers 5"}
        assert compared >= program.families - {"gemma4_text"}
