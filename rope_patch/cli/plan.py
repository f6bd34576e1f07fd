"""``rope-patch plan``; neither torch nor transformers is imported for a model whose shape ships with the package."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from rope_patch.cli.options import GpuMemory, Json, items, tokens


# Many parameters: each is an option of the command.
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint (a local folder or a Hugging Face hub id), or the name of a common model such as "
            "Llama-3.1-8B, whose shape ships with this package.",
            show_default=False,
        ),
    ],
    length: Annotated[int, tokens("--length", "The length of the training sequences.", show_default=False)],
    gpus: Annotated[
        int, typer.Option(metavar="COUNT", help="The number of GPUs. Weights and states are divided among them (FSDP).")
    ] = 1,
    gpu_memory: GpuMemory = 80,
    batch: Annotated[
        int,
        typer.Option(metavar="COUNT", help="Sequences per step on each GPU, or on each group that shares a sequence."),
    ] = 1,
    full: Annotated[bool, typer.Option("--full", help="Train all weights instead of LoRA adapters.")] = False,
    lora_rank: Annotated[int, typer.Option(metavar="RANK", help="The rank of the LoRA adapters.")] = 16,
    target_modules: Annotated[
        str, typer.Option(metavar="NAMES", help='The layers that get LoRA adapters, such as "q_proj v_proj".')
    ] = "all-linear",
    long_lora: Annotated[
        bool, typer.Option("--long-lora", help="Also train the embeddings and norms, as LongLoRA does.")
    ] = False,
    quantization: Annotated[
        str, typer.Option(metavar="KIND", help="The quantization of the frozen weights: none, 8bit or nf4.")
    ] = "none",
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="The optimizer: adamw, adamw_8bit or sgd.")] = "adamw",
    checkpointing: Annotated[
        bool, typer.Option(help="Use gradient checkpointing: less memory, but the forward pass is computed twice.")
    ] = True,
    loss: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="How the loss is computed: fused (a slice of the logits at a time) or naive (all)."
        ),
    ] = "fused",
    attention: Annotated[
        str, typer.Option(metavar="KERNEL", help="The attention kernel: flash, sdpa or eager.")
    ] = "flash",
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="The data type of training: bfloat16, float16 or float32.")
    ] = "bfloat16",
    context_parallel: Annotated[
        int, typer.Option(metavar="COUNT", help="The number of GPUs that share one sequence (context parallelism).")
    ] = 1,
    as_json: Json = False,
) -> None:
    """Estimate the GPU memory of fine-tuning at a length, and advise what to change if it does not fit.

    Only the shape of the model is read. Nothing is trained, and no weights are downloaded.

    Example: **rope-patch plan Llama-3.1-8B --length 128k --gpu-memory 141**
    """
    from rope_patch import planning

    if not 0 < gpu_memory < float("inf"):
        raise ValueError(f"gpu-memory must be > 0 GiB, got {gpu_memory}")
    options: dict[str, Any] = {"quantization": quantization, "optimizer": optimizer, "checkpointing": checkpointing}
    options |= {"loss": loss, "attention": attention, "dtype": dtype, "batch": batch, "long_lora": long_lora}
    options |= {"lora_rank": None if full else lora_rank, "target_modules": tuple(items(target_modules))}
    options |= {"gpus": gpus, "context_parallel": context_parallel}
    planned = planning.plan(model, length=length, **options)
    if as_json:
        print(planned.to_json(gpu_memory=gpu_memory))
    else:
        _print_plan(planned, gpu_memory)


def _print_plan(planned: Any, gpu_memory: float) -> None:
    """Print a plan for people: the parts, whether they fit, and what to turn on."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    o, gib = planned.options, 2.0**30
    title = f"{planned.shape.name}, {o.batch} x {o.length} tokens, {o.gpus} GPU{'s' * (o.gpus > 1)}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for head, side in (("part", "left"), ("GiB per GPU", "right"), ("what", "left")):
        table.add_column(head, justify=side)  # type: ignore[arg-type]
    largest = max(part.bytes for part in planned.parts if part.turns)
    for part in planned.parts:
        idle = part.turns and part.bytes < largest
        what = f"{part.what}; at another time, not counted" if idle else part.what
        if part.bytes:
            table.add_row(part.name, f"{part.bytes / gib:.2f}", what, style="dim" if idle else None)
    table.add_section()
    table.add_row("peak", f"{planned.total / gib:.2f}", f"of {gpu_memory:g}", style="bold")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    steps = planned.advice(gpu_memory)
    print("fits" if planned.fits(gpu_memory) else "does not fit" + (". Turn on, in this order:" if steps else ""))
    for step in steps:
        print(f"  {step.option}: {step.total / gib:.1f} GiB{', fits' * step.fits} ({step.cost})")
    if not planned.fits(gpu_memory) and not (steps and steps[-1].fits):
        print("  no other option makes it fit: use a shorter length or a smaller model")
    longest = planned.longest(gpu_memory)
    print(f"longest sequence that fits with these options: {f'{longest} tokens' if longest else 'none'}")
    print(
        f"evaluation at this length: {planned.kv_cache / gib:.2f} GiB of keys and values per sequence, beside weights"
    )
