"""The main numbers of the pages are those of the committed results, rounded as the pages round them.

``NUMBERS`` has a row or a few for each file in ``benchmarks/results`` that pages quote, so that a result that is
measured anew changes its pages: the page, the words as they stand there, and the values of the numbers in these words,
in their order. Whoever changes a statement changes its row.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if not (ROOT / "benchmarks").is_dir():
    pytest.skip("not in the source distribution", allow_module_level=True)

NUMBER = re.compile(r"(?<![\w.-])\d*\.?\d+(?![\w]|\.\d)")
"""A number that is no part of a name such as SmolLM2-135M."""


@functools.cache
def result(name):
    """Return a file of benchmarks/results."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))


def row(rows, **like):
    """Return the only one of these objects whose keys have these values."""
    (found,) = [each for each in rows if all(each[key] == value for key, value in like.items())]
    return found


def smollm2(table):
    """Return the perplexity of SmolLM2 in the last quarter of windows of 16384 tokens of novels, untrained."""
    rows = result("study_smollm2")["text"]
    found = row(rows, table=table, length=16384, text="novels", state="zero", factor=2, seed=0)
    return float(found["perplexity"]["12288-16384"])


def loss(model, table, span, length=8192):
    """Return the mean loss of a cell of the study of two models [nats/token]."""
    like = {"model": model, "kind": "text", "table": table, "where": "", "length": length, "adapted": False}
    cells = [cell for cell in result("study_families")["cells"] if like.items() <= cell.items()]
    return statistics.fmean(value for cell in cells for value in cell["nll"][span])


def gemma(table):
    """Return the perplexity of Gemma in the last quarter of windows of 65536 tokens."""
    return math.exp(loss("gemma3", table, "49152-65536", 65536))


def passkeys(tables, factor):
    """Return the shares of passkeys that the bundled Llama finds at ``factor`` times its context."""
    like = {"checkpoint": "llama", "factor": factor, "lora": False}
    found = [row(result("study_methods")["rows"], table=table, **like) for table in tables]
    return [each["passkey"][str(256 * factor)] for each in found]


def lora_step(side):
    """Return what a LoRA step of an 8B shape costs by the rehearsal."""
    return row(result("gpu_rehearsal"), what="lora_step", side=side, length=32768)


def memory(side):
    """Return the memory that a text of 32768 tokens takes [MB]."""
    return float(row(result("perplexity_memory")["memory"], tokens=32768, side=side)["peak_mb"])


def cpu():
    """Return the least and the greatest CPU time of lm-eval's retrieval over ours."""
    rows = result("retrieval_grid")["results"]
    ratios = [each["asking"]["cpu_ratio"]["median"] for each in rows if each["mode"] == "single"]
    return [min(ratios), max(ratios)]


def processes():
    """Return the seconds that one, two and four processes took, without starting them."""
    seconds = {each["processes"]: each["seconds_without_start"] for each in result("many_processes")["rows"]}
    return [seconds[1], seconds[2], seconds[4]]


def on_scaled(checkpoint, *methods):
    """Return what methods score on a toy trained under a scaled table: perplexity within and beyond, and passkeys."""
    found = result("extend_choices")["comparisons"][checkpoint]
    columns = [row(found["columns"], metric="perplexity", stop=stop) for stop in (1024, 2048)]
    columns.append(row(found["columns"], metric="retrieval", stop=2048))
    return [column["values"][found["methods"].index(method)] for method in methods for column in columns]


def smollm2_at_32k(method):
    """Return the perplexity of SmolLM2 within and beyond 16384 tokens, after it was trained there under YaRN."""
    step = result("extend_scaled_smollm2")["steps"][1]
    columns = [row(step["columns"], metric="perplexity", stop=stop) for stop in (16384, 32768)]
    return [column["values"][step["methods"].index(method)] for column in columns]


def keys_kl(model, bits):
    """Return KL with keys in so many bits, plain, with a scale per channel and rotated [nats/token]."""
    cell = row(result("cache_damage")["cells"], kind="keys", model=model, table="default", what=bits)
    return [statistics.fmean(cell["kl"][change]) for change in ("none", "scale per channel", "rotated")]


def pretrained(method):
    """Return the mean perplexities of models trained under a method, and the passkeys that each seed finds."""
    runs = [run for run in result("pretrain_methods")["runs"] if run["method"] == method]
    means = [statistics.geometric_mean(run["heldout_perplexity"][span] for run in runs) for span in SPANS]
    return [*means, *(run["passkey"][length] for length in ("256", "512") for run in runs)]


SPANS = ("0-256", "256-512", "512-1024")


def cost(cache_format):
    """Return KL of a format on windows of 512 tokens of a novel, on each model that read so many [nats/token]."""
    like = {"format": cache_format, "windows": 6, "length": 512, "text": "novel"}
    return [each["kl"] for each in result("kv_verdicts")["rows"] if like.items() <= each.items()]


def needle_shift():
    """Return by how much a needle shifts the perplexity of a window of 8192 tokens on two models [%]."""
    rows = result("extend_one_reading")["needle_shift"]["rows"]
    return [100 * each["shift"] for each in rows if each["length"] == 8192]


def decoded(cache_format):
    """Return KL of a format on three models, of reading and of 64 tokens written: of full precision, and its own."""
    runs = [run for run in result("kv_decode")["runs"] if run["decode"] == 64]
    rows = [row(run["rows"], format=cache_format) for run in runs]
    return [found[kind] for found in rows for kind in ("kl_reading", "kl_forced", "kl_own")]


NUMBERS: list[tuple[str, str, Callable[[], list[float]]]] = [
    ("README.md", "YaRN's table: 382 and 32 in the last quarter", lambda: [smollm2("default"), smollm2("yarn")]),
    ("docs/kv-caches.md", "| safe .0050 | safe .0043 | safe .0074 |", lambda: cost("kivi-4")),
    ("docs/kv-caches.md", "| undecided .013 | safe .011 | .082 |", lambda: cost("vllm:fp8 calibrated")),
    (
        "docs/results/caches.md",
        "| .008 | .013 | .011 | .008 | .041 | .048 | .092 | .046 | .091 |",
        lambda: decoded("kvarn-k4v2"),
    ),
    ("docs/methods/p_rope.md", "| 22.4 | 26.0 | 45.8 | .32, .52, .00 | .03, .05, .00 |", lambda: pretrained("default")),
    ("docs/doctor.md", "calls 121 model types OK", lambda: [result("doctor_families")["counts"]["in memory"]["ok"]]),
    (
        "docs/results/tables.md",
        "YaRN finds .89 of the passkeys, ABF .60 and NTK .02",
        lambda: passkeys(["YaRN", "ABF", "NTK"], 8),
    ),
    (
        "README.md",
        "127 of the 196 causal language models",
        lambda: [result("families")["counts"]["works"], len(result("families")["results"])],
    ),
    ("docs/measure.md", "8393 MB beside a small model", lambda: [memory("lm_eval")]),
    ("docs/measure.md", "1.5 to 1.9 times less CPU", cpu),
    (
        "docs/measure.md",
        "24.6 s with one process, 12.5 s with two and 13.6 s with four",
        processes,
    ),
    (
        "docs/adapt.md",
        "20.3 GiB beside the model, and 55.5",
        lambda: [lora_step("trl")["peak_gib"], lora_step("trainer")["peak_gib"]],
    ),
    ("docs/results/tables.md", "In the last quarter perplexity is 25", lambda: [gemma("yarn:factor=2")]),
    ("docs/results/tables.md", "| 25.9 | 120 |", lambda: smollm2_at_32k("default")),
    ("docs/results/caches.md", "| 7.9 | .061 | 6.9 |", lambda: keys_kl("qwen-1.5b", "2")),
    (
        "docs/results/tables.md",
        "| 10.3, 10.0, .56 |",
        lambda: on_scaled("gemma3-linear", "default"),
    ),
    (
        "docs/results/tables.md",
        "by +0.12 % on SmolLM2 and +0.18 % on Gemma (three windows of 8192",
        lambda: [*needle_shift(), 8192],
    ),
]


def disagreement(words, values):
    """Return why the numbers in some words are not these values, rounded; None where they are."""
    written = NUMBER.findall(words)
    if len(written) != len(values):
        return f"{words!r} has {len(written)} numbers, its row {len(values)}"
    for number, value in zip(written, values, strict=True):
        digits = len(number.partition(".")[2])
        if abs(value - float(number)) > 0.5 * 10**-digits * (1 + 1e-6):
            return f"{words!r}: {number} is {value:.6g}"
    return None


@pytest.mark.parametrize(("page", "words", "values"), NUMBERS, ids=[f"{row[0]}: {row[1]}" for row in NUMBERS])
def test_a_number_on_a_page_is_that_of_the_results(page, words, values):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    assert words in text, f"{page} does not say {words!r}: change the row in {Path(__file__).name} with the page"
    assert disagreement(words, values()) is None


def test_the_script_of_a_result_is_there_or_its_commit_is_named():
    folder = ROOT / "benchmarks"
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for _, results in rows for name in re.findall(r"`(\w+)`", results)}
    results = {path.stem for path in (folder / "results").glob("*.json")}
    without = {name for name in results - named if not (folder / f"{name}.py").is_file()}
    assert not without, f"name the commit of {', '.join(sorted(without))} in benchmarks/README.md"
