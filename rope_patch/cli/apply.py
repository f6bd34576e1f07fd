"""``rope-patch apply``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rope_patch.cli.options import (
    Checkpoint,
    Force,
    FreezeAt,
    Import,
    Json,
    LayerTypes,
    NewFolder,
    Replace,
    TargetLength,
    print_json,
    say_copied,
)


def apply(
    model: Checkpoint,
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="The method: a name such as yarn, or a method string such as yarn:factor=4. Several methods are "
            "joined with +. rope-patch methods lists all of them.",
            show_default=False,
        ),
    ],
    output: NewFolder,
    parameters: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="The parameters of the method, if METHOD is only a name."),
    ] = None,
    target_length: TargetLength = None,
    layer_types: LayerTypes = None,
    freeze_at: FreezeAt = None,
    replace: Replace = False,
    keep_edits: Annotated[
        bool,
        typer.Option(
            "--keep-edits", help="With --replace: keep what was changed in the config since the earlier patch."
        ),
    ] = False,
    force: Force = False,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Write a copy of a checkpoint with patched rotary tables, which transformers loads without this package.

    Only the config changes. The weights are copied byte for byte and never loaded.

    Example: **rope-patch apply ./llama abf rope_theta=500000 -o ./llama-abf**
    """
    from rope_patch.checkpoints.offline import patch_folder
    from rope_patch.methods import as_method

    params: dict[str, Any] = {}
    for item in parameters or ():
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"expected key=value after the method, got {item!r}")
        params[key] = value
    patch = patch_folder(
        model,
        as_method(method, **params),
        output,
        overwrite=force,
        progress=say_copied,
        target_length=target_length,
        layer_types=layer_types,
        freeze_at=freeze_at,
        replace=replace,
        keep_edits=keep_edits,
    )
    if as_json:
        print_json({"output": str(output), "record": patch.record.to_dict()})
        return
    print(patch.describe())
    print(f"wrote {output}: AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it, with or without rope_patch")
