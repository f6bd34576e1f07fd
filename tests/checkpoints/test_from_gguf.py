"""A GGUF is loaded with the table it holds, which transformers' own reader drops."""

import json
import logging

import pytest
import torch
from support.gguf_files import rewritten, saved, write_toy
from support.subsets import full
from support.tiny import LLAMA3, PLAIN, ids, logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch import PatchError
from rope_patch.frequencies import geometric
from rope_patch.gguf.patch import patch_gguf
from rope_patch.gguf.table import RECORD_KEY
from rope_patch.runtime.gguf_file import Key

TOKENS = ids(48) % 96


def written(tmp_path, method=None, **changes):
    """A folder, and a GGUF of the same model: patched, or with the factors of its own table as its converter writes."""
    folder = saved(tmp_path / "folder", method, **changes)
    file = tmp_path / "m.gguf"
    plain = tiny_model(vocab_size=1024, **changes)
    factors = geometric(1e4, 16) / plain.model.rotary_emb.inv_freq
    write_toy(plain, file, factors=factors if changes else None)
    if method is not None:
        patch_gguf(file, method, file.with_name("patched.gguf"), target_length=256)
        file = file.with_name("patched.gguf")
    return folder, file


@pytest.mark.parametrize(
    "method",
    ["yarn", "p_rope:p=0.5", "truncated:context=100", None, *map(full, ("pi", "ntk", "abf:factor=50", "nope"))],
)
def test_the_model_is_the_folders_with_its_record(tmp_path, method):
    folder, file = written(tmp_path, method)
    expected = logits(rope_patch.load(folder), TOKENS)
    model = rope_patch.load(file)
    assert torch.equal(logits(model, TOKENS), expected)
    if method is None:
        assert not hasattr(model.config, "rope_patch")
        return
    assert rope_patch.verify(model).record.to_dict() == rope_patch.verify(rope_patch.load(folder)).record.to_dict()
    rope_patch.save(model, tmp_path / "again")  # transformers refuses a model that was quantized in a file
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), TOKENS), expected)
    rope_patch.restore(model)
    assert model.config.max_position_embeddings == 64
    assert torch.equal(model.model.rotary_emb.inv_freq, geometric(1e4, 16))


def test_weights_are_dequantized_in_any_type_and_transformers_says_nothing_else(tmp_path, caplog):
    """It would keep those of some families packed, and warns that all are."""
    _, file = written(tmp_path)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model = rope_patch.load(file, dtype=torch.bfloat16)
    finally:
        logger.removeHandler(caplog.handler)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert "packed" not in caplog.text


def test_the_table_of_another_tools_file_is_the_models_own(tmp_path):
    """llama.cpp's converter writes Llama 3.1's smoothing as factors and leaves no record; p-RoPE keeps it."""
    folder, file = written(tmp_path, rope_parameters=LLAMA3, max_position_embeddings=512)
    model = rope_patch.load(file)
    plain = logits(AutoModelForCausalLM.from_pretrained(folder), TOKENS)
    assert torch.allclose(logits(model, TOKENS), plain, atol=1e-5)
    assert rope_patch.inspect(model).record is None
    model.save_pretrained(tmp_path / "plain")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(again, TOKENS), logits(model, TOKENS))
    patched, reference = (rope_patch.load(source, "p_rope:p=0.5") for source in (file, folder))
    assert torch.allclose(logits(patched, TOKENS), logits(reference, TOKENS), atol=1e-5)
    rope_patch.restore(patched)
    assert torch.allclose(logits(patched, TOKENS), plain, atol=1e-5)


def test_a_record_that_does_not_fit_is_not_followed(tmp_path):
    folder, file = written(tmp_path, "yarn")
    other = json.dumps(rope_patch.verify(rope_patch.load(saved(tmp_path / "pi", "pi"))).record.to_dict())
    altered = rewritten(file, tmp_path / "altered.gguf", keys=[Key.of(RECORD_KEY, other)])
    with pytest.warns(UserWarning, match="pi:factor=4"):
        model = rope_patch.load(altered)
    assert rope_patch.inspect(model).record is None
    assert torch.allclose(logits(model, TOKENS), logits(rope_patch.load(folder), TOKENS), atol=1e-4)


def test_gemma_3_whose_file_does_not_say_which_layers_slide(tmp_path):
    """As its converter writes it; transformers knows which. The table in the file is that of full attention."""
    tables = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": PLAIN,
    }
    sizes = {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 256, "max_position_embeddings": 512}
    model = tiny_model("gemma3", rope_parameters=tables, **sizes)
    plain = rope_patch.load(write_toy(model, tmp_path / "plain.gguf", rope__freq_base=1e6))
    assert torch.allclose(logits(plain, TOKENS), logits(model, TOKENS), atol=1e-5)
    assert not hasattr(plain.config, "rope_patch")
    file = write_toy(model, tmp_path / "scaled.gguf", rope__freq_base=1e6, rope__scaling__factor=8.0)
    rope_patch.apply(model, "pi:factor=8")
    assert torch.allclose(logits(rope_patch.load(file), TOKENS), logits(model, TOKENS), atol=1e-5)


def test_another_base_for_sliding_layers_than_transformers_reads_is_refused(tmp_path):
    model = tiny_model("gemma3", num_hidden_layers=6, layer_types=None)
    base = {"rope__freq_base": model.config.rope_parameters["full_attention"]["rope_theta"]}
    write_toy(model, tmp_path / "m.gguf", **base, rope__freq_base_swa=5000.0)
    with pytest.raises(PatchError, match="5000"):
        rope_patch.load(tmp_path / "m.gguf")
