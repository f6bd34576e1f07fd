"""Programs are asked for their tables: here transformers, in another process, about configs that differ a little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.commands import fail, run
from support.engine_forms import stated_of
from support.fresh import run_code
from support.tiny import LLAMA, tiny_model

import rope_patch
from rope_patch.engines.ask.__main__ import MARK
from rope_patch.engines.asking import ask
from rope_patch.engines.readings import reading_asked
from rope_patch.engines.verdicts import (
    DEFAULT_BASE,
    DROPPED,
    FACTOR,
    MOVED,
    OTHER,
    PAIRS,
    PLAIN,
    SAME,
    WINDOW,
    verdict_of,
)

YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = ["sliding_attention", "full_attention"]


def config(family: str, **changes) -> dict:
    """A config of a tiny model as transformers writes it."""
    written = json.loads(tiny_model(family).config.to_json_string())
    return written | {"max_position_embeddings": 256} | changes


def gemma3(kinds=KINDS, **full) -> dict:
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6} | full,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    return config("gemma3", rope_parameters=parameters, sliding_window=16, layer_types=kinds)


def llama(**parameters) -> dict:
    return config("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5} | parameters)


# What is meant, what the program reads instead, and what is to be seen of it.
CASES = {
    "the same": (llama(**YARN), llama(**YARN), {"": SAME}),
    "no scaling": (llama(**YARN), llama(), {"": PLAIN}),
    "no base either": (llama(**YARN), llama(rope_theta=1e4), {"": DEFAULT_BASE}),
    "another factor on cos and sin": (llama(**YARN), llama(**YARN, attention_factor=1.5), {"": FACTOR}),
    "another scaling": (llama(**YARN), llama(rope_type="linear", factor=4.0), {"": OTHER}),
    "half of the pairs": (
        config("phi", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}),
        config("phi", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        {"": PAIRS},
    ),
    "a window that is not known": (
        config("mistral", sliding_window=16),
        config("mistral", sliding_window=None),
        {"": DROPPED},
    ),
    "another window": (config("mistral", sliding_window=16), config("mistral", sliding_window=32), {"": WINDOW}),
    "a window as long as the context": (
        config("mistral", sliding_window=256),
        config("mistral", sliding_window=None),
        {"": SAME},
    ),
    "layers the other way round": (
        gemma3(),
        gemma3(kinds=KINDS[::-1]),
        {"full_attention": MOVED, "sliding_attention": MOVED},
    ),
    "one of two tables": (
        gemma3(rope_type="linear", factor=8.0),
        gemma3(),
        {"full_attention": PLAIN, "sliding_attention": SAME},
    ),
}


PROGRAM = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module", autouse=True)
def asked_in_forks():
    """This Python is asked in forks of a process that has transformers; another one in a new interpreter."""

    def run_forked(command, **options):
        if command[0] != sys.executable:
            return subprocess.run(command, **options)
        return run_code(PROGRAM, *command[3:], env=options["env"])  # without -W ignore

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rope_patch.engines.asking.subprocess", SimpleNamespace(run=run_forked))
        yield


@pytest.fixture(scope="module")
def answered():
    """The answers about what is meant and about what is read instead, by case."""
    pairs = {case: (meant, read) for case, (meant, read, _) in CASES.items()}
    pairs["failing"] = (config("llama", model_type="nothing"), llama(rope_type="x"))
    answers = iter(ask("transformers-5", [one for pair in pairs.values() for one in pair], sys.executable))
    return dict(zip(pairs, zip(answers, answers, strict=True), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_what_is_read_otherwise_is_seen(case, answered):
    own, answer = answered[case]
    meant, _, seen = CASES[case]
    assert verdict_of(answer, own, stated_of(meant).tables) == seen


def test_the_answer_is_the_table_of_the_model(answered):
    own, _ = answered["the same"]
    table = stated_of(llama(**YARN)).tables[None]
    for layer in own.layers:
        torch.testing.assert_close(layer.inv_freq, table.inv_freq, rtol=1e-6, atol=0)
        assert layer.attention_scaling == pytest.approx(table.attention_scaling, rel=1e-6)


def test_a_config_on_which_a_program_fails(answered):
    unknown, broken = answered["failing"]
    assert "nothing" in unknown.error and not unknown.unread
    assert broken.error


AS_VERSION_4 = f"""#!{sys.executable}
import runpy, sys
import transformers
transformers.__version__ = "4.57.6"
sys.argv = sys.argv[3:]  # without -W ignore
sys.path.insert(0, sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_doctor_asks_the_python_that_it_is_given_if_it_has_that_version(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{MARK}\"5.1\"'\n")
    python.chmod(0o755)
    with pytest.raises(ValueError, match="has transformers 5"):
        ask("transformers-4", [llama()], python)
    python.write_text(AS_VERSION_4)
    said = run("doctor", tmp_path / "model", "--for", "transformers-4", "--python", python)
    assert "4.57.6, asked" in said and "it computes the same table" in said


def test_an_answer_about_a_table_that_changes_with_the_length_says_nothing(answered):
    _, answer = answered["the same"]
    found = reading_asked(answer, answer, stated_of(llama(rope_type="dynamic", factor=2.0)))
    assert "changes with the length" in found.unknown and found.asked


def test_llama_cpp_is_asked_about_files_alone(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "model")
    command = ("doctor", tmp_path / "model", "--for", "llama.cpp", "--python", sys.executable)
    assert "--to gguf" in fail(*command)


@pytest.mark.parametrize(("python", "reason"), [("/no/such/python", "cannot be run"), ("/bin/true", "did not answer")])
def test_a_python_that_does_not_answer_is_an_error(python, reason):
    with pytest.raises(ValueError, match=reason):
        ask("vllm", [llama()], python)


def test_python_goes_with_one_program():
    with pytest.raises(ValueError, match="one program"):
        rope_patch.doctor(LLAMA, for_programs=["vllm", "mlx"], python=Path(sys.executable))
    with pytest.raises(ValueError, match="one program"):
        rope_patch.doctor(LLAMA, for_programs=["sglang"], python=Path(sys.executable))
