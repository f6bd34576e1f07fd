"""Training: the loss from slices against whole logits, packing without loss, positions and masks that stay causal."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scored import CAPPED, bold_model, spy
from support.tiny import ARCHITECTURES, ids
from transformers import Trainer, TrainingArguments

from rope_patch.evaluation.documents import TokenDocument
from rope_patch.modeling import loss as loss_module
from rope_patch.modeling.loss import IGNORED, fuse, token_loss
from rope_patch.modeling.scoring import Reader
from rope_patch.training.collators import Collator, PackedCollator, PoSECollator
from rope_patch.training.data import pack
from rope_patch.training.trainer import LongTrainer

# --- the loss


def naive(model, rows, labels, weights):
    logits = model(rows, use_cache=False).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    counts = weights[:, 1:].flatten() * (labels[:, 1:].flatten() != IGNORED)
    return (losses * counts).sum() / counts.sum()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(family, monkeypatch):
    monkeypatch.setattr(loss_module, "SLICE", 16)
    model, rows = bold_model(family), ids(40, batch=3)
    labels = rows.clone()
    labels[0, :7], labels[2, 30:] = IGNORED, IGNORED
    weights = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) * 3
    expected = naive(model, rows, labels, weights)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with spy(model.lm_head) as states:
        loss = fuse(model)(rows, labels=labels, weights=weights)["loss"]
        loss.backward()
    assert max(states) <= 16, "no more than a slice of logits, backward too"
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(dict(model.named_parameters())[name].grad, gradient, atol=1e-5), name
    assert model(rows, use_cache=False).logits.shape == (3, 40, 96), "without labels, logits as before"


@pytest.mark.parametrize("family", ["llama", *CAPPED])
def test_it_is_the_stock_loss_with_the_stock_divisor(family):
    model, rows = bold_model(family), ids(30)
    stock = model(rows, labels=rows, use_cache=False).loss
    halved = model(rows, labels=rows, use_cache=False, num_items_in_batch=torch.tensor(2 * 2 * 29)).loss
    fuse(model)
    assert model(rows, labels=rows)["loss"].item() == pytest.approx(stock.item(), abs=1e-6)
    assert model(rows, labels=rows, num_items_in_batch=116)["loss"].item() == pytest.approx(halved.item(), abs=1e-6)


def test_a_row_with_nothing_to_learn_is_no_nan():
    model, rows = bold_model(), ids(8)
    nothing = torch.full_like(rows, IGNORED)
    total, count = token_loss(Reader(model), model.model(rows).last_hidden_state, nothing)
    assert total.item() == 0 and count.item() == 0
    for items in (None, 7, torch.tensor(7)):
        loss = fuse(model)(rows, labels=nothing, num_items_in_batch=items, return_dict=False)["loss"]
        loss.backward()
        assert loss.item() == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


# --- packing


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(sizes=SIZES, length=st.integers(2, 16), boundaries=st.sampled_from(["join", "apart", "whole"]))
def test_packing_loses_no_token_and_says_where_documents_begin(sizes, length, boundaries):
    counter = itertools.count()
    documents = [TokenDocument(str(i), torch.tensor([next(counter) for _ in range(n)])) for i, n in enumerate(sizes)]
    rows = list(pack(iter(documents), length, boundaries))
    assert [token for row in rows for token in row["ids"]] == list(range(sum(sizes)))
    assert [row["index"] for row in rows] == list(range(len(rows)))
    assert all(0 < len(row["ids"]) <= length for row in rows)
    if boundaries != "whole":
        assert all(len(row["ids"]) == length for row in rows[:-1])
    begins = set(itertools.accumulate([0, *sizes]))
    for row in rows:
        assert row["starts"] == sorted(set(row["starts"])) and row["starts"][0] == 0
        inside = {i for i, token in enumerate(row["ids"]) if token in begins}
        assert inside | {0} == set(row["starts"])
        if boundaries == "whole":
            assert row["starts"] == [0]


# --- positions and masks, as Trainer runs them: no cache, position_ids given


def example(size, index=0, **more):
    return {"ids": ids(size, batch=1, seed=index)[0].tolist(), "index": index, **more}


@torch.no_grad()
def run(model, batch):
    inputs = {
        name: batch[name] for name in ("input_ids", "position_ids", "attention_mask", "use_cache") if name in batch
    }
    return model(**({"use_cache": False} | inputs)).logits


@torch.no_grad()
def explicit(model, batch, allowed):
    """Logits under a mask written out: allowed (tokens, tokens), true where the row may look."""
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
    return model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask, use_cache=False
    ).logits


COLLATORS = [Collator(), PoSECollator(target=64), PoSECollator(target=60, chunks=3)]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("collator", COLLATORS, ids=lambda c: type(c).__name__ + str(getattr(c, "chunks", "")))
def test_skipped_positions_keep_plain_causal_attention(family, attention, collator):
    changes = {"sliding_window": None} if family == "mistral" else {}
    model, batch = bold_model(family, attention=attention, **changes), collator([example(24, index=3)])
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    assert torch.allclose(run(model, batch), explicit(model, batch, causal), atol=1e-4)
    if type(collator) is not Collator:  # the trap: without the mask the row would fall apart
        unmasked = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        assert not torch.allclose(run(model, unmasked), run(model, batch), atol=1e-3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(attention):
    model = bold_model(attention=attention)
    batch = PackedCollator()([example(24, starts=[0, 5, 17])])
    assert batch["position_ids"][0].tolist() == [*range(5), *range(12), *range(7)] and "attention_mask" not in batch
    assert batch["use_cache"] is False, "with a cache transformers would not look for segments"
    segment = torch.tensor([0] * 5 + [1] * 12 + [2] * 7)
    allowed = torch.ones(24, 24, dtype=torch.bool).tril() & (segment[:, None] == segment)
    assert torch.allclose(run(model, batch), explicit(model, batch, allowed), atol=1e-4)
    alone = model(batch["input_ids"][:, 5:17], use_cache=False).logits
    assert torch.allclose(run(model, batch)[:, 5:17], alone, atol=1e-4)


def test_another_seed_gives_other_positions():
    row = example(24, index=3)
    places = [PoSECollator(target=4096, seed=seed).positions(24, row).tolist() for seed in (0, 0, 1)]
    assert places[0] == places[1] != places[2]


@settings(deadline=None, max_examples=80)
@given(size=st.integers(4, 40), index=st.integers(0, 1000), seed=st.integers(0, 3), chunks=st.integers(1, 4))
def test_positions_rise_stay_below_the_target_and_come_from_the_example(size, index, seed, chunks):
    collator = PoSECollator(target=64, chunks=chunks, seed=seed)
    positions = collator.positions(size, example(size, index))
    steps = positions.diff()
    assert len(positions) == size and int(positions[0]) == 0 and int(positions[-1]) < 64 and bool((steps >= 1).all())
    assert torch.equal(positions, collator.positions(size, example(size, index))), "the same in every run"
    assert int((steps > 1).sum()) <= chunks - 1
    reached = [int(PoSECollator(target=64, seed=seed).positions(8, example(8, i))[-1]) for i in range(200)]
    assert len(set(reached)) > 40 and max(reached) >= 60


def test_rows_are_padded_on_the_right_and_padding_is_not_learnt():
    batch = Collator(pad=2)([example(6, 0), example(9, 1, weights=[0.0] * 4 + [5.0] * 5)])
    assert batch["input_ids"].shape == (2, 9) and batch["input_ids"][0, 6:].tolist() == [2, 2, 2]
    assert batch["labels"][0, 6:].tolist() == [IGNORED] * 3 and batch["labels"][1, :4].tolist() == [IGNORED] * 4
    assert batch["weights"][0].tolist() == [1.0] * 6 + [0.0] * 3
    assert batch["position_ids"].tolist() == [list(range(9))] * 2
    assert bool(batch["attention_mask"].all()), "which keeps positions from being read as packed documents"


# --- the trainer


def rows_of(count, size=24):
    return [{"ids": ids(size, batch=1, seed=i)[0].tolist(), "index": i, "starts": [0]} for i in range(count)]


def arguments(folder, **changes):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 1}
    options |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "learning_rate": 1e-3, "seed": 3}
    return TrainingArguments(folder, **(options | changes))


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_it_trains_as_stock_trainer_does(tmp_path):
    rows = rows_of(16)
    stock = Trainer(
        bold_model(),
        arguments(tmp_path, train_sampling_strategy="sequential", remove_unused_columns=False),
        train_dataset=rows,
        data_collator=lambda batch: {name: Collator()(batch)[name] for name in ("input_ids", "labels")},
    )
    stock.train()
    ours = LongTrainer(bold_model(), arguments(tmp_path), rows, Collator())
    ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(stock), abs=1e-5)
    for (name, mine), theirs in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4), name


def test_weights_count_over_the_whole_step(tmp_path):
    """Two passes of unequal weight make one step: the mean is over the labels of both."""
    rows = rows_of(4)
    rows[0]["weights"], rows[3]["weights"] = [0.0] * 20 + [5.0] * 4, [0.0] * 23 + [1.0]
    model = bold_model()
    total = count = 0.0
    for row in rows:
        batch = Collator()([row])
        with torch.no_grad():
            logits = model(batch["input_ids"], use_cache=False).logits[:, :-1].float()
        part = torch.nn.functional.cross_entropy(logits[0], batch["input_ids"][0, 1:], reduction="none")
        total, count = (
            total + float((part * batch["weights"][0, 1:]).sum()),
            count + float(batch["weights"][0, 1:].sum()),
        )
    trainer = LongTrainer(model, arguments(tmp_path, max_steps=1), rows, Collator())
    trainer.train()
    assert losses_of(trainer) == pytest.approx([total / count], abs=1e-4)


def test_rows_that_cannot_be_trained_on_are_refused(tmp_path):
    with pytest.raises(ValueError, match="longer than the target"):
        PoSECollator(target=8)([example(9)])
    with pytest.raises(ValueError, match=r"^there is nothing to train on: no rows$"):
        LongTrainer(bold_model(), arguments(tmp_path), [], Collator())
    rows = [{**row, "weights": [0.0] * 24} for row in rows_of(4)]
    with pytest.raises(ValueError, match="a step has no label to learn"):
        LongTrainer(bold_model(), arguments(tmp_path), rows, Collator()).train()
