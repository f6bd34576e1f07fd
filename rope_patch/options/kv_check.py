"""The options of ``rope-patch kv-check``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.fields import OptionSet, contained, flag, number, word
from rope_patch.options.shared import CommandOptions, Machine, Patching


@dataclass(frozen=True)
class Limits(OptionSet):
    """What a safe format may cost."""

    tolerance: float = number(
        "The largest relative change of perplexity through a safe format. It also sets the largest KL: 0.0198 "
        "nats/token for 0.02.",
        0.02,
        metavar="SHARE",
        least=0,
        most=1,
        unit="(0.05 is 5 %)",
    )

    @property
    def loss(self) -> float:
        """The largest change of the loss, and the largest KL, of a safe format [nats/token].

        KL from full precision is by how much the loss rises on texts that the model in full precision would write, so
        that one limit serves both. Of the cases of ``benchmarks/results/kv_study.json`` that the change of perplexity
        decides, 119 of 127 safe ones have a smaller KL and 100 of 112 unsafe ones a larger one.
        """
        return math.log1p(self.tolerance)


@dataclass(frozen=True)
class KvCheckOptions(CommandOptions, command="kv-check"):
    """Check which formats of a quantized KV cache a model works with, under which methods, and where errors come from.

    Writes ``kv-check.json`` and ``kv-check.html``. The caches are simulated: values are rounded
    exactly as decoding would round them, but not stored in fewer bits. If the command is interrupted, run it again to
    continue: finished work is saved in the output folder.

    Formats: llama.cpp:q8_0, llama.cpp:q5_0, llama.cpp:q4_0, llama.cpp:q8_0/q4_0, vllm:fp8,
    vllm:fp8_per_token_head, vllm:int8_per_token_head, vllm:int4_per_token_head, vllm:turboquant-4,
    vllm:turboquant-3, vllm:turboquant_k8v4, vllm:turboquant_k3v4_nc, vllm:nvfp4, sglang:fp4_mx_block16,
    kvarn-k4v2, transformers:quanto-4, kivi-4, kivi-2, int8-token, int4-token.

    Example: ``rope-patch kv-check ./llama --formats "llama.cpp:q4_0 vllm:fp8" --methods "default yarn:factor=4"
    --lengths "4k 16k" -o ./kv``
    """

    model: str = shared.model()
    formats: tuple[str, ...] = word(
        "The cache formats to check, separated by spaces: names such as llama.cpp:q8_0, llama.cpp:q4_0, vllm:fp8 and "
        'kivi-4, or a format written out, such as "k=int4.pre;v=int4". --list explains both.',
        metavar="FORMATS",
        several=True,
    )
    evaluation: EvalSpec = contained(EvalSpec, without=("short_context", "bucket", "batch_tokens"))
    calibrate: str | None = word(
        "The text from which scales of an fp8 cache are computed, one for the keys and one for the values of each "
        "layer: builtin, a file or a folder. vllm:fp8 is also measured with these scales, and a folder is written "
        "that vLLM serves with them.",
        None,
        metavar="builtin|PATH",
        kind=PathLike,
    )
    methods: tuple[str, ...] = shared.methods(("default",))
    output: Path = shared.output("rope-patch-kv-check")
    limits: Limits = contained(Limits)
    patching: Patching = contained(Patching, without=("target_length",))
    machine: Machine = contained(Machine)
    report: bool = flag("Write the HTML report.", True)
    listed: bool = flag("List the cache formats, their sources and how to write one, and do nothing else.", name="list")
