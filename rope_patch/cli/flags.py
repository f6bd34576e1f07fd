"""``rope-patch flags``."""

from __future__ import annotations

from typing import Annotated

import typer

from rope_patch.cli.options import Checkpoint, Import, Json, LayerTypes, TargetLength, print_json


def flags(
    model: Checkpoint,
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="The method, for example yarn:factor=4. Parameters are written as NAME:key=value, and several methods "
            "are joined with +.",
            show_default=False,
        ),
    ],
    program: Annotated[
        str,
        typer.Option(
            "--for",
            metavar="PROGRAM",
            help="The program to run with: vllm, sglang or llama.cpp.",
            show_default=False,
        ),
    ],
    target_length: TargetLength = None,
    layer_types: LayerTypes = None,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Print the options by which another program runs a checkpoint under a method, the checkpoint unchanged.

    What is printed is checked to give the very table of the method; what a program's options cannot express is refused
    with the reason and the command that works instead. Only the config is read, not the weights.

    The output says "unverified" where the program's own code was not run.

    Example: **rope-patch flags ./llama yarn:factor=4 --for vllm**
    """
    from rope_patch.exporting.flags import flags as write

    written = write(model, method, program, target_length=target_length, layer_types=layer_types)
    if as_json:
        print_json(
            {
                "program": written.program,
                "lines": list(written.lines),
                "settings": written.settings,
                "tables": [{"layer_type": t.layer_type, "hash": t.fingerprint} for t in written.tables],
                "shown_by": written.shown_by,
                "notes": list(written.notes),
            }
        )
        return
    for line in written.lines:
        print(line)
    print(f"# checked against {written.shown_by}" if "unverified" not in written.shown_by else f"# {written.shown_by}")
    for note in written.notes:
        print(f"# {note}")
