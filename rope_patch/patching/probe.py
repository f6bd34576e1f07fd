"""Find out from a copy of a model without weights whether its layers use their tables, and what else reads the config.

The attention of DeepSeek takes a softmax scale from ``rope_parameters`` when it is built, that of Ministral 3 looks up
a temperature and a length while it runs, and Moonshine's encoder builds a table of its own. A patch changes the table
alone, so its encoding must leave all of these as they are. The readers are found by running the model's own code. The
copy is built from the config on the meta device, without weights or numbers, so that sharded, offloaded or quantized
weights are not touched. The copy's ``rope_parameters`` note each key that is looked up, and the module whose code looks
it up.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig, PreTrainedModel

from rope_patch.patching.record import set_rotary_settings, silent_transformers
from rope_patch.patching.rotary import PatchedRotary, RotaryLayout
from rope_patch.tables import Tables

PROBE_TOKENS = 8

Read = tuple[nn.Module, tuple[str | None, ...]]
"""A module, and the path of keys that its code looked up in ``rope_parameters``; a last key of None means all keys."""


@dataclass(frozen=True)
class Probe:
    """What a copy of a model without weights shows; it is empty if the model's class needs more than its config.

    Attributes:
        refusals: reasons why tables cannot be patched, by layer type.
        builders: names of the decoder's modules that read ``rope_parameters`` while they are built.
        reader_values: values that these modules keep, as :func:`values_kept_by_modules` returns them.
        lookups: classes of the decoder that read ``rope_parameters`` while they run, each with the path of keys that it
            looks up.
        outside: names of the classes outside the decoder that read the same ``rope_parameters``.
        read: the paths of all keys that anything looks up in ``rope_parameters``, the rotary module included; their
            parts are joined by dots.
    """

    refusals: Mapping[str | None, str] = field(default_factory=dict)
    builders: tuple[str, ...] = ()
    reader_values: Mapping[tuple[str, str], Any] | None = None
    lookups: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    outside: tuple[str, ...] = ()
    read: frozenset[str] = frozenset()


def probe(
    model: PreTrainedModel,
    decoder: nn.Module,
    path: str,
    configs: Sequence[PreTrainedConfig],
    settings: Mapping[str, Any],
    tables: Tables,
    layout: RotaryLayout,
) -> Probe:
    """Build a model without weights, run its decoder, and note what reads its ``rope_parameters``.

    A failure of the copy for other reasons refuses nothing: whether the model runs is found out in use.

    Args:
        model: the model that is copied without its weights.
        decoder: the text decoder of the model.
        path: the name of the rotary module in the model.
        configs: the configs that hold rotary settings.
        settings: the rotary settings before any patch.
        tables: the tables before any patch, by layer type.
        layout: the layout in which the rotary module returns cos and sin.
    """
    reads: list[Read] = []
    built = copy_without_weights(model, configs, settings, reads)
    if built is None:
        return Probe()
    rotary = built.get_submodule(path)
    names = {module: name for name, module in model.named_modules()}
    copied = built.get_submodule(names[decoder])
    # Some models build modules that they do not keep, and those do not count as readers.
    own, inside = set(built.modules()) - {rotary}, set(copied.modules())
    building = {module for module, _ in reads if module in own}
    builders = tuple(name for name, module in built.named_modules() if module in building & inside)
    reader_values = values_kept_by_modules(built, builders)
    while_built = len(reads)
    failures: list[Exception] = []
    runs = {kind: _run(copied, rotary, kind, failures) for kind in tables}
    if not all(completed for *_, completed in runs.values()):
        # A layer that fails on meta tensors must not hide what the layers after it do.
        for module in copied.modules():
            if module not in (copied, rotary):
                module.forward = _passing_on(module.forward, failures)
        runs = {kind: _run(copied, rotary, kind, failures) for kind in tables}
    running = {(module, keys) for module, keys in reads[while_built:] if module in own}
    patched = PatchedRotary(tables, rotary, layout=layout)
    refusals = {kind: _refusal(patched, kind, used, calls) for kind, (used, calls, _) in runs.items()}
    readers = building | {module for module, _ in running}
    return Probe(
        {kind: reason for kind, reason in refusals.items() if reason is not None},
        builders,
        reader_values,
        tuple(sorted({(type(module).__name__, keys) for module, keys in running}, key=str)),
        tuple(sorted({type(module).__name__ for module in readers - inside})),
        frozenset(".".join(map(str, keys)) for _, keys in reads),
    )


def copy_without_weights(
    model: PreTrainedModel,
    configs: Sequence[PreTrainedConfig],
    settings: Mapping[str, Any],
    reads: list[Read] | None = None,
) -> nn.Module | None:
    """Return a copy of a model on the meta device; None if the model's class needs more than its config.

    Args:
        model: the model that is copied.
        configs: the configs of the model that hold rotary settings.
        settings: the rotary settings of the copy.
        reads: a list to which every look-up in ``rope_parameters`` is added; without it none is noted.
    """
    # The memo of deepcopy tells which part of the copied config belongs to which of `configs`.
    copies: dict[int, Any] = {}
    config: Any = copy.deepcopy(model.config, copies)
    stating = [copies[id(each)] for each in configs if id(each) in copies]
    for own in stating:
        set_rotary_settings(own, settings, None)
        if reads is not None:
            # Not by setattr, which would run the config's validators.
            own.__dict__["rope_parameters"] = _Noted(own.rope_parameters, reads)
    for own in (config, *stating):
        own._attn_implementation_internal = "eager"  # others may have kernels without a meta form
        own.__dict__.pop("quantization_config", None)
    try:
        with torch.device("meta"), silent_transformers():
            # Without gradients of its own: those of the marked cos and sin are what _run looks for.
            built: nn.Module = type(model)(config).eval().requires_grad_(False)
            return built
    except Exception:  # classes that are not made from their config alone
        return None


def values_kept_by_modules(built: nn.Module, names: Sequence[str]) -> dict[tuple[str, str], Any] | None:
    """Return the plain values that modules hold since they were built, by the module's name and the attribute.

    Args:
        built: a copy of a model on the meta device.
        names: the names of the modules.

    Returns:
        The values; None if a module has a buffer, whose numbers cannot be seen on the meta device.
    """
    values = {}
    for name in names:
        module = built.get_submodule(name)
        if any(True for _ in module.buffers(recurse=False)):
            return None
        for attribute, value in vars(module).items():
            if isinstance(value, bool | int | float | str | tuple | list | None):
                values[name, attribute] = value
    return values


class _Noted(dict[str, Any]):
    """A ``rope_parameters`` dict that notes which modules read it."""

    def __init__(self, values: Mapping[str, Any], reads: list[Read], path: tuple[str, ...] = ()) -> None:
        super().__init__(values)
        self.reads = reads
        self.path = path
        for key, value in values.items():
            if isinstance(value, Mapping):
                self[key] = _Noted(value, reads, (*path, key))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Noted:
        # By dict's own methods, since a copy is not a look-up.
        return _Noted(dict(dict.items(self)), self.reads, self.path)


def _noting(name: str) -> Callable[..., Any]:
    """Return a method of ``dict`` that notes the module whose code reads a key, or all keys.

    If the value is a nested dict, nothing is noted here: that dict notes what is read of it.
    """
    read = getattr(dict, name)

    def method(self: _Noted, *args: Any) -> Any:
        key = args[0] if args else None
        frame = None
        if not isinstance(dict.get(self, str(key)), _Noted):
            frame = sys._getframe(1)
        # The reader is the nearest caller with a module as its `self`. A config that handles its settings is none.
        while frame is not None:
            reader = frame.f_locals.get("self")
            if isinstance(reader, nn.Module):
                self.reads.append((reader, (*self.path, key)))
            if isinstance(reader, nn.Module | PreTrainedConfig):
                break
            frame = frame.f_back
        return read(self, *args)

    return method


for _name in ("__getitem__", "__contains__", "__iter__", "get", "keys", "values", "items", "copy"):
    setattr(_Noted, _name, _noting(_name))


def _passing_on(forward: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    """Return a forward pass that returns its input if the module's own fails, as that of experts does on meta."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            failures.append(error)
            return next((part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)), None)

    return run


Calls = list[tuple[Any, Any, list[torch.Size]]]
"""The positional and keyword arguments with which a rotary module was called, and the shapes that it returned."""


def _run(
    decoder: nn.Module, rotary: nn.Module, kind: str | None, failures: list[Exception]
) -> tuple[bool | None, Calls, bool]:
    """Run a decoder on the meta device, and find out whether any module's output depends on a table.

    Autograd tells the dependence without numbers: cos and sin of the table are made leaves that require gradients, and
    everything else in the copy requires none, so an output that requires a gradient was computed from them.

    Args:
        decoder: the decoder of the copy.
        rotary: the rotary module of the copy.
        kind: the layer type of the table; None if all layers share one.
        failures: the exceptions of modules that failed, to which :func:`_passing_on` adds.

    Returns:
        Whether anything depends on the table, or None if failures leave it open; the calls of the rotary module; and
        whether the decoder ran to its end.
    """
    calls: Calls = []
    users: list[nn.Module] = []

    def mark(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        layer_type = kwargs.get("layer_type")
        if "layer_type" not in kwargs and len(args) > 2:
            layer_type = args[2]
        if layer_type != kind:
            return output
        calls.append((args, kwargs, _shapes(output)))
        return tree_map_only(Tensor, _marked, output)

    def look(module: nn.Module, args: Any, output: Any) -> None:
        for part in tree_leaves(output):
            # cos and sin that are merely passed on are leaves.
            if isinstance(part, Tensor) and part.requires_grad and not part.is_leaf:
                users.append(module)

    hooks = [rotary.register_forward_hook(mark, with_kwargs=True)]
    hooks += [module.register_forward_hook(look) for module in decoder.modules() if module is not rotary]
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    completed = False
    for options in ({"use_cache": True}, {}):  # a cache keeps transformers from looking for packed rows
        calls.clear()
        with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
            decoder(input_ids=ids, **options)
            completed = True
        if completed or users:
            break
    for hook in hooks:
        hook.remove()
    used: bool | None = bool(users)
    if not users and (failures or not completed):
        used = None
    return used, calls, completed


def _refusal(patched: PatchedRotary, kind: str | None, used: bool | None, calls: Calls) -> str | None:
    """Say why a table cannot be patched; None if it can be, or if the copy does not show it.

    Args:
        patched: a patched rotary module, which is called as the model called its own.
        kind: the layer type of the table; None if all layers share one.
        used: whether anything depends on the table; None if that is open.
        calls: the calls of the original rotary module.
    """
    if used is False:
        what = "its rotary embedding" if kind is None else f"its table for {kind}"
        return f"does not use {what}: no layer turns queries or keys with it, and a patch would change nothing"
    for args, kwargs, shapes in calls:
        try:
            same = _shapes(patched(*args, **kwargs)) == shapes
        except Exception as error:
            return f"calls its rotary embedding as a patched one cannot be called ({type(error).__name__}: {error})"
        if not same:
            return "has rotary embeddings of another kind: its layers give them another shape, or several position axes"
    return None


def _shapes(value: Any) -> list[torch.Size]:
    return [part.shape for part in tree_leaves(value) if isinstance(part, Tensor)]


def _marked(value: Tensor) -> Tensor:
    if value.is_floating_point() or value.is_complex():
        return value.detach().requires_grad_()
    return value
