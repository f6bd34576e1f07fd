"""What saved folders tell transformers 4: the same tables as transformers 5, or something that it fails on.

That version 4.57.1 itself reads them so is shown by benchmarks/older_loaders.py.
"""

import json

import pytest
from support.patches import config_of, edit_json, lora, patched_model, training_begun
from support.round_trip import assert_same
from support.tiny import tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch import PatchError
from rope_patch.checkpoints import folder_patch as folders
from rope_patch.patching.older_keys import OLDER_FAIL, older_keys


def saved(tmp_path, family, method, **options):
    model = patched_model(method, family, **options)
    rope_patch.save(model, tmp_path / family)
    return tmp_path / family, model


@pytest.mark.parametrize("method", ["yarn:factor=4", "pi:factor=4", "llama3:factor=4", "p_rope:p=0.5", "truncated"])
def test_both_forms_stand_in_the_config_with_the_same_contents(tmp_path, method):
    folder, model = saved(tmp_path, "llama", method)
    config = config_of(folder)
    assert config["rope_scaling"] == config["rope_parameters"] == json.loads(json.dumps(model.config.rope_parameters))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.config.rope_parameters == model.config.rope_parameters
    assert_same(loaded, model)


def test_a_patch_says_nothing_that_an_unpatched_model_said_otherwise(tmp_path):
    """The command: over a folder that transformers 4 wrote, whose own keys must not stay."""
    tiny_model().save_pretrained(tmp_path / "base")
    config = config_of(tmp_path / "base")
    config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    folders.patch_folder(tmp_path / "base", "abf", tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["rope_theta"] == 500000.0 and "rope_scaling" not in config  # a base alone needs no scaling
    folders.patch_folder(tmp_path / "out", "yarn:factor=4", tmp_path / "again", replace=True)
    config = config_of(tmp_path / "again")
    assert config["rope_theta"] == 10000.0 and config["rope_scaling"] == config["rope_parameters"]
    folders.restore_folder(tmp_path / "again", tmp_path / "plain")
    assert "rope_scaling" not in config_of(tmp_path / "plain")


def test_the_callback_edits_the_config_of_a_whole_model(tmp_path):
    model = patched_model("yarn:factor=4")
    model.save_pretrained(tmp_path / "checkpoint-1")
    assert "rope_scaling" not in config_of(tmp_path / "checkpoint-1")  # what transformers itself leaves out
    training_begun(model)
    model.save_pretrained(tmp_path / "checkpoint-1")
    assert config_of(tmp_path / "checkpoint-1")["rope_scaling"]["rope_type"] == "yarn"
    tuned = lora(model)
    training_begun(tuned)
    tuned.save_pretrained(tmp_path / "checkpoint-2")
    assert not (tmp_path / "checkpoint-2" / "config.json").exists()


def test_tables_by_layer_type(tmp_path):
    folder, _ = saved(tmp_path / "full", "gemma3", "yarn:factor=4")
    config = config_of(folder)
    assert config["rope_scaling"] == config["rope_parameters"]["full_attention"]
    assert config["rope_local_base_freq"] == config["rope_parameters"]["sliding_attention"]["rope_theta"]
    folder, model = saved(tmp_path / "sliding", "gemma3", "pi:factor=4", layer_types=["sliding_attention"])
    assert config_of(folder)["rope_local_base_freq"] == OLDER_FAIL  # version 4 has no scaling for these layers
    assert_same(AutoModelForCausalLM.from_pretrained(folder), model)


def test_keys_of_families_that_have_names_of_their_own():
    plain = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    assert older_keys("gpt_neox", plain) == {"rotary_emb_base": 5e5, "rotary_pct": 0.25}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    assert older_keys("nemotron", linear)["rope_theta"] == OLDER_FAIL  # it reads its base alone
    assert older_keys("zaya", {"hybrid": linear}) == {"rope_theta": OLDER_FAIL}  # whatever older releases make of it


def test_families_with_a_table_for_each_layer_type():
    """Olmo 3 is published with one base and one scaling; other tables of it fail in transformers 4."""
    plain = {"rope_type": "default", "rope_theta": 5e5}
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    tables = {"full_attention": yarn, "sliding_attention": plain}
    assert older_keys("olmo3", tables) == {"rope_theta": OLDER_FAIL}
    published = {"full_attention": yarn | {"rope_theta": 5e5}, "sliding_attention": plain}
    assert older_keys("olmo3", published) == {"rope_theta": 5e5, "rope_scaling": published["full_attention"]}
    gemma = {"rope_theta": 1e4, "rope_scaling": yarn, "rope_local_base_freq": 5e5}
    assert older_keys("gemma3n_text", tables) == older_keys("gemma3_text", tables) == gemma
    assert older_keys("modernbert", tables) == {"global_rope_theta": OLDER_FAIL, "local_rope_theta": 5e5}
    both = {"full_attention": plain, "sliding_attention": plain}
    assert older_keys("modernbert-decoder", both) == {"global_rope_theta": 5e5, "local_rope_theta": 5e5}
    assert older_keys("gemma3_text", {"sliding_attention": plain}) == {
        "rope_local_base_freq": 5e5
    }  # every layer slides


@pytest.mark.parametrize(
    "change", [{"rope_scaling": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, {"rope_theta": 5e5}]
)
def test_forms_that_disagree_are_refused_everywhere(tmp_path, change):
    folder, _ = saved(tmp_path, "llama", "yarn:factor=4")
    edit_json(folder / "config.json", lambda config: config.update(change))
    for attempt in (
        rope_patch.load,
        folders.verify_folder,
        lambda folder: folders.patch_folder(folder, "pi:factor=4", tmp_path / "out", replace=True),
    ):
        with pytest.raises(PatchError, match="transformers 4 and 5"):
            attempt(folder)


@pytest.mark.parametrize("method", ["yarn:factor=4", "yarn:factor=4+truncated"])
def test_a_base_at_the_top_alone_is_that_of_the_tables(tmp_path, method):
    """As version 5 itself reads it."""
    folder, model = saved(tmp_path, "llama", method)
    edit_json(folder / "config.json", lambda config: config["rope_parameters"].pop("rope_theta"))
    assert "rope_theta" in config_of(folder)
    assert_same(AutoModelForCausalLM.from_pretrained(folder), model)
    folders.verify_folder(folder)
    assert_same(rope_patch.load(folder), model)


def test_a_config_given_in_place_of_the_folders_own_is_refused(tmp_path):
    folder, model = saved(tmp_path, "llama", "yarn:factor=4")
    with pytest.raises(PatchError, match="config"):
        rope_patch.load(folder, config=tiny_model().config)
    own = rope_patch.checkpoints.load_config(folder)
    own.use_cache = False
    assert_same(rope_patch.load(folder, config=own), model)


def test_the_sections_of_several_position_axes_are_said():
    """transformers 4 reads them in rope_scaling, and fails without."""
    sections = {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [2, 3, 3]}
    assert older_keys("qwen2_vl_text", sections) == {"rope_theta": 5e5, "rope_scaling": sections}
    assert older_keys("llama", {"rope_type": "default", "rope_theta": 5e5}) == {"rope_theta": 5e5}
