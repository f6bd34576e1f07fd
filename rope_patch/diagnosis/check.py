"""The result of one check, and the diagnosis that all of them make up."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rope_patch.patching.verify import turns_in_context
from rope_patch.runtime.captions import count_text
from rope_patch.runtime.text import printable
from rope_patch.tables import RotaryTable

HOLDS = "holds"
DIFFERS = "differs"
UNKNOWN = "unknown"
NOTE = "note"
NOT_SEEN = "Not seen by any check: under which table the weights were trained."
"""What follows the verdict that all checks hold; the record of an adapter says it of the adapter."""
WIDTH = 120
"""Width of printed lines [characters]."""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: the subject of the check, in a few words.
        state: ``"holds"``, ``"differs"``, ``"unknown"`` if the check could not be made, or ``"note"`` if it is no fault
            that was found, but worth knowing.
        found: a sentence on what was found; for ``"unknown"`` the reason.
        expected: what was expected; empty if the check holds.
        meaning: what a difference means for the user; empty if the check holds.
        fix: a command or change that helps; empty if nothing needs to be done.
        angle_error: the largest difference of an angle from the expected one [rad]; None if no angles were compared.
        position: the position of that angle [tokens]; None if no angles were compared.
        program: the other program that the check is about; None if it is about this folder and this process.
        counts: whether the check decides about the verdict and the exit status; a note never does.
    """

    name: str
    state: str
    found: str
    expected: str = ""
    meaning: str = ""
    fix: str = ""
    angle_error: float | None = None
    position: int | None = None
    program: str | None = None
    counts: bool = True

    def __post_init__(self) -> None:
        if self.state == NOTE:
            object.__setattr__(self, "counts", False)

    def __str__(self) -> str:
        lines = [f"{self.state:<8} {self.name}: {self.found}"]
        if self.angle_error is not None and self.angle_error > 1e-3 and self.state != HOLDS:
            lines.append(f"largest angle error: {self.angle_error:.2g} rad, at position {self.position}")
        for name in ("expected", "meaning", "fix"):
            if text := getattr(self, name):
                lines.append(f"{name}: {text}")
        fill = functools.partial(textwrap.fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
        first, *others = lines
        filled = [fill(first, subsequent_indent=" " * 9)]
        filled += [fill(line, initial_indent=" " * 9, subsequent_indent=" " * 11) for line in others]
        return "\n".join(filled)


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """The results of all checks of a model; ``print`` shows them.

    Attributes:
        source: the class of a model in memory, or the folder, hub id or file of a checkpoint.
        method: the method string of the patch; None if the model is not patched.
        tables: the tables that are meant, by layer type; empty if they cannot be read.
        checks: the checks, in the order in which they were made.
    """

    source: str
    method: str | None
    tables: Mapping[str | None, RotaryTable]
    checks: tuple[Check, ...]

    def found(self, state: str) -> list[Check]:
        """Return the checks that count and have a given state."""
        return [check for check in self.checks if check.counts and check.state == state]

    @property
    def ok(self) -> bool:
        """Whether every check that counts was made and holds."""
        return self.status == 0

    @property
    def status(self) -> int:
        """The exit status of the command: 0 if everything holds, 1 if something differs, 3 if that is not known."""
        if self.found(DIFFERS):
            return 1
        # Not 2, the status of wrong arguments.
        return 3 if self.found(UNKNOWN) else 0

    def counting(self, programs: tuple[str, ...]) -> Diagnosis:
        """Return a diagnosis in which the checks of these other programs count, too."""
        checks = (replace(check, counts=check.counts or check.program in programs) for check in self.checks)
        return replace(self, checks=tuple(checks))

    @property
    def verdict(self) -> str:
        """A line that says how many checks hold, differ or could not be made."""
        differing, unknown = (len(self.found(state)) for state in (DIFFERS, UNKNOWN))
        count = sum(check.counts for check in self.checks)
        if differing:
            return f"NOT OK: {differing} of {count} checks differ"
        if unknown:
            others = ", the others hold" if unknown < count else ""
            return f"UNKNOWN: {unknown} of {count} checks could not be made{others}"
        notes = [check.name for check in self.checks if check.state == NOTE]
        if not notes:
            return f"OK: {count} of {count} checks hold"
        noted = f"{count_text(len(notes), 'note')}: {', '.join(dict.fromkeys(notes))}"
        return f"OK: {count} of {count} checks hold, {noted}"

    def __repr__(self) -> str:
        return f"<Diagnosis of {self.source}: {self.verdict}>"

    def __str__(self) -> str:
        patched = "not patched"
        if self.method is not None:
            patched = f"patched with {self.method}"
        lines = [f"{self.source}: {patched}"]
        for table in self.tables.values():
            lines += [f"  {table}", f"    {turns_in_context(table)}"]
        own = [check for check in self.checks if check.program is None or check.counts]
        others = [check for check in self.checks if check not in own]
        differing = [check.name.partition(" [")[0] for check in others if check.state == DIFFERS and self.ok]
        verdict = self.verdict
        if differing:
            verdict += f"; other tables in {', '.join(dict.fromkeys(differing))} (see below)"
        lines.append(verdict)
        if self.ok and not any(check.name.startswith("adapter") and check.state == HOLDS for check in own):
            lines.append(NOT_SEEN)
        order = (DIFFERS, UNKNOWN, NOTE, HOLDS)
        lines += map(str, sorted(own, key=lambda check: order.index(check.state)))
        if others:
            lines += ["", "What other programs compute (this counts only with --for PROGRAM):", *map(str, others)]
        return printable("\n".join(lines))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        tables = [
            {
                "layer_type": kind,
                "rope_type": table.rope_type,
                "rope_theta": table.rope_theta,
                "attention_scaling": table.attention_scaling,
                "max_position_embeddings": table.max_position_embeddings,
                "inv_freq": table.inv_freq.tolist(),
                "hash": table.fingerprint,
            }
            for kind, table in self.tables.items()
        ]
        head = {"source": self.source, "method": self.method, "ok": self.ok, "status": self.status}
        return {**head, "tables": tables, "checks": [asdict(check) for check in self.checks]}
