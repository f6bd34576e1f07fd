"""The maths of a table, against transformers, scipy, brute force and the papers' printed numbers."""

import functools
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from rope_patch import frequencies
from rope_patch.frequencies import fingerprint, geometric, granularity, unrotated, zero_unrotated
from rope_patch.methods.llama3 import llama3_table
from rope_patch.methods.longrope import longrope_factors, longrope_table
from rope_patch.methods.yarn import yarn_scaling, yarn_table

# (rotary_dim, rope_theta): even, odd and single pairs, dimensions and bases of Gemma, Llama 3 and Qwen
SHAPES = [(256, 1e4), (128, 5e5), (96, 1e6), (6, 1234.5), (2, 1e4)]


def stock(rope_type, rotary_dim, rope_theta, *, context=4096, **parameters):
    """What transformers computes for a rope type: (inv_freq, attention_scaling)."""
    seq_len = parameters.pop("seq_len", None)
    config = LlamaConfig(
        head_dim=rotary_dim,
        max_position_embeddings=context,
        rope_parameters={"rope_type": rope_type, "rope_theta": rope_theta, **parameters},
    )
    if rope_type == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=seq_len)


# --- the plain table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rotary_dim", "rope_theta"), SHAPES)
def test_geometric_is_transformers_own(rotary_dim, rope_theta):
    table = geometric(rope_theta, rotary_dim)
    assert table.dtype == torch.float32
    assert torch.equal(table, stock("default", rotary_dim, rope_theta)[0])


@pytest.mark.parametrize("rotary_dim", [0, -2, 7])
def test_a_table_needs_whole_pairs(rotary_dim):
    for build in (geometric, functools.partial(yarn_table, factor=2, context=64)):
        with pytest.raises(ValueError, match="rotary_dim"):
            build(1e4, rotary_dim)


@pytest.mark.parametrize("rope_theta", [0.0, -1.0, math.inf, math.nan])
def test_a_base_is_finite_and_positive(rope_theta):
    with pytest.raises(ValueError, match="rope_theta"):
        geometric(rope_theta, 8)


def test_is_geometric():
    table = geometric(1e4, 64)
    assert frequencies.is_geometric(table, 1e4)
    assert frequencies.is_geometric(torch.nextafter(table, torch.zeros(32)), 1e4)  # the last bit may differ
    assert not frequencies.is_geometric(table, 1.0001e4)
    assert not frequencies.is_geometric(table / 2, 1e4)
    assert not frequencies.is_geometric(table.bfloat16().float(), 1e4)
    cut = table.clone()
    cut[-1] = 0
    assert not frequencies.is_geometric(cut, 1e4)


# --- unrotated pairs, wavelengths, turns ------------------------------------------------------------------------------


def test_pairs_below_1e20th_are_unrotated():
    table = torch.tensor([1.0, 1.1e-20, 0.9e-20, 1e-32, 0.0])
    assert unrotated(table).tolist() == [False, False, True, True, True]
    assert zero_unrotated(table).tolist() == [*table[:2].tolist(), 0, 0, 0]
    assert table[2] > 0  # the argument is left alone


def test_wavelength_is_the_period_in_tokens():
    # 2 pi / 0.5 = 4 pi; pi/4 rad/token comes round after 8 tokens; unrotated pairs never do, 1e-32 included
    lengths = frequencies.wavelength(torch.tensor([0.5, math.pi / 4, 0.0, 1e-32]))
    assert lengths.tolist() == pytest.approx([4 * math.pi, 8, math.inf, math.inf])


def test_turns_against_the_numbers_of_the_paper():
    # Barbero et al.: 128000 * 1e-4 / 2 pi = 2.04 turns of the slowest conceivable pair
    assert frequencies.turns(torch.tensor([1e-4]), 128000).item() == pytest.approx(2.0372, abs=1e-4)
    # Barbero et al.: g_119 (counted from 1) of Gemma 7B, head_dim 256, is 10000 ** (-2*118/256)
    # = 10 ** -3.6875 = 2.05e-4, and 8000 tokens turn it by 1.64 rad
    table = geometric(1e4, 256)
    assert table[118].item() == pytest.approx(2.05e-4, rel=2e-3)
    assert 2 * math.pi * frequencies.turns(table, 8000)[118].item() == pytest.approx(1.64, abs=5e-3)
    assert frequencies.turns(torch.tensor([0.0, 1e-32]), 10**9).tolist() == [0, 0]


# --- tables of the methods -------------------------------------------------------------------------------------------


YARNS: dict[str, dict[str, Any]] = {
    "defaults": {"factor": 4.0},
    "factor 1": {"factor": 1.0},
    "factor below 1": {"factor": 0.5},
    "large factor": {"factor": 32.0},
    "narrow ramp": {"factor": 8.0, "beta_fast": 4.0, "beta_slow": 2.0},
    "wide ramp": {"factor": 8.0, "beta_fast": 500.0, "beta_slow": 0.05},
    # Pair 0 turns 10.186 times in 64 tokens: the ramp's upper end is rounded up to pair 0, its lower one clamped there.
    "ramp of no width": {"factor": 8.0, "beta_fast": 500.0, "beta_slow": 10.2},
    "not truncated": {"factor": 4.0, "truncate": False},
    "not truncated, narrow": {"factor": 40.0, "beta_fast": 1.5, "beta_slow": 1.25, "truncate": False},
}


@pytest.mark.parametrize("options", YARNS.values(), ids=YARNS)
@pytest.mark.parametrize(("rotary_dim", "rope_theta"), SHAPES)
@pytest.mark.parametrize("context", [64, 4096])
def test_yarn_is_transformers_own(rotary_dim, rope_theta, context, options):
    table = yarn_table(rope_theta, rotary_dim, context=context, **options)
    # the trained context is the original one: the stated one, 7 times longer here, plays no part
    reference, scaling = stock(
        "yarn", rotary_dim, rope_theta, context=7 * context, original_max_position_embeddings=context, **options
    )
    assert torch.equal(table, reference)
    assert yarn_scaling(options["factor"]) == scaling


@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("mscales", [(None, None), (1.0, None), (None, 1.0), (1.0, 0.5), (0.707, 1.0), (0.0, 1.0)])
def test_yarn_scaling_is_transformers_own(factor, mscales):
    given_keys = {k: v for k, v in zip(("mscale", "mscale_all_dim"), mscales, strict=True) if v is not None}
    _, scaling = stock("yarn", 64, 1e4, original_max_position_embeddings=1024, factor=factor, **given_keys)
    assert yarn_scaling(factor, *mscales) == scaling


@pytest.mark.parametrize(("rotary_dim", "rope_theta"), SHAPES)
@pytest.mark.parametrize(("factor", "low", "high"), [(8.0, 1.0, 4.0), (32.0, 1.0, 4.0), (3.0, 0.5, 17.0)])
@pytest.mark.parametrize("context", [64, 8192])
def test_llama3_is_transformers_own(rotary_dim, rope_theta, factor, low, high, context):
    smoothing = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
    table = llama3_table(geometric(rope_theta, rotary_dim), context=context, **smoothing)
    reference, _ = stock("llama3", rotary_dim, rope_theta, original_max_position_embeddings=context, **smoothing)
    assert torch.equal(table, reference)


# --- longrope factors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rotary_dim", "rope_theta"), SHAPES)
def test_longrope_is_transformers_own(rotary_dim, rope_theta):
    for factors in ([1.0] * (rotary_dim // 2), [1 + 0.37 * i for i in range(rotary_dim // 2)]):
        assert torch.equal(longrope_table(rope_theta, factors), rebuilt(factors, rope_theta))


def rebuilt(factors, rope_theta):
    """The table that transformers makes of factors that went through a config.json."""
    factors = json.loads(json.dumps(factors, allow_nan=False))
    pair = {"short_factor": factors, "long_factor": factors, "original_max_position_embeddings": 4096}
    return stock("longrope", 2 * len(factors), rope_theta, factor=1.0, attention_factor=1.0, **pair)[0]


def smallest_error(target, rope_theta):
    """The smallest error that any float32 factor within 30 ulps of the exact quotient leaves."""
    base = rope_theta ** (torch.arange(0, 2 * len(target), 2).float() / (2 * len(target)))
    quotient = (1 / (target.double() * base.double())).float().view(torch.int32)
    tries = torch.stack([(quotient + k).view(torch.float32) for k in range(-30, 31)])
    return (1.0 / (tries * base) - target).abs().min(dim=0).values


# Down to 2 ** -63 = 1.1e-19: at the boundary of 1e-20 the last bit decides whether a pair rotates.
turning = st.floats(2**-63, 8, width=32) | st.floats(2**-20, 1, width=32)
resting = st.just(0.0) | st.floats(0, 2**-67, width=32)
any_table = st.lists(turning | resting, min_size=1, max_size=48).map(torch.tensor)


@settings(deadline=None, database=None, max_examples=60)
@given(any_table, st.floats(2, 1e7) | st.sampled_from([1e4, 5e5, 1e6]))
@example(torch.tensor([0.0, 1e-32, 9e-21, 1e-19, 1.0]), 1e4)
def test_any_table_survives_a_config(table, rope_theta):
    canonical = zero_unrotated(rebuilt(longrope_factors(table, rope_theta), rope_theta))
    rests = table < 1e-20
    assert (canonical[rests] == 0).all()
    # No factor does better. Two ulps are the worst case: one from the spacing of the factors, one from rounding the
    # product; about one pair in five of a random table is off at all.
    assert torch.equal((canonical - table).abs()[~rests], smallest_error(table, rope_theta)[~rests])
    ulps = (canonical.view(torch.int32) - table.view(torch.int32)).abs()
    assert (ulps[~rests] <= 2).all()
    # canonicalising again changes nothing
    again = zero_unrotated(rebuilt(longrope_factors(canonical, rope_theta), rope_theta))
    assert torch.equal(again, canonical)


def test_unrotated_pairs_rebuild_as_exactly_zero():
    # 1e30, which llama.cpp uses, would rebuild as 1e-30 / base, not as 0. JSON has no Infinity.
    factors = longrope_factors(torch.tensor([1.0, 0.0, 1e-32]), 1e4)
    assert factors[1:] == [1e39, 1e39]
    assert json.loads(json.dumps(factors, allow_nan=False)) == factors
    assert rebuilt(factors, 1e4)[1:].tolist() == [0, 0]
    assert rebuilt([1.0, 1e30, 1e30], 1e4)[1:].min() > 0


# --- fingerprint -----------------------------------------------------------------------------------------------------


def test_a_fingerprint_is_the_same_on_every_machine_and_in_every_version():
    # Little-endian float32 1, float32 0, float64 1, by hand:
    # printf '\x00\x00\x80\x3f\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xf0\x3f' | sha256sum
    assert fingerprint(torch.tensor([1.0, 0.0]), 1.0) == "3d837f0a913b0fd0"
    assert fingerprint(torch.tensor([1.0, 1e-32]), 1.0) == "3d837f0a913b0fd0"  # both are unrotated
    assert fingerprint(torch.tensor([1.0, 0.0], dtype=torch.float64), 1.0) == "3d837f0a913b0fd0"


def test_a_fingerprint_sees_the_last_bit_the_order_and_the_scaling():
    table = geometric(1e4, 64)
    nudged = table.clone()
    nudged[17] = torch.nextafter(nudged[17], torch.tensor(0.0))
    variants = [(table, 1.0), (nudged, 1.0), (table.flip(0), 1.0), (table[:-1], 1.0), (table, 1.0 + 1e-15)]
    assert len({fingerprint(*variant) for variant in variants}) == len(variants)


# --- granularity -----------------------------------------------------------------------------------------------------


# Xiong et al., theorem 1: the table at d = 128 with its mean
GRANULARITIES = {
    "rope": (geometric(1e4, 128), 0.10938),
    "pi": (geometric(1e4, 128) / 4, 0.02902),
    "abf": (geometric(5e5, 128), 0.07882),
}


@pytest.mark.parametrize(("table", "mean"), GRANULARITIES.values(), ids=GRANULARITIES)
def test_granularity_golden(table, mean):
    assert granularity(table) == pytest.approx(mean, abs=6e-6)


def images(x, rope_theta):
    """Rotate ``x`` to positions 6 and 7 with transformers' own modules; rows of complex pairs."""
    config = LlamaConfig(head_dim=len(x), rope_parameters={"rope_type": "default", "rope_theta": rope_theta})
    cos, sin = LlamaRotaryEmbedding(config)(x, torch.tensor([[6, 7]]))
    rotated = apply_rotary_pos_emb(x.expand(1, 1, 2, -1), x.expand(1, 1, 2, -1), cos, sin)[0][0, 0].double()
    return torch.complex(*rotated.chunk(2, dim=-1))


@pytest.mark.parametrize(("rotary_dim", "rope_theta"), [(8, 1e4), (64, 1e4), (64, 5e5)])
def test_granularity_is_the_sine_between_consecutive_images(rotary_dim, rope_theta):
    x = torch.randn(2, rotary_dim // 2, generator=torch.Generator().manual_seed(0))
    x = (x / x.norm(dim=0)).flatten()  # pairs of equal norm: pair i is features i and i + d/2
    image, next_image = images(x, rope_theta)
    product = (next_image * image.conj()).sum() / (image.abs().square().sum() * next_image.abs().square().sum()).sqrt()
    table = geometric(rope_theta, rotary_dim)
    assert granularity(table) == pytest.approx(product.imag.item(), rel=1e-4)
    assert float(table.double().cos().mean()) == pytest.approx(product.real.item(), rel=1e-6)


# --- rotary offset features ------------------------------------------------------------------------------------------

# Jonasson: context, rotary_dim, layers * share under the bound, first such pair, mean lower bound
JONASSON = {
    "phi-1": (2048, 32, 0.31, 11, 3.93),
    "llama-2-7b": (4096, 128, 0.28, 46, 4.19),
}


@pytest.mark.parametrize(("context", "rotary_dim", "share", "first", "angle"), JONASSON.values(), ids=JONASSON)
def test_offset_bounds_against_the_table_of_the_paper(context, rotary_dim, share, first, angle):
    table = geometric(1e4, rotary_dim)
    under = table < frequencies.offset_frequency_bound(context)
    assert under.tolist() == [i >= first for i in range(len(table))]
    assert under.float().mean().item() == pytest.approx(share, abs=5e-3)
    assert frequencies.offset_angle_bound(table, context)[under].mean().item() == pytest.approx(angle, abs=5e-3)


def test_the_mean_angle_bound_leaves_out_pairs_that_p_rope_stops():
    """Llama-2-7B under p = 0.75: pairs 46 and 47 rotate below the bound; those from 48 on have no bound."""
    table = geometric(1e4, 128)
    stopped = torch.where(torch.arange(64) < 48, table, 0.0)
    angles = frequencies.offset_angle_bound(stopped, 4096)
    by_hand = [math.pi + 2048 * 1e4 ** (-2 * i / 128) for i in (46, 47)]
    assert float(angles[46:].nanmean()) == pytest.approx(sum(by_hand) / 2, rel=1e-6) == pytest.approx(5.690, abs=1e-3)
    assert angles[48:].isnan().all()
