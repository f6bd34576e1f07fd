"""A patch in place, and how it is undone: the module that was found, and what the configs said."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from rope_patch.methods import Method
from rope_patch.patching.base_tables import CONFIG_KEYS, base_of, check_base, name_in, original_rotary, settings_of
from rope_patch.patching.locate import PatchError, RotaryLocation, device_of, find_rotary
from rope_patch.patching.module import PatchedRotary
from rope_patch.patching.record import PatchRecord, about_two_tables
from rope_patch.patching.two_tables import Reach, reaching
from rope_patch.tables import RotaryTable


class ModelState:
    """A model's rotary state: the module in place and what its configs say."""

    def __init__(self, location: RotaryLocation) -> None:
        self.location = location
        self.before = [
            (settings_of(config), copy.deepcopy(getattr(config, "rope_patch", None))) for config in location.configs
        ]

    def reinstate(self) -> None:
        """Put back the module and what the configs said."""
        self.location.put(self.location.module)
        for config, (settings, record) in zip(self.location.configs, self.before, strict=True):
            write_config(config, settings, record)


def write_config(config: PreTrainedConfig, settings: Mapping[str, Any], record: Mapping[str, Any] | None) -> None:
    """Make the config say exactly these rotary settings and this record."""
    for key in (*CONFIG_KEYS, "rope_patch"):
        config.__dict__.pop(name_in(config, key), None)
    for key, value in settings.items():
        setattr(config, key, copy.deepcopy(value))
    if record is not None:
        config.rope_patch = copy.deepcopy(record)


@dataclass(frozen=True, eq=False)
class TableChange:
    """What a patch changed, in a model or in a file.

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

    @property
    def unstated(self) -> str | None:
        """Say so where the tables reach further than the context that the config states."""
        reached = {self.method.reach(self.before[kind]) for kind in self.record.layer_types}
        stated = self.record.target_length or int(self.record.base_config["max_position_embeddings"])
        furthest = max((length for length in reached if length is not None), default=0)
        if furthest <= stated:
            return None
        return (
            f"{self.method} reaches {furthest} tokens, the checkpoint still states a context of {stated}: "
            f"target_length={furthest} (--target-length) states the longer one"
        )

    def describe(self) -> str:
        """Return the tables before and after, a line each."""
        lines = [f"patch {self.method}"]
        for kind, table in self.after.items():
            if table is self.before[kind]:
                lines.append(f"  {table}: left alone")
            else:
                lines += [f"  before  {self.before[kind]}", f"  after   {table}"]
        lines += [f"  {sentence}" for sentence in about_two_tables(self.record)]
        stated = int(self.record.base_config["max_position_embeddings"])
        if self.record.target_length not in (None, stated):
            lines.append(f"  context {stated} tokens before, {self.record.target_length} after")
        elif self.unstated is not None:
            lines.append(f"  {self.unstated}")
        return "\n".join(lines)

    __str__ = describe


@dataclass(frozen=True, eq=False)
class Patch(TableChange):
    """A patch in place."""

    _module: PatchedRotary
    _state: ModelState

    def reaching(self, tokens: Reach) -> AbstractContextManager[None]:
        """State the length that sequences will reach, for the forward passes of a ``with`` block.

        A patch of two tables chooses one for each sequence by it, and keeps to it: state it around all passes that read
        one sequence through a cache. ``generate`` states it itself, and a pass without a cache shows it. The block
        belongs to the thread: do not yield inside it.

        Args:
            tokens: one number for all rows of the batch, or one for each [tokens].

        Raises:
            ValueError: no whole numbers above 0.
        """
        return reaching(self._module, tokens)

    def restore(self) -> None:
        """Undo the patch: the model is as it was before ``apply``.

        Raises:
            PatchError: another patch has replaced this one, or it was undone already.
        """
        location = self._state.location
        with location.lock:
            if location.model.get_submodule(location.path) is not self._module:
                raise PatchError(f"the patch {self.method} is no longer in place: nothing to restore")
            if getattr(location.config, "rope_patch", None) != self.record.to_dict():
                raise PatchError(f"the config no longer says {self.method}: is it shared with another model?")
            follow_device(location.module, location.model)
            self._state.reinstate()


def restore(model: nn.Module) -> None:
    """Undo every patch of a model, also one that was loaded from a patched folder: base tables, base config.

    Raises:
        PatchError: the model is not patched.
    """
    with find_rotary(model).lock:
        location = find_rotary(model)
        record = location.record
        if record is None:
            raise PatchError(f"{type(location.model).__name__} carries no patch record: nothing to restore")
        check_base(location)
        if record.edited and not isinstance(location.module, PatchedRotary):
            raise PatchError("the base table was edited by hand before the patch; its config alone cannot restore it")
        original, _ = base_of(location)
        follow_device(original, location.model)
        location.put(original)
        for config in location.configs:
            write_config(config, record.base_config, None)


def rebase(model: nn.Module, settings: Mapping[str, Any]) -> None:
    """Give an unpatched model the rotary settings of another config, and the table that they describe."""
    location = find_rotary(model)
    for config in location.configs:
        write_config(config, settings, None)
    module = original_rotary(type(location.module), location.config)
    follow_device(module, location.model)
    location.put(module)


def follow_device(module: nn.Module, model: nn.Module) -> None:
    """Bring an original module that was set aside to where the model now is, without touching its dtype."""
    if not isinstance(module, PatchedRotary) and not any(b.is_meta for b in module.buffers()):
        module.to(device=device_of(model))


def keep_hook(old: nn.Module, new: nn.Module) -> None:
    """Carry accelerate's dispatch hook over."""
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module

        add_hook_to_module(new, hook)
