"""The shapes of a model that its memory follows from, read without weights on torch's meta device."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.runtime.errors import read_json
from rope_patch.runtime.packaged import data_path

# Parts of a name that do not change the shapes: Meta-Llama-3.1-8B-Instruct has those of Llama-3.1-8B.
_SAME_SHAPE = re.compile(r"^meta-|(-(instruct|base|text|it|pt))+$")

_OUTPUTS = {
    "o_proj": "attention_out",
    "dense": "attention_out",
    "down_proj": "mlp_out",
    "fc2": "mlp_out",
    "c_proj": "mlp_out",
}
"""The projections that read what those beside them computed, and their places: Llama's names, Phi's, StarCoder's."""


@dataclass(frozen=True)
class Linear:
    """One projection of a layer. Those with the same ``place`` read the same input."""

    name: str  # such as "q_proj"
    inputs: int
    outputs: int
    place: str  # "attention" (q, k, v), "attention_out", "mlp" (gate, up) or "mlp_out"


@dataclass(frozen=True)
class Layer:
    """One decoder layer; every width is in features per token."""

    hidden: int
    query: int  # heads x head_dim
    key: int  # KV heads x head_dim; values are as wide
    heads: int
    ffn: int
    window: int | None  # greatest number of keys that a query sees; None if it sees all before it
    norms: int  # widths of what all norms read, together
    linears: tuple[Linear, ...]  # the output projection of the MLP is the last

    @property
    def matmul_weights(self) -> int:
        """Number of entries of all projections."""
        return sum(x.inputs * x.outputs for x in self.linears)


@dataclass(frozen=True)
class Shape:
    """The numbers of a model that a plan follows from."""

    name: str
    parameters: int  # tied weights count once
    outside_layers: int  # those of embeddings, last norm and head
    kinds: dict[Layer, int]  # the different layers, each with the number of times that it occurs
    vocab: int
    hidden: int  # width of the residual stream
    sdpa: bool

    def total(self, of: Callable[[Layer], int]) -> int:
        """Return the sum of a function of a layer over all layers."""
        return sum(of(layer) * count for layer, count in self.kinds.items())


def shape_of(model: str | Path | PreTrainedModel) -> Shape:
    """Return the shape of a model; no weights are read.

    Args:
        model: the name of a common model whose config ships with the package (``Llama-3.1-8B``, with or without its
            organisation, in any case); or a checkpoint folder, a hub id or a GGUF file; or a model.

    Raises:
        ValueError: the name is unknown, there is no such folder, or the model is not a dense decoder of attention and
            MLP.
        OSError: there is nothing that can be loaded, or no such repository.
    """
    if isinstance(model, PreTrainedModel):
        return _read(model, model.config.name_or_path or type(model).__name__)
    return _read(*named_model(model))


def named_model(model: str | Path) -> tuple[PreTrainedModel, str]:
    """Return a model without weights, and its name; it is given as for :func:`shape_of`."""
    name = str(model)
    if not Path(name).exists():
        owner, _, short = name.rpartition("/")
        shipped = {path.stem.lower(): path for path in sorted((data_path("assets") / "configs").glob("*.json"))}
        path = shipped.get(_SAME_SHAPE.sub("", short.lower()))
        if path is not None:
            values = read_json(path)
            # A shipped config stands only for its organisation's model: another may have changed it.
            if owner in ("", values["_name_or_path"].partition("/")[0]):
                with torch.device("meta"):
                    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)), path.stem
        elif not owner:
            known = ", ".join(path.stem for path in shipped.values())
            raise ValueError(f"unknown model {name!r}. Give a folder, a hub id, or one of {known}")
    return model_without_weights(name), name


def _read(model: PreTrainedModel, name: str) -> Shape:
    head: Any = model.get_output_embeddings()
    layers: Any = getattr(decoder_path(model)[-1], "layers", None)
    if layers is None:
        raise ValueError(f"a plan needs a decoder with .layers, {type(model).__name__} has none")
    config = model.config.get_text_config()
    # Families without types of layers have a window in all of them, or in none.
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers)
    parameters = model.num_parameters()
    return Shape(
        name=name,
        parameters=parameters,
        outside_layers=parameters - sum(p.numel() for p in layers.parameters()),
        kinds=Counter(_layer(layer, kind, config) for layer, kind in zip(layers, types, strict=True)),
        vocab=head.weight.shape[0],
        hidden=head.weight.shape[1],
        sdpa=model._supports_sdpa,
    )


def _layer(layer: nn.Module, kind: str, config: Any) -> Layer:
    """Read one layer: the child with ``attn`` in its name is its attention, the one with ``mlp`` is its MLP."""
    linears = []
    for child, place in (("attn", "attention"), ("mlp", "mlp")):
        for path, module in layer.named_modules():
            if child in path and isinstance(module, nn.Linear):
                name = path.rpartition(".")[2]
                where = _OUTPUTS.get(name, place)
                linears.append(Linear(name, module.in_features, module.out_features, where))
    inputs = {x.place: x.inputs for x in linears}
    # Experts of a mixture are stacked into tensors of three dimensions.
    if len(inputs) < 4 or any(p.ndim > 2 for p in layer.parameters()):
        raise ValueError(
            "a plan covers dense decoders (in each layer one attention and one MLP, of Linear), not those "
            f"of {type(layer).__name__}"
        )
    query = inputs["attention_out"]
    # The projections that read the layer's input give queries, keys and values, in one tensor or in three.
    key = (sum(x.outputs for x in linears if x.place == "attention") - query) // 2
    norms = 0
    for name, p in layer.named_parameters():
        if p.ndim == 1 and name.endswith("weight"):
            # A norm of queries or keys has the weights of one head, and reads all heads.
            norms += {"q_norm": query, "k_norm": key}.get(name.split(".")[-2], p.numel())
    window = None
    if kind == "sliding_attention":
        window = getattr(config, "sliding_window", None)
    return Layer(
        hidden=inputs["attention"],
        query=query,
        key=key,
        heads=config.num_attention_heads,
        ffn=inputs["mlp_out"],
        window=window,
        norms=norms,
        linears=tuple(linears),
    )
