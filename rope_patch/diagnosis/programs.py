"""Checks of the tables that other programs compute from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import transformers

from rope_patch.diagnosis.check import DIFFERS, HOLDS, NOTE, UNKNOWN, Check
from rope_patch.engines.compare_programs import AGREES, OURS, REFERENCE, ProgramReading, compare_programs
from rope_patch.engines.compare_programs import DIFFERS as OTHER_TABLE
from rope_patch.engines.dialect_tables import Built
from rope_patch.engines.tables_by_program import PROGRAMS
from rope_patch.engines.verified_versions import UNVERIFIED


def programs_agree(source: str | Path) -> Iterator[Check]:
    """Yield a check for each known program, of the table that it computes from a folder, hub id or GGUF file."""
    comparison = compare_programs(source)
    rows = [row for row in comparison.rows if (row.verdict, row.program) != (REFERENCE, OURS)]
    tables = {row.layer_type: row.built for row in comparison.rows if row.verdict == REFERENCE}
    for program in dict.fromkeys(row.program for row in rows):
        kinds = {_check(row, tables.get(row.layer_type)): row.layer_type for row in rows if row.program == program}
        for check, kind in kinds.items():
            # A program that treats all layer types alike gets one line.
            if len(kinds) != 1 and kind is not None:
                check = replace(check, name=f"{check.name} [{kind}]")
            yield check
    for note in comparison.notes:
        yield Check("table", NOTE, note)


def _check(row: ProgramReading, own: Built | None) -> Check:
    known = PROGRAMS.get(row.program)
    name = f"transformers {transformers.__version__}"
    if known:
        name = f"{known.name} {known.version}"
    reasons = "; ".join(row.reasons)
    check = Check(name, HOLDS, "it computes the same table", program=row.program, counts=False)
    if row.verdict in (AGREES, REFERENCE):
        return check
    if row.verdict == UNVERIFIED:
        return replace(check, state=UNKNOWN, found=reasons)
    if row.verdict != OTHER_TABLE or row.built is None:
        return replace(check, state=DIFFERS, found=f"it refuses this checkpoint: {reasons}", fix=row.fix)
    built = row.built
    # A difference that would be printed as 0.00 % is left out.
    off = "" if not row.difference or row.difference < 5e-5 else f", frequencies off by up to {row.difference:.2%}"
    problem = f"it computes another table: attention factor {built.attention_scaling:.6g}, context {built.context}{off}"
    if row.moved:
        problem = row.moved
    elif own is not None and built.equals(own):
        context = min(built.context, built.positions or built.context)
        problem = f"it computes the same table, for a context of {context} tokens and not of {own.context}"
    return replace(check, state=DIFFERS, found=problem, meaning=reasons, fix=row.fix)
