"""The tutorials run: their blocks, on a bundled checkpoint and with less text."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from support.commands import run
from support.gguf_files import write_toy
from support.prompting import TOKENIZER
from support.recipe_runs import needs_trl
from support.tiny import LLAMA, bundled_model

from rope_patch.kv_cache.schemes import Scheme

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "tutorials").glob("*") if path.suffix in (".md", ".ipynb"))
BLOCK = re.compile(r"```(bash|python)\n(.*?)```\n", re.DOTALL)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("figures"),
    pytest.mark.skipif(not PAGES, reason="not in the source distribution"),
]
SMALLER = {
    "%pip install": "raise ModuleNotFoundError  # ",  # a command of notebooks, for where the package is missing
    "build/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": "checkpoint.gguf",
    "build/smollm2/SmolLM2-135M-Instruct": str(LLAMA),
    "HuggingFaceTB/SmolLM2-135M-Instruct": str(LLAMA),
    "build/tutorials": "out",
    "16k": "1k",
    "16384": "1024",
    "Yarn(factor=2)": "Yarn(factor=4)",
    "[4096, 12288]": "[64, 128]",
    "bucket=1024": "bucket=64",
    " * 650": " * 20",
    "--lengths 512 --windows 4": "--lengths 48 --windows 2",
    "lengths=512": "lengths=48",
    "perplexity_0_512": "perplexity_0_48",
    "vllm:fp8 llama.cpp:q8_0 llama.cpp:q4_0 q4_0 vllm:turboquant-4 kivi-4": "llama.cpp:q8_0 q4_0",
    "steps=32": "steps=1",
    "warmup_steps=4": "warmup_steps=0",
    "windows=16": "windows=1",
}
"""What stands in a tutorial, and what a test has in its place."""


def in_this_process(commands):
    """Run commands without new interpreters, which would import torch anew."""
    printed = ""
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        if program in ("cmp", "mkdir"):
            subprocess.run([program, *arguments], check=True)
            continue
        assert program == "rope-patch"
        printed += run(*arguments)
    return printed


class Llama:
    """A stand-in for llama.cpp's binding, which the engine tests run; it answers with the digits it was asked for."""

    def __init__(self, path, **options):
        assert Path(path).is_file()

    def tokenize(self, text):
        return list(text)

    def generate(self, tokens, temp):
        yield from re.search(rb"\d{5}", bytes(tokens))[0]

    def detokenize(self, tokens):
        return bytes(tokens)

    def close(self):
        pass


EXPECTED = {
    "notebook": "answer: 58213",
    "kv": "llama.cpp:q8_0",
    "gguf": "answer: 58213",
    "train": "yarn:factor=4 1024",
    "rope_mathematics": "DeepSeek-V2-Lite",  # each number of a paper is asserted in its cell
}
"""What each tutorial prints."""


def read(path):
    """Return a page; the cells of code of a notebook become blocks of Python."""
    page = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return page
    cells = ["".join(cell["source"]) for cell in json.loads(page)["cells"] if cell["cell_type"] == "code"]
    return "".join(f"```python\n{cell}\n```\n" for cell in cells)


def run_blocks(page):
    """Run the blocks of commands and Python of a page in order, in one namespace; return what they print."""
    space: dict[str, Any] = {"__name__": "tutorial"}
    printed = io.StringIO()
    for kind, code in BLOCK.findall(page):
        if kind == "bash":
            printed.write(in_this_process(code))
        else:
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "tutorial", "exec"), space)
    return printed.getvalue()


def test_formats_of_the_pages_are_there():
    """A tutorial runs with two of them."""
    formats = re.findall(r'--formats "([^"]+)"', "".join(map(read, PAGES)))
    assert formats
    for name in " ".join(formats).split():
        Scheme.parse(name)


MARKED = {"train": lambda path: pytest.param(path, marks=needs_trl)}


@pytest.mark.parametrize("path", [MARKED.get(path.stem, Path)(path) for path in PAGES], ids=lambda path: path.stem)
def test_a_tutorial_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "llama_cpp", types.SimpleNamespace(Llama=Llama))
    monkeypatch.setenv("MPLBACKEND", "agg")
    page = read(path)
    for theirs, ours in SMALLER.items():
        page = page.replace(theirs, ours)
    if "checkpoint.gguf" in page:
        write_toy(bundled_model(), Path("checkpoint.gguf"), TOKENIZER)
    assert BLOCK.findall(page)
    assert EXPECTED[path.stem] in run_blocks(page)
