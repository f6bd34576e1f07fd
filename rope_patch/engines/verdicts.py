"""What a program was seen to do with a config, in a few words: whether tables, windows and layers are its own."""

from __future__ import annotations

from collections.abc import Mapping

from rope_patch import frequencies
from rope_patch.engines.asking import AskedLayer, EngineAnswer
from rope_patch.tables import RotaryTable

SAME = "same"
REFUSES = "refuses"
UNSEEN = "unseen"
PLAIN = "plain"
DEFAULT_BASE = "default base"
FACTOR = "attention factor"
PAIRS = "pairs"
OTHER = "other table"
DROPPED = "no window"
WINDOW = "other window"
MOVED = "other layers"
OTHER_TABLES = (PLAIN, DEFAULT_BASE, FACTOR, PAIRS, OTHER)
"""What is seen of a program that computes another table, and not only in other layers."""
SENTENCES = {
    PLAIN: "it computes plain RoPE",
    DEFAULT_BASE: "it computes plain RoPE over a base of its own, not that of the config",
    FACTOR: "it computes the same frequencies with another attention factor",
    PAIRS: "it rotates another number of pairs of features",
    OTHER: "it computes other frequencies",
    DROPPED: "it knows no sliding window here, and attends to the whole context",
    WINDOW: "it attends within another window",
    MOVED: "it gives the tables and windows of these layers to other ones, and does not read layer_types",
}
"""The sentences by what was seen."""


def verdict_of(answer: EngineAnswer, own: EngineAnswer, tables: Mapping[str | None, RotaryTable]) -> dict[str, str]:
    """Return what a program does otherwise than transformers 5, by layer type.

    Args:
        answer: the answer of the program.
        own: the answer of transformers 5.
        tables: the tables of the config by layer type.

    Returns:
        ``SAME``, ``REFUSES`` with the program's error, or another key of :data:`SENTENCES`, by layer type; a layer type
        of "" is that of all layers. Empty if nothing was learned.
    """
    if answer.unread or own.unread or own.error or (not answer.error and len(answer.layers) != len(own.layers)):
        return {}
    answer, own = answer.within(own.context), own.within(own.context)
    if answer.error:
        return dict.fromkeys((kind or "" for kind in tables), f"{REFUSES}: {answer.error}")
    found: dict[str, str] = {}
    for kind, table in tables.items():
        meant = AskedLayer(frequencies.zero_unrotated(table.inv_freq), table.attention_scaling, None)
        places = [index for index, layer in enumerate(own.layers) if layer.inv_freq is None or layer.same_table(meant)]
        if all(own.layers[index].inv_freq is None for index in places):
            return {}  # it was not seen where transformers itself uses the table
        pairs = [(answer.layers[index], own.layers[index]) for index in places]
        seen = [_difference(theirs, ours, own, table) for theirs, ours in pairs]
        found[kind or ""] = next((one for one in seen if one not in (SAME, UNSEEN)), UNSEEN if UNSEEN in seen else SAME)
        # A layer that rotates nothing may hold a rotary module that it never calls.
        if found[kind or ""] == UNSEEN:
            return {}
    return found


def _difference(theirs: AskedLayer, ours: AskedLayer, own: EngineAnswer, table: RotaryTable) -> str:
    if ours.inv_freq is None and theirs.inv_freq is not None:
        return UNSEEN
    if theirs.same_table(ours):
        if theirs.window == ours.window:
            return SAME
        return DROPPED if theirs.window is None else WINDOW
    if any(theirs.same_table(layer) and theirs.window == layer.window for layer in own.layers):
        return MOVED
    if theirs.inv_freq is None or ours.inv_freq is None or len(theirs.inv_freq) != len(ours.inv_freq):
        return PAIRS
    if AskedLayer(theirs.inv_freq, ours.attention_scaling, None).same_table(ours):
        return FACTOR
    pairs = len(theirs.inv_freq)
    if pairs < 2 or theirs.inv_freq[-1] == 0:
        return OTHER
    base = float(theirs.inv_freq[-1].double() ** (-pairs / (pairs - 1)))
    if not theirs.same_table(AskedLayer(frequencies.geometric(base, 2 * pairs), 1.0, None)):
        return OTHER
    if abs(base / table.rope_theta - 1) < 1e-3:
        return PLAIN
    return DEFAULT_BASE
