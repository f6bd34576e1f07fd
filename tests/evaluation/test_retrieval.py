"""Retrieval against greedy generation of stock transformers and log-probabilities from whole logits."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
import statistics
import sys

import pytest
import torch
from evaluated import answered
from prompting import ANSWER, HAY, MAKER, TOKENIZER, bold
from reference_recipe import recipe
from scored import Caches, spy, spy_ids
from subsets import covering
from tiny import ARCHITECTURES, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache

import rope_patch
from rope_patch.evaluation.answering import SHORT, TAIL, Answer, answer, fork
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.intervals import wilson
from rope_patch.evaluation.prompts import Prompt
from rope_patch.evaluation.retrieval import RetrievalCell, RetrievalResult, Sample, grade, retrieval
from rope_patch.evaluation.tasks import TASKS
from rope_patch.evaluation.text import builtin_text
from rope_patch.modeling.scoring import Reader

ASKED = {"lengths": [72], "depths": [0.0, 0.5, 1.0], "samples": 4, "haystack": HAY}
EVERY = [
    ("passkey", "single"),
    ("passkey", "multikey"),
    ("niah", "multikey"),
    ("multivalue", "single"),
    ("vt", "single"),
]


def bundled(shape):
    folder = rope_patch.data_path("assets") / shape
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Rounded(DynamicCache):
    """A cache that simulates quantization: every state is rounded once, when it comes in."""

    def update(self, keys, values, *args, **kwargs):
        return super().update((keys * 8).round() / 8, (values * 8).round() / 8, *args, **kwargs)


@torch.no_grad()
def generated(model, prompt):
    """The stock greedy answer: token ids."""
    question = torch.tensor([prompt.ids[: -prompt.answer]])
    out = model.generate(
        question,
        attention_mask=torch.ones_like(question),
        max_new_tokens=prompt.answer,
        do_sample=False,
        pad_token_id=2,
    )
    found = out[0, question.shape[1] :].tolist()
    return found[: found.index(recipe.EOS)] if recipe.EOS in found else found


@torch.no_grad()
def from_logits(model, prompt):
    """Log-probabilities and most probable tokens of the answer, from whole logits."""
    row = torch.tensor([prompt.ids])
    scores = model(row, use_cache=False).logits[0, -prompt.answer - 1 : -1].double()
    chosen = scores.log_softmax(-1).gather(1, row[0, -prompt.answer :, None])[:, 0]
    return chosen.tolist(), scores.argmax(-1).tolist()


# --- asking: identical to asking alone


@covering(asked=EVERY, patched_shape=[("llama", "yarn:factor=4"), ("gemma3", "default")])
def test_answers_are_those_of_stock_generation_of_each_prompt_alone(asked, patched_shape):
    """The trained checkpoints: their sliding windows (64) are far shorter than the prompts."""
    (task, mode), (shape, method) = asked, patched_shape
    model, reader_rows = bundled(shape), []
    columns = [MAKER.prompts(task, 400, (0.0, 0.3, 0.7, 1.0), mode=mode, sample=i) for i in range(2)]
    rows = list(zip(*columns, strict=True))
    with rope_patch.patched(model, method):
        made = answer(Reader(model), rows, stops=[recipe.EOS])
        chunked = answer(Reader(model), rows, stops=[recipe.EOS], chunk=50)
        for row, answers in zip(rows, made, strict=True):
            for prompt, found in zip(row, answers, strict=True):
                logprobs, predicted = from_logits(model, prompt)
                assert list(found.output) == generated(model, prompt)
                assert list(found.predicted) == predicted
                assert found.logprobs == pytest.approx(logprobs, abs=2e-4)
                reader_rows.append(found)
    assert [a.output for row in chunked for a in row] == [a.output for a in reader_rows]
    if method != "default" and task == "passkey" and mode == "single":
        right = [
            a.output == p.ids[-p.answer :]
            for row, found in zip(rows, made, strict=True)
            for p, a in zip(row, found, strict=True)
        ]
        assert sum(right) >= 6, "a model that answers nothing would show little"


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_under_a_patch(family):
    model = bold(family)
    rows = list(
        zip(*[MAKER.prompts("niah", 150, (0.0, 0.5, 1.0), mode="multikey", sample=i) for i in (0, 1)], strict=True)
    )
    with rope_patch.patched(model, rope_patch.parse("p_rope:p=0.5")), spy(model.lm_head) as states:
        made = answer(Reader(model), rows)
        assert max(states) <= 2 * 8, "logits of the answer only"
        for prompt, found in zip(itertools.chain(*rows), itertools.chain(*made), strict=True):
            logprobs, predicted = from_logits(model, prompt)
            assert found.logprobs == pytest.approx(logprobs, abs=1e-4)
            assert list(found.predicted) == predicted
            assert list(found.output) == generated(model, prompt)


@covering(2, family=["llama", "gemma2", "gemma3", "gemma4"], cache=[DynamicCache, Rounded], mode=["single", "multikey"])
def test_through_a_cache_shared_is_as_alone(family, cache, mode):
    """Also where sliding layers forget (16 of 150 tokens), and for a cache that rounds."""
    model = bold(family)
    factory = lambda: cache(config=model.config)  # noqa: E731
    prompts = MAKER.prompts("niah", 150, (0.0, 0.4, 1.0), mode=mode)
    together = answer(Reader(model), [[p] for p in prompts], cache=factory)
    for prompt, (found,) in zip(prompts, together, strict=True):
        ((alone,),) = answer(Reader(model), [[prompt]], cache=factory)
        assert found.output == alone.output and found.predicted == alone.predicted
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    plain = answer(Reader(model), [[p] for p in prompts])
    moved = max(
        abs(a - b)
        for (x,), (y,) in zip(together, plain, strict=True)
        for a, b in zip(x.logprobs, y.logprobs, strict=True)
    )
    assert moved < 1e-4 if cache is DynamicCache else moved > 1e-2


def test_what_prompts_share_is_read_once():
    model, prompts = bold(), MAKER.prompts("niah", 600, (0.0, 0.25, 0.5, 0.75, 1.0), mode="multikey")
    with spy_ids(model) as seen:
        answer(Reader(model), [[p] for p in prompts], stops=[])
    read = sum(ids.shape[1] for ids in seen)
    assert read < 600 + 5 * 90, "the haystack once, five questions, and where an answer went astray once more"
    single = MAKER.prompts("passkey", 600, (0.0, 0.25, 0.5, 0.75, 1.0))
    with spy_ids(model) as seen:
        answer(Reader(model), [[p] for p in single])
    read = sum(ids.shape[1] for ids in seen)
    assert 600 * 3.4 < read < 600 * 3.5 + 5 * (TAIL + SHORT), "1 + 1 + 3/4 + 1/2 + 1/4, and the tails of wrong answers"


@pytest.mark.parametrize("kind", ["dynamic", "rounded"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_fork_leaves_the_first_as_it_was(family, kind):
    model = bold(family)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else Rounded(config=model.config)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        model(ids, past_key_values=cache)
        before = copy.deepcopy([(layer.keys, layer.values) for layer in cache.layers])
        other = fork(cache)
        after = model(ids[:, :5], past_key_values=other).logits
        assert other.get_seq_length(1) == 45 and cache.get_seq_length(1) == 40
        for (keys, values), layer in zip(before, cache.layers, strict=True):
            assert torch.equal(keys, layer.keys) and torch.equal(values, layer.values)
        assert torch.equal(model(ids[:, :5], past_key_values=cache).logits, after)


def test_with_a_cache_answers_are_read_a_token_at_a_time():
    model, caches = bold(), None
    caches = Caches(model)
    prompts = MAKER.prompts("passkey", 100, [0.5])
    with spy_ids(model) as seen:
        answer(Reader(model), [prompts], cache=caches, stops=range(recipe.VOCABULARY))
    sizes = [ids.shape[1] for ids in seen]
    assert sizes[:6] == [100 - ANSWER - 16, 16, 1, 1, 1, 1] and len(caches.made) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("cached", [False, True])
def test_logits_that_are_not_finite_are_refused(bad, cached):
    model = bold()
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(0, torch.tensor([0]), bad))
    cache = DynamicCache if cached else None
    with pytest.raises(
        ValueError,
        match=r"^NaN or infinite logits at position 67 of a prompt of 72 tokens that asks for \d{5} at depth 0.5: try",
    ):
        retrieval(model, TOKENIZER, lengths=[72], depths=[0.5], samples=1, haystack=HAY, cache=cache)


def test_prompts_of_different_lengths_do_not_share_a_grid():
    one, other = MAKER.prompts("passkey", 100, [0.5]), MAKER.prompts("passkey", 101, [0.5])
    with pytest.raises(ValueError, match="must be of one length"):
        answer(Reader(bold()), [one, other])


# --- the scores


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def memorised(request):
    """A model that learnt by heart all answers of depth 0.0, two of 0.5 and half of each of the other two there."""
    model = bold(request.param)
    columns = [MAKER.prompts("passkey", 72, ASKED["depths"], sample=i) for i in range(4)]
    prompts = [column[d] for d in range(3) for column in columns]
    rows = torch.tensor([p.ids for p in prompts])
    known = torch.zeros(12, ANSWER, dtype=torch.bool)
    known[:6] = True
    known[6:8, :2] = True
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(200):
        logits = model(rows[:8], use_cache=False, logits_to_keep=ANSWER + 1).logits[:, :-1]
        if bool((logits.argmax(-1) == rows[:8, -ANSWER:])[known[:8]].all()):
            break
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:8, -ANSWER:], reduction="none")
        loss[known[:8]].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        pytest.fail("not learnt in 200 steps")
    return model.eval(), prompts


@covering(batch_tokens=[1, 2 * 72, 10**6], cached=[False, True])
def test_exact_matches_are_those_of_greedy_generation(memorised, batch_tokens, cached):
    model, prompts = memorised
    hits = [generated(model, p) == list(p.ids[-ANSWER:]) for p in prompts]
    assert hits == [True] * 6 + [False] * 6, "the model was to know these and no others"
    cache = Caches(model) if cached else None
    result = retrieval(model, TOKENIZER, **ASKED, batch_tokens=batch_tokens, cache=cache)
    assert [(c.length, c.depth, len(c.samples)) for c in result.cells] == [(72, 0.0, 4), (72, 0.5, 4), (72, 1.0, 4)]
    assert [sample.correct for cell in result.cells for sample in cell.samples] == hits
    assert [cell.correct for cell in result.cells] == [4, 2, 0] and result.accuracy(72) == 0.5
    samples = [sample for cell in result.cells for sample in cell.samples]
    assert [s.expected for s in samples] == [p.parts[0] for p in prompts]
    assert [s.output for s in samples] == [TOKENIZER.decode(generated(model, p)) for p in prompts]


def test_shares_and_log_probabilities_by_hand(memorised):
    model, prompts = memorised
    result = retrieval(model, TOKENIZER, **ASKED)
    expected = [from_logits(model, p) for p in prompts]
    for i, cell in enumerate(result.cells):
        mine = slice(4 * i, 4 * i + 4)
        assert cell.logprob == pytest.approx(statistics.fmean(sum(lp) for lp, _ in expected[mine]), abs=1e-4)
        shares = []
        for p, (_, predicted) in zip(prompts[mine], expected[mine], strict=True):
            pairs = zip(p.ids[-5:], predicted, strict=True)  # a token a digit here
            shares.append(sum(TOKENIZER.decode([a]) == TOKENIZER.decode([b]) for a, b in pairs) / 5)
        assert cell.digits == pytest.approx(statistics.fmean(shares))
    assert result.cells[0].digits == 1.0 > result.cells[1].digits > result.cells[2].digits
    assert result.logprob(72) == pytest.approx(statistics.fmean(c.logprob for c in result.cells))


class Spelling:
    """A tokenizer whose tokens are strings of their own: what is graded does not depend on how they are cut."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.tokens[i] for i in ids)


@pytest.mark.parametrize(
    ("output", "predicted", "correct", "digits"),
    [
        ((0, 1), (0, 1), [True], [1.0]),
        ((0, 2), (0, 2), [False], [4 / 5]),  # 12 34|5 -> 12 34|6: a token of three digits, one of them wrong
        ((3, 1), (3, 1), [False], [3 / 5]),
        ((4, 4), (4, 4), [False], [0.0]),
        ((0,), (0, 2), [False], [4 / 5]),  # cut short by a stop
    ],
)
def test_digits_are_characters_whatever_the_tokens(output, predicted, correct, digits):
    tokenizer = Spelling(" 12", "345", "346", "\n", " the")
    prompt = Prompt("", " 12345", (0, 1), 2, ("12345",), (2,), (0.5,))
    made = grade(tokenizer, TASKS["passkey"], prompt, Answer(output, predicted, (-0.5, -0.25)))
    assert [s.correct for s in made] == correct and [s.digits for s in made] == pytest.approx(digits)
    assert made[0].logprob == -0.75 and made[0].first_choice is (predicted == (0, 1))


def test_first_choice_is_of_the_tokens_and_exact_match_of_the_text():
    tokenizer = Spelling(" 12", "345", " 12345", " the")
    prompt = Prompt("", " 12345", (0, 1), 2, ("12345",), (2,), (0.5,))

    def shares(output, predicted):
        (made,) = grade(tokenizer, TASKS["passkey"], prompt, Answer(output, predicted, (-0.5, -0.25)))
        return made.correct, made.first_choice

    assert shares((2, 3), (2, 1)) == (True, False), "the number as one token: the right text in other tokens"
    assert shares((0,), (0, 1)) == (False, True), "decoding stopped: what was read through another cache is right"


def test_a_joined_answer_may_be_right_without_being_first_choice():
    """Said in another order, the second and the first number are right, and no token of them where it is asked for."""
    tokenizer = Spelling(" 11", ",", " 22")
    prompt = Prompt("", " 11, 22", (0, 1, 2), 3, ("11", "22"), (1, 3), (0.0, 1.0))
    made = grade(tokenizer, TASKS["multivalue"], prompt, Answer((2, 1, 0), (2, 1, 0), (-1.0, -0.5, -2.0)))
    assert [s.correct for s in made] == [True, True] and [s.first_choice for s in made] == [False, False]


def test_a_single_answer_comes_first():
    tokenizer = Spelling(" 12", "345", " the")
    prompt = Prompt("", " 12345", (0, 1), 2, ("12345",), (2,), (0.5,))
    for output, correct in (((0, 1, 2), True), ((2, 0, 1), False)):
        (made,) = grade(tokenizer, TASKS["passkey"], prompt, Answer(output, (0, 1), (-0.5, -0.25)))
        assert made.correct is correct


def test_parts_of_a_joined_answer_are_graded_one_by_one():
    tokenizer = Spelling(" 11", ",", " 22", " 33", " 44")
    prompt = Prompt("", " 11, 22, 33", (0, 1, 2, 1, 3), 5, ("11", "22", "33"), (1, 3, 5), (0.0, 0.5, 1.0))
    scores = (-1.0, -0.5, -2.0, -0.25, -4.0)
    made = grade(
        tokenizer, TASKS["multivalue"], prompt, Answer((3, 1, 4, 1, 0), (0, 1, 4, 1, 3), scores)
    )  # said 33, 44, 11
    assert [s.correct for s in made] == [True, False, True]
    assert [s.digits for s in made] == [1.0, 0.0, 1.0]
    assert [s.first_choice for s in made] == [True, False, True]
    assert [s.logprob for s in made] == [-1.0, -2.5, -4.25]
    assert {s.output for s in made} == {" 33, 44, 11"}


def test_a_joined_task_has_a_cell_for_each_needle():
    result = retrieval(bold(), TOKENIZER, "multivalue", lengths=[300], depths=[1.0, 0.0, 0.5], samples=2, haystack=HAY)
    assert [(c.depth, len(c.samples)) for c in result.cells] == [(0.0, 2), (0.5, 2), (1.0, 2)]
    for sample in range(2):
        (prompt,) = MAKER.prompts("multivalue", 300, [1.0, 0.0, 0.5], sample=sample)
        # asked in the order of depths given, which the engine sorts
        (prompt,) = MAKER.prompts("multivalue", 300, [0.0, 0.5, 1.0], sample=sample)
        assert tuple(c.samples[sample].expected for c in result.cells) == prompt.parts


def test_what_the_cache_returns_is_what_is_scored():
    class Forgetful(DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            keys, values = super().update(keys, values, *args, **kwargs)
            return keys, torch.zeros_like(values)

    model = bold()
    plain, other = (retrieval(model, TOKENIZER, **ASKED, cache=cache).cells[0] for cache in (None, Forgetful))
    assert abs(plain.logprob - other.logprob) > 0.1


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_training_is_measured_in_eval_mode():
    model = bold(attention_dropout=0.5)
    plain = retrieval(model, TOKENIZER, **ASKED)
    model.train()
    model.gradient_checkpointing_enable()
    assert retrieval(model, TOKENIZER, **ASKED) == plain
    assert model.training


def test_progress_counts_the_tokens_of_prompts():
    reports = []
    retrieval(bold(), TOKENIZER, **{**ASKED, "lengths": [72, 80]}, on_progress=reports.append)
    assert sum(reports) == 3 * 4 * (72 + 80)


# --- finished work


def test_finished_haystacks_are_kept(tmp_path):
    model, journal = bold(), tmp_path / "finished.jsonl"
    asked = {**ASKED, "batch_tokens": 1}
    with spy_ids(model) as seen:
        whole = retrieval(model, TOKENIZER, **asked)
    everything, count = sum(ids.numel() for ids in seen), 0

    def stop(tokens):
        nonlocal count
        count += tokens
        if count > 2 * 3 * 72:  # in the third haystack
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        retrieval(model, TOKENIZER, **asked, resume=journal, on_progress=stop)
    reports = []
    with spy_ids(model) as seen:
        assert retrieval(model, TOKENIZER, **asked, resume=journal, on_progress=reports.append) == whole
    assert 0.4 < sum(ids.numel() for ids in seen) / everything < 0.6, "two haystacks of four were done already"
    assert sum(reports) == 3 * 4 * 72
    with spy_ids(model) as seen:
        retrieval(model, TOKENIZER, **asked, resume=journal)
    assert not seen
    with rope_patch.patched(model, "pi:factor=2"), spy_ids(model) as seen:
        assert retrieval(model, TOKENIZER, **asked, resume=journal) != whole
    assert seen


# --- results and refusals


def result_of(*counts):
    cells = tuple(
        RetrievalCell(n, depth, tuple(answered("1", "", i < right, 0.5, -1.0) for i in range(asked)))
        for n, depth, asked, right in counts
    )
    return RetrievalResult("passkey", "single", cells, 0, "text", "0" * 64, None, ())


def test_accuracy_is_over_the_depths_of_one_length():
    result = result_of((256, 0.0, 5, 5), (256, 1.0, 5, 3), (512, 0.0, 10, 1))
    assert result.accuracy(256) == 0.8 and result.accuracy(512) == 0.1
    assert result.interval(512) == wilson(1, 10), "one depth: a prompt of each haystack"
    alike = result_of(*((512, depth, 4, 2) for depth in (0.0, 0.5, 1.0)))  # two haystacks answered, two not
    low, high = alike.interval(512)
    assert low < wilson(6, 12)[0] and wilson(6, 12)[1] < high, "as many prompts as the haystacks are worth"
    low, high = result.interval(512, confidence=0.68)
    assert wilson(1, 10)[0] < low < 0.1 < high < wilson(1, 10)[1]
    for ask in (result.accuracy, result.interval, result.logprob):
        with pytest.raises(ValueError, match=re.escape("no cell of length 300. Known: [256, 512]")):
            ask(300)


def test_a_result_as_json():
    result = retrieval(bold(), TOKENIZER, lengths=[64, 72], depths=[0.0, 1.0], samples=2, seed=3, haystack=HAY)
    read = json.loads(result.to_json())
    assert (read["schema"], read["task"], read["mode"], read["seed"]) == (3, "passkey", "single", 3)
    cells = [{**cell, "samples": tuple(Sample(**s) for s in cell["samples"])} for cell in read["cells"]]
    read["cells"], read["prefix"] = tuple(RetrievalCell(**cell) for cell in cells), tuple(read["prefix"])
    assert RetrievalResult(**read) == result


def test_a_result_names_its_haystack():
    asked = {"lengths": [64], "depths": [0.5], "samples": 1}
    mine = retrieval(bold(), TOKENIZER, **asked, haystack=HAY)
    assert (mine.haystack, mine.python_version) == ("text", None)
    assert mine.haystack_sha256 == hashlib.sha256(HAY.text.encode()).hexdigest() and mine.prefix == (recipe.BOS,)
    assert retrieval(bold(), TOKENIZER, **asked).haystack == "noise"
    builtin = retrieval(bold(), TOKENIZER, **asked, haystack="builtin")
    assert builtin.haystack_sha256 == hashlib.sha256(builtin_text("haystack").text.encode()).hexdigest()
    assert (builtin.haystack, builtin.python_version) == ("builtin", ".".join(map(str, sys.version_info[:3])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "pass_key"}, "unknown task 'pass_key' in mode 'single'"),
        ({"depths": [0.5, 1.01]}, "depth must be in [0, 1], got 1.01"),
        ({"depths": []}, "depths is empty"),
        ({"lengths": []}, "lengths is empty"),
        ({"lengths": [72, 72]}, "lengths must differ from each other, got [72, 72]"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"chunk": 0}, "chunk must be >= 1 tokens, got 0"),
        ({"lengths": [0]}, "a prompt of passkey needs at least 36 tokens with this tokenizer, got 0"),
        ({"lengths": [72, 3]}, "a prompt of passkey needs at least 36 tokens with this tokenizer, got 3"),
        ({"haystack": Haystack("")}, "the haystack is empty"),
        ({"haystack": "nowhere"}, "haystack must be 'builtin', 'noise' or a Path, got 'nowhere'"),
        ({"resume": {}, "cache": DynamicCache}, "resume cannot tell one cache from another"),
    ],
)
def test_retrieval_refuses_before_it_runs(arguments, message):
    model = bold()
    arguments = {"lengths": [72], "depths": [0.5], "samples": 1, "haystack": HAY} | arguments
    with spy_ids(model) as seen, pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        retrieval(model, TOKENIZER, **arguments)
    assert not seen


def test_a_tokenizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match=r"^the tokenizer gives id \d+, the model knows 96: is this the model's own"):
        retrieval(tiny_model(), TOKENIZER, **ASKED)


def test_an_adapter_that_learns_a_prefix_is_refused():
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(bold(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(ValueError, match="adapters that learn a prompt or prefix"):
        retrieval(model, TOKENIZER, **ASKED)
