"""Checks of the tables that other programs compute from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import transformers

from rope_patch.diagnosis.check import DIFFERS, HOLDS, NOTE, UNKNOWN, Check
from rope_patch.engines.compare_programs import AGREES, OURS, REFERENCE, ProgramReading, compare_programs
from rope_patch.engines.programs import PROGRAMS, UNVERIFIED


def programs_agree(source: str | Path, pythons: Mapping[str, str | Path] | None = None) -> Iterator[Check]:
    """Yield a check for each known program, of the table that it computes from a folder, hub id or GGUF file.

    Args:
        source: the folder, hub id or GGUF file.
        pythons: the Python by program in which it is installed, for programs that are asked.
    """
    comparison = compare_programs(source, pythons)
    rows = [row for row in comparison.rows if (row.verdict, row.program) != (REFERENCE, OURS)]
    for program in dict.fromkeys(row.program for row in rows):
        kinds = {_check(row): row.layer_type for row in rows if row.program == program}
        for check, kind in kinds.items():
            # A program that treats all layer types alike gets one line.
            if len(kinds) != 1 and kind is not None:
                check = replace(check, name=f"{check.name} [{kind}]")
            yield check
    for note in comparison.notes:
        yield Check("table", NOTE, note)


def _check(row: ProgramReading) -> Check:
    name = f"transformers {transformers.__version__}"
    if row.program in PROGRAMS:
        name = f"{PROGRAMS[row.program].name} {row.version}"
    if row.asked:
        name += ", asked"
    state = DIFFERS
    if row.verdict in (AGREES, REFERENCE):
        state = HOLDS
    elif row.verdict == UNVERIFIED:
        state = UNKNOWN
    found = row.found or "it computes the same table"
    return Check(name, state, found, meaning=row.reason, fix=row.fix, program=row.program, counts=False)
