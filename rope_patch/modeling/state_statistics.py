"""The results of a capture: frozen dataclasses of tensors, which are written as plain arrays."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from rope_patch.modeling.attention_layers import split_pairs
from rope_patch.runtime.folders import write_atomically


@dataclass(frozen=True, eq=False)
class Statistics:
    """Statistics of the queries, keys or values of one layer over a text. Tensors are float64 on the CPU.

    The first and second feature of pair i are i and i + pairs, or 2 i and 2 i + 1 if ``interleaved``. Values are not
    rotated; their features are paired in the same way, as a control.

    Attributes:
        mean: (heads, head_dim) mean of each feature, those outside the table included.
        mean_norm: (heads, pairs) mean 2-norm of each pair.
        largest: (heads, head_dim) largest magnitude of each feature.
        text_norm: (heads, texts, pairs) mean 2-norm of each pair on each text.
        circular_deviation: (heads, pairs) ``sqrt(-2 ln R)``, where R is the length of the mean unit vector (Mardia &
            Jupp, *Directional Statistics*, 2000, sec. 2.3.1) [rad]; inf if the directions cancel out. Zero vectors have
            no direction and are left out.
        interleaved: whether the two features of a pair are neighbours.
    """

    mean: Tensor
    mean_norm: Tensor
    largest: Tensor
    text_norm: Tensor
    circular_deviation: Tensor
    interleaved: bool

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.mean.shape[0]

    @property
    def pairs(self) -> int:
        """Number of pairs of the table, which covers twice as many features."""
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


@dataclass(frozen=True, eq=False)
class LayerCapture:
    """The measurements of one attention layer.

    Attributes:
        index: index of the layer in the model.
        layer_type: layer type of the layer's table; None on a model with one table.
        inv_freq: (pairs,) float32 frequencies in use [rad/token].
        attention_scaling: factor on cos and sin.
        context: number of positions that a query of the layer can look back over: the context that the table in use
            reaches, as the config states it or YaRN's factor does, or the window of a sliding layer [tokens].
        scaling: factor on q·k.
        softcap: bound of the scaled logits; None if the model has none.
        keys_of: index of the layer whose keys and values this one uses; its own index on most models.
        query: statistics of the queries, by query head.
        key: statistics of the keys, by key head.
        value: statistics of the values, by key head.
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
        """Number of query heads that share a key head."""
        return self.query.heads // self.key.heads

    @property
    def key_by_query_head(self) -> Statistics:
        """Statistics of the keys, with each key head repeated for its query heads, as Jonasson counts them."""
        repeated: dict[str, Any] = {
            name: value.repeat_interleave(self.groups, 0)
            for name, value in vars(self.key).items()
            if isinstance(value, Tensor)
        }
        return replace(self.key, **repeated)


class OfLayers:
    """The results of the layers of a model: frozen dataclasses, which are written as plain arrays without pickle."""

    schema: ClassVar[int | str]
    layers: tuple[Any, ...]

    def layer(self, index: int) -> Any:
        """Return a layer by its index in the model.

        Raises:
            ValueError: the layer is not among the results.
        """
        for layer in self.layers:
            if layer.index == index:
                return layer
        raise ValueError(f"the results are of layers {[layer.index for layer in self.layers]}, got {index}")

    def to_npz(self, path: str | Path) -> None:
        """Write everything to one ``.npz``, under a temporary name that is then renamed.

        Arrays have names such as ``layer3.key.mean``; ``outline`` says what was read, and how.

        Raises:
            OSError: the folder cannot be written; nothing is left behind.
        """
        outline = {"schema": self.schema, **_plain(self)}
        write_npz(path, outline, "layers", {f"layer{layer.index}": layer for layer in self.layers})


def write_npz(
    path: str | Path,
    outline: Mapping[str, Any],
    kind: str,
    parts: Mapping[str, Any],
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Write dataclasses of tensors to one ``.npz``, see :meth:`OfLayers.to_npz`.

    Args:
        path: the file.
        outline: what else was read, and how: JSON values.
        kind: the key of the outline that lists what of the parts is no tensor.
        parts: the dataclasses by the first part of the names of their arrays.
        more: further arrays by name.
    """
    listed = {**outline, kind: [_plain(part) for part in parts.values()]}
    arrays: dict[str, Any] = {"outline": numpy.array(json.dumps(listed, allow_nan=False))}
    tensors = dict(more or {})
    for prefix, part in parts.items():
        tensors.update((name, value) for name, value in _values(part, f"{prefix}.") if isinstance(value, Tensor))
    arrays.update((name, tensor.numpy()) for name, tensor in tensors.items())
    buffer = io.BytesIO()
    numpy.savez_compressed(buffer, **arrays)
    write_atomically(path, buffer.getvalue())


def _values(result: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a dataclass and of those in it by their paths, but no layers."""
    for item in fields(result):
        value = getattr(result, item.name)
        if is_dataclass(value):
            yield from _values(value, f"{prefix}{item.name}.")
        elif item.name != "layers":
            yield f"{prefix}{item.name}", value


def _plain(result: Any) -> dict[str, Any]:
    """Return the values that are no tensors, by their names."""
    return {path.rpartition(".")[2]: value for path, value in _values(result) if not isinstance(value, Tensor)}


@dataclass(frozen=True, eq=False)
class Capture(OfLayers):
    """Statistics of a model's queries, keys and values on a text.

    Attributes:
        model: name of the model's class.
        tokens: number of tokens that were read, in all texts.
        rows: number of texts that were read.
        text: 16 hex digits that identify the token ids.
        layers: the captured layers, in order.
    """

    model: str
    tokens: int
    rows: int
    text: str
    layers: tuple[LayerCapture, ...]
    schema: ClassVar[int] = 4


def pairs_of(features: Tensor, pairs: int, interleaved: bool) -> Tensor:
    """Return features (..., head_dim) as pairs (..., pairs, 2)."""
    return torch.stack(split_pairs(features, pairs, interleaved), dim=-1)
