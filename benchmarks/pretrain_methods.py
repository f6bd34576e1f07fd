"""Table 2 of Barbero et al. (2024) at the size that a CPU has: 2M parameters, trained from random weights per method.

    OMP_NUM_THREADS=1 nice -n 19 python benchmarks/pretrain_methods.py -o benchmarks/results/pretrain_methods.json

Each run is `recipes/pretrain_reference.py llama --patch METHOD --seed SEED` on three fifths of the recipe's tokens, in
some 15 minutes of a core. The file is written after each run, and the runs that it holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import command, environment, write
from rope_patch.evaluation.intervals import paired_means

RECIPE = Path(__file__).parents[1] / "recipes" / "pretrain_reference.py"
METHODS = (
    "default",
    "p_rope:p=0.75",
    "p_rope:p=0.5",
    "p_rope:p=0.25",
    "nope",
    "partial:p=0.75",
    "p_rope_reversed:p=0.75",
    "abf:rope_theta=500000",
)
OPTIONS = ("--scale", "0.6", "--prompts", "100")


def trained(method: str, seed: int) -> dict[str, Any]:
    """Train and measure one model, and return the figures of the recipe with what its log says of the training."""
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(RECIPE), "llama", "--patch", method, "--seed", str(seed), "-o", folder, *OPTIONS]
        figures = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)
        log = json.loads(Path(folder, "training_log.json").read_text())
    stage = [entry for entry in log if entry["stage"] == "copying"]
    return {
        "method": method,
        "seed": seed,
        "tokens": log[-1]["tokens"],
        "copying_after_tokens": stage[-1]["tokens"] if stage[-1]["copying"] > 0.95 else None,
        "minutes": round((time.time() - began) / 60, 1),
        **figures,
    }


def changes(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return by what each method changes the perplexity of plain RoPE, with 95 % intervals paired over the seeds [%].

    Runs of one seed begin from the same weights and read the same rows. A method has no entry before its second seed.
    """
    losses: dict[str, dict[int, dict[str, float]]] = {}
    for run in runs:
        logs = {span: math.log(value) for span, value in run["heldout_perplexity"].items()}
        losses.setdefault(run["method"], {})[run["seed"]] = logs
    plain = losses.pop("default")
    found = []
    for method, own in losses.items():
        seeds = sorted(own.keys() & plain.keys())
        if len(seeds) < 2:
            continue
        entry: dict[str, Any] = {"method": method, "seeds": len(seeds)}
        for span in own[seeds[0]]:
            ends = paired_means([own[seed][span] for seed in seeds], [plain[seed][span] for seed in seeds])
            entry[span] = [round(100 * math.expm1(end), 1) for end in (ends[0], sum(ends) / 2, ends[1])]
        found.append(entry)
    return found


def main() -> None:
    """Train under every method with the first seed, then with the next."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of the results, which are added to")
    options = parser.parse_args()
    report = {
        "benchmark": "pretrain_methods",
        "command": command(),
        "options": " ".join(OPTIONS),
        "environment": environment(),
        "runs": [],
    }
    if options.output.exists():
        report = json.loads(options.output.read_text())
    done = {(run["method"], run["seed"]) for run in report["runs"]}
    for seed in options.seeds:
        for method in METHODS:
            if (method, seed) not in done:
                report["runs"].append(trained(method, seed))
                report["changes"] = changes(report["runs"])
                write(report, options.output)


if __name__ == "__main__":
    main()
