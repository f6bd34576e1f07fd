"""Stage b: the time that a patch costs in prefill and in decoding."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import rope_patch
from gpu_stages.base import Cell, Results, Setting, Stage, twin
from measuring import ratio, time_in_turn
from rope_patch.patching.cache_argument import cache_argument

MODELS = {"Llama-3.2-1B": 1.0, "Llama-3.1-8B": 3.0}
"""Shapes, and the time that each takes relative to the first."""
METHODS = ("yarn:factor=4", "p_rope:p=0.75")
PHASES = ("prefill", "decode")


@torch.no_grad()
def prefill(model: Any, ids: Tensor) -> None:
    """Read a prompt."""
    model.model(ids, use_cache=False)


class Decoding:
    """A prompt of 16 tokens that is continued by one token per call; it starts again after ``steps`` tokens."""

    def __init__(self, model: Any, ids: Tensor, steps: int) -> None:
        self.model, self.ids, self.steps, self.done = model, ids, steps, steps

    def prepare(self) -> None:
        """Start again after ``steps`` tokens; this is not timed."""
        if self.done == self.steps:
            self.cache, self.done = DynamicCache(config=self.model.config), 0
            self._read(self.ids[:, :16])

    def __call__(self) -> None:
        """Decode one token."""
        self._read(self.ids[:, :1])
        self.done += 1

    @torch.no_grad()
    def _read(self, ids: Tensor) -> None:
        self.model.model(ids, **{cache_argument(self.model.model): self.cache}, use_cache=True)


def paired(stock: Callable[[], None], ours: Callable[[], None], repeats: int, device: str) -> dict[str, float]:
    """Time both alternately; return the median ratio, its quartiles and both medians [s]."""
    wall = time_in_turn({"stock": stock, "patched": ours}, repeats, warm_up=2, device=device)["wall"]
    wall_ratio = ratio(wall, "patched", "stock")
    return {
        "ratio": wall_ratio["median"],
        "ratio_q1": wall_ratio["q1"],
        "ratio_q3": wall_ratio["q3"],
        "pairs": repeats,
        "stock_s": round(statistics.median(wall["stock"]), 7),
        "patched_s": round(statistics.median(wall["patched"]), 7),
    }


def overhead(setting: Setting, name: str, method: str, phase: str, _: Results) -> dict[str, Any]:
    """Time a patched and an unpatched model alternately."""
    model = setting.held(("overhead", name), lambda: setting.random_model(name))
    both = [model, twin(model)]
    rope_patch.apply(both[1], method, target_length=32768)
    tokens, steps, rounds = setting.size((8192, 64, 20), (64, 4, 2))
    ids = setting.ids(tokens, model.config.vocab_size)[None]
    works: list[Callable[[], None]]
    if phase == "prefill":
        works = [partial(prefill, one, ids) for one in both]
    else:
        # A round decodes a single token, so there are more rounds than for a prefill.
        works, rounds = [Decoding(one, ids, steps) for one in both], rounds * steps // 4
    timed = paired(works[0], works[1], rounds, setting.device)
    return {"tokens": tokens if phase == "prefill" else 1, **timed}


def cells(setting: Setting) -> list[Cell]:
    """Return the cells; decoding comes first, since small kernels weigh most there."""
    listed = []
    for name, factor in MODELS.items():
        for phase in reversed(PHASES):
            for method in METHODS:
                measure = partial(overhead, setting, name, method, phase)
                seconds = setting.seconds(factor * (20 if phase == "decode" else 12))
                listed.append(Cell(f"{phase}-{name}-{method.partition(':')[0]}", seconds, measure))
    return listed


def summary(done: Results) -> dict[str, Any]:
    """Return the largest ratio of each phase."""
    found = {}
    for phase in PHASES:
        ratios = [c["ratio"] for name, c in done.items() if name.startswith(phase) and "ratio" in c]
        if ratios:
            found[f"{phase}: largest median of patched / unpatched time"] = max(ratios)
    return found


STAGE = Stage(
    "b",
    "overhead of a patch",
    "Time of a patched model against the unpatched one, bfloat16, in turn: a prefill of 8192 tokens and decoding token "
    "by token, random weights in the shapes of 1B and 8B models.",
    cells,
    summary=summary,
)
