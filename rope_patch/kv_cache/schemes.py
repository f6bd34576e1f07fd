"""How a key-value cache is quantized, as frozen dataclasses with one text form.

Scheme strings have no commas, so that they pass through lm-eval's ``--model_args``::

    k=int2.channel32.pre;v=int2.token32;residual=128;flush=128;sinks=4;skip=0+27

A side is a format, an axis with the size of a group, and switches, joined by points. A preset's name stands for its
text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from rope_patch.runtime.text import did_you_mean

FORMATS: Mapping[str, int] = MappingProxyType(
    {"none": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2, "nf4": 4, "fp8": 8}
)
"""Bits per element; ``none`` is full precision, counted as 16."""
AXES = ("token", "channel", "tensor")
SCALE_BITS = 16
"""Bits of a scale, a zero point or a norm, as KIVI and similar methods store them."""


@dataclass(frozen=True)
class Side:
    """How keys, or values, are quantized.

    Attributes:
        format: one of ``FORMATS``.
        axis: what shares a scale: ``"token"`` (features of one token and head), ``"channel"`` (tokens of one feature),
            ``"tensor"`` (everything: fp8 with a fixed scale of 1, which saturates at 448).
        group: how many: features under ``"token"`` (0 for the whole head), tokens under ``"channel"``.
        symmetric: integers around 0 without a zero point.
        pre: keys are quantized before rotation and rotated when read.
        centre: subtract one mean per key head before quantizing, from ``"unrotated"`` pairs or from ``"all"``; "" for
            none. Under ``pre`` it is the mean before rotation, and added again; else that of keys as they are stored,
            averaged over the rotations of the layer's context, and never added again: softmax drops any constant.
        hadamard: rotate features by a Hadamard matrix before quantizing, and back when read.
        keep: bits of the outlier pairs, those under the frequency bound: 8, or 0 for none kept apart.

    Raises:
        ValueError: an unknown value, or a combination without a meaning.
    """

    format: str = "none"
    axis: str = "token"
    group: int = 0
    symmetric: bool = False
    pre: bool = False
    centre: str = ""
    hadamard: bool = False
    keep: int = 0

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(_unknown("format", self.format, FORMATS))
        if self.axis not in AXES:
            raise ValueError(_unknown("axis", self.axis, AXES))
        if self.group < 0:
            raise ValueError(f"a group must hold >= 1 elements, got {self.group}")
        if self.axis == "channel" and self.group == 0:
            raise ValueError("channel needs the number of tokens that share a scale, such as channel32")
        if self.axis == "tensor" and (self.group or self.format != "fp8"):
            raise ValueError("tensor is a fixed scale for all that is stored: it is for fp8, and takes no number")
        if self.symmetric and self.format in ("none", "nf4", "fp8"):
            raise ValueError(f"sym is for integers, {self.format} has no zero point")
        if self.centre not in ("", "unrotated", "all"):
            raise ValueError(f"centre must be unrotated or all, got {self.centre!r}")
        if self.keep not in (0, 8):
            raise ValueError(f"outlier pairs are kept in 8 bits, got {self.keep}")
        if self.hadamard and (self.keep or self.axis == "channel"):
            raise ValueError(
                "a Hadamard matrix mixes features: scales are per token or tensor, and no pair is kept apart"
            )
        if self.format == "none" and any(getattr(self, one.name) != one.default for one in fields(self)):
            raise ValueError("none is full precision: it takes no axis, group or switch")

    @property
    def block(self) -> int:
        """Tokens that are quantized together."""
        return self.group if self.axis == "channel" else 1

    def __str__(self) -> str:
        if self.format == "none":
            return "none"
        size = str(self.group) if self.group else ""
        words = [self.format, f"{self.axis}{size}"]
        words += [word for word, on in (("sym", self.symmetric), ("pre", self.pre), ("hadamard", self.hadamard)) if on]
        words += {"": [], "unrotated": ["centre"], "all": ["centreall"]}[self.centre]
        words += [f"keep{self.keep}"] if self.keep else []
        return ".".join(words)


@dataclass(frozen=True)
class Scheme:
    """How a cache is quantized.

    Attributes:
        key: of keys.
        value: of values.
        residual: latest tokens in full precision [tokens]; under ``flush`` values alone.
        flush: keys gather in full precision until there are so many, and are then quantized together, as KIVI does
            [tokens]; 0: a block is quantized as soon as it leaves the residual window. Under ``flush`` a query reads
            the cache before its own token rounds anything: keys quantized so far are those of whole steps before it,
            and ``residual`` values before its own are in full precision.
        sinks: first tokens in full precision [tokens].
        skip: layers in full precision.

    Raises:
        ValueError: a negative number, or values with a switch that is for keys.

    Example:
        >>> str(Scheme.parse("kivi-2"))
        'k=int2.channel32;v=int2.token32;residual=128;flush=128'
        >>> Scheme.parse("k=int4.token;v=none").key.format
        'int4'
    """

    key: Side = Side()
    value: Side = Side()
    residual: int = 0
    sinks: int = 0
    skip: tuple[int, ...] = ()
    flush: int = 0

    def __post_init__(self) -> None:
        for name in ("residual", "flush", "sinks"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0 tokens, got {getattr(self, name)}")
        if any(layer < 0 for layer in self.skip):
            raise ValueError(f"skip takes indices of layers, got {self.skip}")
        object.__setattr__(self, "skip", tuple(sorted(set(self.skip))))
        for word in ("pre", "centre", "keep"):
            if getattr(self.value, word):
                raise ValueError(f"{word} is for keys: values do not rotate")

    def __str__(self) -> str:
        parts = [f"k={self.key}", f"v={self.value}"]
        parts += [f"{name}={getattr(self, name)}" for name in ("residual", "flush", "sinks") if getattr(self, name)]
        parts += [f"skip={'+'.join(map(str, self.skip))}"] if self.skip else []
        return ";".join(parts) if parts[:2] != ["k=none", "v=none"] or parts[2:] else "none"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Read the text form, or the name of a preset, to which parts may be added: ``kivi-2;sinks=4``.

        Raises:
            ValueError: text that cannot be read; the message marks the place.
        """
        text = text.strip()
        first, *rest = text.split(";")
        scheme, at = cls(), 0
        if "=" in first or not first:
            rest = [first, *rest]
        else:
            scheme, at = _both(first, text), len(first) + 1
        given: set[str] = set()
        for part in rest:
            name, equals, value = part.partition("=")
            inside = at + len(name) + 1
            if name not in _PARTS or not equals:
                raise ValueError(
                    _pointed(text, at, part, f"expected k=, v=, residual=, flush=, sinks= or skip=, got {part!r}")
                )
            if name in given:
                raise ValueError(_pointed(text, at, part, f"{name}= is given twice"))
            given.add(name)
            if name in ("k", "v"):
                new: Any = _side(value, text, inside)
            elif name == "skip":
                new = tuple(_whole(item, text, at, part) for item in value.split("+"))
            else:
                new = _whole(value, text, at, part)
            try:
                scheme = replace(scheme, **{_PARTS[name]: new})
            except ValueError as error:  # values with a switch that is for keys
                raise ValueError(_pointed(text, inside, value, str(error))) from None
            at += len(part) + 1
        return scheme


@dataclass(frozen=True)
class Preset:
    """A scheme that others know by name.

    Attributes:
        text: of the scheme.
        source: where it comes from, and how this differs.
    """

    text: str
    source: str


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "none": Preset("k=none;v=none", "full precision"),
        "kivi-2": Preset(
            "k=int2.channel32;v=int2.token32;residual=128;flush=128",
            "Liu et al., KIVI, arXiv:2402.02750, and their code: keys per channel, values per token, groups of 32; "
            "keys are quantized 128 at a time, so that 0 to 127 are in full precision, and the latest 128 values are",
        ),
        "kivi-4": Preset("k=int4.channel32;v=int4.token32;residual=128;flush=128", "as kivi-2, 4 bits"),
        "kivi-2-window": Preset(
            "k=int2.channel32;v=int2.token32;residual=128",
            "not KIVI: as kivi-2, but always at least the latest 128 keys in full precision, 128 to 159",
        ),
        "kivi-4-window": Preset("k=int4.channel32;v=int4.token32;residual=128", "as kivi-2-window, 4 bits"),
        "kvquant-4": Preset(
            "k=int4.channel128.pre;v=int4.token;sinks=1",
            "after Hooper et al., KVQuant, arXiv:2401.18079: keys before rotation and per channel, values per token, "
            "the first token kept; uniform levels here, theirs are fitted offline, and no sparse outliers",
        ),
        "int8-token": Preset("k=int8.token;v=int8.token", "a scale per token and head, round to nearest"),
        "int4-token": Preset("k=int4.token;v=int4.token", "a scale per token and head, round to nearest"),
        "fp8": Preset(
            "k=fp8.tensor;v=fp8.tensor",
            "float8 e4m3 with a scale of 1, as serving engines store it unless a scale was calibrated",
        ),
        "nf4": Preset(
            "k=nf4.token64;v=nf4.token64", "Dettmers et al., QLoRA, arXiv:2305.14314: 4-bit normal floats, blocks of 64"
        ),
    }
)


# --- reading ---------------------------------------------------------------------------------------------------------

_WORDS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "sym": {"symmetric": True},
        "pre": {"pre": True},
        "centre": {"centre": "unrotated"},
        "centreall": {"centre": "all"},
        "hadamard": {"hadamard": True},
        "keep8": {"keep": 8},
    }
)
_KEY_WORDS = ("pre", "centre", "centreall", "keep8")
_PARTS = {"k": "key", "v": "value", "residual": "residual", "flush": "flush", "sinks": "sinks", "skip": "skip"}


def _both(first: str, whole: str) -> Scheme:
    """Read a preset, or one side for keys and values."""
    form = first.partition(".")[0]
    if first in PRESETS:
        return Scheme.parse(PRESETS[first].text)
    if form in PRESETS and form not in FORMATS:
        raise ValueError(_pointed(whole, 0, first, f"{form} is a whole scheme: add parts to it, as in {form};sinks=4"))
    if form not in FORMATS:
        raise ValueError(_pointed(whole, 0, form, _unknown("scheme", form, list(dict.fromkeys([*FORMATS, *PRESETS])))))
    key = _side(first, whole, 0)
    return Scheme(key, _side(".".join(word for word in first.split(".") if word not in _KEY_WORDS), whole, 0))


def _side(text: str, whole: str, at: int) -> Side:
    """Read a side that begins at position ``at`` of the whole text."""
    form, *words = text.split(".")
    if form not in FORMATS:
        raise ValueError(_pointed(whole, at, form, _unknown("format", form, FORMATS)))
    options: dict[str, Any] = {}
    place = at + len(form) + 1
    for word in words:
        axis = re.fullmatch(rf"({'|'.join(AXES)})([0-9]*)", word)
        if axis:
            new: dict[str, Any] = {"axis": axis[1], "group": int(axis[2] or 0)}
            if axis[2] and not new["group"]:
                raise ValueError(_pointed(whole, place, word, "a group must hold >= 1 elements, got 0"))
        elif word in _WORDS:
            new = _WORDS[word]
        else:
            raise ValueError(_pointed(whole, place, word, _unknown("word", word, [*AXES, *_WORDS])))
        if new.keys() & options:
            raise ValueError(_pointed(whole, place, word, f"{word} repeats or contradicts an earlier switch"))
        options |= new
        place += len(word) + 1
    try:
        return Side(format=form, **options)
    except ValueError as error:
        raise ValueError(_pointed(whole, at, text, str(error))) from None


def _whole(value: str, text: str, at: int, part: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError(_pointed(text, at, part, f"expected a whole number, got {value!r}"))
    return int(value)


def _unknown(what: str, got: str, known: Any) -> str:
    return f"unknown {what} {got!r}.{did_you_mean(got, known)} Known: {', '.join(known)}"


def _pointed(text: str, at: int, part: str, message: str) -> str:
    """Return a message with the place of the error marked under the text."""
    return f"{message}\n  {text}\n  {' ' * at}{'^' * max(1, len(part))}"


# --- size ------------------------------------------------------------------------------------------------------------


def effective_bits(side: Side, *, head_dim: int, kept_pairs: int = 0) -> float:
    """Return bits per element of the quantized part, scales and zero points of 16 bits included.

    The residual window, sinks and skipped layers are not in it: they do not grow with the text.

    Args:
        side: of keys or values.
        head_dim: features of a head.
        kept_pairs: outlier pairs kept apart, of each head; 0 where ``keep`` is.
    """
    if side.format == "none":
        return 16.0
    features = head_dim - 2 * kept_pairs if side.keep else head_dim
    numbers = 1 if side.symmetric or side.format in ("nf4", "fp8") else 2  # scale, zero point
    share = {
        "token": min(side.group or features, features) or 1,
        "channel": side.group,
        "tensor": math.inf,
    }[side.axis]
    if side.axis == "token" and side.group and features:
        share = features / -(-features // side.group)  # the last group may be short
    bits = (FORMATS[side.format] + numbers * SCALE_BITS / share) * features
    if side.keep:
        # Pairs that are kept apart have a symmetric scale per token.
        bits += 2 * kept_pairs * side.keep + (SCALE_BITS if kept_pairs else 0)
    return bits / head_dim
