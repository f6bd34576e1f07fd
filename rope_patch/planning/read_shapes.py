"""Reads the shapes of a model without weights, on torch's meta device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.errors import read_json
from rope_patch.packaged import data_path
from rope_patch.planning.shapes import Layer, Linear, Shape

# Parts of a name that do not change the shapes: Meta-Llama-3.1-8B-Instruct has those of Llama-3.1-8B.
_SAME_SHAPE = re.compile(r"^meta-|-(instruct|base|text|it|pt)$")


def shape_of(model: str | Path | PreTrainedModel | Shape) -> Shape:
    """Return the shape of a model; no weights are read.

    Args:
        model: the name of a common model whose config ships with the package (``Llama-3.1-8B``, with or without its
            organisation, in any case); or a checkpoint folder, a hub id or a GGUF file; or a model; or a shape, which
            is returned as it is.

    Raises:
        ValueError: the name is unknown, there is no such folder, or the model is not a dense decoder of attention and
            MLP.
        OSError: there is nothing that can be loaded, or no such repository.
    """
    if isinstance(model, Shape):
        return model
    if isinstance(model, PreTrainedModel):
        return _read(model, model.config.name_or_path or type(model).__name__)
    name = str(model)
    if not Path(name).exists():
        short = name.lower().rpartition("/")[2]
        while short != (stripped := _SAME_SHAPE.sub("", short)):
            short = stripped
        shipped = {path.stem.lower(): path for path in sorted((data_path("assets") / "configs").glob("*.json"))}
        values = read_json(shipped[short]) if short in shipped else {}
        if "/" not in name and not values:
            known = ", ".join(path.stem for path in shipped.values())
            raise ValueError(f"unknown model {name!r}. Give a folder, a hub id, or one of {known}")
        # With an organisation, a shipped config stands only for that organisation's model: another may have changed it.
        if values and ("/" not in name or name.partition("/")[0] == values["_name_or_path"].partition("/")[0]):
            with torch.device("meta"):
                return _read(AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)), shipped[short].stem)
    return _read(model_without_weights(name), name)


def _read(model: PreTrainedModel, name: str) -> Shape:
    parts: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    config = model.config.get_text_config()
    if head is None or not isinstance(getattr(parts, "layers", None), nn.ModuleList):
        raise ValueError(f"a plan needs a decoder with .layers and an output head, {type(model).__name__} has none")
    windows = _windows(config, len(parts.layers))
    return Shape(
        name=name,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=tuple(
            _layer(layer, config, w, type(model).__name__) for layer, w in zip(parts.layers, windows, strict=True)
        ),
        vocab=head.weight.shape[0],
        sdpa=bool(model._supports_sdpa),
        capped_logits=bool(getattr(config, "final_logit_softcapping", None)),
    )


def _windows(config: Any, layers: int) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 1


def _layer(layer: nn.Module, config: Any, window: int | None, owner: str) -> Layer:
    """Read one layer: the child with ``attn`` in its name is its attention, the one with ``mlp`` is its MLP."""
    blocks = {key: block for key, block in layer.named_children() if "attn" in key or "mlp" in key}
    inside = {key: [(n, m) for n, m in b.named_modules() if isinstance(m, nn.Linear)] for key, b in blocks.items()}
    attention = next((key for key in inside if "attn" in key), "")
    mlp = next((key for key in inside if "mlp" in key), "")
    # Experts of a mixture are stacked into tensors of three dimensions.
    stacked = any(p.ndim > 2 for p in layer.parameters())
    if not inside.get(attention) or not inside.get(mlp) or stacked:
        raise ValueError(f"a plan covers dense decoders (attention and one MLP per layer of Linear), not {owner}")
    linears = []
    for key, place in ((attention, "attention"), (mlp, "mlp")):
        last = next((n for n, _ in inside[key] if n.startswith(("o_", "out", "down"))), inside[key][-1][0])
        for n, m in inside[key]:
            where = f"{place}_out" if n == last else place
            linears.append(Linear(n, m.in_features, m.out_features, where))
    query, ffn = (next(x.inputs for x in linears if x.place == f"{place}_out") for place in ("attention", "mlp"))
    head_dim = getattr(blocks[attention], "head_dim", query // config.num_attention_heads)
    key_width = config.num_key_value_heads * head_dim
    hidden = next(x.inputs for x in linears if x.place == "attention")
    reads = {"q": query, "k": key_width, "v": key_width}
    norms = [(n.rpartition(".")[2], m.weight.numel()) for n, m in layer.named_modules() if _is_norm(m)]
    return Layer(
        hidden=hidden,
        query=query,
        key=key_width,
        heads=query // head_dim,
        ffn=ffn,
        window=window,
        norm_inputs=tuple(hidden if size == hidden else reads.get(n[0], size) for n, size in norms),
        linears=tuple(linears),
        parameters=sum(p.numel() for p in layer.parameters()),
    )
