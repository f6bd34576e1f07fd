"""``rope-patch analyze``: the text it reads, the p sweep, and the command."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from typing import ClassVar

import numpy
import pytest
import torch
from support.commands import fail, run
from support.prompting import ENGLISH, TOKENIZER
from support.tiny import YARN, small

import rope_patch
from rope_patch.analysis import analyze as engine
from rope_patch.analysis.p_sweep import SweepPoint, sweep_p
from rope_patch.analysis.result import findings
from rope_patch.frequencies import unrotated
from rope_patch.modeling.capture import capture
from rope_patch.runtime.progress import listen
from rope_patch.texts.domains import DOMAINS, builtin_domains, read_rows

TEXTS = {"one": ENGLISH[:2500], "two": ENGLISH[2500:5000]}


# --- the text


def test_rows_are_equal_parts_of_every_text():
    rows = read_rows(TOKENIZER, {**TEXTS, "three": ENGLISH[:900]}, window=64, tokens=64 * 9)
    assert rows.ids.shape == (9, 64) and rows.groups == ("one",) * 3 + ("two",) * 3 + ("three",) * 3
    assert set(rows.ids[:, 0].tolist()) == {TOKENIZER.bos_token_id}
    whole = torch.tensor(TOKENIZER(TEXTS["one"], add_special_tokens=False).input_ids)
    assert torch.equal(rows.ids[0, 1:], whole[:63]) and torch.equal(rows.ids[2, 1:], whole[-63:])
    single = read_rows(TOKENIZER, TEXTS, window=64, tokens=1).ids
    middle = (len(whole) - 63) // 2
    assert torch.equal(single[0, 1:], whole[middle : middle + 63]), "one row comes from the middle"
    assert read_rows(TOKENIZER, TEXTS, window=64).sha256 != rows.sha256


def test_rows_fit_the_shortest_text_and_the_context():
    short = len(TOKENIZER("a b c d e f g h", add_special_tokens=False).input_ids)
    rows = read_rows(TOKENIZER, {"long": ENGLISH, "short": "a b c d e f g h"})
    assert rows.ids.shape == (2, short + 1)
    assert read_rows(TOKENIZER, TEXTS, context=48).ids.shape[1] == 48
    assert read_rows(TOKENIZER, TEXTS, window=64, tokens=1).ids.shape == (2, 64)


def test_the_builtin_texts_are_five_kinds():
    texts = builtin_domains()
    assert tuple(texts) == DOMAINS
    assert set(read_rows(TOKENIZER, window=256).groups) == set(DOMAINS)


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ({}, {}, "at least one text"),
        ({"empty": " "}, {}, "holds no text"),
        (TEXTS, {"window": 1}, "at least 2 tokens"),
        ({"short": "Hello there"}, {"window": 500}, "500"),
    ],
)
def test_texts_that_cannot_be_read(sources, options, message):
    with pytest.raises(ValueError, match=message):
        read_rows(TOKENIZER, sources, **options)


# --- the p sweep


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_point_of_the_p_sweep_is_what_the_patch_stops(family):
    model = small(family)
    got = capture(model, read_rows(TOKENIZER, TEXTS, window=64, tokens=256).ids)
    (point,) = sweep_p(model, got, [0.5], {})
    with rope_patch.patched(model, "p_rope:p=0.5") as patch:
        rests = {kind: unrotated(slot.inv_freq) for kind, slot in patch.after.items()}
    stopped = {kind or "all": tuple(mask.nonzero().flatten().tolist()) for kind, mask in rests.items() if mask.any()}
    assert point.stopped == stopped
    shares = []
    for layer in got.layers:
        if (mask := rests[layer.layer_type]).any():
            product = layer.query.mean_norm * layer.key.mean_norm.repeat_interleave(layer.groups, 0)
            shares += (product[:, mask].sum(1) / product.sum(1)).tolist()
    assert point.logit_share == pytest.approx(sum(shares) / len(shares))
    assert rope_patch.inspect(model).record is None


def test_the_p_sweep_goes_on_from_the_patch_in_place():
    model = small(rope_parameters=YARN)
    rows = read_rows(TOKENIZER, TEXTS, window=64, tokens=128)
    rope_patch.apply(model, "truncated")
    table = rope_patch.inspect(model).tables[0].inv_freq
    (point,) = sweep_p(model, capture(model, rows.ids), [0.9], {})
    assert torch.equal(rope_patch.inspect(model).tables[0].inv_freq, table)
    resting = set(unrotated(table).nonzero().flatten().tolist())
    assert not resting & set(point.stopped.get("all", ()))


# --- the whole


def analyzed(model, **chosen):
    return rope_patch.analyze(model, TOKENIZER, TEXTS, window=64, tokens=256, **chosen)


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_every_part_is_there(family):
    progress = []
    announced = []
    model = small(family)
    with listen(lambda stage, tokens: progress.append((stage, tokens)), on_more=announced.append):
        result = analyzed(model, p_values=[0.5])
    out = json.loads(result.to_json())
    assert len(out["heads"]) == sum(layer.query.heads for layer in result.capture.layers)
    assert out["findings"] == findings(result)
    stopped = 100 * result.p_sweep[0].logit_share
    assert ("by the norms p of 0.5" in out["findings"][-1]) == (stopped < 5)
    assert [point["p"] for point in out["p_sweep"]] == [0.5]
    assert sum(tokens for _, tokens in progress) == sum(announced)
    assert result.context == 64
    assert all(result.token_texts[int(token)] for view in result.single_heads for token in view.shown.token_ids)


def test_named_heads_are_read_in_the_pass_of_the_statistics():
    model = small()
    calls = []
    model.model.register_forward_pre_hook(lambda part, args, given: calls.append(1), with_kwargs=True)
    numbers = []
    for heads in ((), [(1, 3), (0, 0)]):
        calls.clear()
        result = analyzed(model, heads=heads, p_values=[])
        numbers.append(len(calls))
    assert numbers[0] == numbers[1] and result.single_heads[0].query.shape[:2] == (4, 64)


def test_the_smallest_p_that_all_positional_heads_bear_is_advised():
    result = analyzed(small(), p_values=[])
    points = {(0.9, 6): 6, (0.5, 6): 6, (0.25, 6): 4, (0.1, 6): 6}
    sweep = tuple(SweepPoint(p, {}, 0.1, 0.1, 0.1, count, kept) for (p, count), kept in points.items())
    assert "by the positional heads p of 0.5 or more: all 6" in findings(replace(result, p_sweep=sweep))[-1]
    none = tuple(replace(point, positional=0, kept=0) for point in sweep)
    assert "by the positional heads" not in findings(replace(result, p_sweep=none))[-1]


def test_a_head_of_a_layer_without_attention_is_refused_before_anything_is_read():
    with pytest.raises(ValueError, match="no attention is found in layer 0"):
        analyzed(small("qwen3_5_text"), heads=[(0, 0)])


def test_tokens_that_are_parts_of_characters_are_written_by_their_bytes():
    class Vocabulary:
        names: ClassVar = ["Ġhere", "åŃ", "▁字", "<0xE5>"]  # the second is bytes E5 and AD of 字, as GPT-2 writes them

        def decode(self, ids):
            return [" here", "\ufffd", "\ufffd字", "\ufffd"][ids[0]]

        def convert_ids_to_tokens(self, token):
            return self.names[token]

    shown = [engine.token_text(Vocabulary(), token) for token in range(4)]
    assert shown == [" here", "<0xE5><0xAD>", "▁字", "<0xE5>"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"p_values": [1.5]}, "p"),
        ({"heads": [(9, 0)]}, "layers"),
        ({"heads": [(0, 9)]}, "heads"),
    ],
)
def test_bad_input_is_refused_before_anything_is_read(options, message):
    with listen(pytest.fail), pytest.raises(ValueError, match=message):
        analyzed(small(), **options)


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("analyze") / "tiny"
    small().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return path


@pytest.mark.usefixtures("figures")
def test_the_command_writes_what_it_says(folder, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(ENGLISH)
    (tmp_path / "b.md").write_text(ENGLISH[1000:])
    given = ["analyze", folder, "--text", texts, "--text", tmp_path / "b.md", "--window", "64", "--tokens", "256"]
    given += ["--p", "0.5", "--heads", "1.3", "-o", tmp_path / "out"]
    run(*given)
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= {"analysis.json", "capture.npz", "heads.npz", "single_heads.npz", "analysis.html"}
    with numpy.load(tmp_path / "out" / "single_heads.npz") as arrays:
        assert arrays["head1.3.query"].shape[:2] == (4, 64) and arrays["head1.3.near_logits"].shape == (4, 64, 8)
        assert arrays["head1.3.added"].shape == (len(arrays["head1.3.inv_freq"]), len(arrays["head1.3.distances"]))
        assert json.loads(str(arrays["outline"]))["heads"][0]["head"] == 3
    assert "Layer 1, head 3: " in (tmp_path / "out" / "analysis.html").read_text()
    out = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert out["text"] == {**out["text"], "groups": ["texts", "b.md"], "rows": 4, "tokens": 256}
    again = run(*given, "--no-report", "--json")
    assert json.loads(again) == out


def test_several_models_get_a_folder_each_and_one_table(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    given = ["--window", "64", "--tokens", "64", "--p", "0.5", "--no-report"]
    shown = run("analyze", folder, tmp_path / "other", *given, "-o", tmp_path / "out")
    assert re.search(r"(?m)^ *tiny +\d+ of 8 ", shown) and re.search(r"(?m)^ *other +\d+ of 8 ", shown)
    whole = json.loads((tmp_path / "out" / "analyses.json").read_text())
    for name in ("tiny", "other"):
        assert whole[name] == json.loads((tmp_path / "out" / name / "analysis.json").read_text())
    assert "two models have one name" in fail("analyze", folder, folder, *given, "-o", tmp_path / "twice")
    assert "nowhere" in fail("analyze", folder, "nowhere", *given, "-o", tmp_path / "early")
    assert not (tmp_path / "early").exists()


def test_a_text_of_few_tokens_gives_standard_json(folder, tmp_path):
    (tmp_path / "a.txt").write_text("abc def")
    given = ["--text", tmp_path / "a.txt", "--p", "0.5", "--no-report", "--json", "-o", tmp_path / "out"]
    out = run("analyze", folder, *given)
    assert json.loads(out, parse_constant=pytest.fail)["p_sweep"]
