"""How far a quantized loss moves when nothing but its last digits does.

A value that lies between two levels is rounded up or down by a digit that no data type keeps, and the queries that read
it move all that follows. So two computations of one loss, both right, differ: by batch size, by machine, by version.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from rope_patch.evaluation.documents import TokenDocument
from rope_patch.evaluation.losses import PerplexityResult
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.modeling.scoring import CacheFactory

PERTURBATION = 1e-7
"""Of embeddings, relative; in half precision the last place of the data type, which is all that it can hold."""
PASSES = 2
"""Perturbed passes, of one window each."""


@contextlib.contextmanager
def perturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Perturb the embeddings of a model by :data:`PERTURBATION` of their size for the length of a ``with`` block."""
    generator = torch.Generator().manual_seed(seed)

    def perturb(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        size = max(PERTURBATION, torch.finfo(output.dtype).eps if output.dtype.itemsize < 4 else 0.0)
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.device)
        return (output.double() * (1 + size * drawn)).to(output.dtype)

    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    handle = embeddings.register_forward_hook(perturb)
    try:
        yield
    finally:
        handle.remove()


def noise_floor(
    model: nn.Module,
    window: TokenDocument,
    measured: PerplexityResult | None,
    *,
    lengths: Sequence[int],
    edges: Sequence[int],
    chunk: int | None,
    cache: CacheFactory,
) -> Mapping[int, float]:
    """Return how far the mean loss of a window at positions below each length moves by rounding alone [nats/token].

    It is the largest difference between its passes: two with perturbed embeddings, and the one as it is.

    Args:
        model: a causal language model.
        window: of text.
        measured: its loss as it is, the first of the documents there; None to leave it out.
        lengths: edges of the buckets [tokens].
        edges: of the buckets [tokens].
        chunk: tokens per forward pass; None for the whole window.
        cache: factory of the quantized caches to read through.
    """
    passes = [] if measured is None else [measured]
    for seed in range(PASSES):
        with perturbed(model, seed):
            passes.append(
                perplexity(
                    model,
                    [window],
                    window=len(window.ids),
                    buckets=edges,
                    chunk=chunk,
                    cache=cache,
                )
            )
    found = {}
    for length in lengths:
        inside, first = passes[0].inside(0, length), [score.documents[0] for score in passes]
        losses = [sum(one.nll[i] for i in inside) / sum(one.tokens[i] for i in inside) for one in first]
        found[length] = max(losses) - min(losses)
    return found
