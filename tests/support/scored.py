"""Helpers of tests of the evaluation: models with uneven attention, losses from whole logits, watched calls."""

import functools
from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

from family_models import IDS
from rope_patch.modeling.reader import Reader, losses
from support.tiny import tiny_model

CAPPED = ("gemma2", "gemma3", "gemma4")


def bold_model(family="llama", **changes):
    """A tiny model whose attention and logits are far from uniform, so that a wrong position or cap shows."""
    if family in CAPPED:
        changes = {"final_logit_softcapping": 1.5, **changes}
    return tiny_model(family, initializer_range=0.2, **changes)


@torch.no_grad()
def assert_read_as_it_is(model):
    """A reader's logits and losses are those of the model itself."""
    row = IDS[:1, :24]
    expected = model(row, labels=row, use_cache=False)
    reader = Reader(model)
    states = reader.states(row)[0]
    ours = torch.cat([reader.logits(part) for part in states.split(10)])
    assert torch.allclose(ours, expected.logits[0].float(), atol=1e-5, rtol=1e-5)
    loss = float(losses(reader, row, [1])[0, 1:].mean())
    assert loss == pytest.approx(float(expected.loss), rel=1e-5)


@torch.no_grad()
def naive(model, rows):
    """The loss of each predicted token, from whole logits: (windows, tokens - 1) [nats]."""
    logits = model(rows, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), rows[:, 1:], reduction="none")


@contextmanager
def watched(module, note):
    """Call ``note`` with the arguments of each call of a module.

    A forward hook is not used: the result cache would take the model for another one.
    """
    original = module.forward
    own = vars(module).get("forward")

    @functools.wraps(original)
    def forward(*args, **kwargs):
        note(*args, **kwargs)
        return original(*args, **kwargs)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:  # watched twice
            module.forward = own


def check_reader(model):
    """Let a reader of the model do its checks, which read a few tokens."""
    reader = Reader(model)
    if not reader.dynamic:
        reader.check("pieces")


@contextmanager
def spy(module):
    """The number of rows of each call to a layer: the product of all axes but the last."""
    rows = []
    with watched(module, lambda x: rows.append(x.shape[:-1].numel())):
        yield rows


@contextmanager
def spy_ids(model):
    """Record the token ids of each call of the embedding, but not those of a reader's checks, which come once."""
    check_reader(model)
    inputs = []
    with watched(model.get_input_embeddings(), lambda ids: inputs.append(ids.clone())):
        yield inputs


class Caches:
    """A factory of caches that keeps the caches it made."""

    def __init__(self, model):
        self.model = model
        self.made = []

    def __call__(self):
        self.made.append(DynamicCache(config=self.model.config))
        return self.made[-1]

    @property
    def read(self):
        """Number of tokens in each cache, as a full layer counts them, since sliding layers forget tokens."""
        return [cache.get_seq_length(1) for cache in self.made]
