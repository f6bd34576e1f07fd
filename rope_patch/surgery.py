"""Swap tables in and out: apply, restore, patched."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging as hf_logging

from rope_patch.methods import Method, MethodLike, as_method
from rope_patch.record import PatchRecord, TableRecord, key_of
from rope_patch.rotary import RotarySlot, RotaryTable
from rope_patch.sites import (
    CONFIG_KEYS,
    PatchError,
    RotarySite,
    Slots,
    base_of,
    check_base,
    device_of,
    find_rotary,
    outside_readers,
    read_slots,
    settings_of,
)
from rope_patch.spelling import spell
from rope_patch.verification import measure

logger = hf_logging.get_logger("rope_patch")


class _State:
    """A model's rotary state: the module in place and what its configs say."""

    def __init__(self, site: RotarySite) -> None:
        self.site = site
        self.said = [
            (settings_of(config), copy.deepcopy(getattr(config, "rope_patch", None))) for config in site.configs
        ]

    def reinstate(self) -> None:
        self.site.put(self.site.module)
        for config, (settings, record) in zip(self.site.configs, self.said, strict=True):
            _write(config, settings, record)


def _write(config: PreTrainedConfig, settings: Mapping[str, Any], record: Mapping[str, Any] | None) -> None:
    """Make the config say exactly these rotary settings and this record."""
    for key in (*CONFIG_KEYS, "rope_patch"):
        config.__dict__.pop(key, None)
    for key, value in settings.items():
        setattr(config, key, copy.deepcopy(value))
    if record is not None:
        config.rope_patch = copy.deepcopy(record)


@dataclass(frozen=True, eq=False)
class Patch:
    """A patch in place.

    Attributes:
        method: what was applied.
        before: the tables found, by layer type.
        after: the tables in use.
        record: what ``config.rope_patch`` says.
    """

    method: Method
    before: Mapping[str | None, RotarySlot]
    after: Mapping[str | None, RotarySlot]
    record: PatchRecord
    _module: RotaryTable
    _state: _State

    def restore(self) -> None:
        """Undo the patch: the model is as it was before ``apply``.

        Raises:
            PatchError: another patch has replaced this one, or it was undone already.
        """
        site = self._state.site
        if site.model.get_submodule(site.path) is not self._module:
            raise PatchError(f"the patch {self.method} is no longer in place: nothing to restore")
        if getattr(site.config, "rope_patch", None) != self.record.to_dict():
            raise PatchError(f"the config no longer says {self.method}: is it shared with another model?")
        _follow_device(site.module, site.model)
        self._state.reinstate()

    def describe(self) -> str:
        """Return the tables before and after, a line each."""
        lines = [f"patch {self.method}"]
        for kind, slot in self.after.items():
            if slot is self.before[kind]:
                lines.append(f"  {slot}: left alone")
            else:
                lines += [f"  before  {self.before[kind]}", f"  after   {slot}"]
        return "\n".join(lines)

    __str__ = describe


def apply(
    model: nn.Module,
    method: MethodLike,
    /,
    *,
    layer_types: Sequence[str] | None = None,
    target_length: int | None = None,
    replace: bool = False,
    precision: str = "float32",
    freeze_at: int | None = None,
    **params: Any,
) -> Patch:
    """Patch a model's rotary tables in place.

    The module that holds them is swapped for a :class:`RotaryTable`, which no cast or re-initialisation can change, and
    ``config.rope_parameters`` is rewritten so that ``save_pretrained`` gives a folder plain transformers loads with
    equal logits. On any error the model is as it was.

    Args:
        model: a causal language model of transformers, bare or under PEFT, quantization or ``torch.compile``.
        method: a name with ``params``, the grammar (``"yarn:factor=4"``), a method object, or a sequence of them.
        layer_types: which tables to patch on models with one per layer type; ``("full_attention",)`` by default.
        target_length: the context to state in the config [tokens]; unchanged by default.
        replace: replace an earlier patch, starting again from the base table.
        precision: ``"float64"`` computes angles in double; no stock config can say so.
        freeze_at: length at which to freeze a ``dynamic`` or two-table ``longrope`` checkpoint [tokens].
        **params: the method's parameters.

    Returns:
        The patch, with the tables before and after and ``restore()``.

    Raises:
        ValueError: bad parameters, a model without a rotary table that can be patched.
        PatchError: the model is patched already.
    """
    wanted = as_method(method, **params)
    if precision not in ("float32", "float64"):
        raise ValueError(f"precision must be 'float32' or 'float64', got {precision!r}")
    if target_length is not None and (not isinstance(target_length, int) or target_length < 1):
        raise ValueError(f"target_length must be a whole number of tokens >= 1, got {target_length!r}")
    site = find_rotary(model)
    if not replace:
        _refuse_a_second_patch(site)
    check_base(site)
    before, remarks = read_slots(site, freeze_at=freeze_at)
    chosen = _choose(before, layer_types)
    stock, base_config = base_of(site)
    length = target_length or int(base_config.max_position_embeddings)
    after = {kind: wanted(slot) if kind in chosen else slot for kind, slot in before.items()}
    after, settings = spell(site, before, after, length)
    if settings["rope_parameters"] != base_config.rope_parameters and (readers := outside_readers(site)):
        raise ValueError(
            f"{', '.join(readers)} of {type(site.model).__name__} reads config.rope_parameters besides the rotary "
            "embedding: another spelling would change more than the table. Such families are not supported"
        )
    record = PatchRecord(
        method=wanted.to_dict(),
        layer_types=chosen,
        tables={key_of(kind): TableRecord.of(slot) for kind, slot in after.items()},
        base_tables={key_of(kind): TableRecord.of(slot) for kind, slot in before.items()},
        base_config=settings_of(base_config),
        target_length=target_length,
        precision=precision,
        freeze_at=freeze_at,
        edited=tuple(key_of(kind) for kind, slot in before.items() if slot.rope_parameters is None),
    )
    for remark in remarks:
        logger.warning(remark)
    module = RotaryTable(after, stock, precision)
    module.train(site.module.training)
    _keep_hook(site.module, module)
    state = _State(site)
    try:
        site.put(module)
        for config in site.configs:
            _write(config, settings, record.to_dict())
    except BaseException:
        state.reinstate()
        raise
    for kind in after:  # before any compiler looks at the module
        module.table(kind, device_of(site.model))
    return Patch(wanted, before, after, record, module, state)


def _refuse_a_second_patch(site: RotarySite) -> None:
    record, name = site.record, type(site.model).__name__
    if record is None:
        if isinstance(site.module, RotaryTable):
            raise PatchError(f"{name} is patched, but its config has lost the record: load the model again")
        return
    if not isinstance(site.module, RotaryTable) and measure(site.module, record.tables, device_of(site.model)):
        raise PatchError(
            f"the config of this {name} says it is patched with {record.to_method()}, but it does not use that table. "
            "Models built from one config object share it: give each its own copy (or pass replace=True here)"
        )
    raise PatchError(f"{name} is already patched with {record.to_method()}: restore it, or pass replace=True")


def _choose(slots: Slots, layer_types: Sequence[str] | None) -> tuple[str | None, ...]:
    known = list(slots)
    if known == [None]:
        if layer_types is not None:
            raise ValueError(
                f"this model has one table for all layers: layer_types={tuple(layer_types)!r} has no meaning"
            )
        return (None,)
    if layer_types is None:
        if "full_attention" not in known:
            raise ValueError(f"this model has no full_attention table: name those to patch, layer_types={known}")
        layer_types = ("full_attention",)
    if isinstance(layer_types, str):
        layer_types = (layer_types,)
    for name in layer_types:
        if name not in known:
            raise ValueError(f"no table for layer type {name!r}. Known: {', '.join(map(str, known))}")
    return tuple(layer_types)


def _follow_device(module: nn.Module, model: nn.Module) -> None:
    """Bring a stock module that was set aside to where the model now is, without touching its dtype."""
    if not isinstance(module, RotaryTable) and not any(b.is_meta for b in module.buffers()):
        module.to(device=device_of(model))


def _keep_hook(old: nn.Module, new: nn.Module) -> None:
    """Carry accelerate's dispatch hook over."""
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)


def restore(model: nn.Module) -> None:
    """Undo every patch of a model, also one that was loaded from a patched folder: base tables, base config.

    Raises:
        PatchError: the model is not patched.
    """
    site = find_rotary(model)
    record = site.record
    if record is None:
        raise PatchError(f"{type(site.model).__name__} carries no patch record: nothing to restore")
    check_base(site)
    if record.edited and not isinstance(site.module, RotaryTable):
        raise PatchError("the base table was edited by hand before the patch; its config alone cannot restore it")
    stock, _ = base_of(site)
    _follow_device(stock, site.model)
    site.put(stock)
    for config in site.configs:
        _write(config, record.base_config, None)


@contextlib.contextmanager
def patched(model: nn.Module, method: MethodLike, /, **options: Any) -> Iterator[Patch]:
    """Patch a model for the length of a ``with`` block; undone at its end, also after an exception.

    Takes what :func:`apply` takes.
    """
    patch = apply(model, method, **options)
    try:
        yield patch
    finally:
        patch.restore()
