"""The header of a GGUF file is read once by the package gguf, with what it would have read itself."""

import os
import threading

import gguf
import pytest
from support.gguf_files import gguf_of, write_toy
from support.prompting import TOKENIZER
from support.tiny import tiny_model

import rope_patch
from rope_patch.engines import export
from rope_patch.runtime.gguf_file import Key, write_gguf
from rope_patch.runtime.gguf_headers import cached_headers


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A small model with a tokenizer."""
    return write_toy(tiny_model(vocab_size=1024), tmp_path_factory.mktemp("reader") / "m.gguf", TOKENIZER)


@pytest.fixture
def headers(monkeypatch):
    """The paths whose headers the package reads from now on."""
    read = []
    fields = gguf.GGUFReader._build_fields

    def counted(self, *arguments):
        read.append(self)
        return fields(self, *arguments)

    monkeypatch.setattr(gguf.GGUFReader, "_build_fields", counted)
    return read


def test_a_header_is_read_once(file, tmp_path, headers):
    export(file, tmp_path / "out", to="hf")
    assert len(headers) == 1
    assert rope_patch.doctor(file).ok
    assert len(headers) == 2


def contents(reader):
    """What transformers reads of a file: keys with their types, and tensors."""
    fields = {name: (field.offset, field.types, field.contents()) for name, field in reader.fields.items()}
    return fields, [(t.name, t.tensor_type, t.shape.tolist(), t.data.tolist()) for t in reader.tensors]


def test_it_reads_what_the_package_reads(file):
    theirs = gguf.GGUFReader(file)
    with cached_headers(file):
        assert contents(gguf.GGUFReader(file)) == contents(theirs)
    assert type(theirs) is gguf.GGUFReader


def test_a_file_that_changed_is_read_again(tmp_path):
    path = tmp_path / "m.gguf"
    with cached_headers(path):
        for text in ("first", "second"):
            write_gguf(gguf_of([Key.of("a", text)]), path, overwrite=True)
            assert gguf.GGUFReader(path).fields["a"].contents() == text
        state = path.stat()
        path.write_bytes(path.read_bytes().replace(b"a\x08", b"b\x08"))  # in place, with the times of the old one
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        assert "b" in gguf.GGUFReader(path).fields


def test_the_reader_of_the_package_is_back_after_an_error(file, tmp_path):
    original = gguf.GGUFReader
    with pytest.raises(RuntimeError), cached_headers(file), cached_headers(file):
        raise RuntimeError
    assert gguf.GGUFReader is original
    with cached_headers(tmp_path):  # no GGUF file
        assert gguf.GGUFReader is original


def test_threads_that_load_at_once(file, headers):
    """One waits for the other, and the reader of the package is back at the end."""
    original = gguf.GGUFReader
    models = []
    threads = [threading.Thread(target=lambda: models.append(rope_patch.load(file))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == len(headers) == 3 and gguf.GGUFReader is original
