"""Tables fitted to short rows at skipped positions (PoSE) against tables fitted to whole rows, on one thread.

    python benchmarks/fit_pose.py -o benchmarks/results/fit_pose.json
    python benchmarks/fit_pose.py --quick

Each cell is a bundled checkpoint, a factor and a seed: `rope_patch.fit` from YaRN's table with the defaults of either
kind of rows, timed, then both tables and YaRN's on held-out text and prompts that neither fit nor its choice has used,
as in fit.py. Windows of text are the same for all seeds, prompts are not. Finished cells are in build/fit_pose, and are
not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


from fit import SAMPLES, WINDOWS, Cell, fitted, halves, opened, place
from measuring import command, environment, measure_cells, write
from rope_patch.files import write_atomically

KINDS = ("full", "pose")
PAIRS = (("pose", "full"), ("pose", "yarn"), ("full", "yarn"))


def measure(cell: Cell, root: Path, quick: bool) -> Cell:
    """Fit to both kinds of rows, compare, and write a cell."""
    import rope_patch
    from rope_patch.evaluation.compare import compare
    from rope_patch.evaluation.spec import EvalSpec
    from rope_patch.evaluation.suite import EvalSuite

    fits = {kind: fitted(cell, root, quick, kind) for kind in KINDS}
    source, factor, seed, file = cell
    model, tokenizer = opened(source)
    trained = int(model.config.max_position_embeddings)
    lengths = [trained * 2**i for i in range(factor.bit_length())]
    buckets = list(itertools.pairwise([0, *lengths]))
    methods = {"yarn": f"yarn:factor={factor}"} | {kind: fits[kind]["method"] for kind in KINDS}
    options: dict[str, Any] = {"windows": WINDOWS, "samples": SAMPLES, "haystack": "builtin"}
    options |= {"windows": 1, "samples": 1, "depths": [0.5], "haystack": "noise"} if quick else {}
    spec = EvalSpec(lengths, bucket=lengths[-1], seed=100 + seed, **options)
    suite = EvalSuite(spec, tokenizer, text=halves(file, tokenizer, quick)[1])
    parsed = {name: str(rope_patch.parse(method)) for name, method in methods.items()}
    comparison = compare(model, tokenizer, list(dict.fromkeys(parsed.values())), suite)
    scores = {row.method: row.scores for row in comparison.rows}
    result: dict[str, Any] = {"fits": fits, "nll": {}, "correct": {}}
    for name, method in parsed.items():
        text, prompts = scores[method].perplexity, scores[method].retrieval["passkey"]
        result["nll"][name] = {str(high): math.log(text.between(low, high)) for low, high in buckets}
        result["correct"][name] = {str(n): [sample.correct for sample in prompts.samples(n)] for n in lengths}
    spans = [*(("perplexity", high, low) for low, high in buckets), *(("retrieval", n, 0) for n in lengths)]
    for one, other in PAIRS:
        changes = {
            f"{kind} {stop}": comparison.difference(parsed[one], parsed[other], kind, stop, start)
            for kind, stop, start in spans
        }
        result[f"{one}_minus_{other}"] = {
            name: [change.estimate, change.low, change.high] for name, change in changes.items()
        }
    write_atomically(place(root, cell), json.dumps(result))
    return cell


def over_seeds(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the seeds of a checkpoint and factor say together.

    The intervals are Student's over seeds for text, whose windows all seeds share, and paired ones over the prompts of
    all seeds.
    """
    from rope_patch.evaluation.intervals import paired_means, paired_shares

    summary: dict[str, Any] = {"seeds": len(results)}
    for one, other in PAIRS:
        entry = {}
        for high in results[0]["nll"]["full"] if len(results) > 1 else ():
            ours, theirs = ([result["nll"][name][high] for result in results] for name in (one, other))
            entry[f"perplexity {high}"] = [
                statistics.fmean(ours) - statistics.fmean(theirs),
                *paired_means(ours, theirs),
            ]
        for n in results[0]["correct"]["full"]:
            found, missed = (
                list(itertools.chain(*(result["correct"][name][n] for result in results))) for name in (one, other)
            )
            estimate = statistics.fmean(map(float, found)) - statistics.fmean(map(float, missed))
            entry[f"retrieval {n}"] = [estimate, *paired_shares(found, missed)]
        summary[f"{one}_minus_{other}"] = entry
    changes = summary["pose_minus_full"]
    summary["pose_not_significantly_worse"] = {
        "perplexity": all(low <= 0 for name, (_, low, _) in changes.items() if name.startswith("perplexity")),
        "retrieval": all(high >= 0 for name, (*_, high) in changes.items() if name.startswith("retrieval")),
    }
    own = [(name, change) for result in results for name, change in result["pose_minus_full"].items()]
    summary["single_fits"] = {  # of which some differ by chance, and by the noise of a fit, which all windows share
        "pose_text_significantly_better": sum(high < 0 for name, (*_, high) in own if name.startswith("perplexity")),
        "pose_text_significantly_worse": sum(low > 0 for name, (_, low, _) in own if name.startswith("perplexity")),
        "pose_retrieval_significantly_higher": sum(low > 0 for name, (_, low, _) in own if name.startswith("retr")),
        "pose_retrieval_significantly_lower": sum(high < 0 for name, (*_, high) in own if name.startswith("retr")),
        "buckets_or_lengths": len(own) // 2,
    }
    for kind in KINDS:
        fits = [result["fits"][kind] for result in results]
        summary[kind] = {
            "kept_the_start": sum(fit["chosen"].endswith(", start") for fit in fits),
            "cpu_s": statistics.fmean(fit["cpu_s"] for fit in fits),
            "cpu_s_of_steps": statistics.fmean(fit["steps"]["cpu_s"] for fit in fits),
            "tokens_of_steps": statistics.fmean(fit["steps"]["tokens"] for fit in fits),
        }
    return summary


def main() -> None:
    """Measure what is missing, then summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument("--root", type=Path, default=Path("build/fit_pose"), help="folder of the cells")
    parser.add_argument(
        "--cells",
        nargs="+",
        metavar="CHECKPOINT:FACTOR:SEEDS",
        default=["llama:4:5"],
        help="bundled checkpoints, factors and numbers of seeds",
    )
    parser.add_argument("--jobs", type=int, default=1, help="number of processes, one thread each")
    parser.add_argument("--quick", action="store_true", help="one cell of a few steps")
    given = parser.parse_args()
    wanted = [("llama", "4", "1")] if given.quick else [cell.split(":") for cell in given.cells]
    cells: list[Cell] = [(name, int(factor), seed, None) for name, factor, n in wanted for seed in range(int(n))]
    root = given.root / ("quick" if given.quick else "full")
    root.mkdir(parents=True, exist_ok=True)
    todo = [cell for cell in cells if not place(root, cell).exists()]
    measure_cells(measure, [(cell, root, given.quick) for cell in todo], given.jobs)
    results = {cell: json.loads(place(root, cell).read_text()) for cell in cells}
    report = {
        "benchmark": "fit_pose",
        "command": command(),
        "what": "tables fitted to rows at skipped positions and to whole rows, and YaRN's, on held-out text "
        "[nats/token] and prompts, and the tokens and CPU time of a fit; differences with 95 % intervals",
        "summary": {
            "{} at {} times".format(*group): over_seeds([results[cell] for cell in cells if cell[:2] == group])
            for group in dict.fromkeys(cell[:2] for cell in cells)
        },
        "settings": {"windows": WINDOWS, "samples": SAMPLES},
        "environment": environment(),
        "rows": [
            {
                "checkpoint": source,
                "factor": factor,
                "seed": seed,
                **{name: value for name, value in results[source, factor, seed, file].items() if name != "correct"},
                "retrieval": {
                    name: {n: statistics.fmean(map(float, values)) for n, values in by_length.items()}
                    for name, by_length in results[source, factor, seed, file]["correct"].items()
                },
            }
            for source, factor, seed, file in cells
        ],
    }
    write(report, given.output)


if __name__ == "__main__":
    main()
