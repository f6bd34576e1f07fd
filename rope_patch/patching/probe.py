"""Check, on a copy without weights, that a model uses its rotary tables and works with a patched module."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.patching.locate import RotaryLocation
from rope_patch.patching.module import PatchedRotary
from rope_patch.tables import RotaryTable

TOKENS = 8


class _Used(Exception):
    """Something that was computed depends on cos or sin."""


_reasons: dict[Any, str | None] = {}
"""By class, config and layer type: why a table cannot be patched, None where it can."""


def check_use(location: RotaryLocation, tables: Mapping[str | None, RotaryTable], chosen: Sequence[str | None]) -> None:
    """Raise unless the layers of a model use its rotary tables, and ours in their place.

    The model's own code runs on a copy of its decoder that is built from the config on the meta device, without
    weights or numbers: what is sharded, offloaded or quantized is not touched. What fails there for other reasons is
    left to be found out in use.

    Args:
        location: where the model keeps its tables.
        tables: those it shall have.
        chosen: the layer types to patch.

    Raises:
        ValueError: no layer depends on a table (ALiBi, layers without rotary embeddings), or the model calls its rotary
            embedding with what a table of one position axis cannot answer.
    """
    decoder = location.decoder
    config = decoder.config.to_json_string(use_diff=False)
    for kind in chosen:
        key = (type(decoder), config, kind)
        if key not in _reasons:
            if len(_reasons) == 256:
                _reasons.clear()
            _reasons[key] = _reason(location, tables, kind)
        if (reason := _reasons[key]) is not None:
            raise ValueError(f"{type(location.model).__name__} {reason}. Nothing was changed")


def _reason(location: RotaryLocation, tables: Mapping[str | None, RotaryTable], kind: str | None) -> str | None:
    """Say why a table cannot be patched; None where it can, or where the copy does not tell."""
    decoder = without_weights(type(location.decoder), location.decoder.config)
    path = next(name for name, module in location.decoder.named_modules() if module is location.module)
    if decoder is None:
        return None
    original = decoder.get_submodule(path)
    used, calls = _run(decoder, original, kind)
    if used is False:
        what = "its rotary embedding" if kind is None else f"its table for {kind}"
        return f"does not use {what}: no layer turns queries or keys with it, and a patch would change nothing"
    patched = PatchedRotary(tables, original)
    for args, kwargs, shapes in calls:
        axes = next((tensor.ndim for tensor in _tensors((args[1:], kwargs))), 2)
        try:
            same = [tensor.shape for tensor in _tensors(patched(*args, **kwargs))] == shapes
        except Exception as error:
            return f"calls its rotary embedding as a patched one cannot be called ({type(error).__name__}: {error})"
        if not same:
            why = "several position axes" if axes > 2 else "another shape"
            return f"has rotary embeddings of another kind: its layers give them {why}"
    return None


def without_weights(decoder: type[nn.Module], config: Any) -> nn.Module | None:
    """Return a decoder built from a config on the meta device; None of a class that needs more than its config."""
    config = copy.deepcopy(config)
    for name in ("quantization_config", "rope_patch"):
        config.__dict__.pop(name, None)
    config._attn_implementation_internal = "eager"  # others may have kernels without a meta form
    try:
        with torch.device("meta"):
            return decoder(config).eval().requires_grad_(False)
    except Exception:  # classes that are not made from their config alone
        return None


def _run(
    decoder: nn.Module, rotary: nn.Module, kind: str | None
) -> tuple[bool | None, list[tuple[Any, Any, list[torch.Size]]]]:
    """Run a decoder until something depends on a table.

    Returns:
        Whether anything does, None where it failed before that could be seen; and how the rotary module was called,
        with the shapes it returned.
    """
    calls: list[tuple[Any, Any, list[torch.Size]]] = []

    def mark(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if kwargs.get("layer_type", args[2] if len(args) > 2 else None) != kind:
            return output
        calls.append((args, kwargs, [tensor.shape for tensor in _tensors(output)]))
        return _marked(output)

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if module is not rotary and any(t.requires_grad and not t.is_leaf for t in _tensors(output)):
            raise _Used

    hooks = [rotary.register_forward_hook(mark, with_kwargs=True)]
    hooks += [module.register_forward_hook(look) for module in decoder.modules()]
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        for options in ({"use_cache": True}, {}):  # a cache keeps transformers from looking for packed rows
            calls.clear()
            with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
                try:
                    decoder(input_ids=ids, **options)
                except _Used:
                    return True, calls
                return False, calls
        return None, calls
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _marked(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_() if value.is_floating_point() or value.is_complex() else value
    return type(value)(_marked(item) for item in value) if isinstance(value, tuple | list) else value
