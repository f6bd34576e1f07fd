"""``rope-patch demo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.compare import print_table
from rope_patch.cli.loading import check_device, check_dtype, choose_device, prepare, progress_bar
from rope_patch.cli.options import Device, Dtype, Json, Output, Seed, Threads, command_line, print_json


def demo(
    output: Output = Path("rope-patch-demo"),
    shape: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            metavar="NAME",
            help="The bundled checkpoint to use: llama or gemma3. By default both.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Compare only three methods on few prompts, in less than a minute.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",  # of which the README shows the numbers; the checkpoints are stored in bfloat16
    seed: Seed = 0,
    threads: Threads = 1,
    as_json: Json = False,
) -> None:
    """Show what the methods do, on two small checkpoints that ship with this package, in about three minutes.

    It compares every method at four times the context length that the checkpoints were trained at, saves the best one,
    and checks that plain transformers loads it. It writes **report.html**.
    """
    import torch

    from rope_patch.cli import bundled
    from rope_patch.reports import comparison as page

    check_dtype(dtype)
    for name in shape or ():
        if name not in bundled.SHAPES:
            raise ValueError(f"shape must be one of {', '.join(bundled.SHAPES)}, got {name!r}")
    if device == "balanced":
        raise ValueError("the demo runs on one device, got 'balanced'")
    check_device(device)
    prepare(threads)
    results = []
    for name in shape or bundled.SHAPES:
        with progress_bar(bundled.tokens_to_read(quick), name) as (_, on_progress):
            options: dict[str, Any] = {"quick": quick, "device": choose_device(device), "seed": seed}
            options["dtype"] = dtype if dtype == "auto" else getattr(torch, dtype)
            result = bundled.run(name, output, **options, on_progress=on_progress)
        results.append(result)
        if as_json:
            continue
        print_table(result.comparison)
        print(f"best retrieval at the end: {result.comparison.best().method}, saved to {result.saved}")
        print("reloaded by plain transformers in a process without rope_patch: logits equal, bit for bit\n")
    page.write(output / "report.html", [result.comparison for result in results], command=command_line())
    if as_json:
        print_json({r.shape: json.loads(r.comparison.to_json()) | {"saved": str(r.saved)} for r in results})
        return
    print(f"report: {output / 'report.html'}")
