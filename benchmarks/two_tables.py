"""Two tables on the bundled Llama: what short and long texts lose, by `rope-patch compare` and by lm-eval.

    python benchmarks/two_tables.py -o benchmarks/results/two_tables_llama.json     # two minutes of a core
    python benchmarks/two_tables.py --page docs/two-tables.md                # the page's tables

The report holds the two commands as a user types them, with LLAMA for the folder of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from measuring import command, environment, write
from pages import markdown_table, page_with, results
from rope_patch import data_path
from rope_patch.files import write_atomically

COMPARE = (
    'rope-patch compare LLAMA --methods "default yarn:factor=4 yarn:factor=4@256 mrrope:factor=4@256" '
    '--lengths "128 256 512 1024" --windows 3 --samples 1'
)
EVAL = (
    "rope-patch-eval --model rope_patch --model_args pretrained=LLAMA,dtype=float32,{arguments} "
    "--tasks rope_passkey,rope_ppl --metadata max_seq_lengths=[256,512,1024] samples=1"
)
ARGUMENTS = {
    "default": "max_length=1024",
    "yarn:factor=4": "method=yarn:factor=4,target_length=1024",
    "yarn:factor=4@256": "method=yarn:factor=4@256,target_length=1024",
}
"""Of lm-eval's model, by method."""


def run(words: str, *more: str) -> None:
    """Run one of the package's commands on the bundled Llama."""
    name, *options = shlex.split(words.replace("LLAMA", str(data_path("assets") / "llama")))
    subprocess.run([Path(sys.executable).parent / name, *options, *more], check=True)


def columns_of(comparison: dict[str, Any]) -> dict[str, list[float]]:
    """Return the columns of a ``comparison.json``, each with a value for each method."""
    return {
        f"perplexity {column['start']}–{column['stop']}"
        if column["metric"] == "perplexity"
        else f"{column['task']} {column['stop']}": column["values"]
        for column in comparison["columns"]
    }


def measure(folder: Path) -> dict[str, Any]:
    """Return what both commands report.

    Args:
        folder: for what they write.
    """
    run(COMPARE, "-o", str(folder / "compare"))
    comparison = json.loads((folder / "compare" / "comparison.json").read_text(encoding="utf-8"))
    harness = {}
    for number, (method, arguments) in enumerate(ARGUMENTS.items()):
        run(EVAL.format(arguments=arguments), "--output_path", str(folder / str(number)))
        (file,) = (folder / str(number)).rglob("results_*.json")
        scores = json.loads(file.read_text(encoding="utf-8"))["results"]
        harness[method] = {
            "rope_ppl_256": scores["rope_ppl"]["256,none"],
            "rope_ppl_1k": scores["rope_ppl"]["1024,none"],
            "passkey_512": scores["rope_passkey"]["512,none"],
        }
    return {
        "benchmark": "two_tables",
        "command": command(),
        "what": "perplexity by position and passkeys under a short and a long table",
        "environment": environment("lm_eval"),
        "compare": {
            "command": COMPARE,
            "methods": [row["method"] for row in comparison["rows"]],
            "columns": columns_of(comparison),
        },
        "lm_eval": {"command": EVAL.format(arguments=ARGUMENTS["yarn:factor=4@256"]), "methods": harness},
    }


def _table(methods: list[str], columns: dict[str, list[float]], digits: int = 1) -> str:
    def shown(name: str, value: float) -> str:
        return f"{value:.2f}" if name.startswith("passkey") else f"{value:.{digits}f}"

    rows = [
        [f"`{method}`", *(shown(name, values[number]) for name, values in columns.items())]
        for number, method in enumerate(methods)
    ]
    return markdown_table(["method", *columns], rows)


def page_with_tables(page: str) -> str:
    """Return the page with its tables written anew."""

    def filled(name: str, part: str | None = None) -> str:
        report = results(name)
        if part == "compare":
            return _table(report["compare"]["methods"], report["compare"]["columns"])
        if part == "lm_eval":
            scores = report["lm_eval"]["methods"]
            tasks = next(iter(scores.values()))
            return _table(list(scores), {task: [row[task] for row in scores.values()] for task in tasks}, digits=4)
        return _table([row["method"] for row in report["rows"]], columns_of(report))

    return page_with(page, filled)


def main() -> None:
    """Measure and write the JSON, or write a page's tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write; printed otherwise")
    parser.add_argument("--page", type=Path, help="page whose tables are written anew from benchmarks/results")
    args = parser.parse_args()
    if args.page is not None:
        write_atomically(args.page, page_with_tables(args.page.read_text(encoding="utf-8")))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(measure(Path(folder)), args.output)


if __name__ == "__main__":
    main()
