"""The shapes that memory and time follow from, read off a model on the meta device."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rope_patch.checkpoints.offline import skeleton
from rope_patch.packaged import data_path
from rope_patch.words import did_you_mean

_SAME_SHAPE = re.compile(r"^meta-|-(instruct|base|text|it|pt)$")


@dataclass(frozen=True)
class Linear:
    """One projection of a layer. ``place`` says what its input is shared with."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    place: str  # "attention" (q, k, v), "attention_out", "mlp" (gate, up) or "mlp_out"

    @property
    def weight(self) -> int:
        """Entries of the weight."""
        return self.inputs * self.outputs


@dataclass(frozen=True)
class Layer:
    """One decoder layer; every width in features per token."""

    hidden: int
    query: int  # heads x head_dim
    key: int  # KV heads x head_dim; values are as wide
    heads: int
    ffn: int
    window: int | None  # keys a query sees at most; None for all before it
    norm_inputs: tuple[int, ...]  # what each norm reads
    norm_weights: int
    linears: tuple[Linear, ...]
    parameters: int

    @cached_property
    def matmul_weights(self) -> int:
        """Entries of all projections."""
        return sum(linear.weight for linear in self.linears)


@dataclass(frozen=True)
class Shape:
    """What a plan needs to know of a model."""

    name: str
    model_class: str
    parameters: int  # tied weights once
    layers: tuple[Layer, ...]
    embedding: int  # entries of the token embedding
    head: int  # entries of the output projection
    tied: bool
    vocab: int
    norm_weights: int  # of all norms, the last one too
    norms_in_float32: bool  # Gemma's norms multiply by their weight before they round, others after
    sdpa: bool
    capped_attention: bool  # tanh on attention scores
    capped_logits: bool

    @property
    def hidden(self) -> int:
        """Width of the residual stream [features]."""
        return self.layers[0].hidden

    @cached_property
    def kinds(self) -> dict[Layer, int]:
        """The different layers, and how many there are of each."""
        return dict(Counter(self.layers))

    def total(self, of: Callable[[Layer], float]) -> float:
        """Return the sum of something over the layers."""
        return sum(of(layer) * count for layer, count in self.kinds.items())

    @classmethod
    def of(cls, model: str | Path | PreTrainedModel) -> Shape:
        """Read the shapes of a model.

        Args:
            model: a shipped name (``Llama-3.1-8B``, with or without its organisation, in any case), a checkpoint
                folder, a hub id, or a model; only the config of the first three is read.

        Raises:
            ValueError: unknown name, or not a dense decoder of attention and MLP.
            OSError: nothing to load there.
        """
        if isinstance(model, PreTrainedModel):
            return _read(model, model.config.name_or_path or type(model).__name__)
        found = _shipped_as(str(model))
        if found is None:
            return _read(_from_outside(model), str(model))
        config = AutoConfig.for_model(**json.loads(found.read_text(encoding="utf-8")))
        with torch.device("meta"):
            return _read(AutoModelForCausalLM.from_config(config), found.stem)


def shipped() -> dict[str, Path]:
    """Return the models whose configs (shapes only) ship with the package, by name."""
    paths = (data_path("assets") / "configs").glob("*.json")
    return {path.stem: path for path in sorted(paths, key=lambda path: path.stem.lower())}


def _shipped_as(name: str) -> Path | None:
    if Path(name).is_dir():
        return None
    organisation, _, short = name.lower().rpartition("/")
    while short != (stripped := _SAME_SHAPE.sub("", short)):
        short = stripped
    for stem, path in shipped().items():
        home = json.loads(path.read_text(encoding="utf-8"))["_name_or_path"].lower().partition("/")[0]
        if stem.lower() == short and organisation in ("", home):
            return path
    return None


def _from_outside(name: str | Path) -> PreTrainedModel:
    known = {stem.lower(): stem for stem in shipped()}
    hint = did_you_mean(str(name).rpartition("/")[2].lower(), known)
    hint = re.sub(r"'(.+)'", lambda near: repr(known[near[1]]), hint)
    if not Path(name).is_dir() and "/" not in str(name):
        raise ValueError(
            f"unknown model {str(name)!r}.{hint} Give a folder, a hub id, or one of {', '.join(shipped())}"
        )
    try:
        return skeleton(name)
    except OSError as error:
        raise OSError(f"{error}{hint}") from error


def _read(model: PreTrainedModel, name: str) -> Shape:
    parts: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    config = model.config.get_text_config()
    if head is None or not isinstance(getattr(parts, "layers", None), nn.ModuleList):
        raise ValueError(f"a plan needs a decoder with .layers and an output head, {type(model).__name__} has none")
    windows = _windows(config, len(parts.layers))
    norms = [module for module in parts.modules() if _is_norm(module)]
    return Shape(
        name=name,
        model_class=type(model).__name__,
        parameters=sum(p.numel() for p in model.parameters()),
        layers=tuple(
            _layer(layer, config, w, type(model).__name__) for layer, w in zip(parts.layers, windows, strict=True)
        ),
        embedding=embedding.weight.numel(),
        head=head.weight.numel(),
        tied=head.weight is embedding.weight,
        vocab=head.weight.shape[0],
        norm_weights=sum(norm.weight.numel() for norm in norms),
        norms_in_float32=_multiplies_in_float32(norms[0]),
        sdpa=bool(model._supports_sdpa),
        capped_attention=bool(getattr(config, "attn_logit_softcapping", None)),
        capped_logits=bool(getattr(config, "final_logit_softcapping", None)),
    )


def _windows(config: Any, layers: int) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in types]


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, torch.Tensor) and weight.ndim == 1


def _multiplies_in_float32(norm: Any) -> bool:
    """Ask autograd: run the norm on 16-bit numbers and see what it keeps for the gradient of its weight."""
    kept: set[torch.dtype] = set()
    norm = copy.deepcopy(norm).to("meta", torch.bfloat16)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.dtype)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(torch.ones_like(norm.weight))  # the input needs no gradient: only the weight's keeps anything
    return torch.float32 in kept


def _layer(layer: nn.Module, config: Any, window: int | None, owner: str) -> Layer:
    """Read one layer: its attention is the child with ``attn`` in its name, its MLP the one with ``mlp``."""
    blocks = {key: block for key, block in layer.named_children() if "attn" in key or "mlp" in key}
    inside = {key: [(n, m) for n, m in b.named_modules() if isinstance(m, nn.Linear)] for key, b in blocks.items()}
    attention = next((key for key in inside if "attn" in key), "")
    mlp = next((key for key in inside if "mlp" in key), "")
    stacked = any(p.ndim > 2 for p in layer.parameters())
    if not inside.get(attention) or not inside.get(mlp) or stacked:
        raise ValueError(f"a plan covers dense decoders (attention and one MLP per layer of Linear), not {owner}")
    linears = []
    for key, place in ((attention, "attention"), (mlp, "mlp")):
        last = next((n for n, _ in inside[key] if n.startswith(("o_", "out", "down"))), inside[key][-1][0])
        for n, m in inside[key]:
            where = f"{place}_out" if n == last else place
            linears.append(Linear(n, m.in_features, m.out_features, m.bias is not None, where))
    query, ffn = (next(x.inputs for x in linears if x.place == f"{place}_out") for place in ("attention", "mlp"))
    fused = (sum(x.outputs for x in linears if x.place == "attention") - query) // 2
    key_width = next((x.outputs for x in linears if x.name.rpartition(".")[2] == "k_proj"), fused)
    hidden = next(x.inputs for x in linears if x.place == "attention")
    reads = {"q": query, "k": key_width, "v": key_width}
    norms = [(n.rpartition(".")[2], m.weight.numel()) for n, m in layer.named_modules() if _is_norm(m)]
    return Layer(
        hidden=hidden,
        query=query,
        key=key_width,
        heads=query // getattr(blocks[attention], "head_dim", query // config.num_attention_heads),
        ffn=ffn,
        window=window,
        norm_inputs=tuple(hidden if size == hidden else reads.get(n[0], size) for n, size in norms),
        norm_weights=sum(size for _, size in norms),
        linears=tuple(linears),
        parameters=sum(p.numel() for p in layer.parameters()),
    )
