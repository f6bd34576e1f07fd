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
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from rope_patch.patching.config_settings import set_rotary_settings, silent_transformers
from rope_patch.patching.rotary import PatchedRotary
from rope_patch.tables import Tables

PROBE_TOKENS = 8
ATTENTION_NAME = "rope_patch_rotates"

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
        window: the most tokens that a layer which uses a table sees; infinite if one sees all, or if that is not known.
    """

    refusals: Mapping[str | None, str] = field(default_factory=dict)
    builders: tuple[str, ...] = ()
    reader_values: Mapping[tuple[str, str], Any] | None = None
    lookups: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    outside: tuple[str, ...] = ()
    read: frozenset[str] = frozenset()
    window: float = math.inf


def probe(
    model: PreTrainedModel,
    decoder: nn.Module,
    path: str,
    configs: Sequence[PreTrainedConfig],
    settings: Mapping[str, Any],
    tables: Tables,
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
    """
    reads: list[Read] = []
    built = copy_without_weights(model, configs, settings, reads)
    if built is None:
        return Probe()
    rotary = built.get_submodule(path)
    names = {module: name for name, module in model.named_modules()}
    copied = built.get_submodule(names[decoder])
    # Some models build modules that they do not keep, and those do not count as readers.
    own = set(built.modules()) - {rotary}
    inside = set(copied.modules())
    building = {module for module, _ in reads if module in own}
    builders = tuple(name for name, module in built.named_modules() if module in building & inside)
    reader_values = values_kept_by_modules(built, builders)
    while_built = len(reads)
    patched = PatchedRotary(tables, rotary)
    runs = {kind: _run(copied, rotary, kind, patched) for kind in tables}
    if not all(completed for *_, completed in runs.values()):
        # A layer that fails on meta tensors must not hide what the layers after it do.
        for module in copied.modules():
            if module not in (copied, rotary):
                module.forward = _passing_on(module.forward)
        runs = {kind: _run(copied, rotary, kind, patched, failing=True) for kind in tables}
    running = {(module, keys) for module, keys in reads[while_built:] if module in own}
    refusals = {}
    sights = set[float]()
    for kind, (misfits, windows, _) in runs.items():
        sights |= windows
        if misfits:
            refusals[kind] = misfits[0]
        if not windows:
            what = "its rotary embedding" if kind is None else f"its table for {kind}"
            refusals[kind] = (
                f"does not use {what}: no layer turns queries or keys with it, and a patch would change nothing"
            )
    readers = building | {module for module, _ in running}
    return Probe(
        refusals,
        builders,
        reader_values,
        tuple(sorted({(type(module).__name__, keys) for module, keys in running}, key=str)),
        tuple(sorted({type(module).__name__ for module in readers - inside})),
        frozenset(".".join(map(str, keys)) for _, keys in reads),
        max(sights, default=math.inf),
    )


def copy_without_weights(
    model: PreTrainedModel,
    configs: Sequence[PreTrainedConfig],
    settings: Mapping[str, Any],
    reads: list[Read],
) -> nn.Module | None:
    """Return a copy of a model on the meta device; None if the model's class needs more than its config.

    Args:
        model: the model that is copied.
        configs: the configs of the model that hold rotary settings.
        settings: the rotary settings of the copy.
        reads: a list to which every look-up in ``rope_parameters`` is added.
    """
    # The memo of deepcopy tells which part of the copied config belongs to which of `configs`.
    copies: dict[int, Any] = {}
    config: Any = copy.deepcopy(model.config, copies)
    stating = [copies[id(each)] for each in configs if id(each) in copies]
    for own in stating:
        set_rotary_settings(own, settings, None)
        # Not by setattr, which would run the config's validators.
        own.__dict__["rope_parameters"] = _Noted(own.rope_parameters, reads)
    attention = "eager"  # others may have kernels without a meta form
    if model._can_set_attn_implementation():
        attention = ATTENTION_NAME
    for own in (config, *stating):
        own._attn_implementation_internal = attention
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


_WINDOWS: ContextVar[set[float]] = ContextVar("_WINDOWS")
"""The windows of the layers that use a table, of the run in progress; that of a layer which may see all is infinite."""


def _passing_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass that returns its input if the module's own fails, as that of experts does on meta."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return forward(*args, **kwargs)
        except Exception:
            tensors = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
            if any(tensor.requires_grad for tensor in tensors):  # it has the table, and did not come to attend
                _WINDOWS.get().add(math.inf)
            return next(iter(tensors), None)

    return run


def _note_window(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Note the window of a layer whose queries or keys depend on a table, and return a tensor that depends on none.

    Therefore each of the layers after it shows its own dependence alone.
    """
    if query.requires_grad or key.requires_grad:
        _WINDOWS.get().add(getattr(attention_mask, "window", math.inf))
    rows, heads, tokens, _ = query.shape
    return value.new_empty(rows, tokens, heads, value.shape[-1]), None


def _mask_with_window(*args: Any, **kwargs: Any) -> Any:
    """Return the mask of eager attention, with the window as an attribute, since not every layer passes it on."""
    mask: Any = ALL_MASK_ATTENTION_FUNCTIONS["eager"](*args, **kwargs)
    mask.window = kwargs.get("local_size", math.inf)
    return mask


AttentionInterface.register(ATTENTION_NAME, _note_window)
AttentionMaskInterface.register(ATTENTION_NAME, _mask_with_window)


def _run(
    decoder: nn.Module, rotary: nn.Module, kind: str | None, patched: PatchedRotary, *, failing: bool = False
) -> tuple[list[str], set[float], bool]:
    """Run a decoder on the meta device, and find out which of its layers depend on a table.

    Autograd tells the dependence without numbers: cos and sin of the table are made leaves that require gradients, and
    everything else in the copy requires none, so a query that requires a gradient was computed from them.

    Args:
        decoder: the decoder of the copy.
        rotary: the rotary module of the copy.
        kind: the layer type of the table; None if all layers share one.
        patched: a patched rotary module, which is called as the decoder calls its own.
        failing: whether modules fail and pass their input on, so that the use of a table may not show.

    Returns:
        The reasons why the patched module cannot take the place of the rotary one; the windows of the layers that use
        the table, infinite for one that may see all; and whether the decoder ran to its end.
    """
    misfits = []
    windows = set[float]()
    _WINDOWS.set(windows)

    def mark(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        layer_type = kwargs.get("layer_type")
        if "layer_type" not in kwargs and len(args) > 2:
            layer_type = args[2]
        if layer_type != kind:
            return output
        try:
            patched(*args, **kwargs)
        except Exception as error:
            misfits.append(
                f"calls its rotary embedding as a patched one cannot be called ({type(error).__name__}: {error})"
            )
        return tree_map_only(Tensor, _marked, output)

    hook = rotary.register_forward_hook(mark, with_kwargs=True)
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    completed = False
    for options in ({"use_cache": True}, {}):  # a cache keeps transformers from looking for packed rows
        misfits.clear()
        with contextlib.suppress(Exception), torch.inference_mode(False), torch.enable_grad():
            output = decoder(input_ids=ids, **options)
            completed = True
            # A layer that attends by a function of its own hands its dependence on. Leaves were merely passed on.
            if any(isinstance(part, Tensor) and part.grad_fn is not None for part in tree_leaves(output)):
                windows.add(math.inf)
            break
    hook.remove()
    if not completed or (failing and not windows):
        windows.add(math.inf)
    return misfits, windows, completed


def _marked(value: Tensor) -> Tensor:
    if value.is_floating_point() or value.is_complex():
        return value.detach().requires_grad_()
    return value
