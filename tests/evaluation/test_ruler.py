"""RULER's tasks against lm-eval's generators of them, given the same draws."""

import collections
import contextlib
import importlib
import io
import itertools
import random
import re

import pytest
from support.prompting import TOKENIZER

from rope_patch.evaluation.count_tokens import check_tasks
from rope_patch.evaluation.retrieval.haystack import Haystack
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.evaluation.tasks import TASKS, Draw
from rope_patch.evaluation.tasks.ruler import NOISE
from rope_patch.options.evaluation import EvalSpec

NAMES = [name for name, task in TASKS.items() if type(task).__module__.endswith("ruler")]
ESSAY = "It rained on Monday. Nobody went out! Who would? The road was wet. We stayed in. Tea was made. "
MAKER = PromptMaker(TOKENIZER, Haystack(ESSAY * 400))
KINDS = {
    "niah_single_1": ("repeat", {}),
    "niah_single_2": ("essay", {}),
    "niah_single_3": ("essay", {"type_needle_v": "uuids"}),
    "niah_multikey_1": ("essay", {"num_needle_k": 4}),
    "niah_multikey_2": ("needle", {}),
    "niah_multikey_3": ("needle", {"type_needle_k": "uuids", "type_needle_v": "uuids"}),
    "niah_multivalue": ("essay", {"num_needle_v": 4}),
    "niah_multiquery": ("essay", {"num_needle_q": 4}),
}
NEEDLE = r"One of the special magic (?:number|uuid)s for ([\w-]+) is: ([\w-]+)\."
DEPTHS = (0.0, 0.5, 1.0)


@pytest.fixture(scope="module")
def theirs():
    """lm-eval's generators, which look for a tokenizer of sentences on the network when they are imported.

    They also pair all nouns and adjectives, for five seconds; a thousand words are enough here.
    """
    nltk = pytest.importorskip("nltk")
    wonderwords = pytest.importorskip("wonderwords")
    stock = wonderwords.RandomWord

    def few():
        found = stock()
        found._categories = {kind: words[:1000] for kind, words in found._categories.items()}
        return found

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(nltk, "download", lambda *a, **k: False)
        patch.setattr(wonderwords, "RandomWord", few)
        names = ("prepare_niah", "niah_utils", "vt_utils", "cwe_utils", "fwe_utils", "common_utils")
        modules = {name: importlib.import_module(f"lm_eval.tasks.ruler.{name}") for name in names}
        patch.setattr(modules["prepare_niah"], "cached_sent_tokenize", lambda text: re.split(r"(?<=[.!?]) +", text))
        yield modules


@pytest.mark.parametrize("task", KINDS)
def test_needles_and_questions_are_those_of_lm_eval(task, theirs, monkeypatch):
    niah = theirs["prepare_niah"]
    kind, settings = KINDS[task]
    prompt = MAKER.prompts(task, 2000, DEPTHS, seed=4)[-1]
    pairs = re.findall(NEEDLE, prompt.text)
    asked = re.search(r"for ([\w, -]+) mentioned", prompt.text)[1].replace(", and ", ", ").split(", ")
    chosen = [pair for pair in pairs if pair[0] in asked]
    # In the order in which lm-eval draws them: a key with its values, and then what nobody asks for.
    drawn = [text for key in asked for text in (key, *(value for name, value in chosen if name == key))]
    drawn += [text for pair in pairs if pair not in chosen for text in pair]
    supply = iter(drawn)
    monkeypatch.setattr(niah, "generate_random", lambda _: next(supply))
    monkeypatch.setattr(niah.random, "sample", lambda those, count: list(those)[:count])
    haystack = niah.get_haystack(kind) if kind != "essay" else (ESSAY * 40).split()
    counts = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1, "type_needle_k": "words"} | settings
    counts["num_needle_k"] = max(counts["num_needle_k"], counts["num_needle_q"])
    counts.setdefault("type_needle_v", "numbers")
    units = len(pairs) - 1 if kind == "needle" else prompt.text.count(NOISE) or 100
    text, answers, query = niah.generate_input_output(
        units, haystack, type_haystack=kind, template=theirs["niah_utils"].TEMPLATE, **counts
    )
    assert sorted(answers) == sorted(prompt.parts) and query in prompt.text
    assert set(re.findall(NEEDLE, text)) == set(pairs) and len(chosen) == len(prompt.parts)
    # What stands before and after the text, and between the needles.
    question = text[text.rindex("\n") :]
    assert question in prompt.text and text.partition("\n")[0] == prompt.text.partition("\n")[0]
    ours = re.sub(rf"(^|\s){NEEDLE}", "", prompt.text.partition("\n")[2].rpartition(question)[0])
    between = re.sub(rf"\s?{NEEDLE}", "", text.partition("\n")[2].rpartition(question)[0]).strip()
    if kind == "essay":
        assert ours.strip() in ESSAY * 400
    else:
        assert ours.strip().startswith(between)
        assert len(ours) - len(between) < 400, "less than one piece more, to fill the exact length"


def test_the_beginning_of_an_answer_is_lm_evals(theirs):
    for task, (kind, settings) in KINDS.items():
        (made,) = theirs["prepare_niah"].generate_samples(
            theirs["prepare_niah"].get_haystack(kind) if kind != "essay" else (ESSAY * 40).split(),
            TOKENIZER, max_seq_length=1500, type_haystack=kind, num_samples=1, template=theirs["niah_utils"].TEMPLATE,
            **({"type_needle_k": "words", "type_needle_v": "numbers"} | settings),
        )  # fmt: skip
        ours = MAKER.prompts(task, 1500, DEPTHS)[0].text.rpartition("? ")[2].strip()
        assert re.sub(r"for .* mentioned", "", made["gen_prefix"]) == re.sub(r"for .* mentioned", "", ours)


def test_a_chain_of_variables_is_lm_evals(theirs, monkeypatch):
    (question,) = TASKS["vt"].questions(DEPTHS, Draw(TOKENIZER, random.Random(5)))
    links = [link.strip(" ") + " " * (number > 0) for number, (_, link) in enumerate(question.hidden)]
    variables = theirs["vt_utils"]
    monkeypatch.setattr(variables, "generate_chains", lambda *a, **k: ([list(question.parts)], [links]))
    monkeypatch.setattr(variables.random, "sample", lambda places, count: [2 * i for i in range(count)])
    text, names = variables.generate_input_output(12, 1, 4)
    example, _, opening = question.opening.rpartition("\n\n\n\n")
    pieces = question.context(12)
    for number, (_, link) in enumerate(question.hidden):
        pieces.insert(3 * number, link)
    assert text == (opening + "".join(pieces).lstrip() + question.text + question.answer_prefix + " ")
    assert names == list(question.parts) and len(names) == len(set(names)) == 5
    # The worked example has its own chain, of names of three letters, in the same words, with its answer.
    own = re.search(r"the value (\d{5})", question.text)[1]
    value = re.search(r"VAR [A-Z]{3} = (\d{5})", example)[1]
    chain = [re.search(rf"VAR ([A-Z]{{3}}) = {value}", example)[1]]
    while following := re.findall(rf"VAR ([A-Z]{{3}}) = VAR {chain[-1]}", example):
        chain += following
    assert example.endswith(question.answer_prefix.replace(own, value) + " " + " ".join(chain))
    assert len(chain) == 5 and example.startswith(opening) and example.count(NOISE) == 10


@pytest.mark.parametrize("length", [2048, 4096])
def test_common_words_are_as_often_as_in_lm_evals_list(length, theirs):
    words = theirs["cwe_utils"]
    (question,) = TASKS["cwe"].questions(DEPTHS, Draw(TOKENIZER, random.Random(5), length))
    _, text, answer = words.generate_input_output(50, length)
    ours = question.opening + "".join(question.context(40)).lstrip() + question.text + question.answer_prefix
    listed = [re.findall(r"(\d+)\. ([^\d\s][^\d]*?)(?= \d+\.|\n)", one) for one in (text, ours)]
    counts = [collections.Counter(word for _, word in one) for one in listed]
    assert sorted(counts[0].values()) == sorted(counts[1].values())
    assert {word for word, _ in counts[1].most_common(10)} == set(question.parts)
    assert [int(number) for number, _ in listed[1]] == list(range(1, 1 + len(listed[1])))
    assert len(answer) == len(question.parts) == 10
    bare = [re.sub(r" ?\d+\. [^\d\n]+", "", one) for one in (text, ours)]
    assert bare[0] == bare[1]


def test_coded_words_are_as_often_as_in_lm_evals_text(theirs):
    words = theirs["fwe_utils"]
    (question,) = TASKS["fwe"].questions(DEPTHS, Draw(TOKENIZER, random.Random(5), 4096))
    text, answer, _ = words.generate_input_output(10**6, TOKENIZER, num_words=1100, vocab_size=4096 // 50)
    ours = question.opening + "".join(question.context(1000)).lstrip() + question.text + question.answer_prefix
    head, tail = question.opening, question.text + question.answer_prefix
    assert text.startswith(head) and text.endswith(tail)
    found = [collections.Counter(one[len(head) : -len(tail)].split()) for one in (text, ours)]
    ranked = [[count for _, count in one.most_common()] for one in found]
    assert ranked[0] == ranked[1] and found[1].most_common(1)[0][0] == "..."
    assert [word for word, _ in found[1].most_common(4)[1:]] == list(question.parts) and len(answer) == 3


@pytest.mark.parametrize("task", NAMES)
def test_prompts_have_the_exact_length_and_needles_stand_between_sentences(task):
    noisy = PromptMaker(TOKENIZER, "noise")
    for length, sample in itertools.product((1500, 2500, 5000), (0, 1)):
        for prompt in noisy.prompts(task, length, DEPTHS, seed=1, sample=sample):
            assert len(prompt.ids) - prompt.answer + TASKS[task].generated == length == prompt.length
            assert prompt.text.count(prompt.parts[0]) >= 1
            for before in re.findall(rf"(\S+)\s{NEEDLE}", prompt.text):
                assert re.search(r"[.!?][\"')”’_]*$|:", before[0]) and before[0] not in ("Mr.", "Mrs.")
    # Noise is no essay: the built-in text stands in its place.
    assert noisy.haystack_of(task).name == ("builtin" if TASKS[task].essay else "noise")


def test_the_name_of_the_suite_is_among_the_known_ones():
    with pytest.raises(ValueError, match=r"Did you mean 'ruler'\? Known: .*, ruler"):
        check_tasks(EvalSpec([64], tasks=("RULER",)))
