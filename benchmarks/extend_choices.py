"""Record what `rope-patch extend` chooses on the bundled checkpoints at four times their context, with three seeds.

    python benchmarks/extend_choices.py -o benchmarks/results/extend_choices.json      # about 10 minutes of a core

Every run measures the default candidates without training, by the default options.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from transformers import AutoModelForCausalLM, AutoTokenizer

from measuring import command, environment, write
from rope_patch import data_path, extend
from rope_patch.runtime.progress import listen

LENGTH = 1024


def choose(shape: str, seed: int) -> dict[str, Any]:
    """Return the method chosen for a bundled checkpoint, the reason, and the scores of the last round's candidates."""
    source = data_path("assets") / shape
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    with tempfile.TemporaryDirectory() as folder, listen(on_sentence=print):
        outcome = extend(model, tokenizer, length=LENGTH, output=Path(folder, "out"), seed=seed)
    last = outcome.comparison.spec
    return {
        "checkpoint": shape,
        "seed": seed,
        "chosen": outcome.choice.method,
        "reason": outcome.choice.reason,
        "cost": outcome.choice.cost,
        "unconfirmed": outcome.choice.unconfirmed,
        "rounds": [[row.method for row in comparison.rows] for comparison in outcome.comparisons],
        "windows": last.windows,
        "samples": last.samples,
        "evaluated": [
            {
                "method": one.method,
                "answered": one.answered,
                "prompts": one.prompts,
                "logprob": one.logprob,
                "perplexity": one.perplexity,
                "change_within": list(one.change),
                "failures": list(one.failures),
            }
            for one in outcome.choice.evaluated
        ],
    }


def main() -> None:
    """Choose, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["llama", "gemma3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    rows = [choose(shape, seed) for shape in args.shapes for seed in args.seeds]
    for row in rows:
        print(row["checkpoint"], row["seed"], row["reason"])
    write(
        {
            "benchmark": "extend_choices",
            "command": command(),
            "what": "the method that extend chooses at four times the trained context, without training",
            "environment": environment(threads=1),
            "length": LENGTH,
            "rows": rows,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
