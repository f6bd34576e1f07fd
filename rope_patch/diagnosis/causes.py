"""Infer from the numbers of a rotary module why it computes another table than it should."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.patching.record import PatchRecord
from rope_patch.patching.verify import Measured
from rope_patch.tables import RotaryTable

RELOAD = "load the model again with from_pretrained"
"""The fix for a table in memory, if the folder that the model came from is whole."""


_NEVER_FILLED = (
    "these numbers are no rotary table: the memory of inv_freq was probably never filled, as after to_empty() or on a "
    "model that was built on the meta device, because inv_freq is not in the weights file",
    f"{RELOAD}, or after to_empty() compute the buffer again: rebuild the rotary module from the config",
)


def cause(
    measured: Measured, table: RotaryTable, record: PatchRecord | None, others: Mapping[str | None, RotaryTable]
) -> tuple[str, str]:
    """Return two sentences: what a wrong table probably is, and what to do.

    The order of the tests matters: a cause that explains every number comes before one that explains some of them.

    Args:
        measured: the measurement of the module.
        table: the table that the module should compute.
        record: the patch record; None on a model that is not patched.
        others: the tables of all layer types, with which this one may have been exchanged.
    """
    found = measured.inv_freq
    scaling = measured.attention_scaling
    if found is None or scaling is None:
        return "the module is not the one that this config describes", RELOAD
    expected = table.inv_freq
    if _same(found, expected):
        if math.isclose(scaling, measured.expected.attention_scaling, rel_tol=1e-4):
            return (
                "the frequencies and the attention factor are right at position 1, and angles further on are not: "
                "positions are rounded, clamped or shifted before they reach the table",
                RELOAD,
            )
        return (
            f"the frequencies are right, but cos and sin are multiplied by {scaling:.6g} and not by "
            f"{measured.expected.attention_scaling:.6g}: attention logits are off by a factor of "
            f"{(scaling / measured.expected.attention_scaling) ** 2:.4g}",
            f"{RELOAD}; the attention factor is computed when the rotary module is built",
        )
    for dtype in (torch.bfloat16, torch.float16):
        # The angle at position 1 is only known to float32, which bfloat16's steps of .4 % stand far above.
        if _same(found, expected.to(dtype).float()):
            name = str(dtype).removeprefix("torch.")
            return (
                f"the buffer inv_freq was rounded to {name}, by model.to(torch.{name}), .half() or .bfloat16(): the "
                "error of the angle grows with the position",
                f"load with from_pretrained(..., dtype=torch.{name}), which keeps inv_freq in float32; a patched model "
                "(rope_patch.apply) is safe from casts",
            )
    if record is not None and _same(found, frequencies.table_of(record.base_tables[measured.key].inv_freq)):
        return (
            "the patch is lost: the module computes the table from before the patch",
            f"rope_patch.apply(model, {str(record.to_method())!r}, replace=True), or load the patched folder again",
        )
    for kind, other in others.items():
        if other is not table and _same(found, other.inv_freq):
            return f"it is the table of the {kind} layers", f"{RELOAD}, with rope_parameters of the right layer types"
    known = plain(found, table)
    if known is not None:
        return known
    # Frequencies are finite, from 0 to 1, and not all zero; no comparison holds for NaN.
    limit = frequencies.UNROTATED
    if not bool(((found > -limit) & (found < 1.001)).all() & (found.abs() > limit).any()):
        return _NEVER_FILLED
    differing = torch.isclose(found, expected, rtol=1e-5, atol=frequencies.UNROTATED).logical_not()
    pair = int(differing.nonzero()[0])
    return f"it is another table, which differs first at pair {pair}", RELOAD


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=frequencies.UNROTATED)


def plain(found: Tensor, table: RotaryTable) -> tuple[str, str] | None:
    """Return two sentences if a table is plain RoPE of some base, on what that means and what to do; otherwise None."""
    rates = found.double()
    # Plain RoPE of any base begins with 1 rad/token, and its second pair tells the base.
    if len(rates) < 2 or float(rates[1]) <= 0 or float((rates[0] - 1).abs()) > 1e-4:
        return None
    theta = float(torch.exp(-torch.log(rates[1]) * len(rates)))
    if not math.isfinite(theta) or not torch.allclose(found, frequencies.geometric(theta, 2 * len(rates)), rtol=1e-3):
        return None
    if abs(theta / table.rope_theta - 1) > 1e-3:
        return (
            f"it is plain RoPE with a base (rope_theta) of {theta:.6g}, and the config states {table.rope_theta:g}: "
            "the config was edited after the model was built, or its base was lost on the way",
            "set rope_theta before the model is built, or load the model again",
        )
    return (
        f"it is plain RoPE: the scaling that the config states ({table.rope_type}) is not applied",
        f"set rope_parameters before the model is built, as from_pretrained(..., config=config) does; or {RELOAD}",
    )
