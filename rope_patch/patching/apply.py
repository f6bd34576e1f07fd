"""Swap tables in and out: apply, restore, patched."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from transformers.utils import logging as hf_logging

from rope_patch.methods import Default, Method, MethodLike, TwoTables, as_method
from rope_patch.patching.base_tables import (
    base_of,
    check_base,
    keeps_float32,
    original_rotary,
    read_tables,
    settings_of,
)
from rope_patch.patching.encoding import encode
from rope_patch.patching.locate import PatchError, RotaryLocation, device_of, find_rotary, other_tables
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.probe import check_use
from rope_patch.patching.readers import outside_readers
from rope_patch.patching.record import PatchRecord, TableRecord, hashes, key_of, same_tables
from rope_patch.patching.targets import check_layer_types, choose_layer_types, resolve_factor
from rope_patch.patching.two_tables import TwoTableRotary, check_decoder
from rope_patch.patching.undo import ModelState, Patch, keep_hook, write_config
from rope_patch.patching.verify import edits_since, measure, method_of
from rope_patch.tables import RotaryTable

logger = hf_logging.get_logger("rope_patch")


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
        method: a name with ``params``, a method string (``"yarn:factor=4"``), a method object, or a sequence of them.
            ``"yarn:factor=4@8192"`` (:class:`~rope_patch.TwoTables`) leaves sequences of up to 8192 tokens as they are.
        layer_types: which tables to patch on models with one per layer type; ``("full_attention",)`` by default.
        target_length: the context to state in the config [tokens]; unchanged by default. A ``factor`` that is left out
            is taken from it, one that does not reach it is refused.
        replace: replace an earlier patch, starting again from the base table. What was changed in the config since
            then is dropped, with a warning.
        keep_edits: with ``replace``, start from what the config says now, such changes included.
        precision: ``"float64"`` computes angles in double; no config of transformers can say so.
        freeze_at: length at which to freeze a ``dynamic`` or two-table ``longrope`` checkpoint [tokens].
        **params: the method's parameters.

    Returns:
        The patch, with the tables before and after and ``restore()``.

    Raises:
        ValueError: bad parameters, a factor that contradicts the target, a model without a rotary table that can be
            patched, or whose layers use none.
        PatchError: the model is patched already.
    """
    patch = _apply(
        model,
        as_method(method, **params),
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
    method: Method,
    *,
    layer_types: Sequence[str] | None = None,
    target_length: int | None = None,
    replace: bool = False,
    keep_edits: bool = False,
    precision: str = "float32",
    freeze_at: int | None = None,
    recorded: bool = False,
    warn: Callable[[str], None] | None = None,
) -> Patch:
    """Patch a model. With ``recorded`` the method comes from a patch record, and its factor is not checked again."""
    _check_options(target_length, replace, keep_edits, precision)
    with find_rotary(model).lock:
        location = find_rotary(model)  # another thread may have changed it while this one waited
        source, warnings = _source(location, replace, keep_edits, quiet=recorded)
        before, table_warnings = read_tables(source, freeze_at=freeze_at)
        warnings += table_warnings
        chosen = choose_layer_types(before, layer_types)
        check_layer_types(method, before, chosen)
        original, base_config = base_of(source)
        if not recorded:
            method = resolve_factor(method, [before[kind] for kind in chosen], target_length)
        length = target_length or int(base_config.max_position_embeddings)
        after = {kind: method(table) if kind in chosen else table for kind, table in before.items()}
        short: dict[str | None, RotaryTable] = {}
        if isinstance(method, TwoTables):
            check_decoder(location.model, location.decoder)
            short = {kind: method.short_table(before[kind]) for kind in chosen}
            warnings += method.warnings([before[kind] for kind in chosen])
        after, settings = encode(source, before, after, length)
        if settings["rope_parameters"] != base_config.rope_parameters and (readers := outside_readers(location)):
            raise ValueError(
                f"{', '.join(readers)} of {type(location.model).__name__} reads config.rope_parameters besides the "
                "rotary embedding: another encoding would change more than the table. Such families are not supported"
            )
        check_use(location, after, chosen)
        record = PatchRecord(
            method=method.to_dict(),
            layer_types=chosen,
            tables={key_of(kind): TableRecord.of(table) for kind, table in after.items()},
            base_tables={key_of(kind): TableRecord.of(table) for kind, table in before.items()},
            short_tables={key_of(kind): TableRecord.of(table) for kind, table in short.items()},
            base_config=settings_of(base_config),
            target_length=target_length,
            precision=precision,
            freeze_at=freeze_at,
            edited=tuple(key_of(kind) for kind, table in before.items() if table.rope_parameters is None),
        )
        if not (record.changed or recorded or isinstance(method, Default)):
            warnings.append(f"{method} leaves every table of this {type(location.model).__name__} as it was")
        if getattr(location.model.config, "is_encoder_decoder", False) and (others := other_tables(location)):
            warnings.append(f"the decoder alone is patched: {', '.join(others)} keep their tables")
        for warning in warnings:
            (warn or logger.warning)(warning)
        fresh = original_rotary(type(original), base_config)
        options: Any = {"precision": precision, "keep_float32": keeps_float32(fresh, chosen)}
        if isinstance(method, TwoTables):
            options |= {"short": short, "switch_at": method.switch_at}
        module = (TwoTableRotary if short else PatchedRotary)(after, original, **options)
        state = ModelState(location)
        _put_in(state, module, settings, record)
    return Patch(method, before, after, record, module, state)


def _check_options(target_length: int | None, replace: bool, keep_edits: bool, precision: str) -> None:
    """Raise ValueError for options of ``apply`` that no model could take."""
    if precision not in ("float32", "float64"):
        raise ValueError(f"precision must be 'float32' or 'float64', got {precision!r}")
    whole = isinstance(target_length, int) and not isinstance(target_length, bool)
    if target_length is not None and not (whole and target_length >= 1):
        raise ValueError(f"target_length must be a whole number of tokens >= 1, got {target_length!r}")
    if keep_edits and not replace:
        raise ValueError("keep_edits goes with replace=True: it says what an earlier patch is replaced on")


def _put_in(state: ModelState, module: PatchedRotary, settings: Mapping[str, Any], record: PatchRecord) -> None:
    """Put a module into a model and its settings into the configs; on any error the model is as it was."""
    location = state.location
    module.train(location.module.training)
    keep_hook(location.module, module)
    try:
        location.put(module)
        for config in location.configs:
            write_config(config, settings, record.to_dict())
    except BaseException:
        state.reinstate()
        raise
    for kind in module.tables:  # before any compiler looks at the module
        module.table(kind, device_of(location.model))


def _source(
    location: RotaryLocation, replace: bool, keep_edits: bool, *, quiet: bool
) -> tuple[RotaryLocation, list[str]]:
    """Return the location to read the base tables from, and warnings.

    Raises:
        PatchError: the model is patched already, and is not to be patched anew.
    """
    check_base(location)
    if not replace:
        _refuse_a_second_patch(location)
    if location.record is None:
        return location, []
    if not keep_edits:
        edits = [] if quiet else edits_since(location)
        dropped = (
            f"replacing {location.record.to_method()} drops what was changed in the config since: {'; '.join(edits)}. "
        )
        return location, [dropped + "keep_edits=True (--keep-edits) starts from the config as it is"] if edits else []
    configs = tuple(copy.deepcopy(config) for config in location.configs)
    for config in configs:
        config.__dict__.pop("rope_patch", None)
    original = location.module.original if isinstance(location.module, PatchedRotary) else location.module
    module = original_rotary(type(original), configs[0])
    return RotaryLocation(location.model, location.path, module, configs), []


def _refuse_a_second_patch(location: RotaryLocation) -> None:
    record, name = location.record, type(location.model).__name__
    if record is None:
        if isinstance(location.module, PatchedRotary):
            raise PatchError(f"{name} is patched, but its config has lost the record: load the model again")
        return
    patched_already = f"{name} is already patched with {record.to_method()}"
    if edits := edits_since(location):
        raise PatchError(
            f"{patched_already}, and its config was changed since ({'; '.join(edits)}). replace=True (--replace) drops "
            "that and starts from the table before the patch; with keep_edits=True (--keep-edits), from the config as "
            "it is"
        )
    measurable = not isinstance(location.module, PatchedRotary) and not any(
        b.is_meta for b in location.module.buffers()
    )
    if measurable and measure(location.module, record.tables, device_of(location.model)):
        raise PatchError(
            f"the config of this {name} says it is patched with {record.to_method()}, but it does not use that table. "
            "Models built from one config object share it: give each its own copy (or pass replace=True here)"
        )
    raise PatchError(f"{patched_already}: restore it first, or pass replace=True (--replace)")


@contextlib.contextmanager
def patched(model: nn.Module, method: MethodLike, /, **options: Any) -> Iterator[Patch]:
    """Patch a model for the length of a ``with`` block; undone at its end, also after an exception.

    Takes what :func:`apply` takes. Another thread that wants to patch the same model waits until then.
    """
    known = set(inspect.signature(apply).parameters)
    params = {name: options.pop(name) for name in list(options) if name not in known}
    chosen = as_method(method, **params)
    with find_rotary(model).lock:
        patch = _apply(model, chosen, warn=logger.warning_once, **options)
        try:
            yield patch
        finally:
            patch.restore()


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
    for name in ("base_tables", "tables", "short_tables"):
        recorded, rebuilt = getattr(record, name), getattr(patch.record, name)
        if not same_tables(recorded, rebuilt):
            patch.restore()
            raise PatchError(
                f"the record of {record.to_method()} was made on another model: its {name.replace('_', ' ')} "
                f"({hashes(recorded)}) are not this model's ({hashes(rebuilt)})"
            )
    return patch
