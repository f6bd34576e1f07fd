"""Tables that the recipe fits before it trains weights, or trains together with them."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
import torch
from fits import fit_by_name
from recipe_runs import LLAMA, SMALL, losses
from safetensors import safe_open
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.checkpoints.adapters import read_record
from rope_patch.cli.finetune import smoke_options
from rope_patch.cli.fitted_table import fit_table
from rope_patch.evaluation.text import builtin_text
from rope_patch.fitting import Objective
from rope_patch.methods import Table
from rope_patch.patching.locate import PatchError, find_rotary
from rope_patch.training.finetune import finetune as train
from rope_patch.training.reading import read
from rope_patch.training.resuming import flaw
from rope_patch.training.scores import RecipeEvaluator
from rope_patch.training.tables import TABLE_FILE, TableTraining

DOMAINS = LLAMA.parent / "domains"
SHORT = [
    *("patch.target_length=512", "evaluation.lengths=128 256", "evaluation.before=false"),
    *(f"data.source={DOMAINS}", f"evaluation.text={DOMAINS}", f"evaluation.haystack={DOMAINS}"),  # quickly read
]
FITTED = [*SHORT, "patch.method=fit", "fit.init=yarn", "fit.steps=2", "fit.windows=1", "fit.samples=1"]
FITTED += ["fit.batch_tokens=1024"]
TRAINED = [*SHORT, "patch.method=yarn:factor=2", "patch.trainable=true", "data.retrieval=0.5", "train.save_every=2"]


def finetune(options):
    """As the command does."""
    return train(options, fit_table=fit_table)


def options(out, *words):
    return read(overrides=[*SMALL, f"output={out}", *words])


def values(folder):
    method = read_record(folder).to_method()
    assert isinstance(method, Table)
    return torch.tensor(method.values, dtype=torch.float64).log()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(builtin_text("train").documents[40:48]))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "run"
    return finetune(options(out, *TRAINED))


@pytest.mark.slow
def test_the_recipe_fits_to_its_own_text_what_fit_would(text, tmp_path):
    result = finetune(options(tmp_path / "run", *FITTED, f"data.source={text}", "data.allow_short=true"))
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    reference = fit_by_name(
        model,
        tokenizer,
        [text.read_text()],
        target_length=512,
        steps=2,
        windows=1,
        samples=1,
        batch_tokens=1024,
        objective=Objective(),
        checkpointing=True,
    )
    assert result.results["fit"]["chosen"] == reference.chosen and result.results["patch"] == str(reference.method)
    saved = json.loads((result.folder / "work" / "fit.json").read_text())
    assert saved == result.results["fit"] and saved["method"] == str(read_record(result.folder).to_method())
    tried = next(iter(reference.candidates.values()))
    assert [c["name"] for c in saved["candidates"]["yarn:factor=2"]] == [c.name for c in tried]
    card = (result.folder / "README.md").read_text()
    assert "The rotary table was fitted first" in card and reference.chosen in card


@contextlib.contextmanager
def steps_of_fits(stop=None):
    """Steps that the Adam of a fit begins, one entry each; interrupted at the one of this number."""
    taken = []

    def count(optimizer, *_):
        if type(optimizer) is torch.optim.Adam:  # weights are trained by AdamW
            taken.append(optimizer)
            if len(taken) == stop:
                raise KeyboardInterrupt

    handle = register_optimizer_step_pre_hook(count)
    try:
        yield taken
    finally:
        handle.remove()


@pytest.mark.slow
def test_a_resumed_run_does_not_fit_again(tmp_path):
    words = (*FITTED, "train.save_every=2")
    with steps_of_fits() as taken:
        whole = finetune(options(tmp_path / "run", *words))
    assert len(taken) == 2
    for name in ("results.json", "adapter_model.safetensors"):
        (whole.folder / name).unlink()
    shutil.rmtree(whole.folder / "work" / "checkpoint-4")
    with steps_of_fits() as taken:
        again = finetune(options(tmp_path / "run", *words))
    assert not taken, "it was fitted again"
    assert losses(again) == pytest.approx(losses(whole), abs=1e-5) and not again.finished_before
    assert again.results["patch"] == whole.results["patch"] and again.results["fit"] == whole.results["fit"]


@pytest.mark.full
def test_an_interrupted_fit_goes_on(tmp_path):
    with steps_of_fits(stop=2) as taken, pytest.raises(KeyboardInterrupt):
        finetune(options(tmp_path / "run", *FITTED))
    assert (tmp_path / "run" / "work" / "fit.jsonl").exists() and len(taken) == 2
    with steps_of_fits() as taken:
        result = finetune(options(tmp_path / "run", *FITTED))
    assert len(taken) == 1, "the second of two, which was not taken"
    assert result.results["fit"]["chosen"]


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


def test_text_enough_for_the_held_out_windows_is_read(monkeypatch, tmp_path):
    from rope_patch import fitting
    from rope_patch.training import sources

    taken = []
    monkeypatch.setattr(sources, "plain_texts", lambda *_: (taken.append(n) or "x" * 1_000_000 for n in range(100)))
    monkeypatch.setattr(sources, "open_source", lambda *_: None)
    monkeypatch.setattr(fitting, "fit", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(fitting, "held_out_spec", lambda *_, **__: None)
    model = torch.nn.Linear(1, 1)
    asked = options(
        "x", *FITTED, "fit.batch_tokens=null", "fit.windows=8", "patch.target_length=32k", "data.lengths=1k"
    )
    with pytest.raises(KeyboardInterrupt):
        fit_table(model, None, asked, tmp_path)
    assert len(taken) * 1e6 >= 8 * 32768 * 4.5 * 10


def test_the_rows_of_a_fit_are_those_of_the_options(monkeypatch, tmp_path):
    from rope_patch import fitting

    objectives = []

    def fit(*_, objective, **__):
        objectives.append(objective)
        raise KeyboardInterrupt

    monkeypatch.setattr(fitting, "fit", fit)
    monkeypatch.setattr(fitting, "held_out_spec", lambda *_, **__: None)
    asked = options("x", *FITTED, "fit.positions=pose", "fit.row_length=128", "fit.chunks=3", "fit.retrieval=0.3")
    with pytest.raises(KeyboardInterrupt):
        fit_table(torch.nn.Linear(1, 1), None, asked, tmp_path)
    assert objectives == [fitting.Objective(0.3, positions="pose", row_length=128, chunks=3)]


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
        (["patch.method=fit", "fit.init=nope2"], "fit: unknown method"),
        (["patch.method=fit", "fit.init="], "fit.init: Incompatible value"),
        (["patch.method=fit", "fit.band=1"], "fit: band must be a factor > 1"),
        (["patch.method=fit", "fit.retrieval=1"], r"fit: retrieval must be in \[0, 1\)"),
        (["patch.method=fit", "fit.mix=1"], r"fit: mix must be in \[0, 1\), got 1"),
        (["patch.method=fit", "fit.second_text=/nowhere"], "fit: second_text must be builtin, none or"),
        (["patch.method=fit", "fit.batch_tokens=1024"], "fit.batch_tokens must be >= 2048"),
        (["patch.method=fit", "fit.batch_tokens=1023", "fit.retrieval=0"], "fit.batch_tokens must be >= 1024"),
        (["patch.method=yarn:factor=2", "fit.steps=3"], "fit.* without patch.method=fit would change nothing"),
        (["patch.trainable=true", "train.optimizer=adamw_8bit"], "adamw_8bit cannot train a table"),
        (["patch.learning_rate=0"], "patch.learning_rate must be > 0"),
        (["patch.learning_rate=0.5"], "patch.learning_rate without patch.trainable=true would change nothing"),
        (["patch.method=fit", "fit.init=yarn yarn"], "fit: init must name tables that differ, got 'yarn yarn'"),
        (["patch.method=fit", "fit.band=.inf"], "fit.band must be finite"),
        (["patch.method=fit", "fit.row_length=64"], "fit: row_length is for rows that skip positions"),
        (["patch.method=fit", "fit.positions=pose", "fit.row_length=1025"], "fit: row_length must be <= 1024"),
        (
            ["patch.method=fit", "fit.positions=pose", "fit.row_length=256", "fit.batch_tokens=511"],
            "fit.batch_tokens must be >= 512",
        ),
    ],
)
def test_bad_options_say_what_to_change(words, message):
    with pytest.raises(ValueError, match=message):
        options("x", *words)


def test_what_cannot_be_fitted_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="layer_types"):
        finetune(options(tmp_path / "run", *FITTED, "patch.layer_types=[full_attention]"))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for words in (FITTED, TRAINED):
        with pytest.raises(ValueError, match="need whole models in every process"):
            finetune(options(tmp_path / "run", *words))
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    with pytest.raises(ValueError, match="there is no frequency to fit"):
        finetune(options(tmp_path / "run", *TRAINED, "patch.method=nope"))
    assert not (tmp_path / "run").exists()


def test_the_smoke_run_fits_little():
    smoke = read(base=smoke_options(options("x", "patch.method=fit", "fit.steps=500")))
    assert smoke.patch.method == "fit" and smoke.fit.steps == 2
