"""Find by measurement which modules put out the queries, keys and values of a model before rotation.

Families differ in what is between a projection and the rotation: norms over a head, over all heads, or none; one fused
projection or three; keys that several layers share; pairs in halves or interleaved. To go by names of modules, a list
of families would be needed. Instead a few tokens are read once with an attention function that records its arguments.
The output of the right module, once it is rotated, must equal the recorded query (or key). If no module fits, an error
is raised; nothing is guessed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rope_patch.frequencies import zero_unrotated
from rope_patch.modeling.after_decoder import decoder_path
from rope_patch.modeling.attention_probe import ROLES, AttentionCall, record_attention
from rope_patch.modeling.inputs import refuse_prompts
from rope_patch.modeling.reader import fixed_ids
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.patching.locate import device_of, locate
from rope_patch.patching.rotary import PatchedRotary, original_tables
from rope_patch.patching.verify import inspect_model
from rope_patch.tables import RotaryTable

PROBE_TOKENS = 8
PROBE_STEP = 97
"""Positions of the probe are this far apart, so that slow pairs turn visibly as well [tokens]."""


@dataclass(frozen=True, eq=False)
class HeadOutput:
    """A module whose output holds the heads of one role of one layer.

    Attributes:
        module: the module that puts out the heads.
        heads: (heads,) indices of the blocks of ``head_dim`` features that are the heads, in order.
        head_dim: number of features of a head.
        tokens_last: whether the output is (rows, heads, tokens, head_dim) and not (rows, tokens, …).
    """

    module: nn.Module
    heads: Tensor
    head_dim: int
    tokens_last: bool

    def of(self, output: Tensor) -> Tensor:
        """Return the heads from an output of the module: (rows, tokens, heads, head_dim)."""
        blocks = _blocks(output, self.head_dim, self.tokens_last)
        if len(self.heads) == blocks.shape[2]:
            return blocks
        return blocks[:, :, self.heads.to(blocks.device)]

    @property
    def bias(self) -> Tensor | None:
        """(heads, head_dim) the part of the heads that is the same for every token; None if the module has no bias."""
        bias = getattr(self.module, "bias", None)
        # The bias of a norm over single heads is shorter than all heads together.
        if not isinstance(bias, Tensor) or bias.numel() // self.head_dim <= int(self.heads.max()):
            return None
        return self.of(bias.detach().float().cpu()[None, None])[0, 0]


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """An attention layer: the modules that put out its queries, keys and values, and what it does with the logits.

    Attributes:
        index: index of the layer in the model.
        parts: the modules that put out queries, keys and values, by role.
        table: the rotary table that the layer uses.
        interleaved: whether pair i is the features 2 i and 2 i + 1; otherwise it is i and i + rotary_dim / 2.
        scaling: factor on q·k.
        softcap: bound of the scaled logits; None if there is none.
        window: number of tokens that a sliding layer sees [tokens]; None if the layer sees all.
        sinks: (heads,) a logit of each query head that has no key, as gpt-oss learns it; None if there is none.
        keys_of: index of the layer whose keys and values this one uses; its own index on most models.
    """

    index: int
    parts: Mapping[str, HeadOutput]
    table: RotaryTable
    interleaved: bool
    scaling: float
    softcap: float | None
    window: int | None
    sinks: Tensor | None
    keys_of: int


def split_pairs(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second feature of each pair of heads: two views (..., pairs) of (..., head_dim).

    >>> split_pairs(torch.arange(6), 2, False), split_pairs(torch.arange(6), 2, True)
    ((tensor([0, 1]), tensor([2, 3])), (tensor([0, 2]), tensor([1, 3])))
    """
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return heads (..., head_dim) rotated as attention code does; cos and sin, (..., pairs), fit their other axes."""
    first, second = split_pairs(x, cos.shape[-1], interleaved)
    out = x.clone()
    turned = split_pairs(out, cos.shape[-1], interleaved)
    turned[0].copy_(first * cos - second * sin)
    turned[1].copy_(second * cos + first * sin)
    return out


def find_attention_layers(model: nn.Module) -> tuple[AttentionLayer, ...]:
    """Find the modules that put out a model's queries, keys and values before rotation, layer by layer.

    Args:
        model: a causal language model of transformers, patched or not, bare or under a LoRA adapter.

    Raises:
        TypeError: it is not a model of transformers.
        ValueError: the model has no rotary table, one that changes with the length, or a rotary embedding of another
            kind; an adapter puts tokens of its own before the text; or the queries or keys of a layer are not a
            rotation of what one of its modules puts out.
    """
    refuse_prompts(model)
    location = locate(model)
    tables = _tables_in_use(location.model, location.module)
    root: Any = location.model
    name = type(root).__name__
    ids = fixed_ids(PROBE_TOKENS, root.get_input_embeddings().num_embeddings)
    positions = torch.arange(PROBE_TOKENS)[None] * PROBE_STEP
    with in_eval_mode(model):
        calls = record_attention(location.model, decoder_path(root)[0], ids, positions)
    if not calls:
        raise ValueError(
            f"{name} does not attend through transformers' AttentionInterface: what it rotates cannot be checked"
        )
    for call in calls:
        for role, state in call.states.items():
            if not bool(torch.isfinite(state).all()):  # such a state matches no output of a module
                raise ValueError(f"layer {call.index} of {name} has a {role} that is NaN or infinite")
    positions_on_device = positions.to(device_of(location.model))
    cos_sin = {kind: tuple(half.cpu() for half in location.cos_sin(kind, positions_on_device)) for kind in tables}
    types = getattr(location.config, "layer_types", None) or ()
    layers: list[AttentionLayer] = []
    for call in calls:
        expected = types[call.index] if call.index < len(types) else None
        # The stated layer type is tried first, since two tables of a model may be equal.
        likely = dict(sorted(tables.items(), key=lambda item: item[0] != expected))
        layers.append(_match(name, call, likely, cos_sin, calls, layers))
    if len({layer.index for layer in layers}) < len(layers):
        raise ValueError(f"{name} calls an attention layer more than once in a pass")
    return tuple(layers)


def _tables_in_use(model: PreTrainedModel, module: nn.Module) -> dict[str | None, RotaryTable]:
    """Return the tables that a model's rotary module holds, by layer type, with any rounding by a cast."""
    inspection = inspect_model(model)  # it raises for models that cannot be patched, either
    if isinstance(module, PatchedRotary):
        return {table.layer_type: table for table in inspection.tables}
    for table in inspection.tables:
        if table.is_dynamic:
            raise ValueError(
                f"{table.name} has a dynamic table (rope_type {table.rope_type!r}): it changes with the length that "
                "is read. Freeze it first, rope_patch.apply(model, 'default', freeze_at=LENGTH)"
            )
    original = original_tables(module)
    # What the config states stays with the table: how far it reaches follows from it.
    return {
        table.layer_type: replace(table, inv_freq=zero_unrotated(original[table.layer_type].float().cpu()))
        for table in inspection.tables
    }


# --- matching --------------------------------------------------------------------------------------------------------


def _match(
    model: str,
    call: AttentionCall,
    tables: Mapping[str | None, RotaryTable],
    cos_sin: Mapping[str | None, tuple[Tensor, ...]],
    calls: Sequence[AttentionCall],
    before: Sequence[AttentionLayer],
) -> AttentionLayer:
    """Find the modules that put out the queries, keys and values of one layer.

    Args:
        model: name of the model's class, for errors.
        call: the attention call of the layer.
        tables: the tables by layer type, the likely one first.
        cos_sin: cos and sin of the probe's positions, by layer type.
        calls: the attention calls of all layers, in order.
        before: the layers that were matched before this one.
    """
    for kind, table in tables.items():
        cos, sin = (half[..., None, : table.pairs] for half in cos_sin[kind])
        for interleaved in (False, True):
            turn = functools.partial(rotate, cos=cos, sin=sin, interleaved=interleaved)
            query = _search(call, "query", turn)
            if query is None:
                continue
            keys_of = call.index
            key = _search(call, "key", turn)
            value = _search(call, "value", lambda x: x)
            # Keys that the layer does not put out itself are those of an earlier layer (Gemma 4 shares them).
            if key is None:
                for other, layer in zip(calls, before, strict=False):  # `before` has only the layers of the first calls
                    if torch.equal(other.states["key"], call.states["key"]):
                        key = layer.parts["key"]
                        value = layer.parts["value"]
                        keys_of = layer.keys_of
                        break
            if key is None or value is None:
                missing = "values"
                if key is None:
                    missing = "keys before rotation"
                raise ValueError(
                    f"layer {call.index} of {model}: no part of {type(call.module).__name__} puts out its {missing}"
                )
            sinks = call.kwargs.get("s_aux")
            return AttentionLayer(
                index=call.index,
                parts={"query": query, "key": key, "value": value},
                table=table,
                interleaved=interleaved,
                scaling=float(call.kwargs.get("scaling") or call.states["query"].shape[-1] ** -0.5),
                softcap=call.kwargs.get("softcap"),
                window=call.window,
                sinks=None if sinks is None else sinks.detach().float().cpu(),
                keys_of=keys_of,
            )
    raise ValueError(
        f"layer {call.index} of {model}: its queries are no rotation of what a part of {type(call.module).__name__} "
        "puts out. Such a layer does not rotate, or rotates in a way of its own"
    )


def _search(call: AttentionCall, role: str, turn: Callable[[Tensor], Tensor]) -> HeadOutput | None:
    """Return the module whose output, once rotated, is what the attention function was given; None if none fits.

    Args:
        call: the attention call of the layer.
        role: ``"query"``, ``"key"`` or ``"value"``.
        turn: function that rotates heads (rows, tokens, heads, head_dim); for values it returns them unchanged.
    """
    heads = {role: states.shape[1] for role, states in call.states.items()}
    rotated = call.states[role].transpose(1, 2)
    rows, tokens, _, head_dim = rotated.shape
    fits: list[tuple[bool, int, HeadOutput]] = []
    for order, (name, module, output) in enumerate(call.outputs):
        for tokens_last in (False, True):
            blocks = _try_blocks(output, rows, tokens, head_dim, tokens_last)
            if blocks is None:
                continue
            for picked in _arrangements(blocks.shape[2], role, heads):
                if _close(turn(blocks[:, :, picked].float()), rotated):
                    # Equal outputs, as of zero weights, are distinguished by name; of a projection and its norm, the
                    # later one counts.
                    fits.append((name.startswith(role[0]), order, HeadOutput(module, picked, head_dim, tokens_last)))
    if not fits:
        return None
    return max(fits, key=lambda fit: fit[:2])[2]


def _arrangements(blocks: int, role: str, heads: Mapping[str, int]) -> Iterator[Tensor]:
    """Yield indices of the blocks of a module's output that may be the heads of a role.

    The heads may be alone in the output, or the three roles may be fused, role by role or head by head.

    Args:
        blocks: number of blocks of ``head_dim`` features in the output.
        role: ``"query"``, ``"key"`` or ``"value"``.
        heads: number of heads of each role.
    """
    place = ROLES.index(role)
    count = heads[role]
    if blocks == count:
        yield torch.arange(count)
    elif blocks == sum(heads.values()):
        yield torch.arange(count) + sum(heads[earlier] for earlier in ROLES[:place])
        if blocks == 3 * count:
            yield torch.arange(count) * 3 + place


def _close(got: Tensor, expected: Tensor) -> bool:
    if got.shape != expected.shape:
        return False
    # In a model of 16 bits the recorded state was rounded after the rotation, and `got` was not.
    allowed = max(1e-4, 4 * torch.finfo(expected.dtype).eps) * float(expected.abs().max())
    return bool(((got.float() - expected.float()).abs() <= allowed).all())


def _try_blocks(output: Tensor, rows: int, tokens: int, head_dim: int, tokens_last: bool) -> Tensor | None:
    if tokens_last:
        fits = output.ndim == 4 and (output.shape[0], output.shape[2], output.shape[3]) == (rows, tokens, head_dim)
    else:
        fits = output.ndim >= 3 and output.shape[:2] == (rows, tokens) and output[0, 0].numel() % head_dim == 0
    if not fits:
        return None
    return _blocks(output, head_dim, tokens_last)


def _blocks(output: Tensor, head_dim: int, tokens_last: bool) -> Tensor:
    """Return an output of a module as (rows, tokens, blocks, head_dim)."""
    if tokens_last:
        return output.transpose(1, 2)
    return output.reshape(*output.shape[:2], -1, head_dim)
