"""Stage e: quantized caches in one pass, compared with decoding token by token, and by the size of its blocks."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gpu_stages.base import Cell, Results, Setting, Stage
from measuring import peak_of, synchronize
from rope_patch.kv_cache import attention
from rope_patch.kv_cache.cache import quantized
from rope_patch.patching.cache_argument import cache_argument

MODEL = "Llama-3.2-1B"
FORMATS = ("int4-token", "kivi-2;flush=0")
WHOLE, LONG, LAST = 1024, 32768, 256
"""Length of a text that is decoded whole; length of a long text; number of its last tokens that are decoded."""
BLOCKS = ((256, 8192), (512, 8192), (1024, 8192), (256, 32768), (512, 32768), (1024, 32768))
"""Number of queries in a block, and the number of tokens of the pass."""


def losses(model: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each target from the state before it [nats]."""
    return functional.cross_entropy(model.lm_head(hidden).double(), targets, reduction="none")


def in_one_pass(model: Any, ids: Tensor, scheme: str, last: int) -> Tensor:
    """Return the losses of the last tokens when the whole text is read in one pass."""
    with quantized(model, scheme) as factory:
        hidden = model.model(ids[None], **{cache_argument(model.model): factory()}, use_cache=True).last_hidden_state[0]
    return losses(model, hidden[-last - 1 : -1], ids[-last:])


def decoded(model: Any, ids: Tensor, scheme: str, last: int, device: str) -> tuple[Tensor, float]:
    """Return the losses of the last tokens when they are decoded, and the time of a token [s].

    The tokens before them are read in one pass that leaves the cache as decoding would; each of the last tokens is read
    in a pass of its own, through the model's own attention.
    """
    before = len(ids) - last - 1
    kept: list[Any] = []
    if before:
        with quantized(model, scheme) as factory:
            cache = factory()
            model.model(ids[None, :before], **{cache_argument(model.model): cache}, use_cache=True)
            kept = list(cache.layers)
    with quantized(model, scheme, exact=False) as factory:
        cache = factory()
        for i, layer in enumerate(kept):
            # The layers of the first cache refer to its run and plans, so the copies get those of the second one.
            cache.layers[i] = copy.deepcopy(layer)
            cache.layers[i].run, cache.layers[i].plan = factory.run, factory.run.plans[i]
        parts = []
        synchronize(device)
        began = time.perf_counter()
        for i in range(before, len(ids) - 1):
            hidden = model.model(
                ids[None, i : i + 1], **{cache_argument(model.model): cache}, use_cache=True
            ).last_hidden_state[0]
            parts.append(losses(model, hidden, ids[i + 1 : i + 2]))
        synchronize(device)
        seconds = time.perf_counter() - began
    return torch.cat(parts), seconds / last


@torch.no_grad()
def compare(setting: Setting, scheme: str, tokens: int, last: int, _: Results) -> dict[str, Any]:
    """Compare the losses and the time per token of one pass and of decoding."""
    model = setting.held("decoding", lambda: setting.random_model(MODEL, "float32"))
    ids = setting.ids(tokens, model.config.vocab_size)
    in_one_pass(model, ids[: tokens // 4], scheme, 8)  # loads kernels and libraries before anything is timed
    one_pass, usage = peak_of(lambda: in_one_pass(model, ids, scheme, last), setting.device)
    streamed, token_seconds = decoded(model, ids, scheme, last, setting.device)
    apart = (one_pass - streamed).abs()
    return {
        "tokens": tokens,
        "decoded_tokens": last,
        "one_pass_seconds": round(usage["seconds"], 4),
        "one_pass_seconds_per_token": usage["seconds"] / tokens,
        "decoded_seconds_per_token": token_seconds,
        "decoded_over_one_pass_per_token": round(token_seconds * tokens / usage["seconds"], 1),
        "one_pass_peak_bytes": usage["peak_bytes"],
        "mean_loss": float(one_pass.mean()),
        "mean_loss_difference": abs(float(one_pass.mean() - streamed.mean())),
        "largest_loss_difference": float(apart.max()),
        "dtype": "float32",
    }


@torch.no_grad()
def blocks(setting: Setting, queries: int, tokens: int, _: Results) -> dict[str, Any]:
    """Time one pass in blocks of so many queries, after a short one that loads kernels and libraries."""
    model = setting.held("blocks", lambda: setting.random_model(MODEL))
    ids = setting.ids(tokens, model.config.vocab_size)
    usual = attention.MANY_QUERIES_AT_ONCE
    attention.MANY_QUERIES_AT_ONCE = queries
    try:
        in_one_pass(model, ids[: tokens // 4], FORMATS[0], 8)
        _losses, usage = peak_of(lambda: in_one_pass(model, ids, FORMATS[0], 8), setting.device)
    finally:
        attention.MANY_QUERIES_AT_ONCE = usual
    return {"tokens": tokens, "seconds_of_pass": round(usage["seconds"], 4), "peak_bytes": usage["peak_bytes"]}


def cells(setting: Setting) -> list[Cell]:
    """Return the cells: blocks of several sizes, a text that is decoded whole, and the end of a long one."""
    listed = []
    for queries, tokens in BLOCKS:
        measure = partial(blocks, setting, queries, setting.size(tokens, 96))
        listed.append(Cell(f"blocks-{tokens}-{queries}", setting.seconds(10), measure))
    for scheme in FORMATS:
        whole, long, last = setting.size((WHOLE, LONG, LAST), (48, 96, 16))
        for tokens, count, seconds in ((whole, whole - 1, 40), (long, last, 40)):
            name = f"{scheme}-{WHOLE if tokens == whole else LONG}"
            listed.append(Cell(name, setting.seconds(seconds), partial(compare, setting, scheme, tokens, count)))
    return listed


def summary(done: Results) -> dict[str, Any]:
    """Return how much faster one pass is, and how far the losses are apart."""
    rows = {name: c for name, c in done.items() if "decoded_over_one_pass_per_token" in c}
    return {
        "decoding / one pass, time per token": {n: c["decoded_over_one_pass_per_token"] for n, c in rows.items()},
        "mean loss difference, nats": {name: c["mean_loss_difference"] for name, c in rows.items()},
    }


STAGE = Stage(
    "e",
    "quantized caches in one pass",
    "A model in the shape of Llama 3.2 1B in float32 under two cache formats: one pass that simulates decoding against "
    "decoding itself, of 1024 tokens and of the last 256 of 32768; time and losses.",
    cells,
    summary=summary,
)
