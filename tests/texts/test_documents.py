"""Texts from strings, files, folders and datasets, and what their tokens cover."""

import itertools
import os
from pathlib import Path

import datasets
import pytest
import torch
from support.prompting import TOKENIZER
from support.tiny import small
from transformers import PreTrainedTokenizerFast

from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.texts.documents import TokenDocument, documents, encode, spread_windows


def read(source):
    return [(d.name, d.text) for d in documents(source)]


def test_a_string_is_a_text_and_a_path_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read("some words") == [("text", "some words")]
    (tmp_path / "a.txt").write_text("ünder", encoding="utf-8")
    assert read(tmp_path / "a.txt") == [("a.txt", "ünder")]
    with pytest.raises(ValueError, match="Path"):
        read("a.txt")


def test_a_text_in_the_place_of_its_file_is_not_printed_whole():
    with pytest.raises(FileNotFoundError, match="no file or folder 'a long text") as raised:
        read(Path("a long text " * 400))
    assert len(str(raised.value)) < 300


def test_a_folder_is_its_files_in_the_order_of_their_paths(tmp_path):
    for name in ("b.txt", "a/z.txt", "c.md", "a/y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == [("a/y.txt",) * 2, ("a/z.txt",) * 2, ("b.txt",) * 2]


def test_rows_of_a_dataset(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    loaded = datasets.load_dataset(
        "json", data_files=str(tmp_path / "d.jsonl"), split="train", streaming=True, cache_dir=tmp_path
    )
    assert read(loaded) == [("row 0", "one"), ("row 1", "two")]


def test_a_stream_is_not_read_ahead():
    asked = []

    def endless():
        while True:
            asked.append(1)
            yield {"text": "some words and some more of them"}

    made = list(itertools.islice(encode(TOKENIZER, endless()), 3))
    assert len(made) == len(asked) == 3


def test_other_iterables_and_the_built_in_corpus():
    assert read(["a", {"text": "b"}]) == [("row 0", "a"), ("row 1", "b")]
    corpus = builtin_text("heldout")
    names = [name for name, _ in read(corpus)]
    assert names[:2] == ["heldout/0", "heldout/1"] and len(names) == len(corpus.documents)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "none.txt", "none.txt"),
        (lambda p: p / "binary.txt", "UTF-8"),
        (lambda p: p / "empty", "no .txt file"),
        (lambda p: p / "pipe", "is a pipe"),
        (lambda p: [], "no text"),
        (lambda p: " \n", "no text"),
        (lambda p: [{"body": "x"}], "body"),
        (lambda p: [{"text": 7}], "7"),
        (lambda p: [7], "7"),
        (lambda p: datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}), "train"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, make, message):
    (tmp_path / "binary.txt").write_bytes(b"a\xff\xfe")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((FileNotFoundError, ValueError, TypeError), match=message):
        list(documents(make(tmp_path)))


def test_tokens_know_the_bytes_they_cover():
    text = "naïve — “café” in 2024: 你好 🙂 and on\n"
    (document,) = encode(TOKENIZER, text)
    assert document.prefix == (TOKENIZER.bos_token_id,) and document.ids.dtype == torch.long
    assert document.ids.tolist() == [TOKENIZER.bos_token_id, *TOKENIZER(text, add_special_tokens=False)["input_ids"]]
    assert int(document.ends[0]) == 0 and int(document.ends[-1]) == len(text.encode())
    assert bool((document.ends.diff() >= 0).all())
    for i in range(2, len(document.ids)):
        said = TOKENIZER.decode(document.ids[1:i])
        if "\ufffd" not in said:  # tokens that end within a character have no text of their own
            assert int(document.ends[i - 1]) == len(said.encode())


def test_special_tokens_are_put_once_and_only_in_front():
    bare = PreTrainedTokenizerFast(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<eos>")
    text = "some words"
    plain = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert [d.ids.tolist() for d in encode(bare, text)] == [plain]
    assert [d.ids.tolist() for d in encode(TOKENIZER, text, prefix=())] == [plain]
    assert [d.ids.tolist() for d in encode(TOKENIZER, [text, text])] == [[0, *plain]] * 2


def test_a_very_long_text_is_encoded_in_pieces_that_end_with_a_line(monkeypatch):
    text = "naïve 🙂 — “café”\n你好 and more words\n" * 9
    (whole,) = encode(TOKENIZER, text)
    monkeypatch.setattr("rope_patch.texts.documents.PIECE_CHARACTERS", 50)
    (pieces,) = encode(TOKENIZER, text)
    assert torch.equal(pieces.ids, whole.ids) and torch.equal(pieces.ends, whole.ends)
    (line,) = encode(TOKENIZER, "7" * 120)
    assert int(line.ends[-1]) == 120 == len(line.ids) - 1, "a line that is longer is cut within"


def test_a_slow_tokenizer_gives_no_bytes():
    class Slow:
        bos_token_id = None

        def __call__(self, text, **_):
            return {"input_ids": [ord(c) for c in text]}

    (document,) = encode(Slow(), "abc")
    assert document.ends is None and document.ids.tolist() == [97, 98, 99]
    assert perplexity(small(), [TokenDocument("d", document.ids)], window=8).bits_per_byte is None


def test_a_text_without_room_for_a_window_is_refused_in_words():
    with pytest.raises(ValueError, match="for 1 window of 64 tokens, and the text has 2"):
        spread_windows(TOKENIZER, "hi", 64)
