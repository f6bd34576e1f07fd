"""A checkpoint at a longer context, from the measurement to a folder that plain transformers loads."""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import metadata_load
from huggingface_hub.errors import IncompleteSnapshotError
from safetensors.torch import load_file
from support.commands import fail, invoke, run
from support.fresh import stock_logits
from support.gguf_files import write_toy
from support.hub import cached_repository
from support.prompting import TOKENIZER
from support.report_pages import Page
from support.tiny import LLAMA, bundled_model, small, tiny_model
from transformers import AutoModelForCausalLM, Trainer

import rope_patch
from rope_patch.checkpoints.folder_patch import restore_folder
from rope_patch.cli.parsing import parse_words
from rope_patch.evaluation.finished_work import FinishedWork
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.extending.begin import begin, candidates
from rope_patch.extending.extend import choose_task, extend
from rope_patch.extending.measure import Clock
from rope_patch.extending.served_by import served_by
from rope_patch.extending.train_adapter import Training, plan_training, train_adapter
from rope_patch.extending.write_extended import write_extended
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.extend import ExtendOptions, ExtendSettings
from rope_patch.options.yaml_and_json import options_from_dict, to_dict
from rope_patch.runtime.progress import listen
from rope_patch.texts.builtin_text import builtin_text

pytestmark = pytest.mark.usefixtures("reloads_fork", "figures")

QUICK = {"length": 512, "methods": ["yarn", "pi", "nope"], "tolerance": 0.5}
ONE_METHOD = {**QUICK, "methods": ["yarn"]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = shutil.copytree(LLAMA, tmp_path_factory.mktemp("source") / "llama")
    (folder / "LICENSE.txt").write_text("the terms")
    (folder / "licenses").mkdir()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A text with room for two windows of 512 tokens, so that all of it is read on every machine."""
    path = tmp_path_factory.mktemp("text") / "short.txt"
    path.write_text(builtin_text("heldout").text[:3_000])
    return str(path)


@pytest.fixture(scope="module")
def extended(llama, short, tmp_path_factory):
    folder = tmp_path_factory.mktemp("extend") / "out"
    said = []
    with listen(on_sentence=said.append):
        outcome = extend(llama, TOKENIZER, output=folder, text=short, **QUICK)
    return outcome, said


@pytest.fixture
def speed(monkeypatch):
    """A machine that reads 1000 tokens a second."""
    monkeypatch.setattr("rope_patch.evaluation.time_budget.tokens_per_second", lambda *_, **__: 1000.0)


def test_the_folder_is_one_of_plain_transformers(extended, llama):
    outcome, said = extended
    assert any(" 2 windows of 512 tokens" in sentence for sentence in said), "the text is used as it is"
    assert outcome.choice.method == "yarn:factor=2" and outcome.output is not None
    assert (outcome.output / "LICENSE.txt").read_text() == "the terms"
    record = rope_patch.verify(outcome.output).record
    restored = outcome.output.parent / "restored"
    restore_folder(outcome.output, restored)
    assert not {"BASE_README.md", "extend.yaml"} & {path.name for path in restored.iterdir()}
    assert (restored / "README.md").read_bytes() == (LLAMA / "README.md").read_bytes()
    assert str(record.to_method()) == "yarn:factor=2" and record.target_length == 512
    ids = torch.arange(5, 405)[None]
    root = outcome.output.parent
    with rope_patch.patched(llama, "yarn", factor=2.0), torch.no_grad():
        assert torch.equal(stock_logits(root, ids, "out")["out"], llama(ids, use_cache=False).logits)
    assert rope_patch.inspect(llama).record is None, "the model is as it was"


def test_the_card_and_the_record_say_why(extended):
    outcome, _ = extended
    record = json.loads((outcome.output / "rope_patch_extend.json").read_text())
    assert record["chosen"] == "yarn:factor=2" and record["trained_length"] == 256 and record["length"] == 512
    assert len(record["rounds"][0]["rows"]) == 4, "the unpatched model beside three candidates"
    page = (outcome.output / "README.md").read_text()
    assert all(sentence in page for sentence in record["verdict"]) and "`nope`" in page and "+" in page
    row = re.search(r"passkey prompts of 512 tokens that are answered \| (\S+ of \d+) \| (\S+ of \d+) ", page)
    after = outcome.comparison.rows[[r.method for r in outcome.comparison.rows].index("yarn:factor=2")]
    assert row[2] == after.scores.retrieval["passkey"].answered(512)
    assert record["evaluated"][0]["served_by"]["mlx"] == "" and "MLX" in page
    (index,) = metadata_load(outcome.output / "README.md")["model-index"]
    (result,) = index["results"]
    place = outcome.comparison.rows.index(after)
    scores = {column.heading: pytest.approx(column.values[place], abs=1e-4) for column in outcome.comparison.columns()}
    assert {metric["name"]: metric["value"] for metric in result["metrics"]} == scores
    assert index["name"].endswith("-512") and result["dataset"]["name"] == outcome.comparison.text_name
    again = parse_words(ExtendOptions, ["--recipe", str(outcome.output / "extend.yaml"), "-o", "again"])
    assert again.settings == outcome.options
    assert record["options"] == json.loads(json.dumps(to_dict(outcome.options)))


def test_programs_that_run_a_method_are_asked(llama):
    """llama.cpp knows no longrope, which encodes mrrope; SGLang takes an attention factor of 1 as an option."""
    source = llama.name_or_path
    assert set(served_by(llama, "yarn", source, 512)) == {"transformers-4", "vllm", "sglang", "llama.cpp", "mlx"}
    assert "llama.cpp" not in served_by(llama, "mrrope", source, 512)
    served = served_by(llama, "yarn:attention_factor=1", source, 512)
    assert served["vllm"] == "" and "rope_parameters" in served["sglang"] and "llama.cpp" not in served
    assert rope_patch.inspect(llama).record is None


def test_methods_that_a_named_program_does_not_run_are_left_out_and_said(llama):
    said = []
    options = {"model": llama.name_or_path, "length": 512, "methods": ["yarn", "mrrope"]}
    with listen(on_sentence=said.append):
        kept = candidates(llama, options_from_dict(ExtendSettings, options | {"for_programs": ["vllm llama.cpp"]}))
    assert kept == ("yarn:factor=2",) and any("mrrope" in sentence for sentence in said)
    with pytest.raises(ValueError, match="programs"):
        candidates(llama, options_from_dict(ExtendSettings, options | {"methods": ["mrrope"], "for_programs": ["mlx"]}))


def test_an_interrupted_run_goes_on_and_ends_alike(llama, short, extended, tmp_path):
    def stop(stage, tokens):
        if stage == "pi:factor=2":
            raise KeyboardInterrupt

    options = {"output": tmp_path / "out", "text": short, **QUICK}
    with listen(stop), pytest.raises(KeyboardInterrupt):
        extend(llama, TOKENIZER, **options)
    assert not (tmp_path / "out").exists() and rope_patch.inspect(llama).record is None
    again = extend(llama, TOKENIZER, **options)
    assert again.comparison.to_json() == extended[0].comparison.to_json()
    assert again.choice == extended[0].choice


def test_the_card_of_a_base_on_the_hub_is_kept_where_its_cache_is_incomplete(extended, llama, tmp_path, monkeypatch):
    """tests/checkpoints/test_checkpoints.py has a hub that can be reached."""
    remote = tmp_path / "remote"
    out = tmp_path / "out"
    remote.mkdir()
    card = "---\nlicense: llama3\nlanguage: [en, de]\n---\nThe base."
    (remote / "README.md").write_text(card)
    snapshot = cached_repository(monkeypatch, tmp_path / "cache", "someone/llama", remote)

    def incomplete(*_, **__):  # its cache knows of files that it does not hold
        raise IncompleteSnapshotError("some files are missing", str(snapshot))

    monkeypatch.setattr("huggingface_hub.snapshot_download", incomplete)
    outcome = replace(extended[0], options=replace(extended[0].options, model="someone/llama"), output=None)
    write_extended(outcome, out, llama, TOKENIZER, overwrite=False)
    head = metadata_load(out / "README.md")
    assert (head["base_model"], head["license"], head["language"]) == ("someone/llama", "llama3", ["en", "de"])
    assert (out / "BASE_README.md").read_text() == card


def test_the_check_attends_as_the_model_and_leaves_it_in_training(short, tmp_path):
    """A checkpoint of 16 bits that is computed in 32 is written in 16."""
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.bfloat16, attn_implementation="eager").float()
    extend(model.train(), TOKENIZER, output=tmp_path / "out", text=short, **ONE_METHOD)
    assert model.training
    written, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", LLAMA))
    assert written.keys() == before.keys() and all(torch.equal(written[name], before[name]) for name in before)


def test_weights_that_nobody_needs_are_freed_before_the_check(extended, tmp_path, monkeypatch):
    model = bundled_model()
    alive = []

    def check(folder, vocabulary, device, attention):
        alive.append(sum(parameter.numel() for parameter in model.parameters()))
        return torch.zeros(1, 1)

    monkeypatch.setattr("rope_patch.extending.write_extended.plain_logits", check)
    for owned in (False, True):
        with pytest.raises(RuntimeError, match="other logits"):
            write_extended(extended[0], tmp_path / "out", model, TOKENIZER, overwrite=False, owned=owned)
    assert alive[0] > 0 and alive[1] == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "answered", "asked", "read"),
    [
        ({}, ["passkey", "niah"], "passkey", 1),
        ({}, ["niah"], "niah", 2),
        ({}, [], "niah", 2),
        ({"tasks": ["niah"]}, ["passkey"], "niah", 0),
    ],
    ids=["both", "niah", "neither", "given"],
)
def test_it_asks_what_the_unpatched_model_answers(llama, monkeypatch, speed, given, answered, asked, read):
    settings = options_from_dict(ExtendSettings, {"model": "llama", **given, **QUICK})
    said = []
    probes = []

    def graded(suite, model, resume):
        probes.append(suite)
        logprob = {"passkey": -9.0, "niah": -2.0}[suite.task]
        result = SimpleNamespace(accuracy=lambda length: suite.task in answered, logprob=lambda length: logprob)
        return SimpleNamespace(retrieval={suite.task: result})

    monkeypatch.setattr(NeedleSuite, "run", graded)
    suites = begin(llama, TOKENIZER, settings).suites
    with listen(lambda *_: None, on_sentence=said.append):
        suite = choose_task(llama, suites, Clock(math.inf, 1.0), FinishedWork({}, ""))
    assert suite.task == asked and suite.spec.lengths == (256, 512)
    assert len(probes) == read and all(one.spec.lengths == (256,) and len(one.laden) == 1 for one in probes)
    assert bool(said) == (read == 2)


def test_the_command_says_no_with_a_status_of_its_own(short, tmp_path, speed):
    arguments = ["extend", LLAMA, "--length", "512", "-o", tmp_path / "out", "--methods", "nope", "--text", short]
    result = invoke(*arguments, "--dtype", "float32", "--threads", "1")
    assert result.exit_code == 4, result.output
    report = "".join(Page((tmp_path / "out.work" / "report.html").read_text()).text)
    for text in (report, result.stdout):
        assert "Nothing was written" in text and "--train" in text
    assert not (tmp_path / "out").exists()


def test_a_budget_without_time_for_a_window_says_how_long_one_takes(short, tmp_path, monkeypatch):
    """At a token a second 512 tokens take 8.5 minutes, and four times as long under three methods and without one.

    With a reserve of a fifth, and .9 of the budget for measuring, that is 45.5 minutes.
    """
    monkeypatch.setattr("rope_patch.evaluation.time_budget.tokens_per_second", lambda *_, **__: 1.0)
    arguments = ["--length", "512", "-o", tmp_path / "out", "--methods", "yarn pi nope", "--tasks", "passkey"]
    result = invoke("extend", LLAMA, *arguments, "--text", short, "--budget", "1m", "--dtype", "float32")
    assert result.exit_code == 4 and "34 minutes" in result.stdout and "--budget 46m" in result.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 256}, "trained at 256"),
        ({"methods": []}, "beside 'default'"),
        ({"methods": ["yarn", "yarn:factor=2"]}, "differ"),
        ({"tasks": []}, "task"),
        ({"tasks": ["passkey", "vt"]}, "vt"),
        ({"train_rows": 9}, "--train"),
        ({"length": 10**7, "methods": ["p_rope"]}, "9999999 tokens"),
        ({"for_programs": ["vlm"]}, "vlm"),
    ],
)
def test_bad_options_are_refused_before_anything_is_read(llama, tmp_path, changes, message):
    read = []
    options = {"output": tmp_path / "out", **QUICK, **changes}
    with listen(lambda *progress: read.append(progress)), pytest.raises(ValueError, match=message):
        extend(llama, TOKENIZER, **options)
    assert not read and not list(tmp_path.iterdir())


def test_a_dry_run_says_what_would_be_read_and_written_in_ten_lines(llama, tmp_path, speed):
    """3 methods and none over 512 tokens at 1000 a second; 8 windows, then 8 more of the best two, then 16 and 32."""
    arguments = ["extend", LLAMA, "--length", "512", "-o", tmp_path / "out", "--methods", "yarn pi nope"]
    result = invoke(*arguments, "--dry-run", "--dtype", "float32")
    assert result.exit_code == 0, result.output
    said = result.stderr.splitlines()
    assert len(said) <= 10 and any(line.startswith("methods: yarn:factor=2, pi") for line in said)
    tokens = 512 * (4 * 8 + 3 * 8 + 3 * 16)
    weights = 4 * sum(p.numel() for p in llama.parameters()) / 2**30
    for number in (f"{tokens:,}", f"weights {weights:.2g}", "3 seconds", f"{tmp_path / 'out'}"):
        assert number in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_appears_with_its_report(llama, short, tmp_path, monkeypatch):
    """What is interrupted in the report leaves no folder, which the same command would refuse to write into."""
    arguments = ["extend", LLAMA, "--length", "512", "-o", tmp_path / "out", "--methods", "yarn", "--text", short]
    monkeypatch.setattr("rope_patch.runtime.page.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert invoke(*arguments).exit_code == 130 and not (tmp_path / "out").exists()
    monkeypatch.undo()
    run(*arguments)
    assert (tmp_path / "out" / "report.html").is_file()


def test_a_missing_text_or_tokenizer_is_named_before_the_model_is_loaded(tmp_path):
    """For Gemma, transformers makes an empty tokenizer in the place of one."""
    asked = ("extend", tmp_path / "model", "--length", "1k", "-o", tmp_path / "out")
    assert "missing.txt" in fail(*asked, "--text", "missing.txt")
    shutil.copytree(LLAMA.with_name("gemma3"), tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    assert "model has no tokenizer" in fail(*asked)


def test_a_patched_model_a_full_folder_and_the_checkpoint_itself_are_refused(llama, tmp_path):
    with rope_patch.patched(llama, "yarn", factor=2), pytest.raises(rope_patch.PatchError, match="is patched already"):
        extend(llama, TOKENIZER, output=tmp_path / "out", **QUICK)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        extend(llama, TOKENIZER, output=tmp_path / "full", **QUICK)
    with pytest.raises(ValueError, match="itself"):
        extend(llama, TOKENIZER, output=llama.name_or_path, overwrite=True, **QUICK)


def test_a_model_whose_layers_rotate_within_a_window_alone_is_refused_before_its_weights_are_read(tmp_path):
    tiny_model("mistral", sliding_window=32).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    for more in ((), ("--dry-run",)):
        said = fail("extend", tmp_path / "model", "--length", "512", "-o", tmp_path / "out", *more)
        assert "--target-length" in said
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_table_that_is_extended_further_is_the_one_of_the_training(llama, tmp_path, speed):
    """A record tells whether an earlier run trained the weights; without one they may be of either kind."""
    with rope_patch.patched(llama, "yarn", factor=2.0, target_length=512):
        rope_patch.save(llama, tmp_path / "first", tokenizer=TOKENIZER)
    record = tmp_path / "first" / "rope_patch_extend.json"
    asked = ["extend", tmp_path / "first", "--length", "1k", "-o", tmp_path / "out", "--methods", "yarn", "--dry-run"]
    for training, table, said in ((None, "yarn:factor=4", "undone"), ({"steps": 8}, "yarn:factor=2", "is extended")):
        record.write_text(json.dumps({"training": training}))
        printed = invoke(*asked).output
        assert f"methods: {table}" in printed and said in printed
    record.unlink()
    assert "patched already" in fail(*asked)


SCALED = {
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"original_max_position_embeddings": 64},
    "linear": {},
}


@pytest.mark.parametrize(
    ("kind", "methods"),
    [
        ("llama3", ["llama3:factor=2", "yarn:factor=2", "mrrope:factor=2", "abf:factor=4"]),
        ("yarn", ["yarn:factor=2", "mrrope:factor=2", "llama3:factor=2", "abf:factor=4"]),
        ("linear", ["pi:factor=2", "abf:factor=4"]),
    ],
)
def test_a_scaled_checkpoint_has_candidates_of_its_own(kind, methods):
    """The one that raises its own type stands first; what several methods miss is said once."""
    scaling = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, **SCALED[kind]}
    model = tiny_model(max_position_embeddings=256, rope_parameters=scaling)
    said: list[str] = []
    with listen(on_sentence=said.append):
        found = candidates(model, options_from_dict(ExtendSettings, {"model": "m", "length": 512}))
    assert list(found) == methods
    said = [line for line in said if line.startswith("left out")]
    assert [line.split(": ")[1] for line in said] == ["yarn, mrrope, llama3"] * (kind == "linear")


def test_a_gguf_file_is_extended_to_a_folder(llama, short, tmp_path):
    model = rope_patch.load(write_toy(llama, tmp_path / "model.gguf"))
    outcome = extend(model, TOKENIZER, output=tmp_path / "out", text=short, **ONE_METHOD)
    assert outcome.output is not None and rope_patch.verify(outcome.output).record.target_length == 512


@pytest.mark.slow
def test_a_trained_adapter_is_measured_beside_the_unadapted_model_and_merged(llama, short, tmp_path, monkeypatch):
    options = {**ONE_METHOD, "output": tmp_path / "out", "text": short}
    outcome = extend(llama, TOKENIZER, train=True, train_rows=8, **options)
    rows = [(row.method, row.trained) for row in outcome.comparison.rows]
    assert rows == [("default", False), ("yarn:factor=2", False), ("yarn:factor=2", True)]
    assert outcome.choice.chosen.trained and outcome.training.tokens == 8 * 512
    untrained, trained = (row.scores.perplexity.nll for row in outcome.comparison.rows[1:])
    assert trained < untrained
    merged = AutoModelForCausalLM.from_pretrained(outcome.output)
    assert str(rope_patch.verify(merged).record.to_method()) == "yarn:factor=2"
    base = llama.model.layers[0].self_attn.q_proj.weight
    assert not torch.equal(merged.model.layers[0].self_attn.q_proj.weight, base)
    assert not (outcome.output / "adapter_config.json").exists()
    assert "8 rows of 512 tokens" in (outcome.output / "README.md").read_text()
    (left,) = (path.name for path in (tmp_path / "out.work").iterdir() if path.is_dir())
    assert left.startswith("adapter-"), "the model that was trained is no second checkpoint"
    monkeypatch.setattr(Trainer, "training_step", lambda *_: pytest.fail("it was trained again"))
    assert extend(llama, TOKENIZER, train=True, train_rows=8, overwrite=True, **options).choice == outcome.choice


def test_another_training_does_not_go_on_with_an_earlier_one(tmp_path, monkeypatch):
    monkeypatch.setattr("rope_patch.training.finetune.finetune", lambda *_, **__: None)
    options = ExtendSettings("tiny", 128, methods=("yarn",), train=True, evaluation=EvalSpec((128,)))
    model = small()
    tokenizer = copy.deepcopy(TOKENIZER)

    def folder(method="yarn:factor=2", steps=1):
        return train_adapter(model, tokenizer, method, options, Training("pose", 64, steps), tmp_path)

    folders = [folder(), folder("pi:factor=2"), folder(steps=2)]
    tokenizer.add_tokens("thesis")
    folders.append(folder())
    model.model.norm.weight.data *= 2
    folders.append(folder())
    assert len(set(folders)) == 5 and folder() == folders[-1]


def test_on_a_gpu_a_family_that_no_plan_covers_is_trained_on_short_rows(tmp_path, monkeypatch):
    options = ExtendSettings("tiny", 64 * 1024, methods=("yarn",), train=True, evaluation=EvalSpec((64 * 1024,)))
    model = tiny_model("mixtral")
    memory = SimpleNamespace(total_memory=2**36)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: memory)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert plan_training(model, options, 128, 100.0).positions == "pose"
