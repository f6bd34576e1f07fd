"""The documents of a run: files of every kind, those that are held out, and data that is too short."""

import copy
import json

import datasets
import pytest
from support.prompting import TOKENIZER
from support.recipe_runs import recipe

from rope_patch.texts.builtin_text import builtin_text
from rope_patch.training.documents import check_documents, hold_out, length_of, read_documents

SENTENCE = "The quick brown fox jumps over the lazy dog, and number {} sleeps. "


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What ``datasets`` keeps of the files it reads stays out of the user's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def story(number, sentences=40):
    return "".join(SENTENCE.format(f"{number}.{i}") for i in range(sentences))


def jsonl(path, rows, column="text"):
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows), encoding="utf-8")
    return path


TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)


@pytest.fixture
def chatty():
    chatty_tokenizer = copy.deepcopy(TOKENIZER)
    chatty_tokenizer.chat_template = TEMPLATE
    return chatty_tokenizer


def options(source, *words):
    return recipe("model.name=llama", f"data.source={source}", "train.max_length=128", "output=out", *words)


# --- sources


def texts(asked):
    return list(read_documents(asked)["text"])


def write(folder, kind):
    """Two documents, 'one\\n\\ntwo' and 'three', as files of a kind; the file, or the folder where it takes two."""
    folder.mkdir()
    both = ["one\n\ntwo", "three"]
    table = datasets.Dataset.from_dict({"text": both})
    path = folder / f"a.{kind}"
    match kind:
        case "txt" | "md":
            for i, text in enumerate(both):
                (folder / f"{i}.{kind}").write_text(text)
            return folder
        case "jsonl" | "json":
            table.to_json(path)
        case "csv":
            table.to_csv(path)
        case "parquet":
            table.to_parquet(path)
    return path


@pytest.mark.parametrize("kind", ["txt", "md", "jsonl", "json", "csv", "parquet"])
def test_files_and_folders_of_every_kind(tmp_path, kind):
    path = write(tmp_path / "data", kind)
    for source in {path, tmp_path / "data"}:
        assert texts(options(source)) == ["one\n\ntwo", "three"], "a text file is one document"


def test_as_many_documents_are_read_as_are_asked_for(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [story(i) for i in range(5)])
    assert texts(options(source, "data.documents=2")) == [story(0), story(1)]
    assert len(texts(options(source, "data.documents=9"))) == 5
    assert texts(options("builtin")) == list(builtin_text("train").documents)


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("a")
    jsonl(tmp_path / "mixed" / "b.jsonl", ["b"])
    for name in ("empty.json", "mixed"):
        with pytest.raises(ValueError, match=f"data.source.*{name}"):
            read_documents(options(tmp_path / name))


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize("names", [("role", "content", "user", "assistant"), ("from", "value", "human", "gpt")])
def test_conversations_of_sharegpt_have_the_keys_and_roles_of_chat_templates(tmp_path, names):
    key, text, *roles = names
    turns = [{key: role, text: content} for role, content in zip(roles, ("hi", "yo"), strict=True)]
    source = jsonl(tmp_path / "a.jsonl", [turns], "conversations")
    documents = read_documents(options(source))
    assert documents.column_names == ["messages"] and documents[0]["messages"] == TALK


# --- lengths


def test_the_length_is_that_of_the_text_or_of_the_rendered_conversation(chatty):
    asked = options("builtin")
    assert length_of({"text": story(1)}, TOKENIZER, asked) == len(TOKENIZER(story(1), verbose=False).input_ids)
    rendered = chatty("<bos><user>\nhi<eos>\n<assistant>\nyo<eos>\n", add_special_tokens=False).input_ids
    assert length_of({"messages": TALK}, chatty, asked) == len(rendered)
    assert length_of({"prompt": TALK[:1], "completion": TALK[1:]}, chatty, asked) == len(rendered)
    assert length_of({"prompt": "a ", "completion": "b"}, chatty, asked) == length_of({"text": "a b"}, chatty, asked)
    other = options("builtin", "train.dataset_text_field=body")
    assert length_of({"body": "a b"}, TOKENIZER, other) == length_of({"text": "a b"}, TOKENIZER, asked)
    with pytest.raises(ValueError, match=r"column 'text'.*the data has body"):
        length_of({"body": "a b"}, TOKENIZER, asked)


def test_short_documents_are_refused_unless_allowed(tmp_path):
    source = jsonl(tmp_path / "a.jsonl", [story(i, 3) for i in range(60)])
    asked = options(source)
    with pytest.raises(ValueError, match=r"the longest has \d+ tokens, a row has 128"):
        check_documents(read_documents(asked), TOKENIZER, asked)
    allowed = options(source, "data.allow_short=true")
    check_documents(read_documents(allowed), TOKENIZER, allowed)
    mixed = options(jsonl(tmp_path / "b.jsonl", ["short", story(1)]))
    check_documents(read_documents(mixed), TOKENIZER, mixed)


# --- what is held out


def test_as_many_documents_are_held_out_as_the_windows_need(tmp_path):
    source = jsonl(tmp_path / "stories.jsonl", [story(i) for i in range(40)])  # some 1000 tokens each
    asked = options(source, "evaluation.windows=3", "evaluation.lengths=1k", "patch.target_length=1k")
    train, held_out = hold_out(read_documents(asked), TOKENIZER, asked)
    lengths = [length_of(document, TOKENIZER, asked) for document in held_out]
    assert sum(lengths[:-1]) < 3 * 1024 <= sum(lengths) and len(lengths) > 1
    assert len(train) == 40 - len(held_out) and not set(train["text"]) & set(held_out["text"])
    few = options(source, "evaluation.windows=90", "evaluation.lengths=1k")
    assert len(hold_out(read_documents(few), TOKENIZER, few)[1]) == 4, "a tenth of all at most"


def test_too_few_documents_to_hold_some_out_are_trained_on_and_it_is_said(tmp_path):
    asked = options(jsonl(tmp_path / "stories.jsonl", [story(i) for i in range(9)]))
    documents = read_documents(asked)
    with pytest.warns(UserWarning, match="text that ships with rope_patch"):
        assert hold_out(documents, TOKENIZER, asked) == (documents, None)


@pytest.mark.parametrize("word", ["evaluation.windows=0", "evaluation.text=a.txt"])
def test_nothing_is_held_out_where_the_text_is_another(tmp_path, word):
    asked = options(jsonl(tmp_path / "stories.jsonl", [story(i) for i in range(40)]), word)
    assert hold_out(read_documents(asked), TOKENIZER, asked)[1] is None
