"""By what stored results are found again: the code of a user's own that made them is a part of it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from support.fresh import run_code
from support.prompting import HAY, TOKENIZER, bold
from support.tiny import CONFIGS

from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.tasks import TASKS
from rope_patch.kv_cache.formats import FORMATS
from rope_patch.methods import METHODS
from rope_patch.modeling.scoring import model_hash
from rope_patch.runtime.result_cache import code_identity


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A function that writes a module and imports it, in place of the one before."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(code):
        sys.modules.pop("own_code", None)
        (tmp_path / "own_code.py").write_text(code)
        importlib.invalidate_caches()
        return importlib.import_module("own_code")

    yield write
    sys.modules.pop("own_code", None)
    TASKS.pop("own_task", None)


def test_what_is_built_in_has_no_identity():
    assert code_identity(type(FORMATS["int4"]), type(TASKS["vt"]), METHODS["yarn"], torch.nn.Linear) == ""


def test_an_edited_module_is_another_one_once_it_is_imported_again(own_module):
    code = "LEVELS = {}\nclass Base: pass\nclass Own(Base): pass"
    derived = type("Derived", (own_module(code.format(3)).Own,), {"__module__": "own_code"})
    before = code_identity(derived)
    (Path(sys.modules["own_code"].__file__)).write_text(code.format(12))
    assert code_identity(sys.modules["own_code"].Own) in before, "the code that was imported is the one that runs"
    assert code_identity(own_module(code.format(12)).Own) not in before


def test_a_class_of_a_notebook_is_told_apart_by_what_it_uses():
    cell = "LEVELS = {}\ndef helper(x): return x * LEVELS\nclass Own:\n    def round(self, x): return helper(x)\n"
    shown = "from rope_patch.runtime.result_cache import code_identity\nprint(code_identity(Own))"
    made = [run_code(cell.format(levels) + shown).stdout for levels in (3, 3, 4)]
    assert made[0] == made[1] != made[2] and made[0].strip()


TASK = """
from rope_patch.evaluation.tasks.passkey import Passkey
class Own(Passkey, name="own_task"):
    def correct(self, part, output): return {}
"""


def test_answers_that_an_edited_task_graded_are_not_taken_for_its_own(own_module):
    stored, model = {}, bold()

    def share(correct):
        own_module(TASK.format(correct))
        return retrieval(model, TOKENIZER, "own_task", lengths=[72], haystack=HAY, samples=1, resume=stored).accuracy(
            72
        )

    assert [share("True"), share("False"), share("True")] == [1, 0, 1]


MODEL = """
from transformers import LlamaForCausalLM
class Own(LlamaForCausalLM):
    def forward(self, *args, **kwargs): return super().forward(*args, **kwargs) {}
"""


def test_a_model_of_edited_code_is_another_one(own_module):
    hashes = []
    for more in ("", "", "or 1"):
        own = own_module(MODEL.format(more)).Own
        torch.manual_seed(0)
        hashes.append(model_hash(own(CONFIGS["llama"])))
    assert hashes[0] == hashes[1] != hashes[2]
