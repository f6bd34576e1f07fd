"""A GGUF is loaded with the table it holds, which transformers' own reader drops."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from gguf_files import rewritten, saved
from tiny import LLAMA3, ids, logits, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch import PatchError
from rope_patch.frequencies import geometric

pytest.importorskip("gguf")

from rope_patch.checkpoints.gguf_file import Key
from rope_patch.checkpoints.gguf_table import RECORD_KEY
from rope_patch.exporting import export
from rope_patch.exporting.gguf import export_gguf

TOKENS = ids(48) % 96


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")


def written(tmp_path, tokenizer, method=None, **changes):
    """A folder and the GGUF of it."""
    folder = saved(tmp_path / "folder", method, **changes)
    return folder, export_gguf(folder, tmp_path / "m.gguf", dtype="float32", tokenizer=tokenizer)


@pytest.mark.parametrize(
    "method", ["yarn", "pi", "ntk", "abf:factor=50", "p_rope:p=0.5", "truncated:context=100", "nope", None]
)
def test_the_model_is_the_folders_with_its_record(tmp_path, tokenizer, method):
    folder, file = written(tmp_path, tokenizer, method)
    expected = logits(rope_patch.load(folder).eval(), TOKENS)
    model = rope_patch.load(file).eval()
    assert torch.equal(logits(model, TOKENS), expected)
    if method is None:
        assert not hasattr(model.config, "rope_patch")
        return
    assert rope_patch.verify(model).record.to_dict() == rope_patch.verify(rope_patch.load(folder)).record.to_dict()
    rope_patch.save(model, tmp_path / "again")  # transformers refuses a model that was quantized in a file
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval(), TOKENS), expected)
    rope_patch.restore(model)
    assert model.config.max_position_embeddings == 64
    assert torch.equal(model.model.rotary_emb.inv_freq, geometric(1e4, 16))


def test_weights_are_dequantized_in_any_type_and_transformers_says_nothing_else(tmp_path, tokenizer, caplog):
    """It would keep those of some families packed, and warns that all are."""
    _, file = written(tmp_path, tokenizer)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = rope_patch.load(file, dtype=torch.bfloat16)
    finally:
        logger.removeHandler(caplog.handler)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert "packed" not in caplog.text


def test_transformers_own_reader_loses_the_table_and_export_says_so(tmp_path, tokenizer):
    """The control: what is lost, and for which tables nothing is."""
    folder = saved(tmp_path / "folder")
    tokenizer.save_pretrained(folder)
    for method, lost in (("yarn:factor=4", True), ("p_rope:p=0.5", True), ("abf:factor=50", False)):
        file = tmp_path / f"{lost}.gguf"
        report = export(folder, file, to="gguf", method=method, dtype="float32", overwrite=True)
        stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name).eval()
        assert torch.equal(logits(stock, TOKENS), logits(rope_patch.load(file).eval(), TOKENS)) is not lost
        assert (
            any("transformers' own reader (gguf_file=) takes its base alone" in note for note in report["notes"])
            is lost
        )


def test_the_table_of_another_tools_file_is_the_models_own(tmp_path, tokenizer):
    """llama.cpp's converter writes Llama 3.1's smoothing as factors and leaves no record."""
    folder, file = written(tmp_path, tokenizer, rope_parameters=LLAMA3, max_position_embeddings=512)
    assert not any(RECORD_KEY in key for key in rope_patch.checkpoints.gguf_file.open_gguf(file).keys)
    model = rope_patch.load(file).eval()
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert torch.allclose(logits(model, TOKENS), logits(reference, TOKENS), atol=1e-5)
    assert rope_patch.inspect(model).record is None
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name).eval()
    assert not torch.allclose(logits(plain, TOKENS), logits(reference, TOKENS), atol=1e-3)


def test_a_method_is_applied_to_the_table_of_another_tools_file(tmp_path, tokenizer):
    """Not to the plain table of its base: p-RoPE leaves the pairs that it keeps smoothed as Llama 3.1's are."""
    folder, file = written(tmp_path, tokenizer, rope_parameters=LLAMA3, max_position_embeddings=512)
    model = rope_patch.load(file, "p_rope:p=0.5").eval()
    reference = rope_patch.load(folder, "p_rope:p=0.5").eval()
    assert torch.allclose(logits(model, TOKENS), logits(reference, TOKENS), atol=1e-5)
    rope_patch.restore(model)
    assert torch.allclose(logits(model, TOKENS), logits(rope_patch.load(folder).eval(), TOKENS), atol=1e-5)


def test_an_unpatched_model_of_a_file_is_saved_by_transformers(tmp_path, tokenizer):
    _, file = written(tmp_path, tokenizer, rope_parameters=LLAMA3, max_position_embeddings=512)
    model = rope_patch.load(file).eval()
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))


def test_yarn_that_a_file_leaves_to_the_engine(tmp_path, tokenizer):
    _, file = written(tmp_path, tokenizer)
    yarn = [
        Key.of("llama.rope.scaling.type", "yarn", "STRING"),
        Key.of("llama.rope.scaling.factor", 4.0, "FLOAT32"),
        Key.of("llama.rope.scaling.original_context_length", 64, "UINT32"),
    ]
    model = rope_patch.load(rewritten(file, tmp_path / "yarn.gguf", keys=yarn))
    reference = rope_patch.load(tmp_path / "folder", "yarn:factor=4")
    assert torch.allclose(logits(model.eval(), TOKENS), logits(reference.eval(), TOKENS), atol=1e-4)


def test_a_record_that_does_not_fit_is_not_followed(tmp_path, tokenizer):
    folder, file = written(tmp_path, tokenizer, "yarn")
    other = json.dumps(rope_patch.verify(rope_patch.load(saved(tmp_path / "pi", "pi"))).record.to_dict())
    altered = rewritten(file, tmp_path / "altered.gguf", keys=[Key.of(RECORD_KEY, other, "STRING")])
    with pytest.warns(UserWarning, match="its patch record says another table: pi:factor=4"):
        model = rope_patch.load(altered).eval()
    assert rope_patch.inspect(model).record is None
    assert torch.allclose(logits(model, TOKENS), logits(rope_patch.load(folder).eval(), TOKENS), atol=1e-4)


def test_a_method_on_top_and_what_is_not_there(tmp_path, tokenizer):
    _, file = written(tmp_path, tokenizer)
    model = rope_patch.load(file, "yarn", target_length=256)
    assert rope_patch.verify(model).record.to_method() == rope_patch.Yarn(factor=4)
    with pytest.raises(FileNotFoundError, match="no file"):
        rope_patch.load(tmp_path / "nowhere.gguf")
    (tmp_path / "text.gguf").write_text("not one")
    with pytest.raises(ValueError, match="is not a GGUF file"):
        rope_patch.load(tmp_path / "text.gguf")


def gemma3_gguf(model, path, **keys):
    """Write a Gemma 3 as llama.cpp's converter does: norms plus one, and no word of which layers slide."""
    import gguf

    writer, config = gguf.GGUFWriter(path, "gemma3"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    for key, value in keys.items():
        writer.add_float32(f"gemma3.{key.replace('__', '.')}", value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem != "lm_head":
            array = tensor.float().numpy() + ("norm" in name)
            writer.add_tensor(names.get_name(stem) + ".weight", array.astype("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gemma_3_whose_file_does_not_say_which_layers_slide(tmp_path):
    """As its converter writes it; transformers knows which. The table in the file is that of full attention."""
    tables = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    sizes = {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 256, "max_position_embeddings": 512}
    model = tiny_model("gemma3", rope_parameters=tables, **sizes)
    plain = rope_patch.load(gemma3_gguf(model, tmp_path / "plain.gguf", rope__freq_base=1e6)).eval()
    assert torch.allclose(logits(plain, TOKENS), logits(model, TOKENS), atol=1e-5)
    assert not hasattr(plain.config, "rope_patch")
    file = gemma3_gguf(model, tmp_path / "scaled.gguf", rope__freq_base=1e6, rope__scaling__factor=8.0)
    rope_patch.apply(model, "pi:factor=8")
    assert torch.allclose(logits(rope_patch.load(file).eval(), TOKENS), logits(model, TOKENS), atol=1e-5)


def test_another_base_for_sliding_layers_than_transformers_reads_is_refused(tmp_path):
    model = tiny_model("gemma3", num_hidden_layers=6, layer_types=None)
    base = {"rope__freq_base": model.config.rope_parameters["full_attention"]["rope_theta"]}
    gemma3_gguf(model, tmp_path / "m.gguf", **base, rope__freq_base_swa=5000.0)
    with pytest.raises(PatchError, match="a base of 5000 for layers with a sliding window, and transformers reads"):
        rope_patch.load(tmp_path / "m.gguf")
