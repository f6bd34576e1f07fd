"""Compare fitted tables with YaRN's at 4, 8 and 16 times the trained length of the bundled Llama, on one thread.

    python benchmarks/fit.py -o benchmarks/results/fit.json
    python benchmarks/fit.py --quick

Each cell is a factor and a seed: `rope_patch.fit` from YaRN's table, to the built-in text and chosen on it alone, timed
(study_methods.py takes its tables from here too), then both tables and the original one on held-out text and prompts
that the fit and its choice have not used (`evaluation.compare`). Another checkpoint is fitted at factor 4 to the first
half of its own text, divided by <|endoftext|>, and compared on the second: `--also FOLDER --text FILE`. Finished cells
are stored in build/fit and are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from measuring import command, environment, measure_cells, write
from rope_patch.runtime.folders import write_atomically

FACTORS, SEEDS = (4, 8, 16), (0, 1, 2)
WINDOWS, SAMPLES = 16, 8

Cell = tuple[str, int, int, str | None]
"""A checkpoint (``"llama"``, or a folder), the factor, the seed, and the file of the checkpoint's text."""


def place(root: Path, cell: Cell) -> Path:
    """Return the file of a cell's result."""
    source, factor, seed, _ = cell
    return root / f"{Path(source).name}-{factor}-{seed}.json"


def opened(source: str) -> tuple[Any, Any]:
    """Return model and tokenizer of a checkpoint, for one thread."""
    os.environ.update(TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error")
    import torch
    import transformers

    import rope_patch

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    folder = rope_patch.data_path("assets") / source if source in ("llama", "gemma3") else Path(source)
    return rope_patch.load(folder, dtype=torch.float32).eval(), transformers.AutoTokenizer.from_pretrained(folder)


def halves(file: str | None, tokenizer: Any) -> list[Any]:
    """Return the text to fit to and the text to compare on; for built-in text these are its own two parts."""
    from rope_patch.evaluation.builtin_text import builtin_text

    if file is None:
        return [builtin_text("train"), builtin_text("heldout")]
    whole = Path(file).read_text(encoding="utf-8").replace("<|endoftext|>", tokenizer.bos_token)
    return [whole[: len(whole) // 2], whole[len(whole) // 2 :]]


def fitted(cell: Cell, root: Path, quick: bool) -> dict[str, Any]:
    """Return the fitted table of a cell and its cost; it is fitted now unless the folder has it."""
    from rope_patch.fitting import fit, held_out_spec

    path = root / f"table-{place(root, cell).name}"
    if not path.exists():
        source, factor, seed, file = cell
        model, tokenizer = opened(source)
        target = factor * int(model.config.max_position_embeddings)
        small: dict[str, Any] = {"windows": 1, "samples": 1, "depths": [0.5]} if quick else {}
        start = time.process_time()
        patch = fit(
            model,
            tokenizer,
            halves(file, tokenizer)[0],
            target_length=target,
            retrieval=0.8 if file is None else 0.0,  # a checkpoint with a text of its own answers no prompts
            steps=2 if quick else 40,
            seed=seed,
            spec=held_out_spec(model, target, seed=seed, **small),
        )
        result = {"cpu_s": time.process_time() - start, "chosen": patch.chosen, "method": str(patch.method)}
        write_atomically(path, json.dumps(result))
    table: dict[str, Any] = json.loads(path.read_text())
    return table


def measure(cell: Cell, root: Path, quick: bool) -> Cell:
    """Fit a table, compare it, and write the result of the cell."""
    import rope_patch
    from rope_patch.evaluation.compare import compare
    from rope_patch.evaluation.metrics import Span
    from rope_patch.evaluation.suite import EvalSuite
    from rope_patch.options.evaluation import EvalSpec

    table = fitted(cell, root, quick)
    source, factor, seed, file = cell
    model, tokenizer = opened(source)
    lengths = [int(model.config.max_position_embeddings) * 2**i for i in range(factor.bit_length())]
    yarn, own = f"yarn:factor={factor}", str(rope_patch.parse(table["method"]))
    options: dict[str, Any] = {"windows": WINDOWS, "samples": SAMPLES, "haystack": "builtin"}
    options |= {"windows": 1, "samples": 1, "depths": [0.5], "haystack": "noise"} if quick else {}
    # Prompts that neither the fit nor its choice of a table has used.
    spec = EvalSpec(lengths, bucket=lengths[-1], seed=100 + seed, **options)
    suite = EvalSuite(spec, tokenizer, text=halves(file, tokenizer)[1])
    comparison = compare(model, tokenizer, list(dict.fromkeys(["default", yarn, own])), suite)
    buckets = list(itertools.pairwise([0, *lengths]))
    scores = {row.method: row.scores for row in comparison.rows}
    row = {"checkpoint": Path(source).name, "factor": factor, "seed": seed, **table, "nll": {}, "retrieval": {}}
    for name, method in (("default", "default"), ("yarn", yarn), ("fitted", own)):
        text, prompts = scores[method].perplexity, scores[method].retrieval["passkey"]
        row["nll"][name] = {str(high): math.log(text.between(low, high)) for low, high in buckets}
        row["retrieval"][name] = {str(n): prompts.accuracy(n) for n in lengths}
    row["fitted_minus_yarn"] = {}
    for kind, (low, high) in itertools.product(("perplexity", "retrieval"), buckets):
        span = Span(high, low) if kind == "perplexity" else Span(high, task="passkey")
        change = comparison.difference(own, yarn, kind, span)
        row["fitted_minus_yarn"][f"{kind} {high}"] = [change.estimate, change.low, change.high]
    write_atomically(place(root, cell), json.dumps(row))
    return cell


def main() -> None:
    """Measure the cells that have no result yet, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON to write; printed otherwise")
    parser.add_argument("--root", type=Path, default=Path("build/fit"), help="folder of the cells")
    parser.add_argument("--also", help="folder of another checkpoint, at factor 4")
    parser.add_argument("--text", help="file of its text")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes, one thread each")
    parser.add_argument("--quick", action="store_true", help="one cell of a few steps")
    given = parser.parse_args()
    cells: list[Cell] = [(given.also, 4, seed, given.text) for seed in SEEDS] if given.also else []
    cells += [("llama", factor, seed, None) for factor in FACTORS for seed in SEEDS]
    cells = [("llama", 4, 0, None)] if given.quick else cells
    root = given.root / ("quick" if given.quick else "full")
    root.mkdir(parents=True, exist_ok=True)
    todo = [cell for cell in cells if not place(root, cell).exists()]
    measure_cells(measure, [(cell, root, given.quick) for cell in todo], given.jobs)
    report = {
        "benchmark": "fit",
        "command": command(),
        "what": "fitted tables against YaRN's on held-out text [nats/token] and prompts, and the CPU time of a fit",
        "settings": {"windows": WINDOWS, "samples": SAMPLES},
        "environment": environment(),
        "rows": [json.loads(place(root, cell).read_text()) for cell in cells],
    }
    write(report, given.output)


if __name__ == "__main__":
    main()
