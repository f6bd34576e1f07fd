"""The fine-tuning recipe, end to end on a bundled checkpoint: what it leaves, how it resumes, what it refuses."""

import importlib
import json
import math
import os
import runpy
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.commands import invoke, run
from support.forks import forked
from support.gguf_files import write_toy
from support.patches import config_of, edit_json, read_json
from support.prompting import TOKENIZER
from support.recipe_runs import SMALL, losses, needs_trl, recipe
from support.subsets import full
from support.tiny import LLAMA, bundled_model, small
from transformers import TrainerState

import rope_patch
from rope_patch.checkpoints.adapters import read_record
from rope_patch.evaluation.tasks import TASKS
from rope_patch.methods import METHODS
from rope_patch.patching.locate import locate
from rope_patch.runtime.folders import locked_output
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.training import callbacks
from rope_patch.training.evaluate_run import evaluate_model, metrics, suite_of
from rope_patch.training.finetune import finetune
from rope_patch.training.runs import identity, last_checkpoint

pytestmark = [pytest.mark.slow, needs_trl]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "finetune_lora.py"


DOMAINS = LLAMA.parent / "domains"
TEXTS = [f"data.source={DOMAINS}", f"evaluation.text={DOMAINS}", f"evaluation.haystack={DOMAINS}"]
"""Read in a fraction of the time that the built-in text takes, which the smoke run reads."""

QUICK = ("train.max_steps=1", "train.gradient_accumulation_steps=1", "evaluation.before=false")
QUICK += ("evaluation.lengths=128", "evaluation.depths=0.5", "evaluation.windows=1")


def options(out, *words):
    return recipe(*SMALL, *TEXTS, f"output={out}", *words)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run with evaluations on the way."""
    out = tmp_path_factory.mktemp("run") / "yarn"
    return finetune(options(out, "evaluation.every=2"), command="python recipes/finetune_lora.py x.yaml")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Options of a run of one step on a tiny model."""
    base = tmp_path_factory.mktemp("base")
    small(num_hidden_layers=1, max_position_embeddings=256).save_pretrained(base)
    TOKENIZER.save_pretrained(base)
    return lambda out, *words: options(out, *QUICK, f"model.name={base}", *words)


@pytest.mark.filterwarnings("ignore:Could not find a config file in .*gguf")  # PEFT: it assumes what is true
def test_an_adapter_is_trained_on_a_gguf_file(tmp_path):
    model = bundled_model()
    file = write_toy(model, tmp_path / "base.gguf", TOKENIZER)
    finetune(options(tmp_path / "run", f"model.name={file}", *QUICK))
    trained = rope_patch.load(tmp_path / "run")
    assert rope_patch.verify(trained).method == "yarn:factor=4"
    assert trained.peft_config["default"].base_model_name_or_path == str(file)


def test_it_leaves_an_adapter_with_patch_scores_and_card(done):
    folder = done.folder
    results = done.results
    assert str(read_record(folder).to_method()) == "yarn:factor=4" == results["patch"]
    assert results == read_json(folder / "results.json")
    assert results["steps"] == 4 and results["tokens"] == 4 * 2 * 128
    assert len(results["losses"]) == 4
    evaluated = read_json(folder / "evaluation.json")
    for when in ("unpatched", "before", "after"):
        cells = [cell for cell in evaluated[when]["retrieval"]["passkey"]["cells"] if cell["length"] == 256]
        right = [sample["correct"] for cell in cells for sample in cell["samples"]]
        assert len(right) == 2 and results[when]["retrieval_256"] == sum(right) / 2
    text = (folder / "README.md").read_text()
    shown = ("x.yaml", f"{results['after']['perplexity_0_128']:.3g}", results["changes"][0]["sentence"])
    assert all(part in text for part in shown)
    assert list((folder / "work" / "runs").rglob("events.out.tfevents.*")), "TensorBoard finds its logs"


def test_before_is_the_patched_model_and_after_is_what_was_saved(done):
    """The scores are those that the engines give for the model in memory and for the folder loaded anew."""
    suite = suite_of(options("x"), TOKENIZER)
    model = bundled_model()
    assert metrics(suite.run(model)) == pytest.approx(done.results["unpatched"], abs=1e-6)
    rope_patch.apply(model, "yarn", factor=4, target_length=1024)
    before = done.results["before"]
    after = done.results["after"]
    assert metrics(suite.run(model)) == pytest.approx(before, abs=1e-6)
    assert metrics(suite.run(rope_patch.load(done.folder, dtype=torch.float32))) == pytest.approx(after, abs=1e-5)
    assert after["perplexity_0_128"] != pytest.approx(before["perplexity_0_128"], abs=1e-3)


def test_a_part_of_the_data_is_kept_from_training_and_evaluated_on(quick, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, document in enumerate(builtin_text("train").documents[:20]):
        (texts / f"{number}.txt").write_text(document)
    asked = quick(tmp_path / "run", f"data.source={texts}", "evaluation.text=null", "evaluation.windows=4")
    result = finetune(asked)
    assert "kept from training" in result.results["text"]
    assert result.results["text"] in (result.folder / "README.md").read_text()
    assert finetune(asked).finished_before


# --- the folder of a run


def test_a_finished_run_is_returned_as_it_is(done, monkeypatch):
    monkeypatch.setattr(rope_patch, "load", lambda *_, **__: pytest.fail("it was loaded again"))
    again = finetune(options(done.folder, "evaluation.every=2"))
    assert again.results == done.results and again.finished_before and not done.finished_before


def test_a_folder_of_another_run_or_of_something_else_is_refused(done, tmp_path):
    with pytest.raises(ValueError, match=r"patch\.method=yarn:factor=4 \(now pi:factor=4\)"):
        finetune(options(done.folder, "evaluation.every=2", "patch.method=pi:factor=4"))
    with pytest.raises(ValueError, match=r"with train\.lr_scheduler_type=constant_with_warmup \(now cosine\):"):
        finetune(options(done.folder, "evaluation.every=2", "train.lr_scheduler_type=cosine"))
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("precious")
    shutil.copytree(LLAMA, tmp_path / "model")
    for restart in (False, True):
        for name in ("thesis", "model"):
            with pytest.raises(ValueError, match="output"):
                finetune(options(tmp_path / name, f"model.name={tmp_path / 'model'}"), restart=restart)
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["thesis.txt"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output"):
        finetune(options(tmp_path / "file"))


def test_two_commands_do_not_work_in_one_folder(tmp_path):
    def run():
        with pytest.raises(BlockingIOError, match="another command"):
            finetune(options(tmp_path / "run"))

    with locked_output(tmp_path / "run"):
        assert forked(run) == 0  # the process that holds a lock may take it again


def test_a_mistake_costs_nothing(quick, tmp_path):
    """A run that never got to a checkpoint gives its folder up to the corrected command."""
    (tmp_path / "short.txt").write_text("A short text. " * 5)
    for wrong in (
        "patch.layer_types=nonsense",
        "train.lr_scheduler_type=steady",
        f"data.source={tmp_path / 'short.txt'}",
    ):
        with pytest.raises(ValueError):
            finetune(quick(tmp_path / "run", wrong))
    assert finetune(quick(tmp_path / "run")).results["steps"] == 1


def test_restart_deletes_the_earlier_run_once_the_new_one_is_sound(done, quick, tmp_path):
    shutil.copytree(done.folder, tmp_path / "run")
    with pytest.raises((ValueError, OSError)):
        finetune(quick(tmp_path / "run", "model.name=./nowhere"), restart=True)
    assert (tmp_path / "run" / "results.json").exists() and (tmp_path / "run" / "work" / "checkpoint-4").exists()
    result = finetune(quick(tmp_path / "run"), restart=True)
    assert result.results["steps"] == 1 and not (tmp_path / "run" / "work" / "checkpoint-4").exists()


# --- interrupted


def test_a_run_killed_while_it_saves_goes_on_and_ends_with_the_same_weights(done, tmp_path, monkeypatch):
    """Dropout is off, so what differs at the end would be lost state: optimizer, rows, positions."""
    stock = TrainerState.save_to_json

    def save(self, *args, **kwargs):
        if self.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(self, *args, **kwargs)

    def run():
        monkeypatch.setattr(TrainerState, "save_to_json", save)
        finetune(options(tmp_path, "evaluation.every=2"))

    assert forked(run) == -signal.SIGKILL
    assert not (tmp_path / "results.json").exists() and not (tmp_path / "adapter_model.safetensors").exists()
    assert last_checkpoint(tmp_path / "work").name == "checkpoint-2"
    # The weights of the fourth step are there, with the record that says which patch they need.
    loaded = rope_patch.load(tmp_path / "work" / "checkpoint-4")
    assert rope_patch.verify(loaded).method == rope_patch.verify(done.folder).method
    result = finetune(options(tmp_path, "evaluation.every=2"))
    assert losses(result) == losses(done)
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (result.folder, done.folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert result.results["before"] == done.results["before"]


def test_a_run_does_not_go_on_over_other_weights_or_text(quick, tmp_path):
    base, text, asked, hay, out = (tmp_path / name for name in ("base", "text.txt", "asked.txt", "hay.txt", "run"))
    shutil.copytree(LLAMA, base)
    for file in (text, asked, hay):
        file.write_text("\n".join(builtin_text("train").documents[:4]))
    texts = [(text, "data.source"), (asked, "evaluation.text"), (hay, "evaluation.haystack")]
    words = (f"model.name={base}", *(f"{name}={file}" for file, name in texts))
    finetune(quick(out, *words))
    weights = base / "model.safetensors"
    for changed, name in [(weights, "model.name"), *texts]:
        before = changed.read_bytes()
        changed.write_bytes(before[:-1] + b"\1")
        with pytest.raises(ValueError, match=f"contents of {name}="):
            finetune(quick(out, *words))
        changed.write_bytes(before)
    settings = out / "work" / "run.json"
    earlier = read_json(settings)
    earlier["evaluation.longppl"] = True  # an option that is gone
    settings.write_text(json.dumps(earlier))
    with pytest.raises(ValueError, match=r"longppl=True \(now None\)"):
        finetune(quick(out, *words))


def changed_keys(asked, file, content):
    before = identity(asked)
    file.write_bytes(content)
    changed = identity(asked)
    return {key for key in before if before[key] != changed[key]}


@pytest.mark.parametrize("name", ["pytorch_model.bin", "tokenizer.json", "chat_template.jinja", "modeling_own.py"])
def test_what_a_run_is_made_of_is_more_than_safetensors(tmp_path, name):
    base = tmp_path / "base"
    shutil.copytree(LLAMA, base)
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    (base / "modeling_own.py").write_text("A = 1")
    (base / "chat_template.jinja").write_text("{{ messages }}")
    asked = options(tmp_path / "run", f"model.name={base}", "model.trust_remote_code=true")
    assert changed_keys(asked, base / name, (base / name).read_bytes() + b" ") == {"contents of model.name"}


def test_the_questions_that_a_run_asks_are_part_of_what_it_is(tmp_path):
    file = tmp_path / "dev.json"
    file.write_text(json.dumps([{"question": "q", "answer": "a", "context": [["t", ["s"]]]}]))
    asked = options(tmp_path / "run", f"evaluation.task={file}")
    assert changed_keys(asked, file, file.read_bytes() + b" ") == {"contents of evaluation.task"}


OWN = """
from dataclasses import dataclass
import rope_patch
from rope_patch.evaluation.tasks.passkey import Passkey

@dataclass(frozen=True)
class Slower(rope_patch.Method, name="slower"):
    def inv_freq(self, table):
        return table.inv_freq / 2

class Keys(Passkey, name="keys"):
    pass
"""


def test_the_code_of_a_method_and_a_task_of_ones_own_is_part_of_a_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (METHODS, TASKS):
        monkeypatch.setattr(registry, "data", {**registry.data})
    (tmp_path / "own_code.py").write_text(OWN)
    importlib.import_module("own_code")
    asked = options(tmp_path / "run", "patch.method=slower", "evaluation.task=keys")
    changed = changed_keys(asked, tmp_path / "own_code.py", OWN.replace("/ 2", "/ 3").encode())
    assert changed == {"code of patch.method", "code of evaluation.task"}


def test_a_run_that_was_killed_after_its_last_step_trains_no_more(done, tmp_path):
    shutil.copytree(done.folder, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    again = finetune(options(tmp_path / "run", "evaluation.every=2"))
    assert again.results["steps"] == 4 and losses(again) == losses(done)


@pytest.mark.parametrize("step", [1, full(3)])
def test_ctrl_c_says_whether_anything_is_saved(tmp_path, monkeypatch, step):
    from trl import SFTTrainer

    stock = SFTTrainer.training_step

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == step:
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(SFTTrainer, "training_step", interrupted)
    words = (*SMALL, *TEXTS, *QUICK, f"output={tmp_path / 'run'}", "train.max_steps=4", "train.save_steps=2")
    stopped = invoke("finetune", *words)
    assert stopped.exit_code == 130
    assert ("Nothing is saved" in stopped.stderr) == (step == 1)
    assert ("Checkpoints are saved" in stopped.stderr) == (step == 3)
    monkeypatch.setattr(SFTTrainer, "training_step", stock)
    run("finetune", *words)


# --- a dry run


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A folder of checkpoints over which a run may be refused."""
    folder = tmp_path_factory.mktemp("bases")
    model = bundled_model(dtype="auto")
    rope_patch.apply(model, "yarn", factor=4, target_length=1024)
    rope_patch.save(model, folder / "patched", tokenizer=TOKENIZER)
    for name in ("scaled", "empty", "windowed"):
        shutil.copytree(LLAMA, folder / name)
    edit_json(folder / "windowed" / "config.json", lambda own: own.update(model_type="mistral", sliding_window=64))
    config = config_of(folder / "patched")
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}  # which does not say from which context
    scaled = json.dumps(config | {"rope_patch": None, "rope_parameters": linear, "rope_scaling": None})
    (folder / "scaled" / "config.json").write_text(scaled)
    (folder / "empty" / "model.safetensors").unlink()
    (folder / "short.txt").write_text("A short text. " * 5)
    shutil.copytree(LLAMA, folder / "chatty")
    (folder / "chatty" / "chat_template.jinja").write_text("{{ messages[1].content * 200 }}")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": turns}))
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ["model.name={bases}/patched"],
        ["model.name={bases}/scaled"],
        ["model.name={bases}/empty"],
        ["model.name={bases}/windowed"],
        ["lora.target_modules=nonsense"],
        ["data.source={bases}/short.txt"],
        ["evaluation.text={bases}/short.txt"],
        ["train.lr_scheduler_type=steady"],
        ["train.max_step=5"],
        ["model.name={bases}/chatty", "data.source={bases}/chat.jsonl", "train.assistant_only_loss=true"],
        ["train.assistant_only_loss=true"],
        ["output={bases}"],
    ],
    ids=lambda words: words[0].replace("/", "-"),
)
def test_a_dry_run_refuses_what_the_run_refuses(bases, tmp_path, words):
    given = [*SMALL, *TEXTS, f"output={tmp_path / 'run'}", *(word.format(bases=bases) for word in words)]
    dry = invoke("finetune", *given, "--dry-run")
    assert not any(tmp_path.iterdir()), "nothing is written"
    real = invoke("finetune", *given)
    assert dry.exit_code == real.exit_code == 2
    assert dry.stderr.splitlines()[-1] == real.stderr.splitlines()[-1]


def test_a_model_whose_layers_rotate_within_a_window_alone_is_trained_on_its_own_table(bases, tmp_path):
    words = (*SMALL, *TEXTS, f"output={tmp_path / 'run'}", f"model.name={bases}/windowed", "--dry-run")
    assert "no layer" in invoke("finetune", *words).stderr
    run("finetune", *words, "patch.method=default")


def test_a_dry_run_that_passes_writes_nothing(done, tmp_path):
    printed = run("finetune", *SMALL, *TEXTS, f"output={tmp_path / 'run'}", "--dry-run")
    assert "4 steps of 256 tokens; evaluations: 3, " in printed
    places = [printed.index(text) for text in ("patch: yarn:factor=4", "4 steps", "peak", "learning_rate")]
    assert places == sorted(places), "what was asked for first, all options last"
    assert not any(tmp_path.iterdir())
    run("finetune", *SMALL, *TEXTS, "evaluation.every=2", f"output={done.folder}", "--dry-run")


# --- ways to train


def test_a_patched_checkpoint_keeps_its_patch(quick, tmp_path):
    """tests/training/test_models.py gives one another patch."""
    base = tmp_path / "base"
    model = small(max_position_embeddings=256)
    rope_patch.apply(model, "yarn", factor=4, target_length=1024)
    rope_patch.save(model, base, tokenizer=TOKENIZER)
    own = (f"model.name={base}", "patch.method=null")
    for wrong in ("patch.replace=true", "patch.target_length=2048"):
        with pytest.raises(ValueError, match=r"own yarn:factor=4"):
            finetune(quick(tmp_path / "a", *own, wrong))
    unchanged = finetune(quick(tmp_path / "a", *own, "patch.target_length=512"))
    assert unchanged.results["patch"] == "yarn:factor=4" and unchanged.results["target_length"] == 1024
    with pytest.raises(ValueError, match="merge"):
        finetune(quick(tmp_path / "b", f"model.name={unchanged.folder}"))


def test_a_loss_that_is_no_number_ends_the_run(quick, tmp_path):
    words = ("train.learning_rate=1e30", "train.max_steps=8", "train.save_steps=8")
    with pytest.raises(FloatingPointError, match=r"the loss of step \d is (nan|inf): use a lower learning rate"):
        finetune(quick(tmp_path / "run", *words))


def test_a_run_that_made_things_worse_says_so(tmp_path):
    with pytest.warns(UserWarning, match="significantly worse"):
        result = finetune(options(tmp_path, "train.learning_rate=0.3", "evaluation.lengths=128"))
    assert result.results["changes"][0]["verdict"] == "worse"


def test_the_best_checkpoint_is_kept(quick, tmp_path, monkeypatch):
    """Scores are scripted: the second evaluation is the best, then two are worse."""
    scores = iter([0.3, 0.9, 0.5, 0.4])
    weights = []

    def watched(suite, model):
        weights.append(next(p.clone() for n, p in model.named_parameters() if "lora_B" in n))
        return evaluate_model(suite, model)

    monkeypatch.setattr(callbacks, "evaluate_model", watched)
    monkeypatch.setattr(callbacks, "metrics", lambda result: {"score": next(scores)})
    words = ("train.max_steps=4", "evaluation.every=1", "train.save_total_limit=1")
    result = finetune(quick(tmp_path, *words))
    assert result.results["steps"] == 4 and result.results["best_step"] == 2
    loaded = rope_patch.load(result.folder, dtype=torch.float32)
    weight = next(p for n, p in loaded.named_parameters() if "lora_B" in n)
    assert torch.equal(weight, weights[1]) and not torch.equal(weight, weights[3])


@pytest.mark.parametrize(
    "words",
    [
        ("data.positions=pose", "patch.method=abf:factor=50+p_rope:p=0.75"),
        ("train.packing_strategy=bfd_split", "data.allow_short=true"),
    ],
    ids=lambda words: words[0],
)
def test_ways_to_train(quick, words, tmp_path):
    result = finetune(quick(tmp_path, "train.max_steps=2", *words))
    assert all(map(math.isfinite, losses(result))) and len(losses(result)) == 2
    model = rope_patch.load(result.folder, dtype=torch.float32)
    assert str(locate(model).record.to_method()) == (result.results["patch"] or "default")


def test_completions_of_prompts_are_learned_with_every_weight(quick, tmp_path):
    """There is no model without an adapter then, so the note leads to a comparison."""
    rows = [json.dumps({"prompt": f"{number} and", "completion": " some more" * 60}) for number in range(16)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = ("lora.r=0", "patch.method=nope", "train.gradient_checkpointing=false", "evaluation.before=true")
    result = finetune(quick(tmp_path / "run", *words, "train.max_steps=2", f"data.source={tmp_path / 'rows.jsonl'}"))
    assert all(map(math.isfinite, losses(result))) and len(losses(result)) == 2
    assert str(locate(rope_patch.load(result.folder)).record.to_method()) == "nope"
    assert result.results["notes"] == [
        "every weight was trained: for scores before it, rope-patch compare CHECKPOINT --methods default"
    ]


def test_qlora_trains_on_a_cpu_and_may_be_evaluated_on_the_way(tmp_path):
    words = (*QUICK, "model.quantization=nf4", "train.max_steps=2")
    result = finetune(options(tmp_path / "run", *words))
    assert len(losses(result)) == 2 and str(read_record(result.folder).to_method()) == "yarn:factor=4"
    assert all(map(math.isfinite, losses(result)))
    # bitsandbytes packs the weights of a model in eval mode, where the CPU is of a kind, and then trains it wrongly.
    watched = finetune(options(tmp_path / "watched", *words, "evaluation.every=1", "evaluation.before=true"))
    assert losses(watched) == losses(result)


def test_a_step_without_room_ends_with_advice(quick, tmp_path, monkeypatch):
    from trl import SFTTrainer

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(SFTTrainer, "training_step", full)
    with pytest.raises(torch.OutOfMemoryError, match="--dry-run"):
        finetune(quick(tmp_path))


# --- the command


def test_the_script_trains(monkeypatch, capfd, tmp_path):
    config = ROOT / "recipes" / "configs" / "32k.yaml"
    few = ("train.max_length=128", "evaluation.lengths=128", "evaluation.before=false", "evaluation.windows=1", *TEXTS)
    words = (RECIPE, config, "--smoke", f"output={tmp_path / 'out'}", *few)
    monkeypatch.setattr(sys, "argv", [str(word) for word in words])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(RECIPE), run_name="__main__")
    out, err = capfd.readouterr()
    assert not stop.value.code and "| retrieval 128 |" in out, err[-2000:]
    assert "4 steps of 256 tokens" in out and "FutureWarning" not in err
    assert str(read_record(tmp_path / "out").to_method()) == "yarn:factor=4"
