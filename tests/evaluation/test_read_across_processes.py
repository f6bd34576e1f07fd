"""Windows and prompts divided among processes: the results of one process, and finished work that is shared."""

import contextlib
import io
import json
import sys
import time
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from support.commands import run
from support.evaluated import check_cache, compared
from support.forks import together
from support.prompting import HAY, TOKENIZER
from support.scored import spy_ids
from support.tiny import small

import rope_patch
from rope_patch.cli.app import main
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.runtime.parallel import alone, from_first_process
from rope_patch.runtime.progress import listen
from rope_patch.texts.builtin_text import builtin_text

pytestmark = pytest.mark.slow

LLAMA = str(rope_patch.data_path("assets") / "llama")
ASKED = {"samples": 2, "depths": (0.2, 0.8), "text": builtin_text("heldout").text[:20_000], "haystack": HAY}
GRID = {**ASKED, "lengths": (64, 128), "windows": 5, "batch_tokens": 256}  # two windows at a time, then one
CHECK = {**ASKED, "lengths": (64,), "windows": 3, "samples": 1, "tolerance": 0.0}  # so that costs are attributed
WINDOWS = {"window": 64, "stride": 40, "batch": 2}
IDS = torch.arange(600) % 900 + 40
COMMAND = ["compare", LLAMA, "--methods", "default", "--lengths", "64", "--windows", "3", "--samples", "1"]
COMMAND += ["--depths", "0.5", "--no-report", "--output"]


def slowly(*_):
    """So that neither process takes all the work."""
    time.sleep(0.01)


def compare_with(model, tokenizer, cache, on_tokens=slowly, on_more=None):
    with listen(on_tokens, on_more=on_more):
        return compared(model, tokenizer, ["default", "yarn:factor=4"], **GRID, resume=cache)


def measured(model, tokenizer, folder):
    """What a process finds, the comparison a second time from the result cache."""
    reports = []
    announced = []
    cache = folder / "cache.jsonl"

    def on_tokens(stage, tokens):
        reports.append(tokens)
        slowly()

    with spy_ids(model) as read:
        comparison = compare_with(model, tokenizer, cache, on_tokens, announced.append).to_json()
    with spy_ids(model) as again:
        assert compare_with(model, tokenizer, cache).to_json() == comparison
    with listen(slowly):
        checked = check_cache(model, tokenizer, ["int4-token"], **CHECK, resume=folder / "kv.jsonl")
        text = json.dumps(asdict(perplexity(model, IDS, **WINDOWS)))
    found = {
        "comparison": json.loads(comparison),
        "tokens": sum(reports) - sum(announced),  # what is stored is taken off
        "again": len(again),
        "kv-check": json.loads(checked.to_json()),
        "text": text,
    }
    return found, {"read": sum(ids.numel() for ids in read)}


def share(rank, model, tokenizer, folder):
    """Measure as one of the processes, and write what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found, process = measured(model, tokenizer, folder)
    # What the first process does for all, or alone, waits for nobody and leaves no mark on what they share later.
    process["for all"] = from_first_process(lambda: json.dumps(asdict(perplexity(model, IDS, **WINDOWS))))
    if rank == 0:
        with alone():
            perplexity(model, IDS, **WINDOWS)
    with listen(slowly):
        process["after"] = json.dumps(asdict(perplexity(model, IDS, **WINDOWS)))
        try:  # each reads other text
            perplexity(model, IDS[rank:], window=64)
        except ValueError as error:
            process["failed"] = str(error)
    for parameter in model.lm_head.parameters():
        parameter.ds_id = 0  # as DeepSpeed's ZeRO-3 marks a model that is spread over the processes
    with spy_ids(model) as read, listen(slowly):
        perplexity(model, IDS, **WINDOWS, resume=folder / "spread.jsonl")
    process["spread"] = sum(ids.numel() for ids in read)
    dist.barrier()
    process["files"] = sorted(path.name for path in folder.glob("*.jsonl*"))
    sys.argv = ["rope-patch", *COMMAND, str(folder / "command")]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as said:
        main()
    (folder / f"{rank}.json").write_text(json.dumps([found, process | {"said": said.getvalue()}]))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What one process finds, and what each of two, which go on from what a third one had finished when it stopped."""
    model = small()
    (two, one) = map(tmp_path_factory.mktemp, ("two", "one"))
    run(*COMMAND, str(one / "command"))  # first: all processes inherit the text that is encoded by then
    single = measured(model, TOKENIZER, one)

    def stop(name, tokens):
        if name != "default":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare_with(model, TOKENIZER, two / "cache.jsonl", stop)
    together(lambda rank: share(rank, model, TOKENIZER, two), two)
    return single, [json.loads((two / f"{rank}.json").read_text()) for rank in range(2)], (one, two)


def test_two_processes_find_what_one_finds_to_the_last_digit(outcomes):
    (single, _), several, _ = outcomes
    assert single["again"] == 2, "finished work is read from the result cache; the fixed tokens under each method"
    for what, value in single.items():
        assert [found[what] for found, _ in several] == [value] * 2, what


def test_each_reads_a_part_of_what_is_not_finished_and_writes_it_to_the_one_file(outcomes):
    (_, single), several, folders = outcomes
    assert all(0.1 * single["read"] < process["read"] < 0.4 * single["read"] for _, process in several)
    own, shared = ((folder / "cache.jsonl").read_text().splitlines() for folder in folders)
    assert sorted(shared) == sorted(own)
    assert [process["files"] for _, process in several] == [["cache.jsonl", "kv.jsonl", "spread.jsonl"]] * 2


def test_what_the_first_process_does_by_itself_disturbs_nobody(outcomes):
    (single, _), several, _ = outcomes
    assert all(process["for all"] == process["after"] == single["text"] for _, process in several)


def test_processes_that_read_different_text_are_refused(outcomes):
    assert all("different" in process["failed"] for _, process in outcomes[1])


def test_a_model_that_is_spread_is_read_by_all(outcomes):
    first, second = (process["spread"] for _, process in outcomes[1])
    assert first == second > IDS.numel()


def test_the_first_process_alone_prints_and_writes(outcomes):
    _, ((_, first), (_, second)), folders = outcomes
    assert "passkey 64" in first["said"] and second["said"] == ""
    one, two = ((folder / "command" / "comparison.json").read_text() for folder in folders)
    assert one == two
    assert sorted(p.name for p in (folders[1] / "command").iterdir()) == ["comparison.json", "finished.jsonl"]
