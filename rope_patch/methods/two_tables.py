"""Two tables: one for sequences up to a length, another for longer ones."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from rope_patch.methods.base import Method
from rope_patch.methods.p_rope import Default
from rope_patch.tables import RotaryTable


@dataclass(frozen=True)
class TwoTables(Method):
    """A short and a long table. Each sequence is read under one of them, chosen by the length that it will reach.

    As a method of one table it is the long one, which is what a config states. As a method string it is
    ``LONG@LENGTH``, or ``LONG@LENGTH@SHORT``: ``yarn:factor=4@8192`` leaves sequences of up to 8192 tokens as they are.

    Attributes:
        long: the method for sequences that reach beyond ``switch_at``.
        short: the method for all others; by default none.
        switch_at: the greatest length under the short table [tokens]; None for the context that the checkpoint states.

    Raises:
        ValueError: two tables within one of the two, or a length below 1.
    """

    long: Method = field(default_factory=Default)
    short: Method = field(default_factory=Default)
    switch_at: int | None = None
    name: ClassVar[str] = "two_tables"

    def __post_init__(self) -> None:
        if isinstance(self.long, TwoTables) or isinstance(self.short, TwoTables):
            raise ValueError("a patch has two tables at most: the short and the long method are of one table each")
        if self.switch_at is None:
            return
        try:
            if isinstance(self.switch_at, bool) or operator.index(self.switch_at) < 1:
                raise TypeError
        except TypeError:
            raise ValueError(f"switch_at must be a whole number of tokens >= 1, got {self.switch_at!r}") from None
        object.__setattr__(self, "switch_at", operator.index(self.switch_at))

    @property
    def extends(self) -> bool:  # type: ignore[override]
        """Whether the long table reaches further by numbers that say nothing of how far."""
        return self.long.extends

    @property
    def replace_scaling(self) -> bool:
        """Whether the long method starts again from the plain table."""
        return bool(getattr(self.long, "replace_scaling", False))

    @property
    def needs_target(self) -> bool:
        """Whether the factor of the long method, or where to switch, is still to be filled in."""
        return self.long.needs_target or self.switch_at is None

    def __call__(self, table: RotaryTable) -> RotaryTable:
        """Return the long table."""
        return self.long(table)

    def short_table(self, table: RotaryTable) -> RotaryTable:
        """Return the short table.

        Raises:
            ValueError: the two tables are the same.
        """
        short, long = self.short(table), self.long(table)
        if torch.equal(short.inv_freq, long.inv_freq) and short.attention_scaling == long.attention_scaling:
            raise ValueError(f"{self.short} and {self.long} give {table.path} the same table: nothing would switch")
        return short

    def for_target(self, table: RotaryTable, target_length: int | None) -> TwoTables:
        """Return the method with the factor of the long table, and the length at which to switch, filled in.

        Raises:
            ValueError: as for the two methods, or a target that the short table alone would serve.
        """
        switch_at = self.switch_at or (table.context if self.replace_scaling else table.max_position_embeddings)
        if target_length is not None and target_length <= switch_at:
            raise ValueError(
                f"switch_at {switch_at} is not below the target_length {target_length}: the long table would never be "
                "used"
            )
        if self.short.needs_target:
            raise ValueError(f"the short method {self.short} needs a factor: target_length is for the long one")
        return replace(self, long=self.long.for_target(table, target_length), switch_at=switch_at)

    def reach(self, table: RotaryTable) -> int | None:
        """Return the context that the long table reaches [tokens]; None where it states none."""
        return self.long.reach(table)

    def to_dict(self) -> dict[str, Any]:
        """Return both methods and the length, JSON-ready."""
        parts = {"long": self.long.to_dict(), "short": self.short.to_dict()}
        return {"method": self.name, **parts, "switch_at": self.switch_at}

    def __str__(self) -> str:
        """Write the method string ``LONG@LENGTH[@SHORT]``; the length is missing where it is still to be filled in."""
        parts = [self.long, "" if self.switch_at is None else self.switch_at, self.short]
        return "@".join(map(str, parts[:2] if self.short == Default() else parts))
