"""What a run of lm-eval says before it reads, how its progress moves, and what an interrupted one keeps."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
import torch
from lm_eval.api.instance import Instance
from prompting import TOKENIZER, bold
from scored import spy_ids
from tqdm import tqdm

import rope_patch
from rope_patch.harness import reading
from rope_patch.harness.model import RopePatchLM
from rope_patch.harness.reading import LITTLE, ReadingBar, Work

LLAMA = str(rope_patch.data_path("assets") / "llama")
TEXT = "def area(width, height):\n    return width * height\n\nclass Shape:\n    sides = 4\n" * 12
WORDS = TEXT.split(" ")
GREEDY = {"until": [], "do_sample": False, "max_gen_toks": 3}


def lm(model=None, **options):
    model = bold(max_position_embeddings=256) if model is None else model
    return RopePatchLM(pretrained=model, tokenizer=TOKENIZER, device="cpu", **options)


def asked(kind, *arguments):
    return [Instance(kind, {}, item, i) for i, item in enumerate(arguments)]


def texts(count):
    """Texts of some hundred tokens, none of which begins another."""
    return [f"{i} " + " ".join(WORDS[i % 20 : i % 20 + 60]) for i in range(count)]


def requests_of(kind, count):
    match kind:
        case "loglikelihood":
            return asked(kind, *((text, " and more") for text in texts(count)))
        case "loglikelihood_rolling":
            return asked(kind, *((text,) for text in texts(count)))
        case "generate_until":
            return asked(kind, *((text, GREEDY) for text in texts(count)))


KINDS = ["loglikelihood", "loglikelihood_rolling", "generate_until"]


@pytest.fixture
def updates(monkeypatch):
    """What the bars of tqdm are moved by [tokens]."""
    moved = []

    class Moved(tqdm):
        def update(self, n=1):
            moved.append(n)
            return super().update(n)

    monkeypatch.setattr(reading, "tqdm", Moved)
    return moved


# --- the line that comes first


@pytest.mark.parametrize("kind", KINDS)
def test_a_little_text_is_announced_without_being_measured(kind, capsys):
    model, requests = lm(), requests_of(kind, 3)
    with spy_ids(model.model) as ids:
        getattr(model, kind)(requests)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if " reads " in line]
    generated = ", not counting up to 9 that it generates" if kind == "generate_until" else ""
    count = re.fullmatch(rf"{kind}: reads ([\d,]+) tokens{generated}; --limit reads less.*samples=.*", line)[1]
    read = sum(part.numel() for part in ids if kind != "generate_until" or part.shape[1] > 1)
    assert int(count.replace(",", "")) == read <= LITTLE


@pytest.mark.parametrize("kind", KINDS)
def test_more_text_is_announced_with_its_time_and_answers_are_the_same(kind, capsys):
    requests = requests_of(kind, 40)
    expected = getattr(lm(), kind)(requests, disable_tqdm=True)
    capsys.readouterr()
    assert getattr(lm(), kind)(requests) == expected, "to the last bit"
    said = capsys.readouterr().err
    assert re.search(rf"{kind}: reads [\d,]+ tokens in about \d+ (s|min)\b.*; --limit reads less", said)
    assert said.index(" reads ") < said.index("tok/s"), "before the bar"


def test_measuring_reads_little_of_what_is_read():
    model, requests = lm(), requests_of("loglikelihood", 40)
    with spy_ids(model.model) as alone:
        model.loglikelihood(requests, disable_tqdm=True)
    with spy_ids(model.model) as measured:
        model.loglikelihood(requests)
    extra = sum(ids.numel() for ids in measured) - sum(ids.numel() for ids in alone)
    assert 0 < extra < 0.25 * sum(ids.numel() for ids in alone)


def test_the_estimate_is_the_pace_times_the_tokens():
    """A reader that takes a tenth of a millisecond a token, whatever the length."""
    clock = {"now": 0.0}

    def read(ids):
        clock["now"] += 1e-4 * ids.numel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rope_patch.modeling.budget.time.perf_counter", lambda: clock["now"])
        seconds = Work("loglikelihood", [1000] * 50, 50).seconds(read, rows=64)
    assert seconds == pytest.approx(5.0)
    assert clock["now"] < 1.0, "measuring it takes a small share"


@pytest.mark.parametrize("hide", ["disable_tqdm", "rank"])
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_first_process_says_it_and_only_where_bars_are_shown(kind, hide, capsys):
    model = lm()
    if hide == "rank":
        model._rank, model._world_size = 1, 2  # as HFLM numbers them
        model.all_gather = lambda tensor: tensor.repeat(2)
    with spy_ids(model.model) as ids:
        getattr(model, kind)(requests_of(kind, 40), **({} if hide == "rank" else {"disable_tqdm": True}))
    assert not re.search(" reads |tok/s", capsys.readouterr().err)
    first = TOKENIZER(max(texts(40), key=lambda text: len(TOKENIZER(text)["input_ids"])))["input_ids"]
    assert ids[0].shape[1] in (len(first), len(first) + 2) or kind == "loglikelihood_rolling", "nothing is measured"


def test_several_processes_each_have_their_share():
    assert " 5,000 tokens in about 3 s on each of 2 processes; " in Work("x", [5000], 1).text(3.0, 2)


def test_no_time_is_said_to_be_zero():
    assert " 5,000 tokens in about 1 s; " in Work("x", [5000], 1).text(0.01)


def test_a_dynamic_table_is_not_measured(capsys):
    """A longer text before the requests would change the table under which they are read."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = lm(bold(max_position_embeddings=64, rope_parameters=rope), max_length=256)
    with spy_ids(model.model) as ids:
        model.loglikelihood(requests := requests_of("loglikelihood", 40))
    assert len(ids) == len(requests)
    assert re.search(r"loglikelihood: reads [\d,]+ tokens; --limit", capsys.readouterr().err)


# --- progress


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_request_moves_the_bar_after_each_layer(kind, updates):
    model = lm()
    getattr(model, kind)(requests_of(kind, 1))
    head = kind != "generate_until"  # generation scores one token: the layers are all of the work
    parts = model.model.config.num_hidden_layers + head
    total = sum(updates)
    share = total // parts
    assert updates[:parts] == [pytest.approx(share, abs=1)] * parts and updates[parts:] == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_move_it_too(kind, updates):
    model = lm(chunk=32)
    getattr(model, kind)(requests_of(kind, 1))
    whole = list(updates)
    chunks = -(-sum(whole) // 32)
    assert chunks > 3 and len(whole) >= chunks * model.model.config.num_hidden_layers
    assert max(whole) < sum(whole) / chunks


@pytest.mark.parametrize("options", [{}, {"batch_size": 3}, {"batch_size": 3, "chunk": 50}, {"batch_size": "auto"}])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_shown_adds_up_to_what_was_said(kind, options, updates, capsys):
    model = lm(**options)
    requests = requests_of(kind, 5)
    if kind == "loglikelihood":
        requests += asked(kind, ("short", " text"), ("short text", " and more"), ("short", " text and more"))
    if kind == "loglikelihood_rolling":
        requests += asked(kind, *[(texts(1)[0],)] * 4)  # side by side they are read once
    getattr(model, kind)(requests)
    said = capsys.readouterr().err
    assert sum(updates) == int(re.search(r"reads ([\d,]+) tokens", said)[1].replace(",", ""))
    assert f"{len(requests)} of {len(requests)} " in said


def test_padding_is_no_progress():
    bar = type("Bar", (), {"disable": False, "total": 50, "n": 0, "moved": []})()
    bar.update = bar.moved.append
    progress = ReadingBar(bar, Work("x", [50], 2)).progress(50, 100)
    progress.reach(60)
    progress.finish()
    assert bar.moved == [30, 20]


@torch.no_grad()
def test_no_hook_is_left_behind():
    model = lm()
    for kind in KINDS:
        getattr(model, kind)(requests_of(kind, 2))
    assert not any(module._forward_hooks for module in model.model.modules())
    assert model._bar is None


# --- an interrupted run


@contextlib.contextmanager
def interrupt():
    """Let Ctrl-C come when the second batch has been read."""
    known, left = ReadingBar.answered, [2]

    def answered(self, count):
        known(self, count)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReadingBar, "answered", answered)
        yield


def line(*more, tasks="passkey_512"):
    model = f"pretrained={LLAMA},dtype=float32,max_length=512"
    start = ["rope-patch-eval", "--model_args", model, "--device", "cpu", "--tasks", tasks]
    return [*start, "--metadata", "samples=2", "windows=4", "depths=[0.2,0.8]", "--batch_size", "1", *more]


def interrupted(shell, capsys, words):
    with pytest.raises(SystemExit) as stop:
        shell(words)
    assert stop.value.code == 130
    return capsys.readouterr().err


def scores(folder):
    (path,) = folder.rglob("results_*.json")
    return json.loads(path.read_text())["results"]


def test_an_interrupted_run_says_what_would_keep_its_answers(shell, capsys):
    with interrupt():
        said = interrupted(shell, capsys, line())
    assert "interrupted: lm-eval keeps no partial results; with --use_cache FILE the same command goes on" in said


@pytest.mark.parametrize(
    ("tasks", "rest"),
    [
        ("passkey_512,rope_ppl_512", {"generate_until": 0.75, "loglikelihood": 1.0}),  # one of four prompts is answered
        ("rope_ppl_512", {"loglikelihood": 0.5}),
    ],
)
def test_with_use_cache_the_same_command_goes_on_where_it_was(shell, capsys, tmp_path, tasks, rest):
    def announced(said):
        return {kind: int(count.replace(",", "")) for kind, count in re.findall(r"(\w+): reads ([\d,]+) tokens", said)}

    shell(line("--output_path", str(tmp_path / "whole"), tasks=tasks))
    whole = announced(capsys.readouterr().err)
    config = tmp_path / "run.yaml"
    config.write_text(f"use_cache: {tmp_path / 'answers'}\n")
    with interrupt():
        said = interrupted(shell, capsys, line("--config", str(config), tasks=tasks))
    assert "interrupted: the answers so far are in the file of --use_cache, and the same command goes on" in said
    shell(line("--use_cache", str(tmp_path / "answers"), "--output_path", str(tmp_path / "goes on"), tasks=tasks))
    left = announced(capsys.readouterr().err)
    assert left == {kind: pytest.approx(share * whole[kind], rel=0.05) for kind, share in rest.items()}
    assert scores(tmp_path / "goes on") == scores(tmp_path / "whole")
