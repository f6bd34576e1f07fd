"""The argument in which a forward pass takes its cache: ``past_key_values``, or ``cache`` from transformers 5.24 on."""

from __future__ import annotations

import inspect

from torch import nn

CACHE_ARGUMENTS = ("past_key_values", "cache")


def cache_argument(decoder: nn.Module) -> str:
    """Return the name under which a decoder, and ``generate`` of its model, takes a cache without a warning."""
    # Of the class, because a hook of accelerate replaces the forward pass of the instance.
    known = inspect.signature(type(decoder).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in known), CACHE_ARGUMENTS[0])
