"""``kv_check``: it measures what the engines measure, its conclusions follow, what is planted is found."""

import json
import math
from dataclasses import replace

import pytest
import torch
from support.evaluated import check_cache, compared
from support.kv_rows import BASE, COST, by_hand, error, off
from support.prompting import ENGLISH, TOKENIZER
from support.scored import watched
from support.tiny import YARN, bundled_model, ids, small
from transformers import AutoModelForCausalLM, LlamaConfig

import rope_patch
from rope_patch.evaluation.metrics import METRICS, spans_at
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.attribution import error_shares, worst_layers
from rope_patch.kv_evaluation.cache_size import cache_bits, heads_of, stored_states
from rope_patch.kv_evaluation.layer_outputs import LayerOutputs
from rope_patch.kv_evaluation.measure_format import tokens_to_attribute, tokens_to_check
from rope_patch.kv_evaluation.results import KVCheck
from rope_patch.modeling.attention_layers import find_attention_layers
from rope_patch.modeling.capture import capture
from rope_patch.modeling.identity import FIXED_TOKENS
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.kv_check import Limits
from rope_patch.runtime.progress import listen
from rope_patch.texts.documents import spread_windows

LENGTHS = (40, 56)
BEFORE = "k=int3.pre;v=none;sinks=2"
ASKED = {"lengths": LENGTHS, "windows": 3, "depths": (0.0, 1.0), "samples": 1, "text": ENGLISH, "haystack": "noise"}
FORMATS = ("int4-token", "k=int2.channel8;v=int4.token8;residual=8", BEFORE)


@pytest.fixture(scope="module")
def checked():
    model = small()
    check = check_cache(model, TOKENIZER, FORMATS, methods=("default", "p_rope:p=0.5"), **ASKED)
    assert rope_patch.inspect(model).record is None
    return model, check


# --- what is measured


def test_rows_are_what_the_engines_measure(checked):
    model, check = checked
    texts, digest = spread_windows(TOKENIZER, ENGLISH, 56, 3)
    assert check.digest == digest and check.windows == 3 and check.text == "text of the user's own"
    assert check.methods == ("default", "p_rope:p=0.5") and len(check.rows) == 8
    for row, name in zip(check.of("default"), ("none", *FORMATS), strict=True):
        assert (row.format, row.format_text) == (name, str(Scheme.parse(name)))
        with quantized(model, name) as factory:
            cache = None if name == "none" else factory
            score = perplexity(model, texts, window=56, buckets=[0, 40, 56], cache=cache)
            result = retrieval(
                model, TOKENIZER, lengths=LENGTHS, depths=(0, 1), samples=1, haystack="noise", cache=cache
            )
        assert row.scores.perplexity == score and row.scores.retrieval == {"passkey": result}
    plain, rough = check.of("default")[:2]
    assert plain.scores.perplexity != rough.scores.perplexity


@torch.no_grad()
def whole_logprobs(model):
    """Log-probabilities of the two windows that distributions are compared on, from whole logits."""
    texts, _ = spread_windows(TOKENIZER, ENGLISH, 56, 3)
    ids = torch.stack([window.ids for window in texts[:2]])
    return model(ids, use_cache=False).logits.double().log_softmax(-1)


def test_divergence_is_the_mean_kl_of_whole_distributions(checked):
    model, check = checked
    plain = whole_logprobs(model)
    with quantized(model, FORMATS[1]):
        rough = whole_logprobs(model)
    for length, divergence in check.of("default")[2].divergences.items():
        assert divergence.tokens == 2 * length
        p = plain[:, :length]
        q = rough[:, :length]
        assert divergence.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
        assert divergence.top1 == float((p.argmax(-1) == q.argmax(-1)).double().mean())


def test_bits_by_hand(checked):
    _, check = checked
    none, token, channel, before = check.of("default")
    assert none.bits == none.cache_bits[56] == 16
    assert token.bits == 4 + 32 / 16 == token.cache_bits[56]  # two numbers of 16 bits share 16 features
    # Keys: 8 tokens share two numbers. Values: 8 features do. Of 40 tokens 32 have left the residual window.
    assert (channel.key_bits, channel.value_bits) == (2 + 4, 4 + 4)
    assert channel.cache_bits == {40: 0.8 * 7 + 0.2 * 16, 56: (6 * 7 + 16) / 7}
    assert (before.key_bits, before.value_bits) == (5, 16)
    assert before.cache_bits[40] == ((38 * 5 + 2 * 16) / 40 + 16) / 2
    # Of two layers one slides over 16 tokens, and holds no more: the residual window leaves it nothing.
    slides = check_cache(small("gemma3"), TOKENIZER, ["k=int4.token;v=int4.token;residual=16"], **ASKED).rows[1]
    assert slides.cache_bits[40] == pytest.approx((24 * 6 + 16 * 16 + 16 * 16) / (40 + 16))


def test_a_cache_that_is_flushed_has_the_size_that_the_next_query_reads():
    """After 40 tokens the fifth block of 8 keys is full, and rounded at once; the last 8 values stay as they are."""
    model = small()
    scheme = Scheme.parse("k=int2.channel8;v=int4.token8;residual=8;flush=8")
    stored = stored_states(find_attention_layers(model), heads_of(capture(model, ids(8))), scheme)
    assert cache_bits(stored, 40) == (6 + (32 * 8 + 8 * 16) / 40) / 2


def test_which_features_of_keys_rotate_follows_from_each_method():
    check = check_cache(
        small(), TOKENIZER, ["k=int4;v=int4;rope=full"], methods=("default", "p_rope:p=0.5"), **{**ASKED, "windows": 2}
    )
    all_rotate, half = (check.of(method)[1] for method in check.methods)
    # Two numbers of 16 bits share 8 features of keys, or 16 of values.
    assert (all_rotate.key_bits, half.key_bits, half.value_bits) == (16, (16 + 4 + 4) / 2, 4 + 2)
    assert 0 < all_rotate.divergence.kl < half.divergence.kl


def test_json_says_all_and_is_standard(checked):
    _, check = checked

    data = json.loads(check.to_json(), parse_constant=pytest.fail)
    assert data["summary"] == check.summary() and data["simulated"] is True
    row = check.of("p_rope:p=0.5")[2]
    entry = data["rows"][6]
    assert (entry["format"], entry["format_text"]) == (FORMATS[1], FORMATS[1])
    assert entry["lengths"]["56"]["perplexity"] == row.scores.perplexity.between(0, 56)
    assert entry["lengths"]["40"]["nll_change"] == list(change(check, row, 40))
    assert entry["lengths"]["40"]["verdict"]["kind"] == check.verdict(row, 40).kind


# --- what is concluded


def change(check, row, length, metric="perplexity"):
    spans = {metric.name: span for metric, span in spans_at(check.spec, length)}
    return check.change(row, METRICS[metric], spans[metric])


def check_of(*rows, lengths=(4, 8)):
    return KVCheck(
        model="tiny",
        windows=4,
        text="a text",
        digest="ab" * 32,
        trained_length=8,
        captures={},
        biases=(),
        limits=Limits(0.02),
        spec=replace(rows[0].scores.spec, lengths=lengths),
        rows=rows,
        environment={},
    )


@pytest.mark.parametrize(
    ("losses", "hits", "kind"),
    [
        (BASE, None, "safe"),
        (off(0.01, 0.01, 0.01, 0.01), None, "safe"),  # log 1.02 = 0.0198
        (off(0.03, 0.031, 0.029, 0.03), None, "unsafe"),
        (off(0.1, -0.1, 0.1, -0.1), None, "undecided"),
        (off(-0.03, -0.031, -0.029, -0.03), None, "unsafe"),  # a fall is no gain: the distribution is another
        (off(0.1, 0.0, 0.1, 0.0), None, "undecided"),  # 5 % more, by an interval from below 2 %
        (BASE, {(8, 0.0): 5}, "undecided"),  # 1 prompt of 18
        (BASE, {(8, depth): 1 for depth in (0.0, 0.5, 1.0)}, "unsafe"),
    ],
)
def test_verdicts(losses, hits, kind):
    check = check_of(by_hand("none", BASE), by_hand("s", losses, hits))
    assert check.verdict(check.rows[1], 8).kind == kind
    assert check.verdict(check.rows[0], 8).kind == "safe"
    estimate, low, high = change(check, check.rows[1], 8)
    assert estimate == pytest.approx(sum(losses) / 4 - sum(BASE) / 4) and low <= estimate <= high
    lost = 0 if hits is None else sum(6 - count for count in hits.values()) / 18
    assert change(check, check.rows[1], 8, "retrieval")[0] == pytest.approx(-lost)


def test_the_smallest_format_that_is_safe_is_advised_by_bits_and_then_by_kl():
    """No prompt of six haystacks changes, which rules out what Clopper and Pearson do: 1 − .025^(1/6) = .46."""
    rows = [by_hand("none", BASE), by_hand("unsafe", off(0.03, 0.031, 0.029, 0.03), bits=2.0)]
    rows += [by_hand("large", BASE, bits=8.0), by_hand("worse", BASE, bits=4.0, kl=2e-5)]
    rows += [by_hand("small", BASE, bits=4.0, kl=1e-5)]
    (sentence,) = check_of(*rows).advice()
    assert "small" in sentence and "4.00 bits" in sentence and "KL 1.0e-05" in sentence and "0.46" in sentence
    (none,) = check_of(*rows[:2]).advice()
    assert "full precision" in none and "unsafe" not in none


def test_one_window_shows_no_more_than_what_no_noise_explains():
    """By hand: log 1.02 is 0.0198, and 0.1 more is noise."""
    for moved, kind in ((2.0, "unsafe"), (0.121, "unsafe"), (0.119, "undecided"), (-0.121, "unsafe")):
        check = check_of(by_hand("none", [1.0]), by_hand("s", [1.0 + moved]))
        assert check.verdict(check.rows[1], 8).kind == kind
    far = check_of(by_hand("none", BASE), by_hand("s", off(1.8, 0.4, 1.6, 0.1)))
    assert far.verdict(far.rows[1], 8).kind == "unsafe" and change(far, far.rows[1], 8)[1] < 0


@pytest.mark.parametrize(("kl", "kind"), [(0.0197, "safe"), (0.0199, "unsafe"), (math.nan, "unsafe")])
def test_kl_above_the_limit_is_unsafe_where_perplexity_and_retrieval_see_nothing(kl, kind):
    check = check_of(by_hand("none", BASE), by_hand("s", BASE, kl=kl))
    assert check.verdict(check.rows[1], 8).kind == kind
    assert ("KL" in check.summary()[-1]) == (kind == "unsafe")


def test_attribution_by_hand():
    costs = {0: 0.01, 1: 0.3, 2: 0.21}
    assert worst_layers(costs) == (1, 2), "layers 1 and 2 have nine tenths of 0.52, and layer 1 alone has less"
    assert worst_layers({layer: 1.0 for layer in range(30)}) == (0, 1, 2, 3), "no more than four"
    assert worst_layers({0: 0.0, 1: 0.0}) == ()
    # Two layers of two heads: the squares are 14, 8 without the first cause, and 1 without both.
    errors = [error([1, 2], [2, 0], [0, 1.0]), error([3, 0], [0, 2], [0, 0.0])]
    shares = error_shares(errors, ["biases", "outlier pairs"])
    assert shares == pytest.approx({"biases": 6 / 14, "outlier pairs": 7 / 14, "the rest": 1 / 14})
    assert error_shares([error([0.0, 0.0], [0.0, 0.0])], ["outlier pairs"]) == {}
    assert COST.by_layer == "layer 1 0.300, layer 2 0.200, layer 0 0.100"


def test_attribution_is_what_happens_without():
    """Each part of a format, and each remedy, costs the KL of a format that has it so from the start."""
    asked = {**ASKED, "lengths": [56]}
    check = check_cache(small(), TOKENIZER, ["k=int2.token;v=int3.token"], **asked)
    row = check.rows[1]
    base = check.rows[0]
    assert check.verdict(row, 56).kind == "unsafe" and base.attribution is None
    model = small()
    plain = whole_logprobs(model)

    def cost(text):
        with quantized(model, text):
            rough = whole_logprobs(model)
        return pytest.approx(float((plain.exp() * (plain - rough)).sum(-1).mean()), rel=1e-3, abs=1e-6)

    attribution = row.attribution
    assert attribution.whole == cost("k=int2.token;v=int3.token")
    assert attribution.keys == cost("k=int2.token;v=none")
    assert attribution.layers == {0: cost("k=int2;v=int3;skip=1"), 1: cost("k=int2;v=int3;skip=0")}
    helped = {remedy.name: remedy.kl for remedy in attribution.remedies}
    assert helped.pop("the mean key subtracted before rounding") > 0  # see test_kv_cache.py
    assert worst_layers(attribution.layers) == (0,)
    assert helped == {
        "the worst layers (0) in full precision": cost("k=int2;v=int3;skip=0"),
        "a scale per channel of keys (int2.channel32)": cost("k=int2.channel32;v=int3"),
        "features of keys rotated (hadamard)": cost("k=int2.hadamard;v=int3"),
    }
    assert [one.kl for one in attribution.remedies] == sorted(one.kl for one in attribution.remedies)
    assert json.loads(check.to_json())["rows"][1]["attribution"]["keys"] == attribution.keys


def test_what_rounds_nothing_is_said():
    broken = off(0.5, 0.51, 0.49, 0.5)
    idle = {"bits": 16.0}
    rows = [by_hand("none", BASE), by_hand("a", broken), by_hand("b", BASE, **idle)]
    rows += [by_hand("c", off(0.1, -0.1, 0.1, -0.1)), by_hand("d", BASE, **idle)]
    check = check_of(*rows, lengths=(8,))
    assert [check.verdict(row, 8).idle for row in check.rows] == [False, False, True, False, True]
    (sentence,) = check.summary()
    assert sentence.endswith("; c is undecided; b, d round nothing at 8 tokens.")


def test_what_a_format_loses_is_counted_of_what_full_precision_answers():
    base = by_hand("none", BASE, {(8, 0.0): 0, (8, 0.5): 4})
    check = check_of(
        base, by_hand("a", BASE, {(8, 0.0): 3, (8, 0.5): 1, (8, 1.0): 5}), by_hand("b", BASE), lengths=(8,)
    )
    _, sentence = check.summary()
    assert sentence.startswith("Of what full precision answers at 8 tokens a loses 4 of 10 passkey")
    assert sentence.endswith(" (and answers 3 of the 8 others).")


def test_the_patch_that_a_model_came_with_is_told(checked):
    model, _ = checked
    (plain,) = rope_patch.inspect(model).tables
    with rope_patch.patched(model, "yarn:factor=4") as patch:
        options = {"methods": ["default", "p_rope:p=0.5"], **ASKED, "windows": 1, "depths": (0.5,)}
        check = check_cache(model, TOKENIZER, ["int4-token"], **options)
        (own,) = (slot.fingerprint for slot in patch.after.values())
    assert own != plain.fingerprint
    assert check.loaded == "yarn:factor=4"
    assert check.tables["default"] == {"all": own} and check.tables["p_rope:p=0.5"]["all"] not in (
        own,
        plain.fingerprint,
    )
    assert check.meant("default") == "default: yarn:factor=4, as loaded"
    assert json.loads(check.to_json())["methods"]["default"] == {"patch": "yarn:factor=4", "tables": {"all": own}}


def test_the_trained_length_is_that_of_a_comparison_also_where_the_config_scales_its_table():
    """A checkpoint that states YaRN was trained with it: its context is the scaled one, not the one before."""
    model = small(rope_parameters=YARN, max_position_embeddings=256)
    options = {**ASKED, "lengths": [56], "windows": 1, "depths": [0.5]}
    comparison = compared(model, TOKENIZER, ["default"], **options)
    check = check_cache(model, TOKENIZER, ["fp8"], **options)
    assert check.rows[0].tables[0].context == 64
    assert comparison.trained_length == check.trained_length == json.loads(check.to_json())["trained_length"] == 256
    longer = replace(check, trained_length=32)
    assert not any("within the trained length" in line for line in longer.warnings), "no prompt is within it"
    assert any("within the trained length of 256" in line for line in check.warnings)


def test_without_the_unpatched_model_the_check_says_that_it_was_not_measured(checked):
    _, check = checked
    other = replace(check, rows=check.of("p_rope:p=0.5"), trained_length=56)
    (sentence,) = other.warnings
    assert "0 of 2 passkey prompts of 40 tokens, within the trained length of 56" in sentence
    assert "was not measured" in sentence
    assert replace(other, loaded="pi:factor=2").warnings == []


@pytest.mark.parametrize("family", ["llama", "gemma4-shared"])
def test_the_cost_of_a_layer_is_that_of_a_whole_pass_though_its_pass_begins_there(family, monkeypatch):
    asked = {**ASKED, "tolerance": 0.0}
    counts = []

    def costs():
        model = small(family, num_hidden_layers=4)
        with watched(model.model.layers[0].mlp, lambda *args, **kwargs: counts.append(1)):
            return check_cache(model, TOKENIZER, ["int2.token"], **asked).rows[-1].attribution.layers

    got = costs()
    begun = len(counts)
    monkeypatch.setattr(LayerOutputs, "read", lambda self, windows: setattr(self, "usable", False))
    assert got == costs() and len(got) > 1
    assert (begun < len(counts) - begun) == (family == "llama"), "layers that share keys are read from the first on"


# --- finished work, and errors


def test_progress_adds_up_to_what_was_announced_also_where_formats_are_unsafe_and_work_is_resumed():
    model = small()
    spec = EvalSpec(LENGTHS, windows=3, depths=(0.0, 1.0), samples=1)
    kept = {}
    announced = tokens_to_check(spec, formats=2, methods=2)
    # By hand: 3 formats of 3 windows of 56 and 2 prompts of each length; the statistics on 2 windows.
    assert announced == 2 * (3 * (3 * 56 + 2 * 96) + 2 * 56)
    # Under each method one format is unsafe: its keys, two layers, up to five remedies, and errors on one window.
    expected = 2 * tokens_to_attribute(spec, layers=2)
    assert expected == 2 * (8 * 2 * 56 + 56)
    results = []
    for progress, more in (([], []), ([], [])):
        options = {"methods": ("default", "nope"), "resume": kept, **ASKED}
        with listen(lambda stage, tokens, progress=progress: progress.append(tokens), on_more=more.append):
            check = check_cache(model, TOKENIZER, ["int2.token", "int8-token"], **options)
        assert sum(tokens for tokens in more if tokens > 0) == expected
        assert sum(progress) == announced + sum(more) and min(progress) >= 0
        results.append(check.to_json())
    assert results[0] == results[1]
    assert [row.attribution is not None for row in check.rows] == [False, True, False] * 2


def test_a_second_run_reads_nothing_anew(tmp_path, monkeypatch):
    model = small()
    path = tmp_path / "finished.jsonl"
    heads = []
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda states: heads.append(1) or head(states))

    def stop(stage, tokens):
        if stage == f"default, {BEFORE}":
            raise KeyboardInterrupt

    names = ["int4-token", BEFORE]
    asked = {**ASKED, "tolerance": 0.1}  # by which int4-token alone is unsafe
    with listen(stop), pytest.raises(KeyboardInterrupt):
        check_cache(model, TOKENIZER, names, resume=path, **asked)
    assert rope_patch.inspect(model).record is None and path.exists()
    progress = []
    with listen(lambda *event: progress.append(event)):
        check = check_cache(model, TOKENIZER, names, resume=path, **asked)
    again = len(heads)
    stages = {stage for stage, _ in progress if "attribution" not in stage}
    assert stages == {f"default, {name}" for name in ("statistics of keys", BEFORE)}, "int4-token was finished"
    read = []
    with watched(model.model, lambda **kwargs: read.append(kwargs["input_ids"].numel())):
        resumed = check_cache(model, TOKENIZER, names, resume=path, **asked)
    assert len(heads) == again + 1, "the fixed tokens"
    # The windows, once for statistics and states; 8 tokens are a probe, 64 are the fixed tokens.
    assert sum(size for size in read if size > 8) == 2 * 56 + FIXED_TOKENS
    assert resumed.to_json() == check.to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": ["int4-token;skip=9"]}, "default: int4-token;skip=9: skip names layer 9: the layers with keys"),
        ({"formats": ["none"]}, "at least one format other than none"),
        ({"formats": ["fp8", "int4", "fp8.token"]}, "'fp8' and 'fp8.token' both mean k=fp8;v=fp8"),
        ({"methods": ["nope", "nope"]}, "methods must differ from each other, got nope, nope"),
        ({"windows": 0}, "windows >= 1"),
        ({"tolerance": -0.1}, r"tolerance must be in \[0, 1\] \(0.05 is 5 %\), got -0.1"),
    ],
)  # fmt: skip
def test_errors_before_anything_is_measured(tmp_path, changes, message):
    given = {"formats": ["int4-token"], **ASKED, **changes}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        check_cache(small(), TOKENIZER, given.pop("formats"), resume=tmp_path / "finished.jsonl", **given)
    assert not list(tmp_path.iterdir())


# --- a planted fault


def planted(layers, pairs, size):
    """The bundled Llama with biases like Qwen's: long constant keys in slow pairs that no query looks at."""
    base = bundled_model()
    model = AutoModelForCausalLM.from_config(LlamaConfig.from_dict({**base.config.to_dict(), "attention_bias": True}))
    model.float().eval().load_state_dict(base.state_dict(), strict=False)
    heads = base.config.num_attention_heads
    width = base.config.head_dim
    features = [*pairs, *(pair + width // 2 for pair in pairs)]
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
                part.bias.zero_()
            if index in layers:
                attention.q_proj.weight.view(heads, width, -1)[:, features] = 0
                attention.k_proj.bias.view(heads, width)[:, features] = size
    return model


@pytest.mark.slow
def test_a_planted_fault_is_named():
    options = {"lengths": [96], "windows": 5, "depths": (0.5,), "samples": 2, "tolerance": 0.05, "text": ENGLISH}
    without = check_cache(planted((0, 2), (14, 15), 0.0), TOKENIZER, ["int4-token"], **options)
    assert without.verdict(without.rows[1], 96).kind == "safe"
    check = check_cache(planted((0, 2), (14, 15), 300.0), TOKENIZER, ["int4-token"], **options)
    plain, broken = check.rows
    assert plain.scores.perplexity.nll == pytest.approx(without.rows[0].scores.perplexity.nll, abs=1e-3)
    assert check.verdict(broken, 96).kind == "unsafe" and change(check, broken, 96)[0] > 0.1
    costs = broken.attribution.layers
    assert min(costs[0], costs[2]) > 0.1 > 20 * max(costs[1], costs[3])
    assert broken.attribution.shares["biases"] > 0.9
    helped = {remedy.name: remedy.kl for remedy in broken.attribution.remedies}
    assert helped["biases subtracted before rounding"] < 0.05 * broken.attribution.whole
    assert helped["a scale per channel of keys (int4.channel32)"] < 0.05 * broken.attribution.whole
    first = check.biases[0]
    second = check.biases[-1]
    assert {bias.layer for bias in check.biases} == {0, 2} and {bias.pair for bias in check.biases} == {14, 15}
    assert (first.module, first.radius, second.radius) == ("k_proj", *[pytest.approx(300 * 2**0.5)] * 2)
    assert check.summary()[0].startswith(f"k_proj of layer {first.layer} has a bias of 424 in pair {first.pair}, ")
    assert without.biases == ()
