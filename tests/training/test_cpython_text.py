"""The reader of what ships with CPython, in the recipe of the bundled models, against the files that it reads."""

import platform
import re
import sysconfig

from support.reference_recipe import recipe

import rope_patch
from rope_patch.texts.builtin_text import builtin_text

SPLITS = ("train", "heldout", "haystack")


def digests():
    """The digest of each split, read anew."""
    return [recipe.digest_of(recipe.cpython_text.__wrapped__(split)) for split in SPLITS]


def test_the_bundled_models_name_the_text_of_their_python():
    """On another Python only the card can be read, and on theirs both are there."""
    cards = [(rope_patch.data_path("assets") / name / "README.md").read_text("utf-8") for name in ("llama", "gemma3")]
    trained_on = {re.search(r"SHA-256 of the documents `(\w+)`", card)[1] for card in cards}
    assert len(trained_on) == 1
    if platform.python_version() == "3.11.7":
        assert trained_on == {digests()[0]}
        assert recipe.cpython_text("heldout") == builtin_text("heldout").documents
        assert recipe.cpython_text("train")[12::20] == builtin_text("train").documents


def test_tests_installed_packages_tables_and_stubs_are_left_out(monkeypatch, tmp_path):
    kept = ["good.py", "package/inner.py", "package/testing.py", "json/decoder.py", "package/config-3/kept.py"]
    dropped = [
        "notes.txt",
        "test/test_x.py",
        "package/tests/case.py",
        "package/test/case.py",
        "site-packages/torch/nn.py",
    ]
    dropped += ["dist-packages/numpy/core.py", "encodings/cp1252.py", "idlelib/run.py", "tkinter/ttk.py"]
    dropped += ["turtledemo/clock.py", "lib2to3/pytree.py", "ensurepip/__main__.py", "pydoc_data/topics.py"]
    dropped += ["__pycache__/good.py", "config-3.11-x86_64-linux-gnu/python-config.py", "_sysconfigdata__linux.py"]
    for name in kept + dropped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# MARK {name}\n" + "x = 1\n" * 50)
    (tmp_path / "stub.py").write_text("# MARK stub.py")  # 200 characters or fewer
    (tmp_path / "latin.py").write_bytes(b"# MARK latin.py \xff\xfe\n" + b"y = 2\n" * 50)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    documents = list(recipe.cpython_documents())
    found = [re.match(r"# MARK (\S+)", document)[1] for document in documents if document.startswith("# MARK")]
    assert sorted(found) == sorted([*kept, "latin.py"])
