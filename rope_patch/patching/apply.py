"""Swap tables in and out: apply, restore, patched."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging as hf_logging

from rope_patch.methods import Chain, Default, Method, MethodLike, as_method
from rope_patch.patching.base_tables import (
    CONFIG_KEYS,
    Tables,
    base_of,
    check_base,
    keeps_float32,
    name_in,
    original_rotary,
    read_tables,
    settings_of,
)
from rope_patch.patching.encoding import encode
from rope_patch.patching.locate import PatchError, RotaryLocation, device_of, find_rotary, other_tables, outside_readers
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.probe import check_use
from rope_patch.patching.record import PatchRecord, TableRecord, key_of, same_tables
from rope_patch.patching.verify import edits_since, measure, method_of
from rope_patch.tables import RotaryTable

logger = hf_logging.get_logger("rope_patch")


class _State:
    """A model's rotary state: the module in place and what its configs say."""

    def __init__(self, site: RotaryLocation) -> None:
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
        config.__dict__.pop(name_in(config, key), None)
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
    before: Mapping[str | None, RotaryTable]
    after: Mapping[str | None, RotaryTable]
    record: PatchRecord
    _module: PatchedRotary
    _state: _State

    def restore(self) -> None:
        """Undo the patch: the model is as it was before ``apply``.

        Raises:
            PatchError: another patch has replaced this one, or it was undone already.
        """
        site = self._state.site
        with site.lock:
            if site.model.get_submodule(site.path) is not self._module:
                raise PatchError(f"the patch {self.method} is no longer in place: nothing to restore")
            if getattr(site.config, "rope_patch", None) != self.record.to_dict():
                raise PatchError(f"the config no longer says {self.method}: is it shared with another model?")
            _follow_device(site.module, site.model)
            self._state.reinstate()

    @property
    def unstated(self) -> str | None:
        """Say so where the tables reach further than the context that the config states."""
        reached = {self.method.reach(self.before[kind]) for kind in self.record.layer_types}
        stated = self.record.target_length or int(self.record.base_config["max_position_embeddings"])
        furthest = max((length for length in reached if length is not None), default=0)
        if furthest <= stated:
            return None
        return (
            f"{self.method} reaches {furthest} tokens, the config still states a context of {stated}: "
            f"target_length={furthest} (--target-length) states the longer one"
        )

    def describe(self) -> str:
        """Return the tables before and after, a line each."""
        lines = [f"patch {self.method}"]
        for kind, slot in self.after.items():
            if slot is self.before[kind]:
                lines.append(f"  {slot}: left alone")
            else:
                lines += [f"  before  {self.before[kind]}", f"  after   {slot}"]
        stated = int(self.record.base_config["max_position_embeddings"])
        if self.record.target_length not in (None, stated):
            lines.append(f"  context {stated} tokens before, {self.record.target_length} after")
        elif self.unstated is not None:
            lines.append(f"  {self.unstated}")
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
    keep_edits: bool = False,
    precision: str = "float32",
    freeze_at: int | None = None,
    **params: Any,
) -> Patch:
    """Patch a model's rotary tables in place.

    The module that holds them is swapped for a :class:`PatchedRotary`, which no cast or re-initialisation can change,
    and ``config.rope_parameters`` is rewritten so that ``save_pretrained`` gives a folder plain transformers loads with
    equal logits. On any error the model is as it was.

    Args:
        model: a causal language model of transformers, bare or under PEFT, quantization or ``torch.compile``.
        method: a name with ``params``, the grammar (``"yarn:factor=4"``), a method object, or a sequence of them.
        layer_types: which tables to patch on models with one per layer type; ``("full_attention",)`` by default.
        target_length: the context to state in the config [tokens]; unchanged by default. A ``factor`` that is left out
            is taken from it, one that does not reach it is refused.
        replace: replace an earlier patch, starting again from the base table. What was changed in the config since
            then is dropped, with a warning.
        keep_edits: with ``replace``, start from what the config says now, such changes included.
        precision: ``"float64"`` computes angles in double; no stock config can say so.
        freeze_at: length at which to freeze a ``dynamic`` or two-table ``longrope`` checkpoint [tokens].
        **params: the method's parameters.

    Returns:
        The patch, with the tables before and after and ``restore()``.

    Raises:
        ValueError: bad parameters, a factor that contradicts the target, a model without a rotary table that can be
            patched, or whose layers use none.
        PatchError: the model is patched already.
    """
    wanted = as_method(method, **params)
    patch = _apply(
        model,
        wanted,
        layer_types=layer_types,
        target_length=target_length,
        replace=replace,
        keep_edits=keep_edits,
        precision=precision,
        freeze_at=freeze_at,
    )
    if target_length is None and patch.unstated is not None:
        logger.warning(patch.unstated)
    return patch


def _apply(
    model: nn.Module,
    wanted: Method,
    *,
    layer_types: Sequence[str] | None = None,
    target_length: int | None = None,
    replace: bool = False,
    keep_edits: bool = False,
    precision: str = "float32",
    freeze_at: int | None = None,
    recorded: bool = False,
    say: Callable[[str], None] | None = None,
) -> Patch:
    """Patch; ``recorded`` says that a record is carried out, whose factors and target are what they are."""
    if precision not in ("float32", "float64"):
        raise ValueError(f"precision must be 'float32' or 'float64', got {precision!r}")
    if target_length is not None and (
        not isinstance(target_length, int) or isinstance(target_length, bool) or target_length < 1
    ):
        raise ValueError(f"target_length must be a whole number of tokens >= 1, got {target_length!r}")
    if keep_edits and not replace:
        raise ValueError("keep_edits goes with replace=True: it says what an earlier patch is replaced on")
    found = find_rotary(model)
    with found.lock:
        site = find_rotary(model)  # another thread may have changed it while this one waited
        source, remarks = _source(site, replace, keep_edits, quiet=recorded)
        before, odd = read_tables(source, freeze_at=freeze_at)
        chosen = _choose(before, layer_types)
        _check_layer_types(wanted, before, chosen)
        stock, base_config = base_of(source)
        if not recorded:
            slots = [before[kind] for kind in chosen]
            anew = getattr(wanted, "replace_scaling", False)  # drops what reached further than the trained context
            least = slots[0].context if anew else max(slots[0].context, slots[0].max_position_embeddings)
            if target_length is not None and target_length < least:
                raise ValueError(
                    f"target_length {target_length} is shorter than the context of the checkpoint, {least} tokens"
                )
            wanted = _for_target(wanted, slots, target_length)
        length = target_length or int(base_config.max_position_embeddings)
        after = {kind: wanted(slot) if kind in chosen else slot for kind, slot in before.items()}
        after, settings = encode(source, before, after, length)
        if settings["rope_parameters"] != base_config.rope_parameters and (readers := outside_readers(site)):
            raise ValueError(
                f"{', '.join(readers)} of {type(site.model).__name__} reads config.rope_parameters besides the rotary "
                "embedding: another spelling would change more than the table. Such families are not supported"
            )
        check_use(site, after, chosen)
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
        if not (record.changed or recorded or isinstance(wanted, Default)):
            odd.append(f"{wanted} leaves every table of this {type(site.model).__name__} as it was")
        if getattr(site.model.config, "is_encoder_decoder", False) and (others := other_tables(site)):
            odd.append(f"the decoder alone is patched: {', '.join(others)} keep their tables")
        for remark in (*remarks, *odd):
            (say or logger.warning)(remark)
        fresh = original_rotary(type(stock), base_config)
        module = PatchedRotary(after, stock, precision, keep_float32=keeps_float32(fresh, chosen))
        state = _State(site)
        module.train(site.module.training)
        _keep_hook(site.module, module)
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


def _source(site: RotaryLocation, replace: bool, keep_edits: bool, *, quiet: bool) -> tuple[RotaryLocation, list[str]]:
    """Return the site to read the base tables from, and what is to be said of it.

    Raises:
        PatchError: the model is patched already, and is not to be patched anew.
    """
    check_base(site)
    if not replace:
        _refuse_a_second_patch(site)
    if site.record is None:
        return site, []
    if not keep_edits:
        edits = [] if quiet else edits_since(site)
        said = f"replacing {site.record.to_method()} drops what was changed in the config since: {'; '.join(edits)}. "
        return site, [said + "keep_edits=True (--keep-edits) starts from the config as it is"] if edits else []
    configs = tuple(copy.deepcopy(config) for config in site.configs)
    for config in configs:
        config.__dict__.pop("rope_patch", None)
    stock = site.module.original if isinstance(site.module, PatchedRotary) else site.module
    module = original_rotary(type(stock), configs[0])
    return RotaryLocation(site.model, site.path, module, configs), []


def _refuse_a_second_patch(site: RotaryLocation) -> None:
    record, name = site.record, type(site.model).__name__
    if record is None:
        if isinstance(site.module, PatchedRotary):
            raise PatchError(f"{name} is patched, but its config has lost the record: load the model again")
        return
    said = f"{name} is already patched with {record.to_method()}"
    if edits := edits_since(site):
        raise PatchError(
            f"{said}, and its config was changed since ({'; '.join(edits)}). replace=True (--replace) drops that "
            "and starts from the table before the patch; with keep_edits=True (--keep-edits), from the config as it is"
        )
    tells = not isinstance(site.module, PatchedRotary) and not any(b.is_meta for b in site.module.buffers())
    if tells and measure(site.module, record.tables, device_of(site.model)):
        raise PatchError(
            f"the config of this {name} says it is patched with {record.to_method()}, but it does not use that table. "
            "Models built from one config object share it: give each its own copy (or pass replace=True here)"
        )
    raise PatchError(f"{said}: restore it first, or pass replace=True (--replace)")


def for_target(
    model: nn.Module,
    method: MethodLike,
    target_length: int,
    *,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
) -> Method:
    """Return a method with the factor that :func:`apply` would take from a target where it was left out.

    Args:
        model: to be patched.
        method: in any form.
        target_length: to be reached [tokens].
        layer_types: as for ``apply``.
        freeze_at: as for ``apply``.

    Raises:
        ValueError: a bad method, or tables that need different factors.
    """
    wanted = as_method(method)
    if not wanted.needs_target:
        return wanted
    slots, _ = read_tables(find_rotary(model), freeze_at=freeze_at)
    return _for_target(wanted, [slots[kind] for kind in _choose(slots, layer_types)], target_length)


def _for_target(method: Method, slots: Sequence[RotaryTable], target_length: int | None) -> Method:
    """Return the method with its factor filled in or checked, the same on every table that is patched."""
    made = {str(method.for_target(slot, target_length)): method.for_target(slot, target_length) for slot in slots}
    if len(made) > 1:
        raise ValueError(f"the tables of this model need different factors ({', '.join(made)}): patch one at a time")
    return next(iter(made.values()))


def _check_layer_types(method: Method, slots: Tables, chosen: Sequence[str | None]) -> None:
    """Raise where a step is for a layer type that the model has not, or that is not patched."""
    steps = method.steps if isinstance(method, Chain) else (method,)
    for wanted in (getattr(step, "layer_type", None) for step in steps):
        if wanted is None or wanted in chosen:
            continue
        if list(slots) == [None]:
            raise ValueError(f"this model has one table for all layers: leave out layer_type={wanted}")
        if wanted not in slots:
            raise ValueError(f"no table for layer type {wanted!r}. Known: {', '.join(map(str, slots))}")
        raise ValueError(f"the method is for {wanted!r}, which is not patched: name it in layer_types (--layer-type)")


def _choose(slots: Tables, layer_types: Sequence[str] | None) -> tuple[str | None, ...]:
    known = list(slots)
    if known == [None]:
        if layer_types is not None:
            raise ValueError(
                f"this model has one table for all layers: layer_types={tuple(layer_types)!r} has no meaning"
            )
        return (None,)
    if layer_types is None:
        if "full_attention" not in known:
            raise ValueError(f"this model has no full_attention table: name those to patch in layer_types={known}")
        layer_types = ("full_attention",)
    if isinstance(layer_types, str):
        layer_types = (layer_types,)
    if not layer_types:
        raise ValueError(f"layer_types is empty, so nothing would be patched. Known: {', '.join(map(str, known))}")
    for name in layer_types:
        if name not in known:
            raise ValueError(f"no table for layer type {name!r}. Known: {', '.join(map(str, known))}")
    return tuple(layer_types)


def _follow_device(module: nn.Module, model: nn.Module) -> None:
    """Bring a stock module that was set aside to where the model now is, without touching its dtype."""
    if not isinstance(module, PatchedRotary) and not any(b.is_meta for b in module.buffers()):
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
    with find_rotary(model).lock:
        site = find_rotary(model)
        record = site.record
        if record is None:
            raise PatchError(f"{type(site.model).__name__} carries no patch record: nothing to restore")
        check_base(site)
        if record.edited and not isinstance(site.module, PatchedRotary):
            raise PatchError("the base table was edited by hand before the patch; its config alone cannot restore it")
        stock, _ = base_of(site)
        _follow_device(stock, site.model)
        site.put(stock)
        for config in site.configs:
            _write(config, record.base_config, None)


@contextlib.contextmanager
def patched(model: nn.Module, method: MethodLike, /, **options: Any) -> Iterator[Patch]:
    """Patch a model for the length of a ``with`` block; undone at its end, also after an exception.

    Takes what :func:`apply` takes. Another thread that wants to patch the same model waits until then.
    """
    known = set(inspect.signature(apply).parameters)
    params = {name: options.pop(name) for name in list(options) if name not in known}
    with find_rotary(model).lock:
        patch = _apply(model, as_method(method, **params), say=logger.warning_once, **options)
        try:
            yield patch
        finally:
            patch.restore()


def rebase(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Give an unpatched model the rotary settings of another config, and the table that they describe."""
    site = find_rotary(model)
    for config in site.configs:
        _write(config, settings, None)
    module = original_rotary(type(site.module), site.config)
    _follow_device(module, site.model)
    site.put(module)


def reapply(model: nn.Module, record: PatchRecord) -> Patch:
    """Apply what a record says to a model and check that the tables come out the same.

    Raises:
        PatchError: the model's base tables are not those the record was made on.
    """
    layer_types = None if record.layer_types == (None,) else tuple(str(kind) for kind in record.layer_types)
    record.warn_of_missing()
    patch = _apply(
        model,
        method_of(find_rotary(model), record),
        layer_types=layer_types,
        target_length=record.target_length,
        precision=record.precision,
        freeze_at=record.freeze_at,
        replace=True,
        recorded=True,
    )
    for name in ("base_tables", "tables"):
        wanted, got = getattr(record, name), getattr(patch.record, name)
        if not same_tables(wanted, got):
            patch.restore()
            raise PatchError(
                f"the record of {record.to_method()} was made on another model: its {name.replace('_', ' ')} "
                f"({hashes(wanted)}) are not this model's ({hashes(got)})"
            )
    return patch


def hashes(tables: Mapping[str, TableRecord]) -> str:
    """Name tables in a message."""
    return ", ".join(f"{key} {table.hash}" for key, table in tables.items())
