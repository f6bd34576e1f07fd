"""Time and memory of the analysis against a bare forward through the decoder, on a random model.

    OMP_NUM_THREADS=1 python benchmarks/analysis_overhead.py -o benchmarks/results/analysis_overhead.json

``bare`` is ``model.model(input_ids, use_cache=False)``, ``capture`` and ``masses`` are the functions of
``rope_patch.analysis``, and ``store`` is the bare forward with hooks that keep queries, keys and values of every layer
to its end, after projection and before rotation, as TransformerLens' cache does. Means over what is stored are compared
with capture's.

Time: two sides in one process, in turn, in an order that alternates; the figure is the median over rounds of a side's
time / the bare forward's. Memory: every figure comes from a process of its own, forked from one that has only imported.
It is the highest resident set during the work (VmHWM, cleared just before) less that just before, malloc told to give
back what is freed; above bare is what that is more than the bare forward's of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn
from tqdm import tqdm

from measuring import (
    command,
    environment,
    give_back_what_is_freed,
    in_own_process,
    megabytes,
    peak_of,
    random_ids,
    random_llama,
    ratio,
    time_in_turn,
    write,
)
from rope_patch.analysis.attention_mass import REPEATED, measure_heads
from rope_patch.modeling.capture import Capture, capture

MODEL = {"vocab": 32000, "hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2}
QUICK_MODEL = {"vocab": 2000, "hidden": 128, "layers": 4, "heads": 2, "kv_heads": 1}
CAPTURE_TIME = (256, 1024, 4096, 8192, 16384, 32768)
CAPTURE_MEMORY = (4096, 8192, 16384, 32768)
MASSES = (1024, 4096, 16384)
QUICK = (256, 1024)
BAR = {"capture_wall_over_bare": 1.5, "capture_growth_over_store_growth": 0.02}
"""Memory is flat when capture's part above bare grows by at most so much of what storing grows by."""
LONG = 16384
"""Memory is measured once from here on, twice before: a reading of masses takes a minute [tokens]."""
WARM_UP = 4096
"""Tokens read before anything is timed."""
ROLES = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


@torch.no_grad()
def bare(model: Any, ids: Tensor) -> None:
    """Read a text, as capture does on its way."""
    model.model(input_ids=ids[None], use_cache=False)


def store(model: Any, ids: Tensor) -> dict[tuple[int, str], Tensor]:
    """Read a text and keep its states (1, tokens, heads * head_dim), by layer and role."""
    captured: dict[tuple[int, str], Tensor] = {}

    def keep(key: tuple[int, str]) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, output: captured.__setitem__(key, output)

    with contextlib.ExitStack() as hooks:
        for index, layer in enumerate(model.model.layers):
            for role, name in ROLES.items():
                part = getattr(layer.self_attn, name)
                hooks.callback(part.register_forward_hook(keep((index, role))).remove)
        bare(model, ids)
    return captured


WORKS: dict[str, Callable[[Any, Tensor], Any]] = {
    "bare": bare,
    "capture": capture,
    "store": store,
    "masses": measure_heads,
}


def mean_sizes(states_of_side: Any) -> list[float] | None:
    """Return the mean size of every feature of every state that a side stored; None where it stored none."""
    if isinstance(states_of_side, Capture):
        each = [getattr(layer, role).mean_abs for layer in states_of_side.layers for role in ROLES]
    elif isinstance(states_of_side, dict):
        each = [states[0].abs().mean(0, dtype=torch.float64) for states in states_of_side.values()]
    else:
        return None
    return torch.cat([part.flatten() for part in each]).tolist()


def prepare(job: dict[str, Any], sides: tuple[str, ...], warm_up: int) -> dict[str, Callable[[], Any]]:
    """Return each side's work, after it has read the beginning of the text."""
    model, ids = random_llama(job["shape"], job["tokens"]).eval(), random_ids(job["shape"], job["tokens"])
    works = {side: functools.partial(WORKS[side], model) for side in sides}
    for work in works.values():
        work(ids[:warm_up])
    return {side: functools.partial(work, ids) for side, work in works.items()}


def measure_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one side in this process, which should be a fresh one."""
    give_back_what_is_freed()
    result, usage = peak_of(prepare(job, (job["side"],), 64)[job["side"]])
    return usage | {"mean_sizes": mean_sizes(result)}


def measure_time(job: dict[str, Any]) -> dict[str, Any]:
    """Time a side and the bare forward in turn."""
    return time_in_turn(prepare(job, ("bare", job["side"]), WARM_UP), job["rounds"])


def rounds_of(side: str, tokens: int) -> int:
    """Return how many rounds are timed: few of the longest, whose time is quadratic."""
    return max(3, min(25, (14 if side == "capture" else 5) * 4096 // tokens))


def time_row(side: str, tokens: int, rounds: int, times: dict[str, Any]) -> dict[str, Any]:
    """Return the times of one side at one length, over all rounds."""
    return {
        "side": side,
        "tokens": tokens,
        "rounds": rounds,
        "bare_s": round(statistics.median(times["wall"]["bare"]), 4),
        f"{side}_s": round(statistics.median(times["wall"][side]), 4),
        "wall_ratio": ratio(times["wall"], side, "bare"),
        "cpu_ratio": ratio(times["cpu"], side, "bare"),
    }


def memory_rows(tokens: int, rounds: list[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the memory of every side at one length, over all processes."""
    rows = []
    for side in rounds[0]:
        row = {
            "side": side,
            "tokens": tokens,
            "rounds": len(rounds),
            "peak_mb": megabytes(statistics.median(each[side]["peak_bytes"] for each in rounds), 2),
            "loaded_mb": megabytes(rounds[0][side]["loaded_bytes"]),
            "peak_from": rounds[0][side]["peak_from"],
        }
        if side != "bare":
            above = [megabytes(each[side]["peak_bytes"] - each["bare"]["peak_bytes"], 2) for each in rounds]
            row |= {"above_bare_mb": round(statistics.median(above), 2), "above_bare_mb_rounds": above}
        rows.append(row)
    return rows


def largest_difference(rounds: list[dict[str, dict[str, Any]]]) -> float | None:
    """Return by how much capture's mean sizes are off those of what was stored, relative to these."""
    pairs = [
        (ours, theirs)
        for each in rounds
        if {"capture", "store"} <= each.keys()
        for ours, theirs in zip(each["capture"]["mean_sizes"], each["store"]["mean_sizes"], strict=True)
    ]
    return max((abs(ours / theirs - 1) for ours, theirs in pairs), default=None)


def check_bars(times: list[dict[str, Any]], memory: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the bars, what was measured, and whether the bars are reached."""
    ratios = {row["tokens"]: row["wall_ratio"]["median"] for row in times if row["side"] == "capture"}
    worst = max(ratios, key=lambda tokens: ratios[tokens])
    above = {
        side: {row["tokens"]: row["above_bare_mb"] for row in memory if row["side"] == side}
        for side in ("capture", "store")
    }
    short, long = min(above["capture"]), max(above["capture"])
    # Capture's where it is largest, wherever that is.
    growth = round(max(above["capture"].values()) - above["capture"][short], 2)
    stored = round(above["store"][long] - above["store"][short], 2)
    share = round(growth / stored, 4) if stored > 0 else None
    return {
        "capture_time": {
            "bar": f"median wall time of capture / bare <= {BAR['capture_wall_over_bare']} at every length",
            "worst": ratios[worst],
            "worst_tokens": worst,
            "reached_at": {str(n): value <= BAR["capture_wall_over_bare"] for n, value in ratios.items()},
            "reached": ratios[worst] <= BAR["capture_wall_over_bare"],
        },
        "capture_memory_flat": {
            "bar": f"from {short} to {long} tokens capture's memory above bare grows by at most "
            f"{BAR['capture_growth_over_store_growth']} of what storing grows by",
            "capture_above_bare_mb": {str(n): value for n, value in above["capture"].items()},
            "capture_growth_mb": growth,
            "store_growth_mb": stored,
            "growth_over_store": share,
            "reached": None if share is None else share <= BAR["capture_growth_over_store_growth"],
        },
    }


def main() -> None:
    """Measure everything; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of everything; up to 32k by default")
    parser.add_argument("--rounds", type=int, help="rounds timed; 25 to 3 by default, fewer of long texts")
    parser.add_argument("--memory-rounds", type=int, help="processes per side and length; 2 by default, 1 from 16k on")
    parser.add_argument("--quick", action="store_true", help="a size that takes seconds")
    options = parser.parse_args()
    quick, began = options.quick, time.perf_counter()
    shape = QUICK_MODEL if quick else MODEL
    given = tuple(sorted(options.tokens or (QUICK if quick else ())))
    timed = [("capture", n) for n in given or CAPTURE_TIME] + [("masses", n) for n in given or MASSES]
    held = {n: ["capture", "store"] for n in given or CAPTURE_MEMORY}
    for n in given or MASSES:
        held.setdefault(n, []).append("masses")
    readings = {n: options.memory_rounds or (1 if quick or n >= LONG else 2) for n in held}
    steps = len(timed) + sum(readings[n] * (1 + len(sides)) for n, sides in held.items())
    bar = tqdm(total=steps, desc="measurements", file=sys.stderr)

    def find(measure: Callable[[dict[str, Any]], dict[str, Any]], **job: Any) -> dict[str, Any]:
        measured = in_own_process(measure, {"shape": shape, **job})
        bar.update()
        return measured

    times, memory, differences = [], [], []
    for tokens, sides in sorted(held.items()):
        rounds = [
            {side: find(measure_memory, side=side, tokens=tokens) for side in ("bare", *sides)}
            for _ in range(readings[tokens])
        ]
        memory += memory_rows(tokens, rounds)
        differences.append(largest_difference(rounds))
    for side, tokens in timed:
        count = options.rounds or (2 if quick else rounds_of(side, tokens))
        times.append(time_row(side, tokens, count, find(measure_time, side=side, tokens=tokens, rounds=count)))
    bar.close()
    report = {
        "benchmark": "analysis_overhead",
        "command": command(),
        "what": "time of the analysis / of a bare forward, and its peak memory above the bare forward's [MB]",
        "summary": {
            **{
                f"{clock}_over_bare": {
                    side: {str(row["tokens"]): row[f"{clock}_ratio"]["median"] for row in times if row["side"] == side}
                    for side in ("capture", "masses")
                }
                for clock in ("wall", "cpu")
            },
            "above_bare_mb": {
                side: {str(row["tokens"]): row["above_bare_mb"] for row in memory if row["side"] == side}
                for side in ("capture", "store", "masses")
            },
            "largest_mean_difference": max(difference for difference in differences if difference is not None),
        },
        "bars": check_bars(times, memory),
        "notes": [
            "Times are noisy: the machine did other work. Compare ratios within rounds, and their quartiles.",
            "capture also reads a few tokens once, to find where the states appear: it counts at short texts.",
            "Memory above bare is that of the peaks: what a side holds while the forward pass holds less is not seen.",
            f"masses reads {REPEATED} tokens twice, with the model's attention and its own, and {REPEATED} random "
            "tokens twice in a row, besides the text.",
        ],
        "shape": shape | {"head_dim": shape["hidden"] // shape["heads"], "dtype": "float32"},
        "settings": {"chunk": None, "rows": 1, "max_position_embeddings": "tokens"},
        "environment": environment(),
        "seconds": round(time.perf_counter() - began, 1),
        "time": times,
        "memory": memory,
    }
    write(report, options.output)
    print(json.dumps({name: report[name] for name in ("summary", "bars")}, indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
