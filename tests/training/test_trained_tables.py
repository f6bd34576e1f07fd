"""Tables that a recipe trains together with the weights."""

from __future__ import annotations

import shutil

import pytest
import torch
from recipe_runs import LLAMA, SMALL, losses
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.checkpoints.adapters import read_record
from rope_patch.methods import Table
from rope_patch.patching.locate import PatchError, find_rotary
from rope_patch.training.finetune import finetune
from rope_patch.training.reading import read
from rope_patch.training.resuming import flaw
from rope_patch.training.scores import RecipeEvaluator
from rope_patch.training.tables import TABLE_FILE, TableTraining

DOMAINS = LLAMA.parent / "domains"
SHORT = [
    *("patch.target_length=512", "evaluation.lengths=128 256", "evaluation.before=false"),
    *(f"data.source={DOMAINS}", f"evaluation.text={DOMAINS}", f"evaluation.haystack={DOMAINS}"),  # quickly read
]
TRAINED = [*SHORT, "patch.method=yarn:factor=2", "patch.trainable=true", "data.retrieval=0.5", "train.save_every=2"]


def options(out, *words):
    return read(overrides=[*SMALL, f"output={out}", *words])


def values(folder):
    method = read_record(folder).to_method()
    assert isinstance(method, Table)
    return torch.tensor(method.values, dtype=torch.float64).log()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    return finetune(options(out, *TRAINED))


def test_a_trained_table_is_saved_as_it_became(trained):
    folder = trained.folder
    start = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    first = torch.tensor(rope_patch.apply(start, "yarn", factor=2).after[None].inv_freq.tolist()).log()
    moved = (values(folder) - first).abs()
    assert 1e-3 < float(moved.max()) < 4 * 0.01 + 1e-6, "4 steps of Adam at no more than .01"
    assert values(folder / "work" / "checkpoint-2").tolist() != values(folder).tolist()
    assert values(folder / "work" / "checkpoint-4").tolist() == values(folder).tolist()
    model = rope_patch.load(folder, dtype=torch.float32)
    assert rope_patch.verify(model).record.to_method() == read_record(folder).to_method()
    module_ = find_rotary(model).module
    assert torch.allclose(module_.tables[None].inv_freq.double().log(), values(folder), atol=1e-7)
    again = RecipeEvaluator(options("x", *TRAINED).evaluation, (128, 256), AutoTokenizer.from_pretrained(LLAMA))
    assert again(model).metrics() == pytest.approx(trained.results["after"], abs=1e-5)
    assert "The rotary table was trained with them." in (folder / "README.md").read_text()
    assert not list(folder.glob(TABLE_FILE)) and flaw(folder / "work" / "checkpoint-4") is None


@pytest.mark.slow
def test_a_resumed_run_trains_the_same_table(trained, tmp_path):
    shutil.copytree(trained.folder, tmp_path / "run")
    for name in ("results.json", "adapter_model.safetensors"):
        (tmp_path / "run" / name).unlink()
    shutil.rmtree(tmp_path / "run" / "work" / "checkpoint-4")
    again = finetune(options(tmp_path / "run", *TRAINED))
    assert losses(again) == pytest.approx(losses(trained), abs=1e-5)
    torch.testing.assert_close(values(again.folder), values(trained.folder), atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("lora.rank=0", "train.learning_rate=0.001"),
        pytest.param(("model.name=gemma3",), marks=pytest.mark.full),
        pytest.param(("train.checkpointing=false", "train.optimizer=sgd"), marks=pytest.mark.full),
    ],
    ids=["every weight", "gemma3", "sgd"],
)
def test_a_trained_table_and_the_best_checkpoint(more, tmp_path):
    """What is loaded at the end is the best checkpoint's table with the best checkpoint's weights."""
    words = [word for word in TRAINED if not word.startswith("train.save")]
    result = finetune(options(tmp_path / "run", *words, "evaluation.every=2", *more))
    best = result.folder / "work" / f"checkpoint-{result.results['best_step']}"
    mine, theirs = (read_record(folder) or record_of(folder) for folder in (result.folder, best))
    assert mine.tables == theirs.tables
    stock = rope_patch.load(result.folder, dtype=torch.float32)
    again = RecipeEvaluator(options("x", *TRAINED).evaluation, (128, 256), AutoTokenizer.from_pretrained(LLAMA))
    if "gemma3" not in str(more):
        assert again(stock).metrics() == pytest.approx(result.results["after"], abs=1e-5)


def record_of(folder):
    return find_rotary(AutoModelForCausalLM.from_pretrained(folder)).record


def test_a_checkpoint_of_a_whole_model_says_its_own_table(tmp_path):
    """In both places: the record beside it, and the config that a stock loader reads."""
    result = finetune(options(tmp_path / "run", *TRAINED, "lora.rank=0", "train.learning_rate=0.001"))
    for step in (2, 4):
        folder = result.folder / "work" / f"checkpoint-{step}"
        assert record_of(folder).tables == read_record(folder).tables
        stock = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
        torch.testing.assert_close(stock.double().log(), values(folder), atol=1e-6, rtol=0)


@pytest.mark.parametrize("when", ["train.save_every=1", "evaluation.every=1"])
def test_a_trained_table_that_diverges_says_so(tmp_path, when):
    words = [word for word in TRAINED if not word.startswith("train.save")]
    with pytest.raises(FloatingPointError, match=r"no longer finite: use a lower patch\.learning_rate"):
        finetune(options(tmp_path / "run", *words, when, "patch.learning_rate=1e6"))


def test_a_trained_table_has_its_own_parameter_group(trained):
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    rope_patch.apply(model, "yarn", factor=2)
    table = TableTraining(model, 0.03)
    with table.in_place():
        adam = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1.0, weight_decay=0.5)
        table.add_group(adam)
        rest, own = adam.param_groups
        assert own["lr"] == 0.03 and own["weight_decay"] == 0 and len(own["params"]) == 1
        assert not {id(p) for p in own["params"]} & {id(p) for p in rest["params"]}
        with pytest.raises(PatchError, match="trained no table"):
            table.load(trained.folder)
        with pytest.raises(ValueError, match="found no rotary table"):
            rope_patch.verify(model)
        with table.as_patch() as record:
            assert rope_patch.verify(model).record == record
    assert rope_patch.verify(model).tables  # of float32: the start's own, encoded as values
    with safe_open(trained.folder / "work" / "checkpoint-2" / TABLE_FILE, framework="pt") as opened:
        assert "yarn" in opened.metadata()["begun"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["patch.trainable=true", "train.optimizer=adamw_8bit"], "adamw_8bit cannot train a table"),
        (["patch.learning_rate=0"], "patch.learning_rate must be > 0"),
        (["patch.learning_rate=0.5"], "patch.learning_rate without patch.trainable=true would change nothing"),
    ],
)
def test_bad_options_say_what_to_change(words, message):
    with pytest.raises(ValueError, match=message):
        options("x", *words)


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="unrotated"):
        finetune(options(tmp_path / "run", *TRAINED, "patch.method=nope"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="whole models"):
        finetune(options(tmp_path / "run", *TRAINED))
    assert not (tmp_path / "run").exists()
