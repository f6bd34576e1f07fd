"""Saving, loading, adapters: the patch comes back or an error does."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from fresh import stock_logits
from patches import edit_json, lora, method_for, module_of
from peft import LoraConfig, PeftModel
from tiny import ARCHITECTURES, ids, logits, tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch import METHODS, PatchError, checkpoints
from rope_patch.files import write_atomically

CHAINS = ("abf:rope_theta=500000+p_rope:p=0.5", "p_rope:p=0.25+pi:factor=8", "yarn:factor=4+p_rope:p=0.5")


@pytest.fixture(scope="module")
def reloaded(tmp_path_factory):
    """Logits of every method × family before saving, and after a plain reload in one new process."""
    root = tmp_path_factory.mktemp("saved")
    ours = {}
    for family in ARCHITECTURES:
        model = tiny_model(family)
        cases = {name: method_for(family, name) for name in METHODS}
        if family != "gemma4":
            cases |= {chain: rope_patch.parse(chain) for chain in CHAINS}
        for name, method in cases.items():
            folder = f"{family}-{name}"
            with rope_patch.patched(model, method, target_length=256 if name == "yarn" else None):
                model.save_pretrained(root / folder)
                ours[folder] = logits(model)
    return root, ours, stock_logits(root, ids(), *ours)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_plain_transformers_gives_equal_logits(reloaded, family):
    _, ours, stock = reloaded
    cases = [name for name in ours if name.startswith(f"{family}-")]
    assert len(cases) >= len(METHODS)
    for name in cases:
        assert torch.equal(ours[name], stock[name]), name
    assert not torch.equal(stock[f"{family}-nope"], stock[f"{family}-default"])


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3", "gemma4"])
def test_loaded_through_us_it_is_patched_and_verified(reloaded, family):
    root, ours, _ = reloaded
    for name in ("p_rope", "truncated", "yarn"):
        model = rope_patch.load(root / f"{family}-{name}")
        assert isinstance(module_of(model), rope_patch.PatchedRotary)
        assert torch.equal(logits(model), ours[f"{family}-{name}"])
        assert rope_patch.verify(model).record.to_method() == method_for(family, name)
        again = tiny_model(family)
        rope_patch.restore(model)
        assert model.config.rope_parameters == again.config.rope_parameters
        assert model.config.max_position_embeddings == again.config.max_position_embeddings
        assert torch.equal(logits(model), logits(again))


def test_saved_json_is_standard(reloaded):
    root, ours, _ = reloaded
    for name in ours:
        text = (root / name / "config.json").read_text()
        assert not re.search(r"\b(NaN|-?Infinity)\b", text), name


def test_load_with_a_method(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "base")
    loaded = rope_patch.load(tmp_path / "base", "pi:factor=4", dtype=torch.float32, target_length=128)
    assert loaded.config.max_position_embeddings == 128
    with rope_patch.patched(model, "pi:factor=4"):
        assert torch.equal(logits(loaded.eval()), logits(model))
    rope_patch.save(loaded, tmp_path / "patched")
    with pytest.raises(PatchError, match="already patched with pi:factor=4"):
        rope_patch.load(tmp_path / "patched", "yarn:factor=4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["rope_parameters"].update(factor=2.0), "transformers 4 and 5 would read different tables"),
        (lambda c: [c[k].update(factor=2.0) for k in ("rope_parameters", "rope_scaling")], r"in use: \[all\] cos is"),
        (lambda c: c.update(rope_theta=5e5), "rope_theta is 500000.0, rope_parameters says 10000.0"),
        (lambda c: c["rope_patch"]["tables"]["all"]["inv_freq"].__setitem__(3, 0.5), "record was altered: its table"),
        (lambda c: c["rope_patch"]["method"].update(factor=5.0), r"method \[all\]: table"),
        (lambda c: c["rope_patch"]["base_config"]["rope_parameters"].update(rope_theta=5e4), r"base table \[all\]"),
        (lambda c: c["rope_patch"].update(base_config={}), "malformed: .base_config. must be an object"),
        (lambda c: c["rope_patch"].update(schema=99, package_version="9.0"), "written by rope_patch 9.0 .*newer than"),
        (lambda c: c["rope_patch"].update(surprise=1), r"unknown keys \['surprise'\]"),
        (lambda c: c["rope_patch"].pop("tables"), "record lacks .tables."),
        (lambda c: c.update(rope_patch="yes"), "must be a JSON object, got str"),
        (lambda c: c.update(max_position_embeddings=99), "max_position_embeddings is 99, the record says 64"),
    ],
)
def test_a_record_that_does_not_fit(tmp_path, change, message):
    model = tiny_model()
    rope_patch.apply(model, "pi", factor=4)
    rope_patch.save(model, tmp_path / "saved")
    edit_json(tmp_path / "saved" / "config.json", change)
    with pytest.raises(PatchError, match=message):
        rope_patch.load(tmp_path / "saved")


def test_another_machines_last_bit_is_no_alarm():
    model = tiny_model()
    rope_patch.apply(model, "abf")
    record = rope_patch.verify(model).record
    table = record.tables["all"]
    off = torch.nextafter(torch.tensor(table.inv_freq), torch.ones(8))
    other = type(table)(tuple(off.tolist()), table.attention_scaling, "0" * 16)
    assert table.matches(other)
    far = type(table)(tuple((off * 1.001).tolist()), table.attention_scaling, "0" * 16)
    assert not table.matches(far)


def test_double_precision_is_kept_by_us_and_warned_about(tmp_path):
    model = tiny_model()
    rope_patch.apply(model, "pi:factor=4", precision="float64")
    with pytest.warns(UserWarning, match="no config of transformers can say so"):
        rope_patch.save(model, tmp_path / "saved")
    assert module_of(rope_patch.load(tmp_path / "saved")).precision == "float64"


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.fixture
def base_folder(tmp_path):
    tiny_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(tmp_path, base_folder):
    """An adapter trained under YaRN, its folder and its logits."""
    model = rope_patch.load(base_folder, "yarn:factor=4")
    tuned = lora(model)
    rope_patch.save(tuned, tmp_path / "adapter")
    return tmp_path / "adapter", logits(tuned)


def test_adapter_comes_back_with_its_patch(adapter):
    folder, expected = adapter
    loaded = rope_patch.load(folder).eval()
    assert isinstance(loaded, PeftModel)
    assert torch.equal(logits(loaded), expected)


def test_plain_peft_loses_it_and_verify_says_so(adapter, base_folder):
    """The trap this package exists for."""
    folder, expected = adapter
    lost = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_folder), folder).eval()
    assert not torch.allclose(logits(lost), expected, atol=1e-3)
    with pytest.raises(PatchError, match="carries no patch record"):
        rope_patch.verify(lost)
    with pytest.raises(PatchError, match=r"(?s)does not use the tables of yarn:factor=4.*carries no patch record"):
        rope_patch.verify(lost, checkpoints.read_record(folder))


def test_adapter_onto_models_that_do_not_fit(adapter, base_folder):
    folder, expected = adapter
    plain = AutoModelForCausalLM.from_pretrained(base_folder)
    with pytest.raises(PatchError, match=r"trained under yarn:factor=4, and the model is not patched: apply that"):
        rope_patch.load_adapter(plain, folder)
    rope_patch.apply(plain, "pi:factor=4")
    with pytest.raises(PatchError, match=r"trained under yarn:factor=4 .*is patched with pi:factor=4"):
        rope_patch.load_adapter(plain, folder)
    rope_patch.apply(plain, "yarn:factor=4", replace=True)
    assert torch.equal(logits(rope_patch.load_adapter(plain, folder).eval()), expected)
    with pytest.raises(PatchError, match="was trained under yarn:factor=4: load it without method="):
        rope_patch.load(folder, "pi:factor=4")


def test_adapter_of_another_base_raises(adapter, tmp_path):
    folder, _ = adapter
    tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(tmp_path / "other")
    edit_json(folder / "adapter_config.json", lambda c: c.update(base_model_name_or_path=str(tmp_path / "other")))
    with pytest.raises(PatchError, match="was made on another model: its base tables"):
        rope_patch.load(folder)


def test_adapter_without_a_record(tmp_path, base_folder):
    tuned = lora(AutoModelForCausalLM.from_pretrained(base_folder))
    tuned.save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match="carries no patch record: loaded onto the tables of its base model"):
        loaded = rope_patch.load(tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), logits(tuned))
    patched = rope_patch.load(base_folder, "yarn:factor=4")
    with pytest.raises(PatchError, match="carries no patch record, but the model is patched with yarn"):
        rope_patch.load_adapter(patched, tmp_path / "adapter")


def test_adapter_on_a_patched_base_folder(tmp_path):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "patched_base")
    tuned = lora(rope_patch.load(tmp_path / "patched_base"))
    rope_patch.save(tuned, tmp_path / "adapter")
    assert torch.equal(logits(rope_patch.load(tmp_path / "adapter").eval()), logits(tuned))


def test_adapter_on_a_patched_base_keeps_our_module_and_precision(tmp_path):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4", precision="float64")
    with pytest.warns(UserWarning, match="no config of transformers can say so"):
        rope_patch.save(model, tmp_path / "patched_base")
    tuned = lora(rope_patch.load(tmp_path / "patched_base"))
    with pytest.warns(UserWarning, match="no config of transformers can say so"):
        rope_patch.save(tuned, tmp_path / "adapter")
    loaded = rope_patch.load(tmp_path / "adapter")
    assert module_of(loaded).precision == "float64"
    single = tiny_model()
    rope_patch.apply(single, "yarn:factor=4")
    single.save_pretrained(tmp_path / "single")
    with pytest.raises(PatchError, match=r"float64\), and the model is patched with yarn:factor=4 .*float32\)"):
        rope_patch.load_adapter(single, tmp_path / "adapter")


def test_every_adapter_of_a_model_carries_the_record(tmp_path, base_folder):
    tuned = lora(rope_patch.load(base_folder, "yarn:factor=4"))
    tuned.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    rope_patch.save(tuned, tmp_path / "both")
    plain = AutoModelForCausalLM.from_pretrained(base_folder)
    for folder in (tmp_path / "both", tmp_path / "both" / "second"):
        with pytest.raises(PatchError, match="the model is not patched"):
            rope_patch.load_adapter(plain, folder)


@pytest.mark.parametrize("name", ["p_rope", "yarn", "truncated"])
def test_merged_model_keeps_the_portable_config(adapter, base_folder, tmp_path, name):
    tuned = lora(rope_patch.load(base_folder, method_for("llama", name)))
    expected = logits(tuned)
    merged = tuned.merge_and_unload()
    assert torch.allclose(logits(merged), expected, atol=1e-4)
    rope_patch.verify(merged)
    rope_patch.save(merged, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.equal(logits(plain), logits(merged))


def test_trainer_callback_writes_the_record(tmp_path, base_folder):
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    model = rope_patch.load(base_folder, "yarn:factor=4")
    tuned = lora(model).train()
    rows = Dataset.from_dict({"input_ids": ids(16, 4).tolist(), "labels": ids(16, 4).tolist()})
    options = TrainingArguments(
        tmp_path / "run", max_steps=2, save_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to=[]
    )
    Trainer(tuned, options, train_dataset=rows, callbacks=[rope_patch.RopePatchCallback()]).train()
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        assert checkpoints.read_record(folder) == rope_patch.verify(tuned).record
    loaded = rope_patch.load(tmp_path / "run" / "checkpoint-2").eval()
    assert torch.allclose(logits(loaded), logits(tuned.eval()), atol=1e-6)
    rope_patch.restore(model)
    trainer = Trainer(tuned, options, train_dataset=rows, callbacks=[rope_patch.RopePatchCallback()])
    with pytest.raises(PatchError, match="carries no patch record"):
        trainer.train()


def test_a_run_is_resumed_under_the_patch_it_was_begun_with(tmp_path, base_folder):
    from datasets import Dataset
    from transformers import Trainer, TrainingArguments

    rows = Dataset.from_dict({"input_ids": ids(16, 8).tolist(), "labels": ids(16, 8).tolist()})

    def run(method, steps, resume=False):
        torch.manual_seed(0)
        options = {"save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "seed": 1}
        asked = TrainingArguments(
            tmp_path / "run", max_steps=steps, report_to=[], lr_scheduler_type="constant", **options
        )
        tuned = lora(rope_patch.load(base_folder, method)).train()
        trainer = Trainer(tuned, asked, train_dataset=rows, callbacks=[rope_patch.RopePatchCallback()])
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    whole = run("yarn:factor=4", 4)
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    with pytest.raises(PatchError, match=r"^this run was begun under yarn:factor=4, the model is .* pi:factor=4"):
        run("pi:factor=4", 4, resume=True)
    with pytest.raises(PatchError, match="begun under yarn:factor=4, the model is patched with yarn:factor=8"):
        run("yarn:factor=8", 4, resume=str(tmp_path / "run" / "checkpoint-2"))
    resumed = run("yarn:factor=4", 4, resume=True)
    assert resumed == pytest.approx(whole, abs=1e-4) and len(resumed) == 4
    state = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    trainer_state = json.loads(state.read_text())
    del trainer_state["stateful_callbacks"]["RopePatchCallback"]  # as of a run that was begun without it
    state.write_text(json.dumps(trainer_state))
    with pytest.warns(UserWarning, match="the checkpoint says nothing of a patch"):
        assert run("yarn:factor=4", 4, resume=True) == resumed
    begun = run("pi:factor=4", 2)  # a new run in the same folder is not a resumed one
    assert len(begun) == 2


# --- failures while writing and reading ------------------------------------------------------------------------------


def test_saving_an_unpatched_model_raises(tmp_path):
    with pytest.raises(PatchError, match="carries no patch record"):
        rope_patch.save(tiny_model(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    rope_patch.apply(model, "pi:factor=4", replace=True)

    def full(self, folder, **_):
        (Path(folder) / "model.safetensors").write_bytes(b"part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left on device"):
        rope_patch.save(model, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert os.listdir(tmp_path) == ["out"]


def test_record_is_written_in_one_move(tmp_path, monkeypatch):
    path = tmp_path / "rope_patch.json"
    path.write_text("old")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("rope_patch.files.os.replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["rope_patch.json"]


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file: give a folder"):
        rope_patch.save(model, tmp_path / "file")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr("rope_patch.files.os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(PermissionError, match=r"cannot write into .*out: choose another"):
        rope_patch.save(model, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_truncated_weights(tmp_path):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(OSError, match="a weights file is truncated or damaged"):
        rope_patch.load(tmp_path / "out")


def test_nothing_there(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"has no config.json or adapter_config.json: give a folder with config.json"):
        rope_patch.load(tmp_path)

    def gated(*_, **__):
        raise OSError("401 Client Error. You are trying to access a gated repo.")

    for module in ("adapters", "reading"):
        monkeypatch.setattr(f"rope_patch.checkpoints.{module}.find_file", lambda *_, **__: None)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", gated)
    with pytest.raises(OSError, match=r"accept the licence at https://huggingface.co/a/b, then run `hf auth login`"):
        rope_patch.load("a/b")


def test_nothing_stale_stays_in_a_folder_that_is_written_again(tmp_path):
    out, model = tmp_path / "out", tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, out)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3)
    rope_patch.save(model, out, max_shard_size="50KB")
    assert not (out / "model.safetensors").exists()  # transformers would prefer it to the index
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out).eval()), logits(model))
    tuned = lora(model)
    rope_patch.save(tuned, tmp_path / "tuned")
    merged = tuned.merge_and_unload()
    rope_patch.save(merged, tmp_path / "tuned")
    assert not (tmp_path / "tuned" / "adapter_config.json").exists()
    assert torch.equal(logits(rope_patch.load(tmp_path / "tuned").eval()), logits(merged))


def test_what_is_not_the_old_checkpoint_stays(tmp_path, base_folder):
    (base_folder / "ema.safetensors").write_bytes(b"mine")
    tuned = lora(rope_patch.load(base_folder, "yarn:factor=4"))
    rope_patch.save(tuned, base_folder)
    assert (base_folder / "model.safetensors").is_file()  # an adapter beside its base model
    assert (base_folder / "adapter_config.json").is_file()
    rope_patch.save(tuned.merge_and_unload(), base_folder)
    assert not (base_folder / "adapter_config.json").exists()
    assert (base_folder / "ema.safetensors").read_bytes() == b"mine"


def test_a_copy_of_a_folder_leaves_out_what_describes_that_folder_alone(tmp_path):
    from rope_patch.checkpoints.offline import restore_folder

    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "patched")
    others = {"rope_patch.json", "export.json", "notes.txt"}  # a Trainer's checkpoint holds the first
    for name in others:
        (tmp_path / "patched" / name).write_text("{}")
    restore_folder(tmp_path / "patched", tmp_path / "plain")
    assert others & set(os.listdir(tmp_path / "plain")) == {"notes.txt"}


def test_a_method_meets_an_adapter_over_a_patched_base(tmp_path):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "base")
    lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    with pytest.raises(PatchError, match="already patched with yarn:factor=4"):
        rope_patch.load(tmp_path / "adapter", "pi:factor=4")


def test_links_to_folders_are_followed(tmp_path):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "later")
    for name, place in (("link", "real"), ("dangling", "later")):
        rope_patch.save(model, tmp_path / name)
        assert (tmp_path / place / "model.safetensors").is_file()
        assert not [path.name for path in (tmp_path / place).iterdir() if path.name.startswith(".")]


def test_saving_does_not_push(tmp_path):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    with pytest.raises(ValueError, match="save takes no push_to_hub: save first"):
        rope_patch.save(model, tmp_path / "out", push_to_hub=True)


@pytest.mark.parametrize("tamper", ["theta", "length"])
def test_a_base_that_was_altered_is_not_restored(tmp_path, tamper):
    model = tiny_model()
    rope_patch.apply(model, "pi:factor=4")
    model.save_pretrained(tmp_path / "out")
    change = {
        "theta": lambda base: base["rope_parameters"].update(rope_theta=777.0),
        "length": lambda base: base["rope_parameters"].update(rope_type="linear", factor=2.0),
    }[tamper]
    edit_json(tmp_path / "out" / "config.json", lambda c: change(c["rope_patch"]["base_config"]))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for attempt in (lambda: rope_patch.restore(loaded), lambda: rope_patch.apply(loaded, "ntk:factor=4", replace=True)):
        with pytest.raises(PatchError, match="base_config does not give its base tables"):
            attempt()


def test_a_patch_over_an_edited_table_comes_back(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.rotary_emb.inv_freq.mul_(0.5)
    rope_patch.apply(model, "p_rope", p=0.5)
    rope_patch.save(model, tmp_path / "out")
    loaded = rope_patch.load(tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(model))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    rope_patch.verify(again)
    patch = rope_patch.apply(again, "default", replace=True)
    assert patch.after[None].inv_freq[0] == 0.5  # the edited base, not the config's
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(PatchError, match="was edited by hand before the patch"):
        rope_patch.restore(stock)


def test_verify_under_another_default_dtype_or_device(tmp_path):
    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    torch.set_default_dtype(torch.bfloat16)
    try:
        rope_patch.verify(model)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        rope_patch.verify(model)


def test_missing_weights(tmp_path):
    from rope_patch.checkpoints.offline import patch_folder, verify_folder

    model = tiny_model()
    rope_patch.apply(model, "yarn:factor=4")
    rope_patch.save(model, tmp_path / "out", max_shard_size="50KB")
    verify_folder(tmp_path / "out")
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[0]
    shard.unlink()
    for attempt in (verify_folder, lambda folder: patch_folder(folder, "pi:factor=4", tmp_path / "new", replace=True)):
        with pytest.raises(OSError, match=f"lacks {shard.name}, which model.safetensors.index.json names"):
            attempt(tmp_path / "out")
    for path in (tmp_path / "out").glob("*.safetensors*"):
        path.unlink()
    with pytest.raises(OSError, match="holds no weights"):
        verify_folder(tmp_path / "out")
