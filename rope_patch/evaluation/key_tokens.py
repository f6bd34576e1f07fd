"""Key tokens: tokens that a model predicts well only with a long context. LongPPL is the perplexity over them.

*Source*: Fang et al. (2024), LongPPL, arXiv:2410.23771; reference code PKU-ML/LongPPL at 1decd2a. We differ in three
points. A text longer than the evaluator's context is read in windows of that context, so that the evaluator never reads
beyond it. The special tokens of a text stand in front of every window, and not of the first one alone: a model that was
trained with such a token fails without it. Of 24 key tokens that Gemma 3 270M has in 2048 tokens of a novel as the
authors' code chooses them (512 tokens of short context), 1 is left when short windows begin with ``<bos>``, too. The
short context is scaled down for models with a short context.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.documents import TokenDocument, text_digest
from rope_patch.evaluation.read_across_processes import BatchReader
from rope_patch.evaluation.spec import DEFAULT_WINDOWS
from rope_patch.methods import Default
from rope_patch.modeling.inputs import check_ids, ids_hash
from rope_patch.modeling.scoring import Reader, losses, model_hash
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.install import patched
from rope_patch.runtime.progress import Progress
from rope_patch.runtime.result_cache import key

LEAST_GAIN = 2.0
"""Smallest difference between a key token's loss with the short context and its loss with the long one [nats]."""

LARGEST_LOSS = 2.0
"""Upper limit of a key token's loss with the long context [nats]."""

SHORT_CONTEXT = 4096
"""Short context of the paper [tokens]; models whose context is less than four times as long use a quarter of it."""

MOVES_PER_CONTEXT = 4
"""Number of moves over one context, as in the paper's code: a window advances by a quarter of the context, and the new
tokens share the text before them."""


@dataclass(frozen=True)
class KeyTokens:
    """A summary of the tokens that LongPPL is measured on, and of the model that chose them.

    Attributes:
        evaluator: class of the model that chose them, and name of its checkpoint.
        context: largest number of tokens that it read at once [tokens].
        short_context: context that the long one was compared with [tokens].
        tokens: number of key tokens in the windows.
        scored: number of tokens in the windows that perplexity is measured on.
        sha256: digest of the positions of the key tokens.
    """

    evaluator: str
    context: int
    short_context: int
    tokens: int
    scored: int
    sha256: str

    @property
    def share(self) -> float:
        """Share of the scored tokens that are key tokens."""
        return self.tokens / self.scored

    def __str__(self) -> str:
        """Return how many tokens are key tokens and which model chose them.

        >>> str(KeyTokens("llama", 8192, 2048, 120, 8000, ""))
        '120 of 8000 tokens (1.5 %) are key tokens, chosen by llama: 8192 tokens of context against 2048'
        """
        return (
            f"{self.tokens} of {self.scored} tokens ({100 * self.share:.1f} %) are key tokens, chosen by "
            f"{self.evaluator}: {self.context} tokens of context against {self.short_context}"
        )


def short_context_of(context: int) -> int:
    """Return the short context for a long one: 4096 tokens, but at least an eighth and at most a quarter of it.

    >>> [short_context_of(context) for context in (256, 8192, 32768, 131072)]
    [64, 2048, 4096, 16384]
    """
    return max(context // 8, min(SHORT_CONTEXT, context // 4), 1)


def tokens_to_choose(length: int, context: int, short_context: int) -> int:
    """Return how many tokens are read to choose the key tokens of one window of text.

    Args:
        length: length of the window [tokens].
        context: context length of the evaluator [tokens].
        short_context: context that it is compared with [tokens].

    >>> tokens_to_choose(1024, 1024, 256)  # once whole, and 12 times 320 tokens
    4864
    """
    spans = _spans(length, context, context // MOVES_PER_CONTEXT) + _short_spans(length, short_context)
    return sum(stop - start for start, stop in spans)


def tokens_of_spec(spec: EvalSpec, context: int, windows: int | None = None) -> int:
    """Return how many tokens are read to choose the key tokens of an evaluation; 0 if LongPPL is not measured.

    Args:
        spec: the spec of what is measured.
        context: context length of the evaluator [tokens].
        windows: number of windows that the text has room for; by default the number that the spec asks for.
    """
    if not spec.longppl:
        return 0
    if windows is None:
        windows = DEFAULT_WINDOWS if spec.windows is None else spec.windows
    return windows * tokens_to_choose(spec.longest, context, short_context_of(context))


@contextlib.contextmanager
def as_trained(model: Any, **options: Any) -> Iterator[None]:
    """Use a model without its patch and without its PEFT adapter within a ``with`` block.

    Args:
        model: a causal language model of transformers. An adapter that was merged and weights that were fine-tuned stay
            as they are.
        **options: ``layer_types`` and ``freeze_at``, as :func:`rope_patch.apply` takes them.
    """
    adapter = getattr(model, "disable_adapter", None)
    with patched(model, Default(), replace=True, **options), adapter() if adapter else contextlib.nullcontext():
        yield


@torch.no_grad()
def choose_key_tokens(
    model: Any,
    windows: Sequence[TokenDocument],
    *,
    context: int,
    short_context: int,
    batch_tokens: int,
    evaluator: str,
    result_cache: MutableMapping[str, Any] | None = None,
) -> tuple[list[TokenDocument], KeyTokens]:
    """Choose the key tokens of windows: with the long context their loss is 2 nats lower, and is below 2 nats.

    Args:
        model: the evaluator, a causal language model of transformers.
        windows: windows of text, beginning with the special tokens.
        context: context length that the evaluator was trained at; it never reads more at once [tokens].
        short_context: context that it is compared with [tokens].
        batch_tokens: largest number of tokens in a forward pass [tokens]; a single window may be longer.
        evaluator: name of the evaluator in results.
        result_cache: values of finished windows; None if none are stored.

    Returns:
        The windows with their key tokens marked, and a summary of these.

    Raises:
        ValueError: logits are not finite.
    """
    reader = Reader(model)
    settings: dict[str, Any] = {"context": context, "short": short_context, "gain": LEAST_GAIN, "loss": LARGEST_LOSS}
    identity = settings if result_cache is None else settings | {"model": model_hash(model)}

    def name(window: TokenDocument) -> str:
        return key(what="key tokens", ids=ids_hash(window.ids), prefix=len(window.prefix), **identity)

    def score(one: list[TokenDocument], size: int) -> list[list[int]]:
        progress = Progress(size)
        return [_positions(reader, window, context, short_context, batch_tokens, progress) for window in one]

    batch_reader = BatchReader(
        score=score,
        name=name,
        tokens=lambda window: tokens_to_choose(len(window.ids), context, short_context),
        result_cache=result_cache,
    )
    marked, chosen = [], []
    with in_eval_mode(model):
        for window, positions in batch_reader.read(model, [[window] for window in windows]):
            mask = torch.zeros(len(window.ids), dtype=torch.bool)
            # The data type is stated, because an empty list would become a float tensor, which cannot index.
            mask[torch.tensor(positions, dtype=torch.long)] = True
            marked.append(replace(window, key_tokens=mask))
            chosen.append(positions)
    return marked, KeyTokens(
        evaluator=evaluator,
        context=context,
        short_context=short_context,
        tokens=sum(map(len, chosen)),
        scored=sum(len(window.ids) - 1 for window in windows),
        sha256=text_digest(json.dumps(chosen)),
    )


def _positions(
    reader: Reader, window: TokenDocument, context: int, short_context: int, batch_tokens: int, progress: Progress
) -> list[int]:
    """Return the positions of the key tokens of one window."""
    size = len(check_ids(window.ids, reader.vocabulary))
    full = _losses(reader, window, _spans(size, context, context // MOVES_PER_CONTEXT), batch_tokens, progress)
    short = _losses(reader, window, _short_spans(size, short_context), batch_tokens, progress)
    scored = torch.isfinite(short)
    # A loss with the short context is missing only for tokens within the first short context, which are never key
    # tokens.
    bad = (~torch.isfinite(full[1:])) | (~scored[1:] & (torch.arange(1, size) >= short_context))
    if bool(bad.any()):
        at = 1 + int(bad.long().argmax())
        raise ValueError(
            f"the loss at position {at} of {window.name} is not finite: NaN or infinite logits, try float32"
        )
    keys = scored & (short - full > LEAST_GAIN) & (full < LARGEST_LOSS)
    return [int(i) for i in torch.nonzero(keys).flatten()]


def _spans(size: int, context: int, step: int) -> list[tuple[int, int]]:
    """Return the start and stop of windows as long as a context, ``step`` apart, up to the end of the text [tokens]."""
    spans = [(0, min(context, size))]
    while spans[-1][1] < size:
        start = spans[-1][0] + step
        spans.append((start, min(start + context, size)))
    return spans


def _short_spans(size: int, short_context: int) -> list[tuple[int, int]]:
    """Return the same for the short context and the tokens that share it; no windows if the text is shorter."""
    step = max(1, short_context // MOVES_PER_CONTEXT)
    return _spans(size, short_context + step, step) if size > short_context else []


def _losses(
    reader: Reader, window: TokenDocument, spans: Sequence[tuple[int, int]], batch_tokens: int, progress: Progress
) -> Tensor:
    """Return the loss of each token in the first span that has it (tokens,) float64 [nats]; nan if no span does.

    In every span but the first, the special tokens of the text replace as many of its first tokens.
    """
    nll = torch.full((len(window.ids),), math.nan, dtype=torch.float64)
    prefix = window.ids[: len(window.prefix)]
    done = 1  # the first token is never predicted
    rows, first, slices = [], [], []
    for start, stop in spans:
        # A slice is a view: without the copy the special tokens would be written into the text itself.
        own = window.ids[start:stop].clone()
        if start:
            own[: len(prefix)] = prefix
        rows.append(own)
        first.append(max(done, start + 1) - start)
        slices.append((start, stop))
        done = stop
    # A dynamic rotary table depends on the length of what is read, so such a model reads one row at a time.
    count = 1 if reader.dynamic else max(1, batch_tokens // max(map(len, rows), default=1))
    for low in range(0, len(rows), count):
        group = slice(low, low + count)
        padded = torch.nn.utils.rnn.pad_sequence(rows[group], batch_first=True)
        sizes = [len(row) for row in rows[group]]
        table, _ = losses(reader, padded, first[group], lengths=sizes, progress=progress)
        for (start, stop), at, row in zip(slices[group], first[group], table, strict=True):
            nll[start + at : stop] = row[at : stop - start]
    return nll
