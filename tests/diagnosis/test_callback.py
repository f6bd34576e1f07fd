"""``RopeDoctorCallback``: a table that breaks in a Trainer, in its checkpoint or in the reference model is told."""

from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from support.patches import edit_json, lora, module_of, patched_model
from support.tiny import ids, tiny_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import rope_patch
from rope_patch import PatchError, RopeDoctorCallback, RopePatchCallback


class At(TrainerCallback):
    """Call something once a step is done, or a checkpoint is saved."""

    def __init__(self, event, call):
        setattr(self, event, lambda args, state, control, model=None, **_: call(args, state, model))


def cast(args, state, model):
    """What a cast does to the table of a model that is not patched."""
    if state.global_step == 2:
        module_of(model).to(torch.bfloat16)


def train(model, folder, *callbacks):
    """Four steps with a checkpoint each; return the numbers of those that were saved."""
    rows = Dataset.from_dict({"input_ids": ids(8, 8).tolist(), "labels": ids(8, 8).tolist()})
    options = {"save_steps": 1, "max_steps": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    try:
        Trainer(model.train(), TrainingArguments(folder, **options), train_dataset=rows, callbacks=[*callbacks]).train()
    finally:
        saved = sorted(int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*"))
    return saved


def adapted(folder):
    """A patched model under an adapter, whose base lies in a folder."""
    tiny_model().save_pretrained(folder)
    return lora(rope_patch.load(folder, "yarn:factor=4"))


def test_a_healthy_training_is_silent_and_unchanged(tmp_path):
    def weights(name, *callbacks):
        model = patched_model("yarn:factor=4")
        torch.manual_seed(0)
        assert train(model, tmp_path / name, *callbacks) == [1, 2, 3, 4]
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    checked = weights("checked", RopeDoctorCallback(ref_model=patched_model("yarn:factor=4")))
    assert torch.equal(checked, weights("plain"))
    train(tiny_model(), tmp_path / "unpatched", RopeDoctorCallback())


def test_a_table_that_breaks_in_training_stops_it_at_the_next_save(tmp_path):
    with pytest.raises(PatchError, match="bfloat16"):
        train(tiny_model(), tmp_path, At("on_step_end", cast), RopeDoctorCallback())
    assert max(int(path.name.partition("-")[2]) for path in tmp_path.glob("checkpoint-*")) == 2


def test_a_training_that_is_only_warned_of_goes_on(tmp_path):
    with pytest.warns(UserWarning, match="bfloat16"):
        assert train(tiny_model(), tmp_path, At("on_step_end", cast), RopeDoctorCallback("warn")) == [1, 2, 3, 4]


@pytest.mark.parametrize("event", ["on_train_begin", "on_train_end"])
def test_the_start_and_the_end_are_checked(event):
    callback = getattr(RopeDoctorCallback(), event)
    callback(None, None, None, model=tiny_model())
    with pytest.raises(PatchError, match="bfloat16"):
        callback(None, None, None, model=tiny_model().bfloat16())


def test_the_saved_folder_is_read(tmp_path):
    def edit(args, state, model):
        path = tmp_path / f"checkpoint-{state.global_step}" / "config.json"
        edit_json(path, lambda config: config.update(rope_theta=500.0))

    with pytest.raises(PatchError, match=r"checkpoint-1.*\n.*config keys"):
        train(tiny_model(), tmp_path, At("on_save", edit), RopeDoctorCallback())


def test_the_folder_that_was_saved_is_found(tmp_path):
    args = SimpleNamespace(output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    RopeDoctorCallback().on_save(args, state, None, model=tiny_model())
    folder = tmp_path / "run-3" / "checkpoint-1"  # as a hyperparameter search numbers its runs
    tiny_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0}).save_pretrained(folder)
    with pytest.raises(PatchError, match="run-3"):
        RopeDoctorCallback().on_save(args, state, None, model=tiny_model())


def test_an_adapter_that_was_saved_without_its_record_is_told(tmp_path):
    train(adapted(tmp_path / "base"), tmp_path / "with", RopePatchCallback(), RopeDoctorCallback())
    with pytest.raises(PatchError, match="RopePatchCallback"):
        train(adapted(tmp_path / "base"), tmp_path / "without", RopeDoctorCallback())


def test_what_cannot_be_checked_is_warned_of(tmp_path):
    def lose(args, state, model):
        (tmp_path / f"checkpoint-{state.global_step}" / "config.json").unlink()

    with pytest.warns(UserWarning, match="cannot be checked"):
        train(tiny_model(), tmp_path, At("on_save", lose), RopeDoctorCallback())
    with torch.device("meta"), pytest.warns(UserWarning, match="holds no numbers"):
        RopeDoctorCallback().on_train_begin(None, None, None, model=tiny_model())


def test_a_reference_of_another_table_is_refused(tmp_path):
    model = patched_model("yarn:factor=4", target_length=256)
    rope_patch.save(model, tmp_path)

    def begin(reference):
        RopeDoctorCallback(ref_model=reference).on_train_begin(None, None, None, model=model)

    begin(rope_patch.load(tmp_path))
    with pytest.raises(PatchError, match="reference model"):
        begin(tiny_model())
    begin(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_another_action_is_refused():
    with pytest.raises(ValueError, match="'stop'"):
        RopeDoctorCallback("stop")
