"""Training for two tables: rows of mixed lengths, each under its table."""

from __future__ import annotations

import collections

import pytest
import torch
from tiny import ids, small
from transformers import AutoTokenizer

import rope_patch
from rope_patch.cli.finetune import smoke_options
from rope_patch.training.collators import Collator
from rope_patch.training.finetune import finetune
from rope_patch.training.reading import read
from rope_patch.training.sources import make_rows

LLAMA = rope_patch.data_path("assets") / "llama"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(LLAMA)


def recipe(*words, output="x"):
    return read(overrides=["model.name=llama", f"output={output}", *words])


def packed(options, tokenizer, folder):
    folder.mkdir(exist_ok=True)
    return make_rows(options, tokenizer, folder, quiet=True)


def lengths_of(rows):
    return [[len(row["ids"]) for row in item] for item in rows]


MIXED = ("data.lengths=32:0.5 128", "data.order=mixed", "train.steps=6", "train.batch=2", "train.accumulate=2")


def test_mixed_rows_come_in_random_order_with_as_many_of_each_length(tokenizer, tmp_path):
    mixed = lengths_of(packed(recipe(*MIXED), tokenizer, tmp_path / "mixed"))
    stages = lengths_of(packed(recipe(*MIXED, "data.order=stages"), tokenizer, tmp_path / "stages"))
    assert collections.Counter(map(tuple, mixed)) == collections.Counter(map(tuple, stages))
    assert stages == sorted(stages) and mixed != stages
    assert len(stages) == 6 * 4 and {tuple(item) for item in mixed} == {(32,) * 4, (128,)}
    other = lengths_of(packed(recipe(*MIXED, "train.seed=1"), tokenizer, tmp_path / "other"))
    assert other != mixed


def test_rows_of_one_forward_pass_are_of_one_length(tokenizer, tmp_path):
    mixed = lengths_of(packed(recipe(*MIXED), tokenizer, tmp_path))
    assert all(one == other for one, other in zip(mixed[::2], mixed[1::2], strict=True))


def test_mixed_rows_are_numbered_in_their_order(tokenizer, tmp_path):
    rows = packed(recipe(*MIXED, "data.lengths=64:0.5 128", "data.retrieval=0.5"), tokenizer, tmp_path)
    numbers = [row["index"] for item in rows for row in item]
    assert numbers == list(range(len(numbers)))


def test_padding_does_not_put_a_short_row_under_the_long_table():
    model, plain = small(), small()
    rope_patch.apply(model, "yarn:factor=4@64", target_length=256)
    tokens = ids(100, batch=1)[0].tolist()
    batch = Collator(mark_padding=True)([{"ids": tokens, "index": 0}, {"ids": tokens[:40], "index": 1}])
    inputs = {key: batch[key] for key in ("input_ids", "position_ids", "attention_mask")}
    with torch.no_grad():
        together = model(**inputs, use_cache=False).logits
        alone = plain(torch.tensor([tokens[:40]]), use_cache=False).logits
    torch.testing.assert_close(together[1, :40], alone[0], atol=1e-4, rtol=0)


def test_a_run_trains_under_both_tables_and_keeps_them(tmp_path):
    options = read(
        base=smoke_options(
            recipe(
                "patch.method=yarn:factor=4@128", "data.lengths=128:0.5 512", "data.order=mixed", output=str(tmp_path)
            )
        ),
        overrides=["evaluation.before=false", "evaluation.every=0", "evaluation.lengths=256", "train.steps=2"],
    )
    assert options.patch.method == "yarn:factor=4@256" and options.data.order == "mixed"
    result = finetune(options, command="test")
    loaded = rope_patch.load(result.folder)
    assert rope_patch.inspect(loaded).method == "yarn:factor=4@256" and rope_patch.verify(loaded)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("data.lengths=128", "data.order=mixed"), "data.order=mixed needs several data.lengths"),
        (("data.lengths=128", "data.order=random"), "data.order"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other(words, message):
    with pytest.raises(ValueError, match=message):
        recipe(*words)
