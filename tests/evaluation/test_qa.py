"""Questions of SQuAD and HotpotQA from a file, against lm-eval's reading of the same files and its prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.prompting import TOKENIZER

from rope_patch.evaluation.retrieval.haystack import Haystack
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.evaluation.tasks import TASKS
from rope_patch.options.evaluation import EvalSpec

MAKER = PromptMaker(TOKENIZER, Haystack("It rained on Monday. Nobody went out! Tea was made. " * 400))


def squad():
    """Return three articles of two paragraphs, in SQuAD's form."""

    def paragraph(name):
        asked = {"question": f"Where is {name}?", "answers": [{"text": f"{name}ton"}, {"text": f"old {name}ton"}]}
        without = {"question": f"Why is {name}?", "answers": [], "is_impossible": True}
        return {"context": f"{name} is in old {name}ton.", "qas": [asked | {"is_impossible": False}, without]}

    return {"data": [{"paragraphs": [paragraph(a), paragraph(b)]} for a, b in ("Ab", "Cd", "Ef")]}


def hotpotqa():
    """Return two questions about two paragraphs each, in HotpotQA's form."""
    return [
        {"question": f"Who is {name}?", "answer": f"{name} I", "context": [[name, ["One. ", "Two."]], [f"{name}s", []]]}
        for name in ("Ab", "Cd")
    ]


def written(folder, content, name="squad"):
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content))
    return str(path)


KINDS = {"squad": squad, "hotpotqa": hotpotqa}


@pytest.fixture(params=KINDS)
def file(request, tmp_path):
    return Path(written(tmp_path, KINDS[request.param](), request.param))


@pytest.fixture
def theirs(file, monkeypatch):
    """The questions and documents that lm-eval reads of the same file, and its module."""
    module = pytest.importorskip("lm_eval.tasks.ruler.qa_utils")
    monkeypatch.setattr(module, "download_json", lambda url: json.loads(file.read_text()))
    reader = getattr(module, f"read_{file.stem}").__wrapped__
    return module, *reader()


def test_the_questions_of_a_file_are_those_that_lm_eval_reads(file, theirs):
    _, questions, documents = theirs
    task = TASKS[str(file)]
    assert task.documents == documents
    asked = [(one["query"], list(dict.fromkeys(one["outputs"]))) for one in questions]
    assert [(one.text, one.answers) for one in task.asked] == asked
    assert [one.documents for one in task.asked] == [[documents[i] for i in one["context"]] for one in questions]
    related = [[documents[i] for i in one.get("more_context", [])] for one in questions]
    assert [list(one.related) for one in task.asked] == related


def test_a_prompt_is_lm_evals_with_a_last_document_of_the_haystack(file, theirs):
    module, questions, documents = theirs
    (prompt,) = MAKER.prompts(str(file), 400, (0.5,))
    shown = re.findall(r"Document \d+:\n(.*?)\n\n(?=Document|Answer)", prompt.text, re.DOTALL)
    (asked,) = [one for one in questions if f"Question: {one['query']} Answer:" in prompt.text]
    assert {documents[i] for i in asked["context"]} <= set(shown[:-1]) <= set(documents)
    assert prompt.parts[0].split(" | ") == list(dict.fromkeys(asked["outputs"]))
    context = "\n\n".join(module.DOCUMENT_PROMPT.format(i=i, document=text) for i, text in enumerate(shown, 1))
    assert prompt.text.removesuffix(" ") == module.TEMPLATE.format(context=context, query=asked["query"]) + " Answer:"
    assert len(prompt.ids) + prompt.beyond == 400


def test_any_of_the_answers_is_right(tmp_path):
    task = TASKS[written(tmp_path, squad())]
    assert [task.correct("Abton | the old town", said) for said in ("In THE old town.", "old")] == [True, False]


def test_no_question_comes_twice_and_too_long_ones_never(tmp_path):
    content = squad()
    content["data"][0]["paragraphs"][0]["context"] *= 100
    path = written(tmp_path, content)
    asked = [MAKER.prompts(path, 400, (0.5,), sample=i)[0].parts for i in range(5)]
    assert len(set(asked)) == 5
    with pytest.raises(ValueError, match=r"5 of the 6 questions of squad\.json fit into 400 tokens: ask at most 5"):
        EvalSuite(EvalSpec([400], tasks=[path], samples=6, windows=0), TOKENIZER)


@pytest.mark.parametrize("length", [402, 405])
def test_the_paragraph_of_a_question_stays_where_a_piece_less_fits(tmp_path, length):
    coarse = PromptMaker(TOKENIZER, Haystack("東京都🎉渋谷区 " * 400))  # characters of many tokens
    (prompt,) = coarse.prompts(written(tmp_path, squad()), length, (0.5,))
    assert prompt.parts[0].partition("ton")[0] + " is in old" in prompt.text


def test_a_file_that_was_changed_is_read_again(tmp_path):
    assert len(TASKS[written(tmp_path, squad())].asked) == 6
    assert len(TASKS[written(tmp_path, {"data": squad()["data"][:1]})].asked) == 2


BLANK = {"context": "c", "qas": [{"question": "q", "answers": [{"text": " "}]}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not JSON", "no questions of SQuAD or HotpotQA"),
        (json.dumps({"data": [{"paragraphs": [BLANK]}]}), "no question with an answer"),
        (None, "found no file"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "other.json"
    if content:
        path.write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        TASKS.find(str(path))
