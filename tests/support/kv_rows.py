"""Rows of a check of the KV cache, with losses and errors by hand."""

from __future__ import annotations

import math

import torch

from rope_patch.kv_evaluation.errors import LayerErrors
from rope_patch.kv_evaluation.verdicts import CheckRow, Divergence
from support.report_pages import row as scored


def error(layer, output, logit=(1.0, 1.0), pair=None, direct=math.nan, induced=math.nan):
    """Errors of a layer of two query heads and three pairs."""
    pair = torch.ones(2, 3) if pair is None else torch.tensor(pair)
    parts = [torch.full((2,), value, dtype=torch.float64) for value in (output, direct, induced)]
    return LayerErrors(layer, torch.tensor(logit).double(), torch.ones(2).double(), pair.double(), *parts)


def by_hand(scheme, losses, hits=None, errors=(), bits=4.0, method="m"):
    divergence = None if scheme == "none" else Divergence(0.1, 0.9, 8)
    cache = dict.fromkeys((4, 8), 16.0 if scheme == "none" else bits)
    scored_row = scored(method, losses, hits)
    parts = (scored_row.scores, scored_row.tables, divergence, bits, bits, cache, tuple(errors))
    return CheckRow(method, scheme, "none", *parts)


BASE = [1.0, 1.1, 0.9, 1.05]


def off(*shifts):
    return [loss + shift for loss, shift in zip(BASE, shifts, strict=True)]
