"""Advice for a step that does not fit into the GPU's memory: what to change, and the total that a plan predicts."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import TrainingArguments

from rope_patch.planning import Plan, Shape, plan, shape_of

GIB = 2**30

WITHOUT_PLAN = (
    "No plan covers this step ({reason}). These take less memory, in this order: gradient_checkpointing=True; "
    'per_device_train_batch_size=1 with more gradient_accumulation_steps; attn_implementation="flash_attention_2"; '
    'optim="adamw_8bit"; a frozen model in 4 bits under LoRA; shorter rows; FSDP over more GPUs'
)


def oom_advice(
    model: Any, args: TrainingArguments, length: int, gpu_memory: float | None, *, batch: int | None = None
) -> str:
    """Return the predicted memory of a step, by part, and what to change, with the total after each change.

    Args:
        model: the one that ran out of memory, bare or under PEFT.
        args: of its training.
        length: of the longest row [tokens].
        gpu_memory: of one GPU [GiB]; if None, only the parts are returned.
        batch: rows of one pass; by default those of ``args``.

    Returns:
        A few lines; general advice where no plan covers the model.
    """
    try:
        planned = _plan(model, args, length, batch or args.per_device_train_batch_size)
        return "\n".join(_lines(planned, gpu_memory))
    except Exception as error:  # no failure of the advice may hide the first error
        return WITHOUT_PLAN.format(reason=error)


def _lines(planned: Plan, gpu_memory: float | None) -> Iterator[str]:
    o = planned.options
    prediction = f"{o.batch} x {o.length} tokens on each GPU were predicted to take {planned.total / GIB:.1f} GiB"
    yield f"{prediction}: {_parts(planned)}"
    if gpu_memory is None:
        return
    if planned.fits(gpu_memory):
        yield (
            f"That fits into {gpu_memory:.1f} GiB. Look for other processes on the GPU (nvidia-smi), and set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation"
        )
        return
    yield f"The GPU has {gpu_memory:.1f} GiB. Change these, each after those before it:"
    yield from changes(planned, gpu_memory)


def changes(planned: Plan, gpu_memory: float) -> Iterator[str]:
    """Yield what to change in a run that does not fit, in order, with the total after each change [GiB]."""
    longest = planned.longest(gpu_memory)
    if planned.options.dtype == "float32" and planned.options.lora_rank is not None:
        planned = planned.but(dtype="bfloat16")
        yield _line("dtype=torch.bfloat16 for the model (recipe: model.dtype=bfloat16)", planned.total)
    for step in planned.advice(gpu_memory):
        yield _line(_setting(step.changes), step.total, step.cost)
        planned = planned.but(**step.changes)
    if not planned.fits(gpu_memory):
        yield "No change that the plan knows makes it fit"
    if longest:
        yield f"Or shorter rows: up to {longest} tokens fit without these steps"


def _line(change: str, total: int, cost: str = "") -> str:
    return f"- {change}: {total / GIB:.1f} GiB" + (f" ({cost})" if cost else "")


def _parts(planned: Plan) -> str:
    """The parts of the total, largest first; of those that are never in memory together, only the largest."""
    turns = max((part for part in planned.parts if part.turns), key=lambda part: part.bytes)
    parts = [part for part in planned.parts if not part.turns or part is turns]
    parts = sorted((p for p in parts if p.bytes >= planned.total / 100), key=lambda part: -part.bytes)
    return ", ".join(f"{part.name} {part.bytes / GIB:.1f}" for part in parts)


def _setting(changes: Mapping[str, Any]) -> str:
    """Return an option of a plan as users of Trainer set it, and as the recipe does."""
    match changes:
        case {"loss": _}:
            return "train through rope_patch.modeling.loss.fuse(model), as LongTrainer does"
        case {"attention": _}:
            return 'attn_implementation="flash_attention_2" for the model (recipe: model.attention=flash)'
        case {"checkpointing": _}:
            return "gradient_checkpointing=True (recipe: train.checkpointing=true)"
        case {"batch": size}:
            return f"one row per pass: per_device_train_batch_size={size} (recipe: train.batch={size})"
        case {"optimizer": name}:
            return f'optim="{name}" (recipe: train.optimizer={name})'
        case {"lora_rank": rank}:
            return f"LoRA (recipe: lora.rank={rank})"
        case {"quantization": kind}:
            return f"BitsAndBytesConfig(load_in_4bit=True) of NF4 for the model (recipe: model.quantization={kind})"
        case {"gpus": gpus, "context_parallel": sharing}:
            return f"FSDP over {gpus} GPUs, {sharing} of them sharing each row (context parallel, cp_size={sharing})"
        case {"context_parallel": sharing}:
            return f"{sharing} of the GPUs sharing each row (context parallel, cp_size={sharing})"
        case {"gpus": gpus}:
            return f"FSDP over {gpus} GPUs (full shard)"
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _plan(model: Any, args: TrainingArguments, length: int, batch: int) -> Plan:
    """Return the plan of a step.

    Raises:
        ValueError: a model, an adapter or a quantization that no plan covers.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.device("meta"):  # without adapters and packed weights, which a shape would take for the model's own
        shape = shape_of(type(base)(copy.deepcopy(base.config)))
    kernel = str(base.config.get_text_config()._attn_implementation)
    optimizer = str(getattr(args.optim, "value", args.optim))
    gpus = args.world_size if _sharded(args) else 1  # DDP has all of the model on each
    return plan(
        shape,
        length=length,
        batch=batch,
        **_adapters(model, base, shape),
        quantization=_quantization(base),
        # Others, such as Adafactor and Lion, have fewer states than AdamW.
        optimizer="adamw_8bit" if "8bit" in optimizer else "sgd" if optimizer == "sgd" else "adamw",
        checkpointing=any(getattr(module, "gradient_checkpointing", False) for module in base.modules()),
        loss="fused" if getattr(base, "_rope_patch_fused", False) else "naive",
        attention=kernel if kernel in ("eager", "sdpa") else "flash",
        dtype=str(base.dtype).removeprefix("torch."),
        gpus=gpus,
        context_parallel=_sharing(args) if gpus > 1 else 1,
    )


def _adapters(model: Any, base: Any, shape: Shape) -> dict[str, Any]:
    adapters = getattr(model, "peft_config", None)
    if not adapters:
        return {"lora_rank": None}
    config = next(iter(adapters.values()))
    known = {linear.name.rpartition(".")[2] for layer in shape.kinds for linear in layer.linears}
    names = {name.rpartition(".")[2] for name, module in base.named_modules() if hasattr(module, "lora_A")} & known
    if not names:
        raise ValueError(f"adapters of type {config.peft_type.value} on none of the projections")
    copies = [p for name, p in base.named_parameters() if ".modules_to_save." in name]
    embeddings = any(p.numel() == shape.embedding for p in copies)
    return {"lora_rank": config.r, "target_modules": tuple(sorted(names)), "long_lora": embeddings}


def _quantization(base: Any) -> str:
    if getattr(base, "is_loaded_in_4bit", False):
        return "nf4"
    if getattr(base, "is_loaded_in_8bit", False):
        return "8bit"
    if getattr(base.config, "quantization_config", None) is not None:
        raise ValueError("the weights are not quantized by bitsandbytes")
    return "none"


def _sharded(args: TrainingArguments) -> bool:
    """Return whether weights and states are sharded: by FSDP, or by the third stage of DeepSpeed's ZeRO."""
    deepspeed = getattr(args, "hf_deepspeed_config", None)
    fsdp = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1")
    return fsdp or (deepspeed is not None and bool(deepspeed.is_zero3()))


def _sharing(args: TrainingArguments) -> int:
    """Return the number of GPUs that share a row, under context parallelism or Ulysses."""
    from accelerate.parallelism_config import ParallelismConfig

    config = args.parallelism_config or ParallelismConfig()  # accelerate launch sets it in the environment
    return max(getattr(config, "cp_size", None) or 1, getattr(config, "sp_size", None) or 1)
