"""``rope-patch export``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import check_dtype, check_source


def export(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Checkpoint or adapter: folder or hub id.", show_default=False)
    ],
    to: Annotated[str, typer.Option(help="hf (transformers 5 and 4), vllm, sglang or gguf.", show_default=False)],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder to write, new or empty; a file for gguf.", show_default=False)
    ],
    method: Annotated[
        str | None, typer.Option(help="Patch to apply on the way, such as yarn:factor=4.", show_default=False)
    ] = None,
    target_length: Annotated[
        str | None, typer.Option(help="Context to state with it, such as 8k [tokens].", show_default=False)
    ] = None,
    form: Annotated[
        str, typer.Option(help="table; or partial, for p-RoPE where a part of each head is rotated (Phi, StableLM …).")
    ] = "table",
    gguf: Annotated[
        Path | None, typer.Option(help="GGUF of the base model to copy tensors from, of any quantization.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of merged weights, or of GGUF tensors: auto, float32, float16, bfloat16.")
    ] = "auto",
    lora: Annotated[
        bool, typer.Option("--lora", help="Keep an adapter beside its patched base; it is merged otherwise.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Write into a folder that holds files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Write a checkpoint so that another engine runs it with the same rotary tables, or say why it cannot.

    Weights are copied, not loaded; an adapter is merged. The config says the tables as transformers 5 and 4 read them,
    with the keys that vLLM and SGLang take in their place, and still loads in plain transformers. **export.json** names
    the version of the engine in which such tables were seen to be read so, or says unverified.

    Example: **rope-patch export ./llama-yarn --to vllm -o ./llama-yarn-vllm**
    """
    from rope_patch.exporting import export as write
    from rope_patch.words import parse_length

    check_dtype(dtype)
    check_source(model)
    if Path(model).is_file():
        raise ValueError(f"{model} is a file: MODEL is a checkpoint's folder, and a GGUF of its base goes with --gguf")
    if gguf is not None and not gguf.is_file():
        raise FileNotFoundError(f"no file {str(gguf)!r}")
    said = write(
        model,
        output,
        to=to,
        form=form,
        method=method,
        target_length=None if target_length is None else parse_length(target_length),
        base_gguf=gguf,
        dtype=dtype,
        lora=lora,
        overwrite=force,
        on_progress=lambda name: print(f"copying {name}", file=sys.stderr),
    )
    if as_json:
        print(json.dumps(said | {"output": str(output)}, indent=1, allow_nan=False))
    else:
        _print(said, output)


def _print(said: dict[str, Any], output: Path) -> None:
    checked = said.get("checked_against")
    for table in said.get("tables", ()):
        where = f" [{table['layer_type']}]" if table["layer_type"] else ""
        print(f"table{where}: written as {table['rope_type']}, {table['hash']}")
    if checked == "unverified":
        print(f"unverified: no version of {said['engine']} was seen to read such tables on {said['model_type']}")
    elif checked:
        print(f"checked against {said['engine']} {checked}")
    for note in said.get("notes", ()):
        print(f"note: {note}")
    print(f"wrote {output}")
