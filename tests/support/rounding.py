"""Quantization of a block in plain Python, number by number."""

import bisect
import itertools

import torch


def e4m3():
    """All finite numbers of float8 e4m3 by definition, each with the last bit of its mantissa."""
    numbers = {0.0: 0}
    for exponent, mantissa in itertools.product(range(16), range(8)):
        if (exponent, mantissa) == (15, 7):
            continue  # NaN
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        numbers |= {size: mantissa & 1, -size: mantissa & 1}
    return numbers


E4M3 = e4m3()

ORDERED = sorted(E4M3)


def eight_bits(value):
    """The nearest number of e4m3: of two that are equally near the even one, and beyond the largest the largest."""
    at = bisect.bisect_left(ORDERED, value)
    near = ORDERED[max(0, at - 1) : at + 1] or ORDERED[-1:]
    return min(near, key=lambda number: (abs(value - number), E4M3[number]))


def rounded(values, form):
    """Round numbers that share a scale, one by one.

    Args:
        values: the numbers that share a scale.
        form: name of the format: ``int4`` and the like, ``fp8`` or ``fp8-scaled``.

    Raises:
        ValueError: nothing is known of the format here.
    """
    largest = max(abs(value) for value in values)
    if form.startswith("int"):
        low = min(values)
        scale = (max(values) - min(values)) / (2 ** int(form[3:]) - 1)
        return [low + scale * round((value - low) / scale) if scale else value for value in values]
    if form == "fp8":
        return [eight_bits(value) for value in values]
    if form != "fp8-scaled":
        raise ValueError(f"add to this function how {form} rounds, number by number")
    return [eight_bits(value / (largest / 448)) * (largest / 448) if largest else 0.0 for value in values]


def naive(x, side):
    """Return one block of one row, (heads, tokens, features), quantized in plain Python."""
    heads, tokens, features = (range(size) for size in x.shape)
    if side.axis == "token":
        size = side.group or max(1, len(features))
        shares = [
            [(h, t, f) for f in features[low : low + size]] for h in heads for t in tokens for low in features[::size]
        ]
    else:
        shares = [[(h, t, f) for t in tokens] for h in heads for f in features]
    numbers = x.double().tolist()  # a list is read and written much faster than a tensor, number by number
    out = x.double().tolist()
    for share in shares:
        values = rounded([numbers[h][t][f] for h, t, f in share], side.format)
        for (h, t, f), value in zip(share, values, strict=True):
            out[h][t][f] = value
    return torch.tensor(out, dtype=torch.float64)
