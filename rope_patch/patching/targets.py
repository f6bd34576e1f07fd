"""What a method is applied to: which layer types, and which factor a target length asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from rope_patch.methods import Chain, Method, MethodLike, TwoTables, as_method
from rope_patch.patching.base_tables import Tables, read_tables
from rope_patch.patching.locate import find_rotary
from rope_patch.tables import RotaryTable


def for_target(
    model: nn.Module,
    method: MethodLike,
    target_length: int,
    *,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
) -> Method:
    """Return a method with the factor that :func:`rope_patch.apply` would take from a target where it was left out.

    Args:
        model: to be patched.
        method: in any form.
        target_length: to be reached [tokens].
        layer_types: as for ``apply``.
        freeze_at: as for ``apply``.

    Raises:
        ValueError: a bad method, or tables that need different factors.
    """
    chosen = as_method(method)
    if not chosen.needs_target:
        return chosen
    tables, _ = read_tables(find_rotary(model), freeze_at=freeze_at)
    return _with_factor(chosen, [tables[kind] for kind in choose_layer_types(tables, layer_types)], target_length)


def resolve_factor(method: Method, tables: Sequence[RotaryTable], target_length: int | None) -> Method:
    """Return the method with its factor filled in or checked against the target.

    Args:
        method: to be applied.
        tables: the tables that are patched.
        target_length: the context asked for [tokens]; None where none was named.

    Raises:
        ValueError: a target that the checkpoint reaches without a patch, a factor that does not reach the target, or
            tables that need different factors.
    """
    first = tables[0]
    drops = getattr(method, "replace_scaling", False)  # what reached further than the trained context
    least = first.context if drops else max(first.context, first.max_position_embeddings)
    if target_length is not None and target_length < least:
        raise ValueError(f"target_length {target_length} is shorter than the context of the checkpoint, {least} tokens")
    return _with_factor(method, tables, target_length)


def _with_factor(method: Method, tables: Sequence[RotaryTable], target_length: int | None) -> Method:
    """Return the method with its factor, which must be the same on every table that is patched."""
    methods = [method.for_target(table, target_length) for table in tables]
    by_string = {str(filled): filled for filled in methods}
    if len(by_string) > 1:
        raise ValueError(
            f"the tables of this model need different factors ({', '.join(by_string)}): patch one at a time"
        )
    return methods[0]


def check_layer_types(method: Method, tables: Tables, chosen: Sequence[str | None]) -> None:
    """Raise where a step is for a layer type that the model has not, or that is not patched."""
    if isinstance(method, TwoTables):
        for one in (method.long, method.short):
            check_layer_types(one, tables, chosen)
        return
    steps = method.steps if isinstance(method, Chain) else (method,)
    for kind in (getattr(step, "layer_type", None) for step in steps):
        if kind is None or kind in chosen:
            continue
        if list(tables) == [None]:
            raise ValueError(f"this model has one table for all layers: leave out layer_type={kind}")
        if kind not in tables:
            raise ValueError(f"no table for layer type {kind!r}. Known: {', '.join(map(str, tables))}")
        raise ValueError(f"the method is for {kind!r}, which is not patched: name it in layer_types (--layer-type)")


def choose_layer_types(tables: Tables, layer_types: Sequence[str] | None) -> tuple[str | None, ...]:
    """Return the layer types to patch: those named, or full attention; ``(None,)`` where there is one table for all.

    Raises:
        ValueError: an unknown layer type, none at all, or one named where there is one table for all.
    """
    known = list(tables)
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
