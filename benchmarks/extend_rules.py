"""The rules of extend's choice, on windows that were read once: what it chose before, and what it chooses now.

    python benchmarks/extend_rules.py -o benchmarks/results/extend_rules.json    # a quarter of an hour of one core

The windows of SmolLM2 at 16k and of Gemma 3 at 64k are those stored in extend_one_reading.json; their checkpoints are
asked, without weights, which programs run each method (make smollm2-checkpoint gemma3-checkpoint). The bundled toys are
read anew, with three seeds of their prompts: all default candidates on the same windows, without rounds.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import AutoTokenizer

import rope_patch
from measuring import command, environment, write
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.checkpoints.save_load import load
from rope_patch.evaluation.compare import UNPATCHED, compare
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.extending import choose
from rope_patch.extending.evidence import Evidence, against, measured_in
from rope_patch.extending.served_by import served_by
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.extend import CANDIDATES

ROOT = Path(__file__).parents[1]
STORED = ROOT / "benchmarks" / "results" / "extend_one_reading.json"
LEAST = (0.0, 0.01, 0.02, 0.03, 0.05)
"""Least differences of perplexity, within the context and beyond it, that are tried."""
PUBLIC = {
    "SmolLM2-135M-Instruct": ("build/smollm2/SmolLM2-135M-Instruct", 8192, 16384),
    "gemma-3-270m": ("build/gemma3/gemma-3-270m-q4_k_m", 32768, 65536),
}
TOLERANCE = 0.25


def stored_numbers(row: Mapping[str, Any], within: int, target: int) -> Evidence:
    """Return the numbers of a row of the stored windows, which asked for niah."""

    def losses(start: int, stop: int) -> tuple[float, ...]:
        return tuple(math.log(value) for value in row["perplexity of each window"][f"{start}-{stop}"])

    answers = {length: row["niah"][str(length)] for length in (within, target)}
    return Evidence(
        method=row["method"],
        trained=False,
        within=losses(0, within),
        end=losses(within // 2, within),
        perplexity=losses(target // 2, target),
        retrieval=tuple(-answer["logprob"] for answer in answers[target]),
        answered=sum(answer["right"] for answer in answers[target]),
        answered_within=sum(answer["right"] for answer in answers[within]),
    )


def with_programs(model: Any, source: str, methods: Sequence[Evidence], length: int) -> list[Evidence]:
    """Return evidence with the programs that run each method."""
    return [replace(one, served_by=served_by(model, one.method, source, length)) for one in methods]


def chosen(methods: Sequence[Evidence]) -> dict[str, Any]:
    """Return the choices with each least difference, and without the programs, beside the evidence."""
    by_least = {}
    for least in LEAST:
        rise = math.log1p(least)
        criteria = choose.CRITERIA | {"perplexity": rise, "cost": rise}
        with mock.patch.multiple(choose, CRITERIA=criteria, LEAST_RISE=rise):
            by_least[f"{least:.0%}"] = choose.rank(methods, TOLERANCE).method
    found = choose.rank(methods, TOLERANCE)
    alone = choose.rank([replace(one, served_by={}) for one in methods], TOLERANCE)
    rows = []
    for one in found.order:
        rows.append(
            {
                "method": one.method,
                "price [nats/token]": [round(value, 5) for value in one.price],
                "perplexity beyond": round(math.exp(math.fsum(one.perplexity) / len(one.perplexity)), 3),
                "logprob": round(-math.fsum(one.retrieval) / len(one.retrieval), 3),
                "answered": one.answered,
                "reaches": one.reaches,
                "dropped": found.dropped.get(one.label),
                "programs": list(one.served_by),
            }
        )
    return {"new": found.method, "new without programs": alone.method, "by least difference": by_least, "rows": rows}


def of_stored(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of a stored run of a public model."""
    folder, within, target = PUBLIC[run["model"]]
    unpatched, *methods = [stored_numbers(row, within, target) for row in run["rounds"][-1]]
    evidence = [against(one, unpatched) for one in methods]
    model = model_without_weights(ROOT / folder)
    head = {"model": run["model"], "length": target, "windows": len(unpatched.within), "old": run["chosen"]}
    return head | chosen(with_programs(model, folder, evidence, target))


def of_toy(name: str, seed: int, windows: int, old: str) -> dict[str, Any]:
    """Return the choices of a bundled toy, read anew."""
    folder = str(rope_patch.data_path("assets") / name)
    model = load(folder, dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    spec = EvalSpec((256, 512, 1024), tasks=("passkey",), windows=64, seed=seed)
    suite = NeedleSuite(spec, tokenizer).smaller(windows)
    comparison = compare(model, tokenizer, [UNPATCHED, *CANDIDATES], suite)
    methods = with_programs(model, folder, measured_in(comparison).methods, 1024)
    return {"model": f"bundled {name}", "length": 1024, "seed": seed, "windows": windows, "old": old} | chosen(methods)


def main() -> None:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=16, help="windows of each toy")
    arguments = parser.parse_args()
    stored = json.loads(STORED.read_text())["runs"]
    rows = [of_stored(run) for run in stored if "rounds" in run and run["model"] in PUBLIC]
    for run in stored:
        if run["reading"] == "one reading, passkey" and run["model"].startswith("bundled"):
            name = run["model"].removeprefix("bundled ")
            rows.append(of_toy(name, run["seed"], arguments.windows, run["chosen"]))
    head = {"benchmark": "extend_rules", "what": (__doc__ or "").partition("\n")[0], "command": command()}
    write(head | {"environment": environment(), "tolerance": TOLERANCE, "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
