"""Attention heads built by hand: what rotation makes possible, and what it takes away.

A head whose query and key are the same for every token sees positions only. With a key turned by ``offset`` its
activation peaks exactly ``offset`` tokens back, and a large enough factor makes the softmax attend there and nowhere
else: a diagonal head, a previous-token head. Without rotation equal tokens get equal attention, so no such head exists.
A head that looks for *content* has the opposite trouble: whatever pair carries it, rotation turns it away.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from rope_patch.frequencies import Table, zero_unrotated
from rope_patch.theory.decay import Distances, Features, activation_curve, as_complex

Masses = Float[Tensor, " positions"]


def rotate(inv_freq: Table, x: Features, positions: Distances) -> Float[Tensor, "distances features"]:
    """Return the images of ``x`` at the given positions, ``R^position x``.

    Args:
        inv_freq: (pairs,) [rad/token].
        x: (2 pairs,) in Hugging Face's half-split layout.
        positions: (positions,) [tokens]; may be negative or broken.

    Returns:
        (positions, 2 pairs) float64, in the same layout.

    >>> rotate(torch.tensor([math.pi / 2]), torch.tensor([1.0, 0.0]), torch.tensor([1])).round(decimals=6)
    tensor([[-0., 1.]], dtype=torch.float64)
    """
    angles = positions.double()[:, None] * zero_unrotated(inv_freq.double())
    turned = as_complex(x, len(inv_freq)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def positional_head(inv_freq: Table, psi: Features, offset: int) -> tuple[Features, Features]:
    """Return a query and a key whose activation is largest ``offset`` tokens back, namely ``|psi|^2``.

    ``query = psi`` and ``key = R^offset psi``, the same at every position: offset 0 is the diagonal head, 1 the
    previous-token head. Scaled by a large enough factor the head attends there with any mass below 1
    (:func:`sharpness_for`); the peak is the only one if some rotating pair of psi is not 0.

    *Source*: Barbero et al. proposition 3.1 and theorem 5.3.

    Args:
        inv_freq: (pairs,) [rad/token].
        psi: (2 pairs,) any vector.
        offset: distance of the peak [tokens].

    >>> query, key = positional_head(torch.tensor([1.0, 0.1]), torch.ones(4), 3)
    >>> int(activation_curve(torch.tensor([1.0, 0.1]), 100, query, key).argmax())
    3
    """
    return psi.double(), rotate(inv_freq, psi, torch.tensor([offset]))[0]


def wendler_head(inv_freq: Table, alpha: float = 1.0) -> tuple[Features, Features]:
    """Return Wendler's previous-token head: ``key = (1…1, 0…0)`` and ``query = alpha R^-1 key``.

    Its activation for a query at ``m`` and a key at ``n`` is ``alpha sum_l cos((m - 1 - n) inv_freq_l)``, with its peak
    ``alpha pairs`` (Wendler's ``alpha d / 2``) at ``n = m - 1``; ``alpha`` is the inverse temperature. As weights the
    two need a feature of the hidden state that is the same for every token, or biases.

    *Source*: Wendler, ``W_q = alpha R^-1 W_k``. Wendler writes the key ``(1, 0, 1, 0, …)`` in the interleaved layout.

    >>> table = torch.tensor([1.0, 0.1])
    >>> activation_curve(table, 3, *wendler_head(table, 10.0)).round(decimals=3).tolist()
    [15.353, 20.0, 15.353]
    """
    pairs = len(inv_freq)
    key = torch.cat([torch.ones(pairs, dtype=torch.float64), torch.zeros(pairs, dtype=torch.float64)])
    return alpha * rotate(inv_freq, key, torch.tensor([-1]))[0], key


def head_mass(
    inv_freq: Table, query: Features, key: Features, *, length: int, offset: int = 1, sharpness: float = 1.0
) -> Masses:
    """Return the attention coefficient on the token ``offset`` back, for a query at every position.

    All tokens have the same key, as in :func:`positional_head` and :func:`wendler_head`; attention is causal. Without
    rotation the coefficient at position ``m`` is ``1 / (m + 1)`` whatever the vectors, and in any NoPE head two equal
    tokens share what they get, so neither has more than 1/2 (Barbero et al. proposition 5.2).

    *Source*: Barbero et al. theorem 5.3. Linear in ``length``.

    Args:
        inv_freq: (pairs,) [rad/token].
        query: (2 pairs,).
        key: (2 pairs,).
        length: positions [tokens].
        offset: distance whose coefficient is returned [tokens].
        sharpness: factor on the activations, the inverse temperature. A model's own is ``1 / sqrt(head_dim)``.

    Returns:
        (length,) in [0, 1]; NaN at positions below ``offset``, which have no such token.

    >>> head_mass(torch.zeros(2), torch.ones(4), torch.ones(4), length=4).round(decimals=4).tolist()
    [nan, 0.5, 0.3333, 0.25]
    """
    if not 0 <= offset < length:
        raise ValueError(f"offset must lie within the length, got offset {offset} and length {length}")
    logits = sharpness * activation_curve(inv_freq, length, query, key)
    mass = (logits[offset] - torch.logcumsumexp(logits, dim=0)).exp()
    mass[:offset] = math.nan
    return mass


def sharpness_for(
    inv_freq: Table, query: Features, key: Features, *, mass: float, length: int, offset: int = 1
) -> float:
    """Return the smallest factor on the activations with which every query puts ``mass`` on the token ``offset`` back.

    The coefficient is smallest at the last position and grows with the factor, so bisection finds it, to 12 digits.
    Theorem 5.3 says that it exists; this is its value. At most ``ln(mass (length - 1) / (1 - mass))`` over the lead of
    the peak, and far less when only a few neighbours come close.

    *Source*: Barbero et al. theorem 5.3, Wendler (its temperature is the inverse); the value is ours.

    Args:
        inv_freq: (pairs,) [rad/token].
        query: (2 pairs,).
        key: (2 pairs,).
        mass: of the attention, in (0, 1).
        length: positions [tokens].
        offset: distance attended to [tokens].

    Raises:
        ValueError: no factor reaches the mass, since another distance has as large an activation, in float64 at least.

    >>> table = torch.tensor([1.0, 0.1])
    >>> round(sharpness_for(table, *wendler_head(table), mass=0.99, length=300), 2)
    322.58
    """
    if not 0 < mass < 1:
        raise ValueError(f"mass must be in (0, 1), got {mass}")
    if not 0 <= offset < length:
        raise ValueError(f"offset must lie within the length, got offset {offset} and length {length}")
    logits = activation_curve(inv_freq, length, query, key)
    behind = logits - logits[offset]

    def reached(sharpness: float) -> float:
        return float(torch.exp(-torch.logsumexp(sharpness * behind, dim=0)))

    if length > 1 and float(torch.cat([behind[:offset], behind[offset + 1 :]]).max()) >= 0:
        raise ValueError(
            f"no factor puts {mass} on the token {offset} back: another distance has as large an activation"
        )
    low, high = 0.0, 1.0
    while reached(high) < mass:
        low, high = high, 2 * high
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) >= mass else (middle, high)
    return high


def necessary_lead(mass: float) -> float:
    """Return by how much a logit must exceed *every* other for a coefficient of ``mass``: ``ln(mass / (1 - mass))``.

    Positive above 1/2: there, only the largest logit can have it.

    *Source*: Barbero et al. lemma A.3, made quantitative.

    >>> necessary_lead(0.5), round(necessary_lead(0.99), 3)
    (0.0, 4.595)
    """
    if not 0 < mass < 1:
        raise ValueError(f"mass must be in (0, 1), got {mass}")
    return math.log(mass / (1 - mass))


def worst_lead(
    inv_freq: Table, query: Features, target: Features, rival: Features, *, length: int
) -> Float[Tensor, " lengths"]:
    """Return the smallest lead of a target token over a rival, wherever the two stand, for growing contexts.

    The lead is the target's activation minus the rival's, at two different distances below ``n``, smallest over all
    choices. A head that looks for content must keep it above :func:`necessary_lead` everywhere. One pair that turns
    cannot: once it has made half a turn the target can stand where its activation is <= 0 and the rival where its own
    is >= 0. Unrotated pairs keep the lead they have at distance 0: p-RoPE's escape.

    *Source*: Barbero et al. theorem 6.1 (one pair, and any number of pairs here). Linear in ``length``, all contexts
    at once.

    Args:
        inv_freq: (pairs,) [rad/token].
        query: (2 pairs,).
        target: (2 pairs,) key of the token that is looked for.
        rival: (2 pairs,) key of another token.
        length: largest context [tokens].

    Returns:
        (length - 1,): of contexts of 2, 3, … ``length`` tokens; never increasing.

    >>> query, target, rival = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
    >>> worst_lead(torch.tensor([math.pi / 2]), query, target, rival, length=3).round(decimals=3).tolist()
    [1.0, -1.0]
    >>> worst_lead(torch.tensor([0.0]), query, target, rival, length=3).tolist()
    [2.0, 2.0]
    """
    if length < 2:
        raise ValueError(f"length must hold a target and a rival, got {length}")
    target_curve, rival_curve = (activation_curve(inv_freq, length, query, key) for key in (target, rival))
    target_new = (
        target_curve[1:] - rival_curve.cummax(0).values[:-1]
    )  # the target stands at the newest distance, or the rival
    rival_new = target_curve.cummin(0).values[:-1] - rival_curve[1:]
    return torch.minimum(target_new, rival_new).cummin(0).values


def robust_length(
    inv_freq: Table, query: Features, target: Features, rival: Features, *, mass: float, length: int
) -> int:
    """Return the longest context up to ``length`` in which the target can keep a coefficient of ``mass`` everywhere.

    *Source*: Barbero et al. theorem 6.1. 1 if two tokens are too many already; ``length`` if the lead never falls
    that low.

    >>> head = torch.tensor([9.0, 0.0]), torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])
    >>> [robust_length(torch.tensor([f]), *head, mass=0.9, length=10**5) for f in (1e-2, 1e-3, 0.0)]
    [146, 1449, 100000]
    """
    leads = worst_lead(inv_freq, query, target, rival, length=length)
    return 1 + int((leads >= necessary_lead(mass)).sum())
