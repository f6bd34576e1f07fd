"""One model, several methods: perplexity by position and retrieval, on the same texts and prompts for all."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rope_patch.evaluation.perplexity import PerplexityResult, perplexity
from rope_patch.evaluation.retrieval import RetrievalResult, retrieval
from rope_patch.evaluation.text import builtin_text
from rope_patch.methods import Method, MethodLike, as_method
from rope_patch.rotary import RotarySlot
from rope_patch.surgery import patched

SCHEMA = 1


@dataclass(frozen=True)
class Row:
    """A method's scores.

    Attributes:
        method: in the grammar.
        perplexity: over held-out text.
        retrieval: over lengths × depths.
        slots: the tables it used, by layer type.
    """

    method: str
    perplexity: PerplexityResult
    retrieval: RetrievalResult
    slots: tuple[RotarySlot, ...]


@dataclass(frozen=True)
class Comparison:
    """The scores of every method, and what they were measured on.

    Attributes:
        rows: one per method, in the order given.
        lengths: prompt lengths of the retrieval task [tokens].
        trained_length: the context the model's config states before any patch [tokens].
        text: SHA-256 of the held-out text.
        python_version: whose files the built-in text is made of; None for a text of the user's.
        seed: of the prompts.
        schema: version of this layout.
    """

    rows: tuple[Row, ...]
    lengths: tuple[int, ...]
    trained_length: int
    text: str
    python_version: str | None
    seed: int
    schema: int = SCHEMA

    def best(self) -> Row:
        """Return the row with the best retrieval at the longest length; perplexity there decides between equals."""
        longest = max(self.lengths)
        return max(self.rows, key=lambda row: (row.retrieval.accuracy(longest), -row.perplexity.buckets[-1].nll))

    def to_json(self) -> str:
        """Return everything as JSON."""
        rows = [
            {
                "method": row.method,
                "perplexity": asdict(row.perplexity),
                "retrieval": asdict(row.retrieval),
                "tables": [
                    {
                        "layer_type": slot.layer_type,
                        "inv_freq": slot.inv_freq.tolist(),
                        "attention_scaling": slot.attention_scaling,
                    }
                    for slot in row.slots
                ],
            }
            for row in self.rows
        ]
        head = {name: getattr(self, name) for name in ("lengths", "trained_length", "text", "python_version", "seed")}
        return json.dumps({"schema": self.schema, **head, "rows": rows}, indent=1, allow_nan=False)


def compare(
    model: nn.Module,
    tokenizer: Any,
    methods: Sequence[MethodLike],
    *,
    lengths: Sequence[int],
    windows: int = 16,
    bucket: int = 64,
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 4,
    seed: int = 0,
    progress: Callable[[str, int], None] = lambda name, tokens: None,
) -> Comparison:
    """Measure each method on a model, zero-shot or after training; the model is as it was at the end.

    Args:
        model: a causal language model, not patched.
        tokenizer: its tokenizer.
        methods: what to compare; ``"default"`` is the model as it is.
        lengths: prompt lengths of the passkey task; perplexity is measured over windows of the longest [tokens].
        windows: windows of held-out text.
        bucket: width of the position buckets [tokens].
        depths: of the needle.
        samples: prompts per length and depth.
        seed: of keys and haystacks.
        progress: told the method and the tokens it has just read.

    Raises:
        ValueError: a bad method, before anything is measured; too little text for the windows asked for.
    """
    wanted: list[Method] = [as_method(method) for method in methods]
    if not wanted or not lengths:
        raise ValueError("give at least one method and one length")
    longest = max(lengths)
    corpus = builtin_text("heldout")
    stream = tokenizer(corpus.text, add_special_tokens=False, verbose=False)["input_ids"]
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    size = longest - len(start)
    if windows * size > len(stream):
        raise ValueError(
            f"{windows} windows of {longest} tokens need {windows * size} tokens, the held-out text has {len(stream)}: "
            "ask for fewer windows"
        )
    token_ids = torch.tensor([start + stream[i * size : (i + 1) * size] for i in range(windows)])
    edges = [*range(0, longest, bucket), longest]
    for method in wanted:  # a method that does not fit this model fails before the first is measured
        with patched(model, method):
            pass
    rows = []
    for method in wanted:
        told = functools.partial(progress, str(method))
        with patched(model, method) as patch:
            text = perplexity(model, token_ids, buckets=edges, progress=told)
            found = retrieval(
                model, tokenizer, lengths=lengths, depths=depths, samples=samples, seed=seed, progress=told
            )
            rows.append(Row(str(method), text, found, tuple(patch.after.values())))
            trained = next(iter(patch.before.values())).max_position_embeddings
    return Comparison(tuple(rows), tuple(lengths), trained, corpus.sha256, corpus.python_version, seed)
