"""The loss of a causal language model without whole ``[tokens, vocab]`` logits, forward or backward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from rope_patch.modeling.read_at_once import LOGITS_AT_ONCE
from rope_patch.modeling.scoring import Reader

IGNORED_LABEL = -100
"""Label of a token that is not predicted, as everywhere in transformers."""

# A divisor is at least this, so that a batch without labels has a loss of 0 and not NaN.
TINY = torch.finfo(torch.float32).tiny


def token_loss(
    reader: Reader,
    hidden: Tensor,
    labels: Tensor,
    *,
    shifted: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of the tokens that follow each state, and the number of these tokens.

    Logits are made a slice at a time, in float32, scaled and capped as the model does it; in the backward pass they are
    made again. The loss equals that from whole logits, with the same gradients.

    Args:
        reader: the model taken apart; its head may be trained, too.
        hidden: (rows, tokens, hidden) last hidden states of the decoder.
        labels: (rows, tokens) labels. The label at a position is the token there, which the state before it predicts.
            Tokens labelled ``IGNORED_LABEL`` are not predicted.
        shifted: whether labels are at the state that predicts them, as in a shard of longer rows, whose last state
            predicts the first token of another shard.

    Returns:
        The sum of the losses [nats], and the number of labels; both are float32 scalars on the model's device.
    """
    if not shifted:
        hidden = hidden[:, :-1]
        labels = labels[:, 1:]
    states = hidden.flatten(0, 1)
    targets = labels.flatten().to(states.device)
    keep = targets != IGNORED_LABEL
    states = states[keep]
    targets = targets[keep]

    def summed(states: Tensor) -> Tensor:
        # Without labels the loss is 0, and backward() would raise unless it has a gradient.
        total = (states[:1] * 0).sum().float()
        for low in range(0, len(targets), LOGITS_AT_ONCE):
            part = slice(low, low + LOGITS_AT_ONCE)
            total = total + checkpoint(_sum, reader, states[part], targets[part], use_reentrant=False)
        return total

    return _in_one_pass(reader, summed, states), keep.sum().float()


def _in_one_pass(reader: Reader, summed: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Sum the slices within a single forward pass of the head, if FSDP2 or ZeRO-3 shards it.

    Every pass of such a head communicates with the other devices, in the backward pass, too. With a pass for each
    slice, devices with different numbers of slices would wait for one another forever.

    Args:
        reader: the model taken apart.
        summed: function that returns the loss of states.
        states: (states, hidden) the states whose tokens are predicted.
    """
    head = reader.head
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if not (fsdp and isinstance(head, fsdp.FSDPModule)) and not hasattr(head.weight, "ds_id"):
        return summed(states)
    original = head.forward
    own = "forward" in vars(head)
    reader.call = lambda _, *args: original(*args)
    head.forward = summed
    try:
        total: Tensor = head(states)
    finally:
        del head.forward
        if own:
            head.forward = original
    return total


def _sum(reader: Reader, states: Tensor, targets: Tensor) -> Tensor:
    logits = reader.logits(states)
    return torch.nn.functional.cross_entropy(logits, targets.to(logits.device), reduction="sum").to(states.device)


def fuse(model: Any) -> Any:
    """Make a causal language model compute its training loss through :func:`token_loss`, in place, and return it.

    A forward pass with ``labels`` then returns the loss alone, without logits; the sum is divided by
    ``num_items_in_batch``, or by the number of labels if that is not given. Shards of longer rows pass
    ``shift_labels``, which were shifted before the rows were cut. The model's own ``forward`` is replaced, so that DDP,
    FSDP and adapters around it are not affected. A forward pass without labels does what it did before.

    Under a mixed precision policy FSDP2 rounds the loss that is returned.

    Args:
        model: a causal language model of transformers, bare or under PEFT.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    original = base.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = kwargs.pop("labels", None)
        ahead = kwargs.pop("shift_labels", None)
        items = kwargs.pop("num_items_in_batch", None)
        if labels is None and ahead is None:
            return original(*args, **kwargs)
        kwargs.pop("logits_to_keep", None)
        kwargs |= {"use_cache": False, "return_dict": True}
        reader = Reader(base, inside=True)
        hidden = reader.decoder(*args, **kwargs).last_hidden_state
        shifted = ahead is not None
        if shifted:
            labels = ahead
        loss, count = token_loss(reader, hidden, labels, shifted=shifted)
        if items is not None:  # the labels of a whole step of the optimizer
            count = torch.as_tensor(items, device=loss.device)
        return CausalLMOutput(loss=loss / count.clamp(min=TINY))

    base.forward = forward
    return model
