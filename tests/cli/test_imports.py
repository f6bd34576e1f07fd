"""What commands import: help waits for neither torch nor transformers."""

import json
import subprocess
import sys

from rope_patch.options import COMMANDS

CHILD = """
import contextlib, io, json, sys
from rope_patch.cli.app import main
imported = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["rope-patch", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, words
    assert printed.getvalue().strip(), words
    imported[" ".join(words)] = sorted({"torch", "transformers", "numpy"} & set(sys.modules))
print(json.dumps(imported))
"""


def test_help_and_what_prints_a_line_import_neither_torch_nor_transformers():
    """In a process of their own, which says after each command what was imported by then."""
    names = [[], *(name.split() for name in COMMANDS)]
    assert len(names) > 13
    commands = [*([*words, "--help"] for words in names), ["tasks"], ["--version"], ["methods"]]
    child = [sys.executable, "-c", CHILD, json.dumps(commands)]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    imported = json.loads(done.stdout)
    assert "transformers" not in imported.pop("methods"), "it imports torch"
    assert imported == {words: [] for words in imported}
