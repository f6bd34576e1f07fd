"""Progress within a window: each layer moves it, and what is reported adds up to what was announced."""

import pytest
import torch
from support.prompting import TOKENIZER
from support.tiny import ids, small, tiny_model

from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.modeling.capture import capture
from rope_patch.runtime.progress import advance, bar, listen, more, say, stage, work

ASKED = {"task": "niah", "lengths": [120], "depths": [0.0, 0.5, 1.0], "samples": 1, "haystack": "noise"}


def reported(call):
    reports = []
    with listen(lambda stage, tokens: reports.append(tokens)):
        call()
    return reports


def test_chunks_move_progress_too():
    model = tiny_model()
    text = ids(30, batch=1)[0]
    assert reported(lambda: perplexity(model, text, chunk=15)) == [7, 7, 1, 7, 7, 1]


def test_windows_that_are_kept_are_taken_off_and_equal_ones_are_read_once():
    model = tiny_model()
    row = ids(30, batch=1)
    kept = {}
    rows = torch.cat((row, row, ids(30, batch=1, seed=1)))
    first = reported(lambda: perplexity(model, rows, batch=3, resume=kept))
    assert sum(first) == 60 and max(first) <= 30, "two are read for three"
    stored = []
    with listen(on_more=stored.append):
        assert reported(lambda: perplexity(model, rows, resume=kept)) == []
    assert stored == [-30, -30, -30]


def test_padding_is_no_progress():
    model = tiny_model()
    rows = [torch.arange(3, 33), torch.arange(3, 9)]
    from rope_patch.texts.documents import TokenDocument

    documents = [TokenDocument(str(i), row) for i, row in enumerate(rows)]
    reports = reported(lambda: perplexity(model, documents, window=30, batch=2))
    assert reports == [18, 17, 1]


def test_prompts_move_evenly_with_what_is_read_and_add_up():
    reports = reported(lambda: retrieval(small(), TOKENIZER, **ASKED))
    assert sum(reports) == 3 * 120
    # Two layers of each pass: none moves more than half of what one prompt and its share stand for.
    assert len(reports) > 3 * 2 and max(reports) < 120


def test_shared_text_is_spread_over_all_prompts():
    """Of prompts with the same needles the first reads nearly all: progress is near its end when others begin."""
    asked = {**ASKED, "task": "sums", "lengths": [192]}
    moved = reported(lambda: retrieval(small(), TOKENIZER, **asked))
    halfway = sum(sum(moved[: i + 1]) < 3 * 192 / 2 for i in range(len(moved)))
    assert sum(moved) == 3 * 192 and halfway <= 3, "half of the work is the shared text, which is read in one pass"


def test_statistics_report_each_layer_and_leave_no_hook():
    model = tiny_model()
    assert reported(lambda: capture(model, ids(30))) == [15, 14, 1, 15, 14, 1]

    def stop(stage, tokens):
        raise KeyboardInterrupt

    for read in (capture, perplexity):
        with listen(stop), pytest.raises(KeyboardInterrupt):
            read(model, ids(30))
        assert not any(part._forward_hooks for part in model.modules())


def test_work_neither_overshoots_nor_is_finished_before_its_end():
    def read():
        with work(10, reads=5):
            for tokens in (3, 2, 9):
                advance(tokens)

    assert reported(read) == [6, 3, 1]


def test_what_an_earlier_run_has_stored_is_taken_off_the_bar(monkeypatch):
    clock = iter(range(0, 10**6, 100))
    bars = []  # longer than the least time between two lines in a file
    monkeypatch.setattr("tqdm.std.tqdm.refresh", lambda shown, **_: bars.append(shown))
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))
    with bar(1000):
        more(-900)
        advance(50)
        (shown,) = set(bars)
        now = shown.format_dict
        assert (now["n"], now["total"]) == (50, 100) and now["rate"] == 0.5, "50 tokens in 100 s"
    with bar(1000, hidden=True):
        more(-900)


def test_a_stage_within_a_stage_has_its_own_name_and_what_is_not_listened_to_goes_on_outside():
    told = []
    inner = []
    with listen(lambda *progress: told.append(progress), on_sentence=told.append), stage("outer"):
        with stage("inner"):
            advance(1)
        with listen(lambda *progress: inner.append(progress)):
            advance(2)
            say("a step")
        with work(0):
            advance(3)
        with work(10):
            advance(4)
    assert told == [("inner", 1), "a step", ("outer", 4), ("outer", 6)] and inner == [("outer", 2)]
    advance(5)
    assert len(told) == 4, "nobody listens any more"
