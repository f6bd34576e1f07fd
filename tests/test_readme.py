"""What the pages say is run: Python blocks with their output, and the commands."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import run
from support.fresh import run_code
from support.pages import blocks, contributed
from support.subsets import full

from rope_patch.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "docs").is_dir():
    pytest.skip("not in the source distribution", allow_module_level=True)
PAGES = ["README.md"]
PAGES += [
    f"docs/{name}.md"
    for name in ("doctor", "measure", "analysis", "kv-caches", "adapt", "serving", "commands", "methods")
]
"""Pages whose code is run, one after the other: what one leaves is there for the next."""


def instead_of_the_hub(folder):
    """A tiny model with the rotary table of SmolLM2 and a bundled tokenizer, in a folder whose path is its hub id."""
    from support.prompting import TOKENIZER
    from support.tiny import tiny_model

    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}, "max_position_embeddings": 8192}
    tiny_model(head_dim=64, vocab_size=1024, **rotary).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)


def put_a_tiny_model_into(folder):
    """A model that reads the bundled tokenizer's ids, in a third of the time."""
    from support.tiny import tiny_model

    one_layer = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny_model(vocab_size=1024, max_position_embeddings=256, **one_layer).save_pretrained(folder)


@pytest.fixture
def own_methods():
    """What pages define beside the package's methods is gone afterwards."""
    known = set(METHODS)
    yield
    for name in set(METHODS) - known:
        del METHODS[name]


LEAST = {
    "analyze": ["--tokens", "512", "--no-report"],
    "compare": ["--windows", "2", "--samples", "1", "--depths", "0.5", "--no-report"],
    "kv-check": ["--windows", "2", "--samples", "1", "--depths", "0.5", "--no-report"],
    "finetune": ["train.max_steps=1", "evaluation.windows=1", "evaluation.samples=1", "evaluation.depths=0.5"],
}
"""What commands on a tiny model are given besides, so that they measure little; test_packaging.py has whole reports."""


@pytest.mark.usefixtures("own_methods", "figures")
@pytest.mark.parametrize("model", ["tiny", full("bundled")])
def test_the_code_of_the_pages_gives_its_output_and_their_commands_run(tmp_path, monkeypatch, model):
    """The Python blocks on the bundled checkpoint; the commands on a model of another size, too."""
    monkeypatch.chdir(tmp_path)
    # Measured, it would read rows up to the 16k of the first command, for up to eight seconds.
    monkeypatch.setattr("rope_patch.evaluation.time_budget.tokens_per_second", lambda *_, **__: 1000.0)
    found = [block for page in PAGES for block in blocks(ROOT / page)]
    space: dict[str, object] = {}
    shutil.copytree(ROOT / "rope_patch/assets/llama", "llama")  # the README's cp, which Python blocks read too
    instead_of_the_hub(tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct")
    for (kind, code), (following, output) in itertools.pairwise(found):
        if kind == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(code, "a page", "exec"), space)
            assert following == "text"
            assert printed.getvalue().strip() == output.strip()
    if model == "tiny":
        put_a_tiny_model_into("llama")
    commands = [line.partition("#")[0].strip() for kind, text in found if kind == "bash" for line in text.splitlines()]
    ran = set()
    for command in filter(None, commands):
        program, *arguments = shlex.split(command)
        if program == "cp":
            assert arguments.pop() == "llama"
            copied = command.replace("python ", f"{sys.executable} ").removesuffix("llama") + "copied"
            subprocess.run(copied, shell=True, check=True)
            assert Path("copied", "config.json").is_file()
        elif program == "rope-patch-eval":
            continue  # run in tests/harness/test_lm_eval.py, where lm-eval is loaded
        elif program == "rope-patch":
            if (work := re.sub(r" output=\S+", "", command)) in ran:
                continue  # into another folder only
            if model == "tiny":
                for option in LEAST.get(arguments[0], []):
                    if option in arguments:
                        at = arguments.index(option)
                        del arguments[at : at + 2]
                arguments += LEAST.get(arguments[0], [])
            run(*arguments)
            ran.add(work)
        else:
            assert program == "make", command
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M), command
    assert len(ran) >= 9


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_what_pages_link_to_is_there():
    found = []
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]*)?\)", path.read_text(encoding="utf-8")):
            found.append(path.parent / target)
    assert len(found) > 50
    assert [path for path in found if not path.exists()] == []


def test_what_is_your_own_can_stand_in_the_folders_of_the_package(tmp_path):
    folder = tmp_path / "rope_patch"
    shutil.copytree(ROOT / "rope_patch", folder, ignore=shutil.ignore_patterns("__pycache__", "llama", "gemma3"))
    (folder / "evaluation" / "tasks" / "house_number.py").write_text(contributed("house_number"))
    (folder / "methods" / "slower.py").write_text(contributed('name="slower"'))
    metrics = folder / "evaluation" / "metrics.py"
    metric = re.sub(r"^from rope_patch.*\n", "", contributed("answer_logprob"))
    metrics.write_text(f"{metrics.read_text()}\n\n{metric}")
    code = "from rope_patch.evaluation.tasks import TASKS\nfrom rope_patch.evaluation.metrics import METRICS as known\n"
    code += "from rope_patch.methods import METHODS\n"
    code += "print('slower' in METHODS, 'house_number' in TASKS, 'answer_logprob' in known)"
    ended = run_code(code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert ended.stdout == "True True True\n", ended.stderr


def test_what_does_not_train_imports_no_peft():
    """It brings bitsandbytes and others where they are installed, which takes seconds."""
    code = "import sys, rope_patch; rope_patch.doctor, rope_patch.load; print('peft' in sys.modules)"
    done = run_code(code)
    assert done.stdout == "False\n", done.stderr


def test_pages_name_no_machine():
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("*/README.md"),
        *ROOT.glob("rope_patch/assets/*/README.md"),
    ]:
        assert not re.search(r"/(home|root|work)/", path.read_text(encoding="utf-8")), path
