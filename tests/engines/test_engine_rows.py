"""What programs do with the configs of many families, as ``assets/engines.json`` says, against the programs themselves.

    python -m pytest tests/engines/test_engine_rows.py -m engines            # compares the rows of some families
    python -m pytest tests/engines/test_engine_rows.py -m engines --write    # asks about all, and writes the file

The first takes a few minutes, the second an hour of two cores.
"""

from __future__ import annotations

import json

import pytest
from support import engine_forms
from support.engine_rows import FILE, SMALL, Forms, answers_of, by_config, converted_answers, rows_of, write
from support.engines import python_of
from support.gguf_files import write_toy
from support.prompting import TOKENIZER
from support.tiny import tiny_model

import rope_patch
from rope_patch.engines.programs import PROGRAMS
from rope_patch.gguf.patch import patch_gguf

SOME = ("llama", "gemma3_text", "glm4", "gpt_oss", "phi3")


@pytest.fixture(scope="module")
def everything(pytestconfig) -> bool:
    """Whether the file is written."""
    return bool(pytestconfig.getoption("write", False))


@pytest.fixture(scope="module")
def forms(everything) -> Forms:
    """A config for each form of each family."""
    return Forms(engine_forms.FAMILIES if everything else SOME)


@pytest.fixture(scope="module")
def own(forms):
    """What transformers 5 itself does."""
    return answers_of("transformers-5", forms)


@pytest.mark.engines
@pytest.mark.parametrize("program", ["transformers-4", "vllm", "mlx", "sglang"])
def test_a_program_does_what_its_rows_say(program, forms, own, everything):
    check(program, rows_of(forms, answers_of(program, forms), own), everything)


@pytest.mark.engines
def test_llama_cpp_does_what_its_rows_say(everything, tmp_path):
    forms = Forms(engine_forms.FAMILIES if everything else ["llama", "gemma3_text"], **SMALL)
    answers = converted_answers(forms, tmp_path)
    check("llama.cpp", rows_of(forms, answers, answers_of("transformers-5", forms)), everything)


@pytest.mark.engines
def test_llama_cpp_is_asked_about_a_file(tmp_path):
    model = tiny_model("llama", vocab_size=1024)
    plain = write_toy(model, tmp_path / "plain.gguf", TOKENIZER)
    patch_gguf(plain, "truncated", tmp_path / "file.gguf", target_length=256)
    found = rope_patch.doctor(tmp_path / "file.gguf", for_programs=["llama.cpp"], python=python_of("llama.cpp"))
    assert [check.state for check in found.checks if "asked" in check.name] == ["holds"]


def check(program, rows, everything):
    """Write the rows of a program, or compare them with those of the file."""
    if everything:
        write(program, rows)
        return
    found = by_config(rows)
    committed = by_config(json.loads(FILE.read_text())[PROGRAMS[program].name])
    # The file also has forms that earlier versions wrote.
    assert {key: committed.get(key) for key in found} == found
