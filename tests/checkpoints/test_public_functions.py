"""``load``, ``save``, ``inspect`` and ``verify`` as a user calls them."""

import pytest
from support.hub import cached_repository
from support.tiny import LLAMA
from transformers import AutoTokenizer

import rope_patch

# --- what is no checkpoint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [rope_patch.load, rope_patch.inspect, rope_patch.verify])
@pytest.mark.parametrize("source", ["script.py", "empty", "./nowhere", "~/nowhere", "no/where/else", "nowhere/"])
def test_what_is_no_checkpoint_on_this_disk_is_refused_without_asking_the_hub(call, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("rope_patch.checkpoints.adapters.cached_file", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=source):
        call(source)


def test_a_name_with_one_slash_is_looked_up_on_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr("rope_patch.checkpoints.adapters.cached_file", lambda name, *_, **__: asked.append(name))
    with pytest.raises(OSError, match="no/where"):
        rope_patch.inspect("no/where")
    assert asked == ["no/where"]


@pytest.mark.parametrize("name", [".", "model.gguf"])
def test_what_is_no_adapter_is_refused_as_one(tmp_path, root, name):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="adapter"):
        rope_patch.load_adapter(rope_patch.load(root / "patched"), tmp_path / name)


# --- load ------------------------------------------------------------------------------------------------------------


def test_load_takes_the_options_of_apply_by_name(root):
    model = rope_patch.load(root / "patched", "pi", target_length=128, replace=True)
    record = rope_patch.verify(model).record
    assert (str(record.to_method()), record.target_length) == ("pi:factor=2", 128)


def test_load_passes_every_option_of_from_pretrained_on(root):
    model = rope_patch.load(root / "base", dtype="bfloat16", attn_implementation="eager", local_files_only=True)
    assert str(model.dtype) == "torch.bfloat16" and model.config._attn_implementation == "eager"


def test_load_refuses_what_is_no_option_before_it_reads_the_model():
    with pytest.raises(TypeError, match="yarn:factor="):
        rope_patch.load("nowhere", "yarn", factor=4)
    with pytest.raises(ValueError, match="target_length goes with a method"):
        rope_patch.load("nowhere", target_length=128)
    with pytest.raises(ValueError, match="unknown"):
        rope_patch.load("nowhere", "prope")


# --- inspect and verify ----------------------------------------------------------------------------------------------


def test_inspect_and_verify_find_the_same_in_a_model_its_folder_and_an_adapter(root):
    record = rope_patch.verify(rope_patch.load(root / "patched")).record
    for source in (root / "patched", str(root / "one")):
        assert rope_patch.verify(source).record == record
        assert rope_patch.inspect(source).tables[0].fingerprint == record.tables["all"].hash
    assert rope_patch.inspect(root / "base").tables[0].fingerprint == record.base_tables["all"].hash


# --- the tokenizer ---------------------------------------------------------------------------------------------------


def test_save_takes_the_tokenizer_of_the_folder_that_the_model_came_from(tmp_path):
    model = rope_patch.load(LLAMA, "pi:factor=2")
    rope_patch.save(model, tmp_path / "out")
    again, original = (AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "out", LLAMA))
    assert again("The ferry came back late.").input_ids == original("The ferry came back late.").input_ids


def test_save_leaves_the_tokenizer_out_when_told_so(tmp_path):
    rope_patch.save(rope_patch.load(LLAMA, "pi:factor=2"), tmp_path / "out", tokenizer=False)
    assert not list((tmp_path / "out").glob("*token*"))


@pytest.mark.parametrize("given", [True, False])
def test_save_keeps_a_tokenizer_that_is_given_or_in_the_folder_already(tmp_path, given):
    own = AutoTokenizer.from_pretrained(LLAMA)
    own.add_tokens(["<own>"])
    if not given:
        own.save_pretrained(tmp_path / "out")
    rope_patch.save(rope_patch.load(LLAMA, "pi:factor=2"), tmp_path / "out", tokenizer=own if given else None)
    assert "<own>" in AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab()


def test_save_takes_no_tokenizer_of_another_vocabulary(tmp_path):
    model = rope_patch.load(LLAMA, "pi:factor=2")
    model.resize_token_embeddings(model.config.vocab_size + 8)
    with pytest.warns(UserWarning, match="tokenizer="):
        rope_patch.save(model, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_save_takes_the_tokenizer_of_a_hub_model_from_the_local_cache_alone(tmp_path, monkeypatch):
    cached_repository(monkeypatch, tmp_path / "cache", "someone/llama", LLAMA)
    model = rope_patch.load(LLAMA, "pi:factor=2")
    for name in ("llama", "unknown"):
        model.config.name_or_path = f"someone/{name}"
        rope_patch.save(model, tmp_path / name)
        assert (tmp_path / name / "tokenizer.json").exists() == (name == "llama")


def test_save_refuses_what_is_no_tokenizer_before_it_writes(root, tmp_path):
    with pytest.raises(TypeError, match="transformers"):
        rope_patch.save(rope_patch.load(root / "patched"), tmp_path / "out", tokenizer="llama")
    assert not (tmp_path / "out").exists()
