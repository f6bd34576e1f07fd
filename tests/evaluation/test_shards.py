"""Shards of a comparison: measured apart, joined without weights, and refused where they do not belong together."""

from __future__ import annotations

import json
import shutil

import pytest
from commands import fail, run

import rope_patch
from rope_patch.evaluation.shards import parse_shard

ASSETS = rope_patch.data_path("assets")
GRID = ["--lengths", "64 128", "--windows", "5", "--samples", "3", "--depths", "0.5", "--longppl"]
GRID += ["--batch-tokens", "256"]
METHODS = ["--methods", "default yarn:factor=4"]


def words(output, *more, model=ASSETS / "llama", methods=METHODS):
    return ["compare", model, *methods, *GRID, "--no-report", "--output", output, *more]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The folders of both shards, and that of the whole."""
    root = tmp_path_factory.mktemp("shards")
    for number in (1, 2):
        run(*words(root / f"part-{number}", "--shard", f"{number}/2"))
    run(*words(root / "whole"))
    return root


@pytest.fixture
def copy(shards, tmp_path):
    for number in (1, 2):
        shutil.copytree(shards / f"part-{number}", tmp_path / f"part-{number}")
    return tmp_path


def lines(folder):
    return sorted((folder / "finished.jsonl").read_text().splitlines())


def test_shards_divide_the_work_and_their_union_is_the_comparison_to_the_last_digit(shards, tmp_path):
    """The model that they are joined with has no weights: it cannot have been read."""
    one, other = ({*lines(shards / f"part-{number}")} for number in (1, 2))
    assert one | other == {*lines(shards / "whole")} and len(one - other) > 4 and len(other - one) > 4
    assert len(one & other) == 5, "the key tokens of five windows, which every shard needs"
    shutil.copytree(ASSETS / "llama", tmp_path / "llama", ignore=shutil.ignore_patterns("*.safetensors"))
    run(*words(tmp_path / "merged", "--merge", shards / "part-*", model=tmp_path / "llama"))
    one, other = ((folder / "comparison.json").read_text() for folder in (shards / "whole", tmp_path / "merged"))
    assert one == other


def merge(folder, monkeypatch, capsys, **options):
    return fail(monkeypatch, capsys, *words(folder / "merged", "--merge", folder / "part-*", **options))


def test_what_the_shards_did_not_measure_is_refused(shards, copy, monkeypatch, capsys):
    other = merge(copy, monkeypatch, capsys, methods=["--methods", "default pi:factor=4"])
    assert 'differ from this command in methods, ["default", "yarn:factor=4"] and ["default", "pi:factor=4"]' in other
    chooser = fail(
        monkeypatch,
        capsys,
        *words(copy / "merged", "--merge", copy / "part-*", "--longppl-evaluator", ASSETS / "llama"),
    )
    assert 'differ from this command in evaluator, null and "LlamaForCausalLM llama"' in chooser
    seeded = fail(monkeypatch, capsys, *words(copy / "merged", "--merge", copy / "part-*", "--seed", "1"))
    assert "differ from this command in spec: seed, 0 and 1: give the options" in seeded
    copied = json.loads((ASSETS / "llama" / "config.json").read_text())
    shutil.copytree(ASSETS / "llama", copy / "llama", ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / "llama" / "config.json").write_text(json.dumps({**copied, "rms_norm_eps": 1e-3}))
    assert "the shards measured another model" in merge(copy, monkeypatch, capsys, model=copy / "llama")


def test_shards_of_two_models_are_refused(copy, monkeypatch, capsys):
    path = copy / "part-2" / "shard.json"
    record = json.loads(path.read_text())
    record["fingerprints"]["default"] = "0" * 64
    path.write_text(json.dumps(record))
    assert "do not belong together: they differ in fingerprints: default, " in merge(copy, monkeypatch, capsys)


def test_what_is_missing_is_named(copy, monkeypatch, capsys):
    cut = copy / "part-2" / "finished.jsonl"
    cut.write_text("\n".join(cut.read_text().splitlines()[:-1]))
    assert "results are missing, 1 of shard 2: run these shards again" in merge(copy, monkeypatch, capsys)
    path = copy / "part-2" / "shard.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "finished": False}))
    assert "shard 2/2 in" in merge(copy, monkeypatch, capsys)
    shutil.rmtree(copy / "part-2")
    assert "shards are missing: 2/2" in merge(copy, monkeypatch, capsys)


def test_options_that_a_shard_cannot_have(shards, copy, monkeypatch, capsys):
    def failure(*more):
        return fail(monkeypatch, capsys, *words(copy / "part-1", *more))

    assert "holds another shard: give each an --output folder of its own" in failure("--shard", "2/2")
    assert "--budget plans with the pace of one machine" in failure("--shard", "1/2", "--budget", "5m")
    for nothing, message in (("", "give the folders of all shards"), (copy / "part-1" / "shard.json", "no folder")):
        assert message in failure("--merge", nothing), "nothing is measured in place of what was to be joined"
    assert "part-1 is the folder of a shard: give another --output" in failure("--merge", copy / "part-1")
    with pytest.raises(ValueError, match=r"in \[1, 2\], got 3"):
        parse_shard("3/2")
    with pytest.raises(ValueError, match="number of shards must be >= 1, got 0"):
        parse_shard("3/0")
    with pytest.raises(ValueError, match="such as 3/16, got '3'"):
        parse_shard("3")
