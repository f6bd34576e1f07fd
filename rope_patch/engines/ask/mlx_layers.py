"""The rotary tables of mlx-lm."""

from pathlib import Path
from typing import Any

ATTENTION = ("self_attn", "attention", "attn")
ROTARY = ("rope", "rotary_emb", "_rope")


def version() -> str:
    """Return the version of mlx-lm."""
    from importlib.metadata import version

    return version("mlx-lm")


def model_of(path: str) -> Any:
    """Return the model of a checkpoint without its weights."""
    import mlx.core as mx
    from mlx_lm import utils

    mx.set_default_device(mx.cpu)
    config = utils.load_config(Path(path))
    model_class, arguments = utils._get_classes(config)
    return model_class(arguments.from_dict(config))


def layers_of(model: Any) -> dict[str, Any]:
    """Return the layers of a model; it has no context of its own."""
    from mlx_lm.models.cache import make_prompt_cache

    layers = []
    for layer, cache in zip(model.layers, make_prompt_cache(model), strict=True):
        attention = _first(layer, ATTENTION)
        if attention is not None:  # others, such as convolutions, have no table
            layers.append({**_table(attention), "window": getattr(cache, "max_size", None)})
    if all(layer["cos"] is None for layer in layers):
        raise NotImplementedError("no layer of the model has a rotary module under a name that is looked for")
    return {"context": None, "layers": layers}


def _table(attention: Any) -> dict[str, Any]:
    """Return cos and sin of attention at position 1: what its rotary module makes of a one followed by a zero."""
    import mlx.core as mx

    rotary = _first(attention, ROTARY)
    if not callable(rotary):
        return {"cos": None, "sin": None}
    head_dim = _first(attention, ("head_dim",)) or getattr(rotary, "dims", None) or rotary.dim
    rotated = _first(rotary, ("dims", "dim")) or head_dim
    features = mx.zeros((1, 1, 1, head_dim))
    interleaved = getattr(rotary, "traditional", False)
    first, second = slice(0, rotated // 2), slice(rotated // 2, rotated)
    if interleaved:
        first, second = slice(0, rotated, 2), slice(1, rotated, 2)
    features[..., first] = 1.0
    turned = rotary(features, offset=1)[0, 0, 0]
    return {"cos": turned[first].tolist(), "sin": turned[second].tolist()}


def _first(owner: Any, names: tuple[str, ...]) -> Any:
    # Not by truth: an nn.RoPE is an empty dictionary, and false.
    for name in names:
        if (found := getattr(owner, name, None)) is not None:
            return found
    return None
