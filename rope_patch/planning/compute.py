"""FLOPs and seconds of a step."""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.planning.memory import trained_beside
from rope_patch.planning.options import Options
from rope_patch.planning.shapes import Layer, Shape


@dataclass(frozen=True)
class Compute:
    """One optimizer step on all GPUs."""

    model_flops: float  # forward and backward
    executed_flops: float  # and what checkpointing computes again
    seconds: float
    tokens_per_second: float  # all GPUs together
    model_flops_share: float  # of the peak: forward and backward as they are run here, without recomputation
    palm_mfu: float  # the same seconds by PaLM's formula, 6 N + 12 L H Q T FLOPs a token
    palm_mfu_causal: float  # and with half of its attention term, since half of the scores are masked


def compute(shape: Shape, o: Options) -> Compute:
    """Return the work of one step, and its time at the stated share of the peak.

    *Source*: Kaplan et al. 2020 (arXiv:2001.08361, section 2.1): 2 FLOPs per weight and token forward, 4 backward, half
    of which are gradients of weights: a frozen projection costs 4 in all, not 6. Embeddings are looked up, not
    multiplied. Attention as PaLM counts it (arXiv:2204.02311, appendix B), but causal and windowed; its backward pass
    is twice its forward one, flash's own recomputation not counted. The stated share is of the executed FLOPs (PaLM:
    hardware FLOPs utilization), so that turning checkpointing on costs time in a plan. PaLM's own MFU counts the
    gradients of every weight, frozen or not, and unmasked attention, so it reads higher for the same seconds: both are
    given, since papers quote either.
    """
    tokens = o.step_tokens
    layers = 2.0 * tokens * shape.total(lambda layer: layer.matmul_weights)
    scores = tokens / o.length * shape.total(lambda layer: attention_flops(layer, o.length))
    head = 2.0 * tokens * shape.head
    adapters = 2.0 * tokens * trained_beside(shape, o)[0]
    forward = layers + scores + head + adapters
    weights = layers + head if o.lora_rank is None else adapters + head * (o.long_lora and shape.tied)
    model = 2 * forward + scores + weights
    again = (forward - head) * o.checkpointing + head * (o.loss == "fused")
    seconds = (model + again) / (o.gpus * o.tflops * 1e12 * o.mfu)
    attention = 12.0 * o.length * shape.total(lambda layer: layer.query)
    peak = seconds * o.gpus * o.tflops * 1e12 / tokens  # FLOPs that the GPUs could do in the time of a token
    palm = [(6.0 * shape.parameters + part * attention) / peak for part in (1.0, 0.5)]
    return Compute(model, model + again, seconds, tokens / seconds, o.mfu * model / (model + again), *palm)


def attention_flops(layer: Layer, length: int) -> float:
    """Return the FLOPs of one layer's scores and weighted sums over one sequence, forward.

    A query at position i sees min(i + 1, window) keys; a pair costs 2 q for its score and 2 q for its value.

    >>> from rope_patch.planning import shape_of
    >>> attention_flops(shape_of("Llama-3.1-8B").layers[0], 131072) / (2 * 131072**2 * 4096)
    1.0000076293945312
    """
    window = min(layer.window or length, length)
    pairs = length * window - window * (window - 1) / 2
    return 4.0 * layer.query * pairs
