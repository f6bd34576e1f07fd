"""Stage c: a training step on long rows: speed, and memory compared with the prediction of ``plan``."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
import warnings
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import rope_patch
from gpu_stages.base import Cell, Results, Setting, Stage, gib, peak_tflops
from gpu_stages.flops import step_flops
from measuring import forget_peak, peak_of, synchronize
from rope_patch.planning import Plan, plan

MODEL = "Llama-3.1-8B"
RANK = 16
LENGTHS = (8192, 32768, 131072)
STEPS = {8192: 6, 32768: 3, 131072: 1}
"""Row length to the number of steps that are timed, after one step of a short row that loads kernels and libraries."""
GUESS = 0.3
"""Share of the peak speed that is assumed when a cell's time is estimated."""
FORMULA = (
    "mfu: FLOPs of the forward and backward pass as they are run (2 per weight and token forward; backward 2 for "
    "states and 2 for the weights that are trained; causal attention), without recomputation, / time / peak. palm_mfu: "
    "tokens/s x (6 N + 12 L H Q T) / peak (arXiv:2204.02311, appendix B), which counts gradients of frozen weights and "
    "masked scores. executed: recomputation counted."
)


class Clock(TrainerCallback):
    """Stores the time of every step by the clock and by the CPU [s]."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clocks."""
        synchronize(self.device)
        self.began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clocks."""
        synchronize(self.device)
        self.wall.append(time.perf_counter() - self.began[0])
        self.cpu.append(time.process_time() - self.began[1])


class ClockAfterFirst(Clock):
    """The first step loads kernels, so its peak of memory is forgotten."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop the clocks."""
        super().on_step_end()
        if len(self.wall) == 1:
            forget_peak(self.device)


def trainer_of(
    model: Any, rows: list[dict[str, Any]], folder: str, clock: Clock, *, trl: bool = True, **options: Any
) -> Trainer:
    """Return a trainer that takes one step for each row, with gradient checkpointing.

    Args:
        model: the model with adapters.
        rows: the rows, each with ``input_ids`` and ``labels``.
        folder: the folder that the trainer may write to.
        clock: the callback that times the steps, on the device where they run.
        trl: whether the trainer is TRL's, as in the recipe; otherwise it is that of transformers.
        options: further arguments of the trainer.
    """
    from trl import SFTConfig, SFTTrainer  # slow

    kind: type[TrainingArguments] = TrainingArguments
    if trl:
        kind = SFTConfig
        options |= {"max_length": None}
    args = kind(
        folder,
        per_device_train_batch_size=1,
        max_steps=len(rows),
        learning_rate=1e-4,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=clock.device == "cpu",
        **options,
    )
    if trl:
        tokenizer = AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")
        columns = {name: [row[name].tolist() for row in rows] for name in ("input_ids", "labels")}
        trainer: Trainer = SFTTrainer(
            model,
            args,
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
        )
    else:
        trainer = Trainer(model, args, train_dataset=rows)
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    return trainer


def quantize(model: Any) -> Any:
    """Replace the projections of the decoder in place by NF4 ones, double-quantized, as the recipe loads them."""
    import bitsandbytes as bnb

    for name, module in list(model.get_decoder().named_modules()):
        if isinstance(module, nn.Linear):
            packed = bnb.nn.Linear4bit(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=True,
                quant_type="nf4",
                device="meta",
            )
            packed.weight = bnb.nn.Params4bit(
                module.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
            ).to(module.weight.device)
            parent = model.get_decoder().get_submodule(name.rpartition(".")[0])
            setattr(parent, name.rpartition(".")[2], packed)
    # PEFT reads this attribute to choose adapters for 4-bit layers.
    model.is_loaded_in_4bit = True
    return model


def planned_step(setting: Setting, length: int, quantization: str) -> Plan:
    """Return the plan of a training step on one row."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(setting.config(MODEL))
    return plan(model, length=length, lora_rank=RANK, quantization=quantization, attention="sdpa")


def step(setting: Setting, length: int, quantization: str, liger: bool, _: Results) -> dict[str, Any]:
    """Time LoRA steps of one row each, and compare the peak memory with the plan."""
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
    setting.drop()
    tokens, steps = setting.size((length, STEPS[length]), (length // 256, 1))
    planned = planned_step(setting, tokens, quantization)
    model = setting.random_model(MODEL)
    if quantization == "nf4":
        quantize(model)
    rope_patch.apply(model, "yarn:factor=16", target_length=131072)
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    vocab = model.config.vocab_size
    rows = [{"input_ids": row, "labels": row} for row in (setting.ids(tokens, vocab, seed=i) for i in range(steps))]
    short = {name: row[:64] for name, row in rows[0].items()}
    clock = ClockAfterFirst(setting.device)
    with tempfile.TemporaryDirectory() as folder:
        # The options are those of the recipe.
        trainer = trainer_of(
            model,
            [short, *rows],
            folder,
            clock,
            optim="adamw_torch",
            bf16=True,
            use_liger_kernel=liger,
            liger_kernel_config={"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False},
            logging_strategy="no",
        )
        _, usage = peak_of(trainer.train, setting.device)
        reserved = torch.cuda.max_memory_reserved() if setting.device == "cuda" else None
    seconds = clock.wall[1:]
    return {
        "tokens": tokens,
        "steps": steps,
        "step_seconds": [round(value, 4) for value in seconds],
        "attention": "sdpa",
        "liger": liger,
        **speeds(planned, statistics.median(seconds), peak_tflops(setting.device_name)),
        "memory": memory(setting, planned, usage, model, reserved),
    }


def speeds(planned: Plan, seconds: float, peak: float | None) -> dict[str, Any]:
    """Return tokens/s and shares of the peak [TFLOP/s]; the shares are None if the peak is not known.

    The FLOPs follow from the plan's shapes, the time was measured.
    """
    done = step_flops(planned)
    found: dict[str, Any] = {"tokens_per_second": round(done.tokens / seconds, 2), "peak_tflops": peak}
    possible = None if peak is None else peak * 1e12 * seconds * planned.options.gpus
    for name, flops in (
        ("mfu", done.model),
        ("palm_mfu", done.palm),
        ("palm_mfu_causal", done.palm_causal),
        ("executed", done.executed),
    ):
        found[name] = None if possible is None else round(flops / possible, 4)
    return found | {"model_flops": done.model, "executed_flops": done.executed}


def memory(setting: Setting, planned: Plan, usage: dict[str, Any], model: Any, reserved: int | None) -> dict[str, Any]:
    """Return the measured and the predicted peak, without the plan's allowance for memory that no allocator counts."""
    if setting.device == "cuda":
        before = usage["loaded_bytes"]
    else:  # on a CPU the process holds more than the model, so the model is counted
        before = sum(p.numel() * p.element_size() for p in model.parameters())
    peak, predicted = before + usage["peak_bytes"], planned.total - planned.parts["overhead"]
    return {
        "peak_gib": gib(peak),
        "peak_from": usage["peak_from"],
        "predicted_gib": gib(predicted),
        "measured_over_predicted": round(peak / predicted, 4),
        "reserved_gib": None if reserved is None else gib(reserved),
        "predicted_with_overhead_gib": gib(planned.total),
        "parts_gib": {name: gib(size) for name, size in planned.parts.items() if size},
    }


def cells(setting: Setting) -> list[Cell]:
    """Return the cells, short rows first; the time of each is estimated from the FLOPs of its plan."""
    steps: dict[str, Cell] = {}
    for length in LENGTHS:
        seconds = (
            1.0
            if setting.tiny
            else 25
            + 1.15
            * STEPS[length]
            * step_flops(plan(MODEL, length=length, attention="sdpa")).executed
            / (989e12 * GUESS)
        )
        for quantization, liger in (("none", False), ("nf4", False), ("none", True)):
            name = f"{'qlora' if quantization == 'nf4' else 'lora'}{'-liger' if liger else ''}-{length}"
            needs = ["bitsandbytes"] if quantization == "nf4" else []
            if liger:
                needs += ["liger-kernel", "GPU"]
            measure = partial(step, setting, length, quantization, liger)
            steps[name] = Cell(name, math.ceil(seconds), measure, tuple(needs))
    plain = [steps.pop(f"lora-{length}") for length in LENGTHS]
    return [*plain, *steps.values()]


def summary(done: Results) -> dict[str, Any]:
    """Return the cells whose predicted memory is wrong by over 10 %, and the speeds."""
    ratios = {name: c["memory"]["measured_over_predicted"] for name, c in done.items() if "memory" in c}
    return {
        "formula": FORMULA,
        "peak memory, measured / predicted": ratios,
        "plan is wrong by over 10 %": [name for name, ratio in ratios.items() if abs(ratio - 1) > 0.1],
        "tokens per second": {n: c["tokens_per_second"] for n, c in done.items() if "tokens_per_second" in c},
        "mfu": {name: c["mfu"] for name, c in done.items() if "mfu" in c},
    }


STAGE = Stage(
    "c",
    "a training step, against plan",
    "LoRA and QLoRA steps of a model in the shape of Llama 3.1 8B on rows of 8k, 32k and 128k, with Liger's kernels "
    "and without: tokens/s, MFU, and peak memory beside what `plan` predicts.",
    cells,
    summary=summary,
)
