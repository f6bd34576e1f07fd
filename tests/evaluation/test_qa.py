"""Questions of SQuAD and HotpotQA from a file, against lm-eval's reading of the same files and its prompts."""

from __future__ import annotations

import json
import re

import pytest
from support.prompting import TOKENIZER

from rope_patch.evaluation.count_tokens import check_tasks
from rope_patch.evaluation.retrieval.haystack import Haystack
from rope_patch.evaluation.retrieval.prompts import PromptMaker
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


KINDS = {"squad": squad, "hotpotqa": hotpotqa}


@pytest.fixture(params=KINDS)
def file(request, tmp_path):
    path = tmp_path / f"{request.param}.json"
    path.write_text(json.dumps(KINDS[request.param]()))
    return path


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
    assert [(one.text, list(one.answers)) for one in task.asked] == [
        (one["query"], one["outputs"]) for one in questions
    ]
    assert [one.documents for one in task.asked] == [[documents[i] for i in one["context"]] for one in questions]
    related = [[documents[i] for i in one.get("more_context", [])] for one in questions]
    assert [list(one.related) for one in task.asked] == related


@pytest.mark.parametrize("sample", range(4))
def test_a_prompt_is_lm_evals_with_a_last_document_of_the_haystack(file, theirs, sample):
    module, questions, documents = theirs
    (prompt,) = MAKER.prompts(str(file), 400, (0.5,), sample=sample)
    shown = re.findall(r"Document \d+:\n(.*?)\n\n(?=Document|Answer)", prompt.text, re.DOTALL)
    (asked,) = [one for one in questions if f"Question: {one['query']} Answer:" in prompt.text]
    assert {documents[i] for i in asked["context"]} <= set(shown[:-1]) <= set(documents)
    assert prompt.parts[0].split(" | ") == list(dict.fromkeys(asked["outputs"]))
    context = "\n\n".join(module.DOCUMENT_PROMPT.format(i=i, document=text) for i, text in enumerate(shown, 1))
    assert prompt.text.removesuffix(" ") == module.TEMPLATE.format(context=context, query=asked["query"]) + " Answer:"
    assert len(prompt.ids) + prompt.beyond == 400


def test_any_of_the_answers_is_right(tmp_path):
    (tmp_path / "squad.json").write_text(json.dumps(squad()))
    task = TASKS[str(tmp_path / "squad.json")]
    assert task.correct("Abton | the old town", " It is ABTON.") and task.correct(
        "Abton | the old town", "the old town"
    )
    assert not task.correct("Abton | the old town", "old")


def test_a_prompt_does_not_depend_on_where_the_file_lies(tmp_path):
    prompts = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "dev.json"
        path.write_text(json.dumps(squad()))
        prompts.append(MAKER.prompts(str(path), 400, (0.5,))[0].text)
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize("content", ["[1]", "{}", "not JSON"])
def test_other_files_are_refused(tmp_path, content):
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(ValueError, match="holds no questions of SQuAD or HotpotQA"):
        check_tasks(EvalSpec([256], tasks=[str(tmp_path / "other.json")]))
    with pytest.raises(ValueError, match=r"unknown retrieval task 'missing.json'"):
        check_tasks(EvalSpec([256], tasks=["missing.json"]))
