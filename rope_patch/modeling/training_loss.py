"""The loss of a causal language model without whole ``[tokens, vocab]`` logits, forward or backward."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import CausalLMOutput

from rope_patch.modeling.after_decoder import DecoderOutput, modules_return
from rope_patch.modeling.read_at_once import LOGITS_AT_ONCE
from rope_patch.modeling.reader import CHECKED_TOKENS, Reader, fixed_ids, weights_at_hand
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.patching.locate import base_of

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
    slice, devices with different numbers of slices would wait for one another forever. So a module without hooks stands
    in the head's place for each slice.

    Args:
        reader: the model taken apart.
        summed: function that returns the loss of states.
        states: (states, hidden) the states whose tokens are predicted.
    """
    head = reader.head
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if not (fsdp and isinstance(head, fsdp.FSDPModule)) and not hasattr(head.weight, "ds_id"):
        return summed(states)
    holder, name = next((m, n) for m in reader.model.modules() for n, child in m.named_children() if child is head)
    original = head.forward
    own = "forward" in vars(head)
    bare = nn.Module()
    bare.forward = original
    forward = reader.forward

    def with_bare_head(*args: Any, **kwargs: Any) -> Any:
        setattr(holder, name, bare)
        try:
            return forward(*args, **kwargs)
        finally:
            setattr(holder, name, head)

    reader.forward = with_bare_head
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
    ``num_items_in_batch``, or by the number of labels if that is not given. What the model itself adds, such as the
    auxiliary loss of a router, its own forward pass computes. Shards of longer rows pass ``shift_labels``, which were
    shifted before the rows were cut. The model's own ``forward`` is replaced, so that DDP, FSDP and adapters around it
    are not affected. A forward pass without labels does what it did before.

    Under a mixed precision policy FSDP2 rounds the loss that is returned.

    Args:
        model: a causal language model of transformers, bare or under PEFT.

    Raises:
        ValueError: on a few tokens the loss differs from the model's own.
    """
    base: Any = base_of(model)
    original = base.forward
    adds_own = False

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels = kwargs.pop("labels", None)
        ahead = kwargs.pop("shift_labels", None)
        items = kwargs.pop("num_items_in_batch", None)
        if labels is None and ahead is None:
            return original(*args, **kwargs)
        kwargs.pop("logits_to_keep", None)
        kwargs |= {"use_cache": False, "return_dict": True}
        reader = Reader(base, forward=original)
        output = reader.decoder(*args, **kwargs)
        shifted = ahead is not None
        if shifted:
            labels = ahead
        loss, count = token_loss(reader, output[0], labels, shifted=shifted)
        if items is not None:  # the labels of a whole step of the optimizer
            count = torch.as_tensor(items, device=loss.device)
        loss = loss / count.clamp(min=TINY)
        if adds_own:
            loss = loss + _own_terms(reader, output, args, kwargs)
        return CausalLMOutput(loss=loss)

    if weights_at_hand(base):
        reader = Reader(base)
        # CPM-Ant embeds tokens that it never predicts.
        predicted = base.config.get_text_config().vocab_size
        ids = fixed_ids(CHECKED_TOKENS, min(reader.vocabulary, predicted)).to(reader.device)
        with torch.no_grad(), in_eval_mode(base):
            own = float(original(input_ids=ids, labels=ids, use_cache=False).loss)
            output = reader.decoder(input_ids=ids, use_cache=False)
            adds_own = abs(float(_own_terms(reader, output, (), {"input_ids": ids}))) > 0
            ours = float(forward(input_ids=ids, labels=ids).loss)
        if abs(ours - own) > 1e-3 * abs(own):
            raise ValueError(f"{type(base).__name__} has a loss of its own: {own:.4f} on a few tokens, not {ours:.4f}")
    base.forward = forward
    return model


def _own_terms(reader: Reader, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return what a model adds to the cross-entropy of its tokens: its own loss, without any token to predict.

    Args:
        reader: the model taken apart.
        output: the real output of its decoder.
        args: the positional arguments of the forward pass.
        kwargs: its keyword arguments.
    """
    hidden = output[0][:, :1]
    nothing = torch.full(hidden.shape[:2], IGNORED_LABEL, device=hidden.device)
    with modules_return(reader.path, DecoderOutput(hidden, output)):
        loss: Tensor = reader.forward(*args, **kwargs, labels=nothing, num_items_in_batch=1).loss
    return loss
