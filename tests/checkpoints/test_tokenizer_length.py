"""A tokenizer that is saved beside a model cuts texts no earlier than at the context that the patch states."""

import pytest
from support.patches import edit_json, read_json, training_begun
from support.tiny import LLAMA, tiny_model
from transformers import AutoTokenizer

import rope_patch
from rope_patch import PatchError
from rope_patch.checkpoints.folder_patch import patch_folder, restore_folder

TEXT = "one " * 400


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(LLAMA, model_max_length=64)


@pytest.fixture
def plain(tmp_path, tokenizer):
    """A checkpoint of 64 tokens, which its tokenizer says too."""
    model = tiny_model("llama", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def length_of(folder):
    return len(AutoTokenizer.from_pretrained(folder)(TEXT, truncation=True).input_ids)


def test_save_raises_the_length_of_a_tokenizer_that_is_given_or_copied(plain, tokenizer, tmp_path):
    for name, given in (("given", tokenizer), ("copied", None)):
        model = rope_patch.load(plain, "yarn", target_length=256)
        rope_patch.save(model, tmp_path / name, tokenizer=given)
        assert length_of(tmp_path / name) == 256
        rope_patch.verify(tmp_path / name)
    assert tokenizer.model_max_length == 64  # the caller's own is left alone


def test_a_tokenizer_that_stays_in_the_folder_is_raised_too(plain):
    model = rope_patch.load(plain, "yarn", target_length=256)
    for tokenizer in (None, False):
        rope_patch.save(model, plain, tokenizer=tokenizer)
        assert length_of(plain) == 256
        rope_patch.verify(plain)


def test_damaged_settings_of_a_tokenizer_lose_no_model(plain):
    model = rope_patch.load(plain, "yarn", target_length=256)
    (plain / "tokenizer_config.json").write_text("[]")
    rope_patch.save(model, plain)
    assert rope_patch.inspect(plain).record is not None


def test_a_tokenizer_that_was_raised_before_is_restored_to_the_first_length(plain, tmp_path):
    patch_folder(plain, "yarn", tmp_path / "once", target_length=128)
    model = rope_patch.load(tmp_path / "once", "yarn", target_length=256, replace=True)
    rope_patch.save(model, tmp_path / "twice", tokenizer=AutoTokenizer.from_pretrained(tmp_path / "once"))
    assert (length_of(tmp_path / "once"), length_of(tmp_path / "twice")) == (128, 256)
    restore_folder(tmp_path / "twice", tmp_path / "restored")
    settings = read_json(tmp_path / "restored" / "tokenizer_config.json")
    assert settings["model_max_length"] == 64 and "rope_patch" not in settings


@pytest.mark.parametrize("length", [512, int(1e30)])
def test_a_longer_length_and_a_context_that_is_not_stated_leave_the_tokenizer_alone(length, plain, tokenizer, tmp_path):
    patch_folder(plain, "p_rope", tmp_path / "unstated")
    assert length_of(tmp_path / "unstated") == 64
    model = rope_patch.load(plain, "yarn", target_length=256)
    tokenizer.model_max_length = length
    rope_patch.save(model, tmp_path / "longer", tokenizer=tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "longer").model_max_length == length


def test_verify_raises_where_the_tokenizer_cuts_below_the_stated_context(plain, tokenizer, tmp_path):
    patch_folder(plain, "yarn", tmp_path / "patched", target_length=256)
    tokenizer.save_pretrained(tmp_path / "patched")  # as plain transformers does
    with pytest.raises(PatchError, match="64 tokens"):
        rope_patch.verify(tmp_path / "patched")


@pytest.mark.parametrize("before", [{"model_max_length": 64, "auto_map": {}}, {"model_max_length": "64"}, [64]])
def test_nothing_but_the_length_is_restored_in_a_tokenizer(plain, tmp_path, before):
    patch_folder(plain, "yarn", tmp_path / "patched", target_length=256)
    edit_json(tmp_path / "patched" / "tokenizer_config.json", lambda settings: settings.update(rope_patch=before))
    for attempt in (rope_patch.verify, rope_patch.doctor, lambda folder: restore_folder(folder, tmp_path / "out")):
        with pytest.raises(PatchError, match=r"^\S*/patched/tokenizer_config\.json"):
            attempt(tmp_path / "patched")
    assert not (tmp_path / "out").exists()


def test_the_checkpoints_of_a_trainer_are_raised_too(plain, tokenizer, tmp_path):
    model = rope_patch.load(plain, "yarn", target_length=256)
    training_begun(model, processing_class=tokenizer)
    model.save_pretrained(tmp_path / "checkpoint-1")
    tokenizer.save_pretrained(tmp_path / "checkpoint-1")  # as Trainer does, after the model
    assert length_of(tmp_path / "checkpoint-1") == 256
    rope_patch.verify(tmp_path / "checkpoint-1")
    restore_folder(tmp_path / "checkpoint-1", tmp_path / "restored")
    assert length_of(tmp_path / "restored") == 64
