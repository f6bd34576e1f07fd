"""Windows and prompts divided among processes: the results of one process, and a rerun that resumes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from commands import run
from evaluated import check_cache, compared
from forks import together
from prompting import HAY
from scored import spy_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from rope_patch.cli.app import main
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.result_cache import ResultCache
from rope_patch.evaluation.text import builtin_text
from rope_patch.processes import alone, from_first

pytestmark = pytest.mark.slow

LLAMA = str(rope_patch.data_path("assets") / "llama")
TEXT = builtin_text("heldout").text[:20_000]
ASKED = {"lengths": (64, 128), "samples": 2, "depths": (0.2, 0.8), "text": TEXT, "haystack": HAY}
GRID = {
    **ASKED,
    "windows": 5,
    "batch_tokens": 256,
}  # two windows at a time, then one; all haystacks of 64 tokens at once
METHODS = ["default", "yarn:factor=4"]
CHECK = {**ASKED, "lengths": (64,), "windows": 3, "samples": 1, "tolerance": 0.0}  # so that costs are attributed
IDS = torch.arange(600) % 900 + 40


@pytest.fixture(scope="module")
def bundled():
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(LLAMA)


def slowly(*_):
    """So that neither process takes all the work."""
    time.sleep(0.01)


def compare_with(model, tokenizer, cache, on_progress=slowly):
    return compared(model, tokenizer, METHODS, **GRID, resume=cache, on_progress=on_progress)


def joined():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return dist.get_rank()


# --- the same results


def measured(model, tokenizer, folder):
    """What a process finds, the comparison a second time from the result cache."""
    reports = []
    comparison = compare_with(model, tokenizer, folder / "cache.jsonl", lambda _, n: (reports.append(n), slowly()))
    with spy_ids(model) as read:
        again = compare_with(model, tokenizer, folder / "cache.jsonl").to_json()
    checked = check_cache(model, tokenizer, ["int4-token"], **CHECK, resume=folder / "kv.jsonl", on_progress=slowly)
    text = perplexity(model, IDS, window=64, stride=40, batch=2, on_progress=slowly).to_json()
    return {
        "comparison": json.loads(comparison.to_json()),
        "tokens": sum(reports),
        "again": [again == comparison.to_json(), len(read)],
        "kv-check": json.loads(checked.to_json()),
        "text": text,
    }


def share(model, tokenizer, folder):
    rank = joined()
    with spy_ids(model) as read:
        results = measured(model, tokenizer, folder)
    results["read"] = sum(ids.numel() for ids in read)
    # What the first process does for all, or alone, waits for nobody and leaves no mark on what they share later.
    results["for all"] = from_first(lambda: perplexity(model, IDS, window=64, stride=40, batch=2).to_json())
    if rank == 0:
        with alone():
            perplexity(model, IDS, window=64, stride=40, batch=2)
    results["after"] = perplexity(model, IDS, window=64, stride=40, batch=2, on_progress=slowly).to_json()
    with pytest.MonkeyPatch.context() as patch:  # as of a model that is spread over the processes
        patch.setattr("rope_patch.evaluation.sharing.is_whole", lambda model: False)
        with spy_ids(model) as together_read:
            perplexity(model, IDS, window=64, stride=40, batch=2, resume=folder / "spread.jsonl", on_progress=slowly)
        results["spread"] = sum(ids.numel() for ids in together_read)
    try:  # each reads other text
        perplexity(model, IDS[rank:], window=64, on_progress=slowly)
    except ValueError as error:
        results["failed"] = str(error)
    dist.barrier()
    results["files"] = sorted(path.name for path in folder.glob("*.jsonl*"))
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()


@pytest.fixture(scope="module")
def outcomes(bundled, tmp_path_factory):
    """What one process finds, and what each of two."""
    two, one = (tmp_path_factory.mktemp(name) for name in ("two", "one"))
    together(lambda rank: share(*bundled, two), two)
    with spy_ids(bundled[0]) as read:
        alone = measured(*bundled, one)
    alone["read"] = sum(ids.numel() for ids in read)
    lines = [(folder / "cache.jsonl").read_text().splitlines() for folder in (one, two)]
    return alone, [json.loads((two / f"{rank}.json").read_text()) for rank in range(2)], lines


@pytest.mark.parametrize("what", ["comparison", "kv-check", "text", "tokens", "again"])
def test_two_processes_find_what_one_finds_to_the_last_digit(outcomes, what):
    alone, several, _ = outcomes
    assert [each[what] for each in several] == [alone[what]] * 2
    assert alone["again"] == [True, 0], "finished work is read from the result cache"


def test_each_process_reads_a_part_and_the_first_writes_it_all(outcomes):
    alone, several, (own, shared) = outcomes
    assert all(0.2 * alone["read"] < each["read"] < 0.9 * alone["read"] for each in several)
    assert sorted(shared) == sorted(own)


def test_what_the_first_process_does_by_itself_disturbs_nobody(outcomes):
    alone, several, _ = outcomes
    assert all(each["for all"] == each["after"] == alone["text"] for each in several)


def test_processes_that_read_different_text_are_refused(outcomes):
    assert all("different" in each["failed"] for each in outcomes[1])


def test_a_model_that_is_spread_is_read_by_all_and_its_results_are_written_once(outcomes):
    _, several, _ = outcomes
    assert several[0]["spread"] == several[1]["spread"] > IDS.numel()
    assert [each["files"] for each in several] == [["cache.jsonl", "kv.jsonl", "spread.jsonl"]] * 2


# --- a process that is killed


def test_after_a_kill_the_rerun_reads_only_what_no_process_has_finished(bundled, tmp_path):
    """The launcher ends the other process, as torchrun does; either has kept what it finished."""
    model, tokenizer = bundled
    cache = tmp_path / "cache.jsonl"

    def call(rank):
        joined()
        done = []

        def on_progress(_, tokens):
            done.append(tokens)
            if sum(done) > 600:  # of 5 windows of 128 tokens: all but a part is read
                os.kill(os.getpid(), signal.SIGKILL)

        compare_with(model, tokenizer, cache, on_progress)

    together(call, tmp_path, ends=(-9, -9))
    parts = [ResultCache(cache), ResultCache(tmp_path / "cache.jsonl.rank1")]
    assert all(parts), "each process has kept what it finished"
    with spy_ids(model) as read:
        together(lambda rank: (joined(), compare_with(model, tokenizer, cache)), tmp_path)
        resumed = compare_with(model, tokenizer, cache)
    assert not read, "the two have finished everything"
    assert len(cache.read_text().splitlines()) == 2 * (5 + 2 * 2), "nothing is written twice"
    assert not list(tmp_path.glob("*.rank*"))
    assert resumed.to_json() == compare_with(model, tokenizer, None).to_json()


# --- the command


def words(output):
    grid = ["--methods", "default yarn:factor=4", "--lengths", "64", "--windows", "5", "--samples", "2"]
    return ["compare", LLAMA, *grid, "--batch-tokens", "128", "--depths", "0.5", "--no-report", "--output", str(output)]


def command(output):
    sys.argv = ["rope-patch", *words(output)]
    main()


def test_the_command_joins_the_processes_and_the_first_alone_prints_and_writes(tmp_path):
    run(*words(tmp_path / "one"))  # first: both processes inherit the text that is encoded by then
    said = together(lambda rank: command(tmp_path / "two"), tmp_path)
    assert "passkey 64" in said[0]
    assert said[1] == ""
    one, two = ((tmp_path / name / "comparison.json").read_text() for name in ("one", "two"))
    assert one == two and sorted(p.name for p in (tmp_path / "two").iterdir()) == ["comparison.json", "finished.jsonl"]
