"""Key tokens: those that a model predicts well from a long context, and not from a short one.

Plain perplexity is a mean over all tokens, of which most need the last few words alone. *Source*: Fang et al.,
arXiv:2410.23771, whose LongPPL is the perplexity of these tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rope_patch.evaluation.finished_work import Resume, finished_work
from rope_patch.evaluation.perplexity.measure import batched, check_finite, sliding_windows, window_losses
from rope_patch.evaluation.read_across_processes import read_batches
from rope_patch.modeling.inputs import tensor_hash
from rope_patch.modeling.reader import Reader
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.runtime import progress
from rope_patch.runtime.result_cache import key
from rope_patch.texts.documents import TokenDocument

KEY_GAIN = 2.0
"""How much better a key token is predicted from the long context than from the short one, at least [nats]."""
KEY_LOSS = 2.0
"""Largest loss of a key token in the long context [nats]: one that is never predicted does not need the context."""


def context_windows(size: int, short: int, longest: int) -> dict[str, tuple[int, int]]:
    """Return the length and the stride of the windows that are read for the long and the short context [tokens].

    Args:
        size: length of the longest document [tokens].
        short: number of tokens of the short context [tokens].
        longest: number of tokens that the model was trained to read [tokens].

    Raises:
        ValueError: the short context is not shorter than the long one.
    """
    whole = min(longest, size)
    windows = {"long": (whole, whole if whole == size else whole // 2), "short": (short + short // 4, short // 4)}
    if short < 4 or windows["short"][0] >= whole:
        raise ValueError(f"short_context must be at least 4, and 1.25 times it must be below {whole}, got {short}")
    return windows


def tokens_to_mark(size: int, windows: Mapping[str, tuple[int, int]]) -> int:
    """Return how many tokens are read to mark the key tokens of a document.

    Args:
        size: length of the document [tokens].
        windows: the windows, as :func:`context_windows` returns them.
    """
    return sum(min(window, size) * (1 + math.ceil(max(0, size - window) / step)) for window, step in windows.values())


@torch.no_grad()
def mark_key_tokens(
    model: nn.Module,
    documents: Sequence[TokenDocument],
    *,
    short: int,
    longest: int,
    batch_tokens: int = 16384,
    chunk: int | None = None,
    resume: Resume = None,
) -> list[TokenDocument]:
    """Return documents with their key tokens marked, which a measurement of perplexity then scores apart.

    Each token is read with all tokens before it, or in longer documents with the last ``longest / 2`` to ``longest`` of
    them, and once more with the last ``short`` to ``1.25 * short`` tokens alone.

    Args:
        model: a causal language model, which reads its trained context well: the unpatched one.
        documents: tokens of the documents.
        short: number of tokens of the short context [tokens].
        longest: number of tokens that the model was trained to read [tokens].
        batch_tokens: number of tokens that are read as one batch.
        chunk: number of tokens in a forward pass; longer windows are then read one at a time.
        resume: file (or mapping) in which finished documents are stored.

    Raises:
        ValueError: the short context is not shorter than the long one, there is no key token, or logits are not finite.
    """
    windows = context_windows(max(len(document.ids) for document in documents), short, longest)
    whole, _ = windows["long"]
    progress.more(sum(tokens_to_mark(len(document.ids), windows) for document in documents))
    reader = Reader(model)

    def losses(document: TokenDocument, context: str) -> Tensor:
        """Return the loss of each token of a document (tokens,) [nats]; nan where none is predicted."""
        window, stride = windows[context]
        loss = torch.full((len(document.ids),), math.nan, dtype=torch.float64)
        # Sliding windows read as if each document were the only one.
        each = sliding_windows([document], window, stride, reader)
        at_once = max(1, batch_tokens // window)
        if chunk is not None and chunk < window:
            at_once = 1
        for items in batched(each, at_once):
            for item, found in window_losses(reader, items, chunk=reader.chunk(window, chunk)):
                check_finite(item, found, torch.arange(item.start, item.stop) >= item.scored)
                loss[item.scored : item.stop] = found[item.scored - item.start :]
        return loss

    def score(items: list[TokenDocument]) -> list[list[int]]:
        positions = []
        for document in items:
            long = losses(document, "long")
            # nan, where no token is predicted, compares as False.
            is_key = (losses(document, "short") - long > KEY_GAIN) & (long < KEY_LOSS)
            positions.append(is_key.nonzero()[:, 0].tolist())
        return positions

    def name(document: TokenDocument, identity: str) -> str:
        return key(what="key tokens", model=identity, ids=tensor_hash(document.ids), windows=windows)

    with in_eval_mode(model):
        marked = []
        found = 0
        for document, positions in read_batches(
            model,
            ([document] for document in documents),
            score=score,
            name=name,
            tokens=lambda document: tokens_to_mark(len(document.ids), windows),
            work=finished_work(model, resume, whole),
        ):
            is_key = torch.zeros(len(document.ids), dtype=torch.bool)
            is_key[positions] = True
            marked.append(replace(document, key_tokens=is_key))
            found += len(positions)
    if not found:
        raise ValueError(
            f"no token of the text is predicted {KEY_GAIN:g} nats better from {whole} tokens than from {short}: give "
            "more windows, another text or a shorter short context"
        )
    return marked
