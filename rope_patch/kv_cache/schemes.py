"""Schemes that say how a key-value cache is quantized: frozen dataclasses with a text form.

Scheme strings have no commas, so that they pass through lm-eval's ``--model_args``::

    k=int2.channel32.pre;v=int2.token32;residual=128;flush=128;sinks=4;skip=0+27

A side consists of a format, an axis with the size of a group, and switches, joined by points; ``int4`` alone is
``int4.token``. The name of a preset stands for its text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from rope_patch.kv_cache.formats import FORMATS
from rope_patch.runtime.text import did_you_mean

SCALE_BITS = 16
"""Number of bits of a scale or a zero point, as KIVI and similar methods store them."""
SWITCHES = ("pre", "hadamard")


@dataclass(frozen=True)
class Side:
    """The part of a scheme that says how keys, or values, are quantized.

    Attributes:
        format: name of the format, a key of :data:`~rope_patch.kv_cache.formats.FORMATS`.
        axis: the elements that share a scale: ``"token"`` (features of one token and head) or ``"channel"`` (tokens of
            one feature).
        group: number of elements that share a scale: features with ``"token"`` (0 for as many as the format says, or
            the whole head), tokens with ``"channel"``.
        pre: whether keys are quantized before rotation, and rotated when they are read.
        hadamard: whether features are rotated by a Hadamard matrix before they are quantized, and back when they are
            read.

    Raises:
        ValueError: a value is unknown, or a combination has no meaning.
    """

    format: str = "none"
    axis: str = "token"
    group: int = 0
    pre: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        FORMATS.find(self.format)
        if self.axis not in ("token", "channel") or self.group < (self.axis == "channel"):
            raise ValueError(f"an axis is token, tokenN or channelN with N tokens, got {self.axis}{self.group}")
        if self.hadamard and self.axis == "channel":
            raise ValueError("a Hadamard matrix mixes features: a scale for each of them has no meaning then")
        if self.format == "none" and (self.axis, self.group, self.pre, self.hadamard) != ("token", 0, False, False):
            raise ValueError("none is full precision: it takes no axis, group or switch")

    @property
    def block(self) -> int:
        """Number of tokens that are quantized together."""
        return self.group if self.axis == "channel" else 1

    @property
    def features(self) -> int:
        """Number of features of a token that share a scale; 0 for the whole head."""
        return self.group or FORMATS[self.format].group

    def __str__(self) -> str:
        words = [self.format]
        if self.group:
            words.append(f"{self.axis}{self.group}")
        return ".".join([*words, *(name for name in SWITCHES if getattr(self, name))])


@dataclass(frozen=True)
class Scheme:
    """A scheme, which says how a cache is quantized.

    Attributes:
        key: how keys are quantized.
        value: how values are quantized.
        residual: number of latest tokens in full precision [tokens]; with ``flush`` only their values are.
        flush: number of keys that are collected in full precision and then quantized together, as KIVI does [tokens].
            With 0 a block is quantized as soon as it leaves the residual window. With ``flush`` a query reads the cache
            before its own token rounds anything: the keys quantized so far are those of whole steps before it, and the
            ``residual`` values before its own are in full precision.
        sinks: number of first tokens in full precision [tokens].
        skip: indices of the layers in full precision.

    Raises:
        ValueError: a number is negative, or values have a switch that is for keys.

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
        if min(self.residual, self.flush, self.sinks, *self.skip) < 0:
            raise ValueError(f"residual, flush, sinks and skip must be >= 0, got {self}")
        object.__setattr__(self, "skip", tuple(sorted(set(self.skip))))
        if self.value.pre:
            raise ValueError("pre is for keys: values do not rotate")

    def __str__(self) -> str:
        parts = [f"k={self.key}", f"v={self.value}"]
        parts += [f"{name}={getattr(self, name)}" for name in ("residual", "flush", "sinks") if getattr(self, name)]
        parts += [f"skip={'+'.join(map(str, self.skip))}"] if self.skip else []
        return ";".join(parts) if parts != ["k=none", "v=none"] else "none"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """Return the scheme of a text, or of the name of a preset, to which parts may be added: ``kivi-2;sinks=4``.

        Raises:
            ValueError: the text cannot be read.
        """
        first, *parts = text.strip().split(";")
        try:
            scheme = cls()
            if "=" in first:
                parts = [first, *parts]
            elif first in PRESETS:
                scheme = cls.parse(PRESETS[first].text)
            else:  # one side stands for keys and values
                # Values are not rotated, so `pre` is dropped for them.
                key = _side(first, [*FORMATS, *PRESETS])
                scheme = cls(key, replace(key, pre=False))
            for part in parts:
                scheme = replace(scheme, **_part(part))
        except ValueError as error:
            raise ValueError(f"{text}: {error}") from None
        return scheme


@dataclass(frozen=True)
class Preset:
    """A scheme that is known by a name.

    Attributes:
        text: the scheme written out.
        source: the publication that it comes from, and how it differs from that.
    """

    text: str
    source: str


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
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
        "int8-token": Preset("k=int8;v=int8", "a scale per token and head, round to nearest"),
        "int4-token": Preset("k=int4;v=int4", "a scale per token and head, round to nearest"),
    }
)

_PARTS = {"k": "key", "v": "value"} | {name: name for name in ("residual", "flush", "sinks", "skip")}


def _part(text: str) -> dict[str, Any]:
    """Return the field and the value that a part of a scheme, such as ``sinks=4``, states."""
    name, _, value = text.partition("=")
    if name not in _PARTS:
        raise ValueError(f"unknown part {text!r}. Known: {'=, '.join(_PARTS)}=")
    if name in ("k", "v"):
        return {_PARTS[name]: _side(value, FORMATS)}
    if not re.fullmatch(r"[0-9]+" if name != "skip" else r"[0-9]+(\+[0-9]+)*", value):
        several = ", or several such as 0+27" if name == "skip" else ""
        raise ValueError(f"{name} must be a whole number{several}, got {value!r}")
    numbers = tuple(map(int, value.split("+")))
    return {name: numbers if name == "skip" else numbers[0]}


def _side(text: str, known: Collection[str]) -> Side:
    """Return the side that a text such as ``int4.token32.pre`` states; ``known`` names are suggested in an error."""
    name, *words = text.split(".")
    if name not in FORMATS:
        raise ValueError(f"unknown cache format {text!r}.{did_you_mean(text, known)} Known: {', '.join(known)}")
    options: dict[str, Any] = {}
    for word in words:
        axis = re.fullmatch(r"(token|channel)([0-9]*)", word)
        if axis:
            options |= {"axis": axis[1], "group": int(axis[2] or 0)}
        elif word in SWITCHES:
            options[word] = True
        else:
            raise ValueError(
                f"unknown word {word!r} in {text!r}. Known: token, tokenN, channelN, {', '.join(SWITCHES)}"
            )
    return Side(name, **options)


def effective_bits(side: Side, head_dim: int) -> float:
    """Return the number of bits per element of the quantized part, with its scales and zero points of 16 bits.

    The residual window and sinks are left out, since they do not grow with the text, and so are skipped layers.

    Args:
        side: how keys, or values, are quantized.
        head_dim: number of features of a head.
    """
    form, share = FORMATS[side.format], float(head_dim)
    if side.axis == "channel":
        share = side.group
    elif side.features:
        share = head_dim / -(-head_dim // side.features)  # the last group may be short
    return form.bits + form.scales * SCALE_BITS / share
