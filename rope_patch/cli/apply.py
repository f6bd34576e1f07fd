"""``rope-patch apply``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rope_patch.cli.options import Force, Json, Model, Out, print_json, say_copied


def apply(
    model: Model,
    method: Annotated[str, typer.Argument(help="A method's name, or the grammar NAME:key=value+NAME…")],
    out: Out,
    parameters: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="The method's parameters.")
    ] = None,
    target_length: Annotated[
        str | None,
        typer.Option(help="Context to state in the config, such as 32k; a factor left out follows from it [tokens]."),
    ] = None,
    layer_types: Annotated[
        list[str] | None, typer.Option("--layer-type", help="Which tables, on mixed models; may be repeated.")
    ] = None,
    freeze_at: Annotated[int | None, typer.Option(help="Length at which to freeze a dynamic table [tokens].")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an earlier patch.")] = False,
    keep_edits: Annotated[
        bool, typer.Option("--keep-edits", help="With --replace: start from the config as it was edited since.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a patched copy of a checkpoint that plain transformers loads.

    Weights are copied byte for byte; the config says the new table.

    Example: **rope-patch apply ./llama abf rope_theta=500000 -o ./llama-abf**
    """
    from rope_patch.checkpoints.offline import patch_folder
    from rope_patch.methods import as_method
    from rope_patch.words import parse_length

    params: dict[str, Any] = {}
    for item in parameters or ():
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"expected key=value after the method, got {item!r}")
        params[key] = value
    patch = patch_folder(
        model,
        as_method(method, **params),
        out,
        overwrite=force,
        progress=say_copied,
        target_length=None if target_length is None else parse_length(target_length),
        layer_types=layer_types,
        freeze_at=freeze_at,
        replace=replace,
        keep_edits=keep_edits,
    )
    if as_json:
        print_json({"output": str(out), "record": patch.record.to_dict()})
        return
    print(patch.describe())
    print(f"wrote {out}: AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it, with or without rope_patch")
