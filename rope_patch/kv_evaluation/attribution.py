"""Error attribution: which layers and which parts of the keys make a format unsafe, and what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rope_patch.analysis.outliers import KINDS, outlier_pairs
from rope_patch.kv_cache.formats import FORMATS
from rope_patch.kv_cache.plans import LayerPlan
from rope_patch.kv_cache.schemes import Scheme, Side
from rope_patch.kv_evaluation.check_setting import Setting
from rope_patch.modeling.attention_layers import AttentionLayer, split_pairs
from rope_patch.modeling.state_statistics import Capture
from rope_patch.runtime.captions import ranges_text
from rope_patch.runtime.number_format import number_text

NAMED_SHARE = 0.9
"""Layers are named until they have this share of the costs of all single layers, the costliest first."""
MOST_LAYERS = 4
"""Number of layers that are named at most: vLLM's TurboQuant leaves as many in full precision."""
MOST_REMEDIES = 5

Change = Callable[[LayerPlan], LayerPlan]
"""A change of how one layer is quantized."""


@dataclass(frozen=True)
class Remedy:
    """A change of a format.

    Attributes:
        name: what is changed, as text.
        offered: the program that offers it, and how it is set; "" if no program that we know of does.
        kl: KL of the whole format with this change [nats/token].
    """

    name: str
    offered: str = ""
    kl: float = math.nan


@dataclass(frozen=True)
class Attribution:
    """Where the cost of a format comes from. A cost is KL on the compared windows [nats/token].

    Attributes:
        whole: cost of the whole format.
        keys: cost of its keys alone, with values in full precision.
        layers: cost of each layer alone, with all others in full precision, by its index.
        shares: shares of the squared error of the attention logits, see :func:`error_shares`.
        remedies: the changes that were measured, the best first.
    """

    whole: float
    keys: float
    layers: Mapping[int, float]
    shares: Mapping[str, float]
    remedies: tuple[Remedy, ...] = ()

    @property
    def causes(self) -> str:
        """The parts of keys from which the error of the logits comes, with their shares, as text."""
        return ", ".join(f"{100 * share:.0f} % from {name}" for name, share in self.shares.items())

    @property
    def by_layer(self) -> str:
        """The costs of the worst layers, and that of all others together, as text."""
        worst = worst_layers(self.layers)
        parts = [f"layer {layer} {number_text(self.layers[layer], 3)}" for layer in worst]
        if others := [cost for layer, cost in self.layers.items() if layer not in worst]:
            parts.append(f"the other {len(others)} {number_text(math.fsum(others), 3)} in all")
        return ", ".join(parts)


def worst_layers(costs: Mapping[int, float]) -> tuple[int, ...]:
    """Return the fewest layers that have :data:`NAMED_SHARE` of the costs of all single layers, the costliest first.

    Args:
        costs: cost of each layer alone, by its index [nats/token].
    """
    named: list[int] = []
    missing = NAMED_SHARE * math.fsum(costs.values())
    for layer in sorted(costs, key=lambda layer: -costs[layer])[:MOST_LAYERS]:
        if missing > 0:
            named.append(layer)
        missing -= costs[layer]
    return tuple(named)


def key_offsets(layers: Sequence[AttentionLayer]) -> dict[int, Tensor]:
    """Return the biases of the keys of some layers, by layer: (heads, head_dim)."""
    biases = {layer.index: layer.parts["key"].bias for layer in layers}
    return {index: bias for index, bias in biases.items() if bias is not None}


def without_causes(layers: Sequence[AttentionLayer], capture: Capture) -> dict[str, Change]:
    """Return changes that take a possible cause out of the keys before they are rounded, each with those before it.

    They are ``"biases"``, if the model has any, and ``"outlier pairs"``: those whose mean key is an outlier
    (:func:`~rope_patch.analysis.outliers.outlier_pairs`) and that make no full turn within the context, which Jonasson
    expects.

    Args:
        layers: the attention layers of the model.
        capture: the statistics of its keys.
    """
    offsets = key_offsets(layers)
    exact = {layer.index: torch.zeros_like(layer.key.mean, dtype=torch.bool) for layer in capture.layers}
    for pair in outlier_pairs(capture):
        layer = capture.layer(pair.layer)
        if pair.kind != KINDS[0]:
            for half in split_pairs(exact[pair.layer], layer.key.pairs, layer.key.interleaved):
                half[pair.head // layer.groups, pair.pair] = True

    def biases(plan: LayerPlan) -> LayerPlan:
        return replace(plan, offset=offsets.get(plan.layer.index))

    def outliers(plan: LayerPlan) -> LayerPlan:
        return replace(biases(plan), exact=exact[plan.layer.index])

    if not offsets:
        return {"outlier pairs": outliers}
    return {"biases": biases, "outlier pairs": outliers}


def error_shares(errors: Sequence[Tensor], names: Sequence[str]) -> dict[str, float]:
    """Return the share of the squared error of all logits that goes with each cause, and that of ``"the rest"``.

    A cause is credited with what is gone if it is taken out of the keys, wherever that error lies: a long pair
    stretches the scale that it shares with others, whose error grows.

    Args:
        errors: the errors of each layer, see :func:`~rope_patch.kv_evaluation.attention_errors.attention_errors`: under
            the plan itself, and then without the causes.
        names: the names of the causes, as :func:`without_causes` returns them.
    """
    left = torch.stack([error.square().sum(1) for error in errors]).sum(0)
    if not float(left[0]) > 0:  # also true for NaN
        return {}
    gone = -left.diff(append=left.new_zeros(1)) / left[0]
    return dict(zip([*names, "the rest"], gone.tolist(), strict=True))


def remedies(
    scheme: Scheme, setting: Setting, costs: Mapping[int, float], *, of_keys: bool
) -> list[tuple[Remedy, Change]]:
    """Return the changes of a format that may help, as remedies without their KL.

    Args:
        scheme: the format.
        setting: the setting of the check.
        costs: cost of each layer alone, by its index [nats/token].
        of_keys: whether keys cost most, so that it may help to change how they are quantized.
    """
    worst = sorted(worst_layers(costs))
    flag = f"vLLM: --kv-cache-dtype-skip-layers {' '.join(map(str, worst))}"
    found = [
        (Remedy(f"the worst layers ({ranges_text(worst)}) in full precision", flag), with_sides(Side(), Side(), worst))
    ]
    if not of_keys:
        return found
    key = scheme.key
    value = scheme.value
    name = "the mean key subtracted before rounding"
    offsets = {one.index: one.key.mean for one in setting.capture.layers}
    if setting.biases:
        name = "biases subtracted before rounding"
        offsets = key_offsets(setting.layers)
    found.append((Remedy(name), lambda plan: replace(plan, offset=offsets.get(plan.layer.index))))
    if key.axis == "token":
        bits = min((8, 4, 3, 2), key=lambda bits: abs(bits - FORMATS[key.format].bits))
        side = Side(f"int{bits}", "channel", 32, key.pre, rope=key.rope)
        offered = ""
        if bits in (2, 4):
            offered = "KIVI’s code; transformers: QuantizedCache, quanto, axis_key=-1"
        found.append((Remedy(f"a scale per channel of keys ({side})", offered), with_sides(side, value)))
        if not key.hadamard:
            rotated = Remedy("features of keys rotated (hadamard)", "llama.cpp and vLLM’s TurboQuant, in their formats")
            found.append((rotated, with_sides(replace(key, hadamard=1), value)))
    if key.format == "fp8":
        scaled = replace(key, format="fp8-scaled")
        by_head = Remedy("a scale per token and head", "vLLM on a GPU: --kv-cache-dtype fp8_per_token_head")
        found.append((by_head, with_sides(scaled, scaled if value == key else value)))
    return found


def with_sides(key: Side, value: Side, layers: Collection[int] | None = None) -> Change:
    """Return the change to other sides, in some layers or in all; layers in full precision stay so."""

    def change(plan: LayerPlan) -> LayerPlan:
        other = layers is not None and plan.layer.keys_of not in layers
        if other or set(plan.sides.values()) == {Side()}:
            return plan
        return replace(plan, sides={"keys": key, "values": value})

    return change
