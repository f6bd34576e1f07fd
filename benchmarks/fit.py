"""Fitted tables against YaRN's at 4, 8 and 16 times the trained length of the bundled Llama, on one thread.

    python benchmarks/fit.py -o benchmarks/results/fit.json
    python benchmarks/fit.py --quick

Each cell is a factor and a seed: `rope_patch.fit` from YaRN's table, to one kind of text and chosen on it alone
(fit_mixture.py measures mixtures and a second domain), otherwise with its defaults, timed (study_methods.py and
fit_pose.py take their tables from here too), then both tables and the original one on held-out text and prompts that
the fit and its choice have not used (`evaluation.compare`).
Another checkpoint that cannot copy, such as llama2xs281K, is fitted at factor 4 to the first half of its own text,
stories divided by <|endoftext|>, and compared on the second: `--also FOLDER --text FILE`. Finished cells are in
build/fit, and are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


from measuring import command, environment, measure_cells, write
from rope_patch.files import write_atomically

FACTORS = {4: 180, 8: 180, 16: 300}
"""Factors, with the CPU seconds that a fit may take."""
SEEDS = (0, 1, 2)
WINDOWS, SAMPLES = 16, 8

Cell = tuple[str, int, int, str | None]
"""Checkpoint (``"llama"``, or a folder), factor, seed, and the file of its text."""


def place(root: Path, cell: Cell) -> Path:
    """Return the file of a cell's result."""
    source, factor, seed, _ = cell
    return root / f"{Path(source).name}-{factor}-{seed}.json"


def opened(source: str) -> tuple[Any, Any]:
    """Return model and tokenizer of a checkpoint, for one thread."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import torch
    import transformers

    import rope_patch

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    folder = rope_patch.data_path("assets") / source if source in ("llama", "gemma3") else Path(source)
    return rope_patch.load(folder, dtype=torch.float32).eval(), transformers.AutoTokenizer.from_pretrained(folder)


def halves(file: str | None, tokenizer: Any, quick: bool = False) -> list[str | None]:
    """Return the text to fit to and the text to compare on; None for the built-in ones; ``quick`` takes parts."""
    if file is None and quick:
        from rope_patch.evaluation.text import builtin_text

        return [builtin_text("train").text[:300_000], builtin_text("heldout").text[:50_000]]
    if file is None:
        return [None, None]
    whole = Path(file).read_text(encoding="utf-8").replace("<|endoftext|>", tokenizer.bos_token)
    return [whole[: len(whole) // 2], whole[len(whole) // 2 :]]


def fitted(cell: Cell, root: Path, quick: bool, positions: Literal["full", "pose"] = "full") -> dict[str, Any]:
    """Return the fitted table of a cell and its cost, from the folder if it is there, else fitted now."""
    from rope_patch.fitting import Objective, Schedule, fit, held_out_spec

    path = root / f"table-{'pose-' * (positions == 'pose')}{place(root, cell).name}"
    if not path.exists():
        source, factor, seed, file = cell
        model, tokenizer = opened(source)
        from rope_patch.evaluation.text import builtin_text

        few = 512 if positions == "pose" else 2048
        schedule = Schedule(steps=2, checks=1, batch_tokens=few, seed=seed) if quick else Schedule(seed=seed)
        small: dict[str, Any] = {"windows": 1, "samples": 1, "depths": [0.5]} if quick else {}
        objective = Objective(0.8 if file is None else 0.0, positions=positions, mix=0.0)
        steps = {"tokens": 0, "cpu_s": 0.0}
        last = time.process_time()

        def note(stage: str, tokens: int) -> None:
            nonlocal last
            now = time.process_time()
            if stage.endswith(": fitting"):
                steps["tokens"] += tokens
                steps["cpu_s"] += now - last
            last = now

        cpu_start, wall_start = time.process_time(), time.perf_counter()
        target = factor * int(model.config.max_position_embeddings)
        patch = fit(
            model,
            tokenizer,
            halves(file, tokenizer, quick)[0] or builtin_text("train"),
            target_length=target,
            second=False,
            objective=objective,
            schedule=schedule,
            spec=held_out_spec(model, target, seed=seed, **small),
            on_progress=note,
        )
        seconds = {"cpu_s": time.process_time() - cpu_start, "wall_s": time.perf_counter() - wall_start}
        (tried,) = patch.candidates.values()
        result = {**seconds, "chosen": patch.chosen, "tried": [candidate.name for candidate in tried],
                 "method": str(patch.method), "stopped": dict(patch.stopped), "steps": steps}  # fmt: skip
        write_atomically(path, json.dumps(result))
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def measure(cell: Cell, root: Path, quick: bool) -> Cell:
    """Fit, compare, and write a cell."""
    import rope_patch
    from rope_patch.evaluation.compare import compare
    from rope_patch.evaluation.spec import EvalSpec
    from rope_patch.evaluation.suite import EvalSuite

    fit_result = fitted(cell, root, quick)
    source, factor, seed, file = cell
    model, tokenizer = opened(source)
    trained = int(model.config.max_position_embeddings)
    lengths = [trained * 2**i for i in range(factor.bit_length())]
    yarn, own = f"yarn:factor={factor}", rope_patch.parse(fit_result["method"])
    methods = ["default", yarn] if own == rope_patch.parse(yarn) else ["default", yarn, own]
    options: dict[str, Any] = {"windows": WINDOWS, "samples": SAMPLES, "haystack": "builtin"}
    options |= {"windows": 1, "samples": 1, "depths": [0.5], "haystack": "noise"} if quick else {}
    spec = EvalSpec(lengths, bucket=lengths[-1], seed=100 + seed, **options)
    comparison = compare(model, tokenizer, methods, EvalSuite(spec, tokenizer, text=halves(file, tokenizer, quick)[1]))
    ours = str(comparison.rows[-1].method)
    rows = {}
    for name, method in (("default", "default"), ("yarn", yarn), ("fitted", ours)):
        row = next(row for row in comparison.rows if row.method == method)
        text, prompts = row.scores.perplexity, row.scores.retrieval["passkey"]
        rows[name] = {
            "nll": {
                str(high): [
                    sum(d.nll[i] for i in text.inside(low, high)) / sum(d.tokens[i] for i in text.inside(low, high))
                    for d in text.documents
                ]
                for low, high in itertools.pairwise([0, *lengths])
            },
            "correct": {str(n): [sample.correct for sample in prompts.samples(n)] for n in lengths},
        }
    differences = {
        f"{kind} {stop}": [difference.estimate, difference.low, difference.high]
        for kind, stop, start in [
            *(("perplexity", high, low) for low, high in itertools.pairwise([0, *lengths])),
            *(("retrieval", n, 0) for n in lengths),
        ]
        for difference in [comparison.difference(ours, yarn, kind, stop, start)]
    }
    write_atomically(place(root, cell), json.dumps({**fit_result, "rows": rows, "fitted_minus_yarn": differences}))
    return cell


def summarise(root: Path, done: list[Cell]) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """Return a row per cell, and whether the requirements are met."""
    rows = []
    for cell in done:
        cell_result = json.loads(place(root, cell).read_text())
        means = {
            name: {n: statistics.fmean(values) for n, values in row["nll"].items()}
            for name, row in cell_result["rows"].items()
        }
        shortest = min(means["yarn"], key=int)
        apart = {name: abs(means[name][shortest] - means["default"][shortest]) for name in ("yarn", "fitted")}
        differences = cell_result["fitted_minus_yarn"]
        rows.append(
            {
                "checkpoint": Path(cell[0]).name,
                "factor": cell[1],
                "seed": cell[2],
                **{name: cell_result[name] for name in ("cpu_s", "wall_s", "chosen", "tried", "method", "stopped")},
                "nll": means,
                "retrieval": {
                    name: {n: statistics.fmean(map(float, values)) for n, values in row["correct"].items()}
                    for name, row in cell_result["rows"].items()
                },
                "fitted_minus_yarn": differences,
                "better_in_every_bucket": all(d[0] < 0 for k, d in differences.items() if k.startswith("perplexity")),
                "retrieval_not_significantly_lower": all(
                    d[2] >= 0 for k, d in differences.items() if k.startswith("retr")
                ),
                "nearer_at_the_trained_length": apart["fitted"] < apart["yarn"],
                "in_time": cell_result["cpu_s"] <= FACTORS[cell[1]],
            }
        )
    bars = ("better_in_every_bucket", "retrieval_not_significantly_lower", "nearer_at_the_trained_length", "in_time")
    return rows, {bar: all(row[bar] for row in rows if row["checkpoint"] == "llama") for bar in bars}


def main() -> None:
    """Measure what is missing, then summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument("--root", type=Path, default=Path("build/fit"), help="folder of the cells")
    parser.add_argument(
        "--factors",
        type=int,
        nargs="+",
        choices=list(FACTORS),
        default=list(FACTORS),
        help="factors to measure; all by default",
    )
    parser.add_argument("--also", default=None, help="folder of another checkpoint, at factor 4")
    parser.add_argument("--text", default=None, help="file of its text")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes, one thread each")
    parser.add_argument("--quick", action="store_true", help="one cell of a few steps")
    given = parser.parse_args()
    cells: list[Cell] = [(given.also, 4, seed, given.text) for seed in SEEDS] if given.also else []
    cells += [("llama", factor, seed, None) for factor in given.factors for seed in SEEDS]
    cells = [("llama", 4, 0, None)] if given.quick else cells
    root = given.root / ("quick" if given.quick else "full")
    root.mkdir(parents=True, exist_ok=True)
    todo = [cell for cell in cells if not place(root, cell).exists()]
    measure_cells(measure, [(cell, root, given.quick) for cell in todo], given.jobs)
    rows, bars = summarise(root, cells)
    report = {
        "benchmark": "fit",
        "command": command(),
        "what": "fitted tables against YaRN's on held-out text [nats/token] and prompts, and the CPU time of a fit",
        "summary": {
            "bar_reached": bars,
            "most_cpu_s": {
                str(f): round(max(row["cpu_s"] for row in rows if row["factor"] == f))
                for f in sorted({r["factor"] for r in rows})
            },
        },
        "settings": {"windows": WINDOWS, "samples": SAMPLES, "seconds_allowed": FACTORS},
        "environment": environment(),
        "rows": rows,
    }
    write(report, given.output)


if __name__ == "__main__":
    main()
