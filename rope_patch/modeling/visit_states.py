"""Pass the queries, keys and values of a model to a function while it reads texts; nothing is stored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.inputs import check_ids
from rope_patch.modeling.read_at_once import LARGE_SLICE_TOKENS, SLICE_TOKENS
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.patching.locate import device_of, locate
from rope_patch.runtime import progress

Visit = Callable[[AttentionLayer, str, Tensor, int], None]
"""A function that is called with states as they appear. Its arguments are the layer, the role, the states before
rotation (tokens, heads, head_dim) in float32, and how many tokens were read before them."""


@contextlib.contextmanager
def visiting_states(layers: Sequence[AttentionLayer], visit: Visit, tokens: int) -> Iterator[None]:
    """Call a function with the states of attention layers, which a model puts out within a ``with`` block.

    Args:
        layers: layers of the model, as ``find_attention_layers`` returns them.
        visit: function that is called with each state, a slice of tokens at a time.
        tokens: number of tokens that are read in the block, one row at a time [tokens].

    Raises:
        RuntimeError: other numbers of tokens were seen.
    """
    seen = {(layer.index, role): 0 for layer in layers for role in layer.parts}

    def passing_on(layer: AttentionLayer, role: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def show(module: nn.Module, args: Any, output: Tensor) -> None:
            states = layer.parts[role].of(output)[0]
            step = SLICE_TOKENS.get(states.device.type, LARGE_SLICE_TOKENS)
            for low in range(0, len(states), step):
                visit(layer, role, states[low : low + step].float(), seen[layer.index, role] + low)
            seen[layer.index, role] += len(states)

        return show

    with contextlib.ExitStack() as stack:
        for layer in layers:
            for role, part in layer.parts.items():
                stack.callback(part.module.register_forward_hook(passing_on(layer, role)).remove)
        yield
    # A hook that does not run would leave its layer out of the statistics in silence.
    if other := {at: count for at, count in seen.items() if count != tokens}:
        (index, role), count = other.popitem()
        raise RuntimeError(
            f"{count} states of {role} of layer {index} were seen where {tokens} tokens were read: was the model "
            "changed?"
        )


@torch.no_grad()
def run_decoder(model: nn.Module, rows: Tensor) -> None:
    """Run the decoder of a model over rows of token ids (rows, tokens), one by one, in eval mode.

    Raises:
        ValueError: there are ids that the model does not know.
    """
    root: Any = locate(model).model
    embedding = root.get_input_embeddings()
    check_ids(rows, embedding.num_embeddings)
    path = decoder_path(root)
    with in_eval_mode(model):
        for row in rows:
            with progress.forward_pass(path[-1], len(row)):
                path[0](input_ids=row[None].to(device_of(embedding)), use_cache=False)
