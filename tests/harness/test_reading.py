"""How the progress of lm-eval's requests moves, and what an interrupted run keeps."""

from __future__ import annotations

import contextlib
import json

import pytest
from harness.instances import instance
from support.prompting import TOKENIZER, bold
from tqdm import tqdm

import rope_patch
from rope_patch.harness.model import RopePatchLM
from rope_patch.runtime import progress

LLAMA = str(rope_patch.data_path("assets") / "llama")
WORDS = ("def area(width, height):\n    return width * height\n\nclass Shape:\n    sides = 4\n" * 12).split(" ")
KINDS = ["loglikelihood", "loglikelihood_rolling", "generate_until"]


def lm(**options):
    return RopePatchLM(pretrained=bold(max_position_embeddings=256), tokenizer=TOKENIZER, device="cpu", **options)


def requests_of(kind, count):
    """Requests with texts of some hundred tokens, none of which begins another."""
    rest = {
        "loglikelihood": (" and more",),
        "loglikelihood_rolling": (),
        "generate_until": ({"until": [], "do_sample": False, "max_gen_toks": 3},),
    }[kind]
    texts = [f"{i} " + " ".join(WORDS[i % 20 : i % 20 + 60]) for i in range(count)]
    return [instance(kind, {}, (text, *rest), i) for i, text in enumerate(texts)]


@pytest.fixture
def bars(monkeypatch):
    """The bars that are shown, each with its updates [tokens]."""
    shown = []

    class Recorded(tqdm):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.updates = []
            shown.append(self)

        def update(self, n=1):
            self.updates.append(n)
            return super().update(n)

    monkeypatch.setattr("tqdm.tqdm", Recorded)
    return shown


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_request_moves_the_bar_after_each_layer(kind, bars):
    model = lm()
    getattr(model, kind)(requests_of(kind, 1))
    parts = model.model.config.num_hidden_layers
    ((bar),) = bars
    assert bar.updates[:parts] == [pytest.approx(bar.total // parts, abs=1)] * parts
    assert bar.updates[parts:] == [1]


def test_chunks_move_it_too(bars):
    model = lm(chunk=32)
    model.loglikelihood(requests_of("loglikelihood", 1))
    (bar,) = bars
    chunks = -(-bar.total // 32)
    assert len(bar.updates) >= chunks * model.model.config.num_hidden_layers
    assert max(bar.updates) < bar.total / chunks


@pytest.mark.parametrize("options", [{}, {"batch_size": 3, "chunk": 50}, {"batch_size": "auto"}])
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_announced_is_read(kind, options, bars):
    requests = requests_of(kind, 5)
    if kind == "loglikelihood":  # they begin one another, and are read together
        requests += [
            instance(kind, {}, pair) for pair in [("short", " text"), ("short text", " and"), ("short", " text and")]
        ]
    model = lm(**options)
    getattr(model, kind)(requests)
    (bar,) = bars
    assert sum(bar.updates) == bar.total == bar.n
    assert not any(module._forward_hooks for module in model.model.modules()), "a hook is left behind"


def test_only_the_first_process_shows_it(bars):
    model = lm()
    model._rank, model._world_size = 1, 2  # as HFLM numbers them
    model.loglikelihood(requests_of("loglikelihood", 2))
    assert [bar.disable for bar in bars] == [True]


# --- an interrupted run


@contextlib.contextmanager
def interrupt():
    """Let Ctrl-C come when the second batch has been read."""
    work, left = progress.work, [2]

    @contextlib.contextmanager
    def interrupted(*args, **options):
        with work(*args, **options):
            yield
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress, "work", interrupted)
        yield


def test_with_use_cache_the_same_command_goes_on_where_it_was(shell, capsys, tmp_path, bars):
    command = ["rope-patch-eval", "--model_args", f"pretrained={LLAMA},dtype=float32,max_length=512", "--device", "cpu"]
    command += ["--tasks", "rope_passkey,rope_ppl", "--batch_size", "1"]
    command += ["--metadata", '{"max_seq_lengths": 512, "samples": 2, "windows": 4, "depths": [0.2, 0.8]}']

    def announced():
        totals = {bar.desc: bar.total for bar in bars if bar.desc}  # lm-eval 0.5 has bars of its own, without a name
        bars.clear()
        return totals

    def scores(folder):
        (path,) = folder.rglob("results_*.json")
        return json.loads(path.read_text())["results"]

    shell([*command, "--output_path", str(tmp_path / "whole")])
    whole = announced()
    with interrupt(), pytest.raises(SystemExit) as stop:
        shell([*command, "--use_cache", str(tmp_path / "answers")])
    assert stop.value.code == 130
    assert "--use_cache" in capsys.readouterr().err
    announced()
    shell([*command, "--use_cache", str(tmp_path / "answers"), "--output_path", str(tmp_path / "goes on")])
    rest = {"generate_until": 0.75, "loglikelihood": 1.0}  # one of four prompts was answered
    assert announced() == {kind: pytest.approx(share * whole[kind], rel=0.05) for kind, share in rest.items()}
    assert scores(tmp_path / "goes on") == scores(tmp_path / "whole")
