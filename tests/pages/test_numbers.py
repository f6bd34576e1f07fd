"""The main numbers of the pages are those of the committed results, rounded as the pages round them.

``NUMBERS`` has a row for each statement: the page, the words as they stand there, and the values of the numbers in
these words, in their order, as keys of files in ``benchmarks/results``. Whoever changes a statement changes its row.
"""

from __future__ import annotations

import functools
import itertools
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


def smollm2(table, key="12288-16384"):
    """Return the perplexity of SmolLM2 at these positions of windows of 16384 tokens of novels, untrained."""
    rows = result("study_smollm2")["text"]
    found = row(rows, table=table, length=16384, text="novels", state="zero", factor=2, seed=0)
    return float(found["perplexity"][key])


def loss(model, table, where="", *, length=8192, span="4096-8192", lora=False):
    """Return the mean loss of a cell of the study of two models [nats/token]."""
    like = {"model": model, "kind": "text", "table": table, "where": where, "length": length, "adapted": lora}
    cells = [cell for cell in result("study_families")["cells"] if like.items() <= cell.items()]
    return statistics.fmean(value for cell in cells for value in cell["nll"][span])


def rise(model, p, where="", *, lora=False):
    """Return what p-RoPE costs at positions 4096 to 8192, against the unchanged table in the same state [%]."""
    return 100 * math.expm1(loss(model, f"p_rope:p={p}", where, lora=lora) - loss(model, "default", lora=lora))


def price(model, table):
    """Return what a table costs at two ranges of positions, against the unchanged table [%]."""
    spans = ("0-1024", "4096-8192")
    return [100 * math.expm1(loss(model, table, span=one) - loss(model, "default", span=one)) for one in spans]


def within(model, table):
    """Return what a table costs over whole windows of 8192 tokens, against the unchanged table [%]."""
    spans = {"0-1024": 1, "1024-2048": 1, "2048-4096": 2, "4096-8192": 4}
    changes = [size * (loss(model, table, span=one) - loss(model, "default", span=one)) for one, size in spans.items()]
    return 100 * math.expm1(sum(changes) / 8)


def without_factor(model):
    """Return what YaRN costs over whole windows, with its attention factor and without [%]."""
    return [within(model, "yarn:factor=2"), within(model, "yarn:factor=2:attention_factor=1")]


def answers(task):
    """Return the mean log-probability of right answers on Qwen 0.5B, unpatched and under YaRN with and without its
    attention factor, without its sign [nats]."""
    tables = ("default", "yarn:factor=2", "yarn:factor=2:attention_factor=1")
    cells = [row(result("study_families")["cells"], model="qwen", kind=task, table=table) for table in tables]
    return [abs(statistics.fmean(cell["logprob"])) for cell in cells]


def gemma(table):
    """Return the perplexity of Gemma in the last quarter of windows of 65536 tokens."""
    return math.exp(loss("gemma3", table, length=65536, span="49152-65536"))


def kl(kind, *formats):
    """Return the mean KL of formats of the cache on SmolLM2 and on Gemma [nats/token]."""
    cells = [row(result("study_families")["cells"], model=m, kind=kind, table="default") for m in ("smollm2", "gemma3")]
    measured = [row(cell["rows"], format=name)["kl"].values() for cell in cells for name in formats]
    return [statistics.fmean(itertools.chain(*spans)) for spans in measured]


def by_position(name, span):
    """Return the KL of a format at these positions on SmolLM2 under YaRN [nats/token]."""
    like = {"model": "smollm2", "kind": "positions", "table": "yarn:factor=2"}
    return statistics.fmean(row(row(result("study_families")["cells"], **like)["rows"], format=name)["kl"][span])


def lost(table):
    """Return the least and the greatest rise of SmolLM2's perplexity up to position 8192 [%]."""
    spans = ("0-1024", "1024-2048", "2048-4096", "4096-8192")
    rises = [100 * (smollm2(table, span) / smollm2("default", span) - 1) for span in spans]
    return [min(rises), max(rises)]


def toy(table, factor, *, lora=False):
    """Return what the study measured on the bundled Llama."""
    return row(result("study_methods")["rows"], checkpoint="llama", table=table, factor=factor, lora=lora)


def passkeys(tables, factor, *, lora=False):
    """Return the shares of passkeys that the bundled Llama finds at ``factor`` times its context."""
    return [toy(table, factor, lora=lora)["passkey"][str(256 * factor)] for table in tables]


def lora_step(side, length=32768):
    """Return what a LoRA step of an 8B shape costs by the rehearsal."""
    return row(result("gpu_rehearsal"), what="lora_step", side=side, length=length)


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


def workload(model, form, *names):
    """Return how many answers of workloads are right through a format, and how much less probable they are [nats]."""
    found = row(result("cache_damage")["summary"], model=model, format=form)
    return [value for name in names for value in (found[name]["right"][0], abs(found[name]["change of logprob"][0]))]


def pretrained(method):
    """Return the mean perplexities of models trained under a method, and the passkeys that each seed finds."""
    runs = [run for run in result("pretrain_methods")["runs"] if run["method"] == method]
    means = [statistics.geometric_mean(run["heldout_perplexity"][span] for run in runs) for span in SPANS]
    return [*means, *(run["passkey"][length] for length in ("256", "512") for run in runs)]


SPANS = ("0-256", "256-512", "512-1024")


def against_plain(method, span="0-256"):
    """Return what a table changes of the perplexity of plain RoPE, with its interval [%]."""
    low, middle, high = row(result("pretrain_methods")["changes"], method=method)[span]
    return [abs(middle), abs(low), abs(high)]  # signs are words here


def cost(cache_format, windows=6):
    """Return KL of a format on windows of 512 tokens of a novel, on each model that read so many [nats/token]."""
    like = {"format": cache_format, "windows": windows, "length": 512, "text": "novel"}
    return [each["kl"] for each in result("kv_verdicts")["rows"] if like.items() <= each.items()]


def least_and_most(size, cache_format):
    """Return the least and the greatest KL of a format on a Qwen over both texts and three lengths [nats/token]."""
    like = {"model": f"Qwen2.5-Coder-{size}-Instruct", "format": cache_format}
    found = [each["kl"] for each in result("kv_verdicts")["rows"] if like.items() <= each.items()]
    assert len(found) == 6
    return [min(found), max(found)]


def extended_gemma():
    """Return Gemma's perplexity from 32768 to 65536 tokens under YaRN with an attention factor of 1.07, 1.03 and 1."""
    run = row(result("extend_one_reading")["runs"], model="gemma-3-270m")
    tables = ("yarn:factor=2", "yarn:factor=2:mscale=1.5:mscale_all_dim=1", "yarn:factor=2:attention_factor=1")
    return [row(run["evaluated"], method=table)["perplexity"] for table in tables]


def gemma_abf():
    """Return by how much ABF reads Gemma worse than the chosen table: at 64k in two windows, and its price [%]."""
    run = row(result("extend_one_reading")["runs"], model="gemma-3-270m")
    abf, chosen = (row(run["rounds"][-1], method=each) for each in ("abf:factor=4", run["chosen"]))
    at_64k = [each["perplexity of each window"]["32768-65536"] for each in (abf, chosen)]
    rises = [100 * (ours / theirs - 1) for ours, theirs in zip(*at_64k, strict=True)]
    return [*rises, 100 * math.expm1(row(run["evaluated"], method="abf:factor=4")["change"][0])]


def needle_shift(length):
    """Return by how much a needle shifts the perplexity of its window on two models [%]."""
    rows = result("extend_one_reading")["needle_shift"]["rows"]
    return [100 * each["shift"] for each in rows if each["length"] == length]


def decoded(cache_format):
    """Return KL of a format on three models, of reading and of 64 tokens written: of full precision, and its own."""
    runs = [run for run in result("kv_decode")["runs"] if run["decode"] == 64]
    rows = [row(run["rows"], format=cache_format) for run in runs]
    return [found[kind] for found in rows for kind in ("kl_reading", "kl_forced", "kl_own")]


NUMBERS: list[tuple[str, str, Callable[[], list[float]]]] = [
    ("README.md", "YaRN's table: 382 and 32 in the last quarter", lambda: [smollm2("default"), smollm2("yarn")]),
    ("docs/kv-caches.md", "| safe .0050 | safe .0043 | safe .0074 |", lambda: cost("kivi-4")),
    (
        "docs/kv-caches.md",
        "| 8.5 | safe .0031 | safe .0074 | .43 |",
        lambda: [8.5, *cost("vllm:int8_per_token_head")],
    ),
    ("docs/kv-caches.md", "| undecided .013 | safe .011 | .082 |", lambda: cost("vllm:fp8 calibrated")),
    ("docs/kv-caches.md", "| 1.0 | 8.8 |", lambda: [cost("int4-token")[2], *cost("int4-token", windows=2)]),
    ("docs/results/caches.md", "`kivi-4` (KL of .0016 to .0024),", lambda: least_and_most("1.5B", "kivi-4")),
    (
        "docs/results/caches.md",
        "`vllm:turboquant_k8v4` (.015).",
        lambda: least_and_most("1.5B", "vllm:turboquant_k8v4")[1:],
    ),
    (
        "docs/results/caches.md",
        "in all six cells, at KL of .0030 to .0082",
        lambda: least_and_most("0.5B", "kivi-4"),
    ),
    (
        "docs/results/caches.md",
        "`vllm:fp8` is unsafe in all six, at KL of .037 to .40",
        lambda: least_and_most("0.5B", "vllm:fp8"),
    ),
    ("docs/kv-caches.md", "| .16 | 1.8 | 1.0 |", lambda: cost("int4-token")),
    (
        "docs/results/caches.md",
        "| .008 | .013 | .011 | .008 | .041 | .048 | .092 | .046 | .091 |",
        lambda: decoded("kvarn-k4v2"),
    ),
    (
        "docs/results/caches.md",
        "| .18 | .11 | .22 | .13 | .13 | .072 | .18 | .15 | .12 |",
        lambda: decoded("kivi-2"),
    ),
    ("docs/methods/p_rope.md", "| 22.4 | 26.0 | 45.8 | .32, .52, .00 | .03, .05, .00 |", lambda: pretrained("default")),
    (
        "docs/methods/p_rope.md",
        "| 21.8 | 24.4 | 46.1 | .74, .56, .00 | .34, .19, .00 |",
        lambda: pretrained("p_rope:p=0.75"),
    ),
    (
        "docs/methods/p_rope.md",
        "| 21.2 | 23.3 | 25.2 | .76, .92, .79 | .21, .60, .51 |",
        lambda: pretrained("p_rope:p=0.5"),
    ),
    (
        "docs/methods/p_rope.md",
        "| 24.6 | 28.6 | 35.8 | .81, .01, .77 | .02, .00, .40 |",
        lambda: pretrained("p_rope:p=0.25"),
    ),
    (
        "docs/methods/p_rope.md",
        "| 21.7 | 33.6 | 57.9 | .08, .00, .45 | .00, .00, .05 |",
        lambda: pretrained("abf:rope_theta=500000"),
    ),
    (
        "docs/methods/p_rope.md",
        "| 21.7 | 24.3 | 51.0 | .32, .21, .56 | .01, .07, .12 |",
        lambda: pretrained("partial:p=0.75"),
    ),
    (
        "docs/methods/p_rope.md",
        "| 27.4 | 57.3 | 74.9 | .00, .00, .00 | .00, .00, .00 |",
        lambda: pretrained("p_rope_reversed:p=0.75"),
    ),
    ("docs/methods/p_rope.md", "| 43.3 | 50.7 | 52.2 | .00, .00, .00 | .00, .00, .00 |", lambda: pretrained("nope")),
    ("docs/methods/p_rope.md", "changes by −2 % (−5 to 0)", lambda: against_plain("p_rope:p=0.75")),
    ("docs/methods/p_rope.md", "−5 % (−17 to +9)", lambda: against_plain("p_rope:p=0.5")),
    ("docs/methods/p_rope.md", "+10 % (−15 to +42)", lambda: against_plain("p_rope:p=0.25")),
    (
        "docs/methods/p_rope.md",
        "changes perplexity by −45 % (−73 to +12)",
        lambda: against_plain("p_rope:p=0.5", "512-1024"),
    ),
    (
        "docs/methods/p_rope.md",
        "perplexity changes by +23 % (+14 to +32)",
        lambda: against_plain("p_rope_reversed:p=0.75"),
    ),
    ("docs/methods/p_rope.md", "it changes by +94 % (+65 to +128)", lambda: against_plain("nope")),
    ("docs/doctor.md", "calls 121 model types OK", lambda: [result("doctor_families")["counts"]["in memory"]["ok"]]),
    ("docs/methods.md", "from 382 to 32 in the last quarter of", lambda: [smollm2("default"), smollm2("yarn")]),
    (
        "docs/results/tables.md",
        "| default | 13.4, 42.7, 0.00 |",
        lambda: [toy("default", 4)["perplexity"][key] for key in ("256", "1024")] + passkeys(["default"], 4),
    ),
    (
        "docs/results/tables.md",
        "YaRN finds .89 of the passkeys, ABF .60 and NTK .02",
        lambda: passkeys(["YaRN", "ABF", "NTK"], 8),
    ),
    (
        "docs/results/tables.md",
        "YaRN finds .80 (.89 after LoRA), ABF none (.24 after LoRA)",
        lambda: passkeys(["YaRN"], 16) + passkeys(["YaRN"], 16, lora=True) + passkeys(["ABF"], 16, lora=True),
    ),
    (
        "README.md",
        "127 of the 196 causal language models",
        lambda: [result("families")["counts"]["works"], len(result("families")["results"])],
    ),
    ("docs/measure.md", "8393 MB beside a small model", lambda: [memory("lm_eval")]),
    ("docs/measure.md", "454 MB in one pass, and 206 MB in chunks", lambda: [memory("one_pass"), memory("chunked")]),
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
    (
        "docs/gpu.md",
        "1.54 s, .999 × Trainer | 7.88 s, .999 ×",
        lambda: [
            lora_step("trl", 8192)["model_ms"] / 1000,
            lora_step("trl", 8192)["model_ms"] / lora_step("trainer", 8192)["model_ms"],
            lora_step("trl")["model_ms"] / 1000,
            lora_step("trl")["model_ms"] / lora_step("trainer")["model_ms"],
        ],
    ),
    ("docs/results/tables.md", "The SmolLM2 study took 17 hours", lambda: [result("study_smollm2")["minutes"] / 60]),
    ("docs/results/tables.md", "In the last quarter perplexity is 25", lambda: [gemma("yarn:factor=2")]),
    ("docs/results/tables.md", "perplexity is 25 under both", lambda: [gemma("abf:factor=4")]),
    (
        "docs/results/tables.md",
        "Up to 8192 tokens YaRN costs 3 to 4 %, and ABF 6 to 12 %",
        lambda: [8192, *lost("yarn"), *lost("abf")],
    ),
    ("docs/results/tables.md", "| 25.9 | 120 |", lambda: smollm2_at_32k("default")),
    ("docs/results/tables.md", "its factor raised to 4 | 27.4 | 30.5 |", lambda: [4, *smollm2_at_32k("yarn:factor=2")]),
    ("docs/results/tables.md", "| 10.4, 9.7, .93 |", lambda: on_scaled("gemma3-linear", "abf:factor=4")),
    (
        "docs/results/caches.md",
        "| `llama.cpp:q4_0` | .059 | 4 | 7 | 6 | 10 | 78 |",
        lambda: [
            row(result("cache_damage")["summary"], model="smollm2", format="llama.cpp:q4_0")["kl"],
            *workload("smollm2", "llama.cpp:q4_0", "passkey", "lookup", "rows", "sums", "code")[::2],
        ],
    ),
    (
        "docs/results/caches.md",
        "by 1.1 nats in look-ups, 3.0 in rows, .94 in sums and .19 in code",
        lambda: workload("smollm2", "llama.cpp:q4_0", "lookup", "rows", "sums", "code")[1::2],
    ),
    ("docs/results/caches.md", "| 7.9 | .061 | 6.9 |", lambda: keys_kl("qwen-1.5b", "2")),
    ("docs/results/caches.md", "| 7.6 | .0074 | 6.6 |", lambda: keys_kl("qwen-1.5b", "3")),
    ("docs/results/caches.md", "| 7.8 | .0025 | 6.3 |", lambda: keys_kl("qwen-1.5b", "4")),
    (
        "docs/results/caches.md",
        "KL from .227 to .074 on SmolLM2 and from .549 to .090 on",
        lambda: [
            value
            for pair in zip(kl("pair_bits", "uniform 3"), kl("pair_bits", "energy 3"), strict=True)
            for value in pair
        ],
    ),
    (
        "docs/results/tables.md",
        "11.4, 10.8, .99** | 12.4, 12.1, .97 |",
        lambda: on_scaled("llama-llama3", "llama3:factor=2") + on_scaled("llama-yarn", "llama3:factor=2"),
    ),
    (
        "docs/results/tables.md",
        "12.1, 11.2, .95 | **11.5, 10.6, .96** |",
        lambda: on_scaled("llama-llama3", "yarn:factor=2") + on_scaled("llama-yarn", "yarn:factor=2"),
    ),
    (
        "docs/results/tables.md",
        "| 10.3, 10.0, .56 |",
        lambda: on_scaled("gemma3-linear", "default"),
    ),
    ("docs/results/tables.md", "**10.9, 10.1, .81** |", lambda: on_scaled("gemma3-linear", "pi:factor=2")),
    (
        "docs/results/tables.md",
        "costs SmolLM2 97 % in all 30 layers, Gemma 8.6 % in its",
        lambda: [rise("smollm2", "0.75", "all"), 30, rise("gemma3", "0.625")],
    ),
    ("docs/results/tables.md", "it costs Qwen 54.7 %", lambda: price("qwen", "p_rope:p=0.5")[1:]),
    ("docs/results/tables.md", "yet only 1.6 % in", lambda: price("qwen", "p_rope:p=0.5")[:1]),
    ("docs/results/tables.md", "| 4.0 | 3.5 |", lambda: without_factor("smollm2")),
    ("docs/results/tables.md", "| 1.4 | 0.5 |", lambda: without_factor("gemma3")),
    ("docs/results/tables.md", "| 6.6 | 0.0 |", lambda: without_factor("qwen")),
    ("docs/results/tables.md", "32768 to 65536 | 5.71 | 5.69 | 5.70 |", lambda: [32768, 65536, *extended_gemma()]),
    ("docs/results/tables.md", "| `passkey` | −0.29 | −0.70 | −0.42 |", lambda: answers("passkey")),
    ("docs/results/tables.md", "| −1.1 | −1.4 | −1.6 |", lambda: answers("niah_multikey_2")),
    ("docs/results/tables.md", "| −3.7 | −4.1 | −8.3 |", lambda: answers("json_kv")),
    (
        "docs/results/tables.md",
        "by +0.12 % on SmolLM2 and +0.18 % on Gemma (three windows of 8192",
        lambda: [*needle_shift(8192), 8192],
    ),
    ("docs/results/tables.md", "worse by 0.8 % and 1.0 %", lambda: gemma_abf()[:2]),
    ("docs/results/tables.md", "its price of 1.6 % is not", lambda: gemma_abf()[2:]),
    ("docs/results/tables.md", "by +1.3 % on the toy Llama and +0.9 % on", lambda: needle_shift(256)),
    ("docs/results/tables.md", "and 52 unpatched.", lambda: [gemma("default")]),
    ("docs/methods/p_rope.md", "differs by 0.1 % from", lambda: [abs(rise("gemma3", "0.75", lora=True))]),
    (
        "docs/results/caches.md",
        "and of `kivi-2` from .23 to .49.",
        lambda: [by_position("kivi-2", "0-1024"), by_position("kivi-2", "8192-16384")],
    ),
    (
        "docs/results/tables.md",
        "13.8, 12.1, 0.58 |",
        lambda: (
            [toy("NTK", 4, lora=True)["perplexity"][key] for key in ("256", "1024")] + passkeys(["NTK"], 4, lora=True)
        ),
    ),
    (
        "docs/results/tables.md",
        "| YaRN | 15.0, 12.4, 0.91 |",
        lambda: [toy("YaRN", 4)["perplexity"][key] for key in ("256", "1024")] + passkeys(["YaRN"], 4),
    ),
    (
        "docs/results/tables.md",
        "| `yarn:factor=2` | 35.5 | 29.9 | 30.0 | 31.7 |",
        lambda: [2.0, *(smollm2("yarn", span) for span in ("0-1024", "4096-8192", "8192-12288", "12288-16384"))],
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


@pytest.mark.parametrize(
    ("words", "values", "agrees"),
    [
        ("It is 12.5.", [12.4321], False),
        ("It is .91 and .96.", [0.911, 0.954], False),
        ("It is .91.", [0.911, 0.954], False),
        ("SmolLM2-135M reads 3 %.", [3.2], True),
    ],
)
def test_numbers_agree_where_they_round_to_what_is_written(words, values, agrees):
    assert (disagreement(words, values) is None) == agrees


def test_the_script_of_a_result_is_there_or_its_commit_is_named():
    folder = ROOT / "benchmarks"
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = {name for _, results in rows for name in re.findall(r"`(\w+)`", results)}
    results = {path.stem for path in (folder / "results").glob("*.json")}
    without = {name for name in results - named if not (folder / f"{name}.py").is_file()}
    assert not without, f"name the commit of {', '.join(sorted(without))} in benchmarks/README.md"
