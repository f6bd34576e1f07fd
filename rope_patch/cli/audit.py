"""``rope-patch audit``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rope_patch.cli.parsing import parse
from rope_patch.cli.printing import print_json
from rope_patch.options.checkpoints import AuditOptions

DISAGREE = 3
"""Exit status where a program would compute another table."""


def audit(words: Sequence[str]) -> int:
    """Run ``rope-patch audit`` with the words behind it; return its exit status."""
    options = parse(AuditOptions, words)
    if options.method is not None:
        return _print_flags(options, options.method)
    from rope_patch.engines.audit import audit as compare
    from rope_patch.engines.program_readings import PROGRAMS

    audited = compare(options.model, options.engines or PROGRAMS)
    if options.as_json:
        print_json(
            {
                "model": audited.source,
                "class": audited.model_class,
                "method": audited.method,
                "agrees": audited.agrees,
                "rows": [row.to_dict() for row in audited.rows],
                "notes": list(audited.notes),
            }
        )
    else:
        _print(audited)
    return 0 if audited.agrees else DISAGREE


def _print_flags(options: AuditOptions, method: str) -> int:
    """Print the options by which each program runs an unchanged checkpoint under a method, or why there are none."""
    from rope_patch.engines.flags import WRITERS, flags
    from rope_patch.engines.verified_versions import UNVERIFIED

    patch: dict[str, Any] = {
        "target_length": options.patching.target_length,
        "layer_types": options.patching.layer_types,
    }
    written, refused = {}, {}
    for program in options.engines or WRITERS:
        try:
            written[program] = flags(options.model, method, program, **patch)
        except ValueError as error:
            refused[program] = str(error)
    if not written:
        raise ValueError("; ".join(f"{program}: {why}" for program, why in refused.items()))
    if options.as_json:
        without = [{"program": program, "refused": why} for program, why in refused.items()]
        print_json([one.to_dict() for one in written.values()] + without)
    else:
        for program, one in written.items():
            shown = one.shown_by if UNVERIFIED in one.shown_by else f"checked against {one.shown_by}"
            print(f"{program}:")
            for line in (*one.lines, f"# {shown}", *(f"# {note}" for note in one.notes)):
                print(f"  {line}")
        for program, why in refused.items():
            print(f"{program}: {why}")
    return DISAGREE if refused else 0


def _print(audited: Any) -> None:
    """Print for people: a block for each layer type, a line for each program, and what to do below."""
    from rope_patch.kv_evaluation.captions import listed

    patched = "not patched" if audited.method is None else f"patched, {audited.method}"
    print(f"{audited.model_class}: {patched}")
    for kind in dict.fromkeys(row.layer_type for row in audited.rows):
        rows = [row.to_dict() for row in audited.rows if row.layer_type == kind]
        print(f"{kind or 'all layers'} ({listed('layer', rows[0]['layers'])})")
        for row in rows:
            name = _name(row)
            print(f"  {name:<24} {row['verdict']:<11} {_table(row)}".rstrip())
    programs_by_lines: dict[tuple[str, ...], list[str]] = {}
    for row in audited.rows:
        if row.verdict != "agrees" and (row.reasons or row.fix):
            where = f" [{row.layer_type}]" if row.layer_type else ""
            lines = (*row.reasons, *([f"fix: {row.fix}"] if row.fix else []))
            name = _name(row.to_dict())
            programs_by_lines.setdefault(lines, []).append(f"{name}{where}")
    for lines, names in programs_by_lines.items():
        print(f"{', '.join(dict.fromkeys(names))}:")
        for line in lines:
            print(f"  {line}")
    for row in {row.program: row.to_dict() for row in audited.rows if row.verdict == "differs"}.values():
        if row["about_version"]:
            print(f"note: {_name(row)}: {row['about_version']}")
    for note in audited.notes:
        print(f"note: {note}")


def _name(row: dict[str, Any]) -> str:
    """Return a program with its version."""
    from rope_patch.engines.program_readings import PROGRAMS

    known = PROGRAMS.get(row["program"])
    return f"{known.name if known else 'transformers 5'} ({row['version']})"


def _table(row: dict[str, Any]) -> str:
    """Describe a table in a few words; nothing where there is none."""
    if row["table"] is None:
        return ""
    off = row["largest_relative_difference"]
    apart = ", another number of pairs" if off is None else f", up to {off:.2%} off" if off > 1e-5 else ""
    positions = row["positions"]
    short = f", {positions} positions" if positions is not None and positions < row["context"] else ""
    return (
        f"table {row['table']}{apart}; {row['pairs']} pairs ({row['unrotated']} unrotated), factor on cos and sin "
        f"{row['attention_scaling']:.6g}, context {row['context']}{short}"
    )
