"""Saving, loading, adapters: the patch comes back or an error does."""

import copy
import os
import pickle
import re
import shutil

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel
from support.fresh import stock_logits
from support.hub import cached_repository, reachable
from support.patches import (
    FITTING,
    edit_json,
    lora,
    method_for,
    module_of,
    patched_model,
    saved_with,
    training_begun,
)
from support.round_trip import assert_same
from support.subsets import full
from support.tiny import ARCHITECTURES, ids, logits, tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import rope_patch
from rope_patch import METHODS, PatchError, checkpoints
from rope_patch.checkpoints.folder_patch import patch_folder, restore_folder, verify_folder

CHAINS = ("abf:rope_theta=500000+p_rope:p=0.5", "p_rope:p=0.25+pi:factor=8", "yarn:factor=4+p_rope:p=0.5")


EVERY = FITTING + [(family, chain) for family in ARCHITECTURES for chain in CHAINS if family != "gemma4"]
LOADED = [("llama", "p_rope"), ("phi3", "yarn"), ("gemma3", "yarn"), ("gemma4", "truncated")]
# Each method with two families, each family with three methods or more.
SOME = [(f, n) for f, n in FITTING if ([*METHODS].index(n) - ARCHITECTURES.index(f)) % len(ARCHITECTURES) in (0, 4)]
SOME += [*LOADED, *zip(("llama", "gemma3", "qwen3"), CHAINS, strict=True)]


@pytest.fixture(scope="module", params=[pytest.param(SOME, id="some"), full(EVERY, id="every")])
def reloaded(request, tmp_path_factory):
    """Logits of methods × families before saving, and after a plain reload in one new process."""
    root = tmp_path_factory.mktemp("saved")
    ours = {}
    for family in ARCHITECTURES:
        model = tiny_model(family)
        for name in [name for fitting, name in request.param if fitting == family]:
            method = rope_patch.parse(name) if name in CHAINS else method_for(name)
            folder = f"{family}-{name}"
            with rope_patch.patched(model, method, target_length=256 if name == "yarn" else None):
                model.save_pretrained(root / folder)
                ours[folder] = logits(model)
    return root, ours, stock_logits(root, ids(), *ours)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_plain_transformers_gives_equal_logits(reloaded, family):
    _, ours, stock = reloaded
    cases = [name for name in ours if name.startswith(f"{family}-")]
    plain = logits(tiny_model(family))
    for name in cases:
        assert torch.equal(ours[name], stock[name]), name
    assert any(not torch.equal(stock[name], plain) for name in cases)


@pytest.mark.parametrize(("family", "name"), LOADED)
def test_loaded_through_us_it_is_patched_and_verified(reloaded, family, name):
    root, ours, _ = reloaded
    model = rope_patch.load(root / f"{family}-{name}")
    plain = tiny_model(family)
    assert torch.equal(logits(model), ours[f"{family}-{name}"])
    assert rope_patch.verify(model).record.to_method() == method_for(name)
    rope_patch.restore(model)
    assert model.config.rope_parameters == plain.config.rope_parameters
    assert_same(model, plain)


def test_saved_json_is_standard(reloaded):
    root, ours, _ = reloaded
    for name in ours:
        text = (root / name / "config.json").read_text()
        assert not re.search(r"\b(NaN|-?Infinity)\b", text), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: [c[k].update(factor=2.0) for k in ("rope_parameters", "rope_scaling")], "in use"),
        (lambda c: c["rope_patch"]["tables"]["all"]["inv_freq"].__setitem__(3, 0.5), "altered"),
        (lambda c: c["rope_patch"]["method"].update(factor=5.0), "method"),
        (lambda c: c["rope_patch"]["base_config"]["rope_parameters"].update(rope_theta=5e4), "base table"),
        (lambda c: c["rope_patch"].update(surprise=1), "surprise"),
        (lambda c: c["rope_patch"].pop("tables"), "tables"),
        (lambda c: c.update(rope_patch="yes"), "object"),
        (lambda c: c.update(max_position_embeddings=99), "99"),
    ],
)
def test_a_record_that_does_not_fit(tmp_path, change, message):
    model = patched_model("pi", factor=4)
    rope_patch.save(model, tmp_path / "saved")
    edit_json(tmp_path / "saved" / "config.json", change)
    with pytest.raises(PatchError, match=message):
        rope_patch.load(tmp_path / "saved")


@pytest.mark.filterwarnings("ignore:the patch record names")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "named",
    [
        {"method": "yarn", "factor": 4.0, "replace_scaling": True},
        {"method": "two_tables", "long": {"method": "yarn", "factor": 4.0}, "short": {"method": "default"}},
    ],
)
def test_a_record_of_a_removed_method_is_read_as_its_tables(tmp_path, named, family):
    model = patched_model("yarn:factor=4+truncated", family=family)
    rope_patch.save(model, tmp_path / "saved")

    def rename(config):
        config["rope_patch"] |= {"method": named, "short_tables": config["rope_patch"]["base_tables"]}

    edit_json(tmp_path / "saved" / "config.json", rename)
    loaded = rope_patch.load(tmp_path / "saved")
    assert_same(loaded, model)
    assert rope_patch.doctor(loaded).ok
    assert rope_patch.doctor(tmp_path / "saved").ok
    assert rope_patch.verify(tmp_path / "saved").method.startswith("table:values=1")
    restore_folder(tmp_path / "saved", tmp_path / "restored")
    assert_same(rope_patch.load(tmp_path / "restored"), tiny_model(family))


@pytest.mark.parametrize(("change", "same"), [(torch.nextafter, True), (lambda table, ones: table * 1.001, False)])
def test_another_machines_last_bit_is_no_alarm(change, same):
    table = rope_patch.apply(tiny_model(), "abf").record.tables["all"]
    inv_freq = change(torch.tensor(table.inv_freq), torch.ones(8))
    assert table.matches(type(table)(tuple(inv_freq.tolist()), table.attention_scaling, "0" * 16)) is same


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def base_folder(tmp_path):
    return saved_with(tiny_model(), tmp_path / "base")


@pytest.fixture
def tuned(base_folder):
    """An adapter over that checkpoint under YaRN."""
    return lora(rope_patch.load(base_folder, "yarn:factor=4"))


@pytest.fixture
def adapter(tmp_path, tuned):
    """The folder of the adapter and its logits."""
    rope_patch.save(tuned, tmp_path / "adapter")
    return tmp_path / "adapter", logits(tuned)


def test_plain_peft_loses_it_and_verify_says_so(adapter, base_folder):
    """The trap this package exists for."""
    folder, expected = adapter
    lost = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), folder)
    assert not torch.allclose(logits(lost), expected, atol=1e-3)
    with pytest.raises(PatchError, match="carries"):
        rope_patch.verify(lost)


def test_adapter_onto_models_that_do_not_fit(adapter, base_folder):
    folder, expected = adapter
    plain = AutoModelForCausalLM.from_pretrained(base_folder)
    with pytest.raises(PatchError, match="yarn:factor=4"):
        rope_patch.load_adapter(plain, folder)
    rope_patch.apply(plain, "pi:factor=4")
    with pytest.raises(PatchError, match="yarn:factor=4"):
        rope_patch.load_adapter(plain, folder)
    rope_patch.apply(plain, "yarn:factor=4", replace=True)
    assert torch.equal(logits(rope_patch.load_adapter(plain, folder)), expected)
    with pytest.raises(PatchError, match="yarn:factor=4"):
        rope_patch.load(folder, "pi:factor=4")


def test_adapter_of_another_base_raises(adapter, tmp_path):
    folder, _ = adapter
    tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(tmp_path / "other")
    edit_json(folder / "adapter_config.json", lambda c: c.update(base_model_name_or_path=str(tmp_path / "other")))
    with pytest.raises(PatchError, match="another"):
        rope_patch.load(folder)


def test_adapter_without_a_record(tmp_path, base_folder):
    tuned = lora(AutoModelForCausalLM.from_pretrained(base_folder))
    tuned.save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match="carries"):
        loaded = rope_patch.load(tmp_path / "adapter")
    assert_same(loaded, tuned)
    patched = rope_patch.load(base_folder, "yarn:factor=4")
    with pytest.raises(PatchError, match="carries"):
        rope_patch.load_adapter(patched, tmp_path / "adapter")


def trained(model, folder, steps, resume=False, **more):
    """Train with the callback, a checkpoint every two steps; return the Trainer."""
    rows = Dataset.from_dict({"input_ids": ids(16, 8).tolist(), "labels": ids(16, 8).tolist()})
    options = {"save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "seed": 1}
    asked = TrainingArguments(folder, max_steps=steps, report_to=[], lr_scheduler_type="constant", **options, **more)
    callbacks = [rope_patch.RopePatchCallback()]
    trainer = Trainer(model.train(), asked, train_dataset=rows, eval_dataset=rows, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def train(model, folder, steps, resume=False):
    """Train with the callback; return the losses."""
    history = trained(model, folder, steps, resume).state.log_history
    return [entry["loss"] for entry in history if "loss" in entry]


def test_a_training_without_a_patch_is_refused():
    with pytest.raises(PatchError, match="record"):
        training_begun(lora(tiny_model()))


def test_a_run_is_resumed_under_the_patch_it_was_begun_with(tmp_path, base_folder):
    folder = tmp_path / "run"

    def run(method, resume=False):
        torch.manual_seed(0)
        return train(lora(rope_patch.load(base_folder, method)), folder, 4, resume)

    whole = run("yarn:factor=4")
    shutil.rmtree(folder / "checkpoint-4")
    with pytest.raises(PatchError, match="yarn:factor=8"):
        run("yarn:factor=8", resume=True)
    resumed = run("yarn:factor=4", resume=True)
    assert resumed == pytest.approx(whole, abs=1e-4) and len(resumed) == 4
    shutil.rmtree(folder / "checkpoint-4")
    state = folder / "checkpoint-2" / "trainer_state.json"
    edit_json(state, lambda data: data["stateful_callbacks"].pop("RopePatchCallback"))  # begun without it
    with pytest.warns(UserWarning, match="under which patch"):
        assert run("yarn:factor=4", resume=True) == resumed


def loads_as(folder, model):
    """Whether a folder loads with its patch and the logits of a model."""
    loaded = rope_patch.load(folder)
    return rope_patch.verify(loaded) and torch.allclose(logits(loaded), logits(model.eval()), atol=1e-6)


def test_the_best_model_is_saved_with_its_record(tmp_path, tuned):
    options = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.5}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}  # so that the best model is not the last
    trainer = trained(tuned, tmp_path / "run", 4, **options)
    assert trainer.state.best_global_step == 2
    trainer.save_model()
    assert loads_as(tmp_path / "run", trainer.model) and loads_as(tmp_path / "run" / "checkpoint-2", trainer.model)


def test_a_second_training_of_a_model_writes_the_record_of_its_own_patch(tmp_path, tuned):
    first = trained(tuned, tmp_path / "run", 2).model
    rope_patch.apply(first, "pi:factor=4", replace=True)
    trainer = trained(first, tmp_path / "run", 4)
    trainer.save_model()
    records = [checkpoints.read_record(tmp_path / "run" / name) for name in ("", "checkpoint-4", "checkpoint-2")]
    assert [record.to_method().name for record in records] == ["pi", "pi", "pi"]


def test_the_records_of_other_adapters_in_the_folder_stay(tmp_path, tuned):
    rope_patch.save(lora(patched_model("pi:factor=4")), tmp_path / "run" / "other")
    tuned.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    trained(tuned, tmp_path / "run", 2).save_model()
    folders = (tmp_path / "run" / name for name in ("other", "", "second"))
    assert [checkpoints.read_record(folder).to_method().name for folder in folders] == ["pi", "yarn", "yarn"]


def test_a_patch_that_is_lost_in_training_is_not_saved(tmp_path, tuned):
    trainer = trained(tuned, tmp_path / "run", 2)
    rope_patch.restore(trainer.model)
    with pytest.raises(PatchError, match="carries"):
        trainer.save_model(tmp_path / "out")
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_a_save_that_is_cut_off_after_the_weights_leaves_an_adapter_that_is_refused(tmp_path, tuned, monkeypatch):
    stock = PeftModel.save_pretrained
    training_begun(tuned)

    def cut_off(self, folder, **options):
        stock(self, folder, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(PeftModel, "save_pretrained", cut_off)
    with pytest.raises(KeyboardInterrupt):
        tuned.save_pretrained(tmp_path / "out")
    with pytest.raises(PatchError, match="beside"):
        rope_patch.load(tmp_path / "out")


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_in_training_saves_itself_with_the_record(tmp_path, tuned, again):
    training_begun(tuned)
    other = again(tuned)
    for name, weights in other.named_parameters():
        if "lora" in name:
            weights.data += 0.1
    other.save_pretrained(tmp_path / "out")
    assert loads_as(tmp_path / "out", other)


def test_the_model_inside_a_wrapper_writes_the_record(tmp_path, tuned):
    """Trainer takes the wrapper off before it saves."""
    training_begun(torch.compile(tuned, backend="eager"))
    tuned.save_pretrained(tmp_path / "out")
    assert checkpoints.read_record(tmp_path / "out") == rope_patch.verify(tuned).record


def test_only_the_process_that_writes_the_weights_writes_the_record(tmp_path, tuned):
    training_begun(tuned)
    tuned.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not [*tmp_path.rglob("rope_patch.json")]
    tuned.save_pretrained(tmp_path / "out", False)  # no safetensors
    assert (tmp_path / "out" / "adapter_model.bin").exists()
    assert checkpoints.read_record(tmp_path / "out") == rope_patch.verify(tuned).record


# --- the name of a model that was saved ------------------------------------------------------------------------------


def test_an_adapter_that_plain_peft_saves_and_loads_has_the_patched_base(tmp_path, base_folder):
    model = rope_patch.load(base_folder, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "patched")
    tuned = lora(model)
    tuned.save_pretrained(tmp_path / "adapter")
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert_same(loaded, tuned)


def test_a_model_has_the_name_of_a_folder_as_long_as_its_table(tmp_path, base_folder):
    model = rope_patch.load(base_folder)
    with rope_patch.patched(model, "yarn:factor=4"):
        rope_patch.save(model, tmp_path / "patched")
        assert model.name_or_path == model.config.name_or_path == str(tmp_path / "patched")
        rope_patch.save(lora(model), tmp_path / "adapter")  # whose folder holds no model
        assert model.name_or_path == model.config.name_or_path == str(tmp_path / "patched")
    assert model.name_or_path == model.config.name_or_path == str(base_folder)


def test_a_folder_of_ours_that_is_deleted_gives_no_name(tmp_path, base_folder):
    model = rope_patch.load(base_folder, "yarn:factor=4")
    rope_patch.export(model, tmp_path / "out", to="hf")
    assert model.name_or_path == model.config.name_or_path == str(base_folder)


# --- failures while writing and reading ------------------------------------------------------------------------------


def test_an_unpatched_model_and_a_file_in_the_place_of_the_folder_are_refused(tmp_path):
    with pytest.raises(PatchError, match="carries"):
        rope_patch.save(tiny_model(), tmp_path / "file")
    assert not (tmp_path / "file").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="folder"):
        rope_patch.save(patched_model("yarn:factor=4"), tmp_path / "file")


def test_truncated_weights(base_folder):
    weights = base_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(OSError, match="truncated"):
        rope_patch.load(base_folder)


def test_nothing_stale_stays_in_a_folder_that_is_written_again(tmp_path):
    model = patched_model("yarn:factor=4")
    rope_patch.save(model, tmp_path)
    (tmp_path / "ema.safetensors").write_bytes(b"mine")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3)
    rope_patch.save(model, tmp_path, max_shard_size="50KB")
    assert not (tmp_path / "model.safetensors").exists()  # transformers would prefer it to the index
    assert_same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    tuned = lora(model)
    rope_patch.save(tuned, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()  # an adapter beside its base model
    merged = tuned.merge_and_unload()
    rope_patch.save(merged, tmp_path)
    assert not (tmp_path / "adapter_config.json").exists()
    assert_same(rope_patch.load(tmp_path), merged)
    assert (tmp_path / "ema.safetensors").read_bytes() == b"mine"


PAPERS = {
    "README.md": "---\nlicense: llama3\nlanguage: [en, de]\n---\nThe base.",
    "BASE_README.md": "The base of the base.",
    "LICENSE": "the licence",
    "Notice.txt": "the notice",
    "USE_POLICY.md": "the policy",
    "gemma_terms.pdf": "the terms",
}


@pytest.mark.parametrize("reached", [True, False])
def test_a_copy_of_a_repository_keeps_card_and_terms_as_far_as_they_can_be_had(tmp_path, monkeypatch, reached):
    remote = tmp_path / "remote"
    tiny_model().save_pretrained(remote)
    for name, text in PAPERS.items():
        (remote / name).write_text(text)
    (remote / "onnx").mkdir()
    (remote / "onnx" / "model.bin").write_text("large")
    cached = ["*.json", "*.safetensors", "LICENSE"]
    snapshot = cached_repository(monkeypatch, tmp_path / "cache", "someone/tiny", remote, cached)
    if reached:
        reachable(monkeypatch, snapshot, remote)
    patch_folder("someone/tiny", "pi:factor=4", tmp_path / "out")
    assert rope_patch.verify(tmp_path / "out").method == "pi:factor=4"
    kept = {name for name, text in PAPERS.items() if (tmp_path / "out" / name).exists()}
    assert kept == (set(PAPERS) if reached else {"LICENSE"})
    assert all((tmp_path / "out" / name).read_text() == PAPERS[name] for name in kept)


def test_a_copy_of_a_folder_leaves_out_what_describes_that_folder_alone(tmp_path):
    model = patched_model("yarn:factor=4")
    rope_patch.save(model, tmp_path / "patched")
    others = {"rope_patch.json", "export.json", "notes.txt"}  # a Trainer's checkpoint holds the first
    for name in others:
        (tmp_path / "patched" / name).write_text("{}")
    restore_folder(tmp_path / "patched", tmp_path / "plain")
    assert others & set(os.listdir(tmp_path / "plain")) == {"notes.txt"}


def test_an_adapter_over_a_patched_base_keeps_our_module_and_refuses_a_method(tmp_path):
    rope_patch.save(patched_model("yarn:factor=4"), tmp_path / "base")
    tuned = lora(rope_patch.load(tmp_path / "base"))
    rope_patch.save(tuned, tmp_path / "adapter")
    loaded = rope_patch.load(tmp_path / "adapter")
    assert type(module_of(loaded)).__name__ == "PatchedRotary"
    assert_same(loaded, tuned)
    (tmp_path / "adapter" / "rope_patch.json").unlink()
    with pytest.raises(PatchError, match="yarn:factor=4"):
        rope_patch.load(tmp_path / "adapter", "pi:factor=4")


@pytest.mark.parametrize("there", [True, False])
def test_links_to_folders_are_followed(tmp_path, there):
    model = patched_model("yarn:factor=4")
    if there:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    rope_patch.save(model, tmp_path / "link")
    assert (tmp_path / "real" / "model.safetensors").is_file()
    assert not list((tmp_path / "real").glob(".*"))


def test_saving_does_not_push(tmp_path):
    with pytest.raises(ValueError, match="push_to_hub"):
        rope_patch.save(patched_model("yarn:factor=4"), tmp_path / "out", push_to_hub=True)


def test_a_base_that_was_altered_is_not_restored(tmp_path):
    model = patched_model("pi:factor=4")
    model.save_pretrained(tmp_path)
    edit_json(
        tmp_path / "config.json", lambda c: c["rope_patch"]["base_config"]["rope_parameters"].update(rope_theta=777.0)
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for attempt in (lambda: rope_patch.restore(loaded), lambda: rope_patch.apply(loaded, "ntk:factor=4", replace=True)):
        with pytest.raises(PatchError, match="base_config"):
            attempt()


def test_a_patch_over_an_edited_table_comes_back(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(0.5)
    rope_patch.apply(model, "p_rope", p=0.5)
    rope_patch.save(model, tmp_path)
    assert_same(rope_patch.load(tmp_path), model)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(PatchError, match="edited"):
        rope_patch.restore(again)
    patch = rope_patch.apply(again, "default", replace=True)
    assert patch.after[None].inv_freq[0] == 0.5  # the edited base, not the config's


def test_missing_weights(tmp_path):
    rope_patch.save(patched_model("yarn:factor=4"), tmp_path / "out", max_shard_size="50KB")
    shards = sorted((tmp_path / "out").glob("*.safetensors*"))
    shards[0].unlink()
    for attempt in (verify_folder, lambda folder: patch_folder(folder, "pi:factor=4", tmp_path / "new", replace=True)):
        with pytest.raises(OSError, match=shards[0].name):
            attempt(tmp_path / "out")
    for path in shards[1:]:
        path.unlink()
    with pytest.raises(OSError, match="weights"):
        verify_folder(tmp_path / "out")
