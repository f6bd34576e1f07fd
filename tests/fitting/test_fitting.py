"""Fits of a table: its steps and checks, what is left alone, and the command."""

from __future__ import annotations

import fcntl
import json
import math

import pytest
import torch
from support.commands import invoke
from support.fits import ASSETS, TEXT, Verdicts, fitted, run_of
from support.prompting import TOKENIZER
from support.tiny import ids, small
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.metrics import Span
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.fitting import SEED_OFFSET, fit_run, held_out_spec
from rope_patch.fitting.fit_cost import spec_within_tokens, tokens_to_fit
from rope_patch.methods import Table
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.locate import locate
from rope_patch.runtime.progress import listen


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- steps and checks


@pytest.mark.parametrize("good", ["step 2", "halfway", "eighth"])
def test_while_no_table_will_do_nearer_ones_are_tried(good):
    better = ((10, 5), ([1.9], [2.9]), 0.1)
    run, verdicts, _, before = run_of(TOKENIZER, lambda name: better if name == good else Verdicts.WORSE)
    names = ["start", "step 2", "step 4", "average", "halfway", "quarter", "eighth"]
    assert [c.name for c in run(4)] == names[: max(3, names.index(good)) + 1]
    if "average" in verdicts.tables:  # of the tables after the third and the fourth step
        torch.testing.assert_close(verdicts.tables["average"], (before[3] + verdicts.tables["step 4"]) / 2)
    for name, share in (("halfway", 0.5), ("eighth", 0.125)):
        if name in verdicts.tables:
            torch.testing.assert_close(verdicts.tables[name], verdicts.tables["average"] * share)


@pytest.mark.parametrize(
    ("now", "share", "left"),
    [
        (((10, 5), ([1.9], [2.9]), 0.2), 0.5, 1.0),  # better
        (((10, 4), ([2.1], [2.9]), 0.2), 0.8, 0.5),  # both are worse: answers come first
        (((10, 8), ([2.1], [2.9]), 0.2), 0.2, 0.5),  # text alone is worse
    ],
)
def test_a_check_turns_a_table_back_and_weighs_what_got_worse(now, share, left):
    """.5 has odds of 1, four times that are .8; and what the next step starts from is so much of what was evaluated."""
    run, verdicts, rates, before = run_of(TOKENIZER, lambda name: now, retrieval=0.5)
    run(4)
    assert [answer / (text + answer) for text, answer in rates] == pytest.approx([0.5] * 2 + [share] * 2)
    assert float(verdicts.tables["step 2"].abs().max()) > 0
    torch.testing.assert_close(before[2], verdicts.tables["step 2"] * left)


def test_text_alone_is_fitted_to_where_it_alone_is_asked_for():
    run, verdicts, rates, before = run_of(TOKENIZER, lambda name: Verdicts.WORSE, retrieval=0)
    run(4)
    assert all(len(rate) == 1 for rate in rates)
    torch.testing.assert_close(before[2], verdicts.tables["step 2"])


def test_the_learning_rate_rises_and_falls_to_zero():
    run, _, rates, _ = run_of(TOKENIZER, lambda name: Verdicts.START, retrieval=0.25)
    run(16)
    assert all(text == pytest.approx(3 * answer) for text, answer in rates)
    whole = [sum(rate) for rate in rates]
    assert whole[:2] == pytest.approx([0.02, 0.04 * 15 / 16]) and whole[-1] == pytest.approx(0.04 / 16)


def test_each_goal_has_its_own_moments():
    """A thousand times the gradient of answers changes no step, neither theirs nor that of text; its sign does."""
    tables = []
    for factor in (1, 1000, -1):
        run, *_ = run_of(TOKENIZER, lambda name: Verdicts.START, change=lambda goal, w, f=factor: w * f if goal else w)
        tables.append(run(2)[-1].method.values)
    assert tables[0] == pytest.approx(tables[1], rel=1e-5) and tables[0] != pytest.approx(tables[2], rel=1e-3)


@pytest.mark.parametrize("cause", ["loss", "table"])
def test_a_fit_that_diverges_is_stopped(cause, monkeypatch):
    if cause == "table":  # the loss was finite, the table after it is not
        monkeypatch.setattr(fit_run, "LEARNING_RATE", 1e7)
    run, *_ = run_of(
        TOKENIZER, lambda name: Verdicts.START, change=lambda goal, w: w * math.inf if cause == "loss" else w
    )
    assert [c.name for c in run(4)] == ["start"]
    assert run.stopped == "diverged at step 1"


def test_a_step_reads_its_rows_at_their_positions():
    run, *_ = run_of(TOKENIZER, lambda name: Verdicts.START, positions="pose")
    model, losses = small(), []
    rope_patch.apply(model, "yarn:factor=1.5", target_length=96)
    for skip in (True, False):
        total = 0.0
        for tokens, _, weights, positions in run.rows(0, 0):
            mask = torch.full((64, 64), torch.finfo(torch.float32).min).triu(1)[None, None]
            places = positions if skip else torch.arange(64)[None]
            with torch.no_grad():
                logits = model(tokens, position_ids=places, attention_mask=mask, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
            )
            total += float((loss * weights[:, 1:].flatten()).sum())
        losses.append(total)
    run(1)
    assert run.losses[0] == pytest.approx(losses[0], abs=1e-4) and abs(losses[0] - losses[1]) > 1e-3


def test_sliding_layers_with_a_table_of_their_own_get_consecutive_positions():
    """Their window counts tokens: behind a skip they would meet distances that no window holds."""
    model, given = small("gemma3"), {0: [], 1: []}
    for layer, several in given.items():
        model.model.layers[layer].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, several=several: (
                several.append((kwargs.get("position_embeddings") or args[1])[0].detach())
                if torch.is_grad_enabled()
                else None
            ),
            with_kwargs=True,
        )
    fitted(model, TOKENIZER, positions="pose", init="abf:factor=10", steps=1)
    consecutive = locate(model).module.original(torch.zeros(1), torch.arange(64)[None], "sliding_attention")[0]
    assert all(torch.equal(cos, consecutive) for cos in given[0])
    assert not any(cos.shape == consecutive.shape and torch.equal(cos, consecutive) for cos in given[1])


# --- the fit


def test_no_steps_give_the_start_bit_for_bit():
    model, other = small(), small()
    patch, expected = fitted(model, TOKENIZER, steps=0), rope_patch.apply(other, "yarn:factor=1.5", target_length=96)
    assert torch.equal(patch.after[None].inv_freq, expected.after[None].inv_freq)
    assert patch.record == expected.record and patch.chosen == "start"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_fitted_table_is_an_ordinary_patch(name, tmp_path):
    model = small(name)
    before, trained = (
        weights_of(model),
        [p.requires_grad_(i % 2 == 0).requires_grad for i, p in enumerate(model.parameters())],
    )
    patch = fitted(model.train(), TOKENIZER, steps=2, init="abf:factor=10")
    assert same(model, before) and model.training and [p.requires_grad for p in model.parameters()] == trained
    table = patch.candidates[1].method
    patch.restore()
    assert rope_patch.inspect(model).record is None
    assert isinstance(table, Table) and rope_patch.parse(str(table)) == table
    rope_patch.apply(model.eval(), table, target_length=96)
    model.save_pretrained(tmp_path)
    plain, rows = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), ids(90, 2)
    with torch.no_grad():
        assert torch.equal(plain(rows).logits, model(rows).logits)
    assert rope_patch.verify(rope_patch.load(tmp_path)).record.to_method() == table


def test_the_prompts_that_decide_are_of_no_seed_of_a_fit():
    specs = [held_out_spec(small(), 96, seed=seed) for seed in (0, 1)]
    assert [spec.seed for spec in specs] == [SEED_OFFSET, SEED_OFFSET + 1] and specs[0].haystack is None


def test_an_interrupted_fit_leaves_the_model_as_it_was():
    model = small()
    original, config = locate(model).module, model.config.to_dict()

    def interrupt(stage, tokens):
        if stage == "step 2: evaluation":
            raise KeyboardInterrupt

    with listen(interrupt), pytest.raises(KeyboardInterrupt):
        fitted(model, TOKENIZER)
    assert locate(model).module is original and model.config.to_dict() == config
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_length": 32}, "below the trained length"),
        ({"init": "yarm"}, "Did you mean 'yarn'"),
        ({"init": "nope"}, "unrotated"),
        ({"init": "yarn@64"}, "long method"),
        ({"steps": -1}, "steps"),
        ({"retrieval": 1.0}, "retrieval"),
        ({"data": TEXT[:900]}, "windows"),
    ],
)
def test_errors_before_anything_is_changed(changes, message):
    model = small()
    original, config = locate(model).module, model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        fitted(model, TOKENIZER, **changes)
    assert locate(model).module is original and model.config.to_dict() == config


def test_layers_that_share_their_table_with_sliding_ones_are_refused():
    model = small("mistral", sliding_window=95)
    with pytest.raises(ValueError, match="one rotary table for all layers"):
        fitted(model, TOKENIZER, positions="pose")
    assert rope_patch.inspect(model).record is None
    assert len(fitted(small("mistral", sliding_window=96), TOKENIZER, positions="pose", steps=1).losses) == 1


def test_a_patched_model_is_refused():
    model = small()
    rope_patch.apply(model, "pi:factor=2")
    with pytest.raises(rope_patch.PatchError, match="already patched"):
        fitted(model, TOKENIZER)


@pytest.mark.full
@pytest.mark.parametrize("positions", ["full", "pose"])
def test_fitting_helps_the_bundled_checkpoint(positions):
    """Better than YaRN on text and prompts that the choice never saw."""
    model = rope_patch.load(ASSETS / "llama", dtype=torch.float32)
    options = {"target_length": 1024, "windows": 4, "samples": 2, "depths": (0.0, 0.5, 1.0), "steps": 12}
    patch = fitted(model, TOKENIZER, None, positions=positions, **options)
    patch.restore()
    yarn, ours = "yarn:factor=4", str(patch.method)
    suite = EvalSuite(EvalSpec([256, 1024], windows=8, bucket=256, samples=2), TOKENIZER)
    comparison = compare(model, TOKENIZER, [yarn, ours], suite)
    for low, high in ((0, 256), (256, 1024)):
        assert comparison.difference(ours, yarn, "perplexity", Span(high, low)).high < 0
        assert comparison.difference(ours, yarn, "retrieval", Span(high, task="passkey")).high >= 0


# --- how much it reads


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_the_tokens_are_those_that_a_fit_reads(steps):
    read = {}

    def note(stage, tokens):
        read[stage] = read.get(stage, 0) + tokens

    with listen(note):
        fitted(small(), TOKENIZER, steps=steps, positions="pose")
    spec = held_out_spec(small(), 96, windows=2, samples=1, depths=(0.0, 1.0))
    for name in ("halfway", "quarter", "eighth"):  # tried where the average is no better than the start
        read.pop(f"{name}: evaluation", 0)
    assert sum(read.values()) == tokens_to_fit(spec, steps, "pose")


def test_a_fit_of_a_large_model_is_evaluated_on_fewer_windows_and_samples():
    spec = held_out_spec(small(), 96)
    tokens = tokens_to_fit(spec, 40, "pose")
    assert spec_within_tokens(spec, 40, "pose", tokens) == spec
    less, least = (spec_within_tokens(spec, 40, "pose", most) for most in (tokens - 1, 1))
    assert tokens_to_fit(less, 40, "pose") < tokens and less.lengths == spec.lengths
    assert (least.windows, least.samples) == (4, 1)


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit") / "tiny"
    small().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    (path.parent / "text.txt").write_text(TEXT)
    return path


def command(folder, out, *words):
    asked = ("fit", folder, "--length", 96, "--text", folder.parent / "text.txt", "--steps", 1, "-o", out)
    return invoke(*asked, *words)


def test_the_command_writes_a_checkpoint(folder, tmp_path):
    out = tmp_path / "out"
    result = command(folder, out, "--retrieval", 0)
    assert result.exit_code == 0 and "Warning: with retrieval=0" in result.stdout, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    report, model = json.loads((out / "fit.json").read_text()), rope_patch.load(out)
    assert str(rope_patch.verify(model).record.to_method()) == report["method"]
    assert [c["name"] for c in report["candidates"]] == ["start", "step 1"] and len(report["losses"]) == 1
    assert ("nothing to gain" in result.stdout) is (report["chosen"] == "start")
    assert "not empty" in command(folder, out).stderr


def test_an_interrupted_command_writes_nothing(folder, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("rope_patch.fitting.fit_run.token_loss", interrupted)
    assert command(folder, tmp_path / "out").exit_code != 0
    assert not (tmp_path / "out").exists()


def test_a_second_fit_into_one_output_is_refused_before_it_begins(folder, tmp_path):
    with (tmp_path / ".out.rope-patch.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another command writes" in command(folder, tmp_path / "out").stderr
