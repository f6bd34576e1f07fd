"""Compare ten tables, untrained and after LoRA, at 2 to 16 times the trained length: three checkpoints, three seeds.

    python benchmarks/study_methods.py -o benchmarks/results/study_methods.json \\
        --also FOLDER --text FILE
    python benchmarks/study_methods.py --quick                              # one checkpoint, one factor, two steps

Checkpoints are the bundled ones and, with `--also`, one that cannot copy, such as llama2xs281K: it is adapted to the
first half of its own text, stories divided by <|endoftext|>, and evaluated by perplexity alone on the second. Zero-shot
at 2, 4, 8 and 16 times; after LoRA of equal tokens at 4 and 16 times, of text alone, no retrieval prompt. What a table
was fitted to before (text, and passkeys hidden in text, two to four times as many tokens) comes on top. A seed is that
of the fit, of the adapters, of the order of rows and of the prompts; windows of text are the same everywhere. Fitted
tables are those of fit.py, in build/fit. Each cell is written to build/study when it is done, and not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from scipy import stats

from fit import fitted, halves, opened
from measuring import command, environment, measure_cells, write
from rope_patch.evaluation.intervals import independent_count, paired_means, paired_shares
from rope_patch.runtime.folders import write_atomically

METHODS = {
    "default": "default",
    "PI": "pi:factor={factor}",
    "NTK": "ntk:factor={factor}",
    "ABF": "abf:factor=50",
    "YaRN": "yarn:factor={factor}",
    "MrRoPE": "mrrope:factor={factor}",
    "p-RoPE": "p_rope:p=0.5",
    "truncated": "truncated:context={trained}",
    "CoPE": "abf:factor=50+cope",
}
FITTED = "fitted"
SEEDS = (0, 1, 2)
FACTORS = (2, 4, 8, 16)
TRAINED_FACTORS = (4, 16)
STEPS, TOKENS = 20, 4096
WINDOWS, DEPTHS, SAMPLES = 8, (0.0, 0.25, 0.5, 0.75, 1.0), 3


class Cell(NamedTuple):
    """One measurement of one table on one checkpoint; ``file`` is the text of a checkpoint that is not bundled."""

    source: str
    factor: int
    arm: str
    seed: int
    lora: bool
    file: str | None


def cells(also: str | None, file: str | None, quick: bool) -> list[Cell]:
    """Return all cells: first one seed of each, then the others from short to long, last the factors without LoRA."""
    if quick:
        return [
            Cell("llama", 2, arm, 0, lora, None) for arm, lora in ((FITTED, False), ("YaRN", False), ("YaRN", True))
        ]
    sources = [("llama", None), ("gemma3", None), *([(also, file)] if also else [])]
    arms = (FITTED, *METHODS)
    all_cells = [
        Cell(source, factor, arm, seed, lora, text)
        for seed in SEEDS
        for lora, factors in ((False, FACTORS), (True, TRAINED_FACTORS))
        for factor in factors
        for source, text in sources
        for arm in arms
    ]
    return sorted(all_cells, key=lambda cell: (cell.seed > 0, cell.factor not in TRAINED_FACTORS and cell.seed > 0,
                                          cell.factor * (cell.seed > 0)))  # fmt: skip


def place(root: Path, cell: Cell) -> Path:
    """Return the file of a cell's result."""
    state = "lora" if cell.lora else "zero"
    return root / f"{state}-{Path(cell.source).name}-{cell.factor}-{cell.arm}-{cell.seed}.json"


def asked(cell: Cell) -> list[Any]:
    """Return the values that a cell's numbers depend on besides its name and the code."""
    text = None if cell.file is None else hashlib.sha256(Path(cell.file).read_bytes()).hexdigest()
    return [METHODS.get(cell.arm), STEPS * TOKENS if cell.lora else 0, WINDOWS, len(DEPTHS), SAMPLES, text]


def known(root: Path, cell: Cell) -> bool:
    """Return whether a cell was measured with the values of :func:`asked` that it would have now."""
    path = place(root, cell)
    return path.exists() and json.loads(path.read_text()).get("asked") == asked(cell)


def measure(cell: Cell, root: Path, tables: Path, quick: bool) -> Cell:
    """Train if the cell says so, evaluate, and write the result of the cell."""
    model, tokenizer = opened(cell.source)  # first, since it turns off messages of modules that are imported later
    import rope_patch

    trained = int(model.config.max_position_embeddings)
    if cell.arm == FITTED:
        method = fitted((cell.source, cell.factor, cell.seed, cell.file), tables, quick)["method"]
    else:
        method = METHODS[cell.arm].format(factor=cell.factor, trained=trained)
    if cell.lora:
        folder = root / "adapters" / place(root, cell).stem
        _finetune(cell, method, trained, folder, root, tokenizer, quick)
        model = rope_patch.load(folder, dtype=model.dtype).merge_and_unload().eval()
    else:
        rope_patch.apply(model, method, target_length=cell.factor * trained)
    scores = _evaluate(model, tokenizer, cell, trained, root, quick)
    write_atomically(place(root, cell), json.dumps({"asked": asked(cell), "method": method, **scores}))
    if cell.lora:  # not earlier: without ``work`` the folder of a killed run would not be recognized
        shutil.rmtree(folder / "work", ignore_errors=True)
    return cell


def _evaluate(model: Any, tokenizer: Any, cell: Cell, trained: int, root: Path, quick: bool) -> dict[str, Any]:
    """Return the losses of every window between doubling lengths [nats/token], and whether each prompt was answered."""
    from rope_patch.evaluation.builtin_text import builtin_text
    from rope_patch.evaluation.documents import spread_windows
    from rope_patch.evaluation.perplexity import perplexity
    from rope_patch.evaluation.retrieval import retrieval

    target = cell.factor * trained
    edges = [0, *(trained * 2**i for i in range(cell.factor.bit_length()))]
    text = halves(cell.file, tokenizer)[1] if cell.file else builtin_text("heldout")
    windows, _ = spread_windows(tokenizer, text, target, 1 if quick else WINDOWS)
    # Without training or fitting the seed changes nothing about the loss of text, so it is measured once.
    fixed = not cell.lora and cell.arm != FITTED
    result_cache = root / "parts" / f"{place(root, cell._replace(seed=0) if fixed else cell).stem}.jsonl"
    result_cache.parent.mkdir(exist_ok=True)
    score = perplexity(model, windows, window=target, buckets=edges, resume=result_cache)
    nll = {
        str(high): [d.nll[i] / d.tokens[i] for d in score.documents for i in score.inside(low, high)]
        for low, high in itertools.pairwise(edges)
    }
    if cell.file:
        return {"nll": nll, "correct": {}}
    asked = retrieval(
        model, tokenizer, lengths=[trained, target], depths=DEPTHS, samples=1 if quick else SAMPLES,
        seed=200 + cell.seed, haystack="builtin",
        resume=result_cache,
    )  # fmt: skip
    correct: dict[str, list[list[bool]]] = {str(trained): [], str(target): []}
    for part in asked.cells:
        correct[str(part.length)].append([sample.correct for sample in part.samples])
    return {"nll": nll, "correct": correct}


def _finetune(cell: Cell, method: str, trained: int, folder: Path, root: Path, tokenizer: Any, quick: bool) -> None:
    from rope_patch.options.finetune import RecipeOptions
    from rope_patch.options.yaml_and_json import from_dict
    from rope_patch.training.finetune import finetune

    warnings.filterwarnings("ignore", category=FutureWarning)
    target = cell.factor * trained
    steps = 2 if quick else STEPS
    source = "builtin"
    if cell.file:
        source = str(root / f"{Path(cell.source).name}-fit.txt")
        write_atomically(source, str(halves(cell.file, tokenizer)[0]))
    base = {
        "model": {"name": cell.source, "dtype": "float32"},
        "patch": {"method": method, "target_length": target},
        "data": {"length": target, "source": source},
        "train": {
            "steps": steps,
            "batch": max(1, TOKENS // target),
            "accumulate": 1,
            "learning_rate": 1e-3,
            "scheduler": "cosine",
            "warmup": 0.1,
            "checkpointing": False,
            "seed": cell.seed,
            "save_every": steps,
            "keep": 1,
        },
        # evaluated on this study's own windows and prompts afterwards
        "evaluation": {"before": False, "lengths": str(trained), "depths": [0.5], "samples": 1, "windows": 0},
        "output": str(folder),
    }
    with open(os.devnull, "w") as nowhere:
        shown = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = nowhere
        try:
            finetune(from_dict(RecipeOptions, base), command="python benchmarks/study_methods.py")
        finally:
            sys.stdout, sys.stderr = shown


def summarise(root: Path, done: list[Cell]) -> list[dict[str, Any]]:
    """Return a row for each checkpoint, factor, state and table, compared with YaRN on the same windows and prompts.

    The row of a table uses the seeds that were measured for it and for YaRN's table, and lists them.

    Over seeds a window's loss is its mean; intervals are Student's over windows, Newcombe's over the prompts of all
    seeds (as many as they are worth), and, of trained or fitted tables, Student's over seeds too.
    """
    results = {cell: json.loads(place(root, cell).read_text()) for cell in done}
    groups: dict[tuple[str, int, bool], dict[str, dict[int, dict[str, Any]]]] = {}
    for cell in done:
        if cell._replace(arm="YaRN") in results:
            arms = groups.setdefault((Path(cell.source).name, cell.factor, cell.lora), {})
            arms.setdefault(cell.arm, {})[cell.seed] = results[cell]
    rows = []
    for (source, factor, lora), arms in sorted(groups.items(), key=lambda item: item[0][1:]):
        for arm, by_seed in arms.items():
            seeds = sorted(by_seed.keys() & arms["YaRN"].keys())
            if not seeds:
                continue
            cells_of_arm, base = ([cells_by_seed[seed] for seed in seeds] for cells_by_seed in (by_seed, arms["YaRN"]))
            learned = lora or arm == FITTED
            rows.append(
                {
                    "checkpoint": source,
                    "factor": factor,
                    "lora": lora,
                    "table": arm,
                    "methods": list(dict.fromkeys(part["method"] for part in cells_of_arm)),
                    "seeds": seeds,
                    "perplexity": {
                        n: math.exp(statistics.fmean(_windows(cells_of_arm, n))) for n in cells_of_arm[0]["nll"]
                    },
                    "passkey": {n: statistics.fmean(_answers(cells_of_arm, n)) for n in cells_of_arm[0]["correct"]},
                    "prompts": {n: len(_answers(cells_of_arm, n)) for n in cells_of_arm[0]["correct"]},
                    "nll_minus_yarn": {n: _nll_change(cells_of_arm, base, n, learned) for n in cells_of_arm[0]["nll"]},
                    "passkey_minus_yarn": {
                        n: _passkey_change(cells_of_arm, base, n, learned) for n in cells_of_arm[0]["correct"]
                    },
                }
            )
    return rows


def _windows(cells_of_arm: list[dict[str, Any]], bucket: str) -> list[float]:
    """Return the loss of each window, averaged over seeds."""
    return [statistics.fmean(values) for values in zip(*(part["nll"][bucket] for part in cells_of_arm), strict=True)]


def _answers(cells_of_arm: list[dict[str, Any]], length: str) -> list[bool]:
    return [hit for part in cells_of_arm for depth in part["correct"][length] for hit in depth]


def _nll_change(ours: list[dict[str, Any]], base: list[dict[str, Any]], bucket: str, learned: bool) -> dict[str, Any]:
    one, other = _windows(ours, bucket), _windows(base, bucket)
    change: dict[str, Any] = {
        "estimate": statistics.fmean(one) - statistics.fmean(other),
        "over_windows": list(paired_means(one, other)) if len(one) > 1 else None,
    }
    seeds = [
        statistics.fmean(a["nll"][bucket]) - statistics.fmean(b["nll"][bucket]) for a, b in zip(ours, base, strict=True)
    ]
    return change | ({"over_seeds": _student(seeds)} if learned and len(seeds) > 1 else {})


def _student(values: list[float]) -> list[float]:
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values) - half, statistics.fmean(values) + half]


def _passkey_change(
    ours: list[dict[str, Any]], base: list[dict[str, Any]], length: str, learned: bool
) -> dict[str, Any]:
    one, other = _answers(ours, length), _answers(base, length)
    haystacks = [
        [a - b for a, b in zip(mine, theirs, strict=True)]
        for x, y in zip(ours, base, strict=True)
        for mine, theirs in zip(zip(*x["correct"][length], strict=True), zip(*y["correct"][length], strict=True),
                                strict=True)
    ]  # fmt: skip
    seeds = [
        statistics.fmean(_answers([a], length)) - statistics.fmean(_answers([b], length))
        for a, b in zip(ours, base, strict=True)
    ]
    return {
        "estimate": statistics.fmean(one) - statistics.fmean(other),
        "interval": list(paired_shares(one, other, count=independent_count(haystacks))),
        **({"over_seeds": _student(seeds)} if learned and len(seeds) > 1 else {}),
    }


def main() -> None:
    """Measure the cells that have no result yet, then summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument(
        "--root", type=Path, default=Path("build/study"), help="folder of the results of finished cells"
    )
    parser.add_argument("--tables", type=Path, default=Path("build/fit"), help="folder of the fitted tables")
    parser.add_argument("--also", default=None, help="folder of another checkpoint")
    parser.add_argument("--text", default=None, help="file of its text")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes, one thread each")
    parser.add_argument("--report", action="store_true", help="measure nothing, and report the finished cells")
    parser.add_argument("--quick", action="store_true", help="three cells of a few steps")
    given = parser.parse_args()
    if bool(given.also) != bool(given.text):
        parser.error("--also and --text go together")
    size = "quick" if given.quick else "full"
    root, tables = given.root / size, given.tables / size
    for folder in (root, tables):
        folder.mkdir(parents=True, exist_ok=True)
    requested = cells(given.also, given.text, given.quick)
    todo = [] if given.report else [cell for cell in requested if not known(root, cell)]
    measure_cells(measure, [(cell, root, tables, given.quick) for cell in todo], given.jobs)
    rows = summarise(root, [cell for cell in requested if known(root, cell)])
    trained = [row for row in rows if row["table"] == FITTED]
    report = {
        "benchmark": "study_methods",
        "command": command(),
        "what": "perplexity by bucket and passkeys of ten tables, untrained and after LoRA, each against YaRN's",
        "summary": [
            {name: row[name] for name in ("checkpoint", "factor", "lora", "nll_minus_yarn", "passkey_minus_yarn")}
            for row in trained
        ],
        "settings": {
            "windows": WINDOWS,
            "depths": len(DEPTHS),
            "samples": SAMPLES,
            "lora_tokens": STEPS * TOKENS,
            "methods": METHODS,
        },
        "environment": environment(),
        "rows": rows,
    }
    write(report, given.output)


if __name__ == "__main__":
    main()
