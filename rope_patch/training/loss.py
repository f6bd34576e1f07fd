"""The loss of a causal language model without ``[tokens, vocab]`` logits, forward or backward."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rope_patch.evaluation.scoring import Reader

IGNORED = -100
"""The label of a token that is not to be predicted, as everywhere in transformers."""

SLICE = 1024
"""Tokens whose logits exist at one time."""


def token_loss(reader: Reader, hidden: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the summed cross-entropy of the tokens that follow, and how many (or how much weight) there were.

    Logits are made a slice at a time, in float32, scaled and capped as the model does; in the backward pass they are
    made again. Equal to the loss from whole logits, with the same gradients.

    Args:
        reader: the model taken apart; its head may be trained too.
        hidden: (rows, tokens, hidden), the decoder's last hidden states.
        labels: (rows, tokens); the label at a position is the token there, predicted from the state before it.
            ``IGNORED`` is predicted by nobody.
        weights: (rows, tokens) how much each label counts; 1 by default.

    Returns:
        Sum of the weighted losses [nats], and sum of the weights; both scalars on the model's device.
    """
    states = hidden[:, :-1].flatten(0, 1)
    wanted = labels[:, 1:].flatten().to(states.device)
    counts = torch.ones_like(wanted, dtype=torch.float32)
    if weights is not None:
        counts = weights[:, 1:].flatten().to(states.device, torch.float32)
    keep = wanted != IGNORED
    states, wanted, counts = states[keep], wanted[keep], counts[keep]
    total = (hidden[:, :1] * 0).sum().float()  # with nothing to learn still a loss that has a gradient
    for low in range(0, len(wanted), SLICE):
        part = slice(low, low + SLICE)
        made: Any = checkpoint(_sum, reader, states[part], wanted[part], counts[part], use_reentrant=False)
        total = total + made
    return total, counts.sum()


def _sum(reader: Reader, states: Tensor, wanted: Tensor, counts: Tensor) -> Tensor:
    logits = reader.logits(states)
    losses = torch.nn.functional.cross_entropy(logits, wanted.to(logits.device), reduction="none")
    return (losses * counts.to(losses.device)).sum().to(states.device)


def fuse(model: Any) -> Any:
    """Make a causal language model compute its training loss through :func:`token_loss`; in place, and returned.

    A forward pass with ``labels`` then returns the loss alone, no logits; ``weights`` says how much each label counts,
    ``num_items_in_batch`` what the sum is divided by (the weights of this pass by default, as Trainer's own loss does
    with counts). It is the model's own ``forward`` that changes, so DDP, FSDP and adapters around it see nothing new.
    Without ``labels`` the model is as it was.

    Args:
        model: of transformers, bare or under PEFT.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if getattr(base, "_rope_patch_fused", False):
        return model
    stock = base.forward

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        labels, weights = kwargs.pop("labels", None), kwargs.pop("weights", None)
        items = kwargs.pop("num_items_in_batch", None)
        if labels is None:
            return stock(*args, **kwargs)
        kwargs.pop("logits_to_keep", None)
        kwargs |= {"use_cache": False, "return_dict": True}
        reader = Reader(base)
        hidden = reader.decoder(*args, **kwargs).last_hidden_state
        total, count = token_loss(reader, hidden, labels, weights)
        divisor = count if items is None else torch.as_tensor(items, device=total.device)
        return {"loss": total / divisor.clamp(min=torch.finfo(torch.float32).tiny)}

    base.forward = forward
    base._rope_patch_fused = True
    return model


def unfuse(model: Any) -> None:
    """Give the model its own ``forward`` back."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.__dict__.pop("_rope_patch_fused", False):
        del base.__dict__["forward"]
