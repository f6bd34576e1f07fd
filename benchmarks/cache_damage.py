"""What breaks first as a cache gets fewer bits, and what mends it, on four public models.

    python benchmarks/cache_damage.py --text moby_dick.txt -o benchmarks/results/cache_damage.json

The checkpoints must be in build (``make smollm2-checkpoint gemma3-checkpoint qwen-checkpoint``, and ``SIZE=1.5b``).
There are cells of two kinds, of which ``--cells 'keys-smollm2-*'`` chooses some and ``--list`` shows all:

- "workload": a format reads texts in which answers are graded (``graded_texts.py``), and windows of the novel for KL.
- "keys": keys alone are rounded to 2, 3 or 4 bits with a scale per token and head. The squared error of the attention
  logits is divided among its causes as ``kv-check`` does, and KL is measured with one change of the format at a time.

The report is written after each cell; a cell that it holds is not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from transformers import AutoTokenizer

import rope_patch
from graded_texts import LENGTH, WORKLOADS, GradedText, graded_text
from measuring import chosen_cells, environment, finished_cells, write
from public_checkpoint import BUILD, CHECKPOINTS
from rope_patch.evaluation.intervals import paired_means, wilson
from rope_patch.evaluation.texts.documents import spread_windows
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.plans import LayerPlan
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.attention_errors import attention_errors
from rope_patch.kv_evaluation.attribution import Change, error_shares, key_offsets, without_causes
from rope_patch.kv_evaluation.decoding import kl_by_position
from rope_patch.modeling.attention_layers import AttentionLayer, find_attention_layers, split_pairs
from rope_patch.modeling.capture import capture
from rope_patch.modeling.scoring import Reader
from rope_patch.modeling.state_statistics import Capture

MODELS = ("smollm2", "gemma3", "qwen", "qwen-1.5b")
WINDOWS = {"qwen-1.5b": 1}
"""Number of windows of the novel, 2 if none is stated."""
TEXTS = {"passkey": 4}
"""Number of texts of a workload, 2 if none is stated; half as many for a model that reads one window."""
FORMATS = ("none", "llama.cpp:q4_0", "vllm:fp8", "kivi-2", "vllm:turboquant-3", "llama.cpp:q8_0", "vllm:turboquant-4")
"""Formats of the whole cache, full precision first and then the most telling ones."""
EXTENDED = "yarn:factor=2"
UNROTATED = "p_rope:p=0.75"
"""The table under which features of keys do not rotate; on Gemma 3 270M it costs nothing at these lengths."""
BITS = (3, 2, 4)
"""Bits of keys, the most telling first."""
STRIDE = 4
"""Distributions are compared at every fourth token."""


class Cell(NamedTuple):
    """One measurement.

    Attributes:
        kind: a key of :data:`MEASURES`.
        model: the checkpoint, a key of ``public_checkpoint.CHECKPOINTS``.
        table: a method string.
        what: what is measured: the number of bits, as text, or the format.
    """

    kind: str
    model: str
    table: str
    what: str

    @property
    def name(self) -> str:
        """What ``--cells`` calls it."""
        return "-".join(self)


def all_cells() -> Iterator[Cell]:
    """Yield all cells: those of small models and the plain table first."""
    for model in MODELS:
        yield from (Cell("workload", model, "default", name) for name in FORMATS)
    for model in MODELS:
        yield from (Cell("keys", model, "default", str(bits)) for bits in BITS)
        yield Cell("keys", model, EXTENDED, str(BITS[0]))
        if model == "gemma3":
            yield from (Cell("keys", model, UNROTATED, str(bits)) for bits in BITS)
    for model in MODELS:
        yield from (Cell("keys", model, EXTENDED, str(bits)) for bits in BITS[1:])


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model under a table, and what all its cells need.

    Attributes:
        model: the model in bfloat16.
        tokenizer: the tokenizer of the model.
        layers: its attention layers.
        windows: (windows, tokens) token ids of the novel.
        digest: the digest of the novel.
        exact: the last hidden states of each window in full precision: (tokens, features).
    """

    model: Any
    tokenizer: Any
    layers: Sequence[AttentionLayer]
    windows: Tensor
    digest: str
    exact: list[Tensor]

    @functools.cached_property
    def statistics(self) -> Capture:
        """The statistics of queries and keys on the windows."""
        return capture(self.model, self.windows)

    @torch.no_grad()
    def kl(self, cache: Callable[[], Any]) -> list[float]:
        """Return the mean KL(full precision ‖ cache) of each window, at every fourth token [nats/token]."""
        reader = Reader(self.model)
        means = []
        for row, exact in zip(self.windows, self.exact, strict=True):
            rough = last_states(reader, row, cache())
            means.append(float(kl_by_position(reader, exact[::STRIDE], rough[::STRIDE])[0].mean()))
        return means


@functools.lru_cache(maxsize=1)
def load(text: Path, model: str, table: str) -> Loaded:
    """Load a model under a table, and read the windows of a novel."""
    folder = BUILD / model / CHECKPOINTS[model].model
    loaded = rope_patch.load(folder, dtype=torch.bfloat16).eval()
    if table != "default":
        stated = loaded.config.max_position_embeddings
        rope_patch.apply(loaded, table, target_length=2 * stated if table == EXTENDED else None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows, digest = spread_windows(tokenizer, text.read_text(encoding="utf-8"), LENGTH, WINDOWS.get(model, 2))
    ids = torch.stack([window.ids for window in windows])
    exact = [last_states(Reader(loaded), row, None) for row in ids]
    return Loaded(loaded, tokenizer, find_attention_layers(loaded), ids, digest, exact)


@torch.no_grad()
def last_states(reader: Reader, ids: Tensor, past: Any) -> Tensor:
    """Return the last hidden states of a text that is read through a cache: (tokens, features)."""
    return torch.cat([hidden[0] for _, hidden in reader.read(ids[None], past)])


# --- workloads: what a format changes in each


@torch.no_grad()
def grade(reader: Reader, text: GradedText, cache: Any) -> list[tuple[bool, float]]:
    """Return of each answer whether greedy decoding writes it after the right ones, and its log-probability [nats]."""
    states, graded = last_states(reader, text.ids, cache), []
    for start, stop in text.answers:
        predicted = reader.logits(states[start - 1 : stop - 1]).log_softmax(-1)
        expected = text.ids[start:stop]
        logprob = float(predicted.gather(-1, expected[:, None]).double().sum())
        graded.append((bool((predicted.argmax(-1) == expected).all()), logprob))
    return graded


def workload(loaded: Loaded, cell: Cell) -> dict[str, Any]:
    """Grade the answers that a model gives through a format, and measure KL on the novel."""
    reader, full = Reader(loaded.model), cell.what == "none"
    answers: dict[str, dict[str, list[Any]]] = {}
    with contextlib.nullcontext() if full else quantized(loaded.model, cell.what, layers=loaded.layers) as maker:
        for name in ("passkey", *WORKLOADS):
            graded = []
            for number in range(TEXTS.get(name, 2) * len(loaded.windows) // 2):
                text = graded_text(loaded.tokenizer, name, number)
                graded += grade(reader, text, None if full else maker())
            right, logprobs = zip(*graded, strict=True)
            answers[name] = {"right": right, "logprob": logprobs}
            print(f"  {name}: {sum(right)} of {len(right)}, {sum(logprobs) / len(right):.2f}", flush=True)
        kl = [] if full else loaded.kl(maker)
    return {"sha256": loaded.digest, "answers": answers, "kl": kl}


# --- keys: the causes of the error, and what makes it smaller


def changed_formats(
    bits: str, layers: Sequence[AttentionLayer], means: dict[int, Tensor], table: str
) -> dict[str, tuple]:
    """Return by name the text of a format and the change of its plans, if any, for the format itself first."""
    plain = f"k=int{bits};v=none"

    def subtract(offsets: dict[int, Tensor]) -> Change:
        return lambda plan: replace(plan, offset=offsets.get(plan.layer.index))

    found: dict[str, tuple] = {
        "none": (plain, None),
        # As many bits for scales as a scale per channel has: it tells smaller groups from the other axis.
        "scale per 32 features": (f"k=int{bits}.token32;v=none", None),
        "scale per channel": (f"k=int{bits}.channel32;v=none", None),
        "rotated": (f"k=int{bits}.hadamard;v=none", None),
        "mean subtracted": (plain, subtract(means)),
    }
    if offsets := key_offsets(layers):
        found["biases subtracted"] = (plain, subtract(offsets))
    if table == "default":
        # A scale per channel waits for 32 tokens, and leaves up to 31 of the latest in full precision.
        found["latest 31 tokens in full precision"] = (f"{plain};residual=31", None)
    if table == UNROTATED:
        found["rope apart, same bits"] = (f"{plain};rope=int{bits}", None)
        found["rope in full precision"] = (f"{plain};rope=full", None)
    return found


def without_unrotated(plan: LayerPlan, means: dict[int, Tensor]) -> LayerPlan:
    """Return a plan in which the pairs of keys that do not rotate stay exact."""
    exact = torch.zeros_like(means[plan.layer.index], dtype=torch.bool)
    for half in split_pairs(exact, plan.layer.table.pairs, plan.layer.interleaved):
        half.copy_((plan.layer.table.inv_freq == 0).expand_as(half))
    return replace(plan, exact=exact)


def keys(loaded: Loaded, cell: Cell) -> dict[str, Any]:
    """Divide the error of the logits among its causes, and measure KL with one change at a time."""
    means = {layer.index: layer.key.mean for layer in loaded.statistics.layers}
    causes = without_causes(loaded.layers, loaded.statistics)
    changes = [*causes.values(), functools.partial(without_unrotated, means=means)]
    scheme = Scheme.parse(f"k=int{cell.what};v=none")
    errors = attention_errors(loaded.model, loaded.windows[0], scheme, loaded.layers, changes)
    # Unrotated pairs are taken out alone; a cause before them is taken out with those before it.
    shares = error_shares([error[:-1] for error in errors], list(causes))
    squares = torch.stack([error.square().sum(1) for error in errors]).sum(0)
    kl = {}
    for name, (text, change) in changed_formats(cell.what, loaded.layers, means, cell.table).items():
        with quantized(loaded.model, text, layers=loaded.layers) as maker:
            if change is not None:
                maker.run.plans = {index: change(plan) for index, plan in maker.run.plans.items()}
            kl[name] = loaded.kl(maker)
        print(f"  {name}: {sum(kl[name]) / len(kl[name]):.4f}", flush=True)
    return {
        "sha256": loaded.digest,
        "shares": shares,
        "share of unrotated pairs": float(1 - squares[-1] / squares[0]),
        "kl": kl,
    }


MEASURES: dict[str, Callable[[Loaded, Cell], dict[str, Any]]] = {"workload": workload, "keys": keys}


# --- running and reporting


def intervals(graded: dict[str, dict[str, Any]], full: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return for each workload the share of right answers and the change of their log-probability, with 95 % intervals.

    They are over answers, as if these were independent, though up to eighty stand in one text.
    """
    compared = {}
    for name, answers in graded.items():
        right, logprob, plain = answers["right"], answers["logprob"], full[name]["logprob"]
        change = fmean(logprob) - fmean(plain)
        compared[name] = {
            "right": [sum(right), len(right), *wilson(sum(right), len(right))],
            "change of logprob": [change, *paired_means(logprob, plain)],
        }
    return compared


def summary(done: dict[Cell, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each format changes in each workload, beside the KL of the novel."""
    rows = []
    for cell, result in done.items():
        full = done.get(cell._replace(what="none"))
        if cell.kind == "workload" and full:
            kl = fmean(result["kl"]) if result["kl"] else 0.0
            compared = intervals(result["answers"], full["answers"])
            rows.append({"model": cell.model, "format": cell.what, "kl": kl, **compared})
    return rows


def report_of(done: dict[Cell, dict[str, Any]], text: Path) -> dict[str, Any]:
    """Return the report of the cells that are done, in the order of all cells."""
    return {
        "benchmark": "cache_damage",
        "command": f"python benchmarks/cache_damage.py --text {text.name} -o benchmarks/results/cache_damage.json",
        "what": "graded answers of five workloads through cache formats, with log-probabilities of the right answers "
        "[nats]; the causes of the error of the attention logits, and KL [nats/token] with keys of few bits and one "
        f"change at a time. Texts of {LENGTH} tokens, bfloat16, logits in float32; lists are by answer or by window",
        "environment": environment(threads=torch.get_num_threads()),
        "unfinished": [cell.name for cell in all_cells() if cell not in done],
        "summary": summary({cell: done[cell] for cell in all_cells() if cell in done}),
        "cells": [done[cell] for cell in all_cells() if cell in done],
    }


def main() -> None:
    """Measure the cells that are asked for and not finished, and report all that are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="a novel as a text file")
    parser.add_argument("--cells", nargs="*", default=["*"], help="names of cells, with * for any text (all)")
    parser.add_argument("--list", action="store_true", help="show the cells and stop")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSON report, which goes on if it exists")
    args = parser.parse_args()
    done = finished_cells(Cell, args.output)
    chosen = chosen_cells(all_cells(), args.cells)
    if not chosen or not args.text.is_file():
        parser.error(f"no cell is called {' '.join(args.cells)}" if not chosen else f"no file {args.text}")
    for cell in chosen:
        if args.list:
            print("finished" if cell in done else "        ", cell.name)
        elif cell not in done:
            print(cell.name, flush=True)
            loaded = load(args.text, cell.model, cell.table)
            began = time.process_time()
            result = MEASURES[cell.kind](loaded, cell)
            seconds = round(time.process_time() - began, 1)
            done[cell] = {**cell._asdict(), "cpu_seconds": seconds, **result}
            write(report_of(done, args.text), args.output)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the same command goes on")
