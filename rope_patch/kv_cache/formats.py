"""The number formats that a cache can have, one class each.

A user's own format is written in a module of the user, which ``--import`` or an entry point of the group
``rope_patch.formats`` names::

    class Ternary(Format, name="ternary"):
        \"\"\"-1, 0 or 1 times a scale.\"\"\"

        bits = math.log2(3)

        def round(self, x: Tensor, dim: int) -> Tensor:
            scale = x.abs().amax(dim, keepdim=True)
            return (x / nonzero(scale)).round() * scale

Nothing is packed: a number is replaced by one that the format can hold. Scales and zero points are float32, also for
states in half precision, while packed caches store them in 16 bits; for states in float64 they are float64.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from rope_patch.registry import Registry

FULL_BITS = 16
"""Number of bits of an element in full precision."""

FORMATS: Registry[Format] = Registry("cache format", "rope_patch.formats", ("bits", "round"))
"""All formats by name. A subclass of :class:`Format` that is given a name is entered by itself."""


class Format(ABC):
    """A number format: how numbers that share a scale are rounded.

    Attributes:
        bits: number of bits of each element.
        scales: number of values of 16 bits that are stored for each group: 1 for a scale, 2 with a zero point.
        group: number of features that share a scale if the scheme states none, such as the block size of a file format;
            0 for the whole head.
    """

    bits: float
    scales: int = 1
    group: int = 0

    def __init_subclass__(cls, name: str = "") -> None:
        """Enter a subclass with a name into :data:`FORMATS`."""
        super().__init_subclass__()
        if name:
            FORMATS.add(name, cls())

    @abstractmethod
    def round(self, x: Tensor, dim: int) -> Tensor:
        """Return numbers rounded to those that the format can hold; numbers along ``dim`` share a scale."""


class FullPrecision(Format, name="none"):
    """Full precision: numbers stay as they are."""

    bits, scales = FULL_BITS, 0

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Return the numbers unchanged."""
        return x


class Integer(Format):
    """Integers that count equal steps from the smallest number of a group to the largest.

    Args:
        bits: number of bits of each element.
    """

    scales = 2

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round to the nearest step."""
        low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
        most = 2**self.bits - 1
        scale = (high - low) / most
        steps: Tensor = ((x - low) / nonzero(scale)).round_().clamp_(0, most)
        return steps.mul_(scale).add_(low)


for _bits in (8, 4, 3, 2):
    FORMATS.add(f"int{_bits}", Integer(_bits))


class NF4(Format, name="nf4"):
    """Dettmers et al., QLoRA, arXiv:2305.14314: 4-bit normal floats in blocks of 64."""

    bits, group = 4, 64
    levels = (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    )
    """The levels of appendix E of the paper."""

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round to the nearest level between the largest number and its negative."""
        largest = x.abs().amax(dim, keepdim=True)
        levels = torch.tensor(self.levels, dtype=x.dtype, device=x.device)
        between = (levels[1:] + levels[:-1]) / 2
        return levels[torch.bucketize((x / nonzero(largest)).contiguous(), between)] * largest


FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class FP8(Format, name="fp8"):
    """Float8 e4m3 with a scale of 1, as serving engines store it unless a scale was calibrated: 448 is the largest."""

    bits, scales = 8, 0

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Cast to float8 and back, with numbers beyond the largest clipped to it."""
        return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)


class ScaledFP8(Format, name="fp8-scaled"):
    """Float8 e4m3 with a scale for each group, by which its largest number becomes 448."""

    bits = 8

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Scale, cast to float8 and back, and undo the scaling."""
        scale = x.abs().amax(dim, keepdim=True) / FP8_MAX
        return (x / nonzero(scale)).to(torch.float8_e4m3fn).to(x.dtype) * scale


def nonzero(scale: Tensor) -> Tensor:
    """Return scales by which one can divide: 1 in place of 0, the scale of a group of equal numbers."""
    return scale.masked_fill(scale == 0, 1.0)
