"""Which retrieval tasks separate methods? Every task under every method, at equal tokens.

    python benchmarks/task_table.py rope_patch/assets/llama --lengths "256 1k" --cache build/task_table.jsonl \
        -o benchmarks/results/task_table_llama.json
    python benchmarks/task_table.py MODEL --lengths "4k 16k" --samples 2 --methods "default yarn p_rope:p=0.75"
    python benchmarks/task_table.py --page docs/tasks.md        # writes the tables of the page anew, from the results

All tasks read the same number of tokens of each length under each method. In mode multikey a needle stands at every
depth and a haystack is read once for all questions; in mode single every prompt has one needle, and a task whose one
question asks for all needles has as many more haystacks as the others read theirs again. A task is saturated at a
length where no method answers more than 5 % of its prompts, or none less than 95 %. It separates two methods where the
95 % interval of their difference lies on one side of 0: of the exact matches, and of the log-probability of the right
answers, which moves before greedy decoding does. Interrupted, the same command with --cache goes on where it was. Where
the file that -o names holds other tasks or lengths of the same model, mode, depths and haystacks, they stay in it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from measuring import command, environment, write
from pages import page_with, results
from rope_patch import EvalSpec, EvalSuite, compare
from rope_patch.evaluation.intervals import paired_means
from rope_patch.evaluation.metrics import METRICS, Span
from rope_patch.evaluation.retrieval import RetrievalResult
from rope_patch.evaluation.suite import EvalResult
from rope_patch.evaluation.tasks import TASKS
from rope_patch.files import write_atomically
from rope_patch.words import parse_length

FEW, MOST = 0.05, 0.95
"""Of the prompts answered: a task is saturated where no method answers more, or none less."""

LIMITS = {"none": "floor", "all": "ceiling", None: ""}
"""What the page calls it where no method answers the prompts of a task, or all do."""


def spec_of(task: str, length: int, args: argparse.Namespace) -> EvalSpec:
    """Return what is measured of a task at one length."""
    kind = TASKS[task]
    mode = args.mode if args.mode in kind.modes else "single"
    hay = "builtin" if task == "passage_retrieval" else "noise"
    # What prompts of one needle share is read once: all that stands before it.
    again = len(args.depths) - sum(sorted(args.depths)[:-1]) if args.mode == "single" and kind.joined else 1.0
    samples = round(args.samples * again)
    return EvalSpec(
        [length],
        args.depths,
        samples,
        0,
        [task],
        mode,
        haystack=hay,
        chat_template=args.chat_template,
        seed=args.seed,
    )


def by_haystack(result: RetrievalResult, length: int) -> list[float]:
    """Return the mean log-probability of the right answers about each haystack [nats]."""
    return [statistics.fmean(sample.logprob for sample in asked) for asked in result.haystacks(length)]


def row(task: str, length: int, scores: dict[str, EvalResult]) -> dict[str, Any]:
    """Return what a task says at a length: the scores, whether it is saturated, and which methods it separates."""
    span, metric = Span("retrieval", length, task=task), METRICS["retrieval"]
    results = {method: score.retrieval[task] for method, score in scores.items()}
    shares = {method: result.accuracy(length) for method, result in results.items()}
    pairs: dict[str, dict[str, list[float] | None]] = {}
    for one, other in itertools.combinations(results, 2):
        exact = metric.difference(scores[one], scores[other], span)
        ours, theirs = by_haystack(results[one], length), by_haystack(results[other], length)
        middle = statistics.fmean(a - b for a, b in zip(ours, theirs, strict=True))
        interval = paired_means(ours, theirs) if len(ours) > 1 else None
        pairs[f"{one} - {other}"] = {
            "exact_match": [exact.estimate, exact.low, exact.high],
            "logprob": [middle, *interval] if interval else None,
        }
    apart = {
        kind: [name for name, pair in pairs.items() if (at := pair[kind]) and (at[1] > 0 or at[2] < 0)]
        for kind in ("exact_match", "logprob")
    }
    return {
        "task": task,
        "length": length,
        "prompts": len(next(iter(results.values())).samples(length)),
        "exact_match": shares,
        "logprob": {method: result.logprob(length) for method, result in results.items()},
        "saturated": "none" if max(shares.values()) <= FEW else "all" if min(shares.values()) >= MOST else None,
        "differences": pairs,
        "separated": apart,
    }


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each task and length."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    cells = list(itertools.product(args.lengths, args.tasks))
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(cells) * len(args.methods), unit="cell") as bar:
        for length, task in cells:
            bar.set_description(f"{task} {length}")
            spec = spec_of(task, length, args)
            try:
                suite = EvalSuite(spec, tokenizer)
                found = compare(model, tokenizer, args.methods, suite, resume=args.cache)
            except ValueError as error:
                if "at least" not in str(error):
                    raise
                rows.append({"task": task, "length": length, "no_room": str(error)})
                bar.update(len(args.methods))
                continue
            rows.append(row(task, length, {one.method: one.scores for one in found.rows}))
            bar.update(len(args.methods))
    return rows


def table(rows: Sequence[dict[str, Any]], methods: Sequence[str]) -> str:
    """Return the rows as Markdown."""
    lines = [
        f"| length | task | {' | '.join(methods)} | floor or ceiling | pairs apart: exact match, log-probability |",
        "| --: | --- " + "| --: " * len(methods) + "| --- | --- |",
    ]
    for one in rows:
        if "no_room" in one:
            lines.append(f"| {one['length']} | {one['task']} {'| ' * len(methods)}| no room | |")
            continue
        cells = [f"{one['exact_match'][method]:.2f} ({one['logprob'][method]:.1f})" for method in one["exact_match"]]
        apart = one["separated"]
        lines.append(
            f"| {one['length']} | {one['task']} | {' | '.join(cells)} | {LIMITS[one['saturated']]} | "
            f"{len(apart['exact_match'])}, {len(apart['logprob'])} of {len(one['differences'])} |"
        )
    return "\n".join(lines)


def page_with_tables(page: str) -> str:
    """Return a page with its tables written anew; each stands between two comments that name its file of results."""

    def filled(name: str) -> str:
        rows = results(name)["rows"]
        methods = next(list(one["exact_match"]) for one in rows if "no_room" not in one)
        return table(rows, methods)

    return page_with(page, filled)


def joined(report: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a report with the tasks and lengths that only an earlier one in the file has.

    Raises:
        SystemExit: that one is of another model, mode, depths or number of haystacks.
    """
    if not path.exists():
        return report
    before = json.loads(path.read_text(encoding="utf-8"))
    for name in ("model", "mode", "depths", "samples"):
        if before[name] != report[name]:
            raise SystemExit(f"error: {path} has another {name}, {before[name]}: give another file")
    measured = {(one["task"], one["length"]) for one in report["rows"]}
    rows = [one for one in before["rows"] if (one["task"], one["length"]) not in measured] + report["rows"]
    rows.sort(key=lambda one: (one["length"], one["task"]))
    commands = list(dict.fromkeys([*before["commands"], *report["commands"]]))
    return {**report, "commands": commands, "rows": rows}


def main() -> None:
    """Measure, print a table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder of a model")
    parser.add_argument("--page", type=Path, help="page whose tables are written anew from benchmarks/results")
    parser.add_argument(
        "--methods", type=str.split, default=["default", "yarn:factor=4", "ntk:factor=4", "p_rope:p=0.75"]
    )
    parser.add_argument("--mode", choices=["single", "multikey"], default="single")
    parser.add_argument("--tasks", type=str.split, default=list(TASKS))
    parser.add_argument(
        "--lengths",
        type=lambda text: [parse_length(word) for word in text.split()],
    )
    parser.add_argument(
        "--depths", type=lambda text: [float(word) for word in text.split()], default=[0, 0.25, 0.5, 0.75, 1]
    )
    parser.add_argument("--samples", type=int, default=10, help="haystacks of each task and length")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat-template", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache", type=Path, help="file in which finished prompts are kept")
    parser.add_argument("-o", "--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if args.page is not None:
        write_atomically(args.page, page_with_tables(args.page.read_text(encoding="utf-8")))
        return
    if args.model is None or args.lengths is None:
        parser.error("give a model and --lengths, or --page")
    rows = measure(args)
    print(table(rows, args.methods))
    if args.output:
        report = {
            "benchmark": "task_table",
            "commands": [command()],
            "model": Path(args.model).name,
            "what": "every retrieval task under every method, at equal tokens: which saturate, which separate",
            "environment": environment(threads=int(os.environ["OMP_NUM_THREADS"])),
            "samples": args.samples,
            "depths": args.depths,
            "mode": args.mode,
            "rows": rows,
        }
        write(joined(report, args.output), args.output)


if __name__ == "__main__":
    main()
