"""Measure where the heads of a model attend: attention mass by distance, sinks, induction.

This is a forward pass of its own, since no fused kernel returns its weights. The model attends through a function of
this module, which computes weights a block of queries at a time, reduces them, and goes on with the same weights: the
pass costs one forward with unfused attention, and memory for one block, never ``(heads, tokens, tokens)``.

*Source*: Barbero et al., arXiv:2410.06205, sec. 4 and 5, for diagonal and previous-token heads; Gu et al.,
arXiv:2410.10781, for sinks; Olsson et al., arXiv:2209.11895, for induction (their prefix matching).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rope_patch.analysis.heads import OFFSETS, AttentionSums, Heads
from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.modeling.attention_probe import window_alone, window_of
from rope_patch.modeling.inputs import check_ids, refuse_prompts, token_rows
from rope_patch.modeling.read_at_once import WEIGHTS_BLOCK_BYTES
from rope_patch.modeling.temporary_modes import attending_with, attention_state, in_eval_mode
from rope_patch.patching.locate import device_of, locate
from rope_patch.runtime import progress
from rope_patch.runtime.captions import ranges_text

ATTENTION_NAME = "rope_patch_attention_mass"
REPEATED_TOKENS = 64
"""Longest half of the random tokens that come twice: short, so that layers of a small window see it too [tokens]."""
REPRODUCED_SHARE = 0.75
"""Share of the tokens whose states have to be reproduced."""
STATE_TOLERANCE = 1e-3
"""How closely the pass must give the states of these tokens, relative to them; 16-bit models are allowed 50 times as
much."""


@torch.no_grad()
def measure_heads(model: nn.Module, token_ids: Tensor) -> Heads:
    """Measure where the heads of a model attend on a text.

    Args:
        model: a causal language model of transformers, patched or not, bare or under a LoRA adapter. It is in eval mode
            meanwhile, and left as it was.
        token_ids: (tokens,) or (rows, tokens) the text, at least 2 tokens; rows are texts of their own, read one by
            one.

    Returns:
        Attention masses and sinks, by layer.

    Raises:
        TypeError: the model is not one of transformers.
        ValueError: fewer than 2 tokens, ids the model does not know; a model without rotary table, or whose attention
            this pass does not reproduce (learned sinks, biases or masks of its own); an adapter that puts tokens of its
            own before the text; NaN or infinite logits, by layer and head.
    """
    rows = token_rows(token_ids)
    refuse_prompts(model)
    root: Any = locate(model).model
    check_ids(rows, root.get_input_embeddings().num_embeddings)
    layers = root.config.get_text_config().num_hidden_layers
    path = decoder_path(root)
    device = device_of(root.get_input_embeddings())
    on_text = _Pass(rows)
    on_repeated = _Pass(repeated_tokens(rows)[None])
    reads = rows.numel() + on_repeated.rows.numel()
    with in_eval_mode(model), progress.work(rows.numel(), reads=reads):
        # A model whose attention is another shows it on 64 tokens, before the whole text is read.
        _check_reproduced(root, path[0], rows[0, :64].to(device))
        for current in (on_text, on_repeated):
            with attending_with(root, ATTENTION_NAME, current):
                for number, ids in enumerate(current.rows):
                    current.row = number
                    current.layers_done = set()
                    with progress.forward_pass(path[-1], len(ids)):
                        path[0](input_ids=ids[None].to(device), use_cache=False)
                    missing = sorted(set(range(layers)) - current.layers_done)
                    if missing:
                        raise ValueError(
                            f"layers {ranges_text(missing)} did not attend through transformers' AttentionInterface: "
                            "where they attend cannot be seen"
                        )
    measured = tuple(on_text.sums[index].result() for index in sorted(on_text.sums))
    # In a shorter text the token to be found is among the nearest keys, where a head may attend by distance alone.
    if on_repeated.rows.shape[1] > 2 * OFFSETS:
        measured = tuple(
            replace(layer, repeated_mass=on_repeated.sums[layer.index].result().induction_mass) for layer in measured
        )
    return Heads(measured)


def repeated_tokens(rows: Tensor) -> Tensor:
    """Return tokens of a text in random order, twice in a row: (2 length,). No token occurs twice in a half.

    Induction alone can know what follows there.

    Args:
        rows: (rows, tokens) the text; both halves together are no longer than a row.
    """
    different = torch.unique(rows)
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(0))
    half = different[order[: min(REPEATED_TOKENS, max(1, rows.shape[1] // 2))]]
    return torch.cat((half, half))


# --- the attention ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Pass:
    """One pass over a text: what is measured, and how far the pass has come.

    Attributes:
        rows: (rows, tokens) the text that is read.
        sums: the sums over attention weights, by the index of the layer.
        row: the index of the row that is being read.
        layers_done: the indices of the layers that have attended in it.
    """

    rows: Tensor
    sums: dict[int, AttentionSums] = field(default_factory=dict)
    row: int = 0
    layers_done: set[int] = field(default_factory=set)

    def begin_layer(self, module: nn.Module, query: Tensor) -> AttentionSums:
        """Return the sums that a layer's weights are added to."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if index in self.layers_done:
            raise ValueError(f"attention layer {index} is called more than once in a pass")
        self.layers_done.add(index)
        if index not in self.sums:
            self.sums[index] = AttentionSums(index, query.shape[1], self.rows, query.device)
        self.sums[index].begin_row(self.row)
        return self.sums[index]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally, a block of queries at a time, and add up the weights on the way; see AttentionInterface."""
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(module).__name__} attends with {name}: this pass knows logits of q·k alone")
    heads, tokens, head_dim = query.shape[1:]  # without the dimension of rows, which are read one at a time
    current: _Pass = attention_state(module)
    sums = current.begin_layer(module, query)
    key_heads = key.shape[1]
    scaling = scaling or head_dim**-0.5
    window = window_of(attention_mask) or tokens
    # Weights are float32, of 4 bytes each.
    size = max(1, min(512, WEIGHTS_BLOCK_BYTES // (4 * heads * tokens)))
    out = torch.empty(1, tokens, heads, value.shape[-1], dtype=value.dtype, device=value.device)
    queries = query[0].float()
    keys = key[0].float()
    values = value[0].float()
    places = torch.arange(tokens, device=query.device)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        # The first key within the window of the block's first query: keys before it are not even multiplied.
        low = max(0, start - window + 1)
        # The queries that share a key head stand one after the other, for one product of matrices.
        grouped = queries[:, start:stop].reshape(key_heads, -1, head_dim)
        logits = (grouped @ keys[:, low:stop].mT).view(heads, stop - start, stop - low) * scaling
        distance = places[start:stop, None] - places[low:stop]
        hidden = (distance < 0) | (distance >= window)
        capped = logits
        if softcap is not None:
            capped = softcap * torch.tanh(logits / softcap)
        weights = capped.masked_fill(hidden, -torch.inf).softmax(-1)
        sums.add(start, low, window, logits, weights, distance, hidden)
        attended = weights.view(key_heads, -1, stop - low) @ values[:, low:stop]
        out[0, start:stop] = attended.view(heads, stop - start, -1).transpose(0, 1).to(value.dtype)
    sums.end_row()
    return out, None


AttentionInterface.register(ATTENTION_NAME, _attend)
AttentionMaskInterface.register(ATTENTION_NAME, window_alone)


def _check_reproduced(root: Any, decoder: nn.Module, ids: Tensor) -> None:
    """Raise unless a pass through :func:`_attend` gives what the model gives."""
    if "chunked_attention" in (getattr(root.config.get_text_config(), "layer_types", None) or ()):
        raise ValueError(
            f"{type(root).__name__} attends within chunks: this pass knows causal and sliding layers alone"
        )

    def read() -> Tensor:
        out: Tensor = decoder(input_ids=ids[None], use_cache=False)[0]
        return out.float()

    original = read()
    with attending_with(root, ATTENTION_NAME, _Pass(ids[None])):
        ours = read()
    allowed = STATE_TOLERANCE
    if root.dtype in (torch.float16, torch.bfloat16):
        allowed *= 50
    # Compared token by token: in half precision a few tokens are far off between transformers' own kernels, too.
    tiny = torch.finfo(torch.float32).tiny  # the states of padding tokens may be 0
    lengths = torch.linalg.norm(original, dim=-1).clamp_min(tiny)
    off = float((torch.linalg.norm(ours - original, dim=-1) / lengths).flatten().quantile(REPRODUCED_SHARE))
    if torch.isfinite(original).all() and not off <= allowed:
        raise ValueError(
            f"{type(root).__name__} attends in a way of its own: a causal softmax of q·k gives states that are off by "
            f"{off:.2g}, at most {allowed:g} is allowed"
        )
