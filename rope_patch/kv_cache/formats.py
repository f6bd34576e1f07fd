"""The number formats that a cache can have, one class each.

A user's own format is written in a module of the user, which ``--import`` or an entry point of the group
``rope_patch.formats`` names::

    class Ternary(Format, name="ternary"):
        \"\"\"-1, 0 or 1 times a scale.\"\"\"

        bits = math.log2(3)

        def round(self, x: Tensor, dim: int) -> Tensor:
            scale = x.abs().amax(dim, keepdim=True)
            return (x / nonzero(scale)).round() * scale

Nothing is packed: a number is replaced by one that the format can hold. The formats of a program round scales to 16
bits where the program stores them so; those of the others are float32 (float64 for states in float64).
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from rope_patch.registry import Registry

FULL_BITS = 16
"""Number of bits of an element in full precision."""

_constant = functools.lru_cache(maxsize=16)(torch.inference_mode(False)(torch.tensor))
"""``torch.tensor`` that copies numbers to a device once: a GPU is waited for each time."""

FORMATS: Registry[Format] = Registry("cache format", "rope_patch.formats", ("bits", "round"))
"""All formats by name. A subclass of :class:`Format` that is given a name is entered by itself."""


class Format(ABC):
    """A number format: how numbers that share a scale are rounded.

    Attributes:
        bits: number of bits of each element.
        scales: number of values of 16 bits that are stored for each group: 1 for a scale, 2 with a zero point.
        group: number of features that share a scale if the scheme states none, such as the block size of a file format;
            0 for the whole head.
        tokens: number of tokens that are rounded together although their features share the scales, since each feature
            has a scale over these tokens, too; 0 if no such scale is stored.
        rotated: heads are rotated by a Hadamard matrix, if the scheme says so, only where their size is a multiple of
            this number.
        takes_half: whether :meth:`round` is given states in half precision as they are, not in float32.
    """

    bits: float
    scales: float = 1
    group: int = 0
    tokens: int = 0
    rotated: int = 1
    takes_half: bool = False

    def __init_subclass__(cls, name: str = "", widths: Sequence[int] = ()) -> None:
        """Enter a subclass with a name into :data:`FORMATS`; of several widths each, with its bits in place of {}."""
        super().__init_subclass__()
        for bits in widths:
            form = cls()
            form.bits = bits
            FORMATS.add(name.format(bits), form)
        if name and not widths:
            FORMATS.add(name, cls())

    @abstractmethod
    def round(self, x: Tensor, dim: int) -> Tensor:
        """Return numbers rounded to those that the format can hold; numbers along ``dim`` share a scale."""


class FullPrecision(Format, name="none"):
    """Full precision: numbers stay as they are."""

    bits = FULL_BITS
    scales = 0

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Return the numbers unchanged."""
        return x


class Integer(Format, name="int{}", widths=(8, 4, 3, 2)):
    """Integers that count equal steps from the smallest number of a group to the largest."""

    scales = 2

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round to the nearest step."""
        low = x.amin(dim, keepdim=True)
        high = x.amax(dim, keepdim=True)
        most = 2**self.bits - 1
        scale = (high - low) / most
        steps: Tensor = ((x - low) / nonzero(scale)).round_().clamp_(0, most)
        return steps.mul_(scale).add_(low)


class HalfInteger(Integer, name="int{}-half", widths=(4, 2)):
    """Integers as KIVI computes them (``quant/new_pack.py``): every step of the arithmetic in float16."""

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round to the nearest step."""
        return super().round(x.half(), dim).to(x.dtype)


class GGML(Format, name="q{}_0", widths=(8, 5, 4)):
    """A block format of ggml, as its reference quantizers round (``ggml-quants.c``): 32 features, a float16 scale.

    llama.cpp rotates heads whose size is a multiple of 64 (``llama-kv-cache.cpp``, pull request 21038). It refuses
    heads whose size is no multiple of 32, whose last block is short here; its AVX kernels round ties of q8_0 to even.
    """

    group = 32
    rotated = 64

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round to steps: 8 bits count the largest number as 127, fewer bits count it as the lowest step."""
        work = x.float()
        middle = 2 ** (self.bits - 1)
        largest = work.gather(dim, work.abs().argmax(dim, keepdim=True))
        scale = largest.abs() / 127 if self.bits == 8 else largest / -middle
        steps = work * (1 / nonzero(scale))
        if self.bits == 8:
            steps = steps.trunc() + (2 * steps.frac()).trunc()  # halves away from zero
        else:
            steps = (steps + (middle + 0.5)).trunc().clamp(0, 2 * middle - 1) - middle
        return (steps * scale.half()).to(x.dtype)


class TurboQuantKeys(Format, name="turboquant{}", widths=(4, 3)):
    """Rotated keys of vLLM's TurboQuant: the nearest Lloyd-Max level of each feature, times the norm in float16.

    *Source*: Zandieh et al., arXiv:2504.19874, without its residual (QJL), and with the levels of a key scaled to
    length 1, as ``triton_turboquant_store.py`` and ``_decode.py`` in vLLM do. The norm is taken after the rotation
    here, and before it there.
    """

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round the direction of each key; its features must lie along ``dim``."""
        work = x.float()
        norm: Tensor = torch.linalg.vector_norm(work, dim=dim, keepdim=True)
        levels = _constant(lloyd_max(int(self.bits), x.shape[dim]), dtype=torch.float32, device=x.device)
        between = (levels[1:] + levels[:-1]) / 2
        unit = levels[torch.bucketize((work / (norm + 1e-8)).contiguous(), between, right=True)]
        unit = unit * (1 / (unit.square().sum(dim, keepdim=True) + 1e-16).sqrt())
        return (norm.half() * unit).to(x.dtype)


class TurboQuantValues(Integer, name="uniform{}", widths=(4, 3)):
    """Values of vLLM's TurboQuant: integers whose scale and zero point are float16 once all numbers are rounded."""

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round to the nearest step."""
        work = x.float()
        most = 2**self.bits - 1
        low = work.amin(dim, keepdim=True)
        high = work.amax(dim, keepdim=True)
        scale = ((high - low) / most).clamp_min(1e-8)
        steps = ((work - low) / scale + 0.5).trunc().clamp(0, most)
        return (steps * scale.half() + low.half()).to(x.dtype)


@functools.cache
def lloyd_max(bits: int, features: int) -> tuple[float, ...]:
    """Return the levels of least squared error for a coordinate of a random unit vector.

    The coordinate is taken as normal with variance ``1 / features``. *Source*: Lloyd (1982), Max (1960); the start, the
    trapezoids and the tolerance are those of ``centroids.py`` in vLLM.

    Args:
        bits: number of bits that choose a level.
        features: number of features of the vector.
    """
    end = 3.5 * features**-0.5
    count = 2**bits
    levels: Tensor = end * ((2 * torch.arange(count, dtype=torch.float64) + 1) / count - 1)
    for _ in range(200):
        edges = torch.cat([levels.new_tensor([-3 * end]), (levels[1:] + levels[:-1]) / 2, levels.new_tensor([3 * end])])
        x = edges[:-1] + torch.linspace(0, 1, 201, dtype=torch.float64)[:, None] * edges.diff()
        density = (-features * x.square() / 2).exp()
        means = torch.trapezoid(x * density, dim=0) / torch.trapezoid(density, dim=0)
        if float((means - levels).abs().max()) < 1e-10:
            break
        levels = means
    return tuple(levels.tolist())


FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class FP8(Format, name="fp8"):
    """Float8 e4m3 with a scale of 1, as vLLM stores it unless a scale was calibrated: 448 is the largest."""

    bits = 8
    scales = 0

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Cast to float8 and back, with numbers beyond the largest clipped to it."""
        return as_float8(x)


def as_float8(x: Tensor) -> Tensor:
    """Return numbers cast to float8 (e4m3) and back, with those beyond the largest clipped to it."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype)


class ScaledFP8(Format, name="fp8-scaled"):
    """Float8 e4m3 times a float32, so that the largest number of a group becomes 448: vLLM's fp8_per_token_head.

    *Source*: ``_reshape_cache_per_token_head`` of vLLM 0.32, in ``triton_reshape_and_cache_flash.py``.

    Attributes:
        largest: what the largest number of a group becomes.
    """

    bits = 8
    scales = 2  # of 32 bits
    largest = FP8_MAX

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Scale, round, and undo the scaling."""
        work = x.float()
        scale = (work.abs().amax(dim, keepdim=True) / self.largest).clamp_min(LEAST_SCALE)
        return (self.steps(work * (1 / scale)) * scale).to(x.dtype)

    def steps(self, x: Tensor) -> Tensor:
        """Return scaled numbers as they are stored."""
        return as_float8(x)


class ScaledInteger(ScaledFP8, name="int8-scaled"):
    """Integers from -127 to 127 times a float32, without a zero point: vLLM's int8_per_token_head."""

    largest = 127

    def steps(self, x: Tensor) -> Tensor:
        """Return scaled numbers as they are stored."""
        return half_away_from_zero(x).clamp(-127, 127)


class RotatedInteger(Format, name="int4-rht"):
    """Integers from 0 to 15 of features that a random Hadamard matrix rotated: vLLM's int4_per_token_head.

    Signs are flipped, the same ones for all heads, and features rotated in blocks, the largest power of two that
    divides their number. The zero point is an integer, which takes the four lowest bits of a float32 scale.

    *Source*: ``int4_per_token_head.py`` of vLLM 0.32, whose code for a CPU rotates in float32 and rounds the result to
    the type of the model. That for a GPU rotates in bfloat16 whatever the type is.
    """

    bits = 4
    scales = 2  # of 32 bits, with the zero point
    takes_half = True

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Rotate the features, which must lie along ``dim``, round to the nearest step, and rotate back."""
        work = x.float().transpose(dim, -1)
        width = work.shape[-1] & -work.shape[-1]
        signs = _constant(_random_signs(width), device=x.device)
        rotated = _butterfly(in_parts(work, width) * signs).flatten(-2).to(x.dtype).float()
        low = rotated.amin(-1, keepdim=True)
        high = rotated.amax(-1, keepdim=True)
        scale = ((high - low) / 15).clamp_min(LEAST_SCALE)
        zero_point = half_away_from_zero(-low / scale).clamp(0, 15)
        steps = half_away_from_zero(rotated * (1 / scale) + zero_point).clamp(0, 15)
        rounded = (steps - zero_point) * (scale.view(torch.int32) & -16).view(torch.float32)
        back = _butterfly(in_parts(rounded, width)) / width * signs
        return back.flatten(-2).transpose(dim, -1).to(x.dtype)


LEAST_SCALE = 1e-6
"""The smallest scale of a token and head in vLLM."""


def half_away_from_zero(x: Tensor) -> Tensor:
    """Return the nearest whole numbers, halves away from zero, as kernels do that add a half and cut off the rest."""
    return (x + 0.5 * x.sign()).trunc()


@functools.cache
def _random_signs(width: int) -> tuple[float, ...]:
    """Return the signs, 1 or -1, with which vLLM makes a Hadamard matrix random."""
    heads = torch.bernoulli(torch.full((width,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9))
    return tuple((2 * heads - 1).tolist())


def _butterfly(x: Tensor) -> Tensor:
    """Return features, a power of two, times a Hadamard matrix of 1 and -1, in the order in which vLLM adds."""
    half = 1
    while half < x.shape[-1]:
        one, other = in_parts(x, 2 * half).chunk(2, -1)
        x = torch.cat([one + other, one - other], -1).flatten(-2)
        half *= 2
    return x


class FP4MX16(Format, name="fp4-mx16"):
    """Floats e2m1 (0, 0.5, 1, 1.5, 2, 3, 4 and 6, either sign) times a power of two that 16 features share.

    The scale is the smallest power of two by which no number of the block exceeds 6. *Source*:
    ``FP4MXBlock16KVQuantizeUtil`` of SGLang.

    Attributes:
        ties_to_even: whether a number in the middle of two goes to that with an even mantissa; otherwise to the larger.
    """

    bits = 4
    scales = 0.5  # a scale has 8 bits
    group = 16
    ties_to_even = False

    def scale(self, largest: Tensor) -> Tensor:
        """Return the scale of a block by its largest absolute number."""
        return (largest / 6).clamp_min(1e-10).log2().ceil().exp2()

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round to the nearest float."""
        work = x.float()
        scale = self.scale(work.abs().amax(dim, keepdim=True))
        sizes = (work.abs() * (1 / nonzero(scale))).clamp_max(6)
        # Floats are 0.5 apart below 2, 1 below 4, and 2 above.
        exponent = sizes.clamp_min(1).frexp().exponent - 2
        steps = sizes.ldexp(-exponent)
        if self.ties_to_even:
            steps = steps.round()
        else:
            steps = (steps + 0.5).floor()
        return (steps.ldexp(exponent) * scale).copysign(work).to(x.dtype)


class NVFP4(FP4MX16, name="nvfp4"):
    """Floats e2m1 times a float8 (e4m3) that 16 features share, with NVIDIA's second scale, that of a layer, at 1.

    *Source*: ``ref_nvfp4_quant_dequant`` in vLLM. Its kernels for GPUs, and those of FlashInfer, were not run; they
    multiply by approximate reciprocals. A scale of a layer is 1 as long as none was calibrated.
    """

    ties_to_even = True

    def scale(self, largest: Tensor) -> Tensor:
        """Return the scale of a block by its largest absolute number."""
        return as_float8(largest * (1 / 6))


class KVarN(Format, name="kvarn{}", widths=(4, 2)):
    """Integers of a tile of tokens and features whose standard deviations were made equal along both axes before.

    *Source*: Müller et al., KVarN, arXiv:2606.03458, as ``sinkhorn.py`` and ``kvarn_store.py`` of vLLM's pull request
    46812 compute it, which are plain PyTorch; its Triton kernel computes the same standard deviations from sums of
    squares. Of the scales that alternate, those with the least imbalance are kept. They are stored in float16, that of
    the axis that the integers share together with theirs.
    """

    scales = 2
    tokens = 128
    iterations = 8

    def round(self, x: Tensor, dim: int) -> Tensor:
        """Round to the nearest step; ``dim`` is -2 if the tokens of a feature share steps, and -1 for the reverse."""
        tile = x.float()
        axes = (-3 - dim, dim)
        logs = best = [tile.new_zeros(()), tile.new_zeros(())]
        least = _imbalance(tile, axes)
        for _ in range(self.iterations):
            for i, axis in enumerate(axes):
                deviation = _balanced(tile, logs).std(axis, keepdim=True).clamp(1e-3, 1e3)
                logs = [*logs[:i], (logs[i] + deviation.log()).clip(-0.3, 10), *logs[i + 1 :]]
            imbalance = _imbalance(_balanced(tile, logs), axes)
            best = [torch.where(imbalance <= least, new, old) for new, old in zip(logs, best, strict=True)]
            least = least.minimum(imbalance)
        across, along = (log.exp() for log in best)
        balanced = _balanced(tile, best)
        most = 2**self.bits - 1
        low = balanced.amin(dim, keepdim=True)
        high = balanced.amax(dim, keepdim=True)
        scale = ((high - low) / most).clamp_min(1e-10)
        steps = ((balanced - low) / scale).round().clamp(0, most)
        return ((steps * (along * scale).half() + (along * low).half()) * across.half()).to(x.dtype)


def _balanced(tile: Tensor, logs: Sequence[Tensor]) -> Tensor:
    return tile / logs[0].exp() / logs[1].exp()


def _imbalance(tile: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the largest standard deviation over the smallest, the sum of that of both axes; 2 where all are equal."""
    deviations = [tile.std(axis, keepdim=True) for axis in axes]
    one, other = (d.amax((-2, -1), True) / d.amin((-2, -1), True).clamp_min(1e-8) for d in deviations)
    return one + other


def nonzero(scale: Tensor) -> Tensor:
    """Return scales by which one can divide: 1 in place of 0, the scale of a group of equal numbers."""
    return scale.masked_fill(scale == 0, 1.0)


def in_parts(x: Tensor, size: int) -> Tensor:
    """Return features (..., features) in parts of equal size: (..., parts, size)."""
    return x.reshape(*x.shape[:-1], -1, size)
