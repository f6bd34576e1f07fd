"""``rope-patch audit``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rope_patch.cli.options import Checkpoint, Import, Json, LayerTypes, TargetLength, print_json

DISAGREE = 3
"""Exit status where a program would compute another table."""


def audit(
    model: Checkpoint,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="ENGINE",
            help="A program to compare with transformers 5: transformers-4, vllm, vllm-0.29 (vLLM up to 0.29), sglang "
            "or llama.cpp. Repeat it for more. By default all of them.",
            show_default=False,
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Print the options by which vLLM, SGLang and llama.cpp run this unchanged checkpoint under a method, "
            "for example yarn:factor=4.",
            show_default=False,
        ),
    ] = None,
    target_length: TargetLength = None,
    layer_types: LayerTypes = None,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Show which rotary table each program will compute from a checkpoint, where they disagree, why, and what to run.

    Programs read the same config.json in different ways: some ignore a factor, a share, or everything but the base,
    without a word. For each layer type this prints the table, the factor on cos and sin and the context that
    transformers 5, transformers 4, vLLM, SGLang and llama.cpp compute. Only the config is read, or the header of a
    GGUF file, not the weights. For llama.cpp a folder is read as its own converter writes it. The reference is
    transformers 5, and for a GGUF file llama.cpp: transformers' own reader leaves out most of its table.

    The exit status is 0 if all programs agree and 3 if one computes something else. A program that refuses the
    checkpoint, or whose code was not compared on such models ("unverified"), does not change it, and neither does
    transformers' reader of a GGUF file.

    With **--method** the checkpoint is one that has no patch. The options that are printed are checked to give the very
    table of the method; where a program's options cannot say it, the reason and the command that works instead are
    printed, and the exit status is 3.

    Examples: **rope-patch audit ./llama-yarn --engine vllm**, **rope-patch audit ./llama --method yarn:factor=4**
    """
    if method is not None:
        _print_options(model, method, engine, {"target_length": target_length, "layer_types": layer_types}, as_json)
        return
    if target_length is not None or layer_types is not None:
        raise ValueError("--target-length and --layer-types are of --method")
    from rope_patch.exporting.audit import audit as compare
    from rope_patch.exporting.readings import PROGRAMS

    audited = compare(model, engine or PROGRAMS)
    if as_json:
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
    if not audited.agrees:
        raise typer.Exit(DISAGREE)


def _print_options(model: str, method: str, engines: list[str] | None, patch: dict[str, Any], as_json: bool) -> None:
    """Print the options by which each program runs an unchanged checkpoint under a method, or why there are none."""
    from rope_patch.exporting.engines import UNVERIFIED
    from rope_patch.exporting.flags import WRITERS, flags

    written, refused = {}, {}
    for program in engines or WRITERS:
        try:
            written[program] = flags(model, method, program, **patch)
        except ValueError as error:
            refused[program] = str(error)
    if not written:
        raise ValueError("; ".join(f"{program}: {why}" for program, why in refused.items()))
    if as_json:
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
    if refused:
        raise typer.Exit(DISAGREE)


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
    from rope_patch.exporting.readings import PROGRAMS

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
