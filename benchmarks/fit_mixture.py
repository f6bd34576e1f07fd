"""What mixing text of another kind into a fit, and choosing on a second domain, do on text that the fit never saw.

    python benchmarks/fit_mixture.py --data ../shared/data -o benchmarks/results/fit_mixture.json
    python benchmarks/fit_mixture.py --data ../shared/data --quick

Each cell is a checkpoint, the kind of text it is fitted to, and a seed. A table is fitted from YaRN's at four times the
trained length in three ways, with the same steps and tokens: to that text alone, chosen on it alone (`alone`); to that
text alone, chosen on the documentation of Python too (`choice`); and by the defaults, which also draw half of the rows
from Python code (`mixture`). All are compared with YaRN's table on held-out text of the fit's kind and on text that no
way has seen: two novels and WikiText-2. The data are not part of this project: DATA has `text/` with the files named in
TEXTS, and `checkpoints/` with one that nobody here trained. Fits are half as long as the defaults, so that a cell takes
two to three minutes of one core. Finished cells are in build/fit_mixture, and are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"


from fit import opened
from measuring import command, environment, measure_cells, write
from rope_patch.files import write_atomically

FACTOR = 4
WINDOWS, SAMPLES = 16, 4
TEXTS = {
    "stories": "tinystories_val.txt",
    "one novel": "novels/moby_dick.txt",
    "another novel": "novels/pride_and_prejudice.txt",
    "wikitext": "wikitext2_test.txt",
}
FOREIGN = ("one novel", "another novel", "wikitext")
"""What no fit sees."""
CELLS = (
    ("llama", "stories", 0.8, 0),
    ("llama", "stories", 0.0, 0),
    ("stories260K", "stories", 0.0, 0),
)
"""Checkpoint, text, share of the learning rate for answers (the last cannot answer), and seed."""
STEPS, CHARACTERS = 20, 800_000
"""Steps of a fit, and the characters that are read of a text."""
WAYS: dict[str, tuple[float, bool]] = {"alone": (0.0, False), "choice": (0.0, True), "mixture": (0.5, True)}
"""Share of Python code, and whether a second domain is looked at."""


class Cell(NamedTuple):
    """What is fitted: checkpoint, text, share for answers, seed."""

    checkpoint: str
    text: str
    retrieval: float
    seed: int

    def place(self, root: Path) -> Path:
        """Return the file of its result."""
        return root / f"{self.checkpoint}-{self.text}-{self.retrieval}-{self.seed}.json"


def measure(cell: Cell, root: Path, data: Path, quick: bool) -> Cell:
    """Fit in every way, compare, and write a cell."""
    from rope_patch.fitting import Objective, Schedule, fit, held_out_spec

    folder = cell.checkpoint if cell.checkpoint == "llama" else str(data / "checkpoints" / cell.checkpoint)
    model, tokenizer = opened(folder)
    trained = int(model.config.max_position_embeddings)
    target = FACTOR * trained
    read = {name: _text(data / "text" / TEXTS[name], tokenizer) for name in {cell.text, *FOREIGN}}
    whole = read[cell.text]
    fits: dict[str, Any] = {}
    for way, (mix, second) in WAYS.items():
        kept = root / f"fit-{way}-{cell.place(root).name}"
        if kept.exists():
            fits[way] = json.loads(kept.read_text())
            continue
        start = time.process_time()
        small: dict[str, Any] = {"windows": 2, "samples": 1, "depths": [0.5]} if quick else {"samples": 2}
        small |= {} if cell.retrieval else {"samples": 1, "depths": [0.5]}
        patch = fit(
            model,
            tokenizer,
            whole[: len(whole) // 2],
            target_length=target,
            second=second,
            objective=Objective(cell.retrieval, mix=mix),
            schedule=Schedule(steps=2, checks=1, seed=cell.seed) if quick else Schedule(steps=STEPS, seed=cell.seed),
            spec=held_out_spec(model, target, seed=cell.seed, **small),
        )
        fits[way] = {"method": str(patch.method), "cpu_s": time.process_time() - start} | {
            name: value for name, value in patch.to_dict().items() if name in ("chosen", "candidates", "stopped")
        }
        patch.restore()
        write_atomically(kept, json.dumps(fits[way]))
    texts = {"like the fit's": whole[len(whole) // 2 :]} | {name: read[name] for name in FOREIGN}
    result = {"fits": fits} | compared(model, tokenizer, cell, fits, texts, quick)
    write_atomically(cell.place(root), json.dumps(result))
    return cell


def _text(file: Path, tokenizer: Any) -> str:
    return file.read_text(encoding="utf-8")[:CHARACTERS].replace("<|endoftext|>", tokenizer.bos_token)


def compared(
    model: Any, tokenizer: Any, cell: Cell, fits: dict[str, Any], texts: dict[str, str], quick: bool
) -> dict[str, Any]:
    """Return the differences of every fitted table from YaRN's: of the loss on each text, and of retrieval."""
    import rope_patch
    from rope_patch.evaluation.compare import compare
    from rope_patch.evaluation.spec import EvalSpec
    from rope_patch.evaluation.suite import EvalSuite

    trained = int(model.config.max_position_embeddings)
    lengths = [trained * 2**i for i in range(FACTOR.bit_length())]
    yarn = f"yarn:factor={FACTOR}"
    methods = {way: str(rope_patch.parse(entry["method"])) for way, entry in fits.items()}
    losses: dict[str, Any] = {}
    retrieval: dict[str, Any] = {}
    for number, (name, text) in enumerate(texts.items()):
        asked: dict[str, Any] = {"samples": SAMPLES, "haystack": "builtin"}
        if number or quick or cell.checkpoint != "llama":  # prompts are asked once
            asked = {"samples": 1, "depths": [0.5]}
        spec = EvalSpec(lengths, bucket=lengths[-1], seed=100 + cell.seed, windows=2 if quick else WINDOWS, **asked)
        suite = EvalSuite(spec, tokenizer, text=text)
        comparison = compare(model, tokenizer, list(dict.fromkeys([yarn, *methods.values()])), suite)
        losses[name] = {
            way: {
                str(high): _change(comparison, method, yarn, "perplexity", high, low)
                for low, high in itertools.pairwise([0, *lengths])
            }
            for way, method in methods.items()
        }
        if not number and cell.checkpoint == "llama":
            retrieval = {
                way: {str(n): _change(comparison, method, yarn, "retrieval", n, 0) for n in lengths}
                for way, method in methods.items()
            }
    return {"loss": losses, "retrieval": retrieval}


def _change(comparison: Any, method: str, yarn: str, kind: str, stop: int, start: int) -> list[float]:
    """Return a difference with its interval; nothing differs where YaRN's own table was kept."""
    if method == yarn:
        return [0.0, 0.0, 0.0]
    change = comparison.difference(method, yarn, kind, stop, start)
    return [change.estimate, change.low, change.high]


def summarise(results: dict[Cell, dict[str, Any]]) -> dict[str, Any]:
    """Return, for each checkpoint and text and each way, how the losses differ from YaRN's on each text.

    In per cent of perplexity: the mean over seeds of every bucket, and in how many buckets of all fits the table is
    significantly better and worse.
    """
    summary: dict[str, Any] = {}
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell, result in results.items():
        groups.setdefault(f"{cell.checkpoint}, fitted to {cell.text}, retrieval {cell.retrieval}", []).append(result)
    for label, several in groups.items():
        summary[label] = {}
        for way in WAYS:
            entry: dict[str, Any] = {"kept_the_start": sum(r["fits"][way]["chosen"].endswith("start") for r in several)}
            entry["fits"] = len(several)
            for text in several[0]["loss"]:
                by_bucket = [result["loss"][text][way] for result in several]
                changes = [change for one in by_bucket for change in one.values()]
                entry[text] = {
                    "change_percent": {
                        high: round(100 * math.expm1(statistics.fmean(one[high][0] for one in by_bucket)), 2)
                        for high in by_bucket[0]
                    },
                    "significantly_better": sum(high < 0 for _, _, high in changes),
                    "significantly_worse": sum(low > 0 for _, low, _ in changes),
                    "buckets": len(changes),
                }
            summary[label][way] = entry
    return summary


def main() -> None:
    """Measure what is missing, then summarise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of texts and checkpoints")
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument("--root", type=Path, default=Path("build/fit_mixture"), help="folder of the cells")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes, one thread each")
    parser.add_argument("--quick", action="store_true", help="one cell of a few steps")
    given = parser.parse_args()
    cells = [Cell(*cell) for cell in CELLS]
    cells = cells[:1] if given.quick else cells
    root = given.root / ("quick" if given.quick else "full")
    root.mkdir(parents=True, exist_ok=True)
    todo = [cell for cell in cells if not cell.place(root).exists()]
    measure_cells(measure, [(cell, root, given.data, given.quick) for cell in todo], given.jobs)
    results = {cell: json.loads(cell.place(root).read_text()) for cell in cells}
    report = {
        "benchmark": "fit_mixture",
        "command": command(),
        "what": "tables fitted to one kind of text, chosen on a second domain, and fitted to a mixture, against YaRN's "
        "table on text like the fit's and on other text; differences of the loss with 95 % intervals [nats/token]",
        "summary": summarise(results),
        "settings": {
            "factor": FACTOR,
            "windows": WINDOWS,
            "samples": SAMPLES,
            "steps": STEPS,
            "ways": WAYS,
            "texts": TEXTS,
        },
        "environment": environment(),
        "rows": [{**cell._asdict(), **result} for cell, result in results.items()],
    }
    write(report, given.output)


if __name__ == "__main__":
    main()
