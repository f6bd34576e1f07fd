"""Methods with a factor, on a plain table and on one that a checkpoint scales already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch

from rope_patch.frequencies import geometric, unrotated
from rope_patch.methods.already_scaled import (
    ORIGINAL,
    context_before,
    context_reached,
    is_known,
    own_factor,
    stopped_as,
)
from rope_patch.methods.method import METHODS, Method, number
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class Scaling(Method):
    """Base class of the methods whose ``factor`` stretches the context; the default follows from a target length.

    The factor is the new context divided by the one that the checkpoint states. On a table that is scaled already a
    method of the same type raises its factor, and a method that recomputes the table starts from the plain one, with
    the whole factor over the context before any scaling.

    Args:
        factor: the new context divided by the stated one; left out, it follows from the target length.
    """

    factor: float | None = number(None, least=1)
    ends: ClassVar[tuple[str, ...]] = ()
    """The names of two parameters of which the first must exceed the second."""

    def check(self) -> None:
        """Raise unless the first of the two ends exceeds the second."""
        values = [getattr(self, name) for name in self.ends]
        if values and values[0] <= values[1]:
            raise ValueError(f"{' must exceed '.join(self.ends)}, got {values[0]} and {values[1]}")

    def context_of(self, table: RotaryTable) -> int:
        """Return the context that the factor multiplies [tokens]: what the table reaches, without its scaling."""
        if table.is_plain:
            return self.given_context or table.context
        return context_reached(table)

    def on_scaled(self, table: RotaryTable) -> RotaryTable | None:
        """Return the table of the checkpoint's own type with a larger factor, or one that is computed anew."""
        if self.given_context is not None and is_known(table):
            context_before(table, self.given_context)  # raises where the checkpoint says another
        if table.rope_type in self.own_types:
            own = self._raised(table)
            if own is not None:
                return own
        if not self.recomputes or not is_known(table):
            return None
        original = context_before(table, self.given_context)
        whole = self.with_factor(self.stretch * context_reached(table) / original, table)
        plain = replace(table.plain(), original_max_position_embeddings=original)
        return stopped_as(table, whole.computed(plain))

    def _raised(self, table: RotaryTable) -> RotaryTable | None:
        """Return the table of the checkpoint's own type with a larger factor, as :func:`restated` does."""
        stated = dict(table.rope_parameters or {})
        changes = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name != "factor" and value != f.default:
                changes[f.name] = value
        if not changes.keys().isdisjoint(self.ends):
            try:
                as_stated(type(self), stated | changes).check()
            except ValueError as error:
                raise ValueError(f"{error}: config.json states the one that is not given, choose another") from None
        factor = own_factor(table)
        return restated(table, factor=factor * self.stretch, **self.following(stated, factor) | changes)

    def with_factor(self, factor: float, table: RotaryTable) -> Method:
        """Return the method with the factor over the plain table, and what else of the scaled table it keeps."""
        return replace(self, factor=factor)

    def following(self, stated: Mapping[str, Any], factor: float) -> dict[str, Any]:
        """Return the stated parameters that follow a factor, for the one that :attr:`stretch` makes of it."""
        return {}

    @property
    def given_context(self) -> int | None:
        """The context before the scaling, where the method has a parameter for it and it is given [tokens]."""
        given: int | None = getattr(self, ORIGINAL, None)
        return given

    @property
    def needs_target(self) -> bool:
        """Whether the factor was left out, so that a target length has to fill it in."""
        return self.factor is None

    @property
    def stretch(self) -> float:
        """The factor.

        Raises:
            ValueError: the factor was left out.
        """
        if self.factor is None:
            raise ValueError(f"{self.name} needs a factor, or a target_length to take it from: {self.name}:factor=4")
        return self.factor

    def for_target(self, table: RotaryTable, target_length: int | None) -> Scaling:
        """Return the method with its factor filled in or checked."""
        return self.stretched(self.context_of(table), target_length)

    def stretched(self, context: float, target_length: int | None) -> Scaling:
        """Return the method with the factor that stretches a context to a target length [tokens]."""
        if target_length is None:
            return replace(self, factor=self.stretch)
        needed = max(1.0, target_length / context)
        if self.factor is None:
            return replace(self, factor=needed)
        # The factor that the message advises has six digits, so it may miss the target by less than a token.
        if self.factor * context < target_length - 1:
            raise ValueError(
                f"{self.name}:factor={self.factor:g} reaches {round(self.factor * context)} tokens of the "
                f"target_length {target_length}: give factor={needed:g}, or leave the factor out"
            )
        return self

    def reach(self, table: RotaryTable) -> int | None:
        """Return the context times the factor [tokens]."""
        return None if self.factor is None else round(self.context_of(table) * self.factor)


def restated(table: RotaryTable, **changes: Any) -> RotaryTable | None:
    """Return the table that the checkpoint's own type gives with some of its parameters changed.

    Args:
        table: a table of the checkpoint, as it was found.
        **changes: the parameters of its ``rope_parameters`` that change, ``factor`` or ``rope_theta`` among them.

    Returns:
        The table, with every other key as the checkpoint states it; None if no method has the type, or if the model's
        class computes its table in a way of its own.
    """
    owner = owner_of(table)
    if owner is None:
        return None
    stated = dict(table.rope_parameters or {})
    # A stated context that grows must change neither the context before the scaling nor the factor.
    if hasattr(owner, ORIGINAL):
        stated.setdefault(ORIGINAL, table.context)
    if "factor" in stated:
        stated["factor"] = own_factor(table)
    found = _of_type(owner, table, stated)
    if not torch.allclose(found.inv_freq, table.inv_freq, rtol=1e-6, atol=0.0):
        return None
    return _of_type(owner, table, {**stated, **changes})


def _of_type(owner: type[Method], table: RotaryTable, parameters: dict[str, Any]) -> RotaryTable:
    """Return the table that transformers computes from parameters of the type of a table, which a method raises."""
    theta = float(parameters["rope_theta"])
    plain = geometric(theta, table.rotary_dim)
    if table.rope_type == "proportional":
        rotated = int((~unrotated(table.inv_freq)).sum())
        plain = torch.zeros_like(plain)
        plain[:rotated] = geometric(theta, table.rotary_dim, rotated)
    base = replace(table, inv_freq=plain, attention_scaling=1.0, rope_theta=theta, rope_type="default")
    method = as_stated(owner, {"factor": 1.0} | parameters)
    return table.becomes(method.inv_freq(base), rope_parameters=parameters, attention_scaling=method.scaling(base))


def owner_of(table: RotaryTable) -> type[Method] | None:
    """Return the method of the type that a table has already; None if there is none."""
    return next((method for method in METHODS.data.values() if table.rope_type in method.own_types), None)


def as_stated(owner: type[Method], parameters: Mapping[str, Any]) -> Method:
    """Return a method with the parameters that a checkpoint states, which transformers computes whatever they are."""
    # Bounds are for arguments, so nothing is checked here.
    method = object.__new__(owner)
    for f in fields(owner):
        value = parameters.get(f.name, f.default)
        # A number of 0 counts as the default there, and null switches `truncate` off.
        if isinstance(f.default, bool):
            value = bool(value)
        elif not value:
            value = f.default
        object.__setattr__(method, f.name, value)
    return method
