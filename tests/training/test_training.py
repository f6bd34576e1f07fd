"""Training: the loss from slices against whole logits, packing without loss, positions and masks that stay causal."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scored import CAPPED, bold_model, spy
from support.tiny import ARCHITECTURES, ids
from transformers import Trainer, TrainingArguments

from rope_patch.modeling import training_loss as loss_module
from rope_patch.modeling.positions import skipped_positions
from rope_patch.modeling.training_loss import IGNORED_LABEL, fuse
from rope_patch.training.pack_rows import pack
from rope_patch.training.trainer import LongTrainer

# --- the loss


def naive(model, rows, labels):
    logits = model(rows, use_cache=False).logits[:, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    return losses.sum() / (labels[:, 1:] != IGNORED_LABEL).sum()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_loss_and_its_gradients_are_those_of_whole_logits(family, monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 16)
    model = bold_model(family)
    rows = ids(40, batch=3)
    labels = rows.clone()
    labels[0, :7] = IGNORED_LABEL
    labels[2, 30:] = IGNORED_LABEL
    expected = naive(model, rows, labels)
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with spy(model.lm_head) as states:
        loss = fuse(model)(rows, labels=labels)["loss"]
        loss.backward()
    assert max(states) <= 16, "no more than a slice of logits, backward too"
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(dict(model.named_parameters())[name].grad, gradient, atol=1e-5), name
    assert model(rows, use_cache=False).logits.shape == (3, 40, 96), "without labels, logits as before"


@pytest.mark.parametrize("family", ["llama", *CAPPED])
def test_it_is_the_stock_loss_with_the_stock_divisor(family):
    model = bold_model(family)
    rows = ids(30)
    stock = model(rows, labels=rows, use_cache=False).loss
    halved = model(rows, labels=rows, use_cache=False, num_items_in_batch=torch.tensor(2 * 2 * 29)).loss
    fuse(model)
    assert model(rows, labels=rows)["loss"].item() == pytest.approx(stock.item(), abs=1e-6)
    assert model(rows, labels=rows, num_items_in_batch=116)["loss"].item() == pytest.approx(halved.item(), abs=1e-6)


def test_a_row_with_nothing_to_learn_is_no_nan():
    model = bold_model()
    rows = ids(8)
    nothing = torch.full_like(rows, IGNORED_LABEL)
    for items in (None, 7, torch.tensor(7)):
        loss = fuse(model)(rows, labels=nothing, num_items_in_batch=items, return_dict=False)["loss"]
        loss.backward()
        assert loss.item() == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


# --- packing


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), length=st.integers(2, 16), apart=st.booleans())
def test_packing_loses_no_token_and_says_where_documents_begin(sizes, length, apart):
    counter = itertools.count()
    documents = [[next(counter) for _ in range(size)] for size in sizes]
    rows = list(pack(((ids, ids) for ids in documents), length, apart=apart))
    begins = set(itertools.accumulate([0, *sizes]))
    assert len(rows) == sum(sizes) // length
    for index, row in enumerate(rows):
        tokens = list(range(index * length, (index + 1) * length))
        assert row["input_ids"] == tokens
        expected = 0
        for token, position, label in zip(tokens, row["position_ids"], row["labels"], strict=True):
            if apart and token in begins:
                expected = 0
            assert position == expected and label == (IGNORED_LABEL if position == 0 else token)
            expected += 1


# --- positions and masks, as Trainer runs them: no cache, position_ids given


@torch.no_grad()
def run(model, batch):
    return model(**batch, use_cache=False).logits


@torch.no_grad()
def explicit(model, batch, allowed):
    """Logits under a mask written out: allowed (tokens, tokens), true where the row may look."""
    mask = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
    return run(model, batch | {"attention_mask": mask})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_skipped_positions_keep_plain_causal_attention(attention):
    model = bold_model(attention=attention)
    rows = ids(24, batch=1, seed=3)
    positions = skipped_positions(random.Random(3), 24, 64, 3)[None]
    batch = {"input_ids": rows, "position_ids": positions, "attention_mask": torch.ones_like(rows)}
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    assert torch.allclose(run(model, batch), explicit(model, batch, causal), atol=1e-4)
    unmasked = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
    assert not torch.allclose(run(model, unmasked), run(model, batch), atol=1e-3), "the row would fall apart"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(attention):
    model = bold_model(attention=attention)
    tokens = ids(24, batch=1)
    documents = [tokens[0, a:b].tolist() for a, b in ((0, 5), (5, 17), (17, 24))]
    (row,) = pack(((document, document) for document in documents), 24, apart=True)
    batch = {name: torch.tensor([row[name]]) for name in ("input_ids", "position_ids")}
    segment = torch.tensor([0] * 5 + [1] * 12 + [2] * 7)
    allowed = torch.ones(24, 24, dtype=torch.bool).tril() & (segment[:, None] == segment)
    assert torch.allclose(run(model, batch), explicit(model, batch, allowed), atol=1e-4)


# --- the trainer


def rows_of(count, size=24):
    return [{"input_ids": row, "labels": row} for row in (ids(size, batch=1, seed=i)[0] for i in range(count))]


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
    )
    stock.train()
    ours = LongTrainer(bold_model(), arguments(tmp_path), rows)
    ours.train()
    assert losses_of(ours) == pytest.approx(losses_of(stock), abs=1e-5)
    for (name, mine), theirs in zip(ours.model.named_parameters(), stock.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-4), name


def test_labels_count_over_the_whole_step(tmp_path):
    """Two passes with unequal numbers of labels make one step: the mean is over the labels of both."""
    rows = rows_of(4)
    for number, learned in ((0, 4), (3, 1)):
        labels = torch.full((24,), IGNORED_LABEL)
        labels[-learned:] = rows[number]["input_ids"][-learned:]
        rows[number] = {**rows[number], "labels": labels}
    model = bold_model()
    with torch.no_grad():
        batch = {name: torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")}
        expected = naive(model, batch["input_ids"], batch["labels"])
    trainer = LongTrainer(model, arguments(tmp_path, max_steps=1), rows)
    trainer.train()
    assert losses_of(trainer) == pytest.approx([float(expected)], abs=1e-4)
