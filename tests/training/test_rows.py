"""From documents to rows on disk, from a checkpoint to what is trained: nothing lost, nothing learnt by accident."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import random
import re
import warnings
from collections import Counter
from pathlib import Path

import datasets
import peft
import pytest
import torch
from fresh import run_code
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PeftModel
from scored import bold_model
from tiny import ARCHITECTURES, SIZE, ids, logits, tiny_config
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, MixtralConfig, TrainingArguments

import rope_patch
from rope_patch.checkpoints.adapters import read_record
from rope_patch.evaluation.documents import TokenDocument, encode
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.evaluation.tasks import NEEDLES
from rope_patch.evaluation.text import builtin_text
from rope_patch.modeling.loss import IGNORED
from rope_patch.patching.locate import PatchError, find_rotary
from rope_patch.planning import shape_of
from rope_patch.training import sources
from rope_patch.training.collators import Collator, PackedCollator
from rope_patch.training.data import WeightedDocument, conversation, mix, pack, prompt_row
from rope_patch.training.models import load_model, long_lora_modules, pattern, prepare, resolve, target_names
from rope_patch.training.options import DataOptions, EvaluationOptions, ModelOptions
from rope_patch.training.reading import read
from rope_patch.training.scores import SEED, RecipeEvaluator
from rope_patch.training.sources import PackedRows, make_rows, open_source, plan_stages, token_documents
from rope_patch.training.trainer import LongTrainer

LLAMA = rope_patch.data_path("assets") / "llama"
SENTENCE = "The quick brown fox jumps over the lazy dog, and number {} sleeps. "


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(LLAMA)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """What ``datasets`` keeps of the files it reads stays out of the user's folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.disable_progress_bars()


def story(number, sentences=40):
    return "".join(SENTENCE.format(f"{number}.{i}") for i in range(sentences))


def jsonl(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture
def stories(tmp_path):
    """Twelve documents of some 1000 tokens each."""
    return jsonl(tmp_path / "stories.jsonl", [story(i) for i in range(12)])


def options(source, *words):
    given = ["model.name=llama", f"data.source={source}", "data.lengths=128", "train.steps=4", "train.accumulate=2"]
    return read(overrides=[*given, "output=out", *words])


def rows_of(items):
    return [row for item in items for row in item]


def messages(*turns):
    return [{"role": role, "content": text} for role, text in turns]


# --- packing with weights


LISTS = st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=10)


@settings(deadline=None, max_examples=60)
@given(sizes=LISTS, length=st.integers(2, 12), boundaries=st.sampled_from(["join", "apart", "whole"]))
def test_every_token_keeps_its_weight(sizes, length, boundaries):
    """Weights are the token's own number, 1 where a document has none; so one that slips by a token shows."""
    counter, documents, expected = itertools.count(2), [], {}
    for size, weighted in sizes:
        drawn_tokens = [next(counter) for _ in range(size)]
        expected |= {token: float(token) if weighted else 1.0 for token in drawn_tokens}
        tokens = torch.tensor(drawn_tokens, dtype=torch.long)
        documents.append(
            WeightedDocument("a", tokens, weights=tokens.float()) if weighted else TokenDocument("a", tokens)
        )
    weights_read = {}
    for row in pack(documents, length, boundaries):
        if row["weights"] is None:
            assert all(expected[token] == 1.0 for token in row["ids"]), "a weighted document in a row without weights"
        else:
            assert len(row["weights"]) == len(row["ids"])
            assert any(expected[token] != 1.0 for token in row["ids"]), "nothing in this row has a weight"
        weights_read |= dict(zip(row["ids"], row["weights"] or [1.0] * len(row["ids"]), strict=True))
    assert weights_read == expected


def test_rows_share_no_list():
    rows = list(pack([TokenDocument("a", torch.arange(12))], 4))
    rows[0]["ids"].append(99)
    assert [row["ids"] for row in rows[1:]] == [[4, 5, 6, 7], [8, 9, 10, 11]]


# --- retrieval prompts among rows


class Stub:
    """Makes prompts that say what they were asked for."""

    def __init__(self):
        self.asked = []

    def prompts(self, task, length, depths, *, seed, sample):
        self.asked.append((task, length, tuple(depths), seed, sample))
        tokens = (1, *random.Random(seed).choices(range(100, 200), k=length - 1))
        return [Prompt("", "", tokens, 3, (), (), tuple(depths))]


def plain(count, size=8):
    return [{"ids": [i] * size, "index": i, "starts": [0], "weights": None} for i in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.9])
def test_no_row_is_lost_and_the_share_is_what_was_asked_for(share):
    mixed = list(mix(plain(300), Stub(), share, 8, first=7))
    assert [row["ids"][0] for row in mixed if row["weights"] is None] == list(range(300)), "all, in order"
    assert [row["index"] for row in mixed] == list(range(7, 7 + len(mixed))), "numbered anew, without a gap"
    prompts = sum(row["weights"] is not None for row in mixed)
    deviation = 4 * (share * (1 - share) / len(mixed)) ** 0.5
    assert prompts / len(mixed) == pytest.approx(share, abs=deviation)


def test_prompts_alone_need_no_rows():
    rows = list(itertools.islice(mix(iter(()), Stub(), 1.0, 8), 20))
    assert len(rows) == 20 and all(row["weights"] is not None for row in rows)
    assert list(mix(iter(()), Stub(), 0.0, 8)) == []


def test_prompts_follow_from_seed_and_number():
    def drawn(seed, first, count=60):
        rows = itertools.islice(mix(plain(200), Stub(), 0.5, 8, seed=seed, first=first), count)
        return {row["index"]: row["ids"] for row in rows if row["weights"] is not None}

    whole, later, other = drawn(0, 0), drawn(0, 30), drawn(1, 0)
    assert whole == drawn(0, 0)
    both = set(range(30, 60))
    assert {i: whole[i] for i in whole if i in both} == {i: later[i] for i in later if i in both}, "wherever it starts"
    assert set(whole) != set(other) and not {*map(tuple, whole.values())} & {*map(tuple, other.values())}
    assert len({*map(tuple, whole.values())}) == len(whole), "no prompt twice"


def test_a_task_that_asks_for_all_its_needles_has_several():
    stub = Stub()
    for task in ("passkey", "niah", "multivalue", "multiquery", "vt"):
        next(mix(plain(1), stub, 1.0, 8, task=task))
    assert [len(depths) for _, _, depths, _, _ in stub.asked] == [1, 1, NEEDLES, NEEDLES, NEEDLES]
    assert NEEDLES > 1 and all(0 <= depth <= 1 for _, _, depths, _, _ in stub.asked for depth in depths)
    with pytest.raises(ValueError, match=r"^unknown task 'x' in mode 'single'"):
        next(mix(plain(1), stub, 1.0, 8, task="x"))


@pytest.mark.parametrize("task", ["passkey", "niah", "multivalue", "multiquery", "vt"])
def test_weights_of_a_prompt_cover_exactly_the_answer(tokenizer, task):
    maker = PromptMaker(tokenizer, Haystack(story(0, 200)))
    row = next(mix(iter(()), maker, 1.0, 320, task=task, answer_weight=7.0, seed=3))
    weights = torch.tensor(row["weights"])
    assert len(row["ids"]) == len(weights) == 320 and row["starts"] == [0]
    assert set(row["weights"]) == {1.0, 7.0}
    answer = tokenizer.decode([token for token, weight in zip(row["ids"], weights, strict=True) if weight == 7])
    question = tokenizer.decode([token for token, weight in zip(row["ids"], weights, strict=True) if weight == 1])
    assert bool((weights.diff() >= 0).all()), "it is the end"
    assert re.fullmatch(r" ?(\d{5}|\d{7}|\d{7}(, \d{7}){3}|[A-Z]{3}(, [A-Z]{3}){3})", answer), answer
    for part in re.findall(r"\w+", answer):
        assert part in question, "what is asked for stands in the text"
    assert question.rstrip(" ").endswith(("is", "are")), question[-40:]


def test_a_prompt_without_weight_is_not_learnt():
    prompt = Prompt("", "", tuple(range(8)), 3, (), (), (0.5,))
    assert prompt_row(prompt, 5, 0.0) == {
        "ids": list(range(8)),
        "index": 5,
        "starts": [0],
        "weights": [1.0] * 5 + [0.0] * 3,
    }
    labels = Collator()([prompt_row(prompt, 5, 0.0)])["labels"][0].tolist()
    assert labels == [0, 1, 2, 3, 4, IGNORED, IGNORED, IGNORED]


def test_training_asks_nothing_that_an_evaluation_asks(tokenizer):
    """The same text, length and depth; keys are drawn from other seeds."""
    maker = PromptMaker(tokenizer, Haystack(story(0, 200)))
    trained = list(itertools.islice(mix(iter(()), maker, 1.0, 128), 40))
    evaluated = [maker.prompts("passkey", 128, [0.5], seed=SEED, sample=i)[0] for i in range(40)]
    assert not {tuple(row["ids"]) for row in trained} & {prompt.ids for prompt in evaluated}
    answers = {tuple(row["ids"][-5:]) for row in trained}
    assert len(answers) == 40 and not answers & {prompt.ids[-5:] for prompt in evaluated}


# --- conversations


TEMPLATE = (
    "{{ '<bos>' }}{% for m in messages %}{{ '<' + m.role + '>\n' + m.content + '<eos>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
FORGETFUL = TEMPLATE.replace("m.content", "(m.content if loop.last else m.content.split('|')[-1])")
RUNNING_ON = "{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = "{{ raise_exception('roles must take turns') }}"
TALK = messages(("system", "Be brief."), ("user", "hi 12"), ("assistant", "yo man"), ("user", "34"), ("assistant", "5"))


@pytest.fixture
def chatty(tokenizer):
    chatty_tokenizer = copy.deepcopy(tokenizer)
    chatty_tokenizer.chat_template = TEMPLATE
    return chatty_tokenizer


def learnt(tokenizer, document):
    """What counts, as stretches of text."""
    weights, tokens = document.weights.tolist(), document.ids.tolist()
    assert set(weights) <= {0.0, 1.0} and len(weights) == len(tokens)
    groups = itertools.groupby(zip(tokens, weights, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in group]) for weight, group in groups if weight]


def test_only_the_assistants_words_are_learnt(chatty):
    document = conversation(chatty, TALK, "assistant")
    expected = (
        "<bos><system>\nBe brief.<eos>\n<user>\nhi 12<eos>\n<assistant>\nyo man<eos>\n"
        "<user>\n34<eos>\n<assistant>\n5<eos>\n"
    )
    assert document.ids.tolist() == chatty(expected, add_special_tokens=False)["input_ids"], "one beginning, not two"
    assert learnt(chatty, document) == ["yo man<eos>\n", "5<eos>\n"], "each with what ends it, and nothing of its head"
    assert document.ids.dtype == torch.long


def test_all_of_a_conversation_may_be_learnt(chatty):
    document = conversation(chatty, TALK, "all")
    assert not isinstance(document, WeightedDocument)
    assert torch.equal(document.ids, conversation(chatty, TALK, "assistant").ids)


def test_several_answers_in_a_row_and_none_at_all(chatty):
    twice = messages(("user", "a"), ("assistant", "bc"), ("assistant", "de"))
    assert learnt(chatty, conversation(chatty, twice, "assistant")) == ["bc<eos>\n", "de<eos>\n"]
    assert learnt(chatty, conversation(chatty, messages(("user", "a")), "assistant")) == []


def test_an_answer_that_opens_a_conversation_does_not_count(chatty):
    """There is nothing before it to render, so nothing tells where its head ends."""
    opened = messages(("assistant", "hello"), ("user", "a"), ("assistant", "bc"))
    assert learnt(chatty, conversation(chatty, opened, "assistant")) == ["bc<eos>\n"]


@pytest.mark.parametrize("template", [FORGETFUL, RUNNING_ON])
def test_a_template_whose_turns_run_into_each_other_is_refused(chatty, template):
    """One drops what was thought in earlier turns; in the other 'th' and 'e' make one token across the seam."""
    chatty.chat_template = template
    talk = messages(("user", "th"), ("assistant", "e|x"), ("user", "c"), ("assistant", "d"))
    with pytest.raises(ValueError, match=r"^this chat template renders earlier turns differently.*set data.learn=all$"):
        conversation(chatty, talk, "assistant")
    assert len(conversation(chatty, talk, "all").ids)


def test_conversations_that_cannot_be_rendered_are_named(tokenizer, chatty):
    with pytest.raises(ValueError, match=r"^this tokenizer has no chat template: set tokenizer.chat_template"):
        conversation(tokenizer, TALK, "all")
    chatty.chat_template = STRICT
    with pytest.raises(ValueError, match=r"^the chat template refuses a conversation: roles must take turns$"):
        conversation(chatty, TALK, "assistant")


def test_columns_of_messages_and_of_text(chatty):
    data = DataOptions(lengths=128, column="messages", learn="assistant")
    (conversation_document,) = token_documents(chatty, [{"messages": []}, {"messages": TALK}], data)
    assert isinstance(conversation_document, WeightedDocument)
    text = DataOptions(lengths=128)
    documents = list(token_documents(chatty, [{"text": "a b"}, {"text": " \n"}, {"text": "c"}], text))
    assert [chatty.decode(document.ids) for document in documents] == ["<bos>a b", "<bos>c"]


@pytest.mark.parametrize(
    ("value", "learn", "message"),
    [
        (None, "all", "data.column: row 1 holds neither text nor messages, but NoneType"),
        (7, "all", "data.column: row 1 holds neither text nor messages, but int"),
        (["a", "b"], "all", "data.column: row 1 holds neither text nor messages, but list"),
        ([{"from": "human"}], "all", "data.column: row 1 holds neither text nor messages, but list"),
        ("plain", "assistant", "data.learn=assistant needs a column of messages, and this one holds plain text"),
    ],
)
def test_what_is_neither_text_nor_messages_is_named(chatty, value, learn, message):
    source = [{"text": TALK}, {"text": value}]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        list(token_documents(chatty, source, DataOptions(lengths=128, learn=learn)))


# --- sources


def texts(data, seed=0, epoch=0):
    return [row[data.column] for row in open_source(data, seed, epoch)]


def write(folder, kind):
    """Two documents, 'one\\n\\ntwo' and 'three', as files of a kind; the file, or the folder where it takes two."""
    folder.mkdir()
    both = ["one\n\ntwo", "three"]
    match kind:
        case "txt" | "md":
            for i, text in enumerate(both):
                (folder / f"{i}.{kind}").write_text(text)
            return folder
        case "jsonl":
            return jsonl(folder / "a.jsonl", both)
        case "json":
            (folder / "a.json").write_text(json.dumps([{"text": text} for text in both]))
        case "csv":
            (folder / "a.csv").write_text('text,other\n"one\n\ntwo",1\nthree,2\n')
        case "parquet":
            datasets.Dataset.from_dict({"text": both}).to_parquet(folder / "a.parquet")
    return folder / f"a.{kind}"


@pytest.mark.parametrize("kind", ["txt", "md", "jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("streaming", [False, True])
def test_files_and_folders_of_every_kind(tmp_path, kind, streaming):
    path = write(tmp_path / "data", kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # datasets leaves CSV files that it streams open
        for source in {path, tmp_path / "data"}:
            data = DataOptions(source=str(source), lengths=128, streaming=streaming, shuffle=False)
            assert texts(data) == ["one\n\ntwo", "three"], "a text file is one document"
        gc.collect()


def test_a_single_text_file_and_a_folder_of_folders(tmp_path):
    (tmp_path / "data" / "x" / "b.txt").mkdir(parents=True)  # a folder called like a file
    (tmp_path / "data" / "x" / "b.txt" / "a.md").write_text("inside")
    (tmp_path / "data" / "notes.bin").write_text("left out")
    assert texts(DataOptions(source=str(tmp_path / "data"), lengths=8)) == ["inside"]
    (tmp_path / "a.txt").write_text("alone")
    assert texts(DataOptions(source=str(tmp_path / "a.txt"), lengths=8)) == ["alone"]


def test_a_changed_file_is_read_again(stories):
    data = DataOptions(source=str(stories), lengths=128)
    assert len(texts(data)) == 12
    jsonl(stories, ["new"])
    assert texts(data) == ["new"]


def test_the_built_in_text_is_that_of_training():
    documents = texts(DataOptions(lengths=128, shuffle=False))
    assert documents == list(builtin_text("train").documents)


def test_the_order_follows_from_seed_and_epoch(stories):
    def order(seed, epoch=0, **changes):
        return texts(DataOptions(source=str(stories), lengths=128, **changes), seed, epoch)

    assert order(0) == order(0) != order(1)
    assert order(0) != order(0, 1)
    assert sorted(order(0)) == sorted(order(1)) == sorted(order(0, streaming=True))
    assert order(0, streaming=True) == order(0, streaming=True) != order(1, streaming=True)
    assert order(0, shuffle=False) == order(5, 3, shuffle=False) == [story(i) for i in range(12)]


KINDS = ".txt, .md, .json, .jsonl, .parquet, .csv"


def test_folders_and_files_of_no_kind_or_of_several_are_named(tmp_path):
    def opened(name, **changes):
        return open_source(DataOptions(source=str(tmp_path / name), lengths=8, **changes), 0)

    (tmp_path / "both").mkdir()
    (tmp_path / "both" / "a.txt").write_text("x")
    jsonl(tmp_path / "both" / "b.jsonl", ["x"])
    (tmp_path / "none").mkdir()
    (tmp_path / "a.bin").write_text("x")
    for name, contents in (("both", ".jsonl, .txt"), ("none", "nothing"), ("a.bin", ".bin")):
        message = f"{tmp_path / name} must hold files of one kind ({KINDS}), found {contents}"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            opened(name)
    jsonl(tmp_path / "a.jsonl", ["x"])
    for streaming in (False, True):
        message = f"data.column: {tmp_path / 'a.jsonl'} has no column 'body'. Known: text"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            opened("a.jsonl", column="body", streaming=streaming)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text":\n', "JSON parse error"),
        ("a.jsonl", b"", "it is empty"),
        ("a.txt", b"caf\xe9", "'utf-8' codec can't decode byte 0xe9"),
    ],
)
def test_files_that_cannot_be_read_are_one_line(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^data.source: cannot read {re.escape(str(tmp_path / name))}: {reason}.*$"):
        open_source(DataOptions(source=str(tmp_path / name), lengths=8), 0)


def test_names_that_look_local_never_reach_the_hub(monkeypatch):
    asked = []

    def load(*args, **kwargs):
        asked.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    for name in ("./no", "../no.jsonl", "/no/such", "~/no", "chats.jsonl", "books/all.parquet", "a.txt"):
        with pytest.raises(FileNotFoundError, match=f"^no file or folder {name!r}$"):
            open_source(DataOptions(source=name, lengths=8), 0)
    assert not asked
    for name in ("owner/data", "data"):
        open_source(DataOptions(source=name, config="c", split="s", streaming=False, lengths=8), 0)
        assert asked.pop() == ((name, "c"), {"split": "s", "streaming": False})


def test_a_data_set_of_the_hub_says_when_there_is_no_network():
    with pytest.raises(OSError, match="owner/no-such-data"):
        open_source(DataOptions(source="owner/no-such-data", lengths=8), 0)


# --- rows on disk


def test_rows_are_those_of_the_documents(stories, tmp_path, tokenizer):
    asked = options(stories, "data.shuffle=false")
    items = make_rows(asked, tokenizer, tmp_path / "work", quiet=True)
    rows = rows_of(items)
    assert len(items) == 8 and [len(item) for item in items] == [1] * 8
    assert all(len(row["ids"]) == 128 for row in rows) and [row["index"] for row in rows] == list(range(8))
    stream = [token for document in encode(tokenizer, [story(0), story(1)]) for token in document.ids.tolist()]
    assert [token for row in rows for token in row["ids"]] == stream[: 8 * 128]
    assert all(row["weights"] is None for row in rows) and rows[0]["starts"] == [0]
    (path,) = (tmp_path / "work").iterdir()
    assert re.fullmatch(r"rows-[0-9a-f]{16}\.arrow", path.name)


def test_the_same_run_finds_its_rows_and_packs_nothing(stories, tmp_path, tokenizer, capfd):
    asked = options(stories)
    first = rows_of(make_rows(asked, tokenizer, tmp_path / "work", quiet=True))
    (path,) = (tmp_path / "work").iterdir()
    content, written = path.read_bytes(), path.stat()
    again = make_rows(asked, tokenizer, tmp_path / "other", quiet=True)
    assert (tmp_path / "other" / path.name).read_bytes() == content and rows_of(again) == first, "in another folder"
    assert rows_of(make_rows(asked, tokenizer, tmp_path / "work")) == first
    assert "packing" not in capfd.readouterr().err
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)


CHANGES = [
    "train.seed=1",
    "train.steps=5",
    "train.accumulate=1",
    "data.lengths=64",
    "data.lengths=64:0.5 128",
    "data.boundaries=apart",
    "data.retrieval=0.5",
    "data.shuffle=false",
]


def test_rows_are_named_by_all_they_depend_on(stories, tmp_path, tokenizer, chatty):
    def name(*words, tok=tokenizer, processes=1):
        asked = options(stories, *words)
        return sources._identity(asked, tok, plan_stages(asked, processes))

    names = {word: name(word) for word in CHANGES}
    names |= {"as it was": name(), "processes": name(processes=2), "template": name(tok=chatty)}
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = None
    merged = copy.deepcopy(tokenizer)
    state = json.loads(merged.backend_tokenizer.to_str())
    state["model"]["merges"].pop()  # as many tokens, other cuts
    merged._tokenizer = type(merged.backend_tokenizer).from_str(json.dumps(state))
    names |= {"bos": name(tok=bare), "merges": name(tok=merged)}
    assert len(set(names.values())) == len(names), Counter(names.values())
    assert name("model.dtype=float32", "train.learning_rate=1", "lora.rank=4", "evaluation.seed=3") == name()
    tokenizer("A text that is cut.", truncation=True, max_length=3)  # which a tokenizer remembers
    assert name() == names["as it was"]
    (tmp_path / "notes.txt").write_text("beside it")
    assert name() == names["as it was"]
    jsonl(stories, [story(99)])
    assert name() != names["as it was"]


def test_what_lies_in_a_folder_beside_its_texts_does_not_matter(tmp_path, tokenizer):
    """A run may write below the folder it reads."""
    write(tmp_path / "data", "txt")
    asked = options(tmp_path / "data")
    before = sources._identity(asked, tokenizer, plan_stages(asked))
    (tmp_path / "data" / "out" / "work").mkdir(parents=True)
    (tmp_path / "data" / "out" / "work" / "rows.arrow").write_text("x")
    assert sources._identity(asked, tokenizer, plan_stages(asked)) == before
    (tmp_path / "data" / "2.txt").write_text("more")
    assert sources._identity(asked, tokenizer, plan_stages(asked)) != before


class Breaking:
    """A tokenizer that fails at its third document."""

    def __init__(self, tokenizer, error, folder):
        self.tokenizer, self.error, self.folder, self.read = tokenizer, error, folder, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *args, **options):
        self.read += 1
        if self.read == 3:
            assert len(list(self.folder.iterdir())) == 1, "being written"
            raise self.error
        return self.tokenizer(*args, **options)


@pytest.mark.parametrize("error", [ValueError("in the middle"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_what_breaks_off_leaves_nothing(tmp_path, tokenizer, error):
    asked = options(jsonl(tmp_path / "a.jsonl", [story(i, 12) for i in range(12)]))  # some 300 tokens each
    with pytest.raises(type(error)):
        make_rows(asked, Breaking(tokenizer, error, tmp_path / "work"), tmp_path / "work", quiet=True)
    assert list((tmp_path / "work").iterdir()) == []
    assert len(make_rows(asked, tokenizer, tmp_path / "work", quiet=True)) == 8


def test_a_schedule_groups_short_rows(stories, tmp_path, tokenizer):
    asked = options(stories, "data.lengths=32:0.25 64:0.25 128")
    assert plan_stages(asked) == [(32, 2, 4), (64, 2, 2), (128, 4, 1)]
    items = make_rows(asked, tokenizer, tmp_path / "work", quiet=True)
    assert [[len(row["ids"]) for row in item] for item in items] == [[32] * 4] * 2 + [[64] * 2] * 2 + [[128]] * 4
    assert [row["index"] for row in rows_of(items)] == list(range(2 * 4 + 2 * 2 + 4)), "no number twice"
    batch = Collator()([items[0], items[1]])
    assert batch["input_ids"].shape == (8, 32), "lists of rows are rows"
    assert Collator()([items[7]])["input_ids"].shape == (1, 128)
    assert items[-1] == items[7] and items[-8] == items[0]
    for item in (8, -9):
        with pytest.raises(IndexError):
            items[item]


def test_whole_documents_give_short_rows(tmp_path, tokenizer):
    source = jsonl(tmp_path / "a.jsonl", [story(i, 3) for i in range(8)])
    asked = options(source, "data.boundaries=whole", "data.lengths=64")
    rows = rows_of(make_rows(asked, tokenizer, tmp_path / "work", quiet=True))
    assert {len(row["ids"]) for row in rows} > {64} and all(row["starts"] == [0] for row in rows)
    batch = PackedCollator(pad=2)([rows])
    assert batch["input_ids"].shape == (8, 64)


def test_two_processes_ask_for_twice_the_rows(stories, tmp_path, tokenizer):
    one = make_rows(options(stories), tokenizer, tmp_path / "one", quiet=True)
    two = make_rows(options(stories), tokenizer, tmp_path / "two", processes=2, quiet=True)
    assert (len(one), len(two)) == (8, 16)
    assert rows_of(two)[:8] == rows_of(one), "the same rows, and more"


def test_data_that_ends_is_read_again_in_another_order(tmp_path, tokenizer):
    source = jsonl(tmp_path / "a.jsonl", [story(i, 6) for i in range(4)])  # about 560 tokens
    for shuffle, order in (("true", "another"), ("false", "the same")):
        asked = options(source, "train.steps=16", f"data.shuffle={shuffle}")
        message = f"^the data ends before the run does: it is read again, in {order} order$"
        with pytest.warns(UserWarning, match=message) as caught:
            rows = rows_of(make_rows(asked, tokenizer, tmp_path / order.replace(" ", "-"), quiet=True))
        assert len(caught) == 1, "said once, read several times"
        assert len(rows) == 32 and all(len(row["ids"]) == 128 for row in rows)
        stream = [token for row in rows for token in row["ids"]]
        once = sum(len(document.ids) for document in encode(tokenizer, [story(i, 6) for i in range(4)]))
        assert (stream[:once] == stream[once : 2 * once]) is (shuffle == "false")


def test_data_without_text_is_named(tmp_path, tokenizer):
    for words in ([], ["data.retrieval=1.0"]):
        asked = options(jsonl(tmp_path / "a.jsonl", [" ", "\n"]), *words)
        with pytest.raises(ValueError, match=rf"^data.source: {tmp_path / 'a.jsonl'} holds no text$"):
            make_rows(asked, tokenizer, tmp_path / "work", quiet=True)


class NoTokens:
    """A tokenizer that knows no character."""

    bos_token_id = chat_template = None
    is_fast = False

    def __call__(self, text, **_):
        return {"input_ids": []}

    def get_vocab(self):
        return {}


def test_a_tokenizer_that_knows_none_of_the_text_does_not_hang(stories, tmp_path):
    with pytest.raises(ValueError, match=r"holds no text$"):
        make_rows(options(stories), NoTokens(), tmp_path / "work", quiet=True)


def test_short_documents_are_refused_unless_allowed(tmp_path, tokenizer):
    source = jsonl(tmp_path / "a.jsonl", [story(i, 3) for i in range(60)])
    longest = max(len(document.ids) for document in encode(tokenizer, [story(i, 3) for i in range(60)]))
    asked = options(source, "train.steps=1", "data.shuffle=false")
    with pytest.raises(ValueError, match=r"^no document is as long as a row: the longest of \d+ read has") as caught:
        make_rows(asked, tokenizer, tmp_path / "work", quiet=True)
    read_count = int(re.search(r"longest of (\d+) read", str(caught.value))[1])
    most = max(len(document.ids) for document in encode(tokenizer, [story(i, 3) for i in range(read_count)]))
    assert most <= longest < 128 and str(caught.value) == (
        f"no document is as long as a row: the longest of {read_count} read has {most} tokens, a row has 128, so "
        "nothing could be learned about such distances. Give longer documents or shorter data.lengths, or set "
        "data.allow_short=true to train on short documents joined into rows"
    )
    assert list((tmp_path / "work").iterdir()) == []
    allowed = options(source, "train.steps=1", "data.shuffle=false", "data.allow_short=true")
    assert len(make_rows(allowed, tokenizer, tmp_path / "work", quiet=True)) == 2


def test_short_documents_are_noticed_early(tmp_path, tokenizer, monkeypatch):
    """Not after all of a long run has been packed, nor after reading a stream that never ends."""
    monkeypatch.setattr(sources, "DOCUMENTS_CHECKED", 10)
    source = jsonl(tmp_path / "a.jsonl", [story(i, 1) for i in range(200)])
    with pytest.raises(ValueError, match=r"^no document is as long as a row: the longest of 10 read has"):
        make_rows(options(source, "train.steps=100"), tokenizer, tmp_path / "work", quiet=True)
    few = jsonl(tmp_path / "b.jsonl", [story(i, 1) for i in range(4)])
    with pytest.raises(ValueError, match=r"^no document is as long as a row: the longest of 4 read has"):
        make_rows(options(few, "train.steps=100"), tokenizer, tmp_path / "work", quiet=True)


def test_a_long_document_may_come_late(tmp_path, tokenizer):
    """The first stage of short rows sees only short documents; the run as a whole sees a long one."""
    source = jsonl(tmp_path / "a.jsonl", [*(story(i, 3) for i in range(6)), *(story(i, 20) for i in range(12))])
    asked = options(source, "data.lengths=32:0.25 128", "data.shuffle=false")
    items = make_rows(asked, tokenizer, tmp_path / "work", quiet=True)
    assert len(items) == 8


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_retrieval_prompts_are_among_the_rows(stories, tmp_path, tokenizer, share):
    asked = options(stories, f"data.retrieval={share}", "data.lengths=64:0.5 128", "train.steps=40")
    rows = rows_of(make_rows(asked, tokenizer, tmp_path / "work", quiet=True))
    prompts = [row for row in rows if row["weights"] is not None]
    assert len(prompts) / len(rows) == pytest.approx(share, abs=4 * (share * (1 - share) / len(rows)) ** 0.5)
    assert {len(row["ids"]) for row in prompts} == {64, 128} and {5.0, 1.0} == set(prompts[0]["weights"])
    assert [row["index"] for row in rows] == list(range(len(rows)))
    texts = [tokenizer.decode(row["ids"]) for row in prompts]
    assert all("The pass key is" in text for text in texts) and len(set(texts)) == len(texts)
    assert sum("quick brown" in text for text in texts) > len(texts) // 2, "hidden in the text that is trained on"


def test_retrieval_needs_plain_text_and_says_so_at_once(tmp_path, chatty, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", [TALK] * 50, "messages")
    read_rows = []

    def counting(*args, whole=open_source):
        for row in whole(*args):
            read_rows.append(row)
            yield row

    monkeypatch.setattr(sources, "open_source", counting)
    asked = options(source, "data.column=messages", "data.retrieval=0.5", "data.allow_short=true")
    with pytest.raises(ValueError, match=r"^data.retrieval: prompts need plain text as haystack, and the data holds"):
        make_rows(asked, chatty, tmp_path / "work", quiet=True)
    assert len(read_rows) == 1, "not after reading a stream to its end"


def test_conversations_become_rows_with_weights(tmp_path, chatty):
    source = jsonl(tmp_path / "a.jsonl", [TALK] * 60, "messages")
    words = ["data.column=messages", "data.learn=assistant", "data.boundaries=apart", "data.allow_short=true"]
    items = make_rows(options(source, *words, "data.lengths=64"), chatty, tmp_path / "work", quiet=True)
    whole = conversation(chatty, TALK, "assistant")
    size = len(whole.ids)
    stream = [token for row in rows_of(items) for token in row["ids"]]
    weights = [weight for row in rows_of(items) for weight in row["weights"]]
    assert stream == (whole.ids.tolist() * 60)[: len(stream)]
    assert weights == (whole.weights.tolist() * 60)[: len(stream)]
    begins = {row["index"] * 64 + start for row in rows_of(items) for start in row["starts"]}
    assert begins == {*range(0, len(stream), size), *range(0, len(stream), 64)}


def test_rows_say_nothing_when_asked_to_be_quiet(stories, tmp_path, tokenizer, capfd):
    make_rows(options(stories), tokenizer, tmp_path / "a", quiet=True)
    assert capfd.readouterr() == ("", "")
    make_rows(options(stories), tokenizer, tmp_path / "b")
    assert "packing: 100%" in capfd.readouterr().err


@pytest.mark.slow
def test_another_process_makes_the_same_rows(stories, tmp_path, tokenizer):
    """No order of a set, no hash of the day: what follows from the seed does so everywhere."""
    code = (
        "import sys; from pathlib import Path; from transformers import AutoTokenizer\n"
        "from rope_patch.training.reading import read; from rope_patch.training.sources import make_rows\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "make_rows(read(overrides=sys.argv[3:]), tokenizer, Path(sys.argv[2]), quiet=True)"
    )
    words = ["model.name=llama", f"data.source={stories}", "data.lengths=128", "train.steps=4", "train.accumulate=2"]
    words += ["output=out", "data.retrieval=0.4"]
    done = run_code(code, LLAMA, tmp_path / "theirs", *words)
    assert done.returncode == 0, done.stderr
    make_rows(read(overrides=words), tokenizer, tmp_path / "ours", quiet=True)
    (theirs,), (ours,) = (list((tmp_path / name).iterdir()) for name in ("theirs", "ours"))
    assert theirs.name == ours.name and theirs.read_bytes() == ours.read_bytes()


# --- what is trained


def arguments(folder, **changes):
    given = {"per_device_train_batch_size": 1, "max_steps": 2, "use_cpu": True, "report_to": [], "save_strategy": "no"}
    given |= {"learning_rate": 1e-2, "logging_steps": 1, "lr_scheduler_type": "constant"}
    return TrainingArguments(folder, **(given | changes))


def trained(model, folder, count=2):
    rows = [{"ids": ids(24, batch=1, seed=i)[0].tolist(), "index": i} for i in range(count)]
    trainer = LongTrainer(model, arguments(folder), PackedRows(rows, [1] * count), Collator())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def asked_for(*words):
    """YaRN on every family: Gemma 4's full layers are scaled already."""
    method = "yarn:factor=4:replace_scaling=true"
    plain = ["model.name=x", "model.dtype=float32", "data.lengths=64", "output=out", f"patch.method={method}"]
    return read(overrides=[*plain, *words])


LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def hit(model, names):
    """The modules that PEFT would give an adapter."""
    return {name for name, _ in model.named_modules() if re.fullmatch(pattern(model, names), name)}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_targets_are_read_from_the_model(family):
    model = bold_model(family)
    every, attention = target_names(model, "all-linear"), target_names(model, "attention")
    fused = {"qkv_proj", "gate_up_proj", "o_proj", "down_proj"}
    assert set(every) == (fused if family == "phi3" else LINEAR)
    assert set(attention) == {name for name in every if name in {"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"}}
    planned = {x.name.rpartition(".")[2] for layer in shape_of(model).kinds for x in layer.linears}
    assert set(every) == planned, "what the plan counts"
    inside = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and (".self_attn." in name or ".mlp." in name)
    }
    assert hit(model, every) == inside
    assert hit(model, attention) == {name for name in inside if ".self_attn." in name}
    assert target_names(model, ["o_proj"]) == target_names(model, "o_proj") == ["o_proj"]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("q_porj", "lora.target_modules: 'q_porj' matches no projection of LlamaForCausalLM. Did you mean 'q_proj'?"),
        (["q_proj", "c_attn"], "lora.target_modules: 'c_attn' matches no projection of LlamaForCausalLM."),
        ("lm_head", "lora.target_modules: 'lm_head' matches no projection of LlamaForCausalLM."),
        ("proj", "lora.target_modules: 'proj' matches no projection of LlamaForCausalLM. Did you mean '"),
        ([], "lora.target_modules: '' matches no projection of LlamaForCausalLM."),
        (["q_proj", ["v_proj"]], "lora.target_modules: \"['v_proj']\" matches no projection of LlamaForCausalLM."),
    ],
)
def test_a_target_that_matches_nothing_is_named(targets, message):
    known = "Known: all-linear, attention, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}.* {known}$"):
        target_names(bold_model(), targets)


def seeing():
    """Gemma 3 with a vision tower beside the decoder."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14, "vision_use_head": False}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 95, "boi_token_index": 93, "eoi_token_index": 94}
    config = Gemma3Config(text_config=tiny_config("gemma3").to_dict(), vision_config=vision, **tokens)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def adapted(model, **changes):
    """The model with adapters on all projections, and what is trained of it."""
    words = [f"lora.{name}={value}" for name, value in ({"rank": 2} | changes).items()]
    peft_model = prepare(model, asked_for(*words))
    return peft_model, {name for name, parameter in peft_model.named_parameters() if parameter.requires_grad}


def test_a_vision_tower_is_left_alone():
    model = seeing()
    towers = {name for name, _ in model.named_modules() if "vision" in name}
    assert any(name.endswith("q_proj") for name in towers), "there is something to hit"
    assert any(name.endswith("norm") for name in towers)
    _, names = adapted(model, long_lora="true")
    assert names and all(".language_model." in name for name in names), sorted(names)[:5]


def test_experts_and_their_router_are_left_alone():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        MixtralConfig(**SIZE, head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    )
    assert set(target_names(model, "all-linear")) == {"q_proj", "k_proj", "v_proj", "o_proj"}
    _, names = adapted(model, long_lora="true")
    assert names and not any("experts" in name or "gate" in name for name in names)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_embeddings_and_norms_are_all_that_is_trained_beside_adapters(family):
    model = bold_model(family)
    decoder = {f"model.{name}": p for name, p in model.model.named_parameters()}
    expected = {name for name, p in decoder.items() if p.ndim == 1 and name.endswith("norm.weight")}
    expected |= {"model.embed_tokens.weight"}
    assert {f"{name}.weight" for name in long_lora_modules(model)} == expected
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    peft_model, names = adapted(model, long_lora="true")
    clean = {name.replace("base_model.model.", "").replace("modules_to_save.default.", "") for name in names}
    assert {name for name in clean if "lora_" not in name} == expected
    assert tied is (peft_model.get_input_embeddings().weight is peft_model.get_output_embeddings().weight)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen3", True), ("gemma3", True), ("gemma4", False)])
def test_long_lora_comes_back_whole(family, tied, tmp_path):
    """In a new process' model, and merged into a stock checkpoint: embeddings, norms, adapters, patch."""
    base = tmp_path / "base"
    bold_model(family, tie_word_embeddings=tied).save_pretrained(base)

    def fresh():
        return AutoModelForCausalLM.from_pretrained(base)

    stock, (model, names) = logits(fresh()), adapted(fresh(), long_lora="true")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained(model, tmp_path / "run")
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == names, "what is trained, all of it and no more"
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr() or not tied
    expected = logits(model.eval())
    assert not torch.allclose(expected, stock, atol=1e-2)

    rope_patch.save(model, tmp_path / "adapter")
    assert torch.equal(logits(rope_patch.load(tmp_path / "adapter")), expected)

    merged = model.merge_and_unload()
    assert torch.allclose(logits(merged), expected, atol=1e-4)
    rope_patch.save(merged, tmp_path / "merged")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits(plain), logits(merged)), "plain transformers"
    assert tied is (plain.lm_head.weight is plain.model.embed_tokens.weight)


def test_without_a_method_a_model_keeps_its_own_table_and_says_so():
    with pytest.warns(UserWarning, match=r"^there is no patch\.method: the model keeps its original rotary table"):
        model = prepare(bold_model(), asked_for("patch.method=null", "lora.rank=2"))
    record = find_rotary(model).record
    assert str(record.to_method()) == "default" and record.target_length == 64
    patched = bold_model()
    rope_patch.apply(patched, "yarn", factor=2)
    prepared = prepare(patched, asked_for("patch.method=null", "lora.rank=2"))
    assert str(find_rotary(prepared).record.to_method()) == "yarn:factor=2"
    again = bold_model()
    rope_patch.apply(again, "yarn", factor=2)
    with pytest.raises(PatchError):
        prepare(again, asked_for("lora.rank=2"))
    replaced = prepare(again, asked_for("lora.rank=2", "patch.replace=true"))
    assert str(find_rotary(replaced).record.to_method()) == "yarn:factor=4:replace_scaling=true"


def test_what_fits_nothing_leaves_the_model_as_it_was():
    model = bold_model()
    expected = logits(model)
    with pytest.raises(ValueError, match="matches no projection"):
        prepare(model, asked_for("lora.target_modules=c_attn"))
    assert find_rotary(model).record is None and torch.equal(logits(model), expected)


def test_rank_and_alpha_reach_the_adapters_and_the_seed_their_values():
    def values(seed):
        peft_model = prepare(bold_model(), asked_for("lora.rank=3", f"train.seed={seed}"))
        return peft_model, torch.cat([p.flatten() for name, p in peft_model.named_parameters() if "lora_A" in name])

    (peft_model, first), (_, again), (_, other) = values(0), values(0), values(1)
    assert torch.equal(first, again) and not torch.equal(first, other)
    config = peft_model.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (3, 6, 0.0)
    config = prepare(bold_model(), asked_for("lora.alpha=5", "lora.dropout=0.5")).peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 5, 0.5)


def test_rank_0_trains_every_weight():
    model = bold_model()
    prepared = prepare(model, asked_for("lora.rank=0"))
    assert prepared is model and not isinstance(prepared, PeftModel)
    assert all(p.requires_grad for p in prepared.parameters())


def test_a_folder_of_yours_goes_before_a_bundled_checkpoint(tmp_path, monkeypatch):
    assert resolve("llama") == str(LLAMA) and resolve("owner/llama") == "owner/llama"
    monkeypatch.chdir(tmp_path)
    Path("llama").mkdir()
    assert resolve("llama") == "llama"


def test_a_checkpoint_is_loaded_as_asked():
    model, tokenizer = load_model(ModelOptions("llama", dtype="float32", attention="eager"))
    assert model.dtype == torch.float32 and model.config._attn_implementation == "eager" and len(tokenizer) == 1024
    model, _ = load_model(ModelOptions("llama"))
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=r"^no folder ./nothing-here: give a folder with config.json"):
        load_model(ModelOptions("./nothing-here"))


def as_bytes(tensor):
    """A copy; packed weights seen as floats may be no numbers, which equal nothing."""
    return tensor.detach().clone().contiguous().view(torch.uint8)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MatMul8bitLt")  # of Linear8bitLt, at every call
@pytest.mark.parametrize("quantization", ["nf4", "8bit"])
def test_quantized_weights_are_packed_and_adapters_on_them_learn(quantization, tmp_path):
    import bitsandbytes

    model, _ = load_model(ModelOptions("llama", dtype="float32", quantization=quantization))
    kind = {"nf4": bitsandbytes.nn.Linear4bit, "8bit": bitsandbytes.nn.Linear8bitLt}[quantization]
    packed = {name for name, module in model.named_modules() if isinstance(module, kind)}
    assert packed == hit(model, target_names(model, "all-linear")), "every projection, and nothing else"
    if quantization == "nf4":
        weight = model.model.layers[0].mlp.up_proj.weight
        assert weight.quant_state.quant_type == "nf4" and weight.quant_state.nested
        assert weight.dtype == torch.float32, "stored as the others are, for FSDP"
    model = prepare(model, asked_for("lora.rank=2"))
    before = {name: as_bytes(p) for name, p in model.named_parameters()}
    (loss, _) = trained(model, tmp_path / "run")
    assert 0 < loss < 20
    moved = {name for name, p in model.named_parameters() if not torch.equal(as_bytes(p), before[name])}
    assert moved and all("lora_" in name for name in moved), "frozen weights stay"
    rope_patch.save(model, tmp_path / "adapter")
    assert read_record(tmp_path / "adapter") is not None


def test_what_is_quantized_already_is_not_quantized_again(tmp_path):
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.save_pretrained(tmp_path)
    message = f"{tmp_path} is quantized already: set model.quantization=none"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_model(ModelOptions(str(tmp_path), quantization="nf4"))


def test_peft_itself_takes_the_pattern():
    """As PEFT matches it, not as this file does."""
    model = bold_model()
    names = target_names(model, "attention")
    peft_model = peft.get_peft_model(
        model, peft.LoraConfig(target_modules=pattern(model, names), task_type="CAUSAL_LM")
    )
    with_lora = {name for name, module in peft_model.named_modules() if hasattr(module, "lora_A")}
    assert {name.removeprefix("base_model.model.") for name in with_lora} == hit(model, names)
    assert len(with_lora) == 2 * 4


# --- evaluation


@pytest.fixture(scope="module")
def evaluator(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text(story(1, 60))
    given = EvaluationOptions(samples=1, depths=[0.2, 0.8], windows=2, text=str(folder), haystack=str(folder / "a.txt"))
    return RecipeEvaluator(given, (64, 128), tokenizer)


def test_an_evaluation_is_numbers_by_length(evaluator):
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    model.train()
    result, again = evaluator(model), evaluator(model)
    assert model.training, "left as it was"
    assert result.metrics() == again.metrics(), "the same texts and prompts each time"
    names = ["score", "retrieval_64", "retrieval_128", "perplexity_0_64", "perplexity_64_128"]
    assert list(result.metrics()) == names
    retrieved = [result.retrieval.accuracy(length) for length in (64, 128)]
    assert result.score == pytest.approx(sum(retrieved) / 2 - result.perplexity.nll / 400, abs=1e-9)


def test_perplexity_only_parts_equals(evaluator):
    """The worst perplexity does not outweigh a single prompt."""
    from dataclasses import replace

    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    result = evaluator(model)

    def scored(correct, nll):
        flags = iter([True] * correct + [False] * 4)
        cells = tuple(
            replace(cell, samples=tuple(replace(sample, correct=next(flags)) for sample in cell.samples))
            for cell in result.retrieval.cells
        )
        retrieval = {"passkey": replace(result.retrieval, cells=cells)}
        scores = replace(result.scores, retrieval=retrieval, perplexity=replace(result.perplexity, nll=nll))
        return replace(result, scores=scores).score

    assert scored(2, 5000.0) > scored(1, 0.01) and scored(1, 2.0) > scored(1, 2.1)


def test_what_cannot_be_evaluated_is_said_before_any_training(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(story(1, 3))
    with pytest.raises(ValueError, match=r"^evaluation: 8 windows of 128 tokens need 1016 tokens, the text has"):
        RecipeEvaluator(EvaluationOptions(text=str(tmp_path / "a.txt")), (128,), tokenizer)
    with pytest.raises(FileNotFoundError, match=r"^no file or folder"):
        RecipeEvaluator(EvaluationOptions(text=str(tmp_path / "b.txt")), (128,), tokenizer)
    with pytest.raises(ValueError, match=r"^evaluation: a prompt of passkey needs at least"):
        RecipeEvaluator(EvaluationOptions(haystack=str(tmp_path / "a.txt")), (16,), tokenizer)
