"""Where a model keeps its rotary embedding."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.record import PatchRecord
from rope_patch.patching.two_tables import attach


class PatchError(ValueError):
    """A patch that is missing, doubled, altered, or not what the model really uses."""


@dataclass(frozen=True)
class RotaryLocation:
    """Where a model keeps its rotary embedding."""

    model: PreTrainedModel
    path: str
    module: nn.Module
    configs: tuple[PreTrainedConfig, ...]

    @property
    def config(self) -> PreTrainedConfig:
        """The text decoder's config."""
        return self.configs[0]

    @property
    def decoder(self) -> PreTrainedModel:
        """The text decoder: what runs the rotary embedding."""
        return _decoder_of(self.model)

    @property
    def record(self) -> PatchRecord | None:
        """The patch record of the config, checked; None on an unpatched model."""
        data = getattr(self.config, "rope_patch", None)
        try:
            return None if data is None else PatchRecord.from_dict(data)
        except ValueError as error:
            raise PatchError(str(error)) from error

    @property
    def lock(self) -> threading.RLock:
        """The lock that a thread holds while it patches this model, or has it in a ``patched`` block."""
        with _all_locks:
            return _locks.setdefault(self.model, threading.RLock())

    def put(self, module: nn.Module) -> None:
        """Make ``module`` the model's rotary embedding."""
        parent, _, name = self.path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, module)
        attach(self.model, self.decoder, module)


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


_all_locks = threading.Lock()


def find_rotary(model: nn.Module) -> RotaryLocation:
    """Find the one rotary embedding of a model's text decoder, through PEFT, ``torch.compile`` and DDP wrappers.

    Raises:
        TypeError: not a transformers model.
        ValueError: no rotary table, or several modules with tables of their own.
    """
    base = _unwrap(model)
    if not isinstance(base, PreTrainedModel):
        raise not_a_model(base)
    decoder = _decoder_of(base)
    modules = [module for module in decoder.modules() if isinstance(module, PatchedRotary) or original_tables(module)]
    if not modules:
        raise ValueError(
            f"found no rotary table in {type(base).__name__}: rope_patch needs a module with an 'inv_freq' buffer"
        )
    if len(modules) > 1:
        raise ValueError(
            f"{type(base).__name__} has {len(modules)} rotary modules of its own ({type(modules[0]).__name__}, …): "
            "rope_patch patches decoders with one shared rotary embedding"
        )
    module = modules[0]
    path = next(name for name, child in base.named_modules() if child is module)
    configs = (base.config.get_text_config(), getattr(module, "config", None), decoder.config)
    distinct: dict[int, Any] = {id(config): config for config in configs if config is not None}
    return RotaryLocation(base, path, module, tuple(distinct.values()))


def not_a_model(given: Any) -> TypeError:
    """Return the error for something in the place of a model of transformers."""
    hint = f": load it with rope_patch.load({str(given)!r})" if isinstance(given, str | PathLike) else ""
    return TypeError(f"expected a transformers model, got {type(given).__name__}{hint}")


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    return decoder if isinstance(decoder, PreTrainedModel) else model  # ModernBERT calls its output layer a decoder


def _unwrap(model: Any) -> Any:
    return [*_layers_of(model)][-1]


def _layers_of(model: Any) -> Iterator[Any]:
    """Yield a model and what is in it, down to the model of transformers."""
    while True:
        yield model
        if hasattr(model, "_orig_mod"):  # torch.compile
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()
        elif not isinstance(model, PreTrainedModel) and isinstance(getattr(model, "module", None), nn.Module):  # DDP
            model = model.module
        else:
            return


def holds_adapters_twice(model: nn.Module) -> bool:
    """Tell whether a PEFT model lies inside another one, where no adapter's weights are found by their names."""
    return sum(hasattr(layer, "get_base_model") and not hasattr(layer, "_orig_mod") for layer in _layers_of(model)) > 1


def original_tables(module: nn.Module) -> dict[str | None, Tensor]:
    """Return the tables that a module of transformers owns, by layer type."""
    return {
        name.removesuffix("inv_freq").removesuffix("_") or None: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original_" not in name
    }


def other_tables(location: RotaryLocation) -> list[str]:
    """Return the paths of the rotary modules outside the text decoder, such as an encoder's."""
    inside = set(location.decoder.modules())
    return [name for name, module in location.model.named_modules() if module not in inside and original_tables(module)]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first real parameter."""
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))
