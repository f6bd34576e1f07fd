"""Counts the FLOPs of a training step, from the shapes in a plan."""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.planning import Plan
from rope_patch.planning.memory import adapter_entries
from rope_patch.planning.shapes import Layer


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one optimizer step on all GPUs.

    Attributes:
        tokens: the number of tokens of the step.
        model: the FLOPs of the forward and backward pass as they are run.
        executed: the same FLOPs, and those that checkpointing and the fused loss compute again.
        palm: the FLOPs by PaLM's formula, 6 N + 12 L H Q T for each token, which counts every weight as trained and no
            score as masked.
        palm_causal: the FLOPs by PaLM's formula with half of its attention term, since half of the scores are masked.
    """

    tokens: int
    model: float
    executed: float
    palm: float
    palm_causal: float


def step_flops(planned: Plan) -> StepFlops:
    """Return the FLOPs of a planned step.

    *Source*: Kaplan et al. 2020 (arXiv:2001.08361, section 2.1): 2 FLOPs per weight and token forward, 4 backward, half
    of which are gradients of weights: a frozen projection costs 4 in all, not 6. Embeddings are looked up, not
    multiplied. Attention as PaLM counts it (arXiv:2204.02311, appendix B), but causal and windowed; its backward pass
    is twice its forward one, flash's own recomputation not counted.
    """
    shape, o = planned.shape, planned.options
    tokens = o.batch * o.length * (o.gpus // o.context_parallel)
    layers = 2.0 * tokens * shape.total(lambda layer: layer.matmul_weights)
    scores = tokens / o.length * shape.total(lambda layer: attention_flops(layer, o.length))
    head = 2.0 * tokens * shape.vocab * shape.hidden
    adapters = 2.0 * tokens * adapter_entries(shape, o)
    forward = layers + scores + head + adapters
    weights = layers + head if o.lora_rank is None else adapters
    # The forward pass; gradients of the states, which cost as much again, but twice as much for scores, a product of
    # two states; and gradients of the trained weights.
    model = 2 * forward + scores + weights
    # Checkpointing computes all layers again, and the fused loss always computes the head again.
    again = (forward - head) * o.checkpointing + head
    attention = 12.0 * o.length * shape.total(lambda layer: layer.query)
    palm = [tokens * (6.0 * shape.parameters + part * attention) for part in (1.0, 0.5)]
    return StepFlops(tokens, model, model + again, *palm)


def attention_flops(layer: Layer, length: int) -> float:
    """Return the FLOPs of one layer's scores and weighted sums over one sequence, forward.

    A query at position i sees min(i + 1, window) keys; a pair costs 2 q for its score and 2 q for its value.
    """
    window = min(layer.window or length, length)
    pairs = length * window - window * (window - 1) / 2
    return 4.0 * layer.query * pairs
