"""Layers that share a rotary table and a context: figures over pairs need a panel for each kind."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rope_patch.modeling.state_statistics import Capture, LayerCapture
from rope_patch.runtime.captions import ranges_text


@dataclass(frozen=True)
class Kind:
    """Layers that share one table and one context.

    Attributes:
        name: the name of the kind; empty where all layers are of one kind.
        layers: the layers of the kind.
    """

    name: str
    layers: tuple[LayerCapture, ...]

    @property
    def inv_freq(self) -> Tensor:
        """Table of these layers: (pairs,) [rad/token]."""
        return self.layers[0].inv_freq

    @property
    def context(self) -> int:
        """Distances of their bounds [tokens]."""
        return self.layers[0].context

    @property
    def rows(self) -> list[str]:
        """Their indices as text."""
        return [str(layer.index) for layer in self.layers]


def kinds(capture: Capture) -> list[Kind]:
    """Return the layers grouped by table and context: those of a group share an axis of wavelengths and a bound."""
    groups: dict[tuple[object, ...], list[LayerCapture]] = {}
    for layer in capture.layers:
        groups.setdefault((layer.context, layer.query.mean.shape[1], *layer.inv_freq.tolist()), []).append(layer)
    grouped = []
    for layers in groups.values():
        name = ""
        if len(groups) > 1:
            types = " and ".join(dict.fromkeys(layer.layer_type for layer in layers if layer.layer_type))
            label = types or f"layers {ranges_text([layer.index for layer in layers])}"
            name = f"{label}, {layers[0].context} tokens"
        grouped.append(Kind(name, tuple(layers)))
    return grouped
