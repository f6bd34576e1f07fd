"""``rope-patch demo``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.compare import print_table
from rope_patch.cli.loading import check_device
from rope_patch.cli.options import Json, command_line, print_json


def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("rope-patch-demo"),
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="llama or gemma3; both by default.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three methods, few prompts: under a minute.")] = False,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the passkey prompts.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; more only help on an idle machine.")] = 1,
    as_json: Json = False,
) -> None:
    """Compare every method at 4x the trained context on the bundled checkpoints; save and reload the best."""
    import torch
    from tqdm import tqdm
    from transformers.utils import logging as hf_logging

    from rope_patch.cli import bundled
    from rope_patch.reports import comparison as page

    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in types:
        raise ValueError(f"dtype must be one of {', '.join(types)}, got {dtype!r}")
    for name in shape or ():
        if name not in bundled.SHAPES:
            raise ValueError(f"shape must be one of {', '.join(bundled.SHAPES)}, got {name!r}")
    if device == "auto":
        raise ValueError("device must be one of torch's here, such as cpu or cuda, got 'auto'")
    check_device(device)
    torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()  # ours tells enough
    results = []
    for name in shape or bundled.SHAPES:
        with tqdm(total=bundled.tokens_to_read(quick), unit="tok", unit_scale=True, desc=name) as bar:

            def told(method: str, tokens: int, bar: Any = bar) -> None:
                bar.set_postfix_str(method, refresh=False)
                bar.update(tokens)

            options: dict[str, Any] = {"quick": quick, "device": device, "dtype": types[dtype], "seed": seed}
            shown = bundled.run(name, output, **options, on_progress=told)
        results.append(shown)
        if as_json:
            continue
        print_table(shown.comparison)
        print(f"best retrieval at the end: {shown.comparison.best().method}, saved to {shown.saved}")
        print("reloaded by plain transformers in a process without rope_patch: logits equal, bit for bit\n")
    page.write(output / "report.html", [shown.comparison for shown in results], command=command_line())
    if as_json:
        print_json({r.shape: json.loads(r.comparison.to_json()) | {"saved": str(r.saved)} for r in results})
        return
    print(f"report: {output / 'report.html'}")
