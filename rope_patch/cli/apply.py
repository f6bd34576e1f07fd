"""``rope-patch apply``."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import bytes_copied, say_copied
from rope_patch.cli.options import (
    Checkpoint,
    Force,
    FreezeAt,
    Import,
    Json,
    LayerTypes,
    NewCheckpoint,
    Replace,
    TargetLength,
    print_json,
)


# Longer than a screen: the signature is the options, each with its help, and the docstring is the help of the command.
def apply(
    model: Checkpoint,
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD",
            help="The method: a name such as yarn, or a method string such as yarn:factor=4. Several methods are "
            "joined with +; METHOD@LENGTH leaves texts of up to that many tokens as they are. rope-patch methods "
            "lists all of them.",
            show_default=False,
        ),
    ],
    output: NewCheckpoint,
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

    Only the config changes. The weights are copied byte for byte and never loaded. If MODEL is a GGUF file, the output
    is one too, which llama.cpp runs: only its table changes.

    Example: **rope-patch apply ./llama abf rope_theta=500000 -o ./llama-abf**
    """
    from rope_patch.checkpoints.gguf_patch import patch_gguf, stated_context
    from rope_patch.checkpoints.offline import patch_folder
    from rope_patch.files import is_gguf
    from rope_patch.methods import as_method
    from rope_patch.patching.record import about_two_tables

    params: dict[str, Any] = {}
    for item in parameters or ():
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"expected key=value after the method, got {item!r}")
        params[key] = value
    chosen = as_method(method, **params)
    options: dict[str, Any] = {
        "target_length": target_length,
        "layer_types": layer_types,
        "freeze_at": freeze_at,
        "replace": replace,
        "keep_edits": keep_edits,
    }
    if is_gguf(model):
        with bytes_copied(output, hidden=as_json) as on_bytes:
            patch = patch_gguf(model, chosen, output, overwrite=force, on_bytes=on_bytes, **options)
    else:
        patch = patch_folder(model, chosen, output, overwrite=force, progress=say_copied, **options)
    if as_json:
        print_json({"output": str(output), "record": patch.record.to_dict()})
        return
    print(patch.describe())
    if is_gguf(model):
        context = stated_context(patch)
        print(f"wrote {output}: {shlex.join(['llama-cli', '-m', str(output), '-c', str(context)])} runs it")
        if patch.record.target_length is None:
            print(f"the file states {context} tokens, and llama.cpp reads no more: --target-length states more")
        return
    if about_two_tables(patch.record):
        print(f"wrote {output}: rope_patch.load({str(output)!r}) loads both tables")
        return
    print(f"wrote {output}: AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it, with or without rope_patch")
