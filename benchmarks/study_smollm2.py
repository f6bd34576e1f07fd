"""A public checkpoint, SmolLM2-135M-Instruct, at twice its context: which table, before and after LoRA?

    python benchmarks/study_smollm2.py MODEL --novels FOLDER --wikitext FILE \\
        -o benchmarks/results/study_smollm2.json --figure docs/study_smollm2.png

MODEL is the folder that `make smollm2` writes, FOLDER holds novels as text files, FILE is the test part of WikiText-2.
Three novels and the second half of WikiText-2 are held out for evaluation; the rest is for training and fitting.

The study is a list of cells, which `--list` shows. What a cell will cost is printed before it begins, a finished one is
a file in build/study_smollm2 and is not measured again, and an interrupted one goes on where it was. Without `--more`
it takes an estimated eleven hours on two quiet cores: `--cells 'text-*-zero-*' 'passkey-*-zero-1024'` runs a part of
it, and the report is of what is finished, together with the cells of an earlier report in the file that `-o` names,
which may have been measured on another machine. Cells of a fitted table are left out where the fit took the table it
started from, which is measured by itself. It needs the extras train and engines. `--more` adds what a GPU has time for
(`--device cuda`): three seeds, rows of the full length, 32768 tokens.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from tqdm import tqdm

import smollm2_cells as cells
from measuring import command, environment, write
from rope_patch.evaluation.intervals import paired_means
from rope_patch.files import write_atomically
from smollm2_cells import Cell, Study
from smollm2_earlier import COLUMNS, Results, earlier_losses, earlier_report, joined, learns, names_in

NEEDED = {"train": "peft", "engine": "llama_cpp"}
"""Packages that only some kinds of cells need."""


def identity(study: Study) -> dict[str, str]:
    """Return sha256 hashes of what results depend on.

    "weights" is of the weights and of how much is measured, "held out" of the texts that are measured, and "training"
    of those that adapters and fitted tables learn from.
    """
    weights = sorted(study.folder.glob("*.safetensors"))
    if not weights:
        raise FileNotFoundError(f"{study.folder} is no folder of a checkpoint: it holds no *.safetensors")
    parts = {"weights": hashlib.sha256(json.dumps(asdict(study.sizes)).encode())}
    for path in weights:
        parts["weights"].update(path.read_bytes())
    for name, held_out in (("held out", True), ("training", False)):
        parts[name] = hashlib.sha256()
        for domain in ("novels", "wikitext"):
            parts[name].update(study.text(domain, held_out).encode())
    return {name: part.hexdigest() for name, part in parts.items()}


def identity_of(study: Study, cell: Cell, about: dict[str, str]) -> dict[str, str]:
    """Return the part of the identity that a cell depends on."""
    return {name: about[name] for name in about if name != "training" or learns(study, cell)}


def lacks(kind: str, package: str, todo: Sequence[Cell]) -> bool:
    """Whether cells of a kind are to be measured and a package that they need is not installed."""
    return any(cell.kind == kind for cell in todo) and importlib.util.find_spec(package) is None


def run(study: Study, todo: Sequence[Cell], done: Results, about: dict[str, str]) -> None:
    """Measure cells one after another, after what they need."""
    for number, cell in enumerate(todo):
        if study.repeats(cell, fits_of(done)):
            print(f"{number + 1} of {len(todo)}: {cell.name}, left out: the fit found no table of its own", flush=True)
            continue
        path = study.path(cell)
        flops = cells.operations(cell, study.sizes)
        speed = cells.speed_of(list(done.values()))
        left = sum(cells.operations(other, study.sizes) for other in todo[number:])
        print(
            f"{number + 1} of {len(todo)}: {cell.name}, about {minutes(flops / speed)}; "
            f"{minutes(left / speed)} for all that is left",
            flush=True,
        )
        spent = study.root / "parts" / f"{cell.name}.seconds"  # of runs that were interrupted
        before = float(spent.read_text()) if spent.exists() else 0.0
        began = time.perf_counter()
        with tqdm(unit=" tokens", unit_scale=True, leave=False, disable=None) as bar:
            try:
                result = cells.MEASURES[cell.kind](replace(study, on_progress=bar.update), cell)
            except BaseException:
                spent.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(spent, str(before + time.perf_counter() - began))
                raise
        seconds = before + time.perf_counter() - began
        made_by = {
            "about": identity_of(study, cell, about),
            "patch": study.named(cell),
            "device": study.device,
            "seconds": round(seconds, 1),
            "operations": flops,
        }
        done[cell] = {**made_by, **result}
        write_atomically(path, json.dumps(done[cell]))
        print(f"    finished in {minutes(seconds)}", flush=True)


def fits_of(done: Results) -> dict[str, dict[str, Any]]:
    """Return the results of the finished fits, by the names of their cells."""
    return {cell.name: result for cell, result in done.items() if cell.kind == "fit"}


def minutes(seconds: float) -> str:
    """Return a time for reading."""
    return f"{seconds / 3600:.1f} h" if seconds > 5400 else f"{seconds / 60:.1f} min"


def finished(study: Study, asked: Sequence[Cell], about: dict[str, str]) -> Results:
    """Return the results that are there, of these weights, texts and tables.

    Raises:
        ValueError: one of others.
    """
    done = {cell: json.loads(study.path(cell).read_text()) for cell in asked if study.path(cell).exists()}
    for cell, result in done.items():
        if (result["about"], result.get("patch")) != (identity_of(study, cell, about), study.named(cell)):
            raise ValueError(
                f"{study.path(cell)} was measured on other weights or texts, at other sizes or with another table: "
                "give another --root"
            )
    return done


def with_needs(chosen: Sequence[Cell], study: Study) -> list[Cell]:
    """Return cells, each after what trains or fits what it measures."""
    ordered: list[Cell] = []
    for cell in chosen:
        needs, needed = [cell], study.needs(cell)
        while needed is not None:
            needs, needed = [needed, *needs], study.needs(needed)
        ordered += needs
    return list(dict.fromkeys(ordered))


# --- the report


def change(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Return a paired difference of losses with Student's interval over windows [nats/token]."""
    both = list(zip(ours, theirs, strict=True))
    estimate = statistics.fmean(a - b for a, b in both)
    return {"estimate": estimate, "interval": list(paired_means(ours, theirs)) if len(both) > 1 else None}


def text_rows(done: Results, earlier: Results) -> list[dict[str, Any]]:
    """Return perplexity by position, and what it differs by from the model as it was and from its equal in training."""
    rows, known = [], earlier | done
    for cell, result in done.items():
        if cell.kind not in ("text", "short", "wiki"):
            continue
        row = {**of(cell), "text": result["text"], "windows": len(next(iter(result["nll"].values())))}
        row["nll"] = result["nll"]
        row["perplexity"] = {span: math.exp(statistics.fmean(nll)) for span, nll in result["nll"].items()}
        same = Cell(cell.kind, "default", "zero", cell.length)  # as it was, whatever it is patched for
        plain = known.get(same, known.get(same._replace(factor=cell.factor)))
        if plain is not None and plain is not result:
            row["nll_minus_unpatched"] = {
                span: change(result["nll"][span], plain["nll"][span]) for span in plain["nll"]
            }
        equal = known.get(cell._replace(table="default"))
        if equal is not None and cell.state != "zero" and cell.table != "default":
            row["nll_minus_default_trained_alike"] = {
                span: change(result["nll"][span], equal["nll"][span]) for span in equal["nll"]
            }
        rows.append(row)
    return rows


def of(cell: Cell) -> dict[str, Any]:
    """Return a cell as columns."""
    return {name: getattr(cell, name) for name in COLUMNS}


def passkey_rows(done: Results) -> list[dict[str, Any]]:
    """Return right answers, by length."""
    rows = []
    for cell, result in done.items():
        if cell.kind in ("passkey", "engine"):
            row = {**of(cell), "by": "llama.cpp" if cell.kind == "engine" else "transformers"}
            row |= {"prompts": len(result["correct"]), "exact_match": sum(result["correct"])}
            if "first_choice" in result:
                row |= {"first_choice": sum(result["first_choice"]), "logprob": statistics.fmean(result["logprob"])}
            rows.append(row | {"answers": result["answers"][:4], "asked for": result["asked for"][:4]})
    return rows


def cache_rows(done: Results) -> list[dict[str, Any]]:
    """Return what quantized caches cost under each table, on the same windows and prompts in full precision."""
    rows = []
    for cell, result in done.items():
        if cell.kind == "kv":
            full = result["rows"]["none"]
            for scheme, row in result["rows"].items():
                if scheme != "none":
                    cost = change(row["nll"], full["nll"])
                    rows.append(
                        {
                            **of(cell),
                            "scheme": scheme,
                            "bits": row["bits"],
                            "nll_cost": cost,
                            "exact_match": sum(row["correct"]),
                            "exact_match_full": sum(full["correct"]),
                            "prompts": len(row["correct"]),
                            "logit_error": statistics.fmean(row["logit_error"]) if row["logit_error"] else None,
                        }
                    )
    return rows


def report_of(done: Results, asked: Sequence[Cell], study: Study, before: dict[str, Any]) -> dict[str, Any]:
    """Return everything that is finished, with what an earlier report holds besides."""
    plain = ("about", "patch", "operations", "device", "seconds")
    others = {
        cell.name: {key: value for key, value in result.items() if key not in plain}
        for cell, result in done.items()
        if cell.kind in ("heads", "train", "fit", "slopes")
    }
    known = names_in(before, study)
    new = [result for cell, result in done.items() if cell.name not in known]
    report = {
        "benchmark": "study_smollm2",
        "command": command(),
        "what": "SmolLM2-135M-Instruct (8192 tokens) at 16384: perplexity by position, passkeys, heads, caches",
        "weights": "dequantized Q4_1, bfloat16",
        "unfinished": [cell.name for cell in asked if cell not in done and cell.name not in known],
        "minutes": round(before["minutes"] + sum(result["seconds"] for result in new) / 60, 1),
        "sha256": before["sha256"],
        "settings": {
            "methods": cells.METHODS,
            "held out": list(cells.HELD_OUT),
            "sizes": asdict(study.sizes),
            "rank": 16,
        },
        "environment": environment(device=study.device, threads=torch.get_num_threads()),
        "text": text_rows(done, earlier_losses(before, study)),
        "passkey": passkey_rows(done),
        "caches": cache_rows(done),
        **others,
    }
    return joined(report, before)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw perplexity by position and passkeys by length, before and after LoRA, of as many tables as have a colour."""
    from rope_patch.plots.base import scores_by_context

    def is_drawn(row: dict[str, Any]) -> bool:
        return (
            row["table"] in cells.DRAWN and row["state"] in ("zero", "pose") and (row["factor"], row["seed"]) == (2, 0)
        )

    text, passkeys = "perplexity on novels, by position", "share of passkeys, by length"
    points: dict[str, dict[tuple[str, bool], list[tuple[int, float]]]] = {text: {}, passkeys: {}}
    for row in report["text"]:
        if row["text"] == "novels" and is_drawn(row):
            for span, value in row["perplexity"].items():
                curve = points[text].setdefault((row["table"], row["state"] != "zero"), [])
                curve.append((int(span.partition("-")[2]), value))
    for row in report["passkey"]:
        if row["by"] == "transformers" and is_drawn(row):
            curve = points[passkeys].setdefault((row["table"], row["state"] != "zero"), [])
            curve.append((row["length"], row["exact_match"] / row["prompts"]))
    panels = {
        name: {which: tuple(zip(*sorted(curve), strict=True)) for which, curve in curves.items()}
        for name, curves in points.items()
        if curves
    }
    title = "SmolLM2-135M-Instruct, trained at 8192 tokens, with tables for 16384"
    context = report["settings"]["sizes"]["context"]
    scores_by_context(panels, shares=[passkeys], title=title, factors=False, mark=context).savefig(path, dpi=110)


def main() -> None:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument("--novels", type=Path, required=True, help="folder of novels, *.txt")
    parser.add_argument("--wikitext", type=Path, required=True, help="file of WikiText-2's test part")
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument("--figure", type=Path, default=None, help="PNG to draw")
    parser.add_argument(
        "--root", type=Path, default=Path("build/study_smollm2"), help="folder of the results of finished cells"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--cells",
        nargs="+",
        default=["*"],
        help="names of cells to run, with * for any text; what they need is trained or fitted first",
    )
    parser.add_argument("--more", action="store_true", help="the cells for a GPU, too")
    parser.add_argument(
        "--list", action="store_true", help="list the cells with the time each takes, and measure nothing"
    )
    parser.add_argument("--report", action="store_true", help="measure nothing, and report the finished cells")
    parser.add_argument("--quick", action="store_true", help="small sizes, for a model trained at 256 tokens")
    given = parser.parse_args()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    sizes = cells.QUICK if given.quick else cells.Sizes()
    study = Study(given.model, given.novels, given.wikitext, given.root, sizes, given.device)
    wanted = [*cells.core(sizes), *cells.later(sizes), *(cells.more(sizes) if given.more else [])]
    asked = with_needs(wanted, study)
    named = [cell for cell in asked if any(fnmatch.fnmatch(cell.name, pattern) for pattern in given.cells)]
    if not named:
        parser.error(f"no cell is named like {' or '.join(given.cells)}: --list shows them")
    given.root.mkdir(parents=True, exist_ok=True)
    try:
        about = identity(study)
        done = finished(study, asked, about)
        reported = {*done, *([] if given.report or given.list else with_needs(named, study))}
        before = earlier_report(given.output, about, study, reported)
        chosen = with_needs([cell for cell in named if not study.repeats(cell, before | fits_of(done))], study)
        todo = [cell for cell in chosen if cell not in done]
        if given.list:
            speed = cells.speed_of(list(done.values()))
            for cell in chosen:
                cost = "finished" if cell in done else minutes(cells.operations(cell, study.sizes) / speed)
                print(f"{cell.name:32s} {cost}")
            left = minutes(sum(cells.operations(cell, study.sizes) for cell in todo) / speed)
            print(f"{left} for {len(todo)} of {len(chosen)} cells")
            return
        if not given.report:
            lacking = [f"{kind} cells need {name}" for kind, name in NEEDED.items() if lacks(kind, name, todo)]
            if lacking:
                sys.exit(f"error: {'; '.join(lacking)}: install that, or leave them out with --cells")
            run(study, todo, done, about)
    except KeyboardInterrupt:
        print("\nstopped: finished cells are kept, and the same command goes on", file=sys.stderr)
        sys.exit(130)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    asked = [cell for cell in asked if not study.repeats(cell, before | fits_of(done))]
    report = report_of(done, asked, study, before)
    write(report, given.output)
    if given.figure and (report["text"] or report["passkey"]):
        draw(report, given.figure)


if __name__ == "__main__":
    main()
