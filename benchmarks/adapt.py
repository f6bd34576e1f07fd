"""Adapt both bundled checkpoints from 256 to 1024 tokens under five methods, with three seeds each.

    python benchmarks/adapt.py -o benchmarks/results/adapt.json --figure docs/adapt.png      # or: make adapt
    python benchmarks/adapt.py --quick                                                       # one seed, few steps

Every cell is a run of the fine-tuning recipe in a process of its own, on the same number of tokens of the same text; no
retrieval prompt is among the training rows. Each writes its adapter to build/adapters/CHECKPOINT/METHOD-SEED, and a
finished one is not run again. Two arms (`yarn-pose`, `abf-pose`) train on rows of 256 tokens at positions up to 1024.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import os
import platform
import resource
import shlex
import signal
import statistics
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scipy import stats
from tqdm import tqdm

from rope_patch.evaluation.intervals import independent_count, paired_shares, wilson
from rope_patch.runtime.folders import write_atomically

SHAPES = ("llama", "gemma3")
METHODS = {
    "default": "default",
    "pi": "pi:factor=4",
    "abf": "abf:factor=50",
    "yarn": "yarn:factor=4",
    "p_rope": "p_rope:p=0.5",
}
POSE = ("yarn", "abf")
SEEDS = (0, 1, 2)
LONG, SHORT = 1024, 256
# STEPS optimizer steps of TOKENS tokens each, for every arm: short rows only mean more of them in a step.
STEPS, TOKENS = 40, 4096
DEPTHS, SAMPLES = 10, 20


def cells(quick: bool) -> list[tuple[str, str, int]]:
    """Return checkpoint, arm and seed of every cell."""
    arms = {shape: [*METHODS, *(f"{name}-pose" for name in POSE if shape == "llama")] for shape in SHAPES}
    if quick:
        return [("llama", arm, 0) for arm in ("default", "yarn", "yarn-pose")]
    return [(shape, arm, seed) for seed in SEEDS for shape in SHAPES for arm in arms[shape]]


def train(cell: tuple[str, str, int], root: str, quick: bool) -> tuple[str, str, int]:
    """Run a cell to its end; if it was interrupted, it continues from its last checkpoint."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import warnings

    import torch
    import transformers

    from rope_patch.options.finetune import RecipeOptions
    from rope_patch.options.yaml_and_json import from_dict
    from rope_patch.training.finetune import finetune

    warnings.filterwarnings("ignore", category=FutureWarning)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    shape, arm, seed = cell
    name, pose = arm.removesuffix("-pose"), arm.endswith("-pose")
    length = SHORT if pose else LONG
    # Several cells print at the same time, so only the progress bar of this script is shown.
    with open(os.devnull, "w") as nowhere:
        shown = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = nowhere
        try:
            finetune(
                from_dict(
                    RecipeOptions,
                    {
                        "model": {"name": shape, "dtype": "float32"},
                        "patch": {"method": METHODS[name], "target_length": LONG},
                        "lora": {"rank": 16},
                        "data": {"length": length, "positions": "pose" if pose else "full"},
                        "train": {
                            "steps": 2 if quick else STEPS,
                            "batch": TOKENS // length,
                            "accumulate": 1,
                            "learning_rate": 1e-3,
                            "scheduler": "cosine",
                            "warmup": 0.1,
                            "checkpointing": False,
                            "seed": seed,
                            "keep": 1,
                        },
                        "evaluation": {
                            "haystack": "builtin",
                            "before": False,  # `make demo` shows the methods without training
                            "lengths": f"{SHORT} {LONG}",
                            "depths": [i / (DEPTHS - 1) for i in range(DEPTHS)],
                            "samples": 1 if quick else SAMPLES,
                            "windows": 2 if quick else 16,
                            "seed": seed,
                        },
                        "output": str(folder_of(Path(root), cell)),
                    },
                ),
                command="python benchmarks/adapt.py",
            )
        finally:
            sys.stdout, sys.stderr = shown
    return cell


def _ignore_interrupt() -> None:
    """Ignore Ctrl-C in the worker processes: the parent process ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def folder_of(root: Path, cell: tuple[str, str, int]) -> Path:
    """Return the folder of a cell's adapter."""
    shape, arm, seed = cell
    return root / shape / f"{arm}-{seed}"


def report(root: Path, done: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return the results of all cells: shares with intervals, and paired differences from default."""
    evaluations = {cell: json.loads((folder_of(root, cell) / "evaluation.json").read_text()) for cell in done}
    runs = {cell: json.loads((folder_of(root, cell) / "results.json").read_text()) for cell in done}
    rows = []
    for shape in dict.fromkeys(shape for shape, *_ in done):
        arms = list(dict.fromkeys(arm for s, arm, _ in done if s == shape))
        seeds = sorted({seed for s, _, seed in done if s == shape})
        for arm in arms:
            answered = {n: [answers(evaluations[shape, arm, seed], n) for seed in seeds] for n in (SHORT, LONG)}
            base = [answers(evaluations[shape, "default", seed], LONG) for seed in seeds]
            row = {
                "checkpoint": shape,
                "arm": arm,
                "patch": runs[shape, arm, seeds[0]]["patch"],
                "seeds": seeds,
                "tokens": runs[shape, arm, seeds[0]]["tokens"],
                "passkey": {str(n): share(answered[n]) for n in (SHORT, LONG)},
                "perplexity": {
                    name: {"mean": statistics.fmean(values), "seeds": values}
                    for name in runs[shape, arm, seeds[0]]["after"]
                    if name.startswith("perplexity")
                    for values in [[runs[shape, arm, seed]["after"][name] for seed in seeds]]
                },
            }
            if arm != "default":
                row["above_default"] = difference(answered[LONG], base)
            if arm.endswith("-pose"):
                full = [answers(evaluations[shape, arm.removesuffix("-pose"), seed], LONG) for seed in seeds]
                row["above_full_length"] = difference(answered[LONG], full)
            rows.append(row)
    first = runs[done[0]]
    return {
        "rows": rows,
        "environment": {**first["environment"], "device": platform.machine()},
        "options": first["options"],
    }


def answers(evaluation: dict[str, Any], length: int) -> list[list[bool]]:
    """Return whether each prompt of a length was answered right: a list for each haystack, a value for each depth."""
    columns = [
        [sample["correct"] for sample in cell["samples"]]
        for cell in evaluation["after"]["retrieval"]["passkey"]["cells"]
        if cell["length"] == length
    ]
    return [list(haystack) for haystack in zip(*columns, strict=True)]


def share(seeds: list[list[list[bool]]]) -> dict[str, Any]:
    """Return the share of right answers over all seeds, with a Wilson interval that counts haystacks as clusters."""
    haystacks = [haystack for seed in seeds for haystack in seed]
    flat = [right for haystack in haystacks for right in haystack]
    count = independent_count([[float(x) for x in haystack] for haystack in haystacks])
    accuracy = sum(flat) / len(flat)
    # Wilson's counts are rounded, so the interval may just miss the share itself; its ends are then set to it.
    low, high = wilson(round(accuracy * count), max(1, round(count)))
    return {
        "exact_match": accuracy,
        "interval": [min(low, accuracy), max(high, accuracy)],
        "prompts": len(flat),
        "seeds": [statistics.fmean(x for haystack in seed for x in haystack) for seed in seeds],
    }


def difference(ours: list[list[list[bool]]], theirs: list[list[list[bool]]]) -> dict[str, Any]:
    """Return the paired difference of two shares, with a 95 % interval over prompts and another one over seeds."""
    pairs = [(a, b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=True)]
    count = independent_count([[float(p) - float(q) for p, q in zip(a, b, strict=True)] for a, b in pairs])
    a, b = ([x for haystack in side for x in haystack] for side in zip(*pairs, strict=True))
    low, high = paired_shares(a, b, count=count)
    each = [
        statistics.fmean(x for h in one for x in h) - statistics.fmean(x for h in two for x in h)
        for one, two in zip(ours, theirs, strict=True)
    ]
    result: dict[str, Any] = {"difference": (sum(a) - sum(b)) / len(a), "interval_prompts": [low, high], "seeds": each}
    if len(each) > 1:
        half = float(stats.t.ppf(0.975, len(each) - 1)) * statistics.stdev(each) / math.sqrt(len(each))
        result["interval_seeds"] = [statistics.fmean(each) - half, statistics.fmean(each) + half]
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as a text table."""
    lines = [
        f"{'checkpoint':10s}  {'arm':10s}  {'ppl 0-256':>9s}  {'ppl 256-1024':>12s}  {'passkey 256':>11s}  "
        f"{'passkey 1024':>20s}  {'above default':>24s}"
    ]
    for row in rows:
        near, far = (row["perplexity"][f"perplexity_{a}_{b}"]["mean"] for a, b in ((0, SHORT), (SHORT, LONG)))
        short, long = row["passkey"][str(SHORT)], row["passkey"][str(LONG)]
        low, high = long["interval"]
        ahead = ""
        if "above_default" in row:
            d = row["above_default"]
            ahead = f"{d['difference']:+.2f} ({d['interval_prompts'][0]:+.2f} to {d['interval_prompts'][1]:+.2f})"
        lines.append(
            f"{row['checkpoint']:10s}  {row['arm']:10s}  {near:9.2f}  {far:12.2f}  {short['exact_match']:11.2f}  "
            f"{long['exact_match']:4.2f} ({low:.2f} to {high:.2f})  {ahead:>24s}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write; else it is printed")
    parser.add_argument("--figure", type=Path, help="picture to write; needs matplotlib")
    parser.add_argument(
        "--adapters",
        type=Path,
        help="folder of the cells; by default build/adapters, or build/adapters-quick with --quick",
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="cells that run at the same time, one thread each"
    )
    parser.add_argument("--quick", action="store_true", help="three small cells")
    options = parser.parse_args()
    options.adapters = options.adapters or Path("build/adapters-quick" if options.quick else "build/adapters")
    chosen, start = cells(options.quick), time.time()
    todo = [cell for cell in chosen if not (folder_of(options.adapters, cell) / "results.json").exists()]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    bar = tqdm(total=len(chosen), initial=len(chosen) - len(todo), unit="run", desc="adapt")
    work = functools.partial(train, root=str(options.adapters), quick=options.quick)
    try:
        with get_context("spawn").Pool(min(options.workers, len(chosen)), _ignore_interrupt) as pool:
            for shape, arm, seed in pool.imap_unordered(work, chosen):
                bar.set_postfix_str(f"{shape} {arm}-{seed}")
                bar.update((shape, arm, seed) in todo)  # a finished cell is only checked to be the same run
            pool.close()
            pool.join()  # getrusage counts the CPU time of processes that have ended
    except KeyboardInterrupt:
        print("\nstopped: finished cells are kept, and the same command runs the others", file=sys.stderr)
        sys.exit(130)
    bar.close()
    result = {
        "benchmark": "adapt",
        "command": "python benchmarks/adapt.py " + shlex.join(sys.argv[1:]),
        "what": f"LoRA at {LONG} tokens on equal tokens of text; passkey exact match and perplexity, held out",
        "cells_run_now": len(todo),
        "seconds_now": round(time.time() - start, 1),
        "cpu_seconds_now": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, 1),
        **report(options.adapters, chosen),
    }
    print(table(result["rows"]))
    if options.figure:
        draw(result["rows"], options.figure)
    text = json.dumps(result, indent=1) + "\n"
    if options.output is None:
        print(text)
    else:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output, text)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    from figures import shares_beside_perplexity

    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        long, far = row["passkey"][str(LONG)], row["perplexity"][f"perplexity_{SHORT}_{LONG}"]["seeds"]
        groups.setdefault(row["checkpoint"], {})[row["arm"]] = (long["exact_match"], long["interval"], far)
    title = f"After {STEPS * TOKENS:,} tokens of LoRA at {LONG} (trained at {SHORT}), {len(rows[0]['seeds'])} seeds"
    figure = shares_beside_perplexity(
        groups,
        title=title,
        share=f"passkey exact match at {LONG}, 95 % intervals",
        perplexity=f"perplexity at {SHORT} to {LONG}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
