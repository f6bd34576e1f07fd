"""Which rotary table keeps which of RULER's tasks: eleven tasks at exact lengths under several tables, untrained.

    make smollm2-checkpoint
    python benchmarks/ruler_study.py build/ruler -o benchmarks/results/ruler_study.json

Each cell is one comparison of a model at its lengths, on the same prompts under every table. A cell resumes from
FOLDER, which holds what is finished, so that an interrupted study goes on; ``--cells`` runs some, and the report has
those that are finished.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import rope_patch
from measuring import command, environment, write
from rope_patch.checkpoints.save_load import load
from rope_patch.evaluation.compare import UNPATCHED, compare
from rope_patch.options.evaluation import EvalSpec

YARN, WITHOUT_FACTOR = "yarn:factor={}", "yarn:factor={}:attention_factor=1"


@dataclass(frozen=True)
class Cell:
    """One comparison.

    Attributes:
        model: a folder; one name alone is a bundled checkpoint.
        methods: tables that are compared with the unpatched model.
        lengths: lengths of the prompts [tokens].
        samples: number of haystacks for each task and length.
        tasks: names of the tasks.
        dtype: data type that the model computes in.
        windows: number of windows of text.
        short_context: length of the context without which key tokens are badly predicted [tokens].
    """

    model: str
    methods: Sequence[str]
    lengths: Sequence[int]
    samples: int
    tasks: Sequence[str] = ("ruler",)
    dtype: str = "bfloat16"

    windows: int = 0
    short_context: int | None = None

    def spec(self) -> EvalSpec:
        """Return the spec of the comparison."""
        return EvalSpec(
            self.lengths,
            depths=(0.1, 0.5, 0.9),
            samples=self.samples,
            tasks=self.tasks,
            windows=self.windows,
            short_context=self.short_context,
        )


SMOLLM2 = "build/smollm2/SmolLM2-135M-Instruct"
QWEN = "build/qwen/Qwen2.5-Coder-0.5B-Instruct"
TOY_TABLES = (YARN.format(4), WITHOUT_FACTOR.format(4), "abf:factor=50", "p_rope:p=0.5")
TWICE = (YARN.format(2), WITHOUT_FACTOR.format(2), "abf:factor=4")
TOY_LENGTHS = (128, 256, 512, 1024, 2048)
CELLS = {
    "toy llama, short tasks": Cell("llama", TOY_TABLES, TOY_LENGTHS, 34, ("passkey", "niah"), "float32"),
    "toy gemma3, short tasks": Cell("gemma3", TOY_TABLES, TOY_LENGTHS, 34, ("passkey", "niah"), "float32"),
    "toy llama": Cell("llama", TOY_TABLES, (1024,), 4, dtype="float32"),
    "toy llama, text": Cell("llama", TOY_TABLES, TOY_LENGTHS, 1, (), "float32", 32, 64),
    "toy gemma3, text": Cell("gemma3", TOY_TABLES, TOY_LENGTHS, 1, (), "float32", 32, 64),
    "smollm2, text": Cell(SMOLLM2, (*TWICE, "p_rope:p=0.75"), (8192, 16384), 1, (), windows=2, short_context=1024),
    "smollm2, 4k": Cell(SMOLLM2, (*TWICE[::2], "p_rope:p=0.75"), (4096,), 3),
    "smollm2, 16k": Cell(SMOLLM2, TWICE[:1], (16384,), 1),
    "smollm2, 8k": Cell(SMOLLM2, TWICE[::2], (8192,), 2),
    "qwen 0.5b, 4k": Cell(QWEN, TWICE[:1], (4096,), 3),
}
"""Cells in the order in which they are run. The toys' tokens are short: no task of RULER's fits into their context."""


def run(name: str, cell: Cell, folder: Path) -> dict[str, Any]:
    """Return what one cell measured."""
    source = cell.model
    if "/" not in source:
        source = str(rope_patch.data_path("assets") / source)
    model = load(source, dtype=cell.dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(source)
    finished = folder / f"{Path(cell.model).name}.jsonl"
    comparison = compare(model, tokenizer, [UNPATCHED, *cell.methods], cell.spec(), resume=finished)
    columns = [column for column in comparison.columns() if column.metric != "logprob"]
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(comparison.rows):
        scores: dict[str, dict[str, Any]] = {}
        for column in columns:
            score: dict[str, Any] = {"score": round(column.values[number], 4)}
            if number:
                change = comparison.difference(row.label, UNPATCHED, column.metric, column.span)
                score["change"] = [round(value, 4) for value in change]
            scores.setdefault(column.span.task or column.metric, {})[str(column.span)] = score
        rows.append({"method": row.label, "scores": scores})
    text = comparison.rows[0].scores.perplexity
    tokens = {}
    if text is not None and text.key_tokens is not None:
        tokens = {"tokens": text.tokens, "key tokens": text.key_tokens.tokens}
    return {
        "cell": name,
        "model": comparison.model,
        "trained length": comparison.trained_length,
        "dtype": cell.dtype,
        "spec": comparison.spec.to_dict(),
        **tokens,
        "rows": rows,
    }


def main() -> None:
    """Run the cells that are asked, and write the report of those that are finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of finished work")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--cells", nargs="*", choices=CELLS, default=list(CELLS), help="cells to run; by default all")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in arguments.cells:
        cell = arguments.folder / f"{name}.json"
        if not cell.exists():
            write(run(name, CELLS[name], arguments.folder), cell)
    finished = [arguments.folder / f"{name}.json" for name in CELLS]
    cells: list[Mapping[str, Any]] = [json.loads(path.read_text()) for path in finished if path.exists()]
    missing = [path.stem for path in finished if not path.exists()]
    head = {"benchmark": "ruler_study", "what": (__doc__ or "").partition("\n")[0], "command": command()}
    measured = {"environment": environment(threads=arguments.threads), "not run": missing, "cells": cells}
    write(head | measured, arguments.output)


if __name__ == "__main__":
    main()
