"""What a table implies, against hand-derived numbers, brute force, scipy and mpmath, and attention inside a Llama."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import rope_patch
from rope_patch import theory
from rope_patch.frequencies import (
    geometric,
    ntk_theta,
    offset_angle_bound,
    offset_frequency_bound,
    turns,
)
from rope_patch.methods import parse
from rope_patch.table_facts import TableFacts
from rope_patch.tables import RotaryTable

PLAIN, GEMMA = geometric(1e4, 128), geometric(1e4, 256)
TABLES = {
    "plain": geometric(1e4, 16),
    "single pair": geometric(1e4, 2),
    "long": geometric(5e5, 64) / 8,
    "unrotated pairs": torch.tensor([1.0, 0.3, 0.0, 1e-32]),
}
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(table: torch.Tensor, position: float) -> numpy.ndarray:
    """R^position as a matrix, feature by feature: features i and i + n are rotated by table[i] * position."""
    n = len(table)
    out = numpy.zeros((2 * n, 2 * n))
    for i, step in enumerate(table.tolist()):
        angle = 0.0 if step < 1e-20 else step * position
        out[i, i] = out[i + n, i + n] = math.cos(angle)
        out[i, i + n], out[i + n, i] = -math.sin(angle), math.sin(angle)
    return out


# --- activations -----------------------------------------------------------------------------------------------------


@each_table
def test_activation_is_the_product_of_rotated_vectors(table):
    query, key = normal(2, 2 * len(table))
    distances = torch.tensor([0, 1, 2, 17, 1000, -3])
    expected = [float(query.numpy() @ matrix(table, -r) @ key.numpy()) for r in distances.tolist()]
    assert theory.activation(table, distances, query, key).tolist() == pytest.approx(expected, abs=1e-11)
    curve = theory.activation_curve(table, 2500, query, key)  # three blocks, the last one broken
    torch.testing.assert_close(curve, theory.activation(table, torch.arange(2500), query, key), rtol=0, atol=1e-10)
    assert len(theory.activation_curve(table, 7)) == 7


def test_activation_is_transformers_logit():
    # q at position m, k at n = m - r, rotated by transformers' own modules in its own layout
    config = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    query, key = normal(2, 64).float()
    for m, n in ((5, 5), (40, 3), (300, 299)):
        cos, sin = LlamaRotaryEmbedding(config)(query, torch.tensor([[m, n]]))
        stacked = torch.stack([query, key])[None, None]
        rotated = apply_rotary_pos_emb(stacked, stacked, cos, sin)[0][0, 0]
        ours = theory.activation(geometric(1e4, 64), torch.tensor([m - n]), query, key)
        assert ours.item() == pytest.approx(float(rotated[0] @ rotated[1]), abs=2e-3)


# --- heads -----------------------------------------------------------------------------------------------------------


@given(
    steps=st.lists(st.floats(1e-4, 3.0), min_size=1, max_size=6),
    offset=st.integers(0, 400),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_proposition_3_1_the_peak_is_where_it_was_put(steps, offset, seed):
    table = torch.tensor(steps)
    psi = normal(2 * len(table), seed=seed)
    query, key = theory.positional_head(table, psi, offset)
    curve = theory.activation_curve(table, 500, query, key)
    assert curve[offset].item() == pytest.approx(float(psi @ psi), rel=1e-9)
    assert float(curve.max()) <= float(psi @ psi) * (1 + 1e-9)


def test_rotate_is_the_matrix():
    table, x = TABLES["plain"], normal(16)
    images = theory.rotate(table, x, torch.tensor([0.0, 3.0, -2.5]))
    for image, position in zip(images, (0.0, 3.0, -2.5), strict=True):
        torch.testing.assert_close(image, torch.tensor(matrix(table, position) @ x.numpy()))


@pytest.mark.parametrize("offset", [0, 1, 5])
@each_table
def test_head_mass_is_a_softmax(table, offset):
    query, key = (1.5 * x for x in theory.positional_head(table, normal(2 * len(table)), offset))
    computed = theory.head_mass(table, query, key, length=40, offset=offset, sharpness=0.3)
    for m in range(40):
        logits = [0.3 * float(query.numpy() @ matrix(table, n - m) @ key.numpy()) for n in range(m + 1)]
        if m < offset:
            assert math.isnan(computed[m])
        else:
            assert computed[m].item() == pytest.approx(softmax(logits)[m - offset], abs=1e-9)


def test_sharpness_by_hand():
    # pair f = pi: activations alpha cos(pi (r - 1)) = +-alpha. Ten positions: five distances peak, so mass <= 1/5.
    # f = 1 and two positions: alpha (1 - cos 1) = ln 99, alpha = 4.59512 / 0.45970 = 9.9960
    table = torch.tensor([1.0])
    needed = theory.sharpness_for(table, *theory.wendler_head(table), mass=0.99, length=2)
    assert needed == pytest.approx(math.log(99) / (1 - math.cos(1)), rel=1e-10)
    assert needed == pytest.approx(9.9960, abs=1e-4)


@pytest.mark.parametrize("mass", [0.3, 0.99, 0.999999])
def test_sharpness_reaches_the_mass_and_no_less_does(mass):
    table, length = geometric(5e5, 64), 3000
    query, key = theory.wendler_head(table)
    needed = theory.sharpness_for(table, query, key, mass=mass, length=length)
    worst = theory.head_mass(table, query, key, length=length, sharpness=needed)[1:].min().item()
    assert worst == pytest.approx(mass, abs=1e-8)
    less = theory.head_mass(table, query, key, length=length, sharpness=0.999 * needed)[1:].min().item()
    assert less < mass - 1e-9


def test_wendler_score():
    # alpha sum cos((m - 1 - n) f), peak alpha d / 2, and the same head as theorem 5.3's
    table, alpha = geometric(1e4, 8), 7.0
    query, key = theory.wendler_head(table, alpha)
    assert key.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    for m, n in ((9, 8), (9, 9), (300, 12)):
        rotated = (matrix(table, m) @ query.numpy()) @ (matrix(table, n) @ key.numpy())
        expected = alpha * sum(math.cos((m - 1 - n) * f) for f in table.tolist())
        assert rotated == pytest.approx(expected)
    assert theory.activation(table, torch.tensor([1]), query, key).item() == pytest.approx(alpha * 4)


# --- the same heads inside a Llama -----------------------------------------------------------------------------------

LENGTH, DIM = 400, 64


def llama(query: torch.Tensor, key: torch.Tensor) -> LlamaForCausalLM:
    """A one-layer Llama whose one head has this query and key for every token, through a feature all tokens share."""
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=DIM,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings.copy_(torch.randint(0, 2, embeddings.shape) * 2.0 - 1.0)  # all of one norm: RMSNorm keeps them
        embeddings[:, 0] = 1.0  # the constant feature
        attention = model.model.layers[0].self_attn
        for projection, vector in ((attention.q_proj, query), (attention.k_proj, key)):
            projection.weight.zero_()
            projection.weight[:, 0] = vector.float()
    return model


@torch.no_grad()
def attention_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[None], output_attentions=True, use_cache=False).attentions[0][0, 0].double()


def heads() -> dict[str, tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    table, psi = geometric(1e4, DIM), normal(DIM, seed=4)
    scale = 30.0
    return {
        "Wendler": (1, theory.wendler_head(table, 40.0)),
        "thm 5.3, previous": (1, tuple(scale**0.5 * x for x in theory.positional_head(table, psi, 1))),
        "thm 5.3, diagonal": (0, tuple(scale**0.5 * x for x in theory.positional_head(table, psi, 0))),
        "thm 5.3, five back": (5, tuple(scale**0.5 * x for x in theory.positional_head(table, psi, 5))),
    }


@pytest.mark.parametrize("name", heads())
def test_a_llama_with_these_weights_attends_there_and_without_rotation_it_cannot(name):
    offset, (query, key) = heads()[name]
    model = llama(query, key)
    tokens = torch.randint(0, 50, (LENGTH,), generator=torch.Generator().manual_seed(1))
    weights = attention_of(model, tokens)
    mass = weights.diagonal(-offset)
    assert float(mass.min()) > 0.99
    table = geometric(1e4, DIM)
    ours = theory.head_mass(table, query, key, length=LENGTH, offset=offset, sharpness=DIM**-0.5)
    torch.testing.assert_close(mass, ours[offset:], rtol=0, atol=2e-5)
    with rope_patch.patched(model, "nope"):
        flat = attention_of(model, tokens)
    expected = 1 / torch.arange(1, LENGTH + 1, dtype=torch.float64)
    torch.testing.assert_close(flat.diagonal(), expected, rtol=1e-5, atol=0)
    assert float(flat.diagonal(-1).max()) <= 0.5 + 1e-6
    nope = theory.head_mass(torch.zeros(DIM // 2), query, key, length=LENGTH, offset=1)
    torch.testing.assert_close(nope[1:], expected[1:])


# --- content ---------------------------------------------------------------------------------------------------------


PAIR, QUERY, KEY, BOS = 118, (-4.1, 11.3), (11.2, -3.5), (-2.5, 1.3)
"""A head of Gemma 7B that looks for content (Barbero et al. section E.1, where pairs are counted from 1)."""


def in_pair(values):
    """A vector that is zero but for that pair."""
    x = torch.zeros(256, dtype=torch.float64)
    x[PAIR], x[128 + PAIR] = values
    return x


def test_the_pair_of_gemma_by_hand():
    # q . k = -4.1 * 11.2 + 11.3 * -3.5 = -45.92 - 39.55 = -85.47; BOS: 4.1 * 2.5 + 11.3 * 1.3 = 10.25 + 14.69 = 24.94.
    # q x k = -4.1 * -3.5 - 11.3 * 11.2 = -112.21; BOS: -4.1 * 1.3 + 11.3 * 2.5 = 22.92.
    # At distance r the angle is t = r * 10000^(-2 * 118 / 256), 1.6428 at 8000, and the activation . cos t + x sin t:
    # cos 1.6428 = -0.07198, sin = 0.99741. -85.47 * -0.07198 - 112.21 * 0.99741 = 6.15 - 111.92 = -105.77;
    # the other way round, 6.15 + 111.92 = 118.07: only there does the sign change, as the paper says it does.
    places = torch.tensor([0, 8000, -8000])
    computed = theory.activation(GEMMA, places, in_pair(QUERY), in_pair(KEY)).tolist()
    assert computed == pytest.approx([-85.47, -105.77, 118.07], abs=0.01)
    computed = theory.activation(GEMMA, places, in_pair(QUERY), in_pair(BOS)).tolist()
    assert computed == pytest.approx([24.94, 21.07, -24.66], abs=0.01)
    # zero where tan t = -. / x: pi - atan(85.47 / 112.21) = 2.4904 rad, / 2.05353e-4 = 12127.6… tokens
    step = 1e4 ** (-2 * PAIR / 256)
    zero = (math.pi - math.atan(85.47 / 112.21)) / step
    curve = theory.activation_curve(GEMMA, 20000, in_pair(QUERY), in_pair(KEY))
    assert int((curve > 0).long().argmax()) == math.ceil(zero)


# --- images ----------------------------------------------------------------------------------------------------------


@each_table
def test_image_distance_by_brute_force(table):
    unit = numpy.ones(2 * len(table)) / (2 * len(table)) ** 0.5
    images = [matrix(table, p) @ unit for p in range(25)]
    computed = theory.image_distance(table, torch.arange(25)).tolist()
    assert computed == pytest.approx([float(numpy.linalg.norm(image - images[0])) for image in images], abs=1e-12)
    pairs = {(a, b): float(numpy.linalg.norm(images[a] - images[b])) for a in range(25) for b in range(a)}
    closest, _ = theory.separation(table, 25)
    assert closest == pytest.approx(min(pairs.values()), abs=1e-12)


def test_separation_by_hand():
    # one pair of pi / 2 rad: neighbours are a right angle apart, 4 tokens a full turn
    quarter = torch.tensor([math.pi / 2], dtype=torch.float64)
    assert theory.separation(quarter, 4)[0] == pytest.approx(2**0.5)
    assert theory.separation(quarter, 5) == (pytest.approx(0, abs=1e-12), 4)
    # one pair of 1 rad: 6 tokens are a turn but for 0.283 rad, 25 are 4 but for 0.133, 44 are 7 but for 0.0177
    single = torch.tensor([1.0])
    assert [theory.separation(single, n)[1] for n in (6, 7, 44, 45)] == [1, 6, 25, 44]
    assert theory.separation(torch.zeros(3), 9) == (0.0, 1)
    assert theory.separation(geometric(5e5, 128), 10**6)[1] == 1  # as Xiong et al. assume, up to a million tokens


def test_the_nearest_old_image_by_hand_and_by_matrices():
    # PI's last new image stands at (4 * 512 - 1) / 4 = 511.75, 0.75 tokens from the last old one
    distances, nearest = theory.nearest_old(PLAIN, PLAIN / 4, old_length=512, new_positions=torch.arange(2048))
    apart = theory.image_distance(PLAIN, torch.tensor([0.75])).item()
    assert (distances[-1].item(), nearest[-1].item()) == (pytest.approx(apart), 511)
    assert (distances[0].item(), nearest[0].item()) == (0, 0)
    # by another route: cosines of whole matrices of images, over two blocks of new positions and three of old
    places, table = torch.arange(0, 9000, 3), geometric(5e5, 128)
    distances, nearest = theory.nearest_old(PLAIN, table, old_length=2100, new_positions=places)
    old, new = torch.outer(torch.arange(2100).double(), PLAIN.double()), torch.outer(places.double(), table.double())
    cosines = (old.cos() @ new.cos().T + old.sin() @ new.sin().T) / 64
    torch.testing.assert_close(distances, (2 - 2 * cosines).clamp(min=0).sqrt().min(0).values, rtol=0, atol=1e-6)
    assert torch.equal(nearest, cosines.argmax(0))


# --- a table in numbers -----------------------------------------------------------------------------------------------


def study(method, *, head_dim=128, rope_theta=1e4, trained_length=512, length=2048):
    table = RotaryTable(geometric(rope_theta, head_dim), 1.0, rope_theta, "default", trained_length)
    after = parse(method)(table)
    return TableFacts(method, "RoPE", rope_theta, table.inv_freq, after.inv_freq, 1.0, trained_length, length)


def test_the_facts_of_a_table():
    facts = {fact.name: (fact.before, fact.after) for fact in study("pi:factor=4").facts()}
    # wavelengths of f = 1 and f = 10000^(-63/64): 2 pi and 2 pi * 8659.6; interpolation stretches both by 4
    slowest = 2 * math.pi * 1e4 ** (63 / 64)
    assert facts["Fastest wavelength"] == pytest.approx((2 * math.pi, 8 * math.pi))
    assert facts["Slowest wavelength of a pair that turns"] == pytest.approx((slowest, 4 * slowest), rel=1e-6)
    assert facts["Quarter turn of the slowest pair"] == pytest.approx((slowest / 4, slowest), rel=1e-6)
    assert facts["Turns of that pair within the length"] == pytest.approx((2048 / slowest, 512 / slowest), rel=1e-6)
    assert facts["Mean sine of consecutive images"] == pytest.approx((0.10938, 0.02902), abs=6e-6)
    assert facts["Farthest new image from its nearest old one"] == pytest.approx((1.214, 0.185), abs=5e-4)
    assert facts["Their positions are apart by"] == (1, 1)
    assert facts["Unrotated pairs"] == (0, 0)


def test_what_a_table_has_not_is_none():
    facts = {fact.name: fact.after for fact in study("nope", trained_length=64, length=128).facts()}
    assert (facts["Unrotated pairs"], facts["Fastest wavelength"], facts["Factor of a previous-token head"]) == (
        *(64, None, None),
    )
    # a slowest half that turns by less than float64 can tell
    slow = study("p_rope_reversed:p=0.5", head_dim=64, rope_theta=1e30, trained_length=64, length=64).facts()
    assert {fact.name: fact.after for fact in slow}["Factor of a previous-token head"] is None


def test_numbers_that_papers_print():
    """To the rounding of what they print; where a paper slips, its number is in the comment beside ours."""
    phi, llama = geometric(1e4, 32), geometric(1e4, 128)
    assert float(turns(torch.tensor([1e-4]), 128000)) == pytest.approx(2.04, abs=5e-3)  # Barbero et al.
    assert float(GEMMA[PAIR]) == pytest.approx(2.05e-4, abs=5e-7)
    assert float(geometric(5e5, 128)[40]) == pytest.approx(2.7425e-4, rel=1e-4)  # printed as 0.0001
    assert float(llama[1] / geometric(5e5, 128)[1]) == pytest.approx(1.06, abs=5e-3)
    ntk = geometric(ntk_theta(1e4, 4.0, 128), 128)
    gaps, _ = theory.nearest_old(PLAIN, ntk, old_length=512, new_positions=torch.arange(2048))
    assert float(gaps.max()) == pytest.approx(1.09037, rel=2e-4)
    for table, context, share, mean in ((phi, 2048, 0.31, 3.93), (llama, 4096, 0.28, 4.19)):  # Jonasson, eq. 15 and 16
        under = table < offset_frequency_bound(context)
        assert float(under.double().mean()) == pytest.approx(share, abs=5e-3)
        assert float(offset_angle_bound(table.double(), context)[under].mean()) == pytest.approx(mean, abs=5e-3)
    # Jonasson prints 6.38 for pair 10 of Phi-1, which is its angle bound; L f is another number, and both exceed 2 pi.
    assert 2048 * float(phi[10]) == pytest.approx(6.4763, abs=1e-4)
    assert float(offset_angle_bound(phi.double(), 2048)[10]) == pytest.approx(6.38, abs=5e-3)


# --- errors ----------------------------------------------------------------------------------------------------------

ONES = torch.ones(128)
CALLS = {
    "expected 128": lambda: theory.activation(PLAIN, torch.arange(2), torch.ones(3)),
    "offset 3": lambda: theory.head_mass(PLAIN, ONES, ONES, length=3, offset=3),
    "offset -1": lambda: theory.sharpness_for(PLAIN, ONES, ONES, mass=0.9, length=3, offset=-1),
    "mass": lambda: theory.sharpness_for(PLAIN, ONES, ONES, mass=1.0, length=3),
    "another": lambda: theory.sharpness_for(torch.zeros(1), torch.ones(2), torch.ones(2), mass=0.9, length=3),
    "two positions": lambda: theory.separation(PLAIN, 1),
    "number of pairs": lambda: theory.nearest_old(PLAIN, GEMMA, old_length=3, new_positions=torch.arange(3)),
    "old_length": lambda: theory.nearest_old(PLAIN, PLAIN, old_length=0, new_positions=torch.arange(3)),
    "at least 2": lambda: study("nope", length=1),
}


@pytest.mark.parametrize("word", CALLS)
def test_errors(word):
    with pytest.raises(ValueError, match=word):
        CALLS[word]()
