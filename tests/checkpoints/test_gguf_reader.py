"""The header of a GGUF file is read once by the package gguf, with what it would have read itself."""

from __future__ import annotations

import threading

import gguf
import pytest
from support.gguf_files import write_toy
from support.tiny import tiny_model
from transformers import AutoTokenizer

import rope_patch
from rope_patch.checkpoints.gguf_file import Key, write_gguf
from rope_patch.checkpoints.gguf_reader import read_once
from rope_patch.exporting import export


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small model with a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")
    return write_toy(tiny_model(vocab_size=1024), tmp_path_factory.mktemp("reader") / "m.gguf", tokenizer)


@pytest.fixture
def headers(monkeypatch):
    """The paths whose headers the package reads from now on."""
    read, fields = [], gguf.GGUFReader._build_fields

    def counted(self, *arguments):
        read.append(self)
        return fields(self, *arguments)

    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", counted)
    return read


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda file, out: rope_patch.load(file), id="load"),
        pytest.param(lambda file, out: export(file, out, to="hf"), id="export"),
    ],
)
def test_a_header_is_read_once(file, tmp_path, headers, use):
    use(file, tmp_path / "out")
    assert len(headers) == 1


def assert_same(ours, theirs):
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        own = ours.fields[name]
        assert (own.offset, own.name, own.data, own.types) == (field.offset, field.name, field.data, field.types)
        assert [part.dtype for part in own.parts] == [part.dtype for part in field.parts]
        assert [part.tolist() for part in own.parts] == [part.tolist() for part in field.parts]
    outlines = [
        [
            (t.name, t.tensor_type, t.shape.tolist(), t.n_elements, t.data_offset, t.data.tolist())
            for t in reader.tensors
        ]
        for reader in (ours, theirs)
    ]
    assert outlines[0] == outlines[1]


def test_it_reads_what_the_package_reads(file):
    theirs = gguf.GGUFReader(file)
    with read_once(file):
        assert_same(gguf.GGUFReader(file), theirs)
    assert type(theirs) is gguf.GGUFReader


@pytest.mark.parametrize(
    ("item", "values"),
    [("STRING", ["", "ä", "three"]), ("FLOAT32", [0.5, -1.0]), ("BOOL", [True, False]), ("UINT64", [1 << 40])],
)
@pytest.mark.parametrize("empty", [False, True])
def test_arrays_of_each_kind(tmp_path, item, values, empty):
    keys = [Key.of("general.architecture", "llama", "STRING"), Key.of("a", [] if empty else values, "ARRAY", item)]
    path = write_gguf(tmp_path / "m.gguf", [*keys, Key.of("last", 7, "UINT8")], [])
    theirs = gguf.GGUFReader(path)
    with read_once(path):
        assert_same(gguf.GGUFReader(path), theirs)


def test_a_file_that_changed_is_read_again(tmp_path):
    path = tmp_path / "m.gguf"
    with read_once(path):
        for text in ("first", "second"):
            write_gguf(path, [Key.of("a", text, "STRING")], [], overwrite=True)
            assert gguf.GGUFReader(path).fields["a"].contents() == text


def test_a_package_that_works_otherwise_reads_its_own_way(file, monkeypatch):
    """Our part of the reader fails there."""
    theirs = gguf.GGUFReader(file)
    monkeypatch.setattr("rope_patch.checkpoints.gguf_reader.np.asarray", lambda data: None)
    with read_once(file):
        assert_same(gguf.GGUFReader(file), theirs)


def test_the_reader_of_the_package_is_back_after_an_error(file, tmp_path):
    original = gguf.GGUFReader
    with pytest.raises(RuntimeError), read_once(file), read_once(file):
        raise RuntimeError
    assert gguf.GGUFReader is original
    with read_once(tmp_path):  # no GGUF file
        assert gguf.GGUFReader is original


def test_threads_that_load_at_once(file, headers):
    """One waits for the other, and the reader of the package is back at the end."""
    original, models = gguf.GGUFReader, []
    threads = [threading.Thread(target=lambda: models.append(rope_patch.load(file))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == len(headers) == 3 and gguf.GGUFReader is original
