"""Rehearses readings and a training step of Llama 3.1 8B as on an H100, without one.

The real code runs on the pretended GPU of the tests, whose long tensors hold no numbers, and a meter prices every
operation. Two and three layers are run; the 32 of the model follow, since each layer adds the same. Nothing is timed,
so the rows are the same on every machine.

Of the two clocks ``ideal_ms`` is the sum over kernels of the time that a data sheet allows. For ``model_ms`` host and
GPU run beside each other: a kernel begins when the host has launched it and the one before it has ended, and runs at a
share of the peak that was measured (``results/gpu.json``). Kernels that torch chooses by shape, half-empty kernels and
holes in memory are not modelled.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import CausalBias

import rope_patch
from gpu_stages import reading, training
from gpu_stages.base import Setting, gib
from measuring import random_ids
from rope_patch.kv_cache.cache import quantized

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
from support import pretended_gpu

BANDWIDTH, IDEAL_KERNEL = 3.35e12, 4e-6
"""Of an H100 SXM's data sheet [bytes/s], and the least time of a kernel by the ideal clock [s]."""
PEAKS = {torch.bfloat16: 989e12, torch.float16: 989e12}
OTHER_PEAK = 67e12
"""Dense peaks by dtype, and that of float32 without TF32 [FLOP/s]."""
SHARES = {"matmul": 0.64, "memory": 0.80, "flash": 0.62, "flash_backward": 0.435, "efficient": 0.056}
"""Measured shares of the peaks; ``efficient`` is the kernel that attends with a mask."""
KERNEL, LAUNCH, VIEW, WAIT = 2e-6, 16e-6, 1.5e-6, 15e-6
"""The least time of a kernel, and the host's time for a launch, for a view or empty tensor, and after a wait [s]."""
FREE = ("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
GATHERS = ("index", "gather", "embedding", "index_select", "nll_loss_forward")
SCATTERS = ("index_put_", "_index_put_impl_", "scatter_", "index_copy_", "index_add_", "scatter")
LAYERS = (2, 3)
LENGTHS = (8192, 32768)
Cell = tuple[int, str, str]
"""A length, what is done, and by which side."""


class Meter:
    """Prices what runs on the pretended GPU, since :meth:`begin`."""

    def __init__(self) -> None:
        self.held = 0
        self.sizes: dict[int, int] = {}
        self.begin()

    def begin(self) -> None:
        """Count from now on."""
        self.ideal = self.host = self.gpu = 0.0
        self.launches = self.waits = 0
        self.before = self.peak = self.held

    def holds(self, storage: Any) -> None:
        """Count the memory of a tensor until it is freed."""
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.held -= self.sizes.pop(key)

    def wait(self) -> None:
        """Let the host wait for the GPU."""
        self.waits += 1
        self.host = self.gpu = max(self.host, self.gpu) + WAIT

    def run(self, function: Any, name: str, args: Any, out: Any) -> None:
        """Price an operation by its FLOPs and the bytes that it reads and writes."""
        if function.is_view or name in FREE:
            self.host += VIEW
            return
        read = pretended_gpu.tensors_in(args)
        written = pretended_gpu.tensors_in(out)
        moved = sum(map(size_of, read))
        if name in GATHERS:
            moved = sum(map(size_of, written))
        elif name in SCATTERS:
            moved = 2 * sum(map(size_of, read[1:])) - sum(map(size_of, written))
        elif name == "copy_":
            moved -= size_of(read[0])
        moved += sum(map(size_of, written))
        flops, share = 0, "matmul"
        if "attention" in name:
            flops, share = attention_flops(name, args)
        elif name in PRODUCTS:
            flops = 2 * written[0].numel() * read[-2].shape[-1]
        self.kernel(flops, moved, PEAKS.get((read or written)[0].dtype, OTHER_PEAK), share)

    def kernel(self, flops: float, moved: float, peak: float, share: str) -> None:
        """Add a kernel to both clocks."""
        self.launches += 1
        self.ideal += max(flops / peak, moved / BANDWIDTH, IDEAL_KERNEL)
        self.host += LAUNCH
        took = max(flops / (peak * SHARES[share]), moved / (BANDWIDTH * SHARES["memory"]), KERNEL)
        self.gpu = max(self.gpu, self.host) + took

    def result(self) -> dict[str, float]:
        """Return what was counted."""
        return {
            "ideal_ms": 1e3 * self.ideal,
            "model_ms": 1e3 * max(self.host, self.gpu),
            "launches": self.launches,
            "waits": self.waits,
            "peak_gib": gib(self.peak - self.before),
        }


def size_of(tensor: Tensor) -> int:
    """Return the number of bytes that a tensor refers to; one that is expanded refers to fewer than it has elements."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def attention_flops(name: str, args: Any) -> tuple[float, str]:
    """Return the FLOPs of an attention kernel, and its share of the peak."""
    backward = name.endswith("backward")
    query, key, value = args[backward : backward + 3]
    batch, heads, asked, width = query.shape
    pairs = asked * key.shape[2]
    if "flash" in name:
        causal = next((x for x in args if isinstance(x, bool)), False)
        pairs -= causal * asked * (asked - 1) // 2  # a mask saves no work
    flops = 2 * batch * heads * pairs * (width + value.shape[-1])
    if not backward:
        return flops, "flash" if "flash" in name else "efficient"
    return 2.5 * flops, "flash_backward" if "flash" in name else "efficient"


def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Attend through the kernel that torch chooses on an H100, in place of ``scaled_dot_product_attention``."""
    if not query.is_cuda:
        return plain_attention(query, key, value, attn_mask, *args, **kwargs)
    causal = kwargs.get("is_causal", False) or isinstance(attn_mask, CausalBias)
    scale = kwargs.get("scale")
    aten = torch.ops.aten
    if (attn_mask is None or causal) and query.dtype in PEAKS:
        return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[0]
    if kwargs.get("enable_gqa"):  # with a mask no fused kernel shares keys among heads
        kwargs.pop("dropout_p", None)
        return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, **kwargs)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, False, 0.0, causal, scale=scale)[0]


plain_attention = functional.scaled_dot_product_attention


# --- what is rehearsed: functions of a model and a number of tokens


ids_of = partial(random_ids, {"vocab": 1024})


def score(side: str, model: Any, tokens: int) -> None:
    """Score a window of random tokens, by us or by lm-eval's own code."""
    reading.scorer(side, model, tokens, tokens)(ids_of(tokens))


def ask(side: str, model: Any, tokens: int) -> None:
    """Ask for five passkeys, by us or by ``generate``."""
    reading.asker(side, model, SETTING.tokenizer, tokens)()


def read_through_cache(model: Any, tokens: int) -> None:
    """Score a window through a cache of a format, as a check of caches does for each window and format."""
    with quantized(model, FORMAT) as cache:
        rope_patch.perplexity(model, ids_of(tokens), cache=cache)


def read(model: Any, tokens: int) -> None:
    """Read a window in a plain forward pass, and score nothing."""
    model.model(ids_of(tokens)[None].to(model.device), use_cache=False)


def analyze(model: Any, tokens: int) -> None:
    """Analyze one row of text."""
    text = Path(rope_patch.data_path("assets") / "domains" / "english.txt").read_text(encoding="utf-8")
    rope_patch.analyze(model, SETTING.tokenizer, text * (1 + 8 * tokens // len(text)), window=tokens, tokens=tokens)


def read_by_hooks(model: Any, tokens: int) -> None:
    """Take the statistics of queries and keys by hooks on the projections, in a plain forward pass."""
    sums = []

    def see(module: Any, args: Any, states: Tensor) -> None:
        states = states.float()
        pairs = states.unflatten(-1, (-1, 2, model.config.head_dim // 2)).square().sum(-2)
        features = [x.mean((0, 1)) for x in (states, states.square(), pairs)]
        sums.append([*features, states.abs().amax((0, 1)), pairs.amax((0, 1))])

    attention = [layer.self_attn for layer in model.model.layers]
    hooks = [part.register_forward_hook(see) for each in attention for part in (each.q_proj, each.k_proj)]
    read(model, tokens)
    for hook in hooks:
        hook.remove()
    for values in sums:
        for value in values:
            value.cpu()


class SecondStep(training.Clock):
    """The first step, of a short row, is not counted."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Count from now on."""
        METER.begin()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Store what was counted."""
        self.counted = METER.result()


def step(side: str, model: Any, tokens: int) -> dict[str, float]:
    """Take a LoRA step of one row through TRL's trainer or transformers' own; return what the second step counted."""
    fold_tiles_at_once()
    model = get_peft_model(model, LoraConfig(r=training.RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = [{"input_ids": ids, "labels": ids} for ids in (ids_of(n) for n in (WARM_UP, tokens))]
    clock = SecondStep("cuda")
    with tempfile.TemporaryDirectory() as folder:
        training.trainer_of(model, rows, folder, clock, trl=side == "trl", optim="adamw_torch", bf16=True).train()
    return clock.counted


WARM_UP = 256
FORMAT = "vllm:fp8"
METER = Meter()
SETTING = Setting(tiny=False, device="cuda", text=())
SIDES: dict[tuple[str, str], Callable[[Any, int], Any]] = {
    ("perplexity", "ours"): partial(score, "one_pass"),
    ("perplexity", "lm_eval"): partial(score, "lm_eval"),
    ("retrieval", "ours"): partial(ask, "ours"),
    ("retrieval", "generate"): partial(ask, "generate"),
    ("kv_pass", "ours"): read_through_cache,
    ("kv_pass", "plain"): read,
    ("analyze", "ours"): analyze,
    ("analyze", "hooks"): read_by_hooks,
    ("lora_step", "trl"): partial(step, "trl"),
    ("lora_step", "trainer"): partial(step, "trainer"),
}
CELLS: list[Cell] = [(length, *side) for length in LENGTHS for side in SIDES]


def fold_tiles_at_once() -> None:
    """Price TRL's loss as its kernels for a GPU do it: a tile of logits is read once, and written over once.

    Without Triton, as here, TRL folds a tile by a dozen operations, and sums products of matrices in float32.
    """
    from trl.kernels import chunked_logprob

    def forward(tile: Tensor, _: int, targets: Tensor, largest: Tensor, total: Tensor, *__: Any, **___: Any) -> None:
        largest.copy_(tile.amax(-1))
        total.fill_(1.0)

    chunked_logprob._forward_tile = forward
    chunked_logprob._backward_tile = lambda tile, *_, **__: tile.mul_(0.5)
    chunked_logprob._addmm_fp32 = lambda total, a, b: total.add_(torch.mm(a, b))


def begin() -> None:
    """Give this process a pretended GPU, for good."""
    pretended_gpu.pretend("cuda", METER)
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    torch.cuda.device_count = lambda: 1  # with two, Trainer would split the batch
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda _: None  # it asks a real GPU
    functional.scaled_dot_product_attention = attend
    gc.freeze()


def counted(layers: int, length: int, what: str, side: str) -> dict[str, float]:
    """Return what one side costs a model of a few layers, in a process that has begun."""

    def build() -> Any:
        return SETTING.random_model(reading.MODEL, num_hidden_layers=layers, max_position_embeddings=131072)

    work = SIDES[what, side]
    if what == "lora_step":
        return work(build(), length)  # which changes the model
    model = SETTING.held(layers, build)
    with torch.no_grad():
        work(model, WARM_UP)
        gc.collect()
        METER.begin()
        work(model, length)
    return METER.result()


def rows(cells: Sequence[Cell] = CELLS, processes: int = 2) -> list[dict[str, Any]]:
    """Return a row for each cell, of as many layers as the model has."""
    jobs = [(layers, *cell) for layers in LAYERS for cell in cells]
    with multiprocessing.get_context("fork").Pool(processes, begin) as pool:
        costs = pool.starmap(counted, jobs[::-1], chunksize=1)[::-1]  # the longest jobs first
    slope = (SETTING.config(reading.MODEL).num_hidden_layers - LAYERS[0]) // (LAYERS[1] - LAYERS[0])
    found = []
    for (length, what, side), low, high in zip(cells, costs, costs[len(cells) :], strict=False):
        whole = {name: round(low[name] + (high[name] - low[name]) * slope, 3) for name in low}
        found.append({"what": what, "side": side, "length": length, **whole})
    return found
