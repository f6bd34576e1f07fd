"""Compare peak memory and tokens/s of our training step with transformers' Trainer: same model, rows and steps.

    OMP_NUM_THREADS=1 python benchmarks/train_step.py -o benchmarks/results/train_step.json

``loss_path``: from the last hidden states to their gradient, the head frozen as under LoRA. ``stock`` makes whole
logits and their cross-entropy as transformers' models do, ``ours`` is ``token_loss`` (``ours_N`` with slices of N
tokens), and ``torch`` is ``torch.nn.functional.linear_cross_entropy`` in chunks of its own choice, where torch has it.
``step``: one step of Trainer and one of LongTrainer, on a patched model with LoRA adapters and gradient checkpointing.
Losses and gradients of all sides are compared.

Memory: every figure comes from a process of its own. On the CPU it is the highest resident set during the work (VmHWM,
cleared just before) less that just before, and malloc is set to return freed memory at once; on CUDA torch's own count.
Time: all sides in one process, in turn, in an order that alternates; the figure is the median over rounds of tokens/s
against stock's in the same round, above 1 is faster. The first round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaForCausalLM

import rope_patch
from gpu_stages.correctness import difference
from gpu_stages.training import Clock, trainer_of
from measuring import (
    command,
    environment,
    give_back_what_is_freed,
    in_own_process,
    megabytes,
    peak_of,
    random_ids,
    random_llama,
    spread,
    time_in_turn,
    turns,
    write,
)
from rope_patch.modeling import training_loss as loss_module
from rope_patch.modeling.reader import Reader
from rope_patch.modeling.training_loss import token_loss

MODEL = {"vocab": 32000, "hidden": 256, "layers": 2, "heads": 4, "kv_heads": 2}
QUICK_MODEL = {"vocab": 2000, "hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1}
LORA = {"r": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "task_type": "CAUSAL_LM"}
METHOD = "yarn:factor=4"
BAR = {"loss_path_peak_stock_over_ours": 5.0, "relative_gradient_difference": 1e-5}
HAS_TORCH_SIDE = hasattr(functional, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


def build(job: dict[str, Any]) -> LlamaForCausalLM:
    """Return a random model of a job's shape with all weights frozen; the weights are the same at every call."""
    model = random_llama(job["shape"], max(64, job["tokens"] // 4)).to(job["device"], getattr(torch, job["dtype"]))
    return model.requires_grad_(False)


# --- the loss path


def loss_of(side: str, model: LlamaForCausalLM, hidden: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss as one side computes it; ``ours_N`` is ours with slices of N tokens."""
    if side == "stock":  # what LlamaForCausalLM.forward does at its end
        return model.loss_function(logits=model.lm_head(hidden), labels=labels, vocab_size=model.config.vocab_size)
    if side == "torch":
        states, targets = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return functional.linear_cross_entropy(
            states, model.lm_head.weight, targets, options=torch.nn.LinearCrossEntropyOptions()
        )
    library = loss_module.LOGITS_AT_ONCE
    loss_module.LOGITS_AT_ONCE = int(side.partition("_")[2] or library)
    try:
        total, count = token_loss(Reader(model), hidden, labels)
    finally:
        loss_module.LOGITS_AT_ONCE = library
    return total / count


class LossPath:
    """The hidden states and labels of a row, and a model of which only the head is used."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.model, self.labels = build(job), random_ids(job["shape"], job["tokens"])[None].to(job["device"])
        # Values such as the last norm returns: their mean square is 1.
        states = torch.randn(1, job["tokens"], job["shape"]["hidden"], generator=torch.Generator().manual_seed(2))
        self.states = states.to(job["device"], self.model.dtype)

    def __call__(self, side: str, tokens: int | None = None) -> tuple[float, Tensor]:
        """Run one side forward and backward; return the loss and the gradient of the states."""
        hidden = self.states[:, :tokens].clone().requires_grad_()
        loss = loss_of(side, self.model, hidden, self.labels[:, :tokens])
        loss.backward()
        assert hidden.grad is not None
        return loss.item(), hidden.grad


def loss_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the peak of one side of the loss path."""
    give_back_what_is_freed()
    path = LossPath(job)
    path(job["side"], 64)
    loss, usage = peak_of(lambda: path(job["side"])[0], job["device"])
    return usage | {"loss": loss}


def loss_time(job: dict[str, Any]) -> dict[str, Any]:
    """Compare the sides of the loss path and time them alternately."""
    path = LossPath(job)
    head = path.model.lm_head.weight
    results: dict[str, tuple[float, dict[str, Tensor]]] = {}
    # This is not timed: the head is trained here, so that its gradient can be compared, too.
    for side in job["sides"]:
        head.requires_grad_(True)
        loss, gradient = path(side)
        results[side] = loss, {"states": gradient, "head": head.grad}
        head.grad = None
        head.requires_grad_(False)
    stock = results["stock"]
    compared = {
        side: {
            "loss_difference": abs(loss - stock[0]),
            "gradients": {name: difference(gradients[name], stock[1][name]) for name in gradients},
        }
        for side, (loss, gradients) in results.items()
        if side != "stock"
    }
    results.clear()
    works = {side: functools.partial(path, side) for side in job["sides"]}
    return {"compared": compared, **time_in_turn(works, job["repeats"], warm_up=1, device=job["device"])}


# --- the whole step


class Watch(Clock):
    """Stores the time of every step, and the gradients of the last one."""

    def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
        """Copy the gradients before the optimizer changes the weights."""
        named = model.named_parameters()
        self.gradients = {name: p.grad.detach().clone() for name, p in named if p.grad is not None}


class Step:
    """A patched model with adapters, and a trainer that takes one step on one row."""

    def __init__(self, job: dict[str, Any], side: str) -> None:
        model = build(job)
        rope_patch.apply(model, METHOD)
        # Both matrices are random: with B at zero, as usual, A would have no gradient to compare.
        model = get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False))
        ids = random_ids(job["shape"], job["tokens"])
        self.folder = tempfile.TemporaryDirectory()
        self.watch = Watch(job["device"])
        self.trainer = trainer_of(
            model,
            [{"input_ids": ids, "labels": ids}],
            self.folder.name,
            self.watch,
            ours=side == "ours",
            max_grad_norm=0.0,  # clipping would rescale the gradients that are compared
            logging_steps=1,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            label_names=["labels"],
        )

    def __call__(self) -> float:
        """Take one step with a new optimizer; return the loss before it."""
        self.trainer.train()
        return next(entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry)


def step_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the peak of one step of one side."""
    give_back_what_is_freed()
    Step({**job, "shape": QUICK_MODEL, "tokens": 64}, job["side"])()  # loads libraries before the peak is counted
    step = Step(job, job["side"])
    loss, usage = peak_of(step, job["device"])
    return usage | {"loss": loss, "gradients": {name: g.flatten().tolist() for name, g in step.watch.gradients.items()}}


def step_time(job: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of both sides alternately."""
    steps = {side: Step(job, side) for side in job["sides"]}
    for side in turns(job["sides"], job["repeats"] + 1):
        steps[side]()
    return {  # without the round that warms up
        "wall": {side: step.watch.wall[1:] for side, step in steps.items()},
        "cpu": {side: step.watch.cpu[1:] for side, step in steps.items()},
    }


# --- measuring


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Do a job in this process."""
    works = {"loss_memory": loss_memory, "loss_time": loss_time, "step_memory": step_memory, "step_time": step_time}
    # The oldest release of transformers that this package supports does not know the new name of this argument.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing", category=FutureWarning)
    return works[job["what"]](job)


# --- the report


def memory_row(side: str, repeats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the memory that the processes of one side measured."""
    peaks = [megabytes(each["peak_bytes"], 2) for each in repeats]
    return {
        "side": side,
        "peak_mb": round(statistics.median(peaks), 2),
        "peak_mb_repeats": peaks,
        "loaded_mb": megabytes(repeats[0]["loaded_bytes"]),
        "peak_from": repeats[0]["peak_from"],
        "loss": repeats[0]["loss"],
    }


def time_row(side: str, times: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return one side's tokens/s, and its ratio to stock's in the same round."""
    row: dict[str, Any] = {"side": side, "tokens_per_s": round(tokens / statistics.median(times["wall"][side]), 1)}
    for clock in ("wall", "cpu"):
        if side != "stock":
            pairs = zip(times[clock]["stock"], times[clock][side], strict=True)
            speeds = [stock / ours for stock, ours in pairs]
            row[f"{clock}_speed_over_stock"] = spread(speeds) | {
                "min": round(min(speeds), 4),
                "max": round(max(speeds), 4),
            }
        row[f"{clock}_s_repeats"] = [round(value, 4) for value in times[clock][side]]
    return row


def peak_ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return stock's peak over every other side's."""
    peaks = {row["side"]: row["peak_mb"] for row in rows}
    return {side: round(peaks["stock"] / peak, 2) for side, peak in peaks.items() if side != "stock"}


def speed_ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median speed of every side over stock's."""
    return {row["side"]: row["wall_speed_over_stock"]["median"] for row in rows if row["side"] != "stock"}


def step_gradients(stock: dict[str, list[float]], ours: dict[str, list[float]]) -> dict[str, Any]:
    """Compare the gradients of two steps, tensor by tensor, relative to the largest value of the tensor."""
    if stock.keys() != ours.keys() or not stock:
        raise RuntimeError("the two trainers gave gradients to different parameters")
    each = [difference(torch.tensor(ours[name]), torch.tensor(stock[name])) for name in stock]
    return {
        "tensors": len(each),
        "largest": max(one["largest"] for one in each),
        "relative": max(one["relative"] for one in each),
        "smallest_tensor_maximum": min(max(map(abs, values)) for values in stock.values()),
    }


def main() -> None:
    """Measure all sides, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="the bar is for float32")
    parser.add_argument("--tokens", type=int, help="of the row; 4096 by default")
    parser.add_argument("--slices", type=int, nargs="*", help="other slices of ours, tokens; 256 512 1024 by default")
    parser.add_argument("--repeats", type=int, help="rounds timed; 5 by default")
    parser.add_argument("--memory-repeats", type=int, help="processes per side; 2 by default")
    parser.add_argument("--quick", action="store_true", help="a size that takes seconds")
    options = parser.parse_args()
    quick = options.quick
    tokens, repeats = options.tokens or (2048 if quick else 4096), options.repeats or (2 if quick else 5)
    memory_repeats = options.memory_repeats or (1 if quick else 2)
    slices = options.slices if options.slices is not None else ([128] if quick else [256, 512, 1024])
    if options.device == "cuda":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several GPUs, Trainer would split the batch
    base = {
        "shape": QUICK_MODEL if quick else MODEL,
        "tokens": tokens,
        "device": options.device,
        "dtype": options.dtype,
    }
    others = [f"ours_{size}" for size in slices if size != loss_module.LOGITS_AT_ONCE]
    loss_sides = ["stock", "ours", *(["torch"] if HAS_TORCH_SIDE else []), *others]
    step_sides = ["stock", "ours"]
    bar = tqdm(total=(len(loss_sides) + 2) * memory_repeats + 2, desc="measurements", file=sys.stderr)

    def find(**job: Any) -> dict[str, Any]:
        measured = in_own_process(measure, base | job)
        bar.update()
        return measured

    def memory(what: str, sides: list[str]) -> dict[str, list[dict[str, Any]]]:
        rounds = [{side: find(what=what, side=side) for side in sides} for _ in range(memory_repeats)]
        return {side: [each[side] for each in rounds] for side in sides}

    loss_found, step_found = memory("loss_memory", loss_sides), memory("step_memory", step_sides)
    loss_times = find(what="loss_time", sides=loss_sides, repeats=repeats)
    step_times = find(what="step_time", sides=step_sides, repeats=repeats)
    bar.close()
    loss_path = {
        "memory": [memory_row(side, repeats) for side, repeats in loss_found.items()],
        "time": [time_row(side, loss_times, tokens) for side in loss_sides],
        "against_stock_head_trained_too": loss_times["compared"],
    }
    gradients = {side: repeats[0].pop("gradients") for side, repeats in step_found.items()}
    step = {
        "memory": [memory_row(side, repeats) for side, repeats in step_found.items()],
        "time": [time_row(side, step_times, tokens) for side in step_sides],
        "gradients": step_gradients(**gradients),
    }
    step["loss_difference"] = abs(step["memory"][0]["loss"] - step["memory"][1]["loss"])
    ratio = peak_ratios(loss_path["memory"])["ours"]
    worst = max(
        step["gradients"]["relative"],
        *(one["relative"] for one in loss_times["compared"]["ours"]["gradients"].values()),
    )
    report = {
        "benchmark": "train_step",
        "command": command(),
        "what": "stock's peak memory / each side's, and each side's tokens/s / stock's, same model, row and step",
        "summary": {
            "loss_path_peak_stock_over": peak_ratios(loss_path["memory"]),
            "loss_path_speed_over_stock": speed_ratios(loss_path["time"]),
            "step_peak_stock_over": peak_ratios(step["memory"]),
            "step_speed_over_stock": speed_ratios(step["time"]),
            "largest_loss_difference": max(step["loss_difference"], loss_times["compared"]["ours"]["loss_difference"]),
            "largest_relative_gradient_difference": worst,
            "bar": BAR,
            "bar_reached": {
                "memory": ratio >= BAR["loss_path_peak_stock_over_ours"],
                "gradients": math.isfinite(worst) and worst <= BAR["relative_gradient_difference"],
            },
        },
        "notes": [
            "Times are noisy: the machine did other work. Compare ratios within rounds, and their quartiles.",
            "ours is the library as it is, with slices of settings.slice tokens; ours_N has slices of N.",
            "torch cannot scale or cap logits; it makes its gradients in the forward pass.",
        ],
        "shape": base["shape"] | {"dtype": options.dtype},
        "settings": {
            "tokens": tokens,
            "rows": 1,
            "slice": loss_module.LOGITS_AT_ONCE,
            "rounds": repeats,
            "memory_repeats": memory_repeats,
            "method": METHOD,
            "lora": LORA,
            "gradient_checkpointing": True,
            "optimizer": "adamw, Trainer's default",
            "max_grad_norm": 0.0,
        },
        "environment": environment("peft", "accelerate", device=options.device),
        "loss_path": loss_path,
        "step": step,
    }
    write(report, options.output)
    print(json.dumps(report["summary"], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
