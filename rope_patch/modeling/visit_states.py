"""Pass the queries, keys and values of a model to a function while it reads a text; nothing is stored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.modeling.attention_layers import AttentionLayer, find_attention_layers
from rope_patch.modeling.attention_probe import ROLES
from rope_patch.modeling.inputs import check_ids
from rope_patch.modeling.read_at_once import LARGE_SLICE_TOKENS, SLICE_TOKENS
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.patching.locate import device_of, locate
from rope_patch.runtime import progress

Visit = Callable[[AttentionLayer, str, Tensor, int, int], None]
"""A function that is called with states as they appear. Its arguments are the layer, the role, the states before
rotation (tokens, heads, head_dim) in float32, the row of the text, and the position of the first of the states."""


@torch.no_grad()
def visit_states(
    model: nn.Module,
    rows: Tensor,
    visit: Visit,
    *,
    layers: Sequence[int] | None = None,
) -> tuple[AttentionLayer, ...]:
    """Read a text and call a function with the states of its layers as they appear.

    Args:
        model: a causal language model of transformers, as for :func:`~rope_patch.modeling.capture.capture`.
        rows: (rows, tokens) token ids, as ``token_rows`` returns them.
        visit: function that is called with each state, a slice of tokens at a time.
        layers: indices of the layers whose states are passed on, which the model has; all by default.

    Returns:
        The layers whose states were passed on.

    Raises:
        TypeError, ValueError: the model or an argument is wrong, as for :func:`~rope_patch.modeling.capture.capture`.
    """
    with in_eval_mode(model), contextlib.ExitStack() as stack:
        location = locate(model)
        root: Any = location.model
        embedding = root.get_input_embeddings()
        check_ids(rows, embedding.num_embeddings)
        path = decoder_path(root)
        shown = tuple(one for one in find_attention_layers(model) if layers is None or one.index in layers)
        received = 0

        def passing_on(layer: AttentionLayer, role: str) -> Callable[[nn.Module, Any, Tensor], None]:
            def show(module: nn.Module, args: Any, output: Tensor) -> None:
                nonlocal received
                received += 1
                states = layer.parts[role].of(output)[0]
                step = SLICE_TOKENS.get(states.device.type, LARGE_SLICE_TOKENS)
                for low in range(0, len(states), step):
                    visit(layer, role, states[low : low + step].float(), number, low)

            return show

        for layer in shown:
            for role, part in layer.parts.items():
                stack.callback(part.module.register_forward_hook(passing_on(layer, role)).remove)
        for number in range(len(rows)):
            received = 0
            ids = rows[number : number + 1].to(device_of(embedding))
            with progress.forward_pass(path[-1], ids.numel()):
                path[0](input_ids=ids, use_cache=False)
            # A hook that does not run would leave its layer out of the statistics in silence.
            if received != len(shown) * len(ROLES):
                raise RuntimeError(f"a pass gave {received} states of {len(shown)} layers: was the model changed?")
    return shown
