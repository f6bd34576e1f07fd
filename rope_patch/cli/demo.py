"""``rope-patch demo``: ``rope-patch extend`` on a checkpoint that ships with this package."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from rope_patch.cli.options import Output, Threads

SHAPES = ("llama", "gemma3")
METHODS = (
    "yarn",
    "mrrope",
    "yarn:factor=4+resonance",
    "ntk",
    "abf:factor=50",
    "llama3",
    "p_rope:p=0.5",
    "cope:share=0.5",
    "pi",
)
"""Those that may reach four times the context without training, and ``pi``, which needs it."""


def demo(
    context: typer.Context,
    output: Output = Path("rope-patch-demo"),
    shape: Annotated[
        str, typer.Option("--shape", metavar="NAME", help="The bundled checkpoint to use: llama or gemma3.")
    ] = "llama",
    quick: Annotated[bool, typer.Option("--quick", help="Measure only two methods, in half a minute.")] = False,
    threads: Threads = 1,
) -> None:
    """Run **rope-patch extend** on a small checkpoint that ships with this package, in about two minutes.

    It measures 9 methods at four times the context length that the checkpoint was trained at, chooses one, writes a
    checkpoint and checks that plain transformers loads it. The folder holds **report.html**.
    """
    from rope_patch.packaged import data_path

    if shape not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    here, checkpoint = Path.cwd(), data_path("assets") / shape
    model = os.path.relpath(checkpoint) if checkpoint.is_relative_to(here) else str(checkpoint)
    methods = " ".join(("yarn", "nope") if quick else METHODS)
    # Without training those that reach the length lose more within the context than the 1 % that extend allows.
    arguments = ["extend", model, "--length", "1k", "-o", str(output), "--methods", methods, "--tolerance", "0.3"]
    arguments += ["--threads", str(threads), "--force"]
    print(f"$ {shlex.join(['rope-patch', *arguments])}", file=sys.stderr)
    group = context.find_root().command
    assert group is not None
    raise typer.Exit(group.main(arguments, prog_name="rope-patch", standalone_mode=False) or 0)
