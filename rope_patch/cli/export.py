"""``rope-patch export``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import check_dtype, say_copied
from rope_patch.cli.options import (
    Force,
    FreezeAt,
    Import,
    Json,
    LayerTypes,
    Method,
    Model,
    TargetLength,
    print_json,
)


# Longer than a screen: the signature is the options, each with its help, and the docstring is the help of the command.
def export(
    model: Model,
    to: Annotated[
        str,
        typer.Option(
            metavar="ENGINE",
            help="The engine to export to: hf (transformers 5 and 4), vllm, sglang or gguf (llama.cpp).",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="The folder to write, or for gguf the file. It must be new or empty, unless --force is given.",
            show_default=False,
        ),
    ],
    method: Method = None,
    target_length: TargetLength = None,
    layer_types: LayerTypes = None,
    freeze_at: FreezeAt = None,
    form: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="How the tables are written: table, or partial (p-RoPE as partial rotary, for families such as Phi "
            "and StableLM that rotate a part of each head).",
        ),
    ] = "table",
    converter: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --to gguf: the path of llama.cpp's own convert_hf_to_gguf.py, which writes the weights. It is "
            "in llama.cpp's repository and in the package convert-hf-to-gguf.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="The data type of merged weights, of those read from a GGUF file, and of new GGUF files: auto, "
            "float32, float16 or bfloat16.",
        ),
    ] = "auto",
    lora: Annotated[
        bool,
        typer.Option("--lora", help="Write an adapter beside its patched base model. By default it is merged into it."),
    ] = False,
    force: Force = False,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint so that another engine runs it with the same rotary tables, or explain why it cannot.

    The weights are copied, an adapter is merged into them, and those of a GGUF file are dequantized. What is written
    also loads in plain transformers.
    **export.json** names the version of the engine that was checked to read these tables correctly, or says that none
    was.

    Example: **rope-patch export ./llama-yarn --to vllm -o ./llama-yarn-vllm**
    """
    from rope_patch.exporting import export as write
    from rope_patch.files import check_source, is_gguf

    check_dtype(dtype)
    if Path(model).is_file() and not is_gguf(model):
        raise ValueError(f"{model} is a file: MODEL is a checkpoint's folder or a GGUF file")
    check_source(model)
    written = write(
        model,
        output,
        to=to,
        form=form,
        method=method,
        converter=converter,
        dtype=dtype,
        lora=lora,
        overwrite=force,
        on_progress=say_copied,
        target_length=target_length,
        layer_types=layer_types,
        freeze_at=freeze_at,
    )
    if as_json:
        print_json(written | {"output": str(output)})
    else:
        _print(written, output)


def _print(written: dict[str, Any], output: Path) -> None:
    checked = written.get("checked_against")
    for table in written.get("tables", ()):
        where = f" [{table['layer_type']}]" if table["layer_type"] else ""
        print(f"table{where}: written as {table['rope_type']}, {table['hash']}")
    if checked == "unverified":
        print(
            f"unverified: no version of {written['engine']} was checked to read such tables on {written['model_type']}"
        )
    elif checked:
        print(f"checked against {written['engine']} {checked}")
    for note in written.get("notes", ()):
        print(f"note: {note}")
    print(f"wrote {output}")
