"""Learned tables: gradients, what is left alone, what is chosen, what is kept, and that fitting helps."""

from __future__ import annotations

import fcntl
import functools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import fitting_child
import pytest
import torch
from fits import ASKED, ASSETS, TEXT, Verdicts, candidate, fit_by_name, fitted, run_of
from forks import together
from huggingface_hub import ModelCard
from scored import watched
from states import model_of
from subsets import full
from tiny import ids, small, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from typer.main import get_command
from typer.testing import CliRunner

import rope_patch
from rope_patch import fitting
from rope_patch.cli import app as cli
from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.intervals import paired_shares
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.evaluation.text import builtin_kind, builtin_text
from rope_patch.fitting import CARRIES_OVER, Candidate, Constraint, Objective, TrainableTable, running
from rope_patch.fitting.candidates import SEED, choose
from rope_patch.fitting.candidates import best as best_of
from rope_patch.fitting.card import NO_GAIN, card
from rope_patch.fitting.card import changes as changes_of
from rope_patch.fitting.rows import Rows
from rope_patch.fitting.texts import LOSS_ALONE, POPULATION, SecondDomain, TextPart, fit_texts, second_domain
from rope_patch.frequencies import table_of, unrotated
from rope_patch.methods import Chain, Default, Table
from rope_patch.modeling.loss import token_loss
from rope_patch.modeling.scoring import Reader
from rope_patch.patching.locate import find_rotary


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ASSETS / "llama")


FREE = Constraint(scaling=True)
PARTS = [TextPart("text", TEXT)]


def split_text(data):
    """The text to fit to and the held-out text, where nothing is mixed in."""
    texts = fit_texts(data, 0.0)
    (part,) = texts.parts
    return part.text, texts.held_out


def trainable(model, method="yarn:factor=2", constraint=FREE, kinds=None):
    patch = rope_patch.apply(model, method, layer_types=kinds)
    site = find_rotary(model)
    table = TrainableTable(site.module, patch.record.layer_types, constraint)
    return site, table


def norm(module, offset, x):
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return (offset + module.weight) * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def everything(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(model, before):
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- the trainable table


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "yarn:factor=2"), ("llama", "p_rope:p=0.5"), ("gemma3", "abf:factor=10"), ("phi", "pi:factor=2"),
     ("glm", "default")],
)  # fmt: skip
def test_untrained_it_computes_what_the_patch_computes(name, method):
    model = model_of(name)
    site, table = trainable(model, method)
    for kind in table.kinds:
        where = () if kind is None else (kind,)
        x, places = torch.zeros(1, 1), torch.arange(300)[None]
        for got, expected in zip(table(x, places, *where), site.module(x, places, *where), strict=True):
            assert torch.equal(got, expected)
    (first, *_) = table.kinds
    assert torch.equal(table_of(table.method().values), site.module.tables[first].inv_freq)


@pytest.mark.parametrize(
    "constraint", [FREE, Constraint(band=1.5, monotone=True, scaling=True), Constraint(curve=3, scaling=True)]
)
@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "yarn:factor=2"), ("gemma3", "p_rope:p=0.75"), ("phi", "pi:factor=2"), ("glm", "default")],
)
def test_gradients_are_finite_differences(name, method, constraint):
    model = model_of(name).double()
    site, table = trainable(model, method, constraint)
    rows = ids(40, 2)
    site.put(table)
    for module in model.modules():  # stock norms round to float32 inside
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm, module, 1.0 if "Gemma" in type(module).__name__ else 0.0)
    with torch.no_grad():
        for i, p in enumerate(table.parameters()):  # away from the start
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=p.dtype))

    def loss():
        logits = model(rows, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    loss().backward()
    for p in table.parameters():
        for i in range(p.numel()):
            with torch.no_grad():
                sides = []
                for step in (1e-4, -1e-4):
                    p.view(-1)[i] += step
                    sides.append(float(loss()))
                    p.view(-1)[i] -= step
            assert float(p.grad.view(-1)[i]) == pytest.approx((sides[0] - sides[1]) / 2e-4, abs=1e-6)
    assert max(float(p.grad.abs().max()) for p in table.parameters()) > 1e-5


def test_unrotated_pairs_stay_unrotated_and_constraints_hold():
    model = tiny_model("llama")
    _, table = trainable(model, "p_rope:p=0.5")
    rests = unrotated(find_rotary(model).module.tables[None].inv_freq)
    with torch.no_grad():
        table.log_factors[0].normal_(0, 2, generator=torch.Generator().manual_seed(0))
    frequencies = table_of(table.method().values)
    assert torch.equal(frequencies == 0, rests) and int(rests.sum()) == 4
    assert bool((frequencies[~rests].diff() > 0).any())  # free, pairs overtake each other
    for constraint in (Constraint(band=1.5), Constraint(monotone=True), Constraint(curve=2)):
        bound = TrainableTable(find_rotary(model).module, (None,), constraint)
        with torch.no_grad():
            bound.log_factors[0].copy_(table.log_factors[0][: len(bound.log_factors[0])])
        bounded, start = bound.table(None)[0].detach()[~rests], find_rotary(model).module.table()[~rests].double()
        factors = bounded / start
        if constraint.band:
            assert float(factors.log().abs().max()) <= math.log(1.5) < float(table.log_factors[0].detach().abs().max())
        if constraint.monotone:
            assert bool((bounded.diff() <= 0).all())
        if constraint.curve:
            places = (torch.arange(4).double() + 0.5) / 4
            basis = torch.stack([torch.ones(4).double(), torch.cos(math.pi * places)], 1)
            curve = factors.log() * (1 + start * 64 / (2 * math.pi))
            left = curve - basis @ torch.linalg.lstsq(basis, curve).solution
            assert float(left.abs().max()) < 1e-9


def test_a_cast_is_refused():
    model = tiny_model("llama")
    site, table = trainable(model)
    site.put(table)
    for cast in (model.bfloat16, model.half, model.float, lambda: model.to(torch.bfloat16)):
        with pytest.raises(TypeError, match="a cast would round the table that is being fitted"):
            cast()
    assert model.to("cpu") is model and table.log_factors[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trainable(tiny_model("llama"), "nope"), "are unrotated: there is no frequency to fit"),
        (lambda: trainable(tiny_model("llama"), "table:values=1/2/3/4/5/6/7/8", Constraint(monotone=True)), "in order"),
        (lambda: Constraint(band=1.0), "band must be a factor > 1, got 1.0"),
        (lambda: Constraint(curve=0), "curve must be >= 1"),
        (lambda: Objective(retrieval=1.0), r"retrieval must be in \[0, 1\), got 1.0"),
        (lambda: Objective(retrieval=-0.1), r"retrieval must be in \[0, 1\), got -0.1"),
        (lambda: Objective(full=1.5), r"full must be in \[0, 1\]"),
        (lambda: Objective(task="keys"), "unknown task 'keys'"),
    ],
)
def test_what_cannot_be_fitted(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_table_for_layers_of_one_type_leaves_others_alone():
    model = tiny_model("gemma3")
    kinds = ("full_attention", "sliding_attention")
    tables = {kind: tuple(2.0 ** -(i + n) for n in range(8)) for i, kind in enumerate(kinds)}
    chain = [Table(values, layer_type=kind) for kind, values in tables.items()]
    patch = rope_patch.apply(model, chain, layer_types=kinds)
    for kind, values in tables.items():
        torch.testing.assert_close(patch.after[kind].inv_freq, torch.tensor(values), rtol=1e-6, atol=0)
    assert rope_patch.parse(str(patch.method)) == patch.method
    for word in ("", "a:b", "a+b", "a,b"):
        with pytest.raises(ValueError, match="layer_type must be a word"):
            Table(layer_type=word)


# --- rows


def test_rows_are_of_text_and_of_prompts(tokenizer):
    rows = Rows(tokenizer, PARTS, Objective(full=0.5), 64, 128, 640, seed=1)
    lengths = []
    for step in range(50):
        for goal in (0, 1):
            whole, count = 0.0, 0
            for tokens, labels, weights, _ in rows(step, goal):
                lengths += [tokens.shape[1]] * len(tokens)
                whole, count = whole + float(weights.sum()), count + len(tokens)
                assert torch.equal(labels == -100, weights == 0)
                assert torch.equal(labels[weights > 0], tokens[weights > 0])
                for row, weight in zip(tokens, weights, strict=True):
                    decoded = tokenizer.decode(row)
                    assert len(set(weight[weight > 0].tolist())) == 1
                    if goal == 0:
                        assert "pass key" not in decoded and int((weight == 0).sum()) == 1 and weight[0] == 0
                    else:
                        (digits,) = re.findall(r"pass key is (\d{5})\. Remember", decoded)
                        assert tokenizer.decode(row[weight > 0]) == digits and decoded.endswith(f" {digits}")
            every = 640 // lengths[-1]
            assert whole == pytest.approx(1) and count == (every // 2 if goal else every - every // 2)
    assert min(lengths) < 70 and max(lengths) == 128
    again = Rows(tokenizer, PARTS, Objective(full=0.5), 64, 128, 640, seed=1)
    for goal in (0, 1):
        whole = [row for part in rows(7, goal) for row in part[0].tolist()]
        halves = [[row for part in again(7, goal, share, 2) for row in part[0].tolist()] for share in (0, 1)]
        assert sorted(map(tuple, whole)) == sorted(map(tuple, halves[0] + halves[1])) and all(halves)
        assert sum(float(part[2].sum()) for share in (0, 1) for part in again(7, goal, share, 2)) == pytest.approx(1)
    alone = Rows(tokenizer, PARTS, Objective(retrieval=0.0), 128, 128, 256, seed=1)
    tokens = torch.cat([part[0] for part in alone(7, 0)])
    assert len(tokens) == 2 and alone.goals == 1
    Rows(tokenizer, PARTS, Objective(retrieval=0.0), 128, 128, 128, seed=1)
    with pytest.raises(
        ValueError, match="batch_tokens must be >= 256, a row of text and one of retrieval of the target, got 255"
    ):
        Rows(tokenizer, PARTS, Objective(), 128, 128, 255, seed=1)


def test_needles_lie_anywhere_and_often_at_the_ends(tokenizer):
    rows = Rows(tokenizer, PARTS, Objective(), 128, 128, 512, seed=1)
    prompt_texts = [
        tokenizer.decode(row, skip_special_tokens=True)
        for step in range(100)
        for part in rows(step, 1)
        for row in part[0]
    ]
    first = [row.lstrip().startswith("The pass key is") for row in prompt_texts]
    last = [bool(re.search(r"Remember it\. What is the pass key", row)) for row in prompt_texts]
    assert len(prompt_texts) == 200 and all(0.15 < sum(hits) / 200 < 0.35 for hits in (first, last))
    assert any(not a and not b for a, b in zip(first, last, strict=True))


def test_prompts_hold_all_needles_of_a_joined_task(tokenizer):
    rows = Rows(tokenizer, PARTS, Objective(task="multivalue"), 192, 256, 512, seed=1)
    for tokens, _, weights, _ in (part for step in range(4) for part in rows(step, 1)):
        for row, weight in zip(tokens, weights, strict=True):
            decoded = tokenizer.decode(row)
            hidden = re.findall(r"One magic number of \w+ is (\d{7})\.", decoded)
            assert len(hidden) == 4 and decoded.endswith(f" {', '.join(hidden)}")
            assert tokenizer.decode(row[weight > 0]) == ", ".join(hidden)
    with pytest.raises(ValueError, match="needs at least"):
        Rows(tokenizer, PARTS, Objective(task="multivalue"), 32, 256, 512, seed=1).check()


def test_a_row_that_fits_nowhere_is_drawn_again(tokenizer, monkeypatch):
    rows = Rows(tokenizer, PARTS, Objective(), 128, 128, 512, seed=1)
    original, asked = rows.makers[0].prompts, []

    def prompts(*args, **options):
        asked.append(options["seed"])
        if len(asked) < 3:
            raise ValueError("found no haystack of exactly 100 tokens")
        return original(*args, **options)

    monkeypatch.setattr(rows.makers[0], "prompts", prompts)
    next(iter(rows(0, 1)))
    assert len(set(asked[:3])) == 3
    monkeypatch.setattr(rows.makers[0], "prompts", lambda *args, **options: original("passkey", 4, [0.5]))
    with pytest.raises(ValueError, match="needs at least"):
        next(iter(rows(0, 1)))


def test_held_out_text_is_not_fitted_to():
    train, held = split_text(TEXT)
    assert train + held == TEXT and len(held) == pytest.approx(len(TEXT) / 10, rel=0.01)
    assert split_text([TEXT[:100], TEXT[100:]]) == split_text(TEXT[:100] + "\n\n" + TEXT[100:])


# --- what is chosen


@pytest.mark.parametrize(
    ("others", "best"),
    [
        ([("a", (10, 4), (1.0, 1.0), 0.2)], "start"),  # better everywhere, but for a prompt
        ([("a", (10, 5), (2.1, 1.0))], "start"),  # or for one bucket
        ([("a", (4, 10), (1.0, 1.0))], "start"),  # or for one length, significantly
        ([("a", (9, 6), (1.9, 2.9))], "a"),  # a prompt here for one there
        ([("a", (10, 4), (1.9, 2.9), 0.11)], "start"),  # one prompt less, answers less probable
        ([("a", (10, 4), (1.9, 2.9), 0.1)], "a"),  # one less, answers as probable: chance
        ([("a", (4, 10), (1.9, 2.9), 0.05)], "start"),  # a length significantly worse
        ([("a", (7, 2), (1.9, 2.9), 0.05)], "start"),  # no length significantly, both together are
        ([("a", (10, 5), (1.9, 2.9)), ("b", (10, 6), (2.0, 3.0), 0.09)], "b"),  # retrieval first
        ([("a", (10, 5), (1.9, 2.9)), ("b", (10, 5), (1.9, 2.8))], "b"),  # then perplexity
        ([("a", (10, 5), (2.0, 3.0))], "start"),  # the first of equals
    ],
)
def test_what_is_chosen_is_never_worse(others, best):
    start = candidate("start", (10, 5), (2.0, 3.0))
    assert best_of([start, *(candidate(*other) for other in others)]).name == best


def second(*losses):
    """Losses of four windows of the second domain, in two buckets."""
    return dict(zip((64, 128), losses, strict=True))


EVEN = (2.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        (second((1.9, 2.0, 2.0, 2.0), EVEN), "a"),  # better
        (second(EVEN, EVEN), "a"),  # the same
        (second((2.1, 2.0, 1.9, 2.1), EVEN), "start"),  # worse on average, though not significantly
        (second((1.0, 1.9, 1.8, 1.9), (2.10, 2.11, 2.09, 2.10)), "start"),  # far positions significantly worse
        (second((1.0, 1.9, 1.8, 1.9), (2.3, 2.0, 2.0, 2.0)), "a"),  # far positions worse, but not significantly
    ],
)
def test_a_table_that_is_worse_on_the_second_domain_is_not_chosen(losses, best):
    """By hand: of 2.10 2.11 2.09 2.10 against 2 the mean is .1, Student's interval of 4 windows .1 ± 3.18 * .0041."""
    start = candidate("start", (10, 5), (2.0, 3.0), second=second(EVEN, EVEN))
    other = candidate("a", (10, 5), (1.9, 2.9), second=losses)
    assert best_of([start, other]).name == best


def test_of_tables_that_read_the_fits_text_alike_the_one_is_chosen_that_reads_the_second_domain_better():
    start = candidate("start", (10, 5), (2.0, 3.0), second=second(EVEN, EVEN))
    others = [
        candidate(name, (10, 5), (1.9, 2.9), second=second((value,) * 4, EVEN))
        for name, value in (("a", 1.9), ("b", 1.8))
    ]
    assert best_of([start, *others]).name == "b"


def test_prompts_of_one_haystack_count_as_few():
    """Of twenty prompts 15 against 5: significant if they were independent, not if whole haystacks stand or fall."""
    start, other = (
        Candidate(name, Default(), {64: haystacks}, 0.1, {64: (2.0,)})
        for name, haystacks in (
            ("start", ((True,) * 5, (True,) * 5, (True,) * 5, (False,) * 5)),
            ("a", ((True,) * 5, (False,) * 5, (False,) * 5, (False,) * 5)),
        )
    )
    assert paired_shares(other.hits[64], start.hits[64])[1] < 0
    assert other.retrieval_changes(start)[64].high > 0 and other.finds_no_less(start)


@pytest.mark.parametrize(
    ("text", "found", "said"),
    [
        ((2.0, 2.1, 1.9, 2.0), 1, True),  # as the start
        ((1.9, 2.1, 1.8, 2.1), 1, True),  # better, but not significantly
        ((1.9, 2.0, 1.8, 1.9), 1, False),  # .1 nats in every window
        ((2.0, 2.1, 1.9, 2.0), 8, False),  # the passkeys of all eight haystacks, in place of those of one
    ],
)
def test_a_table_in_use_without_a_significant_gain_says_so(text, found, said):
    start, winner = (
        Candidate(name, Default(), {64: tuple((n < haystacks,) * 5 for n in range(8))}, 0.1, {64: losses})
        for name, haystacks, losses in (("start", 1, (2.0, 2.1, 1.9, 2.0)), ("step 8", found, text))
    )
    assert (NO_GAIN in changes_of(winner, start, SecondDomain())) == said


# --- several kinds of text


def test_one_text_is_one_kind_and_code_is_mixed_in():
    texts = fit_texts(TEXT, 0.25)
    own, code = texts.parts
    assert (own.text, texts.held_out) == split_text(TEXT) and (own.share, code.share) == (0.75, 0.25)
    assert code.text == builtin_kind("source").text and "one text is one kind" in texts.why
    assert texts.describe().startswith("75% the given text and 25% code that ships with CPython ")


@pytest.mark.parametrize(
    ("data", "mix", "names", "why"),
    [
        (TEXT, 0.0, ["the given text"], "nothing was added, as mix=0"),
        ({"a": TEXT[:9000], "b": TEXT[9000:]}, 0.5, ["a", "b"], "several kinds, and nothing was added"),
        (None, 0.5, ["code that ships with CPython"], "no text was given"),
        (builtin_text("heldout"), 0.5, ["text that ships with CPython"], "the built-in text was given"),
    ],
)
def test_nothing_is_mixed_into(data, mix, names, why):
    texts = fit_texts(data, mix)
    assert why in texts.why and len(texts.parts) == len(names)
    for part, name in zip(texts.parts, names, strict=True):
        assert part.name.startswith(name) and part.share == 1 / len(names)


def test_rows_of_a_mixture_are_drawn_from_its_texts_by_their_shares(tokenizer):
    """Of some 200 rows of either goal three quarters are of b, by the letters that only one text has."""
    parts = [TextPart("a", "xylophone " * 3000, 0.25), TextPart("b", "marmalade " * 3000, 0.75)]
    rows = Rows(tokenizer, parts, Objective(), 128, 128, 512, seed=1)
    for goal in (0, 1):
        decoded = [tokenizer.decode(row) for step in range(100) for part in rows(step, goal) for row in part[0]]
        shares = [sum(word in row for row in decoded) / len(decoded) for word in ("xylo", "marma")]
        assert sum(shares) == 1 and shares[1] == pytest.approx(0.75, abs=0.1)


def test_the_texts_of_a_mixture_take_turns(tokenizer):
    """Of ten rows in a row a text has within one of its share: a loss that rises is not that of what was drawn."""
    rows = Rows(tokenizer, [TextPart("a", TEXT, 0.5), TextPart("b", TEXT, 0.5)], Objective(), 64, 128, 640, seed=1)
    names = [rows._take(number)[0].name for number in range(200)]
    assert {names[low : low + 10].count("a") for low in range(190)} <= {4, 5, 6}


def test_a_text_that_is_harder_than_the_other_is_no_divergence(tokenizer):
    """One row a step, those of b three nats harder: six of ten against four of ten are .6 nats apart."""
    run, *_ = run_of(tokenizer, Verdicts(), texts=[TextPart("a", TEXT, 0.5), TextPart("b", TEXT, 0.5)])
    for seed in range(60):
        losses = [4.0 if run.rows._take(seed + step)[0].name == "a" else 7.0 for step in range(40)]
        for count in range(1, 41):
            run.losses = losses[:count]
            assert not run._diverged()
    run.losses = [4.0] * 12 + [6.0] * 10
    assert run._diverged()


def test_the_second_domain_is_text_that_the_fit_did_not_see(tokenizer):
    given = second_domain(tokenizer, True, TEXT, 96, 3)
    whole = builtin_kind("reference").text
    assert len(given.windows) == 3 and "documentation" in given.name
    for window in given.windows:
        assert tokenizer.decode(window.ids[1:]).strip()[10:-10] in whole
    assert not set(builtin_kind("reference").documents) & set(builtin_kind("source").documents)
    assert len(second_domain(tokenizer, TEXT[:1000], TEXT, 96, 100).windows) < 16, "as many as there is room for"
    assert "no second domain" in second_domain(tokenizer, True, TEXT, 1 << 20, 3).why
    assert "as second=False" in second_domain(tokenizer, False, TEXT, 96, 3).why
    with pytest.raises(ValueError, match="1 windows of 4096 tokens need"):
        second_domain(tokenizer, TEXT[:900], TEXT, 4096, 3)


# --- fitting


def test_no_steps_give_the_start_bit_for_bit(tokenizer):
    model, other = small(), small()
    before = everything(model)
    patch = fitted(model, tokenizer, steps=0)
    expected = rope_patch.apply(other, "yarn:factor=1.5", target_length=96)
    assert torch.equal(patch.after[None].inv_freq, expected.after[None].inv_freq)
    assert patch.record == expected.record and patch.chosen == "yarn:factor=1.5, start"
    assert same(model, before) and rope_patch.verify(model)


@pytest.mark.parametrize("kinds", [None, ("full_attention",), ("full_attention", "sliding_attention")])
def test_saved_it_loads_in_plain_transformers(tokenizer, tmp_path, kinds):
    model = small("llama" if kinds is None else "gemma3")
    patch = fitted(model, tokenizer, layer_types=kinds, init="abf:factor=10", checks=1)
    average = next(c for c in patch.candidates["abf:factor=10"] if c.name == "average").method
    assert isinstance(average, Chain) is (kinds is not None and len(kinds) == 2)
    assert rope_patch.parse(str(average)) == average
    patch = rope_patch.apply(model, average, layer_types=kinds, target_length=96, replace=True)
    tables = [slot.inv_freq for slot in patch.after.values()]
    assert len(tables) == 1 or not torch.equal(*tables)
    model.save_pretrained(tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rows = ids(90, 2)
    with torch.no_grad():
        assert torch.equal(stock(rows).logits, model(rows).logits)
    again = rope_patch.load(tmp_path, dtype=torch.float32)
    assert rope_patch.verify(again).record.to_method() == average


@pytest.mark.parametrize("good", ["step 2", "halfway", "quarter", "eighth"])
def test_while_no_table_will_do_nearer_ones_are_tried(tokenizer, good):
    run, *_ = run_of(tokenizer, Verdicts(lambda name: name == good))
    candidates = run(4, 0.04, 2, 3, False)
    tried = ["start", "step 2", "step 4", "average", "halfway", "quarter", "eighth"]
    assert [c.name for c in candidates] == tried[: max(3, tried.index(good)) + 1]
    assert best_of(candidates).name == good
    if good == "step 2":
        return
    found_on = rope_patch.apply(small(), "default").before[None]
    by_name = {c.name: torch.tensor(c.method(found_on).inv_freq.tolist()).log() for c in candidates}
    moved, whole = by_name[good] - by_name["start"], by_name["average"] - by_name["start"]
    torch.testing.assert_close(
        moved, whole * {"halfway": 0.5, "quarter": 0.25, "eighth": 0.125}[good], atol=1e-6, rtol=0
    )


def test_several_starts_are_compared(tokenizer):
    patch = fitted(small(), tokenizer, init=["yarn", "pi", "p_rope:p=0.5"])
    assert list(patch.candidates) == ["yarn:factor=1.5", "pi:factor=1.5", "p_rope:p=0.5"]
    assert [c.name for c in patch.candidates["pi:factor=1.5"]][:4] == ["start", "step 2", "step 4", "average"]
    best = {label: best_of(candidates) for label, candidates in patch.candidates.items()}
    label, _, name = patch.chosen.rpartition(", ")
    reached = {label: max(best[label].rank, candidates[0].rank) for label, candidates in patch.candidates.items()}
    assert best[label].name == name and reached[label] == max(reached.values())


def test_a_table_that_beats_its_start_beats_what_that_start_beats():
    """The first start answers most; what is fitted from it answers one prompt less, by chance."""
    start, other = candidate("start", (10, 6), (2.0, 3.0)), candidate("start", (9, 6), (3.0, 3.0))
    after = candidate("average", (9, 6), (1.9, 2.9), 0.09)
    assert choose({"yarn": (start, after), "pi": (other,)}) == ("yarn", after)
    assert choose({"pi": (other,), "yarn": (start,)}) == ("yarn", start)


def test_a_fit_that_diverges_is_stopped(tokenizer):
    model = small()
    patch = fitted(model, tokenizer, learning_rate=200.0, steps=12, checks=3)
    (why,) = patch.stopped.values()
    candidates = patch.candidates["yarn:factor=1.5"]
    assert "diverged at step" in why
    assert rope_patch.verify(model) and best_of(candidates).method == patch.method


@pytest.mark.parametrize(
    ("steps", "since", "factor", "diverged"),
    [(10, 5, 1.3, True), (10, 5, 1.05, False), (4, 1, 2.0, False)],  # of some 7 nats; four steps are too few to tell
)
def test_a_loss_that_rises_by_more_than_a_nat_is_a_divergence(tokenizer, steps, since, factor, diverged):
    def change(step, goal, weights):
        return weights * (factor if step >= since else 1.0)

    run, *_ = run_of(tokenizer, Verdicts(), change=change)
    run(steps, 0.01, 1, 3, False)
    assert run.stopped.startswith("diverged at step") is diverged
    assert len(run.losses) == steps or diverged


def test_a_table_that_no_config_can_state_is_a_divergence(tokenizer):
    """One step is enough: the loss was finite, the table after it is not."""
    patch = fitted(small(), tokenizer, init=["pi", "yarn"], learning_rate=1e7, steps=1, checks=1)
    assert all(why.startswith("diverged at step 1") for why in patch.stopped.values()) and len(patch.stopped) == 2
    assert patch.chosen.endswith(", start")


def test_the_average_is_of_steps_that_were_evaluated(tokenizer):
    """Steps 6 and 7 of 12 count; step 8 was taken in the part that diverged at step 9."""
    verdicts = Verdicts(lambda name: True)
    run, _, _, after = run_of(tokenizer, verdicts, change=lambda step, goal, w: w * (math.inf if step == 9 else 1))
    run(12, 0.04, 3, 9, False)
    assert run.stopped == "diverged at step 10 (loss inf)" and len(after) == 9
    torch.testing.assert_close(verdicts.log_factors_of["average"], (after[6] + after[7]) / 2)


def test_a_fit_that_learns_nothing_is_stopped_early(tokenizer):
    run, *_ = run_of(tokenizer, Verdicts(loss=lambda verdict: 1.0))
    run(8, 0.04, 4, 2, False)
    assert run.stopped == "no better after step 4" and len(run.losses) == 4


def test_the_learning_rate_rises_and_falls_to_zero(tokenizer):
    run, rates, *_ = run_of(tokenizer, Verdicts(), objective=Objective(retrieval=0.25))
    run(16, 0.01, 1, 3, False)
    assert all(rate == pytest.approx([3 * rate[1], rate[1]]) for rate in rates) and len(rates) == 16
    whole = [sum(rate) for rate in rates]
    assert whole[:2] == pytest.approx([0.005, 0.01 * 15 / 16]) and whole[-1] == pytest.approx(0.01 / 16)


@pytest.mark.parametrize(
    ("now", "share", "remaining"),
    [
        (((10, 5), (1.9, 2.9), 0.1), 0.5, 1.0),
        full(((10, 5), (1.9, 2.9), 0.2), 0.5, 1.0),  # as many are found
        full(((10, 4), (1.9, 2.9), 0.2), 0.8, 0.5),
        (((10, 4), (2.1, 2.9), 0.2), 0.8, 0.5),  # both are worse: answers come first
        (((4, 10), (1.9, 2.9), 0.05), 0.8, 0.5),  # significantly fewer at one length, however probable
        full(((10, 5), (2.1, 2.9), 0.05), 0.2, 0.5),
        (((10, 8), (2.1, 2.9), 0.2), 0.2, 0.5),  # more are found, though less probable on average
    ],
)
def test_a_check_changes_the_weight_of_answers(tokenizer, now, share, remaining):
    """.5 has odds of 1, four times that are .8; and what the next step starts from is so much of what was evaluated."""
    verdicts = Verdicts(scores=now)
    run, rates, before, _ = run_of(tokenizer, verdicts, objective=Objective(retrieval=0.5))
    run(8, 0.04, 2, 3, False)
    shares = [answer / (plain + answer) for plain, answer in rates]
    assert shares == pytest.approx([0.5] * 4 + [share] * 4)
    assert float(verdicts.log_factors_of["step 4"].abs().max()) > 0
    torch.testing.assert_close(before[4], verdicts.log_factors_of["step 4"] * remaining)


def test_the_average_is_of_steps_after_the_last_turn(tokenizer):
    verdicts = Verdicts()
    run, _, _, after = run_of(tokenizer, verdicts)
    run(8, 0.04, 4, 9, False)
    torch.testing.assert_close(verdicts.log_factors_of["average"], (after[6] + after[7]) / 2)


def test_text_alone_is_fitted_to_where_it_alone_is_asked_for(tokenizer):
    """No check turns it back: there is no weight to change."""
    losses = []
    for good in (True, False):
        run, *_ = run_of(tokenizer, Verdicts(lambda name, good=good: good), objective=Objective(retrieval=0))
        run(4, 0.04, 2, 3, False)
        losses.append(run.losses)
    assert losses[0] == losses[1]


def test_each_goal_has_its_own_moments(tokenizer):
    """A thousand times the gradient of answers changes no step, neither theirs nor that of text; its sign does."""
    tables = []
    for factor in (1, 1000, -1):
        run, *_ = run_of(tokenizer, Verdicts(), change=lambda step, goal, w, f=factor: w * f if goal else w)
        tables.append(run(4, 0.04, 1, 3, False)[1].method.values)
    assert tables[0] == pytest.approx(tables[1], rel=1e-5) and tables[0] != pytest.approx(tables[2], rel=1e-3)


def test_what_decides_was_not_fitted_to(tokenizer, monkeypatch):
    """Held-out windows and haystacks are of the last tenth, and no prompt is of a training seed."""
    suites = []

    def noted(*args, **kwargs):
        suites.append(EvalSuite(*args, **kwargs))
        return suites[-1]

    monkeypatch.setattr(fitting, "EvalSuite", noted)
    fitted(small(), tokenizer, steps=0)
    (suite,), (_, held) = suites, split_text(TEXT)
    for window in suite.windows:
        words = tokenizer.decode(window.ids[1:]).strip()[20:-20]
        assert words in held and words not in split_text(TEXT)[0]
    assert suite.prompts.haystack.text == held
    assert suite.spec.seed >= SEED


def test_a_loss_that_is_no_number_stops_a_fit(tokenizer):
    run, _, _, after = run_of(tokenizer, Verdicts(), change=lambda step, goal, weights: weights * math.nan)
    candidates = run(4, 0.04, 2, 3, False)
    assert run.stopped == "diverged at step 1 (loss inf)" and not after
    assert [c.name for c in candidates] == ["start"]


@pytest.mark.parametrize("turned", [False, True])
def test_an_interrupted_start_goes_on(tokenizer, turned):
    """In the fourth step of four, the second was kept: moments, sums, what a check turned back."""
    result_cache, stops, steps = {}, [3], []

    def interrupt(step, goal, weights):
        if step in stops:
            raise KeyboardInterrupt
        steps.append(step)
        return weights

    def begun(result_cache, change=None):
        run, *_ = run_of(tokenizer, Verdicts(lambda name: not turned), result_cache=result_cache, change=change)
        return run

    whole = begun(None)
    candidates = whole(4, 0.04, 2, 3, False)
    with pytest.raises(KeyboardInterrupt):
        begun(result_cache, interrupt)(4, 0.04, 2, 3, False)
    stops.clear()
    steps.clear()
    again = begun(result_cache, interrupt)
    assert again(4, 0.04, 2, 3, False) == candidates and again.losses == whole.losses
    assert set(steps) == {2, 3}


def test_an_interrupted_fit_goes_on(tokenizer, tmp_path):
    """The model is as it was; the same call takes up what its file holds, another call does not."""
    result_cache, stages = tmp_path / "finished.jsonl", []

    def interrupt(stage, tokens):
        stages.append(stage)
        if stage.endswith(": fitting") and "step 2: evaluation" in stages:
            raise KeyboardInterrupt

    whole, model = fitted(small(), tokenizer), small()
    stock = find_rotary(model).module
    with pytest.raises(KeyboardInterrupt):
        fitted(model, tokenizer, resume=result_cache, on_progress=interrupt)
    assert find_rotary(model).module is stock and rope_patch.inspect(model).record is None
    assert all(p.requires_grad for p in model.parameters())
    patch = fitted(model, tokenizer, resume=result_cache)
    assert patch.candidates == whole.candidates and patch.losses == whole.losses and patch.chosen == whole.chosen
    model = small()
    with watched(model.model, lambda *_, **__: pytest.fail("something was read twice")):
        assert fitted(model, tokenizer, resume=result_cache).candidates == whole.candidates
    other = fitted(small(), tokenizer, resume=result_cache, seed=1)
    assert other.losses != whole.losses


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": Objective(retrieval=0.2)},
        full({"constraint": Constraint(band=1.01)}),
        full({"learning_rate": 0.05}),
        full({"batch_tokens": 288}),
        {"haystack": "noise"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_kept_is_of_the_same_call(tokenizer, changes):
    result_cache, fewer = {}, {"steps": 2, "checks": 1, "windows": 1}
    fitted(small(), tokenizer, resume=result_cache, **fewer)
    again, fresh = (fitted(small(), tokenizer, resume=resume, **fewer, **changes) for resume in (result_cache, None))
    assert again.losses == fresh.losses and again.candidates == fresh.candidates


def test_a_fit_with_other_options_takes_its_own_steps(tokenizer):
    result_cache, fewer = {}, {"steps": 1, "checks": 1, "windows": 1}

    def states():
        return sum(isinstance(value, dict) and "parts" in value for value in result_cache.values())

    for changes in ({}, {"constraint": Constraint(band=1.01)}, {"learning_rate": 0.05}, {"batch_tokens": 288}):
        before = states()
        fitted(small(), tokenizer, resume=result_cache, **fewer, **changes)
        assert states() == before + 1, changes


def test_checkpointing_changes_nothing(tokenizer):
    plain, thrifty = (fitted(small(), tokenizer, checkpointing=value) for value in (False, True))
    for one, other in zip(*(patch.losses["yarn:factor=1.5"] for patch in (plain, thrifty)), strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    model = small()
    fitted(model, tokenizer, checkpointing=True)
    assert not running._checkpointed(model)
    model.gradient_checkpointing_enable()
    fitted(model, tokenizer, checkpointing=True, replace=True)
    assert running._checkpointed(model), "it was on before"


def test_a_fit_is_without_dropout(tokenizer):
    plain, thrifty = (fitted(small(attention_dropout=0.5).train(), tokenizer, checkpointing=c) for c in (False, True))
    assert plain.losses["yarn:factor=1.5"] == pytest.approx(thrifty.losses["yarn:factor=1.5"], abs=1e-5)


def test_bfloat16(tokenizer):
    model = small().bfloat16()
    patch = fitted(model, tokenizer)
    assert all(math.isfinite(loss) for loss in patch.losses["yarn:factor=1.5"])
    assert model.dtype == torch.bfloat16 and rope_patch.verify(model)


def test_gradients_pass_through_four_bits(tokenizer, tmp_path):
    small().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    )
    packed = model.model.layers[0].self_attn.q_proj.weight.clone()
    site, table = trainable(model)
    site.put(table)
    reader, rows = Reader(model), ids(40, 2)
    loss, _ = token_loss(reader, reader.decoder(input_ids=rows, use_cache=False).last_hidden_state, rows)
    loss.backward()
    assert float(table.log_factors[0].grad.abs().max()) > 0
    site.put(site.module)
    rope_patch.restore(model)
    fitted(model, tokenizer)
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, packed)


def test_two_processes_do_what_one_does(tokenizer, tmp_path):
    together(lambda rank: fitting_child.main(tmp_path), tmp_path)
    patch = fitted(small(), tokenizer)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert one == other
    losses, chosen, table = one
    assert losses["yarn:factor=1.5"] == pytest.approx(patch.losses["yarn:factor=1.5"], abs=1e-5)
    assert chosen == patch.chosen and table == pytest.approx(patch.after[None].inv_freq.tolist(), rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_length": "1k"}, "target_length must be a whole number of tokens, got '1k'"),
        ({"target_length": 32}, "the target of 32 tokens lies below the trained length of 64"),
        ({"target_length": 1 << 20, "batch_tokens": None}, "windows of 1048576 tokens need"),
        ({"init": []}, "init names no table"),
        ({"init": ["yarn", "yarn:factor=1.5"]}, "starts must differ"),
        ({"init": "yarm"}, "Did you mean 'yarn'"),
        ({"init": "nope"}, "are unrotated: there is no frequency to fit"),
        ({"steps": -1}, "steps must be >= 0, got -1"),
        ({"checks": 0}, "checks must be >= 1"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
        (
            {"batch_tokens": 64},
            "batch_tokens must be >= 192, a row of text and one of retrieval of the target, got 64",
        ),
        ({"layer_types": ["full_attention"]}, "this model has one table for all layers"),
    ],
)
def test_errors_before_anything_is_changed(tokenizer, changes, message):
    model = small()
    stock, config = find_rotary(model).module, model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        fitted(model, tokenizer, **changes)
    assert find_rotary(model).module is stock and model.config.to_dict() == config


def test_a_text_that_is_too_short(tokenizer):
    with pytest.raises(ValueError, match="2 windows of 96 tokens need"):
        fit_by_name(small(), tokenizer, TEXT[:900], **ASKED)


def test_a_patched_model_needs_replace(tokenizer):
    model = small()
    rope_patch.apply(model, "pi:factor=2")
    with pytest.raises(rope_patch.PatchError, match="already patched"):
        fitted(model, tokenizer)
    patch = fitted(model, tokenizer, replace=True)
    patch.restore()
    assert str(rope_patch.verify(model).record.to_method()) == "pi:factor=2"


def fit_bundled(tokenizer, target_length, **options):
    """Six steps on the bundled checkpoint at a longer context; the model, its patch, and what was before them."""
    model = rope_patch.load(ASSETS / "llama", dtype=torch.float32)
    model.lm_head.weight.requires_grad_(False)
    model.train()
    before = everything(model), [p.requires_grad for p in model.parameters()]
    asked = {"steps": 6, "windows": 4, "depths": (0.0, 0.5, 1.0), **options}
    return model, fit_by_name(model, tokenizer, target_length=target_length, **asked), *before


@pytest.mark.slow
def test_fitting_touches_nothing_but_the_table(tokenizer):
    model, patch, before, asked = fit_bundled(tokenizer, 512, checks=1, samples=1, batch_tokens=2048)
    assert patch.chosen != "yarn:factor=2, start"
    assert same(model, before) and [p.requires_grad for p in model.parameters()] == asked
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert isinstance(patch.method, Table) and len(patch.losses["yarn:factor=2"]) == 6
    yarn = rope_patch.load(ASSETS / "llama", "yarn:factor=2").model.rotary_emb.tables[None].inv_freq
    moved = patch.after[None].inv_freq / yarn
    assert 0.01 < float(moved.log().abs().max()) < 0.25  # by less than 6 steps of .04
    assert rope_patch.verify(model)
    patch.restore()
    assert rope_patch.inspect(model).record is None and same(model, before)


@pytest.mark.full
def test_fitting_helps_the_bundled_checkpoint(tokenizer):
    """Better than YaRN on text and prompts that the choice never saw."""
    model, patch, *_ = fit_bundled(tokenizer, 1024, checks=2, samples=2)
    model.eval()
    patch.restore()
    methods = ["yarn:factor=4", patch.method]
    comparison = compare(model, tokenizer, methods, EvalSpec([256, 1024], windows=8, bucket=256, samples=2))
    for low, high in ((0, 256), (256, 1024)):
        assert comparison.difference(str(patch.method), methods[0], "perplexity", high, low).high < 0
    for length in (256, 1024):
        assert comparison.difference(str(patch.method), methods[0], "retrieval", length).high >= 0


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit") / "tiny"
    small().save_pretrained(path)
    AutoTokenizer.from_pretrained(ASSETS / "llama").save_pretrained(path)
    (path.parent / "text.txt").write_text(TEXT)
    return path


def command(*words):
    result = CliRunner().invoke(cli.app, ["fit", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def words(folder, out):
    asked = ("--target-length", 96, "--text", folder.parent / "text.txt", "--steps", 4, "--checks", 2, "--windows", 2)
    alone = ("--mix", 0, "--second-text", "none")
    return (folder, *asked, *alone, "--samples", 1, "--depths", "0 1", "--batch-tokens", 192, "-o", out)


def test_the_command_writes_a_checkpoint(tokenizer, folder, tmp_path):
    out = tmp_path / "out"
    assert "chosen" in command(*words(folder, out))
    model = rope_patch.load(folder)
    patch = fitted(model, tokenizer, resume=None)
    assert {"config.json", "model.safetensors", "tokenizer.json", "fit.json", "fit.svg"} <= {
        p.name for p in out.iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    report = json.loads((out / "fit.json").read_text())
    assert report["chosen"] == patch.chosen and report["method"] == str(patch.method)
    names = [c.name for c in patch.candidates["yarn:factor=1.5"]]
    assert [c["name"] for c in report["candidates"]["yarn:factor=1.5"]] == names
    assert names[:4] == ["start", "step 2", "step 4", "average"]
    assert report["losses"]["yarn:factor=1.5"] == list(patch.losses["yarn:factor=1.5"])
    stock = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    rows = ids(90, 1)
    with torch.no_grad():
        assert torch.equal(stock(rows).logits, model(rows).logits)
    assert (out / "fit.svg").read_text().startswith("<?xml") and stock.config.max_position_embeddings == 96
    with pytest.raises(FileExistsError, match="is not empty: give a new folder"):
        command(*words(folder, out))
    again = json.loads(command(*words(folder, out), "--force", "--json", "--no-figure"))
    assert {**again, "command": ""} == {**report, "command": ""}


def test_by_default_the_command_mixes_and_looks_at_a_second_domain(folder, tmp_path):
    """What is printed, in JSON and on the card: what was fitted to, both domains with intervals, what they speak of."""
    out = tmp_path / "out"
    asked = [word for word in words(folder, out) if word not in ("--mix", 0, "--second-text", "none")]
    shown = " ".join(command(*asked, "--retrieval", 0, "--no-figure").split())
    report = json.loads((out / "fit.json").read_text())
    assert "Rows are drawn from 50% text.txt and 50% code that ships with CPython" in shown
    assert list(report["text"]["fitted_to"].values()) == [0.5, 0.5] and report["second_domain"]["windows"] == 2
    (tried,) = report["candidates"].values()
    for kind in ("nll", "second_nll"):
        for length in ("64", "96"):
            estimate, low, high = tried[1]["change_from_start"][kind][length]
            assert low <= estimate <= high
            assert estimate == pytest.approx(tried[1][kind][length] - tried[0][kind][length], abs=1e-12)
    alone, few = report["warnings"]
    assert alone == LOSS_ALONE and "in 2 windows only" in few and all(f"Warning: {w}." in shown for w in (alone, few))
    assert POPULATION in shown and CARRIES_OVER in shown
    text = " ".join((out / "README.md").read_text().split())
    if report["chosen"].endswith("start"):
        assert "is its start as it is" in text
    else:
        for part in (POPULATION, CARRIES_OVER, LOSS_ALONE, "second domain (documentation that ships", "(-"):
            assert part in text


CARD = """---
license: apache-2.0
tags: [small]
model-index: [{name: tiny, results: []}]
---
# Tiny

It scores 7.
"""


@pytest.fixture
def carded(folder, tmp_path):
    """A base with a model card and a training log."""
    base = shutil.copytree(folder, tmp_path / "carded")
    shutil.copy(folder.parent / "text.txt", tmp_path / "text.txt")
    (base / "README.md").write_text(CARD)
    (base / "training_log.json").write_text("{}")
    return base


def test_the_card_says_at_its_top_what_was_fitted_and_keeps_that_of_the_base_below(carded, tmp_path):
    command(*words(carded, tmp_path / "out"), "--no-figure")
    chosen = json.loads((tmp_path / "out" / "fit.json").read_text())["chosen"]
    start, candidate = chosen.split(", ")
    top, _, below = (tmp_path / "out" / "README.md").read_text().partition("## The card of the base model")
    assert candidate != "start" and "rotary table fitted for 96 tokens" in top
    for line in (
        "- **Base**: `carded`\n",
        f"- **Method**: gradient descent on the frequencies, started from `{start}` (chosen: {candidate})\n",
        "- **Target length**: 96 tokens\n",
        "- **Text**: text.txt, in rows of 64 to 96 tokens\n",
    ):
        assert line in top
    assert below.endswith("# Tiny\n\nIt scores 7.\n")


def test_card_and_report_say_which_positions_the_rows_had(carded, tmp_path):
    reports = {}
    for name, more in (("full", ()), ("pose", ("--positions", "pose", "--row-length", 48, "--chunks", 3))):
        command(*words(carded, tmp_path / name), *more, "--no-figure")
        text = (tmp_path / name / "README.md").read_text()
        settings = json.loads((tmp_path / name / "fit.json").read_text())["settings"]
        reports[name] = (
            settings["rows"],
            re.findall(r"- \*\*Text\*\*: text.txt, in rows of (.*)\n", text),
            settings["objective"],
        )
    assert reports["full"][:2] == ("64 to 96 tokens", ["64 to 96 tokens"])
    skipping = "48 tokens at positions that skip ahead up to 96 (PoSE)"
    assert reports["pose"][:2] == (skipping, [skipping])
    objective = {"positions": "pose", "row_length": 48, "chunks": 3}
    assert reports["pose"][2].items() >= objective.items() and reports["full"][2]["positions"] == "full"


def test_a_card_says_of_a_start_that_was_kept_that_it_was_chosen(carded, tmp_path):
    command(*words(carded, tmp_path / "out"), "--steps", 0, "--no-figure")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "rotary table chosen for 96 tokens" in text and "`yarn:factor=1.5` as it is" in text and "fitted" not in text


def test_the_front_matter_of_a_card_keeps_the_licence_and_drops_the_scores_of_the_base(carded, tmp_path):
    command(*words(carded, tmp_path / "out"), "--steps", 0, "--no-figure")
    head = ModelCard.load(tmp_path / "out" / "README.md").data.to_dict()
    assert head == {
        "library_name": "transformers",
        "license": "apache-2.0",
        "tags": ["small", "rope_patch", "long-context"],
    }


@pytest.mark.parametrize(
    "text", ["# No front matter\n", "---\nbroken: [\n---\n# Text\n", "---\n- a list\n---\n# Text\n"]
)
def test_a_card_whose_front_matter_cannot_be_read_is_kept_whole(text):
    start, better = candidate("start", (10, 5), (2.0, 3.0)), candidate("step 4", (10, 5), (1.9, 2.9))
    parts = {"texts": fit_texts(TEXT, 0.0), "second": SecondDomain(), "warnings": (), "unpatched": ()}
    patch = SimpleNamespace(chosen="yarn, step 4", winner=(better, start), **parts)
    made = card("org/tiny", patch, 96, text, rows="96 tokens", on_hub=True)
    assert made.endswith(text) and ModelCard(made).data.base_model == "org/tiny"


def test_a_fitted_folder_does_not_carry_the_training_log_of_its_base(carded, tmp_path):
    command(*words(carded, tmp_path / "out"), "--steps", 0, "--no-figure")
    assert not (tmp_path / "out" / "training_log.json").exists() and (carded / "training_log.json").exists()


def test_a_base_without_a_card_gets_one(folder, tmp_path):
    command(*words(folder, tmp_path / "out"), "--steps", 0, "--no-figure")
    assert "## The card of the base model" not in (tmp_path / "out" / "README.md").read_text()


def test_a_fit_that_diverged_is_written_and_said(folder, tmp_path):
    shown = command(*words(folder, tmp_path / "out"), "--learning-rate", 1e7)
    assert "diverged at step 1" in shown and [path.name for path in tmp_path.iterdir()] == ["out"]
    assert json.loads((tmp_path / "out" / "fit.json").read_text())["losses"] == {"yarn:factor=1.5": [None]}


@pytest.mark.parametrize("start", ["default", "p_rope:p=1"])
def test_a_table_that_is_the_base_is_drawn(folder, tmp_path, start):
    command(*words(folder, tmp_path / "out"), "--steps", 0, "--init", start)
    assert (tmp_path / "out" / "fit.svg").exists()


def test_the_checkpoint_itself_is_refused_before_the_fit(folder, monkeypatch):
    monkeypatch.setattr(fitting, "fit", lambda *args, **kwargs: pytest.fail("it was fitted"))
    with pytest.raises(ValueError, match="is the checkpoint itself"):
        command(*words(folder, folder), "--force")


def test_here_is_an_output(folder, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    command(*words(folder, "."), "--steps", 0, "--no-figure")
    assert Path("fit.json").exists() and not list(tmp_path.glob("*.jsonl"))


def test_a_family_is_scanned(folder, tmp_path):
    asked = (*words(folder, tmp_path / "out"), "--family", "p_rope", "--json", "--no-figure")
    with pytest.raises(ValueError, match="leave --init and --steps out"):
        command(*asked)
    report = json.loads(command(*asked, "--steps", 0))
    assert list(report["candidates"]) == fitting.family("p_rope") and len(report["candidates"]) == 21
    best = max(
        (sum(c["retrieval"][n] * c["prompts"][n] for n in c["retrieval"]), -sum(c["nll"].values()), label)
        for label, (c,) in report["candidates"].items()
    )
    assert report["chosen"] == f"{best[2]}, start"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--family", "yarm"), "unknown family 'yarm'. Known: p_rope"),
        (("--target-length", "8kk"), "a length is a number"),
        (("--text", "/nowhere"), "no file or folder '/nowhere'"),
        (("--dtype", "int3"), "dtype must be one of"),
        (("--band", "0.5"), "band must be a factor > 1"),
        (("--retrieval", "1"), "retrieval must be in"),
        (("--mix", "1"), "mix must be in [0, 1), got 1.0"),
        (("--second-text", "/nowhere"), "no file or folder '/nowhere'"),
        (("--positions", "posse"), "unknown positions 'posse'. Did you mean 'pose'? Known: full, pose"),
        (("--row-length", "48"), "row_length is for rows that skip positions"),
        (("--positions", "pose", "--row-length", "1k"), "row_length must be <= 96, the target length, got 1024"),
        (("--positions", "pose", "--chunks", "1"), "chunks must be >= 2, got 1"),
        (("--target-length", "32"), "lies below the trained length of 64"),
    ],
)
def test_wrong_arguments(folder, tmp_path, changes, message):
    with pytest.raises((ValueError, TypeError, OSError), match=re.escape(message)):
        command(*words(folder, tmp_path / "out"), *changes)
    assert not list(tmp_path.iterdir())


def test_the_help_excludes_the_share_that_is_refused():
    option = next(p for p in get_command(cli.app).commands["fit"].params if "--retrieval" in p.opts)
    assert "at least 0 and less than 1;" in option.help
    with pytest.raises(ValueError, match=r"retrieval must be in \[0, 1\), got 1.0"):
        Objective(retrieval=1.0)


def test_a_second_fit_into_one_output_is_refused_before_it_begins(tmp_path, monkeypatch, capsys):
    """It would compute for minutes, and then find that the other one has written."""
    monkeypatch.setattr(
        "sys.argv",
        [
            "rope-patch",
            "fit",
            str(rope_patch.data_path("assets") / "llama"),
            "--target-length",
            "512",
            "-o",
            str(tmp_path / "out"),
        ],
    )
    monkeypatch.setattr("rope_patch.cli.fit.load_model", lambda *_: pytest.fail("a model was loaded"))
    with (tmp_path / ".out.rope-patch.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(SystemExit):
            cli.main()
    assert "another command writes" in capsys.readouterr().err
