"""Tiny models of more families, and their queries, keys and values recorded in an independent way.

``stored`` wraps ``apply_rotary_pos_emb`` of the family's modeling file, which sees queries and keys before rotation,
and transformers' ``sdpa``, which sees values. ``attended`` wraps transformers' eager attention, which sees queries and
keys after rotation, and returns weights.
"""

import copy
import sys
from types import SimpleNamespace

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rope_patch.modeling.attention_layers import ROLES
from support.tiny import ARCHITECTURES, tiny_model

FAMILIES = [
    *ARCHITECTURES,
    "phi",
    "stablelm",
    "glm",
    "ernie4_5",
    "cohere",
    "olmo2",  # one norm over all heads
    "gpt_neox",  # query, key and value fused head by head
    "persimmon",  # the same, with norms behind
    "phi3-partial",
    "llama-llama3",
    "llama-yarn",
    "llama-bias",
    "gemma4-shared",
    "gemma4-keys-are-values",
]

INTERLEAVED = ("glm", "ernie4_5", "cohere")

TOKENS = 40


def text(tokens=TOKENS, seed=0):
    """Token ids (tokens,), no two of them equal, so that no two states have the same norm."""
    return torch.randperm(93, generator=torch.Generator().manual_seed(seed))[:tokens] + 3


def model_of(name, **changes):
    """A model whose weights, biases and norms are all random.

    In a fresh model biases are 0 and weights of norms are 1, so that a bias or a weight that is left out does not show.
    """
    model = tiny_model(name, **changes)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            elif "embed" not in key:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def stored(model, row, monkeypatch):
    """Let a model read token ids (tokens,); return queries and keys before rotation, and values.

    Returns:
        For each role a list with an entry (tokens, heads, features) for each layer.
    """
    states = {role: [] for role in ROLES}
    attention = model.get_decoder().layers[0]
    module = sys.modules[type(attention).__module__]
    rotate = module.apply_rotary_pos_emb
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    single = "gemma4" in module.__name__  # rotates one tensor at a call, (rows, tokens, heads, head_dim)
    state = {"calls": 0}

    def spy_rotation(*args, **kwargs):
        if single:
            # Shared layers rotate queries alone: a layer's query is the first call after its attention.
            role = "query" if state["calls"] == 0 else "key"
            states[role].append(args[0][0].clone())
            state["calls"] += 1
        else:
            states["query"].append(args[0][0].transpose(0, 1).clone())
            states["key"].append(args[1][0].transpose(0, 1).clone())
        return rotate(*args, **kwargs)

    def spy_attention(module, query, key, value, *args, **kwargs):
        state["calls"] = 0
        states["value"].append(value[0].transpose(0, 1).clone())
        return attend(module, query, key, value, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, "apply_rotary_pos_emb", spy_rotation)
        patch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", spy_attention)
        if model.config._attn_implementation == "eager":  # transformers chooses it for Gemma 2
            attend = module.eager_attention_forward
            patch.setattr(module, "eager_attention_forward", spy_attention)
        model(row[None], use_cache=False)
    return states


@torch.no_grad()
def attended(model, rows, monkeypatch):
    """What eager attention is given and returns, by row and layer: query, key, weights by head, scaling and window."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    modeling = sys.modules[type(model.get_decoder().layers[0]).__module__]
    attend = modeling.eager_attention_forward
    records = []

    def spy(layer, query, key, value, *args, **kwargs):
        repeated = key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        states = {"query": query[0].double(), "key": repeated.double()}
        records[-1].append(SimpleNamespace(**states, scaling=scaling, window=kwargs.get("sliding_window")))
        return attend(layer, query, key, value, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling, "eager_attention_forward", spy)
        for row in rows:
            records.append([])
            weights = model(row[None], use_cache=False, output_attentions=True).attentions
            for layer, layer_weights in zip(records[-1], weights, strict=True):
                layer.weights = layer_weights[0].double().numpy()
    return records
