"""Training that is killed: no broken checkpoint is ever the latest, and a resumed run is that of one never stopped.

The runs live in processes of their own. ``python tests/training/test_training_safety.py`` is a server that has
everything imported and forks for each job it reads, a line of JSON. A job that kills a save at every file operation
forks again right before the save, so that each kill costs the save alone and not the steps before it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import conftest  # noqa: F401 (one thread in the server too)
import peft.peft_model
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from scored import bold_model
from tiny import ids, tiny_model
from transformers import AutoConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import rope_patch
from rope_patch.checkpoints.adapters import read_record, write_record
from rope_patch.packaged import data_path
from rope_patch.patching.locate import PatchError
from rope_patch.planning import plan
from rope_patch.training import advice
from rope_patch.training.advice import oom_advice
from rope_patch.training.collators import PoSECollator
from rope_patch.training.reading import read
from rope_patch.training.resuming import REPLACED, STAGING, WholeCheckpoints, flaw, latest_checkpoint, rotate
from rope_patch.training.trainer import LongTrainer

# --- in the runs


def rows_of(count):
    return [{"ids": ids(24, batch=1, seed=i)[0].tolist(), "index": i, "starts": [0]} for i in range(count)]


def build(folder, *, method="yarn:factor=4", steps=6, trainer=LongTrainer, collator=None, callbacks=(), **options):
    """Dropout, a falling rate and skipped positions: a run that lost any of its states would show it."""
    torch.manual_seed(0)
    model = bold_model()
    if method is not None:
        rope_patch.apply(model, method)
    config = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.2)
    changes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "save_strategy": "steps"}
    changes |= {"save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "seed": 3, "report_to": []}
    args = TrainingArguments(str(folder), max_steps=steps, use_cpu=True, disable_tqdm=True, **(changes | options))
    more = {}
    if args.eval_strategy != "no":
        more["evaluator"] = lambda model, step: {"score": -float(step)}  # the first one is the best
    collator = collator or PoSECollator(target=96, seed=1)
    return trainer(get_peft_model(model, config), args, rows_of(32), collator, callbacks=callbacks, **more)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Killer(TrainerCallback):
    """Counts what the process does to files from the end of a step on, and kills it at the n-th time.

    Training ends with that step's checkpoint. Without ``nth`` the process forks at the end of the step for n = 1, 2 and
    so on until a child saves without being killed; what the n-th child leaves is moved to ``FOLDER.killed-n``.
    """

    def __init__(self, step, nth=None, only=()):
        self.step, self.left, self.only, self.armed = step, nth, only, False

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and not self.armed:
            if self.left is None:
                self.fork(Path(args.output_dir))
            self.armed = True
            sys.addaudithook(self.on_event)
            for owner, name in (
                (torch, "save"),
                (peft.peft_model, "safe_save_file"),
                (TrainerState, "save_to_json"),
            ):
                setattr(owner, name, self.halved(getattr(owner, name)))

    def fork(self, folder):
        """Return in each child; the parent ends when a child has not been killed."""
        before = folder.with_name(f"{folder.name}.before")
        shutil.copytree(folder, before)
        for self.left in range(1, 200):
            child = os.fork()
            if not child:
                return
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code != -signal.SIGKILL:
                os._exit(code)
            folder.rename(folder.with_name(f"{folder.name}.killed-{self.left}"))
            shutil.copytree(before, folder)
        os._exit(1)

    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = control.should_training_stop or self.armed

    def on_event(self, event, args):
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"):
            self.tick(event)

    def halved(self, write):
        """A writer of files that can be killed when half of a file is there."""

        def writer(thing, path, *args, **kwargs):
            self.tick("write")
            write(thing, path, *args, **kwargs)
            whole = Path(path).read_bytes()
            os.truncate(path, len(whole) // 2)
            self.tick("half")
            os.truncate(path, 0)
            with open(os.open(path, os.O_WRONLY), "wb") as file:
                file.write(whole)

        return writer

    def tick(self, event):
        if self.only and event not in self.only:
            return
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class KillerMidStep(TrainerCallback):
    """Kills between the two passes of the n-th step."""

    def __init__(self, nth):
        self.left = nth

    def on_substep_end(self, args, state, control, **kwargs):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run(job):
    """Train as a job says; return the losses of the whole run."""
    callbacks = []
    if "kill" in job:
        callbacks.append(Killer(**job.pop("kill")))
    if "kill_in_step" in job:
        callbacks.append(KillerMidStep(job.pop("kill_in_step")))
    if job.pop("stock", False):
        del WholeCheckpoints._save_checkpoint
    resume = job.pop("resume", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
        trainer = build(callbacks=callbacks, **job)
        trainer.train(resume_from_checkpoint=resume)
    return {"losses": losses_of(trainer), "best": trainer.state.best_model_checkpoint}


def serve(answers):
    """Fork for each job; answer with how its processes ended."""
    with tempfile.TemporaryDirectory() as folder:  # imports what is imported late
        run({"folder": folder, "steps": 2})
    gc.collect()
    gc.freeze()  # or every child would touch, and so copy, all of it
    for line in sys.stdin:
        job = json.loads(line)
        answer, ranks, started = job.pop("answer"), job.pop("ranks", [{}]), []
        for rank, own in enumerate(ranks):
            child = os.fork()
            if child:
                started.append(child)
                continue
            try:
                if len(ranks) > 1:
                    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(ranks))}
                    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(job.pop("port"))}
                result = run(job | own)
            except BaseException:
                result = {"error": traceback.format_exc()}
            Path(f"{answer}.{rank}").write_text(json.dumps(result))
            os._exit(0)
        print(
            json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in started]),
            file=answers,
            flush=True,
        )


if __name__ == "__main__":
    sys.stdout, answers = sys.stderr, sys.stdout
    serve(answers)
    sys.exit()


# --- in the tests


@pytest.fixture(scope="module")
def do(tmp_path_factory):
    """A function that runs a job and returns what came of it, None when it was killed."""
    root = Path(__file__).resolve().parents[2]
    log = tmp_path_factory.mktemp("server") / "log"
    paths = os.pathsep.join([str(root), str(root / "tests")])
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        ) as server,
    ):

        def job(folder, **options):
            answer = log.parent / "answer"
            for old in log.parent.glob("answer.*"):
                old.unlink()
            server.stdin.write(json.dumps({"folder": str(folder), "answer": str(answer), **options}) + "\n")
            server.stdin.flush()
            line = server.stdout.readline()
            assert line, log.read_text()[-2000:]
            results = []
            for rank, code in enumerate(json.loads(line)):
                assert code in (0, -signal.SIGKILL)
                results.append(json.loads(Path(f"{answer}.{rank}").read_text()) if code == 0 else None)
            return results if "ranks" in options else results[0]

        yield job
        server.stdin.close()


@pytest.fixture(scope="module")
def whole(do, tmp_path_factory):
    """The losses of a run that nothing stopped, and its folder with checkpoints 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    result = do(folder)
    assert len(result["losses"]) == 6 and len(set(result["losses"])) == 6, result
    return SimpleNamespace(losses=result["losses"], folder=folder)


def start_from(whole, folder, *steps):
    for step in steps:
        shutil.copytree(whole.folder / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    return folder


def latest_step(folder):
    """Every folder that looks like a checkpoint is one, so that stock Trainer finds the same."""
    for path in folder.glob("checkpoint-*"):
        assert flaw(path) is None, path
        assert read_record(path) is not None
    checkpoint = latest_checkpoint(folder)
    assert checkpoint is not None
    if checkpoint.parent == folder:
        assert Path(get_last_checkpoint(str(folder))) == checkpoint
    return int(checkpoint.name.rpartition("-")[2])


def sweep(do, whole, folder, kill, *steps, **options):
    """Kill a run at its first file operation, at its second, and so on; yield where it was left, then resume it.

    Resuming costs as much as the run, so only every sixth is, and those that left another checkpoint.
    """
    start_from(whole, folder, *steps)
    first = str(folder / f"checkpoint-{steps[0]}") if steps else None
    result = do(folder, resume=first, kill=kill, **options)
    assert result is not None and "error" not in result, result
    killed = sorted(folder.parent.glob(f"{folder.name}.killed-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    assert len(killed) > 5, "the kills hit nothing"
    left = []
    for nth, path in enumerate(killed, 1):
        shutil.rmtree(folder)
        path.rename(folder)
        left.append(latest_step(folder))
        yield left[-1]
        if nth % 6 == 1 or left[-1] != left[-2]:
            resumed = do(folder, resume=True, **options)
            assert "error" not in resumed, resumed["error"]
            assert resumed["losses"] == pytest.approx(whole.losses, abs=1e-4), f"killed at operation {nth}"
            assert not (folder / STAGING).exists() and not (folder / REPLACED).exists()


def test_a_run_killed_at_any_step_goes_on_as_if_nothing_had_been(do, whole, tmp_path):
    for step in random.Random(0).sample(range(3, 7), 2):
        folder = tmp_path / str(step)
        assert do(folder, kill_in_step=step) is None
        assert latest_step(folder) == 2 * ((step - 1) // 2)
        result = do(folder, resume=True)
        assert result["losses"] == pytest.approx(whole.losses, abs=1e-4)


def test_no_kill_while_saving_leaves_a_broken_checkpoint(do, whole, tmp_path):
    """At every file operation of the save at step 4, with files half written; the one of step 2 is deleted then."""
    left = list(sweep(do, whole, tmp_path / "run", {"step": 4}, 2, save_total_limit=1))
    assert left == sorted(left) and left.count(2) > 20 and left.count(4) > 5, left


MOVES = ("os.rename", "os.mkdir", "os.remove")


def test_a_kill_while_a_checkpoint_is_replaced_loses_neither(do, whole, tmp_path):
    """The run goes on from step 2 in a folder that has a checkpoint of step 4: there is one at every moment."""
    folder, aside = tmp_path / "run", 0
    for step in sweep(do, whole, folder, {"step": 4, "only": MOVES}, 2, 4):
        assert step == 4
        aside += latest_checkpoint(folder).parent.name == REPLACED
    assert aside == 1, "the moment between two renames was hit"


BEST = {"save_total_limit": 1, "load_best_model_at_end": True, "metric_for_best_model": "score"}
BEST |= {"greater_is_better": True, "eval_strategy": "steps", "eval_steps": 2}


def test_the_best_checkpoint_outlives_kills_and_the_state_names_its_place(do, whole, tmp_path):
    """The one of step 2 is the best: it stays, and the last one goes when training ends."""
    folder = tmp_path / "run"
    best = str(folder / "checkpoint-2")
    for step in sweep(do, whole, folder, {"step": 4, "only": MOVES}, **BEST):
        state = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
        assert state["best_model_checkpoint"] == best and flaw(best) is None
    result = do(folder, resume=True, **BEST)
    assert result["best"] == best and [path.name for path in folder.iterdir()] == ["checkpoint-2"]


def test_every_process_writes_its_part_before_a_checkpoint_appears(do, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    reference, folder = tmp_path / "reference", tmp_path / "run"
    (result, other), ranks = do(reference, ranks=[{}, {}], port=port), {"ranks": [{}, {}], "port": port}
    assert "error" not in result and result["losses"] == other["losses"], result
    files = {path.name for path in (reference / "checkpoint-4").iterdir()}
    assert {"rng_state_0.pth", "rng_state_1.pth", "rope_patch.json", "trainer_state.json"} <= files
    dying = [{}, {"kill": {"step": 4, "nth": 1}}]  # as it is about to write the state of its random numbers
    first, second = do(folder, **ranks | {"ranks": dying})
    assert second is None and "error" in first
    assert latest_step(folder) == 2
    assert do(folder, resume=True, **ranks)[0]["losses"] == pytest.approx(result["losses"], abs=1e-4)


# --- what others leave


def test_what_a_killed_stock_trainer_leaves_is_skipped(do, whole, tmp_path):
    folder = start_from(whole, tmp_path / "run", 2)
    kill = {"step": 4, "only": ["half"], "nth": 3}  # adapter, arguments, optimizer
    assert do(folder, resume=str(folder / "checkpoint-2"), kill=kill, stock=True) is None
    assert get_last_checkpoint(str(folder)) == str(folder / "checkpoint-4")
    with pytest.warns(UserWarning, match=r"skipped the broken checkpoint .*checkpoint-4: it has no Trainer's state"):
        assert latest_checkpoint(folder) == folder / "checkpoint-2"


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("trainer_state.json", Path.unlink, r"it has no Trainer's state \(trainer_state.json\)"),
        ("trainer_state.json", cut, r"trainer_state.json is damaged \("),
        ("trainer_state.json", lambda path: path.write_text('{"epoch": 1}'), "trainer_state.json is damaged"),
        ("adapter_model.safetensors", Path.unlink, r"it has no weights \(adapter_model.safetensors\)"),
        ("adapter_model.safetensors", cut, "adapter_model.safetensors is damaged"),
        ("adapter_config.json", cut, "adapter_config.json is damaged"),
        ("optimizer.pt", Path.unlink, r"it has no optimizer state \(optimizer.pt\)"),
        ("optimizer.pt", cut, "optimizer.pt is damaged"),
        ("optimizer.pt", lambda path: path.write_bytes(b""), "optimizer.pt is damaged"),
        ("scheduler.pt", Path.unlink, "it has no scheduler state"),
        ("rng_state.pth", Path.unlink, "it has no state of the random numbers"),
        ("rng_state.pth", cut, "rng_state.pth is damaged"),
        ("rope_patch.json", lambda path: path.write_text("{}"), "rope_patch.json"),
    ],
)
def test_a_broken_checkpoint_is_named_and_the_one_before_taken(name, damage, message, whole, tmp_path):
    start_from(whole, tmp_path, 2, 4)
    (tmp_path / "checkpoint-best").mkdir()  # a name of the user's own
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-4"
    damage(tmp_path / "checkpoint-4" / name)
    with pytest.warns(UserWarning, match=f"skipped the broken checkpoint .*checkpoint-4: .*{message}"):
        assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


def test_a_missing_shard_is_named(whole, tmp_path):
    folder = start_from(whole, tmp_path, 2) / "checkpoint-2"
    (folder / "adapter_model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "it names model-00002-of-00002.safetensors, not found here" in flaw(folder)


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_nothing_is_unpickled_to_find_out(whole, tmp_path):
    start_from(whole, tmp_path, 2)
    torch.save(Bomb(str(tmp_path / "went off")), tmp_path / "checkpoint-2" / "optimizer.pt")
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    assert not (tmp_path / "went off").exists()


def test_no_checkpoint_is_none_and_cannot_be_resumed_from(tmp_path):
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(ValueError, match=r"^found no complete checkpoint in .* to resume from$"):
        build(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("yarn:factor=2", "begun under yarn:factor=4, the model is patched with yarn:factor=2"),
        (None, "started with the patch yarn:factor=4, and the model is not patched"),
    ],
)
def test_a_run_is_resumed_under_its_own_patch_alone(method, message, whole, tmp_path):
    start_from(whole, tmp_path, 2)
    with pytest.raises(PatchError, match=message):
        build(tmp_path, method=method).train(resume_from_checkpoint=True)


# --- one process, no kill


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="asks Linux what a file handle stands for")
def test_everything_is_on_the_disk_before_the_checkpoint_appears(tmp_path, monkeypatch):
    flushed, sync = [], os.fsync

    def record(handle):
        flushed.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        assert (tmp_path / "checkpoint-2").exists() == (flushed[-1] == tmp_path)
        sync(handle)

    monkeypatch.setattr(os, "fsync", record)
    build(tmp_path, steps=2).train()
    files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert {path.name for path in flushed} == {*files, "checkpoint-2", tmp_path.name}


def test_what_a_killed_run_left_is_put_right_before_the_next(whole, tmp_path):
    start_from(whole, tmp_path, 2, 4)
    (tmp_path / REPLACED).mkdir()
    (tmp_path / "checkpoint-4").rename(tmp_path / REPLACED / "checkpoint-4")
    (tmp_path / STAGING / "checkpoint-6").mkdir(parents=True)
    (tmp_path / STAGING / "checkpoint-6" / "rng_state_7.pth").touch()  # of a process that there is no more
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint == tmp_path / REPLACED / "checkpoint-4"
    trainer = build(tmp_path)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer._initial_global_step == 4
    assert losses_of(trainer) == pytest.approx(whole.losses, abs=1e-4)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    assert not (tmp_path / "checkpoint-6" / "rng_state_7.pth").exists()


def test_a_save_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    save = torch.save

    def full(thing, path, *args, **kwargs):
        if "checkpoint-4" in str(path) and str(path).endswith("optimizer.pt"):
            raise OSError(28, "No space left on device")
        save(thing, path, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        build(tmp_path).train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"] and latest_step(tmp_path) == 2


def test_an_upload_begins_when_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: pushed.append((folder, flaw(folder))))
    trainer = build(tmp_path, steps=2)
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [(str(tmp_path / "checkpoint-2"), None)]


def test_the_oldest_checkpoints_go_first_and_those_kept_stay(tmp_path):
    ages = {100: 1, 200: 2, 10: 3, 20: 4, 30: 5}  # a run begun anew in an old folder
    for step, age in ages.items():
        (tmp_path / f"checkpoint-{step}").mkdir()
        os.utime(tmp_path / f"checkpoint-{step}", (age * 10, age * 10))
    (tmp_path / "checkpoint-best").mkdir()

    def left():
        return sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-[0-9]*"))

    for limit in (None, 0, -1):
        rotate(tmp_path, limit, set())
        assert left() == [10, 20, 30, 100, 200]
    rotate(tmp_path, 4, {tmp_path / "checkpoint-100"})
    assert left() == [10, 20, 30, 100]
    rotate(tmp_path, 1, {tmp_path / "checkpoint-100", tmp_path / "." / "checkpoint-30"})
    assert left() == [30, 100] and (tmp_path / "checkpoint-best").exists()
    assert not (tmp_path / STAGING).exists()


def test_a_record_that_is_there_is_not_written_again(whole, tmp_path):
    folder = start_from(whole, tmp_path, 2) / "checkpoint-2"
    record, before = read_record(folder), (folder / "rope_patch.json").stat()
    write_record(record, folder)
    assert (folder / "rope_patch.json").stat() == before
    (folder / "rope_patch.json").write_text("{}")
    write_record(record, folder)
    assert read_record(folder) == record


# --- out of memory


def test_a_step_without_room_ends_with_advice(tmp_path, monkeypatch):
    trainer = build(tmp_path)

    def greedy(*args, **kwargs):
        monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=5 * 2**30))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    trainer.model.get_base_model().model.forward = greedy
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20.00 GiB") as caught:
        trainer.train()
    planned = plan(tiny_model(), length=24, batch=2, lora_rank=8, target_modules=("q_proj", "v_proj"), dtype="float32")
    planned = planned.but(attention="sdpa", checkpointing=False)
    assert f"2 x 24 tokens on each GPU were predicted to take {planned.total / 2**30:.1f} GiB: " in str(caught.value)
    assert "That fits into 5.0 GiB" in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_an_evaluation_without_room_gets_no_advice_on_steps(tmp_path):
    def greedy(model, step):
        raise torch.OutOfMemoryError("too long a prompt")

    trainer = build(tmp_path, **BEST)
    trainer.evaluator = greedy
    with pytest.raises(torch.OutOfMemoryError, match=r"^too long a prompt$"):
        trainer.train()


def big(dtype=torch.bfloat16, attention="sdpa", **lora):
    """Llama-3.1-8B as it would be trained, without its numbers."""
    config = AutoConfig.for_model(**json.loads((data_path("assets") / "configs" / "Llama-3.1-8B.json").read_text()))
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, attn_implementation=attention).to(dtype)
    if not lora:
        return model
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))


def args_of(folder, **options):
    return TrainingArguments(str(folder), use_cpu=True, report_to=[], **options)


def test_advice_is_that_of_the_plan(tmp_path):
    model = big(r=16, target_modules="all-linear")
    args = args_of(tmp_path, per_device_train_batch_size=2)
    planned = plan(
        "Llama-3.1-8B", length=32768, batch=2, lora_rank=16, checkpointing=False, loss="naive", attention="sdpa"
    )
    advice_text = oom_advice(model, args, 32768, 80)
    assert f"2 x 32768 tokens on each GPU were predicted to take {planned.total / 2**30:.1f} GiB: " in advice_text
    for part in ("weights", "activations", "loss"):
        assert f"{part} {planned[part] / 2**30:.1f}" in advice_text
    assert "layer " not in advice_text, "it takes turns with the loss, and is smaller"
    steps = planned.advice(80)
    assert len(steps) >= 2 and steps[-1].fits
    lines = [line for line in advice_text.splitlines() if line.startswith("- ")]
    assert [re.search(r": ([\d.]+) GiB \((.*)\)$", line).groups() for line in lines] == [
        (f"{step.total / 2**30:.1f}", step.cost) for step in steps
    ]
    assert f"up to {planned.longest(80)} tokens fit" in advice_text
    assert "LongTrainer" in lines[0] and "gradient_checkpointing=True (recipe: train.checkpointing=true)" in lines[1]


def test_advice_knows_when_nothing_helps_and_when_nothing_is_wrong(tmp_path):
    model, args = big(r=16, target_modules="all-linear"), args_of(tmp_path, per_device_train_batch_size=1)
    assert "That fits into 141.0 GiB. Look for other processes" in oom_advice(model, args, 2048, 141)
    assert "No change that the plan knows makes it fit" in oom_advice(model, args, 131072, 4)
    assert len(oom_advice(model, args, 131072, None).splitlines()) == 1


def test_frozen_weights_in_float32_are_the_first_thing_to_change(tmp_path):
    advice_text = oom_advice(big(torch.float32, r=16, target_modules="all-linear"), args_of(tmp_path), 4096, 24)
    planned = plan("Llama-3.1-8B", length=4096, batch=8, checkpointing=False, loss="naive", attention="sdpa")
    lines = [line for line in advice_text.splitlines() if line.startswith("- ")]
    assert lines[0].startswith("- dtype=torch.bfloat16 for the model (recipe: model.dtype=bfloat16): ")
    assert [line.split(": ")[-1].split(" GiB")[0] for line in lines] == [
        f"{total / 2**30:.1f}" for total in (planned.total, *(step.total for step in planned.advice(24)))
    ]


LONG = {"r": 8, "target_modules": ["q_proj", "k_proj"], "modules_to_save": ["embed_tokens", "norm"]}


@pytest.mark.parametrize(
    ("model", "marks", "arguments", "expected"),
    [
        ({}, {}, {}, {"lora_rank": None, "optimizer": "adamw", "checkpointing": False, "loss": "naive"}),
        (LONG, {}, {}, {"lora_rank": 8, "target_modules": ("k_proj", "q_proj"), "long_lora": True}),
        (
            {"r": 4, "target_modules": ["q_proj", "lm_head"]},
            {},
            {},
            {"target_modules": ("q_proj",), "long_lora": False},
        ),
        ({"r": 4, "modules_to_save": ["norm"]}, {}, {}, {"lora_rank": 4, "long_lora": False}),
        ({"attention": "eager"}, {}, {"optim": "sgd"}, {"attention": "eager", "optimizer": "sgd"}),
        ({"r": 4}, {"is_loaded_in_4bit": True}, {"optim": "paged_adamw_8bit"}, {"quantization": "nf4"}),
        ({"r": 4}, {"is_loaded_in_8bit": True}, {"optim": "adamw_8bit"}, {"optimizer": "adamw_8bit"}),
        ({"r": 4}, {"_rope_patch_fused": True}, {}, {"loss": "fused", "gpus": 1}),
    ],
)
def test_a_plan_is_made_of_what_really_trains(model, marks, arguments, expected, tmp_path):
    built = big(**model)
    base = built.get_base_model() if hasattr(built, "get_base_model") else built
    for name, value in marks.items():
        setattr(base, name, value)
    planned = advice._plan(built, args_of(tmp_path, **arguments), 1024, 1)
    assert {name: getattr(planned.options, name) for name in expected} == expected
    assert planned.shape.parameters == plan("Llama-3.1-8B", length=1024).shape.parameters


@pytest.mark.parametrize(("fsdp", "gpus"), [(False, 1), (True, 4)])
def test_only_sharded_weights_are_divided(fsdp, gpus, tmp_path, monkeypatch):
    args = args_of(tmp_path)
    monkeypatch.setattr(TrainingArguments, "world_size", 4)
    monkeypatch.setattr(args, "fsdp", fsdp)
    assert advice._plan(big(r=4), args, 1024, 1).options.gpus == gpus


def test_a_model_that_no_plan_covers_gets_general_advice(tmp_path):
    model = get_peft_model(tiny_model(), IA3Config(task_type="CAUSAL_LM"))
    advice_text = oom_advice(model, args_of(tmp_path), 1024, 80)
    assert advice_text.startswith("No plan covers this step (adapters of type IA3 on none of the projections).")
    assert "gradient_checkpointing=True" in advice_text
    model = tiny_model()
    model.config.quantization_config = {"quant_method": "gptq"}
    assert "the weights are not quantized by bitsandbytes" in oom_advice(model, args_of(tmp_path), 1024, 80)


def test_the_recipe_knows_the_options_that_advice_names(tmp_path):
    changes = [{"attention": "flash"}, {"checkpointing": True}, {"batch": 1}, {"optimizer": "adamw_8bit"}]
    changes += [{"lora_rank": 16}, {"quantization": "nf4"}]
    words = [re.search(r"recipe: (\S+)\)", advice._setting(change))[1] for change in changes]
    read(overrides=["model.name=llama", "data.lengths=1k", "output=out", "model.dtype=bfloat16", *words])
