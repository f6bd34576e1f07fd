"""What quantized caches cost on both bundled checkpoints, under four tables, before and after LoRA at 4x the length.

    python benchmarks/kv_study.py -o benchmarks/results/kv_study.json --figure docs/kv_study.png
    python benchmarks/kv_study.py --quick                    # one checkpoint, two tables, few schemes, before training

After LoRA means the adapters of `make adapt` in build/adapters, three seeds; text, windows and prompts are the same in
every cell. Each cell is written to build/kv_study when it is done, and is not measured again. The question: does p-RoPE
with centred keys make a cache easier to quantize?
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from scipy import stats

from measuring import command, environment, measure_cells, write
from rope_patch.evaluation.intervals import paired_means, paired_shares
from rope_patch.files import write_atomically

SHAPES = ("llama", "gemma3")
METHODS = {"default": "default", "abf": "abf:factor=50", "yarn": "yarn:factor=4", "p_rope": "p_rope:p=0.5"}
SEEDS = (0, 1, 2)
LENGTH = 1024
SCHEMES = {
    "int8": "int8-token",
    "fp8": "fp8",
    "int4": "int4-token",
    "int4 centred": "k=int4.token.centre;v=int4.token",
    "int4 centred as stored": "k=int4.token.centreall;v=int4.token",
    "int4 pre, centred": "k=int4.token.pre.centreall;v=int4.token",
    "int3": "k=int3.token;v=int3.token",
    "int3 centred": "k=int3.token.centre;v=int3.token",
    "int3 centred as stored": "k=int3.token.centreall;v=int3.token",
    "int3 pre, centred": "k=int3.token.pre.centreall;v=int3.token",
    "KIVI-4": "kivi-4-window",
    "KIVI-2": "kivi-2-window",
    "KIVI-2 pre": "k=int2.channel32.pre;v=int2.token32;residual=128",
    "KIVI-2 keep8": "k=int2.channel32.keep8;v=int2.token32;residual=128",
    "KIVI-2, int3 keys": "k=int3.channel32;v=int2.token32;residual=128",
    "KIVI-2, int4 keys": "k=int4.channel32;v=int2.token32;residual=128",
    "int2, keep8": "k=int2.token.keep8;v=int2.token32;residual=128",
}
"""Those called KIVI keep a window of at least 128 keys, which is kinder than KIVI's own schedule (``kivi-2``).

The last five and KIVI-2 differ in keys alone: are outlier pairs kept in 8 bits, chosen by the frequency bound alone
(keep8), worth their bits? Nothing is centred per channel: its zero point takes any constant away."""
CENTRED = ("centred", "centred as stored", "pre, centred")
WINDOWS, DEPTHS, SAMPLES = 8, 5, 2

Cell = tuple[str, str, int | None]
"""Checkpoint, table, and seed of the adapter; None before training."""


def cells(quick: bool) -> list[Cell]:
    """Return every cell."""
    if quick:
        return [("llama", arm, None) for arm in ("default", "p_rope")]
    return [(shape, arm, seed) for seed in (None, *SEEDS) for shape in SHAPES for arm in METHODS]


def place(root: Path, cell: Cell) -> Path:
    """Return where a cell's result lies."""
    shape, arm, seed = cell
    return root / f"{shape}-{arm}-{'before' if seed is None else seed}.json"


def measure(cell: Cell, root: Path, adapters: Path, quick: bool) -> Cell:
    """Measure one cell and write it."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import torch
    import transformers

    import rope_patch
    from rope_patch.evaluation.spec import EvalSpec
    from rope_patch.kv_evaluation.run import kv_check

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    shape, arm, seed = cell
    base = rope_patch.data_path("assets") / shape
    source = base if seed is None else adapters / shape / f"{arm}-{seed}"
    model = rope_patch.load(source, dtype=torch.float32).eval()
    schemes = dict(itertools.islice(SCHEMES.items(), 4)) if quick else SCHEMES
    checked = kv_check(
        model,
        transformers.AutoTokenizer.from_pretrained(base),
        list(schemes.values()),
        EvalSpec(
            [256 if quick else LENGTH],
            bucket=256 if quick else LENGTH,
            windows=2 if quick else WINDOWS,
            depths=[i / (DEPTHS - 1) for i in range(DEPTHS)],
            samples=1 if quick else SAMPLES,
            haystack="builtin",
        ),
        methods=[METHODS[arm] if seed is None else "default"],
        resume=root / f"{place(root, cell).stem}.jsonl",
    )
    (length,) = checked.lengths
    names = {text: name for name, text in schemes.items()}
    rows = {}
    for row in checked.rows:
        score, retrieval = row.scores.perplexity, row.scores.retrieval["passkey"]
        rows[names.get(row.scheme, "none")] = {
            "scheme": row.scheme_text,
            "key_bits": row.key_bits,
            "value_bits": row.value_bits,
            "nll": [sum(document.nll) / sum(document.tokens) for document in score.documents],
            "correct": [sample.correct for sample in retrieval.samples(length)],
            "kl": None if row.divergence is None else row.divergence.kl,
            "top1": None if row.divergence is None else row.divergence.top1,
            "logit": [float(error.logit.mean()) for error in row.errors],
            "output": [float(error.output.mean()) for error in row.errors],
            "prediction": row.prediction,
        }
    write_atomically(place(root, cell), json.dumps(rows))
    return cell


def summarise(root: Path, done: list[Cell]) -> list[dict[str, Any]]:
    """Return a row per checkpoint, table, state and scheme, all against full precision on the same windows and prompts.

    Over seeds a window's (or prompt's) difference is its mean; the interval is Student's over windows, Newcombe's over
    all prompts, and Student's over seeds beside it.
    """
    out = []
    for shape, arm, after, group in _groups(root, done):
        for name in group[0]:
            quantized, full = [cell[name] for cell in group], [cell["none"] for cell in group]
            changes = [
                [a - b for a, b in zip(x["nll"], y["nll"], strict=True)] for x, y in zip(quantized, full, strict=True)
            ]
            by_window = [statistics.fmean(part) for part in zip(*changes, strict=True)]
            low, high = paired_means(by_window, [0.0] * len(by_window))
            ours, theirs = (list(itertools.chain(*(cell["correct"] for cell in part))) for part in (quantized, full))
            errors = [cell["logit"] for cell in quantized if cell["logit"]]
            out.append(
                {
                    "checkpoint": shape,
                    "table": arm,
                    "after_lora": after,
                    "seeds": len(group),
                    "name": name,
                    "scheme": quantized[0]["scheme"],
                    "bits": (quantized[0]["key_bits"] + quantized[0]["value_bits"]) / 2,
                    "key_bits": quantized[0]["key_bits"],
                    "perplexity": math.exp(statistics.fmean(itertools.chain(*(cell["nll"] for cell in quantized)))),
                    "nll_change": statistics.fmean(by_window),
                    "nll_change_interval": [low, high],
                    "nll_change_over_seeds": _over_seeds([statistics.fmean(part) for part in changes]),
                    "retrieval": statistics.fmean(map(float, ours)),
                    "retrieval_change": statistics.fmean(map(float, ours)) - statistics.fmean(map(float, theirs)),
                    "retrieval_change_interval": list(paired_shares(ours, theirs)),
                    "prompts": len(ours),
                    "kl": None if quantized[0]["kl"] is None else statistics.fmean(cell["kl"] for cell in quantized),
                    "logit_error": statistics.fmean(itertools.chain(*errors)) if errors else None,
                    "worst_layer_logit_error": max(itertools.chain(*errors)) if errors else None,
                    "prediction_radius": _mean([cell["prediction"][0] for cell in quantized]),
                    "prediction_bound": _mean([cell["prediction"][1] for cell in quantized]),
                }
            )
    return out


def _over_seeds(values: list[float]) -> list[float] | None:
    """Student's interval of the mean over seeds."""
    if len(values) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values) - half, statistics.fmean(values) + half]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def answer(root: Path, done: list[Cell]) -> list[dict[str, Any]]:
    """Return how much of a scheme's cost a mitigation saves on the same windows [nats/token], as the mean over seeds.

    The interval is Student's over windows; above 0 the mitigation helps.
    """
    pairs = [(plain, f"{plain} {word}") for plain in ("int4", "int3") for word in CENTRED] + [("KIVI-2", "KIVI-2 pre")]
    pairs += [("KIVI-2, int4 keys", "KIVI-2 keep8"), ("KIVI-2, int3 keys", "KIVI-2 keep8")]
    out = []
    for plain, mitigation in pairs:
        for shape, table, after, group in _groups(root, done):
            if mitigation not in group[0] or plain not in group[0]:
                continue
            costs = [[cell[name]["nll"] for cell in group] for name in (plain, mitigation, "none")]
            one, other, none = ([statistics.fmean(part) for part in zip(*rows, strict=True)] for rows in costs)
            low, high = paired_means(one, other)
            logits = [
                statistics.fmean(itertools.chain(*(c[name]["logit"] for c in group))) for name in (plain, mitigation)
            ]
            out.append(
                {
                    "checkpoint": shape,
                    "table": table,
                    "after_lora": after,
                    "scheme": plain,
                    "mitigation": mitigation,
                    "key_bits": [group[0][name]["key_bits"] for name in (plain, mitigation)],
                    "nll_cost": [statistics.fmean(part) - statistics.fmean(none) for part in (one, other)],
                    "nll_saved": statistics.fmean(one) - statistics.fmean(other),
                    "nll_saved_interval": [low, high],
                    "logit_error_ratio": logits[0] / logits[1],
                }
            )
    return out


def _groups(root: Path, done: list[Cell]) -> Iterator[tuple[str, str, bool, list[dict[str, Any]]]]:
    """Yield checkpoint, table, whether it was trained, and the cells of all seeds."""
    for shape, arm in dict.fromkeys((shape, arm) for shape, arm, _ in done):
        for after in (False, True):
            own = [cell for cell in done if cell[:2] == (shape, arm) and (cell[2] is not None) == after]
            if own:
                yield shape, arm, after, [json.loads(place(root, cell).read_text()) for cell in own]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw what schemes cost the first checkpoint in perplexity against bits, after LoRA if there is any."""
    from rope_patch.kv_evaluation.run import TOLERANCE
    from rope_patch.kv_evaluation.verdicts import relative
    from rope_patch.plots.kv import Spot, tradeoff

    shape, after = rows[0]["checkpoint"], any(row["after_lora"] for row in rows)
    panels: dict[str, list[Spot]] = {}
    for row in rows:
        if (row["checkpoint"], row["after_lora"]) == (shape, after) and row["name"] != "none":
            cost, low, high = (relative(value) for value in (row["nll_change"], *row["nll_change_interval"]))
            verdict = "safe" if high <= TOLERANCE else "unsafe" if low > TOLERANCE else "undecided"
            plain = row["name"].partition(" ")[0].rstrip(",")
            spot = Spot(
                row["name"], row["bits"], 100 * cost, 100 * low, 100 * high, verdict, plain, plain != row["name"]
            )
            panels.setdefault(METHODS[row["table"]], []).append(spot)
    schemes = list(dict.fromkeys(spot.scheme for spots in panels.values() for spot in spots))
    title = f"Quantized caches of the bundled {shape} at 4x the length, {'after LoRA' if after else 'untrained'}"
    figure = tradeoff(
        panels, schemes, title=title, ylabel="change of perplexity [%]", lower=True, limit=100 * TOLERANCE
    )
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure what is missing, then summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument("--figure", type=Path, default=None, help="PNG of cost against bits, after LoRA")
    parser.add_argument(
        "--root", type=Path, default=Path("build/kv_study"), help="folder of the results of finished cells"
    )
    parser.add_argument(
        "--adapters", type=Path, default=Path("build/adapters"), help="folder of the adapters that `make adapt` trains"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of processes, one thread each")
    parser.add_argument("--quick", action="store_true", help="two cells of few schemes")
    given = parser.parse_args()
    requested = cells(given.quick)
    trained = {cell: given.adapters / cell[0] / f"{cell[1]}-{cell[2]}" for cell in requested if cell[2] is not None}
    missing = [cell for cell, folder in trained.items() if not folder.exists()]
    if missing:
        sys.exit(f"no adapter in {given.adapters} for {missing[0]} and {len(missing) - 1} more: run `make adapt` first")
    root = given.root / ("quick" if given.quick else "full")
    root.mkdir(parents=True, exist_ok=True)
    todo = [cell for cell in requested if not place(root, cell).exists()]
    measure_cells(measure, [(cell, root, given.adapters, given.quick) for cell in todo], given.jobs)
    rows = summarise(root, requested)
    settings = {"length": 256 if given.quick else LENGTH, "windows": 2 if given.quick else WINDOWS, "simulated": True}
    report = {
        "benchmark": "kv_study",
        "command": command(),
        "what": "nats/token and prompts that quantized caches cost at 4x the trained length, before and after LoRA; "
        "KIVI as kivi-4-window, kivi-2-window",
        "summary": answer(root, requested),
        "settings": settings,
        "environment": environment(),
        "rows": rows,
    }
    write(report, given.output)
    if given.figure:
        draw(rows, given.figure)


if __name__ == "__main__":
    main()
