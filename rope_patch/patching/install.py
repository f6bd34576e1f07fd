"""Put tables into a model and take them out again: apply, restore, patched."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as hf_logging

from rope_patch.methods import Method, MethodLike, as_method
from rope_patch.methods.default import Default
from rope_patch.patching.config_settings import build_rotary, config_with, set_rotary_settings, settings_of
from rope_patch.patching.encode import (
    PatchPlan,
    PatchRequest,
    TableChange,
    attributes_that_follow,
    encode_tables,
    plan_from_record,
)
from rope_patch.patching.locate import Location, PatchError, device_of, locate
from rope_patch.patching.record import PatchRecord, differences
from rope_patch.patching.rotary import PatchedRotary, original_tables
from rope_patch.patching.verify import edits_since
from rope_patch.tables import choose_layer_types

logger = hf_logging.get_logger("rope_patch")


@dataclass(frozen=True, eq=False, repr=False)
class Patch(TableChange):
    """A patch that is in place in a model."""

    _module: PatchedRotary
    _location: Location
    _configs: Sequence[tuple[Mapping[str, Any], Any]]  # the settings and the record of each config before the patch
    _attributes: Sequence[tuple[nn.Module, str, Any, Any]]  # of modules that follow the settings: before and after
    _name: str | None  # of the model before the patch; `save` gives it that of a folder with the patched table

    def restore(self) -> None:
        """Undo the patch, so that the model is as it was before ``apply``.

        Raises:
            PatchError: another patch has replaced this one, or it was undone already.
        """
        location = self._location
        if location.model.get_submodule(location.path) is not self._module:
            raise PatchError(f"the patch {self.method} is no longer in place: nothing to restore")
        # Two models can share a config object; undoing this patch must not undo what it says of the other model.
        if getattr(location.config, "rope_patch", None) != self.record.to_dict():
            raise PatchError(f"the config no longer says {self.method}: is it shared with another model?")
        follow_device(location.module, location.model)
        self.reinstate()
        location.model.name_or_path = location.model.config.name_or_path = self._name

    def reinstate(self) -> None:
        """Put back the module and settings from before the patch, whatever is in place now."""
        self._location.model.set_submodule(self._location.path, self._location.module)
        for module, name, before, _ in self._attributes:
            setattr(module, name, before)
        for config, (settings, record) in zip(self._location.configs, self._configs, strict=True):
            set_rotary_settings(config, settings, record)


def apply(
    model: nn.Module,
    method: MethodLike,
    /,
    *,
    layer_types: Sequence[str] | None = None,
    target_length: int | None = None,
    replace: bool = False,
    freeze_at: int | None = None,
    **params: Any,
) -> Patch:
    """Patch a model's rotary tables in place.

    The module that holds them is swapped for a :class:`PatchedRotary`, which no cast or re-initialisation can change,
    and ``config.rope_parameters`` is rewritten so that ``save_pretrained`` gives a folder that plain transformers loads
    with equal logits. On any error the model is as it was. A KV cache that was filled before the patch cannot be used
    after it: its keys were rotated by the other table. A model belongs to one thread: nothing here takes a lock.

    Args:
        model: a causal language model of transformers, bare or under PEFT, quantization or ``torch.compile``.
        method: a name with ``params``, a method string (``"yarn:factor=4"``), a method object, or a sequence of them.
        layer_types: layer types whose tables are patched, on models with a table for each layer type;
            ``("full_attention",)`` by default.
        target_length: context that the config will state [tokens]; unchanged by default. If ``factor`` is left out, it
            follows from the target; a factor that does not reach the target is refused.
        replace: whether to replace an earlier patch, starting again from the table and the config before it. Changes
            to the config since then are dropped, with a warning.
        freeze_at: length at which a ``dynamic`` or two-table ``longrope`` checkpoint is frozen [tokens].
        **params: parameters of the method, if it is given by its name.

    Returns:
        The patch, with the tables before and after and ``restore()``.

    Raises:
        ValueError: a parameter is wrong, the factor contradicts the target, or the model has no rotary table that can
            be patched or no layer that uses it.
        PatchError: the model is patched already.
    """
    options = PatchRequest(layer_types, target_length, replace, freeze_at)
    chosen = as_method(method, **params)
    location = locate(model)
    patch = install(location, plan_patch(location, chosen, options, logger.warning))
    if target_length is None and (unstated := patch.unstated) is not None:
        logger.warning(unstated)
    return patch


def plan_patch(
    location: Location, method: Method, options: PatchRequest, warn: Callable[[str], None] = logger.warning_once
) -> PatchPlan:
    """Compute the new tables of a model, encode them, and check that the model can take them; nothing is changed.

    Args:
        location: the location of the model's rotary module.
        method: the method that makes the new tables.
        options: the options of :func:`apply`, which also raises what this does.
        warn: the function that is called with each warning; by default each is given once in a process.
    """
    location.check_base()
    warnings = []
    if options.replace:
        if edits := edits_since(location):
            warnings.append(f"replacing the patch drops what was changed in the config since: {'; '.join(edits)}")
    elif location.record is not None:
        raise PatchError(
            f"{location.name} is already patched with {location.record.to_method()}, or shares the config object of a "
            "model that is: restore it first, or pass replace=True (--replace)"
        )
    elif location.patched is not None:
        raise PatchError(f"{location.name} is patched, but its config has lost the record: load the model again")
    if not isinstance(method, Default):
        location.check_contexts()
    plan = encode_tables(location, method, options)
    if not (plan.record.changed or isinstance(method, Default)):
        warnings.append(f"{plan.method} leaves every table of this {location.name} as it was")
    for kind in plan.record.layer_types:
        old = plan.before[kind]
        new = plan.after[kind]
        if old.attention_scaling != new.attention_scaling and torch.equal(old.inv_freq, new.inv_freq):
            warnings.append(
                f"{plan.method} changes no frequency of {new.name}, whose pairs turn often enough as they are: it only "
                f"multiplies cos and sin by {new.attention_scaling:g} instead of {old.attention_scaling:g}"
            )
        if new.rope_theta < old.rope_theta:
            warnings.append(
                f"{plan.method} lowers the base of {new.name} from {old.rope_theta:g} to {new.rope_theta:g}: its pairs "
                "turn faster, which suits a shorter context"
            )
    _check(location, plan, warnings, warn)
    return plan


def install(location: Location, plan: PatchPlan) -> Patch:
    """Put a plan into a model, the only step that changes the model. On any error the model is as it was."""
    module = PatchedRotary(plan.after, location.original)
    module.train(location.module.training)
    hook = getattr(location.module, "_hf_hook", None)
    # A model that accelerate has spread over devices moves the inputs of each module by a hook.
    if hook is not None:
        # accelerate is imported only where it is in use already.
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(module, hook)
    configs = [(settings_of(each), copy.deepcopy(getattr(each, "rope_patch", None))) for each in location.configs]
    following = attributes_that_follow(location, plan.settings)
    old = location.model.name_or_path
    patch = Patch(plan.method, plan.before, plan.after, plan.record, module, location, configs, following, old)
    record = plan.record.to_dict()
    try:
        location.model.set_submodule(location.path, module)
        for owner, name, _, value in following:
            setattr(owner, name, value)
        for config in location.configs:
            set_rotary_settings(config, plan.settings, record)
    except BaseException:  # Ctrl-C, too
        patch.reinstate()
        raise
    # The cache of tables is filled before torch.compile traces the module, which then sees a constant tensor.
    for kind in module.tables:
        module.table(kind, device_of(location.model))
    return patch


def _check(location: Location, plan: PatchPlan, warnings: Sequence[str], warn: Callable[[str], None]) -> None:
    """Refuse a model that cannot take a plan, and give warnings about one that can.

    Args:
        location: the location of the model's rotary module.
        plan: the plan that would be installed.
        warnings: warnings that are given after those about the base tables.
        warn: the function that is called with each warning.

    Raises:
        ValueError: no layer uses the table (ALiBi, layers without rotary embeddings), something else reads the config,
            or the model calls its rotary embedding with arguments that a patched one cannot take.
    """
    name = location.name
    # The sentence on windows recommends what an unchanged table does.
    warnings = [w for w in location.warnings if plan.record.changed or w != location.windowed] + [*warnings]
    unread = location.unread_settings({"rope_parameters": location.base_config.rope_parameters})
    if unread:
        warnings.append(f"nothing in {name} reads what its config states in {', '.join(unread)}: the patch ignores it")
    probe = location.probe
    if plan.settings["rope_parameters"] != location.base_config.rope_parameters and probe.outside:
        raise ValueError(
            f"{', '.join(probe.outside)} of {name} reads config.rope_parameters besides the rotary embedding: another "
            "encoding would change more than the table. Such families are not supported"
        )
    for kind in plan.record.layer_types:
        if kind in probe.refusals:
            raise ValueError(f"{name} {probe.refusals[kind]}. Nothing was changed")
    if getattr(location.model.config, "is_encoder_decoder", False):
        inside = set(location.decoder.modules())
        others = [n for n, part in location.model.named_modules() if part not in inside and original_tables(part)]
        if others:
            warnings.append(f"the decoder alone is patched: {', '.join(others)} keep their tables")
    # Only after every check: a model that is refused is not warned about.
    for warning in warnings:
        warn(warning)


@contextlib.contextmanager
def patched(model: nn.Module, method: MethodLike, /, **options: Any) -> Iterator[Patch]:
    """Patch a model for the length of a ``with`` block, and undo the patch at its end, also after an exception.

    The arguments are those of :func:`apply`.
    """
    own = {each.name: options.pop(each.name) for each in fields(PatchRequest) if each.name in options}
    chosen = as_method(method, **options)
    location = locate(model)
    with installed(location, plan_patch(location, chosen, PatchRequest(**own))) as patch:
        yield patch


@contextlib.contextmanager
def installed(location: Location, plan: PatchPlan) -> Iterator[Patch]:
    """Put a plan into a model for the length of a ``with`` block, and undo it at its end, also after an exception."""
    patch = install(location, plan)
    try:
        yield patch
    finally:
        patch.restore()


def reapply(model: nn.Module, record: PatchRecord) -> Patch:
    """Repeat the patch of a record on a model, and check that the tables come out the same.

    Raises:
        PatchError: the model's base tables are not those that the record was made on.
    """
    location = locate(model)
    location.check_base()
    plan = plan_from_record(location, record)
    problems = differences(record.base_tables, plan.record.base_tables, "base tables")
    problems += differences(record.tables, plan.record.tables, "tables")
    if problems:
        raise PatchError(
            f"the record of {record.to_method()} was made on another model, or altered: {'; '.join(problems)}"
        )
    _check(location, plan, [], logger.warning)
    return install(location, plan)


def restore(model: nn.Module) -> None:
    """Undo the patch of a model, also of one that was loaded from a patched folder: base tables and base config return.

    Raises:
        PatchError: the model is not patched.
    """
    location = locate(model)
    record = location.record
    if record is None:
        raise PatchError(f"{location.name} carries no patch record, so what a patch changed is not known")
    location.check_base()
    if record.edited and location.patched is None:
        raise PatchError("the base table was edited by hand before the patch; its config alone cannot restore it")
    _reset(location, location.original, record.base_config)


def rebase(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Give a model rotary settings as those of a checkpoint without a patch, and the table that they describe."""
    location = locate(model)
    _reset(location, build_rotary(location.rotary_class, config_with(location.config, settings)), settings)


def _reset(location: Location, original: nn.Module, settings: Mapping[str, Any]) -> None:
    """Put an original module into a model, and its settings into the configs, and remove the record."""
    follow_device(original, location.model)
    location.model.set_submodule(location.path, original)
    for owner, name, _, value in attributes_that_follow(location, settings):
        setattr(owner, name, value)
    for config in location.configs:
        set_rotary_settings(config, settings, None)


def follow_device(module: nn.Module, model: nn.Module) -> None:
    """Move an original module that was set aside to the model's present device, without changing its dtype."""
    if not isinstance(module, PatchedRotary) and not any(b.is_meta for b in module.buffers()):
        module.to(device=device_of(model))


def for_target(
    model: nn.Module,
    method: MethodLike,
    target_length: int,
    *,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
) -> Method:
    """Return a method with the factor that :func:`apply` would derive from a target, if the factor was left out.

    Args:
        model: the model that will be patched.
        method: the method, in any form that :func:`apply` takes.
        target_length: the context that the method has to reach [tokens].
        layer_types: layer types whose tables will be patched, chosen as :func:`apply` chooses them.
        freeze_at: length at which a dynamic table is frozen first [tokens].

    Raises:
        ValueError: the method is wrong, or the tables need different factors.
    """
    chosen = as_method(method)
    if not chosen.needs_target:
        return chosen
    tables = locate(model).static_tables(freeze_at)
    return chosen.on_tables([tables[kind] for kind in choose_layer_types(tables, layer_types)], target_length)
