"""Compare peak memory and time of our perplexity with lm-eval's own HFLM, on the same token ids and random model.

    OMP_NUM_THREADS=1 python benchmarks/perplexity_memory.py -o benchmarks/results/perplexity_memory.json

Memory: every figure comes from a process of its own, forked from one that has only imported. It is the highest resident
set during the measurement (VmHWM, cleared just before) less the resident set just before, when the model is loaded and
has read a few tokens. malloc is set to return freed memory at once (M_MMAP_THRESHOLD is fixed at the 128 KiB that it
starts with), so that the figure is what a side holds and not the holes that its heap happens to have; at the shortest
and the longest text ours is measured as malloc comes, too. Time: all sides in one process, in turn, in an order that
alternates, malloc as it comes; the figure is the median over rounds of our time / lm-eval's.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from tqdm import tqdm

from gpu_stages.reading import scorer
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
from rope_patch.modeling.read_at_once import LOGITS_AT_ONCE

MODEL = {"vocab": 32000, "hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2}
LONG_MODEL = {"vocab": 32000, "hidden": 64, "layers": 2, "heads": 2, "kv_heads": 2}
QUICK_MODEL = {"vocab": 4000, "hidden": 64, "layers": 2, "heads": 2, "kv_heads": 1}
SIDES = ("lm_eval", "one_pass", "chunked")


def cache_bytes(shape: dict[str, int], tokens: int) -> int:
    """Return the size of a float32 KV cache [bytes]: keys and values of every layer."""
    return 2 * shape["layers"] * shape["kv_heads"] * (shape["hidden"] // shape["heads"]) * tokens * 4


def prepare(job: dict[str, Any], sides: tuple[str, ...]) -> dict[str, Callable[[], float]]:
    """Return the work of each side, after it has read a few tokens, so that nothing is loaded while it is measured."""
    model = random_llama(job["shape"], job["tokens"]).eval()
    ids = random_ids(job["shape"], job["tokens"])
    works = {side: scorer(side, model, job["tokens"], job["chunk"]) for side in sides}
    for run in works.values():
        run(ids[:64])
    return {side: functools.partial(run, ids) for side, run in works.items()}


def measure_memory(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one side in this process, which should be a new one."""
    if job["gives_back"]:
        give_back_what_is_freed()
    run = prepare(job, (job["side"],))[job["side"]]
    nll, usage = peak_of(run)
    return usage | {"nll": nll}


def measure_time(job: dict[str, Any]) -> dict[str, Any]:
    """Time all sides alternately."""
    return time_in_turn(prepare(job, SIDES), job["repeats"])


def memory_row(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the memory of one side at one length."""
    measured = in_own_process(measure_memory, {"gives_back": True, **job})
    cache = cache_bytes(job["shape"], job["tokens"]) if job["side"] == "chunked" else 0
    return {
        "side": job["side"],
        "tokens": job["tokens"],
        "peak_mb": megabytes(measured["peak_bytes"]),
        "cache_mb": megabytes(cache),
        "peak_above_cache_mb": megabytes(measured["peak_bytes"] - cache),
        "loaded_mb": megabytes(measured["loaded_bytes"]),
        "peak_from": measured["peak_from"],
        "nll": measured["nll"],
        "seconds_unpaired": round(measured["seconds"], 2),
    }


def malloc_row(job: dict[str, Any]) -> dict[str, Any]:
    """Measure the memory of one side at one length with malloc's default settings."""
    measured = in_own_process(measure_memory, {"gives_back": False, **job})
    return {"side": job["side"], "tokens": job["tokens"], "peak_mb": megabytes(measured["peak_bytes"])}


def time_row(job: dict[str, Any]) -> dict[str, Any]:
    """Time all sides at one length."""
    times = in_own_process(measure_time, job)
    row: dict[str, Any] = {"tokens": job["tokens"], "rounds": job["repeats"]}
    for side in SIDES:
        row[f"{side}_s"] = round(statistics.median(times["wall"][side]), 3)
    for side in SIDES[1:]:
        for clock in ("wall", "cpu"):
            row[f"{side}_{clock}_ratio"] = ratio(times[clock], side, "lm_eval")
    return row


def summary(memory: list[dict[str, Any]], times: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures that have a bar to reach."""
    rows = {(row["side"], row["tokens"]): row for row in memory}
    lengths = sorted({row["tokens"] for row in memory})
    short, long = lengths[0], lengths[-1]
    above = [rows["chunked", n]["peak_above_cache_mb"] for n in lengths]
    return {
        "shortest_tokens": short,
        "longest_tokens": long,
        "lm_eval_peak_over_ours_at_longest": {
            side: round(rows["lm_eval", long]["peak_mb"] / rows[side, long]["peak_mb"], 1) for side in SIDES[1:]
        },
        "chunked_peak_above_cache_growth": round(above[-1] / above[0] - 1, 4),
        "chunked_peak_above_cache_growth_worst": round(max(above) / above[0] - 1, 4),
        "worst_median_wall_ratio": {side: max(t[f"{side}_wall_ratio"]["median"] for t in times) for side in SIDES[1:]},
        "worst_median_cpu_ratio": {side: max(t[f"{side}_cpu_ratio"]["median"] for t in times) for side in SIDES[1:]},
        "largest_loss_difference": max(
            abs(rows[side, n]["nll"] - rows["lm_eval", n]["nll"]) for side in SIDES[1:] for n in lengths
        ),
    }


def main() -> None:
    """Measure all sides at all lengths, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; 4k to 32k by default")
    parser.add_argument("--chunk", type=int, help="tokens per pass of the chunked prefill; 512 by default")
    parser.add_argument("--repeats", type=int, help="rounds timed per length; by default 7, fewer at the longest")
    parser.add_argument("--long", type=int, help="tokens of a run of ours alone; 131072 by default, 0 for none")
    parser.add_argument("--quick", action="store_true", help="a size that takes seconds")
    options = parser.parse_args()
    shape, long_shape = (QUICK_MODEL, QUICK_MODEL) if options.quick else (MODEL, LONG_MODEL)
    lengths = sorted(options.lengths or ([256, 512] if options.quick else [4096, 8192, 16384, 32768]))
    chunk = options.chunk or (64 if options.quick else 512)
    long = (1024 if options.quick else 131072) if options.long is None else options.long
    memory, as_it_comes, times = [], [], []
    ends = {lengths[0], lengths[-1]}
    steps = len(lengths) * (len(SIDES) + 1) + len(ends) * (len(SIDES) - 1) + bool(long)
    bar = tqdm(total=steps, desc="measurements", file=sys.stderr)
    for tokens in lengths:
        for side in SIDES:
            job = {"side": side, "shape": shape, "tokens": tokens, "chunk": chunk}
            memory.append(memory_row(job))
            bar.update()
            if side != "lm_eval" and tokens in ends:
                as_it_comes.append(malloc_row(job))
                bar.update()
        repeats = options.repeats or (2 if options.quick else max(2, min(7, 7 * 8192 // tokens)))
        times.append(time_row({"shape": shape, "tokens": tokens, "chunk": chunk, "repeats": repeats}))
        bar.update()
    alone = None
    if long:
        alone = memory_row({"side": "chunked", "shape": long_shape, "tokens": long, "chunk": chunk})
        # Two tensors of float32 are held without slices: the logits and their log-softmax.
        alone |= {"shape": long_shape, "two_logits_would_be_mb": megabytes(2 * long * long_shape["vocab"] * 4)}
        bar.update()
    bar.close()
    report = {
        "benchmark": "perplexity_memory",
        "command": command(),
        "what": "peak memory above the loaded model [MB], and time of ours / time of lm-eval's, same ids and model",
        "summary": summary(memory, times),
        "shape": shape | {"head_dim": shape["hidden"] // shape["heads"], "dtype": "float32"},
        "settings": {"chunk": chunk, "logit_slice": LOGITS_AT_ONCE, "batch": 1},
        "environment": environment("lm_eval"),
        "memory": memory,
        "memory_malloc_as_it_comes": as_it_comes,
        "time": times,
        "alone": alone,
    }
    write(report, options.output)
    print(json.dumps(report["summary"], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
