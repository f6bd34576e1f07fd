"""Methods compared through vLLM, by a stand-in with its interface that plain transformers runs."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import vllm_stand_in
from commands import fail, run
from evaluated import suite_of
from prompting import HAY, TOKENIZER
from tiny import tiny_model
from transformers import AutoModelForCausalLM

import rope_patch
from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.retrieval import retrieval
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.evaluation.vllm_engine import VLLMEngine
from rope_patch.exporting.served import compare_with_vllm

LLAMA = rope_patch.data_path("assets") / "llama"  # trained at 256 tokens
ASKED = {"depths": (0.0, 1.0), "samples": 1, "windows": 0}
SHORT = ["--lengths", "64", "--depths", "0.5", "--samples", "1"]


@pytest.fixture
def vllm(monkeypatch):
    module = vllm_stand_in.module()
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


@pytest.fixture(scope="module")
def llama():
    return AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()


def samples_of(result):
    return [sample for cell in result.cells for sample in cell.samples]


def without_logprobs(result):
    return [replace(sample, logprob=0.0) for sample in samples_of(result)]


def test_answers_are_those_of_the_transformers_backend(vllm, llama):
    """Within and beyond the trained length, right and wrong ones."""
    suite = suite_of(TOKENIZER, lengths=(90, 264), haystack=HAY, **ASKED)
    methods = ["default", "nope"]
    ours = compare(llama, TOKENIZER, methods, suite)
    theirs = compare_with_vllm(LLAMA, TOKENIZER, methods, suite, dtype="float32")
    for one, other in zip(ours.rows, theirs.rows, strict=True):
        for task, result in one.scores.retrieval.items():
            assert without_logprobs(result) == without_logprobs(other.scores.retrieval[task])
            pairs = zip(samples_of(result), samples_of(other.scores.retrieval[task]), strict=True)
            assert all(math.isclose(a.logprob, b.logprob, abs_tol=1e-3) for a, b in pairs)
    assert {sample.correct for row in ours.rows for sample in samples_of(row.scores.retrieval["passkey"])} == {
        True,
        False,
    }, "answers that are all right or all wrong would show little"
    assert [asdict(column) for column in theirs.columns()] == [asdict(column) for column in ours.columns()]
    assert theirs.effective_lengths() == ours.effective_lengths() and theirs.model == ours.model
    assert [(each["max_model_len"], each["dtype"]) for each in vllm.started] == [(264, "float32")] * 2
    assert theirs.environment["engine"] in theirs.warnings[0]


def test_an_exported_folder_is_measured_by_itself(vllm, llama, tmp_path):
    rope_patch.export(LLAMA, tmp_path / "out", to="vllm", method="p_rope:p=0.5")
    asked = {"lengths": [100], "depths": [0.3], "samples": 1, "haystack": HAY}
    with VLLMEngine(tmp_path / "out", 100, "float32") as engine:
        through = retrieval(engine, TOKENIZER, **asked)
    with rope_patch.patched(llama, "p_rope:p=0.5"):
        assert without_logprobs(through) == without_logprobs(retrieval(llama, TOKENIZER, **asked))


def test_results_are_kept_apart_from_those_of_other_engines_versions_and_options(vllm, llama):
    suite, finished = suite_of(TOKENIZER, lengths=(64,), haystack=HAY, **ASKED), {}

    def started(**options):
        before = len(vllm.started)
        compare_with_vllm(LLAMA, TOKENIZER, ["default"], suite, resume=finished, **options)
        return len(vllm.started) - before

    compare(llama, TOKENIZER, ["default"], suite, resume=finished)
    assert started(dtype="float32") == 1 and len(finished) == 2
    assert started(dtype="float32") == 0, "what is finished needs no engine"
    assert started() == 1 and vllm.started[-1]["dtype"] == "bfloat16", "the checkpoint's own, and not vLLM's choice"
    assert started(dtype="float32", options={"enforce_eager": True}) == 1
    vllm.__version__ = "0.34.0"
    assert started(dtype="float32") == 1 and len(finished) == 5


def test_other_weights_are_other_results(vllm, tmp_path):
    identities = set()
    for seed in (0, 1):
        model = tiny_model()
        with torch.no_grad():
            model.model.norm.weight += seed  # one small tensor of all
        model.save_pretrained(tmp_path / str(seed))
        identities.add(VLLMEngine(tmp_path / str(seed), 64).identity)
    assert len(identities) == 2


@pytest.mark.parametrize(
    ("methods", "changes", "message"),
    [
        (["default"], {"windows": 2}, "vLLM answers prompts alone: give a spec with windows=0"),
        (["default"], {"chunk": 64}, "without longppl and chunk"),
        (["default", "yarn:factor=2@256"], {}, "has two tables, and vLLM serves one"),
        ("default", {}, "methods must be a list"),
    ],
)
def test_what_vllm_is_not_asked_for_is_refused_before_it_starts(vllm, methods, changes, message):
    suite = EvalSuite(EvalSpec((64,), **{**ASKED, **changes}), TOKENIZER, haystack=Haystack("Go on, then. " * 99))
    with pytest.raises(ValueError, match=re.escape(message)):
        compare_with_vllm(LLAMA, TOKENIZER, methods, suite)
    assert not vllm.started


def test_an_engine_that_does_not_obey_is_not_believed(vllm):
    obedient = vllm.SamplingParams
    vllm.SamplingParams = lambda allowed_token_ids=None, **options: obedient(**options)
    suite = suite_of(TOKENIZER, lengths=(300,), haystack=HAY, **ASKED)
    with pytest.raises(ValueError, match=r"vLLM 0.33.0 took token .* where .* alone was allowed"):
        compare_with_vllm(LLAMA, TOKENIZER, ["nope"], suite, dtype="float32")


# --- the command


def test_the_command_writes_a_comparison_that_names_the_engine(vllm, tmp_path):
    words = ["compare", LLAMA, "--methods", "default yarn:factor=2", *SHORT, "--no-report", "--backend", "vllm"]
    printed = run(*words, "--vllm-args", '{"tensor_parallel_size": 2}', "-o", tmp_path)
    assert "answered by vLLM 0.33.0" in printed
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert written["environment"]["engine"] == "vLLM 0.33.0" and written["spec"]["windows"] == 0
    assert [row["perplexity"] for row in written["rows"]] == [None, None]
    assert {each["tensor_parallel_size"] for each in vllm.started} == {2}
    assert not [each["model"] for each in vllm.started if Path(each["model"]).exists()], "the folders are removed"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "sglang"], "--backend must be one of transformers, vllm, got 'sglang'"),
        (["--vllm-args", "{}"], "--vllm-args goes with --backend vllm"),
        (["--backend", "vllm", "--vllm-args", "[1]"], "--vllm-args: must be a JSON object, got '[1]'"),
        (["--backend", "vllm", "--vllm-args", '{"dtype": "half"}'], "dtype is not an option of vLLM here"),
        (["--backend", "vllm", "--windows", "4"], "--windows does not go with --backend vllm"),
        (["--backend", "vllm", "--longppl-evaluator", "x"], "--longppl-evaluator does not go with --backend vllm"),
    ],
)
def test_options_that_do_not_go_together(vllm, monkeypatch, capsys, tmp_path, words, message):
    arguments = ["compare", LLAMA, "--methods", "default", *SHORT, "-o", tmp_path / "out", *words]
    assert message in fail(monkeypatch, capsys, *arguments)
    assert not vllm.started and not (tmp_path / "out").exists()


def test_without_vllm_the_extra_is_named_before_anything_is_read(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "vllm", None)
    error = fail(
        monkeypatch, capsys, "compare", "no-such-model", "--methods", "default", *SHORT, "--backend", "vllm", "-o", "x"
    )
    assert 'pip install "rope_patch[vllm]"' in error


# --- the stand-in


@pytest.mark.slow
@pytest.mark.engines
def test_the_stand_in_has_the_interface_of_vllm():
    real = pytest.importorskip("vllm")
    ours = vllm_stand_in.module()
    assert [*inspect.signature(real.LLM.generate).parameters] == [*inspect.signature(ours.LLM.generate).parameters]
    for name in vllm_stand_in.SamplingParams.__dataclass_fields__:
        assert name in real.SamplingParams.__struct_fields__
    fields = importlib.import_module("vllm.outputs").CompletionOutput.__dataclass_fields__
    assert {*vllm_stand_in.CompletionOutput.__dataclass_fields__} <= {*fields}
    assert {"logprob", "rank"} <= {*importlib.import_module("vllm.logprobs").Logprob.__dataclass_fields__}
