"""The comparison of methods: paired on the same documents, resumable, and honest about what it can tell apart."""

import json
import signal
import sys

import pytest
from scipy import stats
from support.commands import DOMAINS, run
from support.evaluated import compared, perplexity_of, result_of, retrieval_of, suite_of
from support.forks import forked
from support.patches import lora, module_of, read_json
from support.prompting import HAY, TOKENIZER
from support.scored import spy_ids
from support.tiny import small

import rope_patch
from rope_patch.cli.app import main
from rope_patch.evaluation.compare import Comparison, Row
from rope_patch.evaluation.metrics import METRICS, Span
from rope_patch.patching.verify import inspect_model
from rope_patch.registry import is_built_in
from rope_patch.runtime.result_cache import ResultCache
from rope_patch.texts.builtin_text import builtin_text

ASSETS = rope_patch.data_path("assets")
TEXT = builtin_text("heldout").text[:20_000]
SMALL = {"lengths": (64, 128), "windows": 3, "samples": 2, "depths": (0.2, 0.8), "text": TEXT, "haystack": HAY}


@pytest.fixture(scope="module")
def tiny():
    return small(max_position_embeddings=256), TOKENIZER


def test_it_refuses_before_it_measures_and_leaves_the_model_alone(tiny):
    """What a spec alone refuses stands with the spec."""
    model, tokenizer = tiny
    stock = module_of(model)
    options = {**SMALL, "lengths": (64,)}
    for methods, changes, message in [
        (["default", "table:values=1/2"], {}, "pair"),
        ([], {}, "methods"),
        (["default"], {"lengths": (64, 20)}, "passkey"),
        (["default"], {"text": " "}, "text"),
    ]:
        with spy_ids(model) as seen, pytest.raises((ValueError, TypeError), match=message):
            compared(model, tokenizer, methods, **{**options, **changes})
        assert not seen
    assert module_of(model) is stock


def test_its_numbers_are_those_of_the_suite_under_each_method(tiny):
    model, tokenizer = tiny
    result = compared(model, tokenizer, ["default", "yarn:factor=4"], **SMALL)
    suite = suite_of(tokenizer, **SMALL)
    for row, method in zip(result.rows, ("default", "yarn:factor=4"), strict=True):
        with rope_patch.patched(model, method):
            alone = suite.run(model)
        assert (row.scores.perplexity, row.scores.retrieval) == (alone.perplexity, alone.retrieval)
    columns = {(column.metric, column.span.stop): column.values for column in result.columns()}
    assert {("perplexity", 64), ("retrieval", 64)} <= columns.keys() and ("logprob", 64) not in columns
    assert columns["perplexity", 128] == tuple(row.scores.perplexity.between(64, 128) for row in result.rows)
    answers = [row.scores.retrieval["passkey"] for row in result.rows]
    assert columns["retrieval", 128] == tuple(one.accuracy(128) for one in answers)
    given = [[sample.logprob for sample in one.samples(128)] for one in answers]
    assert columns["logprob", 128] == pytest.approx([sum(logprobs) / len(logprobs) for logprobs in given])


# --- what can be told apart, on made-up scores


def made_up(losses, hits):
    """A comparison of methods with given losses per window (the same at each position) and answers."""
    rows = []
    for (name, values), answers in zip(losses.items(), hits.values(), strict=True):
        text = perplexity_of([[value] * 2 for value in values], (0, 8, 16))
        rows.append(Row(name, result_of(text, retrieval_of({(8, 0.5): answers, (16, 0.5): answers})), ()))
    return Comparison(tuple(rows), rows[0].scores.spec, 8, "", "made up")


WINDOWS = [2.0, 2.5, 1.5, 3.0, 2.2, 1.8]


def test_a_winner_needs_every_interval_to_exclude_zero():
    losses = {
        "best": WINDOWS,
        "close": [v + d for v, d in zip(WINDOWS, (0.1, -0.1, 0.12, -0.05, 0.02, 0.01), strict=True)],
        "worse": [v + d for v, d in zip(WINDOWS, (0.5, 0.6, 0.55, 0.5, 0.6, 0.52), strict=True)],
    }
    hits = {"best": [True] * 30, "close": [True] * 29 + [False], "worse": [False] * 30}

    def columns():
        return [one for one in made_up(losses, hits).columns() if is_built_in(METRICS[one.metric])]

    for column in columns():
        assert column.best == 0 and column.winner is None
        told_apart = [difference.significant for difference in column.differences.values()]
        assert told_apart == [False, True], f"{column.metric} does not tell the third row from the first alone"
    for name, winner in (("close", "best"), ("worse", None)):  # alone there is nobody to win against
        del losses[name], hits[name]
        assert [column.winner for column in columns()] == [winner] * 5


def test_many_methods_make_wider_intervals():
    worse = [v + 0.3 + 0.1 * (i % 2) for i, v in enumerate(WINDOWS)]
    for names in ("ab", "abcdefghijkl"):
        losses = {name: WINDOWS if name == "a" else worse for name in names}
        found = made_up(losses, {name: [True] for name in names}).columns()[0].differences["b"]
        pairs = len(names) * (len(names) - 1) / 2
        expected = stats.ttest_rel(worse, WINDOWS).confidence_interval(1 - 0.05 / pairs)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))


def grid(name, answers):
    """A row whose answers are (haystack, depth)."""
    columns = {(8, depth / 10): column for depth, column in enumerate(zip(*answers, strict=True))}
    return Row(name, result_of(perplexity_of([[value] for value in WINDOWS], (0, 8)), retrieval_of(columns)), ())


def test_answers_that_hang_together_count_as_one():
    """Five haystacks of five depths, of which one method knows two fifths and another none."""
    none = [[0] * 5] * 5
    together = [[1] * 5] * 2 + [[0] * 5] * 3
    apart = [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 1, 1], [1, 0, 0, 0, 1]]
    found = {}
    for name, answers in (("together", together), ("apart", apart)):
        rows = grid("a", answers), grid("b", none)
        comparison = Comparison(rows, rows[0].scores.spec, 8, "", "made up")
        found[name] = comparison.difference("a", "b", "retrieval", Span(8, task="passkey"))
    assert found["together"].estimate == found["apart"].estimate == 0.4
    assert found["apart"].low > 0 > found["together"].low, "two haystacks of five are not ten answers"


def test_one_window_decides_nothing():
    result = made_up({"a": [1.0], "b": [9.0]}, {"a": [True], "b": [False]})
    assert {column.winner for column in result.columns()} == {None}
    data = json.loads(result.to_json())
    assert data["columns"][0]["differences"]["b"][1] is None, "infinite: JSON says null"


def test_differences_are_asked_for_by_name():
    result = made_up({"a": [1.0, 2.0], "b": [2.0, 2.5]}, {"a": [True] * 9, "b": [False] * 9})
    assert result.difference("b", "a", "perplexity", Span(8, 0)).estimate == pytest.approx(0.75)
    assert result.difference("b", "a", "retrieval", Span(16, task="passkey")).estimate == -1
    for metric, message in (("speed", "unknown metric 'speed'"), ("perplexity", "buckets")):
        with pytest.raises(ValueError, match=message):
            result.difference("b", "a", metric, Span(9, 0))


# --- what it takes


def test_a_patched_model_is_measured_as_it_is_and_its_patch_replaced(tiny):
    model, tokenizer = tiny
    fresh = compared(model, tokenizer, ["default", "yarn:factor=4", "pi:factor=2"], **SMALL)
    with rope_patch.patched(model, "yarn", factor=4):
        ours = module_of(model)
        again = compared(model, tokenizer, ["default", "pi:factor=2"], **SMALL)
        assert module_of(model) is ours
    for ours, expected in zip(again.rows, fresh.rows[1:], strict=True):
        assert ours.scores.perplexity == expected.scores.perplexity
        assert ours.scores.retrieval == expected.scores.retrieval
    assert again.environment["patch before"] == "yarn:factor=4"
    with rope_patch.patched(model, "yarn", target_length=1024):
        assert compared(model, tokenizer, ["default"], **SMALL).trained_length == fresh.trained_length == 256


def test_a_failure_names_its_method(tiny):
    model, tokenizer = tiny

    def spoil(module, args, logits):
        return logits * (float("nan") if str(inspect_model(model).record.to_method()) == "pi:factor=4" else 1.0)

    handle = model.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(ValueError, match="pi"):
            compared(model, tokenizer, ["default", "pi:factor=4"], **SMALL)
    finally:
        handle.remove()


# --- finished work


@pytest.mark.parametrize("said", ["Chapter one.\nAll my work.\n", "one line without an end"])
def test_a_file_of_another_kind_is_not_written_to(tmp_path, said):
    path = tmp_path / "thesis.txt"
    path.write_text(said)
    with pytest.raises(ValueError, match="thesis"):
        ResultCache(path)
    assert path.read_text() == said


# --- the command


def test_an_adapters_folder_is_measured_under_the_tables_it_was_trained_under(tmp_path):
    folder = tmp_path / "adapter"
    out = tmp_path / "out"
    small(max_position_embeddings=256).save_pretrained(tmp_path / "base")
    TOKENIZER.save_pretrained(tmp_path / "base")
    model = rope_patch.load(tmp_path / "base", "yarn:factor=4")
    rope_patch.save(lora(model), folder)
    asked = ["--methods", "default pi", "--lengths", "512", "--samples", "1", "--windows", "1", "--depths", "0.5"]
    run("compare", folder, *asked, "-o", out, "--no-report")
    data = read_json(out / "comparison.json")
    yarn = data["rows"][0]["tables"][0]["inv_freq"]
    assert yarn == list(rope_patch.verify(model).tables["all"].inv_freq)
    assert [row["method"] for row in data["rows"]] == ["default", "pi:factor=2"]  # from the longest length
    assert data["environment"]["patch before"] == "yarn:factor=4" and data["environment"]["adapter"] == "adapter"


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_command_stopped_on_the_way_keeps_what_was_finished(tmp_path, monkeypatch, kind):
    journal = tmp_path / "out" / "finished.jsonl"
    said = tmp_path / "said.txt"
    written = []
    asked = ["compare", str(ASSETS / "llama"), "--methods", "default yarn:factor=4", "--lengths", "64", "--no-report"]
    asked += ["--samples", "2", "--windows", "3", "-o", str(journal.parent), "--threads", "1"]
    asked += ["--depths", "0.5", "--text", DOMAINS, "--haystack", DOMAINS]
    monkeypatch.setattr(sys, "argv", ["rope-patch", *asked])

    def the_fifth_is_written(event, args):
        if event != "open" or str(args[0]) != str(journal):
            return False
        written.append(args)
        return len(written) == 5

    def stopped():
        sys.stderr = said.open("w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this one
        main()

    status = forked(stopped, at=the_fifth_is_written, kind=kind)
    assert status == (-kind if kind == signal.SIGKILL else 128 + kind), said.read_text()
    if kind != signal.SIGKILL:
        assert "continues from there" in said.read_text() and "Traceback" not in said.read_text()
    assert journal.read_bytes().count(b'{"key"') == 4, "it was stopped on the way"
    run(*asked)
    assert journal.read_bytes().count(b'{"key"') == 2 * (1 + 3 + 2), "nothing was measured twice"


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


def test_a_line_whose_value_was_changed_is_named(tmp_path):
    path = tmp_path / "finished.jsonl"
    journal = ResultCache(path)
    journal["a"] = 1
    journal["b"] = {"nll": [0.1, 2.5]}
    path.write_text(path.read_text().replace('{"nll": [0.1, 2.5]}', "[]"))
    with pytest.raises(ValueError, match=r"finished\.jsonl, line 2"):
        ResultCache(path)
