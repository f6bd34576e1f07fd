"""What a rotary table implies, without a model: decay, heads built by hand, distances between images.

Numbers and tensors in, numbers and float64 tensors out; torch only. Everything is exact where it can be, and linear in
the number of positions unless it says otherwise, so a million positions take seconds.

*Sources*: Barbero et al., arXiv:2410.06205 · Xiong et al., arXiv:2309.16039, appendix B · Wendler,
*Notes on rotary positional embeddings*, 2025 · Ruoss et al., arXiv:2305.16843. Xiong et al.'s theorem 1
(``granularity``, its limits and bounds) and Jonasson's bounds (``offset_angle_bound``) are in
:mod:`rope_patch.frequencies`.

Conventions are :mod:`rope_patch.frequencies`'s. A *distance* is the query's position minus the key's, >= 0 in a causal
model, and an *activation* is ``query^T R^-distance key``: the logit before it is divided by ``sqrt(head_dim)``.

>>> from rope_patch.frequencies import geometric
>>> separation(geometric(10000.0, 128), 16384).apart  # no two images are closer than consecutive ones
1
"""

from rope_patch.theory.constructions import (
    head_mass,
    necessary_lead,
    positional_head,
    robust_length,
    rotate,
    sharpness_for,
    wendler_head,
    worst_lead,
)
from rope_patch.theory.decay import (
    activation,
    activation_curve,
    gaussian_activation,
    gaussian_moments,
    randpos_activation,
)
from rope_patch.theory.images import (
    Gap,
    Separation,
    farthest_image,
    helix,
    image_distance,
    nearest_old,
    separation,
)

__all__ = [
    "Gap",
    "Separation",
    "activation",
    "activation_curve",
    "farthest_image",
    "gaussian_activation",
    "gaussian_moments",
    "head_mass",
    "helix",
    "image_distance",
    "nearest_old",
    "necessary_lead",
    "positional_head",
    "randpos_activation",
    "robust_length",
    "rotate",
    "separation",
    "sharpness_for",
    "wendler_head",
    "worst_lead",
]
