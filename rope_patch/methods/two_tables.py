"""A method of two tables: one for sequences up to a length, another for longer ones."""

from __future__ import annotations

from collections.abc import Sequence
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
        short: the method for all other sequences; by default none, which leaves the checkpoint's table.
        switch_at: the greatest sequence length that is read under the short table [tokens].

    Raises:
        ValueError: one of the two has two tables itself, or the length is below 1.
    """

    long: Method
    short: Method = field(default_factory=Default)
    switch_at: int = field(kw_only=True)
    # Not in the class statement, which would register it: it is written LONG@LENGTH, not by its name.
    name: ClassVar[str] = "two_tables"

    def __post_init__(self) -> None:
        for method in (self.long, self.short):
            check_one_table(method, "each side of a switch")
        if not isinstance(self.switch_at, int) or isinstance(self.switch_at, bool) or self.switch_at < 1:
            raise ValueError(f"switch_at must be a whole number of tokens >= 1, got {self.switch_at!r}")

    @property
    def replace_scaling(self) -> bool:
        """Whether the long method starts from the plain table, without the checkpoint's scaling."""
        return bool(getattr(self.long, "replace_scaling", False))

    @property
    def named_layer_types(self) -> tuple[str, ...]:
        """The layer types that either method names."""
        return (*self.long.named_layer_types, *self.short.named_layer_types)

    @property
    def needs_target(self) -> bool:
        """Whether the factor of the long method was left out, so that a target length has to fill it in."""
        return self.long.needs_target

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
        """Return the method with the factor of the long table filled in.

        Raises:
            ValueError: as for the long method, or the short method has no factor, or the target does not exceed
                ``switch_at``.
        """
        if target_length is not None and target_length <= self.switch_at:
            raise ValueError(
                f"switch_at {self.switch_at} is not below the target_length {target_length}: the long table would "
                "never be used"
            )
        if self.short.needs_target:
            raise ValueError(f"the short method {self.short} needs a factor: target_length is for the long one")
        return replace(self, long=self.long.for_target(table, target_length))

    def reach(self, table: RotaryTable) -> int | None:
        """Return the context that the long table reaches [tokens]; None if its method has no factor."""
        return self.long.reach(table)

    def warnings(self, tables: Sequence[RotaryTable]) -> list[str]:
        """Return a warning if sequences below the switch may be longer than the short table reaches."""
        reached = min(self.short.reach(table) or table.max_position_embeddings for table in tables)
        if self.short.extends or self.switch_at <= reached:
            return []
        return [
            f"texts of {reached} to {self.switch_at} tokens are read under the short table, {self.short}, which "
            f"reaches {reached}: a switch at {reached} reads them under the long one"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return both methods and the length as JSON values."""
        parts = {"long": self.long.to_dict(), "short": self.short.to_dict()}
        return {"method": self.name, **parts, "switch_at": self.switch_at}

    def __str__(self) -> str:
        """Return the method string ``LONG@LENGTH[@SHORT]``."""
        string = f"{self.long}@{self.switch_at}"
        return string if self.short == Default() else f"{string}@{self.short}"


def check_one_table(method: Method, what: str) -> None:
    """Raise ValueError for a method of two tables where only one table is possible.

    Args:
        method: the method that is checked.
        what: the subject of the message, which has one table, such as ``"a model in training"``.
    """
    if isinstance(method, TwoTables):
        raise ValueError(f"{what} has one table, and {method} has two: give the long method alone, {method.long}")
