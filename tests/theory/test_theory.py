"""What a table implies, against hand-derived numbers, brute force, scipy, and attention inside a Llama."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from scipy.special import softmax
from support.tiny import tiny_model
from transformers import LlamaForCausalLM

import rope_patch
from rope_patch import theory
from rope_patch.frequencies import geometric

PLAIN = geometric(1e4, 128)
TABLES = {
    "plain": geometric(1e4, 16),
    "single pair": geometric(1e4, 2),
    "long": geometric(5e5, 64) / 8,
    "unrotated pairs": torch.tensor([1.0, 0.3, 0.0, 1e-32]),
}
each_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def matrix(table: torch.Tensor, position: float) -> numpy.ndarray:
    """R^position as a matrix, feature by feature: features i and i + n are rotated by table[i] * position."""
    n = len(table)
    out = numpy.zeros((2 * n, 2 * n))
    for i, step in enumerate(table.tolist()):
        angle = 0.0 if step < 1e-20 else step * position
        out[i, i] = out[i + n, i + n] = math.cos(angle)
        out[i, i + n] = -math.sin(angle)
        out[i + n, i] = math.sin(angle)
    return out


# --- the previous-token head -----------------------------------------------------------------------------------------


def wendler_head(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Wendler's query and key in the half-split layout: the key is (1…1, 0…0), the query R^-1 key."""
    key = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat_interleave(len(table))
    return torch.tensor(matrix(table, -1) @ key.numpy()), key


def test_the_factor_by_hand():
    # f = 1 and two positions: alpha (1 - cos 1) = ln 99, alpha = 4.59512 / 0.45970 = 9.9960
    needed = theory.positional_head_factor(torch.tensor([1.0]), mass=0.99, length=2)
    assert needed == pytest.approx(math.log(99) / (1 - math.cos(1)), rel=1e-10)
    assert needed == pytest.approx(9.9960, abs=1e-4)
    # One pair of pi rad is back where it was after two tokens, and a pair that does not rotate never moves.
    for step in (math.pi, 0.0):
        assert theory.positional_head_factor(torch.tensor([step], dtype=torch.float64), mass=0.99, length=10) is None


@pytest.mark.parametrize("mass", [0.0, 1.0, 99.0])
def test_a_mass_that_no_factor_gives_is_refused(mass):
    with pytest.raises(ValueError, match="mass"):
        theory.positional_head_factor(PLAIN, mass=mass, length=10)


def test_a_distance_beyond_the_text_is_refused():
    for length, distance in ((10, 10), (1, 0)):
        with pytest.raises(ValueError, match=f"got {distance} of {length}"):
            theory.positional_head_factor(PLAIN, mass=0.9, length=length, distance=distance)


@pytest.mark.parametrize(("mass", "distance"), [(0.3, 1), (0.99, 1), (0.999999, 1), (0.99, 0), (0.9, 7)])
def test_the_factor_reaches_the_mass_and_no_less_does(mass, distance):
    table = geometric(5e5, 16)
    length = 300
    key = wendler_head(table)[1].numpy()
    query = matrix(table, -distance) @ key  # proposition 3.1
    logits = numpy.array([query @ matrix(table, -r) @ key for r in range(length)])
    needed = theory.positional_head_factor(table, mass=mass, length=length, distance=distance)
    worst, less = (
        min(softmax(factor * logits[: m + 1])[distance] for m in range(distance, length))
        for factor in (needed, 0.999 * needed)
    )
    assert worst == pytest.approx(mass, abs=1e-8)
    assert less < mass - 1e-9


# --- the same head inside a Llama -----------------------------------------------------------------------------------

LENGTH = 400
DIM = 64


def llama(query: torch.Tensor, key: torch.Tensor) -> LlamaForCausalLM:
    """A one-layer Llama whose one head has this query and key for every token, through a feature all tokens share."""
    one = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = tiny_model(attention="eager", hidden_size=DIM, max_position_embeddings=2048, **one)
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


def test_a_llama_with_these_weights_attends_there_and_without_rotation_it_cannot():
    table = geometric(1e4, DIM)
    query, key = wendler_head(table)
    # A model divides its logits by sqrt(head_dim).
    factor = theory.positional_head_factor(table, mass=0.99, length=LENGTH) * DIM**0.5
    model = llama(factor * query, key)
    tokens = torch.randint(0, 50, (LENGTH,), generator=torch.Generator().manual_seed(1))
    mass = attention_of(model, tokens).diagonal(-1)
    assert float(mass.min()) == pytest.approx(0.99, abs=1e-4)
    with rope_patch.patched(model, "nope"):
        flat = attention_of(model, tokens)
    # Barbero et al. proposition 5.2: all tokens have the same weight.
    expected = 1 / torch.arange(1, LENGTH + 1, dtype=torch.float64)
    torch.testing.assert_close(flat.diagonal(), expected, rtol=1e-5, atol=0)
    assert float(flat.diagonal(-1).max()) <= 0.5 + 1e-6


# --- images ----------------------------------------------------------------------------------------------------------


@each_table
def test_separation_by_brute_force(table):
    unit = numpy.ones(2 * len(table)) / (2 * len(table)) ** 0.5
    images = [matrix(table, p) @ unit for p in range(25)]
    pairs = {(a, b): float(numpy.linalg.norm(images[a] - images[b])) for a in range(25) for b in range(a)}
    closest, _ = theory.separation(table, 25)
    assert closest == pytest.approx(min(pairs.values()), abs=1e-12)


def test_separation_by_hand():
    # one pair of pi / 2 rad: neighbours are a right angle apart, 4 tokens a full turn
    quarter = torch.tensor([math.pi / 2], dtype=torch.float64)
    assert theory.separation(quarter, 4)[0] == pytest.approx(2**0.5)
    assert theory.separation(quarter, 5) == (pytest.approx(0, abs=1e-12), 4)
    assert theory.separation(torch.zeros(3), 9) == (0.0, 1)
    assert theory.separation(geometric(5e5, 128), 10**6)[1] == 1  # as Xiong et al. assume, up to a million tokens


def test_the_nearest_old_image_by_hand_and_by_matrices():
    # PI's last new image stands at (4 * 512 - 1) / 4 = 511.75, 0.75 tokens from the last old one
    distances = theory.nearest_old(PLAIN, PLAIN / 4, old_length=512, new_positions=torch.arange(2048))
    apart = 2 * (0.75 * PLAIN.double() / 2).sin().square().mean().sqrt()
    assert (distances[0].item(), distances[-1].item()) == (0, pytest.approx(float(apart)))
    # by another route: cosines of whole matrices of images, over two blocks of new positions and three of old
    places = torch.arange(0, 9000, 3)
    table = geometric(5e5, 128)
    distances = theory.nearest_old(PLAIN, table, old_length=2100, new_positions=places)
    old = torch.outer(torch.arange(2100).double(), PLAIN.double())
    new = torch.outer(places.double(), table.double())
    cosines = (old.cos() @ new.cos().T + old.sin() @ new.sin().T) / 64
    torch.testing.assert_close(distances, (2 - 2 * cosines).clamp(min=0).sqrt().min(0).values, rtol=0, atol=1e-6)
