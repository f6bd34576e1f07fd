"""Rows of a check of the KV cache whose losses and errors are written by hand."""

import torch

from rope_patch.kv_evaluation.attribution import Attribution, Remedy
from rope_patch.kv_evaluation.verdicts import CheckRow, Divergence
from support.report_pages import row as scored

COST = Attribution(
    whole=0.5,
    keys=0.4,
    layers={0: 0.1, 1: 0.3, 2: 0.2},
    shares={"biases": 0.75, "outlier pairs": 0.05, "the rest": 0.2},
    remedies=(Remedy("rotated keys", "an engine", 0.02), Remedy("another", "", 0.3)),
)


def error(*logit):
    """Errors of a layer: a row for its plan and for each changed plan, a column for each query head."""
    return torch.tensor(logit).double()


def by_hand(name, losses, hits=None, bits=4.0, kl=0.001):
    divergences = {} if name == "none" else {4: Divergence(kl, 0.9, 4), 8: Divergence(kl, 0.9, 8)}
    cache = dict.fromkeys((4, 8), 16.0 if name == "none" else bits)
    row = scored("m", losses, hits)
    return CheckRow("m", name, "none", row.scores, row.tables, divergences, bits, bits, cache, COST)


BASE = [1.0, 1.1, 0.9, 1.05]


def off(*shifts):
    return [loss + shift for loss, shift in zip(BASE, shifts, strict=True)]
