"""Tasks whose text is their own: what stands in it, and that the answer follows from it."""

import json
import re

import pytest
from support.prompting import MAKER, TOKENIZER

from rope_patch.evaluation.retrieval import prompts
from rope_patch.evaluation.retrieval.haystack import NOISE
from rope_patch.evaluation.retrieval.prompts import PromptMaker

DEPTHS = (0.0, 0.3, 1.0)
NOISY = PromptMaker(TOKENIZER, "noise")
UUID = r"\d[0-9a-f]{7}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
KINDS = {
    "niah_multikey_2": (r"\nOne of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.", 33),
    "niah_multikey_3": (rf"\nOne of the special magic uuids for ({UUID}) is: ({UUID})\.", 90),
    "json_kv": (rf' "({UUID})": "({UUID})"', 80),
}


def asked(prompt):
    """The question of a prompt, and what follows it."""
    return re.search(r".*((?:What|Where) (?:is|was) .*)", prompt.text, re.DOTALL)[1]


@pytest.mark.parametrize("task", KINDS)
def test_a_needle_stands_at_its_depth_among_others_of_its_kind(task):
    pattern, tokens = KINDS[task]
    prompts = MAKER.prompts(task, 3000, DEPTHS, seed=1)
    texts = [re.findall(pattern, prompt.text) for prompt in prompts]
    for prompt, depth, pairs in zip(prompts, DEPTHS, texts, strict=True):
        names, values = ([pair[i] for pair in pairs] for i in (0, 1))
        if task != "niah_multikey_2":  # of its pairs of words some come again, as in RULER
            assert len(set(names)) == len(names) and len(set(values)) == len(values)
        assert 0.75 * 3000 / tokens < len(names) < 1.5 * 3000 / tokens, "nothing but needles, down to the last one"
        (name,) = [name for name in names if name in asked(prompt)]
        place = names.index(name)
        assert prompt.parts == (values[place],)
        last = len(names) - 1 - (task == "json_kv")  # one pair more closes the object
        assert abs(place - depth * last) <= 1
    shared = set(texts[0]).intersection(*texts[1:])
    assert len(shared) >= len(texts[0]) - 3, "the others are the same for all questions"


def test_the_pairs_are_json_and_about_as_many_as_helmets():
    (prompt,) = MAKER.prompts("json_kv", 8192, [0.5])
    whole = json.loads(prompt.text[prompt.text.index("{") : prompt.text.index("}") + 1])
    (key,) = re.findall(UUID, asked(prompt))
    assert whole[key] == prompt.parts[0]
    assert 105 <= len(whole) <= 120  # 105 with Llama 2's tokenizer, which writes digits alone, as this one does


# --- tool calls and sums


@pytest.mark.parametrize("task", ["tool_call", "sums"])
def test_the_answer_completes_a_tool_call_that_stands_in_the_text_or_a_sum_that_does_not(task):
    for prompt in NOISY.prompts(task, 700, DEPTHS, seed=3):
        (part,) = prompt.parts
        if task == "tool_call":
            assert prompt.text.count('{"name": ' + part) == 1
            call = json.loads(f'{{"name": {part}')
            assert list(call) == ["name", "arguments"] and list(call["arguments"]) == ["item", "count"]
            assert prompt.text.endswith('is {"name":')
            continue
        examples = re.findall(r"(\d+) \+ (\d+) = (\d+)\.", prompt.text)
        assert len(examples) == 3 and all(int(a) + int(b) == int(c) for a, b, c in examples)
        a, b = re.search(r"\? (\d+) \+ (\d+) = ?$", prompt.text).groups()
        assert int(a) + int(b) == int(part) and f" What is {a} + {b}?" in prompt.text


# --- what all of them keep


@pytest.mark.parametrize("task", [*KINDS, "tool_call", "sums"])
def test_answers_of_all_haystacks_have_equally_many_tokens(task):
    shapes = {tuple(p.answer for p in MAKER.prompts(task, 1600, DEPTHS, sample=i)) for i in range(4)}
    assert len(shapes) == 1, "so they are asked side by side"


def test_the_last_tokens_are_those_of_the_haystack():
    for length in range(1000, 1008):
        (prompt,) = NOISY.prompts("json_kv", length, [0.5])
        after = prompt.text.partition("}\n\n")[2].partition("\n\nWhat is the value")[0]
        assert len(prompt.ids) == length and after.strip() in NOISE * 9
        assert len(TOKENIZER(after)["input_ids"]) < 90, "less than one more pair"


def test_where_no_words_fit_the_room_a_piece_of_the_tasks_own_text_makes_way(monkeypatch):
    cut = prompts._Fit._cut

    def none_below_30_tokens(fit, question, first):
        return cut(fit, question, first) if fit._excess(question) <= -30 else None

    monkeypatch.setattr(prompts._Fit, "_cut", none_below_30_tokens)
    # A piece has some 80 tokens, so that some of these lengths leave room for fewer than 30.
    for length in range(1000, 1080, 20):
        found = NOISY.prompts("json_kv", length, [0.25, 0.75])
        assert [len(prompt.ids) for prompt in found] == [length, length]
        pieces = [len(re.findall(KINDS["json_kv"][0], prompt.text)) for prompt in found]
        assert min(pieces) >= (length - 200) // 80, "one piece less, not all of them"
