"""Retrieval against greedy generation of stock transformers and log-probabilities from whole logits."""

import hashlib
import itertools
import math

import pytest
import torch
from support.evaluated import retrieval_of
from support.prompting import ANSWER, HAY, MAKER, ROOM, TOKENIZER
from support.reference_recipe import recipe
from support.scored import Caches, check_reader, spy, spy_ids
from support.subsets import full
from support.tiny import bundled_model, small, tiny_model
from transformers import DynamicCache

import rope_patch
from rope_patch.evaluation.intervals import wilson
from rope_patch.evaluation.retrieval.generate_answers import SHORT_PASS_TOKENS, TAIL_TOKENS, Answer, answer_prompts
from rope_patch.evaluation.retrieval.measure import grade, retrieval
from rope_patch.evaluation.retrieval.prompts import Prompt
from rope_patch.evaluation.tasks import TASKS
from rope_patch.modeling.reader import Reader

ASKED = {"lengths": [72], "depths": [0.0, 0.5, 1.0], "samples": 4, "haystack": HAY}


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
        max_new_tokens=prompt.answer + prompt.beyond,
        do_sample=False,
        pad_token_id=2,
    )
    return until_stop(out[0, question.shape[1] :].tolist())


def until_stop(ids):
    """The token ids before a stop token."""
    return list(itertools.takewhile(lambda token: token != recipe.EOS, ids))


@torch.no_grad()
def from_logits(model, prompt):
    """Log-probabilities of the answer, from whole logits."""
    row = torch.tensor([prompt.ids])
    scores = model(row, use_cache=False).logits[0, -prompt.answer - 1 : -1].double()
    chosen = scores.log_softmax(-1).gather(1, row[0, -prompt.answer :, None])[:, 0]
    return chosen.tolist()


# --- asking: identical to asking alone


@pytest.mark.parametrize(
    ("task", "shape", "method"),
    [
        ("passkey", "llama", "yarn:factor=4"),
        ("niah", "gemma3", "default"),
        ("niah_multivalue", "llama", "yarn:factor=4"),
        pytest.param("niah_single_3", "gemma3", "default", marks=pytest.mark.full),
    ],
)
def test_answers_are_those_of_stock_generation_of_each_prompt_alone(task, shape, method):
    """The trained checkpoints: their sliding windows (64) are far shorter than the prompts."""
    model = bundled_model(shape)
    columns = [MAKER.prompts(task, 400 + ROOM.get(task, 0), (0.0, 0.4, 1.0), sample=i) for i in range(2)]
    rows = list(zip(*columns, strict=True))
    check_reader(model)
    with rope_patch.patched(model, method), spy(model.lm_head) as states:
        made = answer_prompts(Reader(model), rows)
        assert max(states) < 100, "logits of the answer only"
        chunked = answer_prompts(Reader(model), rows, chunk=50)
        every = (itertools.chain(*grid) for grid in (rows, made, chunked))
        for prompt, found, again in zip(*every, strict=True):
            assert found.output == again.output
            right = found.output == list(prompt.ids[-prompt.answer :])
            assert len(found.output) == prompt.answer + (0 if right else prompt.beyond)
            whole = generated(model, prompt)
            said = until_stop(found.output)
            assert said == whole[: len(said)] and (right or said == whole)
            assert found.logprobs == pytest.approx(from_logits(model, prompt), abs=2e-4)


@pytest.mark.parametrize(
    ("family", "cache"),
    [("llama", Rounded), ("gemma2", DynamicCache), ("gemma3", Rounded), ("gemma4", DynamicCache)],
)
def test_through_a_cache_shared_is_as_alone(family, cache):
    """Also where sliding layers forget (16 of 150 tokens), and for a cache that rounds."""
    model = small(family)
    factory = lambda: cache(config=model.config)  # noqa: E731
    prompts = MAKER.prompts("niah", 150, (0.0, 0.4, 1.0))
    together = answer_prompts(Reader(model), [[p] for p in prompts], cache=factory)
    for prompt, (found,) in zip(prompts, together, strict=True):
        ((alone,),) = answer_prompts(Reader(model), [[prompt]], cache=factory)
        assert found.output == alone.output
        assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-5)
    plain = answer_prompts(Reader(model), [[p] for p in prompts])
    ours, theirs = (torch.tensor([found.logprobs for (found,) in each]) for each in (together, plain))
    moved = float((ours - theirs).abs().max())
    assert moved < 1e-4 if cache is DynamicCache else moved > 1e-2


def test_what_prompts_share_is_read_once():
    model = small()
    prompts = MAKER.prompts("passkey", 600, (0.0, 0.25, 0.5, 0.75, 1.0))
    with spy_ids(model) as seen:
        answer_prompts(Reader(model), [[p] for p in prompts])
    read = sum(ids.shape[1] for ids in seen)
    assert 600 * 3.4 < read < 600 * 3.5 + 5 * (TAIL_TOKENS + SHORT_PASS_TOKENS), (
        "1 + 1 + 3/4 + 1/2 + 1/4, and the tails of wrong answers"
    )


def test_with_a_cache_answers_are_read_a_token_at_a_time():
    model = small()
    caches = Caches(model)
    prompts = MAKER.prompts("passkey", 100, [0.5])
    with spy_ids(model) as seen:
        answer_prompts(Reader(model), [prompts], cache=caches)
    sizes = [ids.shape[1] for ids in seen]
    assert sizes[:6] == [100 - ANSWER - 16, 16, 1, 1, 1, 1] and len(caches.made) == 1


@pytest.mark.parametrize(("bad", "cached"), [(math.nan, False), (math.inf, True)])
def test_logits_that_are_not_finite_are_refused(bad, cached):
    model = small()
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(0, torch.tensor([0]), bad))
    cache = DynamicCache if cached else None
    with pytest.raises(ValueError, match="72 tokens"):
        retrieval(model, TOKENIZER, lengths=[72], depths=[0.5], samples=1, haystack=HAY, cache=cache)


def test_prompts_of_different_lengths_do_not_share_a_grid():
    one = MAKER.prompts("passkey", 100, [0.5])
    other = MAKER.prompts("passkey", 101, [0.5])
    with pytest.raises(ValueError, match="length"):
        answer_prompts(Reader(small()), [one, other])


# --- the scores


@pytest.mark.parametrize(("batch_tokens", "cached"), [(1, True), full(2 * 400, False)])
def test_exact_matches_are_those_of_greedy_generation(batch_tokens, cached):
    """At 400 tokens, of 256 that it was trained on, the model knows some."""
    model = bundled_model()
    asked = {**ASKED, "lengths": [400]}
    columns = [MAKER.prompts("passkey", 400, ASKED["depths"], sample=i) for i in range(4)]
    cache = Caches(model) if cached else None
    result = retrieval(model, TOKENIZER, **asked, batch_tokens=batch_tokens, cache=cache)
    for cell, prompts in zip(result.cells, zip(*columns, strict=True), strict=True):
        assert [sample.expected for sample in cell.samples] == [prompt.parts[0] for prompt in prompts]
        hits = [generated(model, prompt) == list(prompt.ids[-ANSWER:]) for prompt in prompts]
        assert [sample.correct for sample in cell.samples] == hits and cell.correct == sum(hits)
    assert 0 < result.accuracy(400) == sum(cell.correct for cell in result.cells) / 12 < 1


class Spelling:
    """A tokenizer whose tokens are strings of their own: what is graded does not depend on how they are cut."""

    def __init__(self, *tokens):
        self.tokens = tokens

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.tokens[i] for i in ids)


@pytest.mark.parametrize(
    ("output", "correct"),
    [
        ((0, 1), True),
        ((0, 2), False),  # 12 34|5 -> 12 34|6: a token of three digits, one of them wrong
        ((3, 1), False),
        ((4, 4), False),
        ((0, 6, 1), False),  # cut short by a stop
        ((5, 3), True),  # the number as one token: the right text in other tokens
        ((4, 0, 1), False),  # a single answer comes first
    ],
)
def test_exact_match_is_of_the_text(output, correct):
    tokenizer = Spelling(" 12", "345", "346", "\n", " the", " 12345", "")
    prompt = Prompt("", " 12345", (0, 1), 2, ("12345",), (2,), (0.5,))
    (made,) = grade(tokenizer, TASKS["passkey"], prompt, Answer(output, (-0.5, -0.25)), [6])
    assert made.correct == correct and made.logprob == -0.75


def test_parts_of_a_joined_answer_are_graded_one_by_one():
    tokenizer = Spelling(" 11", ",", " 22", " 33", " 44")
    prompt = Prompt("", " 11, 22, 33", (0, 1, 2, 1, 3), 5, ("11", "22", "33"), (1, 3, 5), (0.0, 0.5, 1.0))
    scores = (-1.0, -0.5, -2.0, -0.25, -4.0)
    made = grade(tokenizer, TASKS["niah_multivalue"], prompt, Answer((3, 1, 4, 1, 0), scores), [])  # said 33, 44, 11
    assert [s.correct for s in made] == [True, False, True]
    assert [s.logprob for s in made] == [-1.0, -2.5, -4.25]
    assert {s.output for s in made} == {" 33, 44, 11"}


def test_a_joined_task_has_a_cell_for_each_needle():
    asked = {"lengths": [600], "depths": [0.5], "samples": 2, "haystack": HAY}
    result = retrieval(small(), TOKENIZER, "niah_multivalue", **asked)
    assert [(c.depth, len(c.samples)) for c in result.cells] == [(0.0, 2), (1 / 3, 2), (2 / 3, 2), (1.0, 2)]
    for sample in range(2):
        (prompt,) = MAKER.prompts("niah_multivalue", 600, [0.5], sample=sample)
        assert tuple(c.samples[sample].expected for c in result.cells) == prompt.parts


@pytest.mark.filterwarnings("ignore")
def test_a_model_in_training_is_measured_in_eval_mode():
    model = small(attention_dropout=0.5)
    plain = retrieval(model, TOKENIZER, **ASKED)
    model.train()
    model.gradient_checkpointing_enable()
    assert retrieval(model, TOKENIZER, **ASKED) == plain
    assert model.training


# --- results and refusals


def test_accuracy_is_over_the_depths_of_one_length():
    yes = [True]
    no = [False]
    result = retrieval_of({(256, 0.0): yes * 5, (256, 1.0): yes * 3 + no * 2, (512, 0.0): yes + no * 9})
    assert result.accuracy(256) == 0.8 and result.accuracy(512) == 0.1
    assert result.interval(512) == wilson(1, 10), "one depth: a prompt of each haystack"
    alike = retrieval_of({(512, depth): yes * 2 + no * 2 for depth in (0.0, 0.5, 1.0)})  # two haystacks answered
    low, high = alike.interval(512)
    assert low < wilson(6, 12)[0] and wilson(6, 12)[1] < high, "as many prompts as the haystacks are worth"
    low, high = result.interval(512, confidence=0.68)
    assert wilson(1, 10)[0] < low < 0.1 < high < wilson(1, 10)[1]
    for ask in (result.accuracy, result.interval, result.logprob):
        with pytest.raises(ValueError, match="300"):
            ask(300)


def test_a_result_names_its_haystack():
    asked = {"lengths": [64], "depths": [0.5], "samples": 1}
    mine = retrieval(small(), TOKENIZER, **asked, haystack=HAY)
    assert (mine.haystack, mine.prefix) == ("text", (recipe.BOS,))
    assert mine.haystack_sha256 == hashlib.sha256(HAY.text.encode()).hexdigest()
    assert retrieval(small(), TOKENIZER, **asked).haystack == "noise"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "pass_key"}, "pass_key"),
        ({"windows": 3}, "windows"),
        ({"lengths": [72, 3]}, "36"),
        ({"resume": {}, "cache": DynamicCache}, "resume"),
    ],
)
def test_retrieval_refuses_before_it_runs(arguments, message):
    model = small()
    arguments = {"lengths": [72], "depths": [0.5], "samples": 1, "haystack": HAY} | arguments
    with spy_ids(model) as seen, pytest.raises((ValueError, TypeError), match=message):
        retrieval(model, TOKENIZER, **arguments)
    assert not seen


def test_models_that_cannot_answer_are_refused():
    from peft import PrefixTuningConfig, get_peft_model

    prefix = get_peft_model(small(), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    for model, message in ((prefix, "prefix"), (tiny_model(), "96")):  # the tokenizer gives ids beyond 96
        with pytest.raises(ValueError, match=message):
            retrieval(model, TOKENIZER, **ASKED)
