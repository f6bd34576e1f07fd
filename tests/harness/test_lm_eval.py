"""lm-eval: our model type against its own and against whole logits, our tasks against our engines, the command line."""

import copy
import functools
import gc
import importlib.metadata
import math
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import lm_eval
import pytest
import torch
from harness.instances import requests
from lm_eval._cli import HarnessCLI
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import Registry, get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks._yaml_loader import load_yaml
from support import tiny
from support.commands import run
from support.largest import Largest
from support.patches import lora, read_json
from support.prompting import TOKENIZER
from support.scored import spy_ids
from support.task_index import TASKS, our_tasks
from support.tiny import bundled_model
from tokenizers import normalizers
from transformers import AutoTokenizer, T5Config

import rope_patch
from rope_patch import PatchError
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.retrieval.prompts import PromptMaker
from rope_patch.harness import tasks as lm_eval_tasks
from rope_patch.harness.model import METHOD_PARAMETERS, RopePatchLM
from rope_patch.harness.tasks import OfflineTask, perplexity_documents, retrieval_documents
from rope_patch.kv_cache.cache import quantized
from rope_patch.modeling.reader import Reader, losses
from rope_patch.patching.cache_argument import cache_argument
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.texts.documents import spread_windows

ROOT = Path(__file__).resolve().parents[2]
LLAMA = str(rope_patch.data_path("assets") / "llama")
DOCUMENT = "def area(width, height):\n    return width * height\n\nclass Shape:\n    sides = 4\n"
PAIRS = [
    (DOCUMENT, "    name = 'a rather long continuation of the text above'"),
    ("The answer is", " no"),
    ("The answer is", " not what you think"),
    ("", "Without any context"),
    ("import os", "\nimport sys\nimport re"),
    ("import os\nimport sys", "\nimport re"),  # the same tokens, fewer of them asked for
]

small = functools.partial(tiny.small, max_position_embeddings=128)


def lm(kind=RopePatchLM, model=None, **options):
    return kind(pretrained=small() if model is None else model, **{"tokenizer": TOKENIZER, "device": "cpu"} | options)


def greedy(tokens):
    return {"until": [], "do_sample": False, "max_gen_toks": tokens}


def run_tasks(model, names, **metadata):
    manager = our_tasks(**metadata)
    return lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    small().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def failure(shell, capsys, line):
    with pytest.raises(SystemExit) as stop:
        shell(line)
    printed = capsys.readouterr()
    assert stop.value.code == 2
    assert "Traceback" not in printed.err
    return next(text for text in printed.err.splitlines() if text.startswith("error: "))


# --- the same number three ways


@pytest.mark.parametrize("method", [None, "abf:rope_theta=500000+p_rope:p=0.5"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_loglikelihood_is_that_of_hf(family, method):
    # Without its cache: with it, 0.4.13 scores the wrong tokens of a text that is asked for from two places on.
    stock = lm(HFLM, small(family), logits_cache=False)
    if method is not None:
        rope_patch.apply(stock.model, method)
    asked = requests("loglikelihood", *PAIRS)
    expected = stock.loglikelihood(asked, disable_tqdm=True)
    for options in ({"batch_size": 1}, {"batch_size": 4, "chunk": 7}, {"batch_size": "auto"}):
        ours = lm(model=small(family), method=method, **options)
        for (score, hit), (wanted, best) in zip(ours.loglikelihood(asked, disable_tqdm=True), expected, strict=True):
            assert score == pytest.approx(wanted, abs=1e-4)
            assert hit == best


def test_rolling_loglikelihood_is_that_of_hf():
    texts = requests("loglikelihood_rolling", (DOCUMENT * 6,), ("short",))  # 3 windows of 128, and 1
    stock = lm(HFLM, batch_size=4)
    rope_patch.apply(stock.model, "p_rope:p=0.5")
    expected = torch.tensor(stock.loglikelihood_rolling(texts, disable_tqdm=True), dtype=torch.float64)
    for options in ({"batch_size": 1}, {"batch_size": 4, "chunk": 50}, {"batch_size": "auto"}):
        ours = lm(method="p_rope:p=0.5", **options)
        scores = torch.tensor(ours.loglikelihood_rolling(texts, disable_tqdm=True), dtype=torch.float64)
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)


def test_no_logits_of_a_whole_text_are_made():
    def logits(tensor):
        return tensor.numel() // 1024 if tensor.shape[-1] == 1024 and tensor.is_floating_point() else 0

    model = lm(model=small(tie_word_embeddings=True), max_length=1000, batch_size=2)
    with Largest(logits) as seen:
        model.loglikelihood_rolling(requests("loglikelihood_rolling", (DOCUMENT * 40,)), disable_tqdm=True)
    assert 0 < seen.largest <= 1024, "the embedding itself, and slices of 256; the whole logits are 2000"


@pytest.mark.parametrize("options", [{}, {"chunk": 16}])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generation_is_that_of_hf(family, options):
    prompts = requests("generate_until", *((DOCUMENT[:end], greedy(8)) for end in (20, 60, 80)))
    expected = lm(HFLM, small(family), batch_size=3).generate_until(prompts, disable_tqdm=True)
    assert lm(model=small(family), batch_size=3, **options).generate_until(prompts, disable_tqdm=True) == expected


def test_bfloat16_is_scored_in_float32():
    asked = requests("loglikelihood", (DOCUMENT[:30], DOCUMENT[30:]))
    half = small().to(torch.bfloat16)
    ours = lm(model=half).loglikelihood(asked)[0][0]
    assert ours == pytest.approx(lm(HFLM, half, softmax_dtype="float32").loglikelihood(asked)[0][0], abs=1e-3)


# --- arguments


def test_the_tokenizer_does_not_warn_of_the_length_before_the_patch(checkpoint):
    """transformers says once that a longer text "will result in indexing errors", which is wrong under the patch."""
    short = AutoTokenizer.from_pretrained(LLAMA, model_max_length=128)
    options = {"method": "yarn:factor=4", "target_length": 512}
    model = RopePatchLM(pretrained=checkpoint, tokenizer=short, device="cpu", **options)
    model.loglikelihood(requests("loglikelihood", ("word " * 100, " x")))
    assert len(short("word " * 100, verbose=False)["input_ids"]) > 128
    assert not any("longer-than" in name for name in short.deprecation_warnings), "it warned"


@pytest.mark.parametrize(
    ("words", "method"),
    [
        (["method=p_rope", "p=0.75"], "p_rope:p=0.75"),
        (["method=longrope,factors=[1,1,1,1,2,2,4,4]"], "longrope:factors=1/1/1/1/2/2/4/4"),
        (['{"method": ["abf:rope_theta=5e5", "p_rope:p=0.5"]}'], "abf:rope_theta=500000+p_rope:p=0.5"),
        (
            ['{"method": {"method": "chain", "steps": ["pi:factor=2", "p_rope:p=0.5"]}}'],
            "pi:factor=2+p_rope:p=0.5",
        ),
    ],
)
def test_every_form_of_a_method_passes_through_lm_evals_own_parser(words, method, checkpoint, monkeypatch):
    command = ["lm_eval", "run", "--model", "rope_patch", "--tasks", "rope_passkey", "--model_args", *words]
    monkeypatch.setattr(sys, "argv", command)
    given = HarnessCLI().parse_args().model_args
    model = get_model("rope_patch").create_from_arg_obj(given, {"pretrained": checkpoint, "device": "cpu"})
    expected = rope_patch.apply(small(), method)
    info = model.get_model_info()["rope_patch"]
    assert info["method"] == method
    assert info["tables"] == {"all": expected.after[None].fingerprint}
    rope_patch.verify(model.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "p_rope", "factor": 4}, "factor"),
        ({"method": "p_rope", "pp": 0.5}, "unexpected keyword argument 'pp'"),
        ({"target_length": 512}, "method="),
        ({"max_lenght": 512}, "unexpected keyword argument 'max_lenght'"),
        ({"chunk": 0}, "chunk"),
        ({"truncation": True}, "truncation"),
        ({"softmax_dtype": "bfloat16"}, "float32"),
        ({"kv_cache": "k=int4.tokn"}, "unknown word 'tokn'"),
    ],
)
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_wrong_argument_is_an_error(options, message, in_memory, checkpoint):
    with pytest.raises((ValueError, TypeError), match=message):
        lm(model=small() if in_memory else checkpoint, **options)


def test_what_hf_and_from_pretrained_take_is_taken(checkpoint):
    model = lm(
        model=checkpoint, method="pi:factor=4", attn_implementation="eager", dtype="float32", attention_dropout=0.25
    )
    assert model.model.config._attn_implementation == "eager"
    assert model.model.config.attention_dropout == 0.25


def test_no_parameter_of_a_method_is_an_argument_or_an_option_of_ours():
    import inspect

    assert not METHOD_PARAMETERS & set(inspect.signature(HFLM.__init__).parameters)
    assert not METHOD_PARAMETERS & {*lm_eval_tasks.TASK_OPTIONS, "tokenizer"}


def test_an_encoder_decoder_is_refused(tmp_path):
    T5Config(d_model=8, d_ff=8, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="encoder-decoder"):
        lm(model=str(tmp_path))


def test_only_the_named_layer_types_are_patched():
    both = "full_attention/sliding_attention"

    def tables(**options):
        return lm(model=small("gemma3"), **options).get_model_info()["rope_patch"]["tables"].values()

    for said, kinds in (("full_attention", 1), (both, 2), (both.split("/"), 2)):
        patched = tables(method="pi:factor=4", layer_types=said)
        assert sum(ours != theirs for ours, theirs in zip(patched, tables(), strict=True)) == kinds


def test_an_adapter_brings_its_patch(tmp_path, checkpoint):
    adapted = lora(rope_patch.load(checkpoint, "abf:rope_theta=500000"))
    rope_patch.save(adapted, tmp_path / "adapter")
    asked = requests("loglikelihood", *PAIRS)
    expected = lm(HFLM, adapted, logits_cache=False).loglikelihood(asked)
    TOKENIZER.save_pretrained(tmp_path / "adapter")
    for given in ({"model": checkpoint, "peft": str(tmp_path / "adapter")}, {"model": str(tmp_path / "adapter")}):
        model = lm(**given)
        assert model.get_model_info()["rope_patch"]["method"] == "abf:rope_theta=500000"
        for got, wanted in zip(model.loglikelihood(asked), expected, strict=True):
            assert got[0] == pytest.approx(wanted[0], abs=1e-4)


def test_an_adapter_is_not_put_on_tables_that_it_was_not_trained_under(tmp_path, checkpoint):
    def adapter_under(method, name):
        model = rope_patch.load(checkpoint, method)
        tuned = lora(model)
        tuned.save_pretrained(tmp_path / name) if method is None else rope_patch.save(tuned, tmp_path / name)
        return str(tmp_path / name)

    patched = str(tmp_path / "patched")
    rope_patch.save(rope_patch.load(checkpoint, "yarn:factor=4"), patched)
    plain = adapter_under(None, "plain")
    other = adapter_under("pi:factor=4", "other")
    with pytest.raises(PatchError, match="no patch record"):
        lm(model=patched, peft=plain)
    with pytest.raises(PatchError, match="trained under pi"):
        lm(model=patched, peft=other)
    assert lm(model=checkpoint, peft=plain).get_model_info()["rope_patch"]["method"] is None
    same = adapter_under("yarn:factor=4", "same")
    assert lm(model=patched, peft=same).get_model_info()["rope_patch"]["method"] == "yarn:factor=4"


# --- nothing is cut


def test_what_does_not_fit_raises_before_anything_runs_and_what_just_fits_runs():
    model = lm(max_length=30)
    ran = []
    model.model.get_input_embeddings().register_forward_pre_hook(lambda *_: ran.append(1))
    text = DOCUMENT.rstrip()
    count = len(TOKENIZER(text)["input_ids"])
    with pytest.raises(ValueError, match="max_length="):
        model.loglikelihood(requests("loglikelihood", ("short", " one"), (text, " x")))
    with pytest.raises(ValueError, match=f"a prompt of {count} tokens and 5 to generate"):
        model.generate_until(asked := requests("generate_until", (text, greedy(5))))
    assert not ran
    assert lm(max_length=count + 5).generate_until(asked)
    assert lm(max_length=count).loglikelihood(requests("loglikelihood", (text, " x")))  # its last token is not read


def test_nan_is_named():
    model = lm()
    with torch.no_grad():
        model.model.get_input_embeddings().weight[74] = math.nan
    model._loglikelihood_tokens([(None, [0, 4, 5], [6, 7, 8])])
    with pytest.raises(ValueError, match="NaN for token 3 of a request of 6 tokens"):  # masked, 0 x NaN is NaN too
        model._loglikelihood_tokens([(None, [0, 4, 5], [6, 74, 8])])


def test_a_question_is_read_once_for_all_its_answers_of_one_token():
    model = lm(batch_size=4)
    with spy_ids(model.model) as read:
        answers = model._loglikelihood_tokens([(None, [0, 4, 5], [token]) for token in (6, 7, 6)])
    assert sum(ids.numel() for ids in read) == 3
    assert answers[0] == answers[2] != answers[1]


def test_answers_of_another_model_are_not_reused(tmp_path):
    asked = requests("loglikelihood", *PAIRS)
    file = str(tmp_path / "answers.db")
    # Formats that give the same short text, in full precision.
    options = {"method": "pi:factor=4", "kv_cache": "k=int8;v=int8;residual=500"}
    first = CachingLM(lm(**options), file).loglikelihood(asked)
    assert CachingLM(lm(**options), file).loglikelihood(asked) == first
    changed = copy.deepcopy(TOKENIZER)
    changed.add_tokens("thesis")
    others = [{"method": "p_rope:p=0.5"}, {"max_length": 99}, {"kv_cache": "k=int8;v=int8;residual=501"}]
    for other in (*others, {"prefix_token_id": 3}, {"tokenizer": changed}):
        with pytest.raises(ValueError, match="another model"):
            CachingLM(lm(**options | other), file)


# --- a patched folder, with and without this package


def test_stock_hf_on_a_patched_folder_is_our_model_with_the_method(tmp_path):
    folder = tmp_path / "patched"
    run("apply", LLAMA, "yarn", "factor=4", "--target-length", "1024", "-o", folder)
    options = {"device": "cpu", "dtype": "float32", "batch_size": 4, "logits_cache": False}
    asked = requests("loglikelihood", (9 * DOCUMENT.rstrip(), DOCUMENT), *PAIRS)
    prompts = requests("generate_until", (9 * DOCUMENT, greedy(8)))
    stock = HFLM(str(folder), **options)
    for ours in (
        RopePatchLM(LLAMA, method="yarn:factor=4", target_length=1024, **options),
        RopePatchLM(str(folder), **options),
    ):
        assert ours.max_length == stock.max_length == 1024
        for got, wanted in zip(ours.loglikelihood(asked), stock.loglikelihood(asked), strict=True):
            assert got == (pytest.approx(wanted[0], rel=1e-6, abs=1e-4), wanted[1])
        assert ours.generate_until(prompts) == stock.generate_until(prompts)
        assert ours.get_model_info()["rope_patch"]["method"] == "yarn:factor=4"
    with pytest.raises(ValueError, match="already patched"):
        RopePatchLM(str(folder), method="pi:factor=4", **options)
    replaced = RopePatchLM(str(folder), method="pi:factor=4", replace=True, **options)
    assert replaced.get_model_info()["rope_patch"]["method"] == "pi:factor=4"


# --- tasks


def test_each_file_is_a_task_and_the_group_holds_those_of_retrieval():
    files = {path.stem: load_yaml(path) for path in TASKS.glob("*.yaml")}
    group, ruler = files.pop("rope_retrieval"), files.pop("rope_ruler")
    assert set(ruler["task"]) <= set(group["task"]) and len(ruler["task"]) == 11
    assert {metric["metric"] for metric in ruler["aggregate_metric_list"]} == {str(256 << i) for i in range(10)}
    assert set(group["task"]) == set(files) - {"rope_ppl"}
    kinds = {config["dataset_kwargs"]["task"] for name, config in files.items() if name in group["task"]}
    assert kinds == set(lm_eval_tasks.TASKS), "every task of the engine has a file"
    for name, config in files.items():
        assert config["task"] == name
        assert issubclass(config["class"], OfflineTask)
        assert set(config["metadata"]) - {"version"} <= set(lm_eval_tasks.TASK_OPTIONS)
        assert {str(256 << i) for i in range(10)} <= {metric["metric"] for metric in config["metric_list"]}


@pytest.mark.parametrize("task", ["passkey", "niah", "json_kv"])
@pytest.mark.parametrize("special", [{}, {"add_bos_token": False}], ids=["BOS", "no BOS"])
def test_prompts_are_those_of_the_engine_in_the_tokens_the_model_will_see(task, special):
    asked = {"samples": 2, "depths": (0.1, 0.9), "seed": 3, "haystack": "noise", "pretrained": LLAMA}
    rows = retrieval_documents(task, length=512, **asked, **special)
    maker = PromptMaker(TOKENIZER, "noise", prefix=() if special else None)
    made = [prompt for sample in (0, 1) for prompt in maker.prompts(task, 512, (0.1, 0.9), seed=3, sample=sample)]
    assert [row["prompt"] for row in rows] == [prompt.text for prompt in made]
    assert [row["expected"] for row in rows] == [list(prompt.parts) for prompt in made]
    model = lm(**special)
    for row in rows:
        ids, _ = model.tok_batch_encode([row["prompt"]])
        assert ids.shape[1] + row["answer_tokens"] == 512
        assert len(model.tok_encode(row["prompt"] + row["target"])) == 512


@pytest.fixture(scope="module")
def yarn():
    """The bundled model, patched, in float32; it reads 512 tokens and no more."""
    model = bundled_model()
    rope_patch.apply(model, "yarn:factor=4", target_length=512)
    return model


def test_scores_are_those_of_the_engine(yarn):
    names = {
        "rope_passkey": "passkey",
        "rope_niah_single_1": "niah_single_1",
    }
    options = {"samples": 2, "depths": [0.0, 0.6], "seed": 1}
    ours, theirs = (run_tasks(lm(kind, yarn, batch_size=4), list(names), **options) for kind in (RopePatchLM, HFLM))
    assert ours["results"] == theirs["results"]
    for name, task in names.items():
        engine = retrieval(yarn, TOKENIZER, task, lengths=(512,), **options)
        assert ours["results"][name]["512,none"] == pytest.approx(engine.accuracy(512))
        cells = engine.cells[:1] if lm_eval_tasks.TASKS[task].joined else engine.cells
        expected = [cell.samples[i].output for i in range(2) for cell in cells]
        said = [sample["filtered_resps"][0] for sample in ours["samples"][name]]
        assert all(map(str.startswith, said, expected)), "the engine ends a right answer, lm-eval does not"
    assert ours["results"]["rope_passkey"]["512,none"] >= 0.5, "a score that could be seen to differ"


@pytest.mark.parametrize("task", ["niah_multikey_2", "vt"])
def test_scores_are_those_of_rulers_own_tasks(task):
    from lm_eval.tasks.ruler import common_utils as ruler

    options = {"length": 1024, "samples": 1, "depths": [0.9], "seed": 1, "haystack": "builtin", "pretrained": LLAMA}
    (doc,) = retrieval_documents(task, **options)
    parts = doc["expected"]
    right = ", ".join(parts)
    scores = []
    for output in (right, right.upper(), f"1.\t{right}", " ".join(reversed(parts)), right[:-1], right[1:], "\x00\n"):
        scores.append(lm_eval_tasks.recall({**doc, "length": 1024}, [output])["1024"])
        assert scores[-1] == pytest.approx(
            ruler.process_results({"outputs": parts, "max_length": 1024}, [output])["1024"]
        )
    assert min(scores) == 0 and max(scores) == 1


def test_perplexity_is_that_of_the_engine(yarn):
    rows = perplexity_documents(length=256, windows=3, text=None, pretrained=LLAMA)
    windows, _ = spread_windows(TOKENIZER, builtin_text("heldout"), 256, 3)
    assert [TOKENIZER(row["target"])["input_ids"] for row in rows] == [window.ids.tolist() for window in windows]
    with torch.no_grad():
        nll = sum(float(losses(Reader(yarn), window.ids[None], [1])[0, 1:].sum()) for window in windows)
    size = sum(len(TOKENIZER.decode(window.ids[1:]).encode()) for window in windows)
    for kind in (RopePatchLM, HFLM):
        results = run_tasks(lm(kind, yarn, batch_size=2), ["rope_ppl"], max_seq_lengths=256, windows=3)
        scores = results["results"]["rope_ppl"]
        assert math.log(scores["256,none"]) == pytest.approx(nll / (3 * 255), abs=1e-4)
        assert scores["bits_per_byte_256,none"] == pytest.approx(nll / math.log(2) / size, abs=1e-4)


@pytest.mark.parametrize("decoder", [None, "space before a text"])
def test_no_window_is_longer_than_its_length(decoder, monkeypatch, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(LLAMA)
    if decoder:  # as SentencePiece does; the space is one more token where the window begins within a word
        normalizer = normalizers.Sequence([normalizers.Prepend(" "), normalizers.Replace("  ", " ")])
        tokenizer.backend_tokenizer.normalizer = normalizer
    (tmp_path / "text.txt").write_text("".join(map(str, range(4000))))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda *args, **options: tokenizer)
    lm_eval_tasks.load_tokenizer.cache_clear()
    rows = perplexity_documents(length=256, windows=5, text=str(tmp_path / "text.txt"), pretrained="any")
    lm_eval_tasks.load_tokenizer.cache_clear()
    for row in rows:
        ids = tokenizer(row["target"])["input_ids"]  # with the special token in front
        assert 250 <= len(ids) <= 256
        assert row["tokens"] == len(ids) - 1


@pytest.mark.parametrize(
    ("task", "metadata", "message"),
    [
        ("rope_passkey", {"pretrained": None}, "tokenizer="),
        ("rope_passkey", {"max_seq_lengths": [512, 600]}, "600"),
        ("rope_passkey", {"max_seq_length": 512}, "Did you mean 'max_seq_lengths'"),
        ("rope_passkey", {"haystack": "no/such/file"}, "no file or folder"),
        ("rope_ppl", {"text": __file__, "windows": 40, "max_seq_lengths": 131072}, "fewer windows"),
    ],
)
def test_wrong_metadata_is_an_error(task, metadata, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        _ = our_tasks(**metadata).load([task])["tasks"][task].dataset


def test_no_requests_come_from_lm_evals_cache_which_does_not_know_the_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.caching.cache.PATH", str(tmp_path))
    prompts = []
    for seed in (0, 1):
        task = our_tasks(depths=[0.5], samples=3, seed=seed).load(["rope_passkey"])["tasks"]["rope_passkey"]
        task.set_config("num_fewshot", 0)
        task.build_all_requests(limit=2, cache_requests=True)
        prompts.append([request.args[0] for request in task.instances])
    assert len(prompts[1]) == 2
    assert prompts[0] != prompts[1]


def test_nothing_is_scored_where_answers_are_only_predicted():
    model = bundled_model()
    options = {"predict_only": True, "log_samples": True, "bootstrap_iters": 0}
    manager = our_tasks(samples=1, depths=[0.5], max_seq_lengths=256)
    result = lm_eval.simple_evaluate(lm(model=model), tasks=["rope_passkey"], task_manager=manager, **options)
    assert not any(metric.startswith("256") for metric in result["results"]["rope_passkey"])
    assert len(result["samples"]["rope_passkey"]) == 1


# --- the command line


def test_the_command_of_the_page_on_measuring_runs(shell, capsys, tmp_path):
    shutil.copytree(LLAMA, tmp_path / "llama")
    (line,) = re.findall("^rope-patch-eval .*", (ROOT / "docs" / "measure.md").read_text(), re.MULTILINE)
    shell(line)
    assert "|rope_passkey" in capsys.readouterr().out
    (results,) = (tmp_path / "scores").rglob("results_*.json")
    assert read_json(results)["config"]["rope_patch"]["method"] == "yarn:factor=4"


def test_ls_and_run_know_our_tasks_and_the_users(shell, capsys, tmp_path):
    own = tmp_path / "own"
    other = tmp_path / "other"
    own.mkdir()
    other.mkdir()
    metric = '{metric: "300", aggregation: mean, higher_is_better: true}'
    (own / "mine.yaml").write_text(f"include: {TASKS / 'rope_passkey.yaml'}\ntask: mine\nmetric_list: [{metric}]\n")
    shell(f"rope-patch-eval ls subtasks --include_path {other}{os.pathsep}{own}")
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("rope_passkey", "mine", "niah_multikey_2"))
    config = tmp_path / "run.yaml"
    config.write_text(f"include_path: {own}\ntasks: mine\nmodel_args: {{pretrained: {LLAMA}, max_length: 300}}\n")
    metadata = """--metadata '{"max_seq_lengths": 300, "samples": 1, "depths": 0.5}'"""
    shell(f"rope-patch-eval run --config {config} {metadata} --device cpu")
    assert "|mine" in capsys.readouterr().out


def test_errors_are_one_line(shell, capsys, monkeypatch):
    base = """rope-patch-eval --tasks rope_passkey --metadata '{"max_seq_lengths": 512, "samples": 1}' --device cpu"""
    base += f" --model_args pretrained={LLAMA}"
    assert "do not fit into the model's 256" in failure(shell, capsys, base)
    assert "Did you mean 'p_rope'" in failure(shell, capsys, f"{base},method=prope")
    misspelt = failure(shell, capsys, base.replace("rope_passkey", "rope_paskey"))
    assert "not found: rope_paskey. Did you mean 'rope_passkey'?" in misspelt
    monkeypatch.setenv("ROPE_PATCH_DEBUG", "1")
    with pytest.raises(ValueError, match="unknown method"):
        shell(f"{base},method=prope")


def test_without_lm_eval_one_line_says_what_to_install():
    code = "import sys; sys.modules['lm_eval'] = None; from rope_patch.harness.command import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert 'pip install "rope_patch[eval]"' in done.stderr


def test_the_entry_point_is_declared(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["lm_eval.models"].items()
    # lm-eval's registry takes an entry point as it is; our module, loaded through it, adds no second entry.
    registry = Registry("model")
    monkeypatch.setattr("lm_eval.api.registry.model_registry", registry)
    monkeypatch.delitem(sys.modules, "rope_patch.harness.model")
    registry.register(name, target=importlib.metadata.EntryPoint(name, value, "lm_eval.models"))
    assert registry.get(name).__name__ == "RopePatchLM"


# --- quantized caches


@pytest.mark.parametrize("options", [{}, {"chunk": 8}, {"batch_size": 3}], ids=["whole", "chunks", "batch"])
def test_scores_under_a_quantized_cache_are_those_of_decoding(options):
    """Each request token by token through the streaming cache, with the model's own attention."""
    scheme = "k=int4.token;v=int4.token;residual=2"
    draw = torch.Generator().manual_seed(3)
    pairs = [torch.randint(5, 1024, (2, 12 + 3 * i), generator=draw).tolist() for i in range(4)]
    asked = [(None, head, tail[:5]) for head, tail in pairs]
    found = [score for score, _ in lm(model=small(), kv_cache=scheme, **options)._loglikelihood_tokens(asked)]
    own = small()
    for (_, head, tail), score in zip(asked, found, strict=True):
        ids = torch.tensor([*head, *tail])[None]
        with quantized(own, scheme, exact=False) as factory, torch.no_grad():
            past = factory()
            steps = [
                own(ids[:, i : i + 1], **{cache_argument(own): past}).logits[0, 0] for i in range(ids.shape[1] - 1)
            ]
        rows = torch.stack(steps).log_softmax(-1)[len(head) - 1 :]
        expected = float(rows.gather(1, torch.tensor(tail)[:, None]).sum())
        assert score == pytest.approx(expected, abs=1e-3)


def test_generation_under_a_quantized_cache_is_the_same_in_batches():
    scheme = "k=int3.token;v=int3.token;residual=2"
    prompts = [(text, greedy(6)) for text in (DOCUMENT, "import os", "The answer is")]
    together = lm(kv_cache=scheme, batch_size=3).generate_until(requests("generate_until", *prompts))
    alone = lm(kv_cache=scheme, batch_size=1).generate_until(requests("generate_until", *prompts))
    assert together == alone != lm(batch_size=3).generate_until(requests("generate_until", *prompts))


def test_a_model_in_memory_is_given_back_as_it_was_when_the_object_goes():
    model = small()
    modules = list(model.modules())
    attention = model.config._attn_implementation
    hooks = [len(module._forward_hooks) for module in modules]
    ours = lm(model=model, kv_cache="int4-token")
    assert model.config._attn_implementation != attention
    del ours
    gc.collect()
    assert model.config._attn_implementation == attention
    assert [len(module._forward_hooks) for module in modules] == hooks
    assert not any(module._forward_pre_hooks for module in modules)
