"""Pass the states of a model to a function while it reads a text; nothing is stored."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rope_patch.modeling.attention_probe import ROLES
from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.sources import LayerSource, find_sources
from rope_patch.patching.cache_argument import cache_argument
from rope_patch.patching.locate import device_of, locate
from rope_patch.patching.two_tables import reaching
from rope_patch.runtime.progress import Progress

SLICES = {"cpu": 512}
"""Tokens of a state that are passed on at a time, by device: on a CPU, small slices stay in its cache. On others it is
``LARGE_SLICE``, since a small kernel costs as much as a large one there."""
LARGE_SLICE = 4096

Visit = Callable[[LayerSource, str, Tensor, int, int], None]
"""Called with states as they appear: layer, role, states (tokens, heads, head_dim) float32 before rotation, the row of
the text and the position of the first of them."""


@torch.no_grad()
def stream(
    model: nn.Module,
    token_ids: Tensor,
    visit: Visit,
    *,
    chunk: int | None = None,
    layers: Sequence[int] | None = None,
) -> tuple[LayerSource, ...]:
    """Read a text and call a function with the states of its layers as they appear.

    Args:
        model: as for :func:`~rope_patch.modeling.capture.capture`.
        token_ids: (tokens,) or (rows, tokens).
        visit: called with each state, a slice of tokens at a time.
        chunk: tokens per forward pass.
        layers: indices of the layers whose states are passed on; all by default.

    Returns:
        The layers whose states were passed on.

    Raises:
        TypeError: as for :func:`~rope_patch.modeling.capture.capture`.
        ValueError: as for :func:`~rope_patch.modeling.capture.capture`.
    """
    rows = token_rows(token_ids)
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be >= 1 token, got {chunk}")
    with in_eval_mode(model), contextlib.ExitStack() as stack:
        location = locate(model)
        root: Any = location.model
        embedding = root.get_input_embeddings()
        if int(rows.min()) < 0 or int(rows.max()) >= embedding.num_embeddings:
            raise ValueError(
                f"token ids must be in [0, {embedding.num_embeddings}), got {int(rows.min())} to {int(rows.max())}: "
                "is this the model's own tokenizer?"
            )
        sources = find_sources(model, rows[0])
        shown = sources.pick(layers)
        reader = _TextReader(visit)
        for layer in shown:
            for role, part in layer.parts.items():
                stack.callback(part.module.register_forward_hook(reader.hook(layer, role)).remove)
        size = min(chunk or rows.shape[1], rows.shape[1])
        progress = Progress(rows.numel())
        for number, row in enumerate(rows):
            past: Any = DynamicCache(config=root.config) if size < len(row) else None
            for start in range(0, len(row), size):
                reader.at(number, start)
                ids = row[None, start : start + size].to(device_of(embedding))
                with progress.within_pass(sources.decoder, ids.numel()), reaching(location.module, len(row)):
                    cache = {cache_argument(sources.decoder): past, "use_cache": past is not None}
                    sources.decoder(input_ids=ids, **cache)
                reader.check(len(shown) * len(ROLES))
        progress.finish()
    return shown


def token_rows(token_ids: Tensor) -> Tensor:
    """Return token ids as int64 rows: (rows, tokens).

    Raises:
        ValueError: not whole numbers, another shape, or fewer than 2 tokens.
    """
    if token_ids.is_floating_point() or token_ids.is_complex() or token_ids.dtype == torch.bool:
        raise ValueError(f"token_ids must be whole numbers, got {token_ids.dtype}")
    rows = token_ids[None] if token_ids.ndim == 1 else token_ids
    if rows.ndim != 2 or len(rows) < 1:
        raise ValueError(f"token_ids must be (tokens,) or (rows, tokens), got shape {tuple(token_ids.shape)}")
    if rows.shape[1] < 2:
        raise ValueError(f"a text must hold at least 2 tokens, got {rows.shape[1]}")
    return rows.long().cpu()


def text_digest(rows: Tensor) -> str:
    """Return 16 hex digits of token ids (rows, tokens)."""
    return hashlib.sha256(f"{tuple(rows.shape)}".encode() + rows.numpy().astype("<i8").tobytes()).hexdigest()[:16]


class _TextReader:
    """Keeps the place in the text that the model is reading, and slices what the hooks receive."""

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.at(0, 0)

    def at(self, row: int, start: int) -> None:
        self.row, self.start, self.received = row, start, 0

    def hook(self, layer: LayerSource, role: str) -> Callable[[nn.Module, Any, Tensor], None]:
        part = layer.parts[role]

        def show(module: nn.Module, args: Any, output: Tensor) -> None:
            states = part.of(output)[0]
            self.received += 1
            step = SLICES.get(states.device.type, LARGE_SLICE)
            for low in range(0, len(states), step):
                self.visit(layer, role, states[low : low + step].float(), self.row, self.start + low)

        return show

    def check(self, expected: int) -> None:
        if self.received != expected:
            raise RuntimeError(f"a pass gave {self.received} states, expected {expected}: was the model changed?")
