"""Where heads attend, against plain loops over what transformers' own eager attention is given and returns.

Then models whose weights were set by hand, so that one knows which head looks where; and single heads.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import re
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy
import peft
import pytest
import torch
from scored import bold_model
from states import FAMILIES, INTERLEAVED, model_of, stored, text
from tiny import SIZE, YARN, ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    DeepseekV3Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PhimoeConfig,
    Qwen2MoeConfig,
    SmolLM3Config,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import rope_patch
from rope_patch import theory
from rope_patch.analysis import attention_mass, attention_sums, views
from rope_patch.analysis.attention_mass import OFFSETS, _check_reproduced, measure_heads, repeated_tokens
from rope_patch.analysis.attention_sums import OFTEN, SETTLED, TOP
from rope_patch.analysis.heads import FAR, TRIGGERS, Heads
from rope_patch.analysis.outliers import scatter
from rope_patch.analysis.recall import recall
from rope_patch.analysis.views import view_heads
from rope_patch.evaluation.text import builtin_text
from rope_patch.frequencies import geometric
from rope_patch.modeling.capture import Capture, capture

MORE = {
    # These two slide by their masks alone, and tell their attention no window.
    "qwen2_moe": Qwen2MoeConfig(
        **{**SIZE, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2, "num_experts": 2},
        **{"num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    ),
    "phimoe": PhimoeConfig(**SIZE, sliding_window=16, num_local_experts=2),
    # capture refuses these; measure_heads needs no pairs.
    "smollm3": SmolLM3Config(**{**SIZE, "num_hidden_layers": 4}),
    "deepseek_v3": DeepseekV3Config(
        **{**SIZE, "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 16},
        **{"n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
    ),
}
MEASURED = [*FAMILIES, *MORE]
SLIDING = {"mistral": [32, 32], "phimoe": [16, 16], "qwen2_moe": [16, None]} | {
    name: [16, None] for name in ("gemma2", "gemma3", "gemma4", "gemma4-keys-are-values")
}
SLIDING["gemma4-shared"] = [16, None] * 2


def model_for(name, **changes):
    if name not in MORE:
        return model_of(name, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(MORE[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def few_kinds(rows=2, tokens=40, seed=0):
    """Token ids (rows, tokens) of 7 kinds: they come back, and some of them often."""
    return torch.randint(3, 10, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def attended(model, rows, monkeypatch):
    """What eager attention is given and returns, by row and layer: query, key, weights by query head, and scaling."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    modeling = sys.modules[type(model.get_decoder().layers[0]).__module__]
    attend, records = modeling.eager_attention_forward, []

    def spy(layer, query, key, value, *args, **kwargs):
        repeated = key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)
        scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
        records[-1].append(SimpleNamespace(query=query[0].double(), key=repeated.double(), scaling=scaling))
        return attend(layer, query, key, value, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling, "eager_attention_forward", spy)
        for row in rows:
            records.append([])
            weights = model(row[None], use_cache=False, output_attentions=True).attentions
            for layer, layer_weights in zip(records[-1], weights, strict=True):
                layer.weights = layer_weights[0].double().numpy()
    return records


def loops(rows, layers, window, offsets=OFFSETS):
    """The numbers of ``LayerHeads`` from what each row's attention in one layer returned."""
    heads, tokens = layers[0].weights.shape[:2]
    start, window = min(SETTLED, tokens // 2), window or tokens
    collected = defaultdict(list)
    after, far, all_of = defaultdict(list), defaultdict(list), defaultdict(list)
    for r, row in enumerate(rows.tolist()):
        states = layers[r]
        for i in range(tokens):
            w = states.weights[:, i]
            for offset in range(min(i, 1) + 1):
                q, k = states.query[:, i], states.key[:, i - offset]
                logit, bound = (q * k).sum(-1) * states.scaling, q.norm(dim=-1) * k.norm(dim=-1) * states.scaling
                collected["logit", offset].append(logit.numpy())
                collected["bound", offset].append(bound.numpy())
                collected["cosine", offset].append((logit / bound).numpy())
            if i < start:
                continue
            sees = [j for j in range(i + 1) if i - j < window]
            for offset in range(offsets):
                if i - offset in sees:
                    collected["offset", offset].append(w[:, i - offset])
            if 0 in sees:
                collected["first"].append(w[:, 0])
            collected["distance"].append(sum(w[:, j] * (i - j) for j in sees))
            collected["entropy"].append(-sum(w[:, j] * numpy.log(w[:, j].clip(1e-300)) for j in sees))
            same = [j for j in sees if 0 < j < i and row[j - 1] == row[i]]
            if same:
                collected["induction"].append(w[:, same].sum(1))
                collected["chance"].append(len(same) / len(sees))
            after[row[i - 1]].append(w[:, i - 1])
            for j in sees:
                all_of[r, j].append(w[:, j])
                if i - j >= FAR:
                    far[r, j].append(w[:, j])
    mean = defaultdict(lambda: numpy.zeros(heads), {name: numpy.mean(values, 0) for name, values in collected.items()})
    queries = len(collected["distance"])
    enough = {r: max(FAR, max((len(values) for at, values in far.items() if at[0] == r), default=0) / 4)
              for r in range(len(rows))}  # fmt: skip
    draws = {place: numpy.mean(values, 0) for place, values in far.items() if len(values) >= enough[place[0]]}
    pulls = {token: numpy.mean(values, 0) for token, values in after.items() if len(values) >= OFTEN}
    places = [sorted(draws, key=lambda at, h=h: -draws[at][h])[:TOP] for h in range(heads)]
    triggers = [sorted(pulls, key=lambda at, h=h: -pulls[at][h])[:TOP] for h in range(heads)]
    return {
        "offset_mass": numpy.stack([mean["offset", offset] for offset in range(offsets)], 1),
        "first_mass": mean["first"],
        "sink_mass": [
            sum(sum(all_of[at])[h] for at in draws if draws[at][h] > attention_sums.SINK) / queries
            for h in range(heads)
        ],
        "sink_position": [[at[1] for at in row] for row in places],
        "sink_row": [[at[0] for at in row] for row in places],
        "sink_token": [[int(rows[at]) for at in row] for row in places],
        "sink_weight": [[draws[at][h] for at in row] for h, row in enumerate(places)],
        "induction_mass": mean.get("induction", numpy.full(heads, numpy.nan)),
        "induction_chance": mean.get("chance", 0.0),
        "trigger_token": triggers,
        "trigger_mass": [[pulls[at][h] for at in row] for h, row in enumerate(triggers)],
        "trigger_count": [[len(after[at]) for at in row] for row in triggers],
        "distance": mean["distance"],
        "entropy": mean["entropy"],
        **{name: numpy.stack([mean[name, 0], mean[name, 1]], 1) for name in ("logit", "bound", "cosine")},
    }


def assert_looped(layer, expected, atol=2e-5):
    """Compare with what loops found; what loops did not find is -1 or 0."""
    for name, values in expected.items():
        got, values = getattr(layer, name).numpy(), numpy.asarray(values)
        if name.startswith(("sink_", "trigger_")) and got.ndim == 2:
            rest = got[:, values.shape[1] :]
            assert (rest == (0 if name in ("sink_weight", "trigger_mass", "trigger_count") else -1)).all(), name
            got = got[:, : values.shape[1]]
        if values.dtype == int:
            assert got.tolist() == values.tolist(), name
        numpy.testing.assert_allclose(got, values, rtol=2e-5, atol=atol, err_msg=f"{name} of layer {layer.index}")


# --- the values


@pytest.mark.parametrize("name", MEASURED)
def test_all_numbers_equal_loops_over_eager_attention(name, monkeypatch):
    monkeypatch.setattr(attention_sums, "SINK", 0.08)  # random heads have no sinks of 0.3
    model, rows = model_for(name), few_kinds()
    states = attended(model, rows, monkeypatch)
    windows = SLIDING.get(name, [None] * model.config.num_hidden_layers)
    looped = [loops(rows, [row[index] for row in states], window) for index, window in enumerate(windows)]
    for block in (1, 7, None):
        got = measure_heads(model, rows, block=block)
        assert (got.model, got.tokens, got.rows) == (type(model).__name__, 80, 2)
        assert [layer.index for layer in got.layers] == list(range(model.config.num_hidden_layers))
        for layer, expected in zip(got.layers, looped, strict=True):
            assert layer.heads == 4
            assert_looped(layer, expected)
    assert name in MORE or any(max(expected["sink_mass"]) > 0 for expected in looped), "some keys count as sinks"


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "p_rope:p=0.5"), ("llama", "yarn:factor=4"), ("phi", "pi:factor=2"), ("gemma3", "nope")],
)
def test_a_patched_model_is_measured_with_its_table(name, method, monkeypatch):
    model, rows = model_of(name), few_kinds()
    stock = measure_heads(model, rows)
    with rope_patch.patched(model, rope_patch.parse(method)):
        got = measure_heads(model, rows)
        states = attended(model, rows, monkeypatch)
    for layer, window in zip(got.layers, SLIDING.get(name, [None] * 2), strict=True):
        assert_looped(layer, loops(rows, [row[layer.index] for row in states], window))
    assert not torch.allclose(got.layers[1].logit, stock.layers[1].logit, atol=1e-3)


@pytest.mark.parametrize("tokens", [2, 3, 9, 16])
@pytest.mark.parametrize("window", [None, 2, 5])
def test_short_texts_small_windows_and_far_offsets(window, tokens, monkeypatch):
    model = model_of("llama") if window is None else model_of("mistral", sliding_window=window)
    rows = few_kinds(1, tokens, seed=3)
    states = attended(model, rows, monkeypatch)
    for layer in measure_heads(model, rows[0], block=4, offsets=12).layers:
        expected = loops(rows, [states[0][layer.index]], window, offsets=12)
        assert_looped(layer, {key: value for key, value in expected.items() if numpy.size(value)})
        assert layer.repeated_mass.isnan().all()
        assert layer.sink_position.shape == (4, min(TOP, tokens))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma4", "glm", "llama-yarn"])
def test_the_bound_is_that_of_the_states_before_rotation(name, monkeypatch):
    """A rotation keeps lengths, so the bound needs none; YaRN's factor on cos and sin stretches both states."""
    model, row = model_of(name), text()
    with stored(model, monkeypatch) as states, torch.no_grad():
        model(row[None], use_cache=False)
    scaling = {"gemma4": 1.0, "llama-yarn": 0.25 * (0.1 * math.log(4) + 1) ** 2}.get(name, 0.25)
    for layer in measure_heads(model, row).layers:
        query, key = (states[role][layer.index].double().norm(dim=-1) for role in ("query", "key"))
        key = key.repeat_interleave(4 // key.shape[1], 1)
        expected = torch.stack([(query * key).mean(0), (query[1:] * key[:-1]).mean(0)], 1)
        torch.testing.assert_close(layer.bound, expected * scaling, rtol=1e-5, atol=1e-5)
        assert bool((layer.logit.abs() <= layer.bound).all()) and float(layer.cosine.abs().max()) <= 1


def test_logits_are_those_of_stored_states_turned_by_transformers(monkeypatch):
    model, row = model_of("llama"), text()
    with stored(model, monkeypatch) as states, torch.no_grad():
        model(row[None], use_cache=False)
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(row))[None])
    got = measure_heads(model, row)
    for layer, view in zip(got.layers, view_heads(model, row, [(0, 3), (1, 3)]), strict=True):
        query, key = (states[role][layer.index].transpose(0, 1)[None] for role in ("query", "key"))
        query, key = apply_rotary_pos_emb(query, key.repeat_interleave(2, 1), cos, sin)
        logits = (query @ key.mT)[0].double() / 4
        expected = torch.stack([logits.diagonal(-offset, 1, 2).mean(1) for offset in (0, 1)], 1)
        torch.testing.assert_close(layer.logit, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(view.logits, logits[3], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(view.query, states["query"][layer.index][:, 3].double())
        torch.testing.assert_close(view.key, states["key"][layer.index][:, 1].double())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_repeated_mass_is_induction_on_random_tokens_that_come_twice(name, monkeypatch):
    model, row = model_of(name), text(40)
    again = repeated_tokens(row[None])
    assert torch.equal(again[:20], again[20:]) and len(again[:20].unique()) == 20 and torch.isin(again, row).all()
    states = attended(model, again[None], monkeypatch)
    for layer in measure_heads(model, row).layers:
        window = SLIDING.get(name, [None] * 2)[layer.index]
        expected = loops(again[None], [states[0][layer.index]], window)
        torch.testing.assert_close(
            layer.repeated_mass.numpy(), expected["induction_mass"], rtol=1e-5, atol=1e-5, equal_nan=True
        )
        assert layer.repeated_mass.isnan().all() == (window == 16), "the match is 19 tokens back"
        assert layer.induction_mass.isnan().all() and layer.induction_chance == 0, "no token of the text comes twice"


def test_random_tokens_that_come_twice():
    rows = few_kinds(3, 50)
    again = repeated_tokens(rows)
    assert sorted(again[:7].tolist()) == list(range(3, 10)) and torch.equal(again, repeated_tokens(rows))
    assert not torch.equal(again, repeated_tokens(rows, seed=1))
    assert len(repeated_tokens(text(90)[None])) == 90 and len(repeated_tokens(text(90)[None], longest=20)) == 40
    assert repeated_tokens(torch.full((1, 9), 5)).tolist() == [5, 5]


def test_a_fixed_distance_is_not_taken_for_induction():
    """Of 4 random tokens, 2 come twice and the match is the previous token."""
    model = golden(["diagonal", "previous"]).model
    for tokens, measured in ((4, False), (16, False), (18, True)):
        layer = measure_heads(model, text(60)[:tokens] % 50 + 1).layer(1)
        assert layer.repeated_mass.isnan().all() != measured
        assert not any("induction" in layer.head_types(head) for head in range(4))


def test_even_attention_to_one_token_over_and_over_is_no_induction():
    layer = measure_heads(model_of("llama"), torch.full((40,), 5)).layer(1)
    assert float(layer.induction_mass.min()) > 0.7 and float(layer.induction_chance) > 0.9
    assert [layer.head_types(head) for head in range(4)] == [()] * 4


def test_rows_layers_and_offsets():
    model, rows = model_of("gemma2"), few_kinds(3, 30)
    whole, one_layer, single = (
        measure_heads(model, rows),
        measure_heads(model, rows, layers=[1]),
        measure_heads(model, rows[1]),
    )
    assert [layer.index for layer in one_layer.layers] == [1]
    for name, value in vars(one_layer.layer(1)).items():
        torch.testing.assert_close(value, getattr(whole.layer(1), name), rtol=0, atol=0, equal_nan=True)
    mean = torch.stack([measure_heads(model, row).layer(0).entropy for row in rows]).mean(0)
    torch.testing.assert_close(whole.layer(0).entropy, mean)
    assert single.layer(0).sink_row.unique().tolist() == [0] and single.text != whole.text
    wide = measure_heads(model, rows, offsets=12).layer(1)
    assert wide.offset_mass.shape == (4, 12)
    torch.testing.assert_close(wide.offset_mass[:, :8], whole.layer(1).offset_mass)
    with pytest.raises(ValueError, match=re.escape("layers [1] were measured, got 0")):
        one_layer.layer(0)


def test_progress_adds_up_to_the_tokens():
    steps = []
    measure_heads(model_of("gemma4-shared"), few_kinds(3, 40), on_progress=steps.append)
    assert sum(steps) == 120 and len(steps) > 3 and min(steps) > 0


# --- states in, states out


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma4-shared", "phi", "gpt_neox", "phimoe"])
def test_the_pass_computes_the_states_of_the_model(name):
    model, rows = model_for(name), few_kinds(2, 90)
    out = {}

    def note(part, args, kwargs, output):
        out.setdefault(tuple(kwargs["input_ids"][0].tolist()), []).append(output[0])

    handle = model.get_decoder().register_forward_hook(note, with_kwargs=True)
    measure_heads(model, rows, block=11)
    handle.remove()
    for row in rows:
        (ours,) = out[tuple(row.tolist())]
        with torch.no_grad():
            stock = model.get_decoder()(input_ids=row[None], use_cache=False)[0]
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_left_as_it_was(implementation):
    model, rows = model_of("llama", attention=implementation, attention_dropout=0.5), few_kinds()
    with torch.no_grad():
        before = model(rows, use_cache=False).logits
    quiet = measure_heads(model, rows)
    model.train()
    model.model.layers[0].eval()

    def unchanged():
        assert model.training and not model.model.layers[0].training and model.model.layers[1].training
        assert model.config._attn_implementation == implementation
        assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
        assert attention_mass._PASS.get() is None

    assert torch.equal(measure_heads(model, rows).layer(1).entropy, quiet.layer(1).entropy), "without dropout"
    unchanged()
    view_heads(model, rows[0], [(1, 2)])
    unchanged()

    def stop(tokens):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_heads(model, rows, on_progress=stop)
    unchanged()
    weight = model.model.layers[1].self_attn.k_proj.weight
    original = weight[20].clone()
    with torch.no_grad():
        weight[20] = math.nan
    for measure in (measure_heads, lambda model, rows: view_heads(model, rows[0], [(1, 2)])):
        with pytest.raises(ValueError, match="layer 1"):
            measure(model, rows)
        unchanged()
    with torch.no_grad():
        weight[20] = original
        assert torch.equal(model.eval()(rows, use_cache=False).logits, before)


# --- memory


class Largest(TorchDispatchMode):
    """The most numbers of any tensor that an operation made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_nothing_is_as_large_as_the_weights(name, monkeypatch):
    model, row = model_of(name), ids(600, 1)[0]
    model.config.max_position_embeddings = 600
    with Largest() as least:
        measure_heads(model, row, block=16)
    assert 4 * 16 * 40 < least.numbers < 600 * 600 / 2
    with Largest() as whole:
        measure_heads(model, row, block=600)
    assert whole.numbers >= 4 * 600 * 600, "the measure sees what it should"
    monkeypatch.setattr(attention_mass, "BLOCK_BYTES", 4 * 4 * 600 * 20)  # so 20 queries, by itself
    with Largest() as chosen:
        measure_heads(model, row)
    assert 4 * 20 * 30 < chosen.numbers < 600 * 600 / 2


def test_a_sliding_layer_computes_no_more_than_its_window(monkeypatch):
    class Weights(TorchDispatchMode):
        keys = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten._softmax.default:
                self.keys = max(self.keys, args[0].shape[-1])
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(attention_mass, "_check_reproduced", lambda *args: None)  # the model's own attention does
    with Weights() as weights:
        measure_heads(model_of("mistral"), ids(200, 1), block=16)
    assert weights.keys == 16 + 31


# --- weights set by hand

CONTEXT, SINK_TOKEN, SINK_AT = 512, 7, 3


def golden(order, *, layer=1, back=1, outliers=()):
    """A Llama of three layers; in one of them each head does what it is told.

    Table: 32 pairs, ``10^(-i/8)`` rad/token. Its queries and keys are biases, the same for every token, but for the
    sink's: there the keys read a feature that one token alone has.

    Args:
        order: what the heads do.
        layer: which of the three it is.
        back: how far the head "previous" looks.
        outliers: pair, angle of its keys ahead of its queries, radius of its keys; those of the head "outliers".
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **{**SIZE, "num_hidden_layers": 3, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT},
            head_dim=64,
            attention_bias=True,
        )
    ).eval()
    table, planted = geometric(1e4, 64), model.model.layers[layer].self_attn
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings.copy_(torch.randint(0, 2, embeddings.shape) * 2.0 - 1.0)
        embeddings[:, 0], embeddings[SINK_TOKEN] = 0.0, 0.0
        embeddings[SINK_TOKEN, 0] = 1.0  # the norm before the layer makes it √64 = 8
        for before in model.model.layers[:layer]:  # what the golden layer reads are the embeddings
            before.self_attn.o_proj.weight.zero_()
            before.mlp.down_proj.weight.zero_()
        for linear in (planted.q_proj, planted.k_proj):
            linear.weight.zero_()
            linear.bias.zero_()
        queries, keys = planted.q_proj.bias.view(4, 64), planted.k_proj.bias.view(4, 64)
        for head, role in enumerate(order):
            if role in ("diagonal", "previous"):
                # Σ (1 - cos f) over the table is 1.08, so the neighbours of the peak lie 4 · 40 · 1.08 / 8 = 22 below.
                psi = torch.cat((torch.ones(32), torch.zeros(32)))
                query, key = theory.positional_head(table, psi, back if role == "previous" else 0)
                queries[head], keys[head] = 40 * query.float(), 4 * key.float()
            elif role == "sink":
                # Pairs that turn less than 0.04 rad over 100 tokens: 4 · 10 · 8 / 8 = 40 from everywhere.
                queries[head, 28:32] = 10.0
                planted.k_proj.weight[64 * head + 28 : 64 * head + 32, 0] = 1.0
            elif role == "outliers":
                for pair, angle, radius in outliers:
                    queries[head, pair] = 0.05
                    keys[head, pair], keys[head, 32 + pair] = radius * math.cos(angle), radius * math.sin(angle)
    return SimpleNamespace(model=model, table=table, layer=layer)


def golden_rows(rows=2, tokens=100):
    """A text in which the sink's token stands at one position and nowhere else."""
    token_ids = torch.randint(8, 96, (rows, tokens), generator=torch.Generator().manual_seed(5))
    token_ids[:, SINK_AT] = SINK_TOKEN
    return token_ids


ROLES = ("diagonal", "previous", "sink", "outliers")
# 2π/512 = 0.0123. Pair 24 turns 1e-3 rad/token: its angle bound is π + 0.256 = 3.40. Pair 20 turns 3.16e-3 and needs
# π + 0.81 = 3.95. Pair 4 turns 0.316: no angle is enough.
INSIDE = (24, 4.5, 15.0)
OUTSIDE = {"by its angle": (20, 3.5, 18.0), "by its frequency": (4, 4.5, 18.0)}


@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize(("order", "layer"), [(ROLES, 1), (("outliers", "sink", "previous", "diagonal"), 2)])
def test_a_golden_layer_is_recovered_head_by_head_and_pair_by_pair(order, layer, outside, tmp_path):
    golden(order, layer=layer, outliers=[INSIDE, OUTSIDE[outside]]).model.save_pretrained(tmp_path)
    model, rows = AutoModelForCausalLM.from_pretrained(tmp_path).eval(), golden_rows()
    at = {role: order.index(role) for role in ROLES}
    got = measure_heads(model, rows)
    head_layer = got.layer(layer)
    types = {role: head_layer.head_types(head) for role, head in at.items()}
    assert types == {"diagonal": ("diagonal",), "previous": ("previous token",), "sink": ("sink",), "outliers": ()}
    assert float(head_layer.offset_mass[at["diagonal"], 0]) > 0.99 < float(head_layer.offset_mass[at["previous"], 1])
    assert float(head_layer.sink_mass[at["sink"]]) > 0.99 < float(head_layer.sink_weight[at["sink"], 0])
    assert head_layer.sink_position[at["sink"]].tolist()[:2] == [SINK_AT] * 2, "one in each row"
    assert head_layer.sink_token[at["sink"]].tolist()[:2] == [SINK_TOKEN] * 2
    assert sorted(head_layer.sink_row[at["sink"]].tolist()[:2]) == [0, 1]
    assert not any(one.head_types(head) for one in got.layers if one.index != layer for head in range(4))
    positional = [(layer, at["diagonal"], ("diagonal",)), (layer, at["previous"], ("previous token",))]
    assert got.positional() == sorted(positional)
    # Barbero et al.'s tables: at its own distance a positional head's logit is its bound.
    assert head_layer.cosine[at["diagonal"], 0] == pytest.approx(1) == head_layer.cosine[at["previous"], 1]
    assert max(head_layer.cosine[at["diagonal"], 1], head_layer.cosine[at["previous"], 0]) < 0.99

    measured = capture(model, rows)
    points = scatter(measured)
    big = points.key_radius > 9
    places = zip(points.layer[big].tolist(), points.head[big].tolist(), points.pair[big].tolist(), strict=True)
    (inner, *_), (outer, *_) = INSIDE, OUTSIDE[outside]
    assert list(places) == [(layer, at["outliers"], pair) for pair in sorted((inner, outer))]
    assert points.within_angle[big].tolist() == [pair == inner for pair in sorted((inner, outer))]
    row = recall(measured, thresholds=[9.0]).rows[0]
    assert (row.outliers, row.angle, row.frequency) == (2, 0.5, 1.0 if outside == "by its angle" else 0.5)

    with rope_patch.patched(model, "nope"):
        flat = measure_heads(model, rows)
    assert flat.positional() == [] and float(flat.layer(layer).offset_mass[at["previous"], 1]) < 0.1
    assert flat.layer(layer).head_types(at["sink"]) == ("sink",), "a sink asks for no position"
    assert measure_heads(model, rows).positional() == sorted(positional)


@pytest.mark.parametrize("back", [2, 7, 10])
def test_a_head_that_looks_further_back(back):
    model = golden(["previous"], back=back).model
    got = measure_heads(model, golden_rows(), offsets=12)
    assert got.positional() == [(1, 0, (f"{back} back",))]
    assert float(got.layer(1).distance[0]) == pytest.approx(back, abs=0.05)  # the first queries have no 10 behind them
    assert float(got.layer(1).entropy[0]) < 0.05
    assert measure_heads(model, golden_rows()).positional() == ([] if back == 10 else [(1, 0, (f"{back} back",))])


def induction_pair():
    """A Llama of two layers: one head writes what token came before, one looks for that of its own.

    Tokens are one-hot in features 0 to 39, and head 0 of layer 0 copies the previous one's to features 40 to 79. Head 0
    of layer 1 reads its own token from the former and its keys' from the latter, one slow pair for each token.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            **{**SIZE, "vocab_size": 40, "hidden_size": 80, "num_attention_heads": 2, "num_key_value_heads": 2},
            head_dim=128,
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        )
    ).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.zero_()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                getattr(layer.self_attn, name).weight.zero_()
                getattr(layer.self_attn, name).bias.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(40, 80))
        first, second = (layer.self_attn for layer in model.model.layers)
        psi = torch.cat((torch.ones(64), torch.zeros(64)))
        query, key = theory.positional_head(geometric(1e12, 128), psi, 1)
        first.q_proj.bias[:128], first.k_proj.bias[:128] = 16 * query.float(), 16 * key.float()
        first.v_proj.weight[:40, :40] = torch.eye(40) / math.sqrt(80)  # a one-hot of 80 features is √80 behind the norm
        first.o_proj.weight[40:80, :40] = torch.eye(40)
        # Pairs from 24 on turn at most 3e-5 rad/token. Behind the norm a one is √40: logits of 9 · 40 / √128 = 32.
        second.q_proj.weight[24:64, :40] = second.k_proj.weight[24:64, 40:] = 3 * torch.eye(40)
    return model


def test_an_induction_head_made_of_two():
    model = induction_pair()
    rows = torch.randint(1, 40, (2, 90), generator=torch.Generator().manual_seed(0))
    rows[:, 0] = 0
    got = measure_heads(model, rows)
    assert got.layer(0).head_types(0) == ("previous token",) and got.layer(1).head_types(0) == ("induction",)
    assert float(got.layer(0).offset_mass[0, 1]) > 0.99
    # The first key has none before it and holds its own token: one query of 40 shares its attention with it.
    assert float(got.layer(1).repeated_mass[0]) == pytest.approx(1 - 0.5 / 40, abs=1e-3)
    assert float(got.layer(1).induction_mass[0]) > 0.99
    assert float(got.layer(1).induction_chance) < 0.1
    assert got.layer(0).head_types(1) == got.layer(1).head_types(1) == ()
    with rope_patch.patched(model, "nope"):
        flat = measure_heads(model, rows)
    assert flat.positional() == [] and float(flat.layer(1).repeated_mass[0]) < 0.1


@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_a_trained_model_looks_back_before_it_repeats(shape):
    folder = rope_patch.data_path("assets") / shape
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stream = tokenizer(builtin_text("heldout").text[:30000], add_special_tokens=False, verbose=False)["input_ids"]
    rows = torch.tensor(stream[: 16 * 256]).view(16, 256)

    def heads(name, majority=0.7):
        return [layer.index for layer in got.layers for head in range(layer.heads)
                if name in layer.head_types(head, majority=majority)]  # fmt: skip

    got = measure_heads(model, rows)
    assert heads("previous token") and len(heads("induction")) >= 2
    assert min(heads("previous token")) < min(heads("induction"))
    every = {"layer_types": ["sliding_attention", "full_attention"]} if shape == "gemma3" else {}
    with rope_patch.patched(model, "nope", **every):
        got = measure_heads(model, rows)
    assert not heads("previous token", 0.5) and not heads("induction", 0.5)


def test_head_types_by_hand():
    """What the numbers of a head are called: at half of its attention, or at another majority."""
    template = measure_heads(model_of("llama"), text(40)).layers[0]
    zero = {name: torch.zeros_like(value) for name, value in vars(template).items() if isinstance(value, torch.Tensor)}
    empty = dataclasses.replace(template, **zero)
    assert empty.head_types(0) == ()

    def types_of(majority=0.5, **values):
        changes = {}
        for name, value in values.items():
            name, _, place = name.partition("__")
            changes.setdefault(name, zero[name].clone())[1, *([int(place)] if place else [])] = value
        layer = dataclasses.replace(empty, **changes)
        assert layer.head_types(0) == ()
        return layer.head_types(1, majority=majority)

    assert types_of(offset_mass__0=0.5) == ("diagonal",)
    assert types_of(offset_mass__0=0.49) == ()
    assert types_of(offset_mass__0=0.49, majority=0.4) == ("diagonal",)
    assert types_of(offset_mass__1=0.6) == ("previous token",)
    assert types_of(offset_mass__7=0.6) == ("7 back",)
    assert types_of(first_mass=0.5, sink_mass=0.5) == ("first token",)
    assert types_of(first_mass=0.4, sink_mass=0.5) == ("sink",)
    assert types_of(induction_mass=0.5) == types_of(induction_mass=math.nan, repeated_mass=0.5) == ("induction",)
    assert types_of(induction_mass=math.nan, repeated_mass=math.nan) == ()
    by_chance = dataclasses.replace(empty, induction_mass=torch.full((4,), 0.9).double())
    assert by_chance.head_types(0) == ("induction",)
    assert dataclasses.replace(by_chance, induction_chance=torch.tensor(0.5).double()).head_types(0) == ()
    several = {f"trigger_mass__{i}": 0.5 for i in range(TRIGGERS)}
    assert types_of(**several) == ("after a token",)
    assert types_of(trigger_mass__0=0.5) == (), "one token of hundreds may do so by chance"
    assert types_of(trigger_mass__0=0.5, first_mass=0.6) == ("first token", "after a token")
    assert types_of(**several, offset_mass__1=0.1) == (), "it looks there anyway"
    assert types_of(offset_mass__0=0.5, repeated_mass=0.9, **several) == ("diagonal", "induction")


def test_a_head_that_looks_back_after_one_token_alone():
    """Barbero et al.'s apostrophe head: token 7 draws the query right behind it, and the first token all others."""
    planted = golden([])
    attention = planted.model.model.layers[1].self_attn
    rows = torch.randint(8, 96, (2, 100), generator=torch.Generator().manual_seed(5))
    rows[:, 12::12] = SINK_TOKEN
    rows[:, 0] = 5
    with torch.no_grad():
        embeddings = planted.model.model.embed_tokens.weight
        embeddings[:, 1] = embeddings[5] = 0.0
        embeddings[5, 1] = 1.0
        query, key = theory.positional_head(planted.table, torch.cat((torch.ones(32), torch.zeros(32))), 1)
        # Behind the norm both features are 8. Keys of token 7 give 8 · 14 · 32 / 8 = 14 · 32 one token behind and
        # 14 · (32 - 1.08) next to it; that of the first token, in pairs that hardly turn, 14 · 31.5 from everywhere.
        attention.q_proj.bias[:64] = 8 * query.float()
        attention.k_proj.weight[:64, 0] = 14 / 8 * key.float()
        attention.k_proj.weight[28:32, 1] = 14 * 31.5 / 4 / 8
    layer = measure_heads(planted.model, rows).layer(1)
    assert int(layer.trigger_token[0, 0]) == SINK_TOKEN and float(layer.trigger_mass[0, 0]) > 0.99
    assert int(layer.trigger_count[0, 0]) == 16 and float(layer.trigger_mass[0, 1]) < 0.01
    assert float(layer.first_mass[0]) > 0.9 > 0.1 > float(layer.offset_mass[0, 1])
    assert layer.head_types(0) == ("first token", "after a token")


# --- single heads


def all_views(model, row):
    layers, heads = model.config.num_hidden_layers, model.config.num_attention_heads
    return view_heads(model, row, [(layer, head) for layer in range(layers) for head in range(heads)])


@pytest.mark.parametrize("name", [*FAMILIES, "qwen2_moe"])
def test_a_view_holds_what_eager_attention_was_given_and_returns(name, monkeypatch):
    model, row = model_for(name), text(40)
    (states,) = attended(model, row[None], monkeypatch)
    windows = SLIDING.get(name, [None] * model.config.num_hidden_layers)
    for view in all_views(model, row):
        recorded = states[view.layer]
        torch.testing.assert_close(view.pattern, torch.tensor(recorded.weights[view.head]), rtol=1e-4, atol=2e-5)
        logits = recorded.query[view.head] @ recorded.key[view.head].T * recorded.scaling
        torch.testing.assert_close(view.logits, logits, rtol=1e-4, atol=2e-4)
        assert view.window == windows[view.layer] and torch.equal(view.token_ids, row)
        assert view.interleaved == (name in INTERLEAVED)
        for query, key in ((39, 39), (39, 30), (5, 0), (0, 0)):
            pairs, rest = view.terms(query, key)
            assert pairs.shape == view.inv_freq.shape
            assert float(pairs.sum()) + rest == pytest.approx(float(view.logits[query, key]), rel=1e-9, abs=1e-9)
            if name in ("phi", "phi3-partial", "glm", "gpt_neox", "stablelm", "persimmon"):
                assert abs(rest) > 1e-4, "some features do not rotate"
            elif name.startswith(("llama", "gemma2", "qwen")):
                assert rest == 0
    if name == "gemma2":
        assert {view.softcap for view in all_views(model, row)} == {50.0}


def test_soft_capping_is_of_the_pattern_alone(monkeypatch):
    model, row = model_of("gemma2", attn_logit_softcapping=0.5), text(30)
    (states,) = attended(model, row[None], monkeypatch)
    for view in all_views(model, row):
        weights = torch.tensor(states[view.layer].weights[view.head])
        torch.testing.assert_close(view.pattern, weights, rtol=1e-4, atol=1e-6)
        assert float(view.logits.abs().max()) > 0.5
        uncapped = dataclasses.replace(view, softcap=None)
        assert not torch.allclose(uncapped.pattern, view.pattern, atol=1e-2)
    layer = measure_heads(model, row).layer(1)
    assert float(layer.bound.max()) > 0.5, "before soft-capping"


@pytest.mark.parametrize("name", ["llama", "glm", "phi", "llama-yarn"])
def test_the_norms_and_terms_of_pairs(name, monkeypatch):
    """Pair by pair from the stored states: norms before rotation, and what each adds, by complex numbers."""
    model, row = model_of(name), text(20)
    with stored(model, monkeypatch) as states, torch.no_grad():
        model(row[None], use_cache=False)
    (view,) = view_heads(model, row, [(1, 2)])
    n, scale = len(view.inv_freq), {"llama-yarn": (0.1 * math.log(4) + 1) ** 2}.get(name, 1.0)
    assert view.attention_scaling**2 == pytest.approx(scale)
    groups = states["query"][1].shape[1] // states["key"][1].shape[1]
    query, key = states["query"][1][:, 2].double(), states["key"][1][:, 2 // groups].double()
    first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2)) if name == "glm" else (slice(n), slice(n, 2 * n))
    q, k = (torch.complex(x[:, first], x[:, second]) for x in (query, key))
    torch.testing.assert_close(view.query_norms, q.abs(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(view.key_norms, k.abs(), rtol=1e-5, atol=1e-6)
    assert view.query_norms.shape == (20, n)

    def term(i, j):
        return (q[i] * k[j].conj() * torch.polar(torch.ones(n).double(), (i - j) * view.inv_freq.double())).real

    for i, j in ((0, 0), (9, 8), (19, 2)):
        torch.testing.assert_close(view.terms(i, j)[0], term(i, j) * scale / 4, rtol=1e-5, atol=1e-6)
    for distance in (0, 1, 12, 19):
        expected = torch.stack([term(i, i - distance) for i in range(distance, 20)]).mean(0) * scale / 4
        torch.testing.assert_close(view.mean_terms(distance), expected, rtol=1e-5, atol=1e-6)


def test_a_view_of_a_patched_model_turns_with_its_table():
    model, row = model_of("llama"), text(20)
    with rope_patch.patched(model, "yarn", factor=4) as patch:
        (view,) = view_heads(model, row[None], [(0, 1)])
        assert torch.equal(view.inv_freq, patch.after[None].inv_freq)
        assert view.attention_scaling == patch.after[None].attention_scaling > 1
    (stock,) = view_heads(model, row, [(0, 1)])
    assert torch.equal(stock.query, view.query) and not torch.allclose(stock.logits, view.logits, atol=1e-3)


def test_the_views_of_golden_heads():
    planted, row = golden(ROLES, outliers=[INSIDE]), golden_rows(1)[0]
    diagonal, previous, sink, other = view_heads(planted.model, row, [(1, head) for head in range(4)])
    assert float(diagonal.pattern.diagonal().min()) > 0.99 < float(previous.pattern.diagonal(-1).min())
    assert float(sink.pattern[SINK_AT:, SINK_AT].min()) > 0.99
    # 40 · 4 · cos 0 / 8 = 20 of every pair at its distance, cos f of it elsewhere.
    torch.testing.assert_close(previous.mean_terms(1), torch.full((32,), 20.0).double(), rtol=1e-4, atol=0)
    torch.testing.assert_close(previous.mean_terms(0), 20 * planted.table.double().cos(), rtol=1e-4, atol=1e-4)
    assert sink.terms(60, SINK_AT)[0].nonzero().flatten().tolist() == [28, 29, 30, 31]
    assert int(other.key_norms[0].argmax()) == 24 and float(other.key_norms[0, 24]) == pytest.approx(15)


# --- models in other states


def test_an_adapter_is_part_of_the_model():
    rows = few_kinds()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model_of("llama"), config).eval()
    merged, bare = copy.deepcopy(adapted).merge_and_unload(), model_of("llama")
    got = measure_heads(adapted, rows)
    assert got.model == "LlamaForCausalLM"
    for layer, same, other in zip(
        got.layers, measure_heads(merged, rows).layers, measure_heads(bare, rows).layers, strict=True
    ):
        torch.testing.assert_close(layer.entropy, same.entropy, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(layer.entropy, other.entropy, atol=1e-3)
    (view,), (same,) = (view_heads(model, rows[0], [(1, 3)]) for model in (adapted, merged))
    torch.testing.assert_close(view.pattern, same.pattern, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_in_bfloat16(name, monkeypatch):
    model, rows = model_of(name).to(torch.bfloat16), few_kinds()
    states = attended(model, rows, monkeypatch)
    for layer in measure_heads(model, rows, block=7).layers:
        expected = loops(rows, [row[layer.index] for row in states], SLIDING.get(name, [None] * 2)[layer.index])
        for key in ("offset_mass", "first_mass", "distance", "entropy"):
            numpy.testing.assert_allclose(getattr(layer, key).numpy(), expected[key], rtol=0.03, atol=0.03, err_msg=key)
    for view in view_heads(model, rows[0], [(0, 1), (1, 2)]):
        numpy.testing.assert_allclose(view.pattern, states[0][view.layer].weights[view.head], atol=0.05)


# --- files


def test_heads_survive_their_file(tmp_path):
    got = measure_heads(model_of("gemma2"), few_kinds(), layers=[1])
    assert got.layers[0].repeated_mass.isnan().all()
    got.to_npz(tmp_path / "some.npz")
    back = Heads.from_npz(tmp_path / "some.npz")
    assert [entry.name for entry in tmp_path.iterdir()] == ["some.npz"]
    for name in ("model", "tokens", "rows", "text"):
        assert getattr(back, name) == getattr(got, name)
    assert [layer.index for layer in back.layers] == [1]
    for name, value in vars(got.layer(1)).items():
        read = getattr(back.layer(1), name)
        if isinstance(value, torch.Tensor):
            assert read.dtype == value.dtype
            torch.testing.assert_close(read, value, rtol=0, atol=0, equal_nan=True)
    assert back.layer(1).head_types(2) == got.layer(1).head_types(2)
    with numpy.load(tmp_path / "some.npz", allow_pickle=False) as arrays:
        assert {"outline", "layer1.offset_mass", "layer1.cosine"} <= set(arrays)
    with pytest.raises(FileNotFoundError):
        got.to_npz(tmp_path / "missing" / "some.npz")


def test_files_of_another_kind_are_told_apart(tmp_path):
    measure_heads(model_of("llama"), few_kinds()).to_npz(tmp_path / "heads.npz")
    capture(model_of("llama"), text(8)).to_npz(tmp_path / "capture.npz")
    with pytest.raises(ValueError, match="holds no results of schema heads 1, got schema 1"):
        Heads.from_npz(tmp_path / "capture.npz")
    with pytest.raises(ValueError, match="holds no results of schema 1, got schema heads 1"):
        Capture.from_npz(tmp_path / "heads.npz")


# --- bad input


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([5], {}, "a text must hold at least 2 tokens, got 1"),
        ([0.5, 0.5], {}, "token_ids must be whole numbers, got torch.float32"),
        ([5, 96], {}, "token ids must be in [0, 96), got 5 to 96"),
        ([-1, 5], {}, "token ids must be in [0, 96), got -1 to 5"),
        ([5, 6], {"layers": [2]}, "LlamaForCausalLM has attention layers 0 to 1, got [2]"),
        ([5, 6], {"layers": [-1, 0]}, "LlamaForCausalLM has attention layers 0 to 1, got [-1, 0]"),
        ([5, 6], {"layers": []}, "LlamaForCausalLM has attention layers 0 to 1, got []"),
        ([5, 6], {"block": 0}, "offsets must be >= 2 and block >= 1, got 8 and 0"),
        ([5, 6], {"offsets": 1}, "offsets must be >= 2 and block >= 1, got 1 and None"),
    ],
)
def test_bad_input_of_measure_heads(tokens, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_heads(tiny_model(), torch.tensor(tokens), **options)


@pytest.mark.parametrize(
    ("tokens", "heads", "message"),
    [
        (torch.tensor([5]), [(0, 0)], "a text must hold at least 2 tokens, got 1"),
        (torch.tensor([5, 96]), [(0, 0)], "token ids must be in [0, 96), got 5 to 96"),
        (ids(8, 2), [(0, 0)], "a view takes one text of at most 1024 tokens, got (2, 8)"),
        (ids(1025, 1), [(0, 0)], "a view takes one text of at most 1024 tokens, got (1, 1025)"),
        (ids(8, 1), [(2, 0)], "LlamaForCausalLM has attention layers 0 to 1, got 2"),
        (ids(8, 1), [(0, 0), (1, 4)], "layer 1 has query heads 0 to 3, got 4"),
        (ids(8, 1), [(1, -1)], "layer 1 has query heads 0 to 3, got -1"),
    ],
)
def test_bad_input_of_view_heads(tokens, heads, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        view_heads(tiny_model(), tokens, heads)


def test_the_longest_view_and_none_at_all(monkeypatch):
    monkeypatch.setattr(views, "LIMIT", 8)
    assert len(view_heads(tiny_model(), ids(8, 1), [(1, 1), (0, 3), (1, 1)])) == 3
    assert view_heads(tiny_model(), ids(8, 1), []) == ()


def test_terms_of_keys_that_a_query_does_not_see():
    sliding, full = view_heads(model_of("gemma3"), text(40), [(0, 0), (1, 0)])
    full.terms(39, 0)
    sliding.terms(39, 24)
    for view, window, query, key in (
        (full, 40, 3, 4), (full, 40, 40, 0), (full, 40, -1, -1), (full, 40, 3, -1), (sliding, 16, 39, 23),
    ):  # fmt: skip
        message = f"a query in [0, 40) sees the {window} keys up to its own, got query {query}, key {key}"
        with pytest.raises(ValueError, match=re.escape(message)):
            view.terms(query, key)
    for distance in (-1, 40):
        with pytest.raises(ValueError, match=re.escape(f"distance must be in [0, 40), got {distance}")):
            full.mean_terms(distance)


def test_weights_that_are_no_numbers_are_named():
    model, rows = tiny_model(), ids(40, 2)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[20] = math.nan  # key head 1, which query heads 2 and 3 read
    message = "layer 1, query head 2 has logits that are no finite numbers at position 0: statistics need finite"
    for block in (None, 7):
        with pytest.raises(ValueError, match=re.escape(message)):
            measure_heads(model, rows, block=block)
    assert len(measure_heads(model, rows, layers=[0]).layers) == 1
    with pytest.raises(ValueError, match="layer 1"):
        view_heads(model, rows[0], [(1, 0)])


@pytest.mark.parametrize(("role", "head"), [("query", 1), ("key", 3)])
def test_states_of_a_view_that_are_not_finite_are_named(role, head):
    model = tiny_model()

    def spoil(part, args, output):
        output[:, 9:, 16:32] = math.inf  # head 1, behind what the probe reads

    getattr(model.model.layers[1].self_attn, f"{role[0]}_proj").register_forward_hook(spoil)
    message = f"layer 1, query head {head}: its {role} states are no finite numbers"
    with pytest.raises(ValueError, match=message):
        view_heads(model, ids(40, 1), [(1, 0), (1, head)])
    assert len(view_heads(model, ids(40, 1), [(0, head), (1, 0)])) == 2


def test_infinite_logits_are_named_where_they_appear():
    """Soft-capping hides infinity, and so does a softmax in which other logits are larger."""
    row = torch.full((40,), 9)
    row[25] = 7
    for family in ("gemma2", "llama"):
        model = tiny_model(family)
        with torch.no_grad():
            model.model.embed_tokens.weight.fill_(0.1)
            model.model.embed_tokens.weight[7] = -0.1

        def spoil(part, args, output):
            output[:, args[0][0, :, 0] < 0, 16:] = -1e30  # the keys of head 1 at token 7; its queries are positive
            return output

        attention = model.model.layers[0].self_attn
        with torch.no_grad():
            attention.q_proj.weight.fill_(1e10)
        attention.k_proj.register_forward_hook(spoil)
        message = r"layer 0, query head 2 has logits that are no finite numbers at position 2\d: "
        with pytest.raises(ValueError, match=message):
            measure_heads(model, row, block=16)


def halved(part, query, key, value, mask, scaling=None, **kwargs):
    return AttentionInterface()["sdpa"](part, query, key, value, mask, scaling=scaling / 2, **kwargs)


@contextlib.contextmanager
def attention_replaced(model, forward):
    """Let layer 1 attend through a function of the usual forward and its arguments."""
    attention = model.model.layers[1].self_attn
    usual = attention.forward
    attention.forward = lambda *args, **kwargs: forward(usual, *args, **kwargs)
    yield
    del attention.forward


@pytest.mark.parametrize(("tokens", "refused"), [(4, False), (40, True)])
def test_a_few_tokens_that_half_precision_puts_far_off_are_no_other_kind_of_attention(tokens, refused):
    # as of SmolLM2 in bfloat16, where transformers' eager attention and sdpa differ by 10 to 30 % on 4 tokens of 64
    model = bold_model("llama").bfloat16()
    reads = []

    def decoder(**inputs):
        out = model.model(**inputs)[0]
        reads.append(out)
        return (out if len(reads) == 1 else out * (1 + 0.3 * (torch.arange(64) < tokens)[None, :, None]),)

    with torch.no_grad(), pytest.raises(ValueError, match="of its own") if refused else contextlib.nullcontext():
        _check_reproduced(model, decoder, ids(64, 1)[0])
    assert len(reads) == 2


def test_attention_of_another_kind_is_refused(monkeypatch):
    model, row = bold_model("llama"), ids(20, 1)
    monkeypatch.setitem(AttentionInterface._global_mapping, "halved", halved)
    model.config._attn_implementation = "halved"
    with pytest.raises(ValueError, match="LlamaForCausalLM attends in a way of its own: a causal softmax of q·k gives"):
        measure_heads(model, row)
    assert model.config._attn_implementation == "halved"
    model.config._attn_implementation = "sdpa"

    def none(usual, hidden_states, **kwargs):
        return torch.zeros_like(hidden_states), None

    def twice(usual, **kwargs):
        usual(**kwargs)
        return usual(**kwargs)

    def masked(usual, **kwargs):
        return usual(**{**kwargs, "attention_mask": torch.zeros(1, 1, 20, 20)})

    for forward, message in (
        (none, "layers 1 did not attend through transformers' AttentionInterface: where they attend cannot be seen"),
        (twice, "attention layer 1 is called more than once in a pass"),
        (masked, "a layer attends with a mask of its own: causal and sliding layers alone are known"),
    ):
        with attention_replaced(model, forward), pytest.raises(ValueError, match=re.escape(message)):
            measure_heads(model, row)
    with attention_replaced(model, none):
        assert len(measure_heads(model, row, layers=[0]).layers) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2), "found no rotary table in GPT2LMHeadModel"),
        (
            GptOssConfig(
                **{**SIZE, "head_dim": 16, "num_local_experts": 4, "max_position_embeddings": 256},
                rope_parameters={**YARN, "original_max_position_embeddings": 64},
            ),
            "GptOssAttention attends with s_aux: this pass knows logits of q·k alone",
        ),
        (
            Llama4TextConfig(**SIZE, head_dim=16, num_local_experts=1, intermediate_size_mlp=32),
            "Llama4ForCausalLM attends within chunks: this pass knows causal and sliding layers alone",
        ),
    ],
    ids=["no rotary", "learned sinks", "chunks"],
)
def test_models_that_cannot_be_measured(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_heads(AutoModelForCausalLM.from_config(config).eval(), ids(8, 1))


def test_a_learned_prompt_is_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(tiny_model(), config)
    for measure in (measure_heads, lambda model, row: view_heads(model, row, [(0, 0)])):
        with pytest.raises(ValueError, match="learn a prompt or prefix"):
            measure(model, ids(8, 1))


def test_not_a_transformers_model():
    with pytest.raises(TypeError, match="expected a transformers model, got Linear"):
        measure_heads(torch.nn.Linear(2, 2), ids(8, 1))
