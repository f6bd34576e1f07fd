"""The comparison of methods: paired on the same documents, resumable, and honest about what it can tell apart."""

from __future__ import annotations

import json
import math
import random
import re
import signal
import statistics
import sys
from dataclasses import replace

import pytest
import torch
from evaluated import answered, compared, result_of
from forks import forked
from patches import module_of
from prompting import HAY
from scipy import stats
from scored import spy_ids
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import rope_patch
from rope_patch.cli.app import app, main
from rope_patch.evaluation.compare import Comparison, Row
from rope_patch.evaluation.documents import spread_windows
from rope_patch.evaluation.haystack import Haystack
from rope_patch.evaluation.losses import Bucket, DocumentScore, PerplexityResult
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.result_cache import ResultCache
from rope_patch.evaluation.retrieval import RetrievalCell, RetrievalResult, retrieval
from rope_patch.evaluation.text import builtin_text
from rope_patch.patching.verify import inspect_model

ASSETS = rope_patch.data_path("assets")
TEXT = builtin_text("heldout").text[:20_000]
SMALL = {"lengths": (64, 128), "windows": 3, "samples": 2, "depths": (0.2, 0.8), "text": TEXT, "haystack": HAY}


@pytest.fixture(scope="module")
def bundled():
    folder = ASSETS / "llama"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def test_it_refuses_before_it_measures_and_leaves_the_model_alone(bundled, tmp_path):
    model, tokenizer = bundled
    stock, read = module_of(model), []
    options = {"lengths": (64,), "windows": 1, "samples": 1, "on_progress": lambda name, n: read.append(n)}
    options |= {"text": "Some words to read. " * 99, "haystack": Haystack("Nothing to see here, go on. " * 99)}
    for methods, changes, message in [
        (["default", "table:values=1/2"], {}, "one number per pair"),
        ([], {}, "methods must be a list of one or more methods, got []"),
        (["pi:factor=4", "pi:factor=4.0"], {}, "methods must differ from each other"),
        (["default"], {"windows": 10**6}, "ask for fewer windows"),
        (["default"], {"windows": -1}, "windows must be >= 0, got -1"),
        (["default"], {"samples": 0}, "samples must be >= 1, got 0"),
        (["default"], {"depths": (0.5, 0.5)}, "depths must differ from each other"),
        (["default"], {"lengths": ()}, "lengths is empty"),
        (["default"], {"lengths": (0,)}, "lengths must be at least 2 tokens, got 0"),
        (["default"], {"lengths": (64.5,)}, "a length must be a whole number of tokens, got 64.5"),
        (["default"], {"lengths": (64, 64)}, "lengths must differ from each other"),
        (["default"], {"lengths": (64, 20)}, "a prompt of passkey needs at least"),
        (["default"], {"depths": (1.5,)}, "depth must be in [0, 1], got 1.5"),
        (["default"], {"tasks": ["essay"]}, "unknown task 'essay'"),
        (["default"], {"text": " "}, "the source holds no text"),
        (["default"], {"haystack": Haystack("")}, "the haystack is empty"),
        (["default", "yarn:factr=4"], {}, "factr"),
    ]:
        with spy_ids(model) as seen, pytest.raises((ValueError, TypeError), match=re.escape(message)):
            compared(model, tokenizer, methods, **{**options, **changes})
        assert not seen and read == []
    result = compared(model, tokenizer, ["default", "pi:factor=4"], **options)
    assert module_of(model) is stock
    assert json.loads(result.to_json())["trained_length"] == 256
    assert sum(read) == 2 * result.spec.tokens_to_read() == 2 * (64 + 5 * 64)


def test_its_numbers_are_those_of_the_engines(bundled):
    model, tokenizer = bundled
    result = compared(model, tokenizer, ["default", "yarn:factor=4"], **{**SMALL, "text": None})
    stream = tokenizer(builtin_text("heldout").text, add_special_tokens=False, verbose=False)["input_ids"]
    starts = [0, round((len(stream) - 127) / 2), len(stream) - 127]
    rows = torch.tensor([[tokenizer.bos_token_id, *stream[i : i + 127]] for i in starts])
    asked = {"lengths": (64, 128), "depths": (0.2, 0.8), "samples": 2, "haystack": HAY}
    for row, method in zip(result.rows, ("default", "yarn:factor=4"), strict=True):
        with rope_patch.patched(model, method):
            assert row.scores.perplexity.nll == pytest.approx(perplexity(model, rows).nll, abs=1e-6)
            assert row.scores.retrieval["passkey"].cells == retrieval(model, tokenizer, **asked).cells
    columns = result.columns()
    assert [(c.metric, c.start, c.stop) for c in columns] == [
        ("perplexity", 0, 64),
        ("perplexity", 64, 128),
        ("retrieval", None, 64),
        ("retrieval", None, 128),
    ]
    assert columns[1].values == tuple(row.scores.perplexity.between(64, 128) for row in result.rows)
    assert columns[3].values == tuple(row.scores.retrieval["passkey"].accuracy(128) for row in result.rows)


# --- what can be told apart, on made-up scores


def made_up(losses, hits, lengths=(8, 16)):
    """A comparison of methods with given losses per window (mean at each position) and answers."""
    rows = []
    for (name, values), answers in zip(losses.items(), hits.values(), strict=True):
        documents = tuple(
            DocumentScore(f"w{i}", (7, 8), (7 * v, 8 * v), 15, 15 * v, None) for i, v in enumerate(values)
        )
        buckets = tuple(
            Bucket(a, b, n * len(values), statistics.fmean(values), 0.1) for a, b, n in ((0, 8, 7), (8, 16, 8))
        )
        score = PerplexityResult(
            nll=statistics.fmean(values),
            stderr=0.1,
            tokens=15 * len(values),
            bits_per_byte=None,
            windows=len(values),
            window=16,
            stride=16,
            chunk=16,
            prefix=(),
            skipped=0,
            buckets=buckets,
            documents=documents,
        )
        samples = tuple(answered("1", "1" if hit else "2", hit, float(hit), -1.0) for hit in answers)
        cells = tuple(RetrievalCell(n, 0.5, samples) for n in lengths)
        found = RetrievalResult("passkey", "single", cells, 0, "text", "", None, ())
        rows.append(Row(name, result_of(score, found), ()))
    return Comparison(tuple(rows), rows[0].scores.spec, 8, "", "made up", None)


WINDOWS = [2.0, 2.5, 1.5, 3.0, 2.2, 1.8]


def test_a_winner_needs_every_interval_to_exclude_zero():
    losses = {
        "best": WINDOWS,
        "close": [v + d for v, d in zip(WINDOWS, (0.1, -0.1, 0.12, -0.05, 0.02, 0.01), strict=True)],
        "worse": [v + d for v, d in zip(WINDOWS, (0.5, 0.6, 0.55, 0.5, 0.6, 0.52), strict=True)],
    }
    yes, no = [True] * 30, [False] * 30
    hits = {"best": yes, "close": [True] * 29 + [False], "worse": no}
    for column in made_up(losses, hits).columns():
        assert column.best == 0 and column.winner is None
        close, worse = column.differences
        assert not close.significant and worse.significant
    del losses["close"], hits["close"]
    assert [column.winner for column in made_up(losses, hits).columns()] == ["best"] * 4
    (alone,) = {c.winner for c in made_up({"best": WINDOWS}, {"best": yes}).columns()}
    assert alone is None, "with nobody to win against there is no winner"


def test_pairing_sees_what_the_means_alone_do_not():
    """The windows differ by more than the methods do: only their differences tell."""
    better = [v - 0.02 - 0.001 * i for i, v in enumerate(WINDOWS)]
    result = made_up({"a": WINDOWS, "b": better}, {"a": [True], "b": [True]})
    assert statistics.stdev(WINDOWS) > 10 * 0.02
    column = result.columns()[1]
    assert column.winner == "b"
    expected = stats.ttest_rel(WINDOWS, better).confidence_interval(0.95)
    found = result.difference("a", "b", "perplexity", 16, 8)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (column.differences[0].low, column.differences[0].high) == pytest.approx((expected.low, expected.high))


def test_many_methods_make_wider_intervals():
    worse = [v + 0.3 + 0.1 * (i % 2) for i, v in enumerate(WINDOWS)]
    two = made_up({"a": WINDOWS, "b": worse}, {"a": [True], "b": [True]}).columns()[0].differences[0]
    names = "abcdefghijkl"
    losses = {"a": WINDOWS} | {name: worse for name in names[1:]}
    many = made_up(losses, {name: [True] for name in names}).columns()[0].differences[0]
    assert many.estimate == two.estimate and many.low < two.low and many.high > two.high
    level = stats.ttest_rel(worse, WINDOWS).confidence_interval(1 - 0.05 / (12 * 11 / 2))
    assert (many.low, many.high) == pytest.approx((level.low, level.high))


def test_equal_methods_are_rarely_told_apart():
    """Twelve methods that differ by nothing but chance: the best is chosen by what was measured, and still."""
    rng, significant = random.Random(0), 0
    for _ in range(150):
        losses = {name: [v + rng.gauss(0, 0.1) for v in WINDOWS] for name in "abcdefghijkl"}
        column = made_up(losses, {name: [True] for name in losses}).columns()[0]
        significant += any(d.significant for d in column.differences)
    assert significant / 150 < 0.08


def grid(name, answers, task="passkey"):
    """A row whose answers are (haystack, depth)."""
    made = made_up({name: WINDOWS}, {name: [True]}).rows[0]
    cells = tuple(
        RetrievalCell(8, depth / 10, tuple(answered("1", "", bool(hit), 1.0, 0.0) for hit in column))
        for depth, column in enumerate(zip(*answers, strict=True))
    )
    found = replace(made.scores.retrieval["passkey"], task=task, cells=cells)
    return replace(made, scores=result_of(made.scores.perplexity, found))


def test_answers_that_hang_together_count_as_one():
    """Five haystacks of five depths, of which one method knows two fifths and another none."""
    none = [[0] * 5] * 5
    together = [[1] * 5] * 2 + [[0] * 5] * 3
    apart = [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 1], [1, 0, 0, 0, 1]]
    found = {}
    for name, answers in (("together", together), ("apart", apart)):
        result = replace(made_up({"x": WINDOWS}, {"x": [True]}), rows=(grid("a", answers), grid("b", none)))
        found[name] = result.difference("a", "b", "retrieval", 8)
    assert found["together"].estimate == found["apart"].estimate == 0.4
    assert found["apart"].low > 0 > found["together"].low, "two haystacks of five are not ten answers"
    joined = [grid("a", [[1] * 5] * 5, "vt"), grid("b", none, "vt")]
    result = replace(made_up({"x": WINDOWS}, {"x": [True]}), rows=tuple(joined), spec=joined[0].scores.spec)
    alone = [grid("a", [[1]] * 5), grid("b", [[0]] * 5)]
    expected = replace(result, rows=tuple(alone), spec=alone[0].scores.spec).difference("a", "b", "retrieval", 8)
    assert result.difference("a", "b", "retrieval", 8) == expected, "one prompt that asks for five is one prompt"


def test_one_window_decides_nothing():
    result = made_up({"a": [1.0], "b": [9.0]}, {"a": [True], "b": [False]})
    assert [column.winner for column in result.columns()] == [None] * 4
    data = json.loads(result.to_json())
    assert data["columns"][0]["differences"][0]["low"] is None, "infinite: JSON says null"


def test_differences_are_asked_for_by_name():
    result = made_up({"a": [1.0, 2.0], "b": [2.0, 2.5]}, {"a": [True] * 9, "b": [False] * 9})
    assert result.difference("b", "a", "perplexity", 8).estimate == pytest.approx(0.75)
    found = result.difference("b", "a", "retrieval", 16)
    assert found.estimate == -1 and found.significant
    with pytest.raises(ValueError, match=r"^no method 'c' in this comparison. Known: a, b$"):
        result.difference("c", "a", "retrieval", 16)
    with pytest.raises(ValueError, match="metric must be one of perplexity, longppl, retrieval, got 'speed'"):
        result.difference("b", "a", "speed", 16)
    with pytest.raises(ValueError, match="not made of whole buckets"):
        result.difference("b", "a", "perplexity", 9)


# --- what it takes


def test_a_patched_model_is_measured_as_it_is_and_its_patch_replaced(bundled):
    model, tokenizer = bundled
    fresh = compared(model, tokenizer, ["default", "yarn:factor=4", "pi:factor=2"], **SMALL)
    with rope_patch.patched(model, "yarn", factor=4):
        ours = module_of(model)
        again = compared(model, tokenizer, ["default", "pi:factor=2"], **SMALL)
        assert module_of(model) is ours
    assert (
        again.rows[0].scores.perplexity == fresh.rows[1].scores.perplexity
        and again.rows[0].scores.retrieval == fresh.rows[1].scores.retrieval
    )
    assert again.rows[1].scores.perplexity == fresh.rows[2].scores.perplexity
    assert again.environment["patch before"] == "yarn:factor=4"
    with rope_patch.patched(model, "yarn", target_length=1024):
        assert compared(model, tokenizer, ["default"], **SMALL).trained_length == fresh.trained_length == 256


def test_windows_are_as_many_as_there_is_text_for(bundled):
    model, tokenizer = bundled
    options = {"lengths": (128,), "samples": 1, "depths": (0.5,), "haystack": HAY}
    short = compared(model, tokenizer, ["default"], **options, text="Some words to read. " * 60)
    assert 1 < short.rows[0].scores.perplexity.windows < 16
    assert short.rows[0].scores.perplexity.bits_per_byte > 0
    assert [b.stop - b.start for b in short.rows[0].scores.perplexity.buckets] == [8] * 16


def test_a_failure_names_its_method(bundled):
    model, tokenizer = bundled

    def spoil(module, args, logits):
        return logits * (float("nan") if str(inspect_model(model).record.to_method()) == "pi:factor=4" else 1.0)

    handle = model.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(ValueError, match=r"^pi:factor=4: the loss at position 1 .* is not finite"):
            compared(model, tokenizer, ["default", "pi:factor=4"], **SMALL)
    finally:
        handle.remove()


# --- finished work


def test_a_comparison_goes_on_where_it_was(bundled, tmp_path):
    model, tokenizer = bundled
    methods, journal = ["default", "yarn:factor=4"], tmp_path / "finished.jsonl"
    whole = compared(model, tokenizer, methods, **SMALL)
    reports = []

    def stop(name, tokens):
        reports.append(name)
        if reports.count("yarn:factor=4") == 2:
            raise KeyboardInterrupt

    stock = module_of(model)
    with pytest.raises(KeyboardInterrupt):
        compared(model, tokenizer, methods, **SMALL, resume=journal, on_progress=stop)
    assert module_of(model) is stock, "interrupted, the model is as it was"
    kept = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(b'{"key": "12')  # the machine stopped while it wrote
    used = []
    with spy_ids(model) as seen:
        again = compared(model, tokenizer, methods, **SMALL, resume=journal, on_progress=lambda name, n: used.append(n))
    assert again.to_json() == whole.to_json()
    assert seen and journal.read_bytes().startswith(kept)
    assert sum(used) == 2 * whole.spec.tokens_to_read(), "the bar counts what was kept"
    with spy_ids(model) as seen:
        assert compared(model, tokenizer, methods, **SMALL, resume=journal).to_json() == whole.to_json()
    assert not seen
    with spy_ids(model) as seen:  # another method joins: it alone is measured
        more = compared(model, tokenizer, [*methods, "pi:factor=4"], **SMALL, resume=journal)
    assert [row.method for row in more.rows] == [*methods, "pi:factor=4"]
    for row, before in zip(more.rows, again.rows, strict=False):
        assert row.scores == before.scores
    lengths = sum(ids.numel() for ids in seen)
    assert 0 < lengths < 1.6 * whole.spec.tokens_to_read()


def test_a_file_of_another_kind_is_not_written_to(bundled, tmp_path):
    model, tokenizer = bundled
    path = tmp_path / "thesis.txt"
    path.write_text("Chapter one.\nAll my work.\n")
    with pytest.raises(ValueError, match=r"thesis.txt, line 1, is not a line of a result cache: remove"):
        compared(model, tokenizer, ["default"], **SMALL, resume=path)
    path.write_text("one line without an end")
    with pytest.raises(ValueError, match=r"is not a line of a result cache"):
        compared(model, tokenizer, ["default"], **SMALL, resume=path)
    assert path.read_text() == "one line without an end"


@pytest.mark.full
def test_the_bundled_checkpoint_orders_the_methods_as_it_should(bundled):
    """At four times its context: the default collapses, YaRN holds, NTK fails past twice, PI fails at once."""
    model, tokenizer = bundled
    names = ["default", "yarn:factor=4", "ntk:factor=4", "pi:factor=4"]
    result = compared(model, tokenizer, names, lengths=(256, 512, 1024), windows=8, samples=8, haystack="noise")
    for worse in ("default", "ntk:factor=4", "pi:factor=4"):
        found = result.difference(worse, "yarn:factor=4", "retrieval", 1024)
        assert found.high < 0, (worse, found)
        found = result.difference(worse, "yarn:factor=4", "perplexity", 1024, 512)
        assert found.low > 0, (worse, found)
    assert result.difference("pi:factor=4", "default", "retrieval", 256).high < 0
    assert result.difference("pi:factor=4", "default", "perplexity", 256).low > 0
    assert result.difference("default", "ntk:factor=4", "retrieval", 512).high < 0, "NTK still holds at twice"
    yarn, default = (result.rows[i].scores.retrieval["passkey"] for i in (1, 0))
    assert yarn.interval(1024)[0] > 0.6 and default.interval(1024)[1] < 0.4, "eight haystacks, all alike"


# --- the command


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Short texts in place of the built-in ones, which take a second to read."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(TEXT)
    (folder / "hay.txt").write_text(HAY.text)
    return ["--text", str(folder / "text.txt"), "--haystack", str(folder / "hay.txt")]


def command(*arguments):
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def test_the_command_writes_json_and_a_report(tmp_path):
    out = tmp_path / "out"
    asked = ["--methods", "default pi:factor=4", "--lengths", "64, 128", "--samples", "1", "--windows", "2", "-o", out]
    result = command(ASSETS / "llama", *asked)
    assert result.exit_code == 0, result.output
    assert "ppl 64-128" in result.output and "passkey 128" in result.output
    data = json.loads((out / "comparison.json").read_text())
    assert [row["method"] for row in data["rows"]] == ["default", "pi:factor=4"]
    assert (out / "report.html").read_text().startswith("<!DOCTYPE html>")
    again = command(ASSETS / "llama", *asked, "--json", "--no-report")
    assert json.loads(again.stdout) == data


def test_an_adapter_is_measured_under_every_method(tmp_path, texts):
    from peft import LoraConfig, get_peft_model

    folder, out = tmp_path / "adapter", tmp_path / "out"
    model = AutoModelForCausalLM.from_pretrained(ASSETS / "llama", dtype=torch.float32)
    rope_patch.apply(model, "yarn", factor=4)
    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    rope_patch.save(tuned, folder)
    asked = [
        "--methods",
        "default yarn:factor=4",
        "--lengths",
        "64",
        "--samples",
        "1",
        "--windows",
        "1",
        "-o",
        out,
        *texts,
    ]
    result = command(ASSETS / "llama", *asked, "--adapter", folder, "--no-report")
    assert result.exit_code == 0, result.output
    data = json.loads((out / "comparison.json").read_text())
    assert data["environment"]["adapter"] == "adapter (trained under yarn:factor=4)"
    stream_start = data["rows"][1]["perplexity"]["nll"]
    plain = command(ASSETS / "llama", *asked, "--no-report")
    assert plain.exit_code == 0
    other = json.loads((out / "comparison.json").read_text())
    assert abs(other["rows"][1]["perplexity"]["nll"] - stream_start) > 1e-3, "work of the bare model is another's"


def test_an_adapters_folder_is_measured_under_the_tables_it_was_trained_under(tmp_path):
    from peft import LoraConfig, get_peft_model

    folder, out = tmp_path / "adapter", tmp_path / "out"
    model = rope_patch.load(ASSETS / "llama", "yarn:factor=4", dtype=torch.float32)
    torch.manual_seed(0)
    rope_patch.save(get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)), folder)
    asked = ["--methods", "default pi", "--lengths", "512", "--samples", "1", "--windows", "1", "--depths", "0.5"]
    result = command(folder, *asked, "-o", out, "--no-report")
    assert result.exit_code == 0, result.output
    data = json.loads((out / "comparison.json").read_text())
    yarn, pi = (row["tables"][0]["inv_freq"] for row in data["rows"])
    assert yarn == list(rope_patch.verify(model).tables["all"].inv_freq)
    assert pi == list(rope_patch.verify(rope_patch.load(ASSETS / "llama", "pi:factor=2")).tables["all"].inv_freq)
    assert [row["method"] for row in data["rows"]] == ["default", "pi:factor=2"]  # from the longest length
    assert data["environment"]["patch before"] == "yarn:factor=4" and data["environment"]["adapter"] == "adapter"
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "llama")
    window, _ = spread_windows(tokenizer, builtin_text("heldout"), 512, 1)
    found = perplexity(rope_patch.load(folder).eval(), window, window=512)
    assert data["rows"][0]["perplexity"]["nll"] == pytest.approx(found.nll, rel=1e-6)
    refused = command(folder, *asked, "--adapter", folder, "-o", tmp_path / "none")
    assert refused.exit_code != 0 and "is an adapter itself: give its base as MODEL" in str(refused.exception)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "default", "--lengths", "4q"], "a length is a number of tokens such as 4096 or 4k, got '4q'"),
        (["--methods", "prope", "--lengths", "64"], "unknown method 'prope'. Did you mean 'p_rope'?"),
        (["--methods", "default", "--lengths", "64", "--dtype", "int8"], "dtype must be one of auto, float32"),
        (["--methods", "default", "--lengths", "64", "--text", "nowhere.txt"], "no file or folder 'nowhere.txt'"),
        (["--methods", "", "--lengths", "64"], "give at least one method and one length"),
        (["--methods", "default", "--lengths", "64", "--depths", "x"], "a depth is a number from 0 to 1, got 'x'"),
        (["--methods", "default", "--lengths", "64", "--depths", "0.5 0.5"], "depths must differ from each other"),
        (["--methods", "default", "--lengths", "64", "--samples", "0"], "samples must be >= 1, got 0"),
        (["--methods", "default", "--lengths", "64", "--adapter", "nothere"], "no adapter folder 'nothere'"),
        (["--methods", "default", "--lengths", "64", "--haystack", "nothere"], "no file or folder 'nothere'"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, arguments, message):
    result = command(ASSETS / "llama", *arguments, "-o", tmp_path / "out")
    assert result.exit_code != 0 and message in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_command_stopped_on_the_way_keeps_what_was_finished(tmp_path, texts, monkeypatch, kind):
    out, said = tmp_path / "out", tmp_path / "said.txt"
    asked = ["compare", str(ASSETS / "llama"), "--methods", "default yarn:factor=4 pi:factor=4", "--lengths", "64 128"]
    asked += ["--samples", "4", "--windows", "4", "-o", str(out), "--no-report", "--threads", "1", *texts]
    monkeypatch.setattr(sys, "argv", ["rope-patch", *asked])
    journal, written = out / "finished.jsonl", []

    def the_ninth_is_written(event, args):
        if event != "open" or str(args[0]) != str(journal):
            return False
        written.append(args)
        return len(written) == 9

    def run():
        sys.stderr = said.open("w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
        main()

    status = forked(run, at=the_ninth_is_written, kind=kind)
    assert status == (130 if kind == signal.SIGINT else -kind)
    if kind == signal.SIGINT:
        assert "Run the same command again to continue" in said.read_text() and "Traceback" not in said.read_text()
    assert journal.read_bytes().count(b"\n") == 8, "it was stopped on the way"
    done = command(*asked[1:])
    assert done.exit_code == 0 and "comparison.json" in done.output
    assert journal.read_bytes().count(b"\n") == 3 * (4 + 2 * 4), "nothing was measured twice"
    data = json.loads((out / "comparison.json").read_text())
    assert all(math.isfinite(row["perplexity"]["nll"]) for row in data["rows"])


@pytest.mark.parametrize("torn", [b"{", b'{"ke', b'{"key": "b", "val', b"\0\0\0\0"])
def test_a_line_cut_short_anywhere_is_dropped_and_the_next_one_is_whole(tmp_path, torn):
    path = tmp_path / "finished.jsonl"
    ResultCache(path)["a"] = 1
    with path.open("ab") as file:
        file.write(torn)
    journal = ResultCache(path)
    assert dict(journal) == {"a": 1}
    journal["c"] = 3
    assert dict(ResultCache(path)) == {"a": 1, "c": 3}
