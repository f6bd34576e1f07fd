"""Every method beside YaRN, untrained, on the bundled checkpoints at 4 and 8 times.

    python benchmarks/every_method.py -o benchmarks/results/every_method.json     # about 10 minutes of a core
    python benchmarks/every_method.py --quick                                     # one checkpoint, two windows

Perplexity of held-out text within the trained 256 tokens and beyond, as paired differences from YaRN with their 95 %
intervals over windows, and passkeys at the target length.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoModelForCausalLM, AutoTokenizer

from measuring import command, environment, write
from rope_patch import EvalSpec, compare, data_path
from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.losses import PerplexityResult

METHODS = (
    "yarn:factor={factor}",
    "mrrope:factor={factor}",
    "yarn:factor={factor}+resonance",
    "resonance",
    "llama3:factor={factor}",
    "ntk:factor={factor}",
    "abf:factor=50",
    "abf:factor=50+cope",
    "cope:share=0.5",
    "p_rope:p=0.5",
    "p_rope_reversed:p=0.5",
    "nope",
    "partial:p=0.5",
    "truncated",
    "pi:factor={factor}",
    "default",
)
"""The others are compared with the first. ``longrope`` and ``table`` need lists of numbers: fit.py measures those."""
TRAINED = 256


def losses(score: PerplexityResult, low: int, high: int) -> list[float]:
    """Return the mean loss of each window between two positions [nats/token]."""
    inside = score.inside(low, high)
    return [sum(d.nll[i] for i in inside) / sum(d.tokens[i] for i in inside) for d in score.documents]


def measure(shape: str, factor: int, windows: int, samples: int) -> list[dict[str, Any]]:
    """Return a row for each method on a bundled checkpoint."""
    source = data_path("assets") / shape
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32").eval()
    target = factor * TRAINED
    methods = [method.format(factor=factor) for method in METHODS]
    rows = compare(model, tokenizer, methods, EvalSpec((TRAINED, target), windows=windows, samples=samples)).rows
    results = []
    for row in rows:
        score, base = row.scores.perplexity, rows[0].scores.perplexity
        assert score is not None and base is not None
        asked = row.scores.retrieval["passkey"].samples(target)
        result: dict[str, Any] = {"checkpoint": shape, "factor": factor, "method": row.method}
        for name, span in (("within", (0, TRAINED)), ("beyond", (TRAINED, target))):
            ours, theirs = losses(score, *span), losses(base, *span)
            result[name] = {
                "perplexity": math.exp(statistics.fmean(ours)),
                "nll_minus_yarn": statistics.fmean(a - b for a, b in zip(ours, theirs, strict=True)),
                "interval": None if row is rows[0] else list(paired_means(ours, theirs)),
            }
        results.append(result | {"passkeys": [sum(sample.correct for sample in asked), len(asked)]})
    return results


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""

    def change(part: dict[str, Any]) -> str:
        if part["interval"] is None:
            return f"{part['perplexity']:.2f}"
        low, middle, high = (
            100 * math.expm1(x) for x in (part["interval"][0], part["nll_minus_yarn"], part["interval"][1])
        )
        return f"{part['perplexity']:.2f}, {middle:+.1f} % ({low:+.1f} to {high:+.1f})"

    lines = ["| checkpoint | method | within 256 tokens | beyond | passkeys |", "|---|---|---|---|---|"]
    for row in rows:
        cells = (
            f"{row['checkpoint']} {row['factor']}×",
            f"`{row['method']}`",
            change(row["within"]),
            change(row["beyond"]),
        )
        lines.append(f"| {' | '.join(cells)} | {row['passkeys'][0]} of {row['passkeys'][1]} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    parser.add_argument("--quick", action="store_true", help="one checkpoint, one factor, two windows")
    args = parser.parse_args()
    shapes, factors = (("llama",), (4,)) if args.quick else (("llama", "gemma3"), (4, 8))
    windows, samples = (2, 1) if args.quick else (10, 3)
    rows = [row for shape in shapes for factor in factors for row in measure(shape, factor, windows, samples)]
    print(table(rows))
    if args.output:
        what = "untrained tables beside YaRN's: perplexity by paired windows, passkeys at the target length"
        write(
            {
                "benchmark": "every_method",
                "command": command(),
                "what": what,
                "environment": environment(device="cpu", threads=1),
                "windows": windows,
                "rows": rows,
            },
            args.output,
        )


if __name__ == "__main__":
    main()
