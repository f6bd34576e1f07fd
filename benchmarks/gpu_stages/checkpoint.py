"""Stage f: a real checkpoint, SmolLM2-135M-Instruct, at four times its context: the study's cells that need a GPU."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import smollm2_cells as study_cells
from gpu_stages.base import Cell, Results, Setting, Stage
from gpu_stages.manifest import join
from public_checkpoint import SMOLLM2, plain_folder
from rope_patch.files import write_atomically
from rope_patch.packaged import data_path
from smollm2_cells import HELD_OUT, QUICK, Sizes, Study

FACTOR = 4
SIZES = Sizes(rows=1600)
"""Rows of 2048 tokens to train on: as many tokens in rows of 32768 are 100."""
TABLES = ("default", "yarn", "p_rope-0.75", "ntk", "abf", "mrrope")
ADAPTED = ("yarn", "default", "p_rope-0.75")
SEEDS = 3


def study_of(setting: Setting) -> Study:
    """Return the study of the weights and novels that were brought; in a rehearsal of a bundled checkpoint."""
    root = setting.work / ("study-tiny" if setting.tiny else "study")
    novels = root / "novels"
    novels.mkdir(parents=True, exist_ok=True)
    for path in novels.glob("*.txt"):  # of an earlier run, perhaps with other texts
        path.unlink()
    if setting.tiny:
        text = "\n\n".join(setting.texts.values())
        for number, name in enumerate([*HELD_OUT, "another.txt"]):
            (novels / name).write_text(text[number * 500 :] + 8 * text, encoding="utf-8")
        folder = data_path("assets") / "llama"
    else:
        for name, text in setting.texts.items():
            (novels / name).write_text(text, encoding="utf-8")
        if not (setting.carried / SMOLLM2.model / "config.json").is_file():
            join(setting.carried)
        folder = plain_folder(setting.carried)
    sizes = setting.size(SIZES, QUICK)
    return Study(folder, novels, novels / HELD_OUT[0], root, sizes, setting.device)


def study_cell(kind: str, table: str, state: str, setting: Setting, seed: int = 0) -> study_cells.Cell:
    """Return a cell of the study at four times the context."""
    return study_cells.Cell(kind, table, state, FACTOR * setting.size(SIZES, QUICK).context, FACTOR, seed)


def measure(setting: Setting, asked: Sequence[study_cells.Cell], _: Results) -> dict[str, Any]:
    """Measure cells of the study one after another: what trains or fits a table comes before what reads it.

    They are one cell here, so that a cell needs no files of another run.
    """
    setting.drop()
    study = study_of(setting)
    found: dict[str, Any] = {}
    for cell in asked:
        found[cell.kind] = study_cells.MEASURES[cell.kind](study, cell)
        if cell.kind == "fit":  # from where the others read its table
            write_atomically(study.path(cell), json.dumps(found["fit"]))
    last = asked[-1]
    return {"table": last.table, "state": last.state, "seed": last.seed, "patch": study.named(last), **found}


def cells(setting: Setting) -> list[Cell]:
    """Return the cells: tables as they are, LoRA at full length, a fitted table; a rehearsal has one of each."""
    about = {"text": setting.text_sha256, "rows": setting.size(SIZES, QUICK).rows}
    tables, adapted, seeds = setting.size((TABLES, ADAPTED, SEEDS), (TABLES[1:2], ADAPTED[:1], 1))
    make = partial(study_cell, setting=setting)
    listed = []
    for table in tables:
        parts = [make(kind, table, "zero") for kind in ("text", "passkey")]
        listed.append(Cell(f"{table}", setting.seconds(27), partial(measure, setting, parts), ("novels",), about))
    for seed in range(seeds):
        for table in adapted:
            parts = [make(kind, table, "full", seed=seed) for kind in ("train", "text", "passkey")]
            needs = ("novels", "omegaconf", "datasets")
            name = f"lora-{table}-seed{seed}"
            listed.append(Cell(name, setting.seconds(160), partial(measure, setting, parts), needs, about))
    parts = [make(kind, "fitted", "zero") for kind in ("fit", "text", "passkey")]
    fitted = Cell("fitted", setting.seconds(120), partial(measure, setting, parts), ("novels",), about)
    listed.insert(len(tables) + len(adapted), fitted)
    return listed


def summary(done: Results) -> dict[str, Any]:
    """Return perplexity by position and passkeys, of every table that was measured."""
    return {
        name: {
            "perplexity": {span: round(math.exp(statistics.fmean(n)), 2) for span, n in cell["text"]["nll"].items()},
            "passkeys": f"{sum(cell['passkey']['correct'])} of {len(cell['passkey']['correct'])}",
        }
        for name, cell in done.items()
        if "text" in cell
    }


STAGE = Stage(
    "f",
    "SmolLM2-135M at 32k",
    "The study of SmolLM2-135M-Instruct at four times its context of 8192: perplexity by position and passkeys of six "
    "tables, LoRA on rows of 32k under three of them (three seeds), and a table that is fitted.",
    cells,
    needs=("smollm2",),
    summary=summary,
)
