"""How much is read, attended or scored at one time: what the memory of a measurement follows from."""

from __future__ import annotations

from torch import Tensor

LOGITS_AT_ONCE = 256
"""Number of tokens whose logits exist at one time in training, and where a CPU scores tokens."""
FLOATS_AT_ONCE = 1 << 21
"""Number of float32 logits that a loss is computed of at one time on a CPU: 8 MB, which malloc of glibc takes from its
heap."""
SLIDING_CHUNK = 1024
"""Length of a forward pass through layers with shorter sliding windows [tokens]."""
QUERIES_AT_ONCE = {"cpu": 64}
"""Number of queries that read a quantized cache at one time, by type of device: each reads the keys of all of them
without a fused kernel. On other devices it is ``MANY_QUERIES_AT_ONCE``: a small kernel costs as much as a large one."""
MANY_QUERIES_AT_ONCE = 512
CACHE_BLOCK_BYTES = 1 << 28
"""Greatest size of the logits of one block of queries before a quantized cache, where no fused kernel serves
[bytes]."""
WEIGHTS_BLOCK_BYTES = {"cpu": 1 << 26}
"""Size of the attention weights of one block of queries, where weights are added up, by type of device [bytes]. On
other devices it is ``LARGE_WEIGHTS_BLOCK_BYTES``."""
LARGE_WEIGHTS_BLOCK_BYTES = 1 << 30
SLICE_TOKENS = {"cpu": 512}
"""Number of tokens whose states are passed on at one time, by type of device: on a CPU small slices stay in its cache.
On other devices it is ``LARGE_SLICE_TOKENS``, since a small kernel costs as much as a large one there."""
LARGE_SLICE_TOKENS = 4096


def scored_at_once(tokens: int, device: str) -> int:
    """Return how many of some tokens are scored at one time on a type of device: small kernels cost a GPU as much."""
    return LOGITS_AT_ONCE if device == "cpu" else max(2 * LOGITS_AT_ONCE, tokens // 16)


def rows_at_once(logits: Tensor) -> int:
    """Return of how many rows of logits (rows, vocab) float32 copies are made at one time."""
    if logits.device.type != "cpu":
        return len(logits)
    return max(1, FLOATS_AT_ONCE // logits.shape[-1])
