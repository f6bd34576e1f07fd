"""Progress within a window: each layer moves it, and what is reported adds up to what was announced."""

from __future__ import annotations

import pytest
import torch
from support.prompting import TOKENIZER, bold
from support.tiny import ARCHITECTURES, ids, tiny_model

from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.retrieval import retrieval
from rope_patch.modeling.capture import capture
from rope_patch.runtime.progress import Progress

ASKED = {"task": "niah", "lengths": [120], "depths": [0.0, 0.5, 1.0], "samples": 1, "haystack": "noise"}


def reported(call):
    reports = []
    call(reports.append)
    return reports


def test_a_window_read_in_one_pass_moves_after_each_of_two_layers_and_after_the_output_head():
    model, text = tiny_model(), ids(30, batch=1)[0]
    # Thirds: layer, layer, output head; the last token waits until the scores are there.
    assert reported(lambda report: perplexity(model, text, on_progress=report)) == [10, 10, 9, 1]


def test_chunks_move_progress_too():
    model, text = tiny_model(), ids(30, batch=1)[0]
    assert reported(lambda report: perplexity(model, text, chunk=15, on_progress=report)) == [5, 5, 5, 5, 5, 4, 1]


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_reports_its_layers(family):
    reports = reported(lambda report: perplexity(tiny_model(family), ids(30, batch=1)[0], on_progress=report))
    assert reports == [10, 10, 9, 1]


def test_windows_that_are_kept_are_reported_at_once_and_equal_ones_together():
    model, row, kept = tiny_model(), ids(30, batch=1), {}
    rows = torch.cat((row, row, ids(30, batch=1, seed=1)))
    first = reported(lambda report: perplexity(model, rows, batch=3, resume=kept, on_progress=report))
    assert sum(first) == 90 and max(first) <= 30, "two are read for three"
    assert reported(lambda report: perplexity(model, rows, resume=kept, on_progress=report)) == [30, 30, 30]


def test_padding_is_no_progress():
    model = tiny_model()
    rows = [torch.arange(3, 33), torch.arange(3, 9)]
    from rope_patch.evaluation.documents import TokenDocument

    documents = [TokenDocument(str(i), row) for i, row in enumerate(rows)]
    reports = reported(lambda report: perplexity(model, documents, window=30, batch=2, on_progress=report))
    assert reports == [12, 12, 11, 1]


@pytest.mark.parametrize("mode", ["single", "multikey"])
def test_prompts_move_evenly_with_what_is_read_and_add_up(mode):
    reports = reported(lambda report: retrieval(bold(), TOKENIZER, mode=mode, **ASKED, on_progress=report))
    assert sum(reports) == 3 * 120
    # Two layers and the head of each pass: none moves more than a third of what one prompt and its share stand for.
    assert len(reports) > 3 * 3 and max(reports) < 120


def test_shared_text_is_spread_over_all_prompts():
    """In multikey mode the first question reads nearly all, and progress is near its end when the others begin."""
    moved = []

    def report(tokens):
        moved.append(tokens)

    asked = {**ASKED, "lengths": [192]}
    retrieval(bold(), TOKENIZER, mode="multikey", **asked, on_progress=report)
    halfway = sum(sum(moved[: i + 1]) < 3 * 192 / 2 for i in range(len(moved)))
    assert sum(moved) == 3 * 192 and halfway <= 3, "half of the work is the shared text, which is read in one pass"


def test_statistics_report_each_layer_and_leave_no_hook():
    model = tiny_model()
    assert reported(lambda report: capture(model, ids(30), on_progress=report)) == [15, 15, 15, 14, 1]

    def stop(tokens):
        raise KeyboardInterrupt

    for read in (capture, perplexity):
        with pytest.raises(KeyboardInterrupt):
            read(model, ids(30), on_progress=stop)
        assert not any(part._forward_hooks for part in model.modules())


def test_progress_neither_falls_nor_overshoots():
    reports = []
    progress = Progress(10, reports.append, reads=5)
    for read in (3, 2, 9):
        progress.reach(read)
    assert reports == [6, 3]
    progress.finish()
    progress.finish()
    assert reports == [6, 3, 1]
