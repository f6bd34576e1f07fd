"""Time a patched model and the original one in pairs: prefill and decoding, every method, Llama and Gemma shapes.

    python benchmarks/patch_overhead.py -o benchmarks/results/patch_overhead.json

Both models hold the same weights and run in turn, in an order that alternates, so that other work of the machine
affects both. The figure is the median over pairs of patched time / original time; below 1 the patch is faster.
"""

from __future__ import annotations

import argparse
import copy
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache, Gemma3TextConfig, LlamaConfig

import rope_patch
from measuring import command, environment, ratio, time_in_turn, write
from rope_patch.methods import METHODS
from rope_patch.patching.cache_argument import cache_argument
from rope_patch.patching.locate import locate

SIZE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
SHAPES = {
    "llama": LlamaConfig(**SIZE),
    "gemma3": Gemma3TextConfig(**SIZE, layer_types=["sliding_attention", "full_attention"] * 3, sliding_window=512),
}


def build(shape: str, options: argparse.Namespace) -> Any:
    """Return a random model of a shape; the same weights at every call."""
    torch.manual_seed(0)
    config = copy.deepcopy(SHAPES[shape])  # models built from one config object share it, and a patch changes it
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return model.to(options.device).eval()


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor) -> None:
    """Read a prompt."""
    model.model(ids, use_cache=False)


class Decoding:
    """A prompt of 16 tokens that is continued by one token per call; it starts again after ``steps`` tokens."""

    def __init__(self, model: Any, ids: torch.Tensor, steps: int) -> None:
        self.model, self.ids, self.steps, self.done = model, ids, steps, steps

    @torch.no_grad()
    def prepare(self) -> None:
        """Start again after ``steps`` tokens; this is not timed."""
        if self.done == self.steps:
            self.cache, self.done = DynamicCache(config=self.model.config), 0
            self.model.model(self.ids[:, :16], **{cache_argument(self.model.model): self.cache}, use_cache=True)

    @torch.no_grad()
    def __call__(self) -> None:
        """Decode one token."""
        self.model.model(self.ids[:, :1], **{cache_argument(self.model.model): self.cache}, use_cache=True)
        self.done += 1


@torch.no_grad()
def rotary(model: Any, positions: torch.Tensor, steps: int) -> None:
    """Call only the rotary module, as decoding does at each step."""
    module, x = locate(model).module, model.model.embed_tokens.weight[:1]
    kinds = model.config.rope_parameters if "full_attention" in model.config.rope_parameters else (None,)
    for _ in range(steps):
        for kind in kinds:
            module(x, positions) if kind is None else module(x, positions, layer_type=kind)


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


def main() -> None:
    """Measure all cases, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prefill")
    parser.add_argument("--steps", type=int, default=32, help="tokens decoded")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    ids = torch.randint(3, SIZE["vocab_size"], (1, options.prompt), generator=torch.Generator().manual_seed(0))
    ids = ids.to(options.device)
    positions = torch.tensor([[options.prompt]], device=options.device)
    results = []
    for shape in tqdm(SHAPES, desc="shapes"):
        stock = build(shape, options)
        for name in tqdm(METHODS, desc=shape, leave=False):
            ours = build(shape, options)
            rope_patch.apply(ours, name)
            both = (stock, ours)
            cases: dict[str, tuple[list[Callable[[], None]], int]] = {
                "prefill": ([functools.partial(prefill, m, ids) for m in both], options.repeats),
                "decode": ([Decoding(m, ids, options.steps) for m in both], options.repeats * options.steps),
                "rotary_alone": ([functools.partial(rotary, m, positions, 200) for m in both], options.repeats),
            }
            for phase, (pair, repeats) in cases.items():
                timed = paired(*pair, repeats, options.device)
                results.append({"shape": shape, "method": name, "phase": phase, **timed})
    worst = {
        phase: max(row["ratio"] for row in results if row["phase"] == phase)
        for phase in ("prefill", "decode", "rotary_alone")
    }
    report = {
        "benchmark": "patch_overhead",
        "command": command(),
        "what": "median over pairs of patched time / stock time",
        "worst_median_ratio": worst,
        "sizes": SIZE | {"prompt": options.prompt, "steps": options.steps, "repeats": options.repeats},
        "environment": {"dtype": options.dtype, **environment(device=options.device, threads=options.threads)},
        "results": results,
    }
    write(report, options.output)
    print(f"worst median ratios: {worst}", file=sys.stderr)


if __name__ == "__main__":
    main()
