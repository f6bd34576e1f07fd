"""The built-in corpus: what a file of it holds, and that it is the text that its README describes."""

import hashlib
import itertools

import pytest
from support.reference_recipe import recipe

import rope_patch
from rope_patch.texts.builtin_text import builtin_text

SPLITS = ("train", "heldout", "haystack")
FOLDER = rope_patch.data_path("assets") / "text"


def test_the_splits_are_disjoint_and_non_empty():
    corpora = [builtin_text(split) for split in SPLITS]
    assert [corpus.split for corpus in corpora] == list(SPLITS)
    for one, other in itertools.combinations(corpora, 2):
        assert not set(one.documents) & set(other.documents)
    for corpus in corpora:
        assert len(corpus.documents) > 20
        assert all(document.strip() for document in corpus.documents)
        assert corpus.text == "\n\n".join(corpus.documents)
        assert corpus.sha256 == hashlib.sha256("\0".join(corpus.documents).encode()).hexdigest()


@pytest.mark.parametrize("split", SPLITS)
def test_the_readme_states_the_digest_and_the_number_of_documents(split):
    corpus = builtin_text(split)
    (row,) = [line for line in (FOLDER / "README.md").read_text("utf-8").splitlines() if f"| `{split}.txt` |" in line]
    assert row.endswith(f"| {len(corpus.documents)} | `{corpus.sha256}` |")


def test_a_line_end_of_another_system_changes_no_document(monkeypatch, tmp_path):
    """Git may write such line ends into a checkout on Windows."""
    (tmp_path / "text").mkdir()
    for split in SPLITS:
        whole = (FOLDER / f"{split}.txt").read_bytes()
        (tmp_path / "text" / f"{split}.txt").write_bytes(whole.replace(b"\n", b"\r\n"))
    monkeypatch.setattr("rope_patch.texts.builtin_text.data_path", lambda name: tmp_path)
    for split in SPLITS:
        assert builtin_text.__wrapped__(split) == builtin_text(split)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_documents_stand_in_the_split_by_which_the_bundled_models_were_trained(split):
    """Held-out text was never trained on, and what trains a bundled model further is what it was trained on."""
    assert {recipe.split_of(document) for document in builtin_text(split).documents} == {split}


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="heldout"):
        builtin_text("test")
