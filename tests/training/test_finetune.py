"""The fine-tuning recipe, end to end on a bundled checkpoint: what it leaves, how it resumes, what it refuses."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fresh import run_code
from peft import PeftModel
from recipe_runs import LLAMA, SMALL, losses
from support.gguf_files import write_toy
from tiny import ids
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.checkpoints.adapters import read_record
from rope_patch.patching.locate import PatchError, find_rotary
from rope_patch.training import finetune as module
from rope_patch.training.finetune import finetune
from rope_patch.training.reading import read
from rope_patch.training.runs import hold_folder, inspect_folder
from rope_patch.training.scores import RecipeEvaluator
from rope_patch.training.setup import arguments, collator
from rope_patch.training.tables import TableTraining

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "finetune_lora.py"


DOMAINS = LLAMA.parent / "domains"
TEXTS = [f"data.source={DOMAINS}", f"evaluation.text={DOMAINS}", f"evaluation.haystack={DOMAINS}"]
"""Read in a fraction of the time that the built-in text takes, which the smoke run reads."""


def options(out, *words):
    return read(overrides=[*SMALL, *TEXTS, f"output={out}", *words])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run with evaluations on the way."""
    out = tmp_path_factory.mktemp("run") / "yarn"
    return finetune(options(out, "evaluation.every=2"), command="python recipes/finetune_lora.py x.yaml")


@pytest.mark.filterwarnings("ignore:Could not find a config file in .*gguf")  # PEFT: it assumes what is true
def test_an_adapter_is_trained_on_a_gguf_file(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(LLAMA)
    file = write_toy(model, tmp_path / "base.gguf", AutoTokenizer.from_pretrained(LLAMA))
    finetune(options(tmp_path / "run", f"model.name={file}"))
    trained = rope_patch.load(tmp_path / "run")
    assert rope_patch.verify(trained).method == "yarn:factor=4"
    assert trained.peft_config["default"].base_model_name_or_path == str(file)


def test_it_leaves_an_adapter_with_patch_scores_and_card(done):
    folder, results = done.folder, done.results
    assert str(read_record(folder).to_method()) == "yarn:factor=4" == results["patch"]
    assert results == json.loads((folder / "results.json").read_text())
    assert results["steps"] == 4 and results["tokens"] == 4 * 2 * 128
    assert [row["step"] for row in results["curve"]] == [0, 2, 4] and len(results["losses"]) == 4
    evaluated = json.loads((folder / "evaluation.json").read_text())
    for when in ("before", "after"):
        right = [
            s["correct"] for c in evaluated[when]["retrieval"]["cells"] if c["length"] == 256 for s in c["samples"]
        ]
        assert len(right) == 2 and results[when]["retrieval_256"] == sum(right) / 2
    text = (folder / "README.md").read_text()
    before, after = (results["first_choice"][when]["256"] for when in ("before", "after"))
    cells = [cell for cell in evaluated["after"]["retrieval"]["cells"] if cell["length"] == 256]
    assert after == sum(s["first_choice"] for cell in cells for s in cell["samples"]) / 2
    assert f"| first choice at 256 | {before:.3g} | {after:.3g} |" in text and "greedy decoding on 2 passkey" in text
    assert 1 <= len(results["answers"]) <= 2
    for answer in results["answers"]:
        cells = evaluated["after"]["retrieval"]["cells"]
        given = [
            s for c in cells for s in c["samples"] if [c["length"], c["depth"]] == [answer["length"], answer["depth"]]
        ]
        assert answer["output"] in [sample["output"] for sample in given]
        assert f"| {answer['expected']} | `` {json.dumps(answer['output'])} `` |" in text
    for needed in (
        "python recipes/finetune_lora.py x.yaml",
        "yarn:factor=4",
        "rope_patch.load",
        f"Data: {DOMAINS}, rows of 128 tokens",
        "| perplexity 128 to 256 |",
        f"{results['after']['perplexity_0_128']:.3g}",
        f"{results['losses'][-1]['loss']:.3f}",
        "learning_rate: 0.01",
    ):
        assert needed in text, needed
    assert list((folder / "work" / "runs").rglob("events.out.tfevents.*")), "TensorBoard finds its logs"


def test_before_is_the_patched_model_and_after_is_what_was_saved(done):
    """The scores are those that the engines give for the model in memory and for the folder loaded anew."""
    evaluator = RecipeEvaluator(options("x").evaluation, (128, 256), AutoTokenizer.from_pretrained(LLAMA))
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    rope_patch.apply(model, "yarn", factor=4, target_length=1024)
    assert evaluator(model).metrics() == pytest.approx(done.results["before"], abs=1e-6)
    before, after = done.results["before"], done.results["after"]
    assert evaluator(rope_patch.load(done.folder, dtype=torch.float32)).metrics() == pytest.approx(after, abs=1e-5)
    assert after["perplexity_0_128"] != pytest.approx(before["perplexity_0_128"], abs=1e-3)


RELOAD = """
import sys
import torch
import rope_patch
from safetensors.torch import load_file, save_file
model = rope_patch.load(sys.argv[1], dtype=torch.float32)
with torch.no_grad():
    save_file({"logits": model(load_file(sys.argv[2])["ids"], use_cache=False).logits.contiguous()}, sys.argv[3])
"""


@pytest.mark.slow
def test_the_round_trip_of_an_adapter(done, tmp_path):
    """A new process gives equal logits; plain PEFT on the bare base is told apart; merged, stock code suffices."""
    from safetensors.torch import load_file, save_file

    rows = ids(200, batch=2) + 5
    model = rope_patch.load(done.folder, dtype=torch.float32)
    with torch.no_grad():
        expected = model(rows, use_cache=False).logits
    save_file({"ids": rows}, tmp_path / "ids")
    reloaded = run_code(RELOAD, done.folder, tmp_path / "ids", tmp_path / "logits", cwd=ROOT)
    assert reloaded.returncode == 0, reloaded.stderr
    assert torch.equal(load_file(tmp_path / "logits")["logits"], expected)

    bare = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    wrong = PeftModel.from_pretrained(bare, done.folder)
    with torch.no_grad():
        assert not torch.allclose(wrong(rows, use_cache=False).logits, expected, atol=1e-2), "and nothing was said"
    with pytest.raises(PatchError):
        rope_patch.verify(wrong, read_record(done.folder))
    with pytest.raises(PatchError, match="the model is not patched"):
        rope_patch.load_adapter(AutoModelForCausalLM.from_pretrained(LLAMA), done.folder)

    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        merged_logits = stock(rows, use_cache=False).logits
    assert torch.allclose(merged_logits, expected, atol=1e-3), "rounding of logits up to 18, a tenth of the bound above"


def test_a_finished_run_is_returned_as_it_is(done, monkeypatch):
    monkeypatch.setattr(module, "load_model", lambda *_: pytest.fail("it was loaded again"))
    again = finetune(options(done.folder, "evaluation.every=2"))
    assert again.results == done.results and again.finished_before and not done.finished_before


def test_another_run_in_the_same_folder_is_refused(done):
    with pytest.raises(ValueError, match=r"holds a run with patch\.method=yarn:factor=4 \(now pi:factor=4\); train\.s"):
        finetune(options(done.folder, "evaluation.every=2", "patch.method=pi:factor=4", "train.seed=3"))
    with pytest.raises(ValueError, match=r"holds a run with model\.name=llama \(now gemma3\): choose another output"):
        finetune(options(done.folder, "evaluation.every=2", "model.name=gemma3"))


def test_a_folder_of_something_else_is_left_alone(done, tmp_path):
    """Also by --restart, and also the folder of the model itself."""
    claim = tmp_path / "other"
    (claim / "work").mkdir(parents=True)
    (claim / "work" / "run.json").write_text('{"a": 1}')
    for restart in (False, True):
        with pytest.raises(ValueError, match="is not of a run of this version: give another folder"):
            finetune(options(claim), restart=restart)
    for name in ("work/thesis.txt", "results.json", "work/checkpoint-4/adapter_model.safetensors"):
        folder = tmp_path / name.replace("/", "-")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("precious")
        for restart in (False, True):
            with pytest.raises(ValueError, match="holds files that are not of a run: give a new or empty folder"):
                finetune(options(folder), restart=restart)
        assert (folder / name).read_text() == "precious" and len([*folder.rglob("*")]) == name.count("/") + 1
    shutil.copytree(LLAMA, tmp_path / "mine")
    with pytest.raises(ValueError, match="is the folder of the model itself: give another"):
        finetune(options(tmp_path / "mine", f"model.name={tmp_path / 'mine'}"))
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file: give a folder"):
        finetune(options(tmp_path / "file"))


@pytest.mark.slow
def test_restart_throws_nothing_away_before_the_new_run_is_sound(done, tmp_path):
    shutil.copytree(done.folder, tmp_path / "run")
    words = ("train.steps=1", "evaluation.before=false", "evaluation.lengths=128")
    with pytest.raises((ValueError, OSError)):
        finetune(options(tmp_path / "run", *words, "model.name=./nowhere"), restart=True)
    assert (tmp_path / "run" / "results.json").exists() and (tmp_path / "run" / "work" / "checkpoint-4").exists()
    (tmp_path / "run" / "work" / ".rows-left-behind").write_text("")
    (tmp_path / "run" / "work" / "mine.txt").write_text("precious")
    result = finetune(options(tmp_path / "run", *words), restart=True)
    assert result.results["steps"] == 1 and not (tmp_path / "run" / "work" / "checkpoint-4").exists()
    assert not (tmp_path / "run" / "work" / ".rows-left-behind").exists()
    assert (tmp_path / "run" / "work" / "mine.txt").read_text() == "precious"


def test_two_commands_do_not_work_in_one_folder(tmp_path):
    def find(name="run"):
        return inspect_folder(options(tmp_path / name), 1, source="x")

    run = find()
    with (
        hold_folder(run, "abc", find),
        pytest.raises(BlockingIOError, match="another command works in"),
        hold_folder(run, "abc", find),
    ):
        pass
    late = find()
    (tmp_path / "run" / "work" / "run.json").write_text(
        (tmp_path / "run" / "work" / "run.json").read_text().replace("abc", "x")
    )
    with pytest.raises(BlockingIOError, match="changed while the model was loaded"), hold_folder(late, "abc", find):
        pass
    with pytest.raises(KeyboardInterrupt), hold_folder(find(), "abc", find):
        raise KeyboardInterrupt
    (tmp_path / "early" / "work").mkdir(parents=True)  # killed before it could say what it is
    (tmp_path / "early" / "work" / "lock").write_text("")
    (tmp_path / "early" / "work" / ".rows-1.arrow.77").write_text("")
    with hold_folder(find("early"), "abc", lambda: find("early")):
        assert sorted(path.name for path in (tmp_path / "early" / "work").iterdir()) == ["lock", "run.json"]
    fresh = find("new")
    with pytest.raises(ValueError), hold_folder(fresh, "abc", lambda: find("new")):
        raise ValueError("bad data")
    assert not (tmp_path / "new").exists(), "nothing came of it"


@pytest.mark.slow
def test_a_run_goes_on_with_its_own_rows_and_its_own_model(done, tmp_path):
    """The data or the base may have changed since: the first does not matter, the second is refused."""
    text, base, out = tmp_path / "text.txt", tmp_path / "base", tmp_path / "run"
    text.write_text("\n".join(rope_patch.evaluation.text.builtin_text("train").documents[40:44]))
    shutil.copytree(LLAMA, base)
    words = (f"model.name={base}", f"data.source={text}", "evaluation.before=false", "evaluation.lengths=128")
    words = (*words, "train.save_every=2", "evaluation.windows=0")
    whole = finetune(options(tmp_path / "whole", *words))
    finetune(options(out, *words))
    for name in ("results.json", "adapter_model.safetensors"):
        (out / name).unlink()
    shutil.rmtree(out / "work" / "checkpoint-4")
    text.write_text("Other text. " * 2000)
    result = finetune(options(out, *words))
    assert losses(result) == pytest.approx(losses(whole), abs=1e-5)
    assert len(list((out / "work").glob("rows-*.arrow"))) == 1
    (out / "results.json").unlink()
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.layers[0].mlp.up_proj.weight.data *= 1.5
    model.save_pretrained(base)
    with pytest.raises(ValueError, match="was trained on other weights than the model has now"):
        finetune(options(out, *words))


@pytest.mark.slow
def test_a_finished_run_whose_adapter_is_gone_is_finished_again(done, tmp_path):
    shutil.copytree(done.folder, tmp_path / "run")
    (tmp_path / "run" / "adapter_model.safetensors").unlink()
    result = finetune(options(tmp_path / "run", "evaluation.every=2"))
    assert not result.finished_before and (tmp_path / "run" / "adapter_model.safetensors").exists()
    assert result.results["after"] == pytest.approx(done.results["after"], abs=1e-5)


@pytest.mark.slow
def test_a_patched_checkpoint_keeps_its_patch_or_gets_another(tmp_path):
    base, small = tmp_path / "base", ("train.steps=1", "evaluation.before=false", "evaluation.lengths=128")
    model = AutoModelForCausalLM.from_pretrained(LLAMA)
    rope_patch.apply(model, "yarn", factor=4, target_length=1024)
    rope_patch.save(model, base, tokenizer=AutoTokenizer.from_pretrained(LLAMA))
    own = (f"model.name={base}", "patch.method=null", *small)
    with pytest.raises(
        ValueError, match=r"patch\.replace without patch\.method would change nothing: the checkpoint keeps"
    ):
        finetune(options(tmp_path / "a", *own, "patch.replace=true"))
    with pytest.raises(
        ValueError, match=r"own yarn:factor=4 was applied for a context of 1024 tokens, not of 2048: give shorter"
    ):
        finetune(options(tmp_path / "a", *own, "patch.target_length=2048"))
    unchanged = finetune(options(tmp_path / "a", *own, "patch.target_length=512"))
    assert unchanged.results["patch"] == "yarn:factor=4" and unchanged.results["target_length"] == 1024
    other = finetune(
        options(tmp_path / "b", f"model.name={base}", "patch.method=pi:factor=4", "patch.replace=true", *small)
    )
    loaded = rope_patch.load(other.folder, dtype=torch.float32)
    assert str(find_rotary(loaded).record.to_method()) == "pi:factor=4"
    with pytest.raises(ValueError, match="is an adapter: merge it into its base first"):
        finetune(options(tmp_path / "c", f"model.name={other.folder}", *small))


@pytest.mark.slow
def test_a_run_without_a_patch_or_with_a_long_warm_up_warns(tmp_path):
    small = ("evaluation.before=false", "evaluation.lengths=128", "evaluation.windows=0", "train.steps=1")
    with pytest.warns(UserWarning) as caught:
        result = finetune(options(tmp_path / "run", *small, "patch.method=null", "train.warmup=3"))
    messages = [str(warning.message) for warning in caught]
    assert any(
        text.startswith("there is no patch.method: the model keeps its original rotary table") for text in messages
    )
    assert any(
        text.startswith("train.warmup=3 steps are more than train.steps=1: the learning rate") for text in messages
    )
    assert result.results["patch"] in (None, "default")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:there is no patch.method")
@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["patch.method=null"], "without a patch the model answers 0% of the vt prompts of 256 tokens, within its "),
        ([], "at most 0% of the vt prompts of 256 tokens are answered, within the trained length of 256 tokens, but "),
        (["evaluation.before=false"], "0% of the vt prompts of 256 tokens are answered, within the trained length "),
    ],
)
def test_a_run_says_whether_the_task_is_too_hard_for_the_unpatched_model(tmp_path, words, start):
    small = ("evaluation.lengths=256", "evaluation.windows=0", "train.steps=1", "train.warmup=0", "evaluation.task=vt")
    result = finetune(options(tmp_path / "run", *small, *words))
    (note,) = result.results["notes"]
    assert note.startswith(start)
    assert f"**Note**: {note}.\n" in (result.folder / "README.md").read_text()
    if words != ["patch.method=null"]:
        assert note.endswith("too hard for it: rope-patch compare MODEL --methods default measures it")


@pytest.mark.slow
def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    words = ("train.learning_rate=1e30", "train.steps=8", "evaluation.before=false", "train.save_every=8")
    with pytest.raises(FloatingPointError, match=r"the loss of step \d is (nan|inf): use a lower learning rate"):
        finetune(options(tmp_path / "run", *words))


@pytest.mark.slow
def test_a_run_that_made_things_worse_says_so(tmp_path):
    words = ("train.learning_rate=0.3", "train.steps=2", "evaluation.lengths=128")
    with pytest.warns(UserWarning, match="ppl 0-128 is significantly worse than before training"):
        result = finetune(options(tmp_path / "run", *words))
    change, _ = result.results["changes"]
    assert change["metric"] == "perplexity" and result.results["worse"]
    assert change["verdict"] == "worse" and change["low"] > 0
    assert f"- **{change['sentence']}**" in (result.folder / "README.md").read_text()


@pytest.mark.slow
def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(done, tmp_path, monkeypatch):
    """Stopped between the checkpoints at 2 and 4: resumed from 2, the same losses, the first evaluation kept."""
    out = tmp_path / "cut"
    stock = module.LongTrainer.training_step
    passes = []

    def stopping(self, *args, **kwargs):
        passes.append(1)
        if len(passes) == 7:  # in the fourth step
            raise KeyboardInterrupt
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(module.LongTrainer, "training_step", stopping)
    with pytest.raises(KeyboardInterrupt):
        finetune(options(out, "evaluation.every=2"))
    assert not (out / "results.json").exists() and not (out / "adapter_model.safetensors").exists()
    result = finetune(options(out, "evaluation.every=2"))
    assert len(passes) == 7 + 4, "two steps of two passes were left"
    assert losses(result) == pytest.approx(losses(done), abs=1e-4)
    assert result.results["after"] == pytest.approx(done.results["after"], abs=1e-3)
    assert [row["step"] for row in result.results["curve"]] == [0, 2, 4]


@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_not_resumed_from(done, tmp_path):
    shutil.copytree(done.folder, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    config = tmp_path / "run" / "work" / "checkpoint-4" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "someone/else"}))
    with pytest.raises(ValueError, match=r"belongs to someone/else, this run trains .*llama: choose another output"):
        finetune(options(tmp_path / "run", "evaluation.every=2"))


def test_weight_decay_does_not_pull_on_a_trained_table():
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    rope_patch.apply(model, "yarn", factor=2)
    table = TableTraining(model, 0.5)
    with table.in_place():
        own = next(p for p in table.table.parameters() if p.requires_grad)
        own.data.fill_(0.5)
        adam = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.5)
        table.add_group(adam)
        own.grad = torch.zeros_like(own)
        adam.step()
        assert bool((own == 0.5).all())


@pytest.mark.slow
def test_the_best_checkpoint_by_score_is_kept_and_patience_ends_a_run(tmp_path, monkeypatch):
    """Scores are scripted: the second evaluation is the best, then two are worse. The table is trained, too."""
    scores = iter([0.1, 0.3, 0.9, 0.5, 0.4, 0.3, 0.2])
    stock = RecipeEvaluator.__call__
    evaluated = []

    def scripted(self, model, on_progress):
        evaluation = stock(self, model, on_progress)
        score = next(scores)
        weight = next(p.clone() for n, p in model.named_parameters() if "lora_B" in n)
        evaluated.append((score, weight, find_rotary(model).record.tables))
        monkeypatch.setattr(type(evaluation), "score", property(lambda _: score))
        return evaluation

    monkeypatch.setattr(RecipeEvaluator, "__call__", scripted)
    words = ("evaluation.every=1", "evaluation.patience=2", "train.steps=6", "train.keep=1", "evaluation.lengths=128")
    table = ("patch.method=yarn:factor=4", "patch.trainable=true", "data.retrieval=0.5")
    result = finetune(options(tmp_path / "run", *words, *table))
    assert result.results["steps"] == 4 and result.results["best_step"] == 2
    assert [score for score, *_ in evaluated] == [0.1, 0.3, 0.9, 0.5, 0.4], "the best one was not measured again"
    loaded = rope_patch.load(result.folder, dtype=torch.float32)
    weight = next(p for n, p in loaded.named_parameters() if "lora_B" in n)
    assert torch.equal(weight, evaluated[2][1]) and not torch.equal(weight, evaluated[4][1])
    tables = find_rotary(loaded).record.tables
    assert tables == evaluated[2][2] and tables != evaluated[4][2]
    assert "step 2 had the best score" in (result.folder / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("data.positions=pose", "patch.method=abf:factor=50+p_rope:p=0.75"),
        ("data.positions=randpos", "data.boundaries=whole", "data.retrieval=0.5"),
        ("data.boundaries=apart", "lora.target_modules=attention"),
        ("data.lengths=64:0.5 128", "lora.long_lora=true", "data.boundaries=whole", "data.allow_short=true"),
        ("lora.rank=0", "patch.method=nope", "train.checkpointing=false", "train.learning_rate=0.001"),
    ],
    ids=lambda words: words[0],
)
def test_ways_to_train(words, tmp_path):
    words = ("train.steps=2", "evaluation.before=false", "evaluation.lengths=128", *words)
    result = finetune(options(tmp_path / "run", *words))
    assert all(map(torch.isfinite, map(torch.tensor, losses(result)))) and len(losses(result)) == 2
    assert result.results["before"] is None
    model = rope_patch.load(result.folder, dtype=torch.float32)
    record = find_rotary(model).record
    assert str(record.to_method()) == (result.results["patch"] or "default")
    evaluator = RecipeEvaluator(options("x", *words).evaluation, (128,), AutoTokenizer.from_pretrained(LLAMA))
    assert evaluator(model).metrics() == pytest.approx(result.results["after"], abs=1e-4)


@pytest.mark.slow
def test_qlora_trains_on_a_cpu_and_refuses_to_be_evaluated_before(tmp_path):
    words = ("model.quantization=nf4", "train.steps=2", "evaluation.lengths=128")
    with pytest.raises(ValueError, match=r"set evaluation\.every=0 and evaluation\.before=false"):
        finetune(options(tmp_path / "run", *words))
    result = finetune(options(tmp_path / "run", "evaluation.before=false", *words))
    assert len(losses(result)) == 2 and str(read_record(result.folder).to_method()) == "yarn:factor=4"
    assert all(torch.isfinite(torch.tensor(losses(result))))


def test_a_mistake_costs_nothing(tmp_path):
    """A run that never got to a checkpoint gives its folder up to the corrected command."""
    out, small = tmp_path / "run", ("train.steps=1", "evaluation.before=false", "evaluation.lengths=128")
    for wrong in ("patch.layer_types=[nonsense]", "train.scheduler=steady", "lora.target_modules=[q_prj]"):
        with pytest.raises(ValueError):
            finetune(options(out, wrong, *small))
    assert not (out / "results.json").exists()
    assert finetune(options(out, *small)).results["steps"] == 1
    assert finetune(options(out, "data.lengths=128", *small)).results["steps"] == 1, (
        "a number said otherwise is the same"
    )


def test_arguments_are_those_asked_for(tmp_path):
    training_arguments = arguments(options(tmp_path, "train.warmup=0.5", "train.optimizer=paged_adamw_8bit"), tmp_path)
    assert (
        training_arguments.warmup_steps == 2
        and training_arguments.optim == "paged_adamw_8bit"
        and not training_arguments.bf16
    )
    assert training_arguments.per_device_train_batch_size == 1 and training_arguments.gradient_accumulation_steps == 2
    with pytest.raises(ValueError, match="steady"):
        arguments(options(tmp_path, "train.scheduler=steady"), tmp_path)


def test_collators_follow_the_options():
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    kinds = {
        "PoSECollator": ("data.positions=pose", "data.chunks=3"),
        "RandPosCollator": ("data.positions=randpos",),
        "PackedCollator": ("data.boundaries=apart",),
        "Collator": (),
    }
    for name, words in kinds.items():
        built = collator(options("x", "train.seed=4", *words), tokenizer, 8)
        assert type(built).__name__ == name and built.seed == 4 and built.pad == tokenizer.pad_token_id
        assert getattr(built, "target", 1024) == 1024
    assert (
        built is not None and collator(options("x", "data.positions=pose", "data.chunks=3"), tokenizer, 8).chunks == 3
    )


# --- the command


@pytest.fixture
def script(monkeypatch, capfd, tmp_path):
    """Runs the script in this process and an empty folder; returns exit code, stdout and stderr."""

    def start(*words):
        monkeypatch.setattr(sys, "argv", [str(RECIPE), *map(str, words)])
        monkeypatch.chdir(tmp_path)
        code = 0
        try:
            runpy.run_path(str(RECIPE), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        return SimpleNamespace(returncode=code, **capfd.readouterr()._asdict())

    return start


@pytest.mark.slow
def test_the_smoke_run_of_the_command_line(script, tmp_path):
    config = ROOT / "recipes" / "configs" / "llama-3-8b-32k.yaml"
    few = ("train.steps=2", "evaluation.before=false", "evaluation.windows=1", *TEXTS[1:])
    done = script(config, "--smoke", f"output={tmp_path / 'out'}", *few)
    assert done.returncode == 0, done.err[-2000:]
    assert "retrieval 1024:" in done.out and "perplexity 256 to 1024:" in done.out
    assert str(read_record(tmp_path / "out").to_method()) == "yarn:factor=4"
    assert "text that ships with CPython, rows of 512 tokens" in (tmp_path / "out" / "README.md").read_text()
    assert "FutureWarning" not in done.err and "Traceback" not in done.err


@pytest.mark.slow
def test_wrong_words_are_one_line_and_help_shows_how(script):
    done = script("model.nmae=llama", "data.lengths=64", "output=x")
    assert done.returncode == 2 and done.out == ""
    assert "unknown option 'model.nmae'. Did you mean 'model.name'? Known in model: name, rev" in done.err
    assert "Traceback" not in done.err and len(done.err.strip().splitlines()) == 1
    shown = subprocess.run([sys.executable, RECIPE, "--help"], capture_output=True, text=True, check=True)
    assert "lora.yaml" in shown.stdout and "--dry-run" in shown.stdout


def test_the_length_of_the_rows_is_required_before_anything_is_loaded(script, tmp_path):
    done = script("model.name=./nowhere", "patch.method=yarn:factor=4", "output=x")
    assert done.returncode == 2 and "data.lengths is required: give the length of the rows to train on" in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_tells_what_it_takes_and_writes_nothing(script, tmp_path):
    config = ROOT / "recipes" / "configs" / "llama-3.1-8b-128k.yaml"
    done = script(config, "--dry-run", "--gpu-memory", 141)
    assert done.returncode == 0, done.err
    assert "200 steps of 524288 tokens" in done.out and "fits into 141" in done.out
    assert "evaluation: 5 times (before training, every 50 steps), 2 windows of 131072 tokens" in done.out
    assert ("time on this CPU: at least" in done.out) is not torch.cuda.is_available()
    assert "method: default" in done.out and list(tmp_path.iterdir()) == []
