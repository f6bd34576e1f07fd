"""The rotary tables of transformers 4 or 5."""

import contextlib
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
ASKED = "rope_patch_asked"


def version() -> str:
    """Return the version of transformers."""
    import transformers

    return transformers.__version__


def model_of(path: str) -> Any:
    """Return the model of a checkpoint without its weights, but with the values of its rotary modules."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(path)

    def build() -> Any:
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)

    # Built once to see which classes hold tables, and once more with their own arguments and values.
    classes = {type(module) for module in build().modules() if _is_rotary(module)}
    with contextlib.ExitStack() as stack:
        for each in classes:
            stack.enter_context(mock.patch.object(each, "__init__", _on_the_cpu(each.__init__)))
        return build()


def _on_the_cpu(init: Callable[..., None]) -> Callable[..., None]:
    import torch

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            init(self, *args, **kwargs)

    return built


def _is_rotary(module: Any) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def layers_of(model: Any) -> dict[str, Any]:
    """Return the context and the layers of a model, from one forward pass without weights.

    Rotary modules hand out tensors without values, by which it is seen which layer
    takes which table; every layer calls an attention function that notes it, and the window.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.modeling_utils import AttentionInterface

    tables: dict[int, tuple[Any, Any]] = {}
    layers: dict[int, dict[str, Any]] = {}
    given_out: list[Any] = []  # so that no id is used twice
    touched: list[int] = []

    class TableWatch(TorchFunctionMode):
        """Notes which table is used."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            touched.extend(id(value) for value in (*args, *kwargs.values()) if id(value) in tables)
            return func(*args, **kwargs)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[Any, None]:
        cos, sin = tables[touched[0]] if touched else (None, None)
        touched.clear()
        layers[module.layer_idx] = {"cos": cos, "sin": sin, "window": options.get("sliding_window")}
        batch, heads, tokens, _ = query.shape
        return query.new_empty(batch, tokens, heads, value.shape[-1]), None

    def asked(rotate: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: Any, position_ids: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.device("cpu"):
                made = rotate(torch.zeros(1), torch.tensor([[0, 1, context - 1]]), *args, **kwargs)
            if isinstance(made, tuple):
                cos, sin = (_once(each[0, 1]) for each in made)
            else:  # complex numbers, as in Llama 4
                made = (made,)
                cos, sin = made[0][0, 1].real.tolist(), made[0][0, 1].imag.tolist()
            given = tuple(torch.empty_like(each, device="meta") for each in made)
            given_out.extend(given)
            tables.update({id(each): (cos, sin) for each in given})
            return given if len(given) > 1 else given[0]

        return forward

    AttentionInterface.register(ASKED, attention)
    context = int(model.config.get_text_config().max_position_embeddings)
    for module in [*model.modules()]:
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = ASKED
        if _is_rotary(module):
            module.forward = asked(module.forward)
    ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
    originals = _beside_attention(model)
    with torch.no_grad(), TableWatch():
        try:
            _passing(originals, lambda x: x)
            model(ids, use_cache=False)
        except (TypeError, ValueError):  # experts that return the scores of their router, too
            _passing(originals, lambda x: (x, None))
            model(ids, use_cache=False)
    if all(layer["cos"] is None for layer in layers.values()):
        raise NotImplementedError("no layer used a rotary table where it was looked for")
    return {"context": context, "layers": [layers[index] for index in sorted(layers)]}


def _once(values: Any) -> list[float]:
    """Return cos or sin of each pair once; where both features have one, they are half a table apart, or neighbours."""
    half = len(values) // 2
    if values[:half].equal(values[half:]):
        values = values[:half]
    elif values[::2].equal(values[1::2]):
        values = values[::2]
    return list(values.tolist())


def _beside_attention(model: Any) -> dict[Any, Callable[..., Any]]:
    """Return the forward functions of the modules beside attention, such as experts, by the module."""
    found = {}
    for module in model.modules():
        children = [*module.children()]
        if any(hasattr(child, "layer_idx") for child in children):
            found.update(
                {each: each.forward for each in children if not hasattr(each, "layer_idx") and [*each.children()]}
            )
    return found


def _passing(originals: dict[Any, Callable[..., Any]], result: Callable[[Any], Any]) -> None:
    """Let modules give back what they are given where they fail without values, as experts do."""
    for module, forward in originals.items():
        module.forward = _or(forward, result)


def _or(forward: Callable[..., Any], result: Callable[[Any], Any]) -> Callable[..., Any]:
    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(x, *args, **kwargs)
        except Exception:
            return result(x)

    return run
