"""Where a prompt ends and its answer begins, under tokenizers of every kind, and in a chat."""

import copy
import hashlib
import json

import pytest
from support.evaluated import result_of, retrieval_of
from support.number_tokenizers import KINDS, tokenizer_of
from support.prompting import HAY, ROOM, TOKENIZER
from support.tiny import small

from rope_patch.evaluation.retrieval.chat_template import chat_frame
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.evaluation.suite import retrieval_warnings
from rope_patch.evaluation.tasks import TASKS

TEMPLATE = (
    "{{ '<bos>' }}{% for message in messages %}{{ '[' + message['role'] + ']\\n' + message['content'] | trim + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]\\n' }}{% endif %}"
)


@pytest.mark.parametrize("task", ["passkey", "vt", "json_kv", "sums"])  # numbers, names, codes
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_ends_at_the_last_token_that_is_not_of_the_value(kind, task):
    tokenizer = tokenizer_of(kind)
    maker = PromptMaker(tokenizer, HAY)
    length = 400 + 2 * ROOM.get(task, 0)
    for prompt in maker.prompts(task, length, [0.0, 0.5, 1.0]):
        assert prompt.length == length
        assert maker.encode(prompt.text) == list(prompt.ids[: -prompt.answer])
        assert maker.encode(prompt.text + prompt.target) == list(prompt.ids)
        value = tokenizer(prompt.text.rstrip(" ") + " " + prompt.target.strip()[:9], add_special_tokens=False)[
            "input_ids"
        ]
        bare = tokenizer(prompt.text.rstrip(" ") + " ", add_special_tokens=False)["input_ids"]
        own_token = value[: len(bare)] == bare
        assert prompt.text.endswith(" ") is own_token and prompt.target.startswith(" ") is not own_token


# --- in a chat


@pytest.fixture
def chatty():
    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.mark.parametrize("task", TASKS)
def test_a_chat_prompt_is_the_template_with_the_assistants_turn_begun(chatty, task):
    maker = PromptMaker(chatty, HAY, frame=chat_frame(chatty))
    length = 400 + ROOM.get(task, 0)
    for prompt in maker.prompts(task, length, [0.0, 0.5, 1.0]):
        body, _, said = prompt.text.rpartition("\n[assistant]\n")
        content = body.removeprefix("<bos>[user]\n")
        message = [{"role": "user", "content": content}]
        rendered = chatty.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        assert prompt.text == rendered + said
        assert prompt.length == length
        assert chatty(prompt.text + prompt.target, add_special_tokens=False)["input_ids"] == list(prompt.ids)
        assert content.endswith(("?", "above.")) and said.strip().endswith((" is", " are", " =", ":"))
        assert task == "sums" or all(part in content for part in prompt.parts)


DATED = """{%- set today = strftime_now("%d %b %Y") -%}
{% macro line() %}Now {{ strftime_now('%A, %-d %B %Y') }}{% endmacro %}
[system]
Today: {{ today }}. {{ line() }}
[user]
{{ messages[0]['content'] }}
[assistant]
"""


def test_a_template_that_prints_the_date_always_prints_the_same(chatty):
    chatty.chat_template = DATED
    before, after = chat_frame(chatty)
    assert before == "[system]\nToday: 26 Jul 2024. Now Friday, 26 July 2024\n[user]\n" and after == "\n[assistant]"
    message = [{"role": "user", "content": "x"}]
    today = chatty.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert len(before.splitlines()) == len(today.partition("x")[0].splitlines()), "nothing else is changed"


def test_auto_is_a_chat_where_there_is_a_template_and_the_result_says_which(chatty):
    asked = {"lengths": [100], "depths": [0.5], "samples": 1, "haystack": HAY}
    first = retrieval(small(), chatty, **asked)
    digest = hashlib.sha256(json.dumps(chat_frame(chatty)).encode()).hexdigest()
    assert first.chat is True and first.chat_sha256 == digest
    chatty.chat_template = TEMPLATE.replace("[assistant]", "[model]")
    assert retrieval(small(), chatty, **asked).chat_sha256 not in (digest, "")
    for plain in (retrieval(small(), TOKENIZER, **asked), retrieval(small(), chatty, **asked, chat_template="off")):
        assert plain.chat is False and plain.chat_sha256 == ""
    with pytest.raises(ValueError, match="template"):
        retrieval(small(), TOKENIZER, **asked, chat_template="on")


@pytest.mark.parametrize("template", ["{{ raise_exception('no users here') }}", "{{ messages[0]['content'] | upper }}"])
def test_auto_falls_back_to_plain_text_and_says_so_where_a_template_cannot_be_used(chatty, template):
    chatty.chat_template = template
    with pytest.warns(UserWarning, match="plain"):
        assert chat_frame(chatty, "auto") is None
    with pytest.raises(ValueError, match="off"):
        chat_frame(chatty, "on")


# --- scores that are low within the trained length


def answered_by(*shares):
    """Scores of ten prompts at each of two lengths, of which these shares are right."""
    hits = {(n, 0.5): [i < 10 * share for i in range(10)] for n, share in zip((64, 128), shares, strict=True)}
    return result_of(None, retrieval_of(hits))


@pytest.mark.parametrize(
    ("right", "trained", "words"),
    [
        ({"default": (0.5, 0.0)}, 64, ("without a patch", "5 of 10", "64", "--tasks")),
        ({"default": (0.3, 0.0), "yarn": (1.0, 0.0)}, 64, ("without a patch", "3 of 10")),
        ({"yarn": (0.6, 0.0), "pi": (0.3, 0.0)}, 64, ("6 of 10", "not measured")),
        ({"default": (0.8, 0.0)}, 64, ()),  # .8 of .75
        ({"yarn": (0.8, 0.0), "pi": (0.0, 0.0)}, 64, ()),  # one method does, so the task is not too hard
    ],
)
def test_failing_within_the_trained_length_is_said_with_what_to_try(right, trained, words):
    scores = {method: answered_by(*shares) for method, shares in right.items()}
    sentences = retrieval_warnings(scores, "default", trained)
    assert len(sentences) == bool(words)
    assert all(word in sentences[0] for word in words)
