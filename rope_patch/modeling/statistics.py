"""What a capture holds: frozen records of tensors, written as plain arrays."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from rope_patch.modeling.attention_layers import split_pairs
from rope_patch.modeling.attention_probe import ROLES
from rope_patch.runtime.folders import write_atomically

SCHEMA = 2


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the queries, keys or values of one layer over a text. Tensors are float64 on the CPU.

    ``first`` and ``second`` feature of pair i are i and i + pairs, or 2 i and 2 i + 1 when ``interleaved``. Values do
    not rotate; theirs are paired in the same way, as a control.

    Attributes:
        mean: (heads, head_dim) mean of each feature, unrotated ones included.
        mean_norm: (heads, pairs) mean 2-norm of each pair.
        circular_deviation: (heads, pairs) ``sqrt(-2 ln R)``, R the length of the mean unit vector (Mardia & Jupp,
            *Directional Statistics*, 2000, sec. 2.3.1) [rad]; inf where the directions cancel out. Zero vectors have no
            direction and are left out.
        interleaved: layout of the pairs.
    """

    mean: Tensor
    mean_norm: Tensor
    circular_deviation: Tensor
    interleaved: bool

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.mean.shape[0]

    @property
    def pairs(self) -> int:
        """Number of pairs; twice as many features are covered by the table."""
        return self.mean_norm.shape[1]

    @property
    def mean_pairs(self) -> Tensor:
        """Mean vector of each pair: (heads, pairs, 2)."""
        return pairs_of(self.mean, self.pairs, self.interleaved)

    @property
    def radius(self) -> Tensor:
        """Length of the mean vector of each pair: (heads, pairs)."""
        radius: Tensor = torch.linalg.vector_norm(self.mean_pairs, dim=-1)
        return radius

    @property
    def unrotated(self) -> Tensor:
        """Mean of the features behind the table (partial rotary): (heads, head_dim - 2 pairs)."""
        return self.mean[:, 2 * self.pairs :]

    def repeated(self, groups: int) -> Statistics:
        """Return the statistics with each head ``groups`` times: those of key heads, by query head."""
        if groups == 1:
            return self
        repeated = {name: getattr(self, name).repeat_interleave(groups, dim=0) for name in _ARRAYS}
        return Statistics(**repeated, interleaved=self.interleaved)


@dataclass(frozen=True, eq=False)
class LayerCapture:
    """What was measured in one attention layer.

    Attributes:
        index: of the layer.
        layer_type: of its table; None on models with one table.
        inv_freq: (pairs,) float32, the table in use [rad/token].
        attention_scaling: factor on cos and sin.
        context: positions a query of the layer can look back over: the context the config states, or the window of a
            sliding layer [tokens].
        scaling: factor on q·k.
        softcap: of the scaled logits, where the model has one.
        keys_of: the layer whose keys and values it uses; its own index on most models.
        query: statistics by query head.
        key: by key head.
        value: by key head.
    """

    index: int
    layer_type: str | None
    inv_freq: Tensor
    attention_scaling: float
    context: int
    scaling: float
    softcap: float | None
    keys_of: int
    query: Statistics
    key: Statistics
    value: Statistics

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.query.heads // self.key.heads

    @property
    def key_by_query_head(self) -> Statistics:
        """Statistics of the keys with each key head repeated for the query heads it serves, as Jonasson counts them."""
        return self.key.repeated(self.groups)


@dataclass(frozen=True, eq=False)
class Capture:
    """Statistics of a model's queries, keys and values on a text.

    Attributes:
        model: class name.
        tokens: read in all.
        rows: texts read.
        text: 16 hex digits that identify the token ids.
        chunk: tokens per forward pass; 0 when each text was read at once.
        layers: those captured, in order.
        schema: version of this layout.
    """

    model: str
    tokens: int
    rows: int
    text: str
    chunk: int
    layers: tuple[LayerCapture, ...]
    schema: int = SCHEMA

    def layer(self, index: int) -> LayerCapture:
        """Return a layer by its index in the model.

        Raises:
            ValueError: a layer that was not captured.
        """
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise ValueError(f"layers {[layer.index for layer in self.layers]} were captured, got {index}")

    def to_npz(self, path: str | Path) -> None:
        """Write everything to one ``.npz`` of plain arrays, no pickle in it, and rename it into place.

        ``layer3.key.mean`` and the like; ``outline`` says what was read and how.

        Raises:
            OSError: the folder cannot be written; nothing is left behind.
        """
        arrays: dict[str, Tensor] = {}
        for layer in self.layers:
            arrays[f"layer{layer.index}.inv_freq"] = layer.inv_freq
            for role in ROLES:
                statistics = getattr(layer, role)
                for name in _ARRAYS:
                    arrays[f"layer{layer.index}.{role}.{name}"] = getattr(statistics, name)
        write_arrays(path, self._outline(), arrays)

    @classmethod
    def from_npz(cls, path: str | Path) -> Capture:
        """Read what :meth:`to_npz` wrote.

        Raises:
            ValueError: a file of another kind or version.
        """
        outline, arrays = read_arrays(path, SCHEMA)
        layers = []
        for item in outline.pop("layers"):
            at = f"layer{item['index']}"
            interleaved = item.pop("interleaved")
            for role in ROLES:
                loaded = {name: arrays[f"{at}.{role}.{name}"] for name in _ARRAYS}
                item[role] = Statistics(**loaded, interleaved=interleaved)
            layers.append(LayerCapture(**item, inv_freq=arrays[f"{at}.inv_freq"]))
        return cls(**outline, layers=tuple(layers), schema=SCHEMA)

    def _outline(self) -> dict[str, Any]:
        names = ("index", "layer_type", "attention_scaling", "context", "scaling", "softcap", "keys_of")
        return {
            **{name: getattr(self, name) for name in ("schema", "model", "tokens", "rows", "text", "chunk")},
            "layers": [
                {**{name: getattr(layer, name) for name in names}, "interleaved": layer.query.interleaved}
                for layer in self.layers
            ],
        }


_ARRAYS = tuple(item.name for item in fields(Statistics) if item.name != "interleaved")


def write_arrays(path: str | Path, outline: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> None:
    """Write tensors and what they are of to one ``.npz``, no pickle in it, and rename it into place.

    Raises:
        OSError: the folder cannot be written; nothing is left behind.
    """
    buffer = io.BytesIO()
    plain: dict[str, Any] = {name: tensor.numpy() for name, tensor in arrays.items()}
    numpy.savez_compressed(buffer, outline=numpy.array(json.dumps(outline, allow_nan=False)), **plain)
    write_atomically(path, buffer.getvalue())


def read_arrays(path: str | Path, schema: int | str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read what :func:`write_arrays` wrote: the outline, less its schema, and the tensors.

    Raises:
        ValueError: a file of another kind or version.
    """
    with numpy.load(path, allow_pickle=False) as arrays:
        outline = json.loads(str(arrays["outline"])) if "outline" in arrays else {}
        stated = outline.pop("schema", None)
        if stated != schema:
            raise ValueError(f"{path} holds no results of schema {schema}, got schema {stated}")
        return outline, {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "outline"}


def pairs_of(features: Tensor, pairs: int, interleaved: bool) -> Tensor:
    """Return features (..., head_dim) as pairs (..., pairs, 2)."""
    return torch.stack(split_pairs(features, pairs, interleaved), dim=-1)
