"""Retrieval prompts: exact lengths, needles where they should be, haystacks that are what they say."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prompting import HAY, MAKER, ROOM, TOKENIZER
from support.reference_recipe import recipe
from support.subsets import examples
from transformers import PreTrainedTokenizerFast

from rope_patch.evaluation.retrieval.haystack import Haystack
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.evaluation.tasks import TASKS
from rope_patch.texts.builtin_text import builtin_text

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Wordy:
    """A tokenizer of characters and of what matches a pattern."""

    bos_token_id = None

    def __init__(self, pattern):
        self.pattern = pattern

    def __call__(self, text, **_):
        if not isinstance(text, str):
            return {"input_ids": [self(item)["input_ids"] for item in text]}
        return {"input_ids": [ord(part.group()[-1]) for part in re.finditer(rf"{self.pattern}|.", text, re.S)]}


def test_a_tokenizer_that_merges_the_answer_with_the_question_is_refused():
    with pytest.raises(ValueError, match="merges"):
        PromptMaker(Wordy(r" is \d"), HAY).prompts("passkey", 300, [0.5])
    # Where 55 is one token and 56 are two, numbers that are asked side by side have no such pair.
    (prompt,) = PromptMaker(Wordy(r"(\d)\1+"), HAY).prompts("passkey", 300, [0.5])
    assert prompt.answer == 5 and len(prompt.ids) == 300


def encode(text):
    return TOKENIZER(text, add_special_tokens=False, verbose=False)["input_ids"]


@examples
@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_is_what_it_says_to_the_token(task, examples):
    @settings(max_examples=examples, deadline=None)
    @given(length=st.integers(250, 700), seed=st.integers(0, 50), sample=st.integers(0, 9))
    def check(length, seed, sample):
        length += ROOM.get(task, 0)
        prompts = MAKER.prompts(task, length, DEPTHS, seed=seed, sample=sample)
        assert len(prompts) == (1 if TASKS[task].joined else 5)
        for prompt in prompts:
            assert prompt.length == length and prompt.beyond == max(0, TASKS[task].generated - prompt.answer)
            assert list(prompt.ids) == [recipe.BOS, *encode(prompt.text + prompt.target)], "the text says the same"
            assert list(prompt.ids[: -prompt.answer]) == [recipe.BOS, *encode(prompt.text)]
            assert all(part in prompt.target for part in prompt.parts)
            assert prompt.text.endswith(" ") is not prompt.target.startswith(" ")
            assert prompt.ends == tuple(sorted(prompt.ends)) and prompt.ends[-1] == prompt.answer

    check()


def test_one_needle_stands_at_its_depth_in_an_unbroken_stretch_of_the_haystack():
    depths = (1.0, 0.0, 0.25, 0.5)
    prompts = MAKER.prompts("passkey", 600, depths, seed=3)
    assert len({p.parts for p in prompts}) == 4, "each has a key of its own"
    for prompt, depth in zip(prompts, depths, strict=True):
        (key,) = prompt.parts
        needle = f" The pass key is {key}. Remember it."
        question = " What is the pass key? The pass key is "
        assert prompt.depths == (depth,) and re.fullmatch(r"\d{5}", key) and prompt.text.endswith(question)
        before, after = prompt.text[: -len(question)].split(needle)
        assert (before + after).strip() in HAY.text
        assert prompts[0].text.startswith(before.strip()), "prompts share the text before their needles"
        first, rest = (len(re.findall(r"\S+", part)) for part in (before, after))
        assert first == round(depth * (first + rest))
        assert before == before.lstrip() or not before.strip()


def test_a_seed_gives_the_same_prompts_and_every_setting_others():
    asked = {"task": "passkey", "length": 400, "depths": DEPTHS, "seed": 1, "sample": 0}
    one = MAKER.prompts(**asked)
    assert MAKER.prompts(**asked) == one == PromptMaker(TOKENIZER, HAY).prompts(**asked)
    for change in ({"seed": 2}, {"sample": 1}, {"length": 401}):
        other = MAKER.prompts(**{**asked, **change})
        assert not {p.parts for p in other} & {p.parts for p in one}


def test_the_shortest_prompt_has_no_haystack():
    (prompt,) = MAKER.prompts("passkey", 100, [0.5])
    shortest = 1 + len(encode(f" The pass key is {prompt.parts[0]}. Remember it." + prompt.text[-38:] + prompt.target))
    (bare,) = MAKER.prompts("passkey", shortest, [0.5])
    assert bare.text.startswith(" The pass key is") and len(bare.ids) == shortest
    with pytest.raises(ValueError, match=str(shortest)):
        MAKER.prompts("passkey", shortest - 1, [0.5])


def test_haystacks_by_name_and_by_path(tmp_path):
    corpus = builtin_text("haystack")
    assert Haystack.of("builtin") == Haystack(corpus.text, "builtin")
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert Haystack.of(tmp_path).text == "first\n\nsecond"
    assert Haystack.of(tmp_path / "b.txt") == Haystack("second", "b.txt")
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(ValueError, match="text"):
        Haystack.of(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError, match="essays"):
        Haystack.of("essays")
    with pytest.raises(ValueError, match="empty"):
        PromptMaker(TOKENIZER, Haystack(" "))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depths": [1.01]}, "depth"),
        ({"depths": []}, "depths"),
        ({"length": 0}, "at least"),
        ({"length": 10**7}, "haystack"),
        ({"task": "niah", "depths": [i / 99 for i in range(100)]}, "100"),
    ],
)
def test_what_cannot_be_asked_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MAKER.prompts(**({"task": "passkey", "length": 400, "depths": [0.5]} | arguments))


def test_a_tokenizer_without_a_first_token():
    bare = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<eos>")
    (prompt,) = PromptMaker(bare, HAY).prompts("passkey", 200, [0.5])
    assert len(prompt.ids) == 200 and prompt.ids[0] != recipe.BOS
    assert PromptMaker(TOKENIZER, HAY, prefix=()).prompts("passkey", 200, [0.5]) == [prompt]
