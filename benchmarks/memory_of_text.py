"""Peak memory of long texts: encoded in slices, as rope_patch does, and in one call of the tokenizer.

    OMP_NUM_THREADS=1 python benchmarks/memory_of_text.py -o benchmarks/results/memory_of_text.json

A file of the built-in text, said again until it is long enough, goes through ``compare`` of two methods on 16 windows
that are spread over it, and through ``perplexity`` of all of it in windows of 512 tokens. The tokenizer is that of the
bundled checkpoint, of 2.7 characters a token. The model is random and tiny, so that the figure is what the text takes.

Every figure comes from a process of its own, forked from one that has only imported: the highest resident set during
the measurement (VmHWM, cleared just before) less the resident set just before. One call takes memory in proportion to
the text: it is measured on short texts, and the figure for the longest is a straight line through them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import numpy
from tqdm import tqdm
from transformers import AutoTokenizer

import rope_patch
from measuring import command, environment, in_own_process, megabytes, peak_of, random_llama, write
from rope_patch.evaluation import slices
from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.documents import encode
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.text import builtin_text

SHAPE = {"vocab": 1024, "hidden": 16, "layers": 1, "heads": 1, "kv_heads": 1}
WINDOW = 512
SPREAD = {"lengths": [256, 512], "windows": 16, "tasks": ["passkey"], "samples": 1, "depths": [0.5]}
WORKS = ("compare", "perplexity")
SIDES = ("one_call", "slices")


def work(job: dict[str, Any], path: Path) -> tuple[int, float]:
    """Return how many tokens were scored, and their loss [nats/token]."""
    tokenizer = AutoTokenizer.from_pretrained(rope_patch.data_path("assets") / "llama")
    model = random_llama(SHAPE, WINDOW // 2).eval()
    if job["what"] == "perplexity":
        result = perplexity(model, encode(tokenizer, path), window=WINDOW)
        return result.tokens, result.nll
    scores = compare(model, tokenizer, ["default", "yarn"], EvalSpec(text=str(path), **SPREAD)).rows[0].scores
    return scores.perplexity.tokens, scores.perplexity.nll


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Measure one piece of work on one side in this process, which should be a fresh one."""
    path = Path(job["path"])
    short = path.with_name("short.txt")
    short.write_text(path.open(encoding="utf-8").read(40000), encoding="utf-8")
    work(job, short)  # what is imported and built on first use is no part of it
    if job["side"] == "one_call":
        slices.SLICE = sys.maxsize
    (tokens, nll), usage = peak_of(lambda: work(job, path))
    return usage | {"tokens": tokens, "nll": nll}


def row(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Measure one piece of work on a text of a size."""
    path = folder / f"{job['mb']}.txt"
    if not path.exists():
        said = builtin_text("train").text.encode()
        size = int(job["mb"] * 1e6)
        with path.open("wb") as file:
            for at in range(0, size, len(said)):
                file.write(said[: size - at].decode(errors="ignore").encode())
    measured = in_own_process(measure, job | {"path": str(path)})
    return job | {
        "peak_mb": megabytes(measured["peak_bytes"]),
        "loaded_mb": megabytes(measured["loaded_bytes"]),
        "peak_from": measured["peak_from"],
        "tokens": measured["tokens"],
        "nll": measured["nll"],
        "seconds_unpaired": round(measured["seconds"], 1),
    }


def summary(rows: list[dict[str, Any]], longest: float) -> dict[str, Any]:
    """Return for each piece of work the peak at the longest text, and what one call would take of it."""
    found = {}
    for what in dict.fromkeys(each["what"] for each in rows):
        mine = [each for each in rows if each["what"] == what]
        points = {each["mb"]: each for each in mine if each["side"] == "one_call"}
        slope, start = numpy.polyfit(list(points), [each["peak_mb"] for each in points.values()], 1)
        sliced = {each["mb"]: each for each in mine if each["side"] == "slices"}
        one_call, peak = float(start + slope * longest), sliced[longest]["peak_mb"]
        found[what] = {
            "text_mb": longest,
            "peak_mb": peak,
            "one_call_peak_mb_extrapolated": round(one_call, 1),
            "times_less": round(one_call / peak, 1),
            "same_scores_on_short_texts": all(
                (each["tokens"], each["nll"]) == (sliced[mb]["tokens"], sliced[mb]["nll"])
                for mb, each in points.items()
            ),
        }
    return found


def main() -> None:
    """Measure everything; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--longest", type=float, help="the longest text; 100 by default [MB]")
    parser.add_argument("--quick", action="store_true", help="a size that takes seconds")
    options = parser.parse_args()
    longest = options.longest or (0.3 if options.quick else 100.0)
    short = (0.2, 0.3) if options.quick else (1.0, 3.0)
    jobs = [
        {"what": what, "side": side, "mb": mb}
        for what in (WORKS[:1] if options.quick else WORKS)
        for side in SIDES
        for mb in (short if side == "one_call" else sorted({*short, longest}))
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(job, Path(folder)) for job in tqdm(jobs, desc="measurements", file=sys.stderr)]
    report = {
        "benchmark": "memory_of_text",
        "command": command(),
        "what": "peak memory above the loaded package [MB] of a text in a file",
        "summary": summary(rows, longest),
        "settings": {
            "shape": SHAPE,
            "window": WINDOW,
            "compare": SPREAD,
            "slice_characters": slices.SLICE,
            "overlaps_characters": slices.OVERLAPS,
        },
        "environment": environment("tokenizers"),
        "rows": rows,
    }
    write(report, options.output)
    print(json.dumps(report["summary"], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
