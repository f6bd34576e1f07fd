"""Schemes, which users know as cache formats: frozen dataclasses that say how keys and values are quantized, as a text.

Texts have no commas, so that they pass through lm-eval's ``--model_args``::

    k=int2.channel32.pre;v=int2.token32;rope=full;residual=128;flush=128;sinks=4;skip=0+27

A side consists of a format, an axis with the size of a group, and switches, joined by points; ``int4`` alone is
``int4.token``. ``rope`` is the side of those features of keys that rotate, in full precision here; without it all of a
key is quantized alike. The name of a preset stands for its text.
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
SWITCHES = ("pre", "hadamard", "hadamardN")
Scales = tuple[tuple[int, float, float], ...]
"""The index of each layer, with the scale of its keys and that of its values."""
FULL = "full"
"""The word for rotary features in full precision."""


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
        hadamard: number of features that are rotated together by a Hadamard matrix before they are quantized, and back
            when they are read (see :func:`~rope_patch.kv_cache.blocks.mix`); 0 for no rotation.
        rope: how the features of keys that rotate are quantized, apart from the others; None for alike.

    Raises:
        ValueError: a value is unknown, or a combination has no meaning.
    """

    format: str = "none"
    axis: str = "token"
    group: int = 0
    pre: bool = False
    hadamard: int = 0
    rope: Side | None = None

    def __post_init__(self) -> None:
        FORMATS.find(self.format)
        if self.axis not in ("token", "channel") or self.group < (self.axis == "channel"):
            raise ValueError(f"an axis is token, tokenN or channelN with N tokens, got {self.axis}{self.group}")
        if self.hadamard & (self.hadamard - 1):
            raise ValueError(f"the size of a Hadamard matrix is a power of two, got hadamard{self.hadamard}")
        if FORMATS[self.format].tokens and self.axis == "token" and self.group:
            raise ValueError(f"{self.format} shares scales among all features of a token, got token{self.group}")
        given = (self.axis, self.group, self.pre, self.hadamard, self.rope)
        if self.format == "none" and given != ("token", 0, False, 0, None):
            raise ValueError("none is full precision: it takes no axis, group or switch, and no rope= beside it")
        if self.rope and (self.rope.pre or self.rope.block not in (1, self.block)):
            raise ValueError(
                f"rope is quantized in blocks of tokens as other features of keys are ({self.block}), and pre is "
                f"written in k=, got rope={self.rope}"
            )

    @property
    def block(self) -> int:
        """Number of tokens that are quantized together."""
        return self.group if self.axis == "channel" else FORMATS[self.format].tokens or 1

    @property
    def features(self) -> int:
        """Number of features of a token that share a scale; 0 for the whole head."""
        return self.group or FORMATS[self.format].group

    def __str__(self) -> str:
        words = [self.format]
        if self.group:
            words.append(f"{self.axis}{self.group}")
        if self.pre:
            words.append("pre")
        if self.hadamard > 1:
            words.append(f"hadamard{self.hadamard}")
        elif self.hadamard:
            words.append("hadamard")
        return ".".join(words)

    @property
    def parts(self) -> tuple[Side, ...]:
        """The side itself and that of rotary features, if they have one."""
        return (self,) if self.rope is None else (self, self.rope)


@dataclass(frozen=True)
class Scheme:
    """A scheme, which says how a cache is quantized.

    Attributes:
        key: how keys are quantized.
        value: how values are quantized.
        residual: number of latest tokens in full precision [tokens]; with ``flush`` only their values are, and without
            it values are collected as keys are.
        flush: number of keys that are collected in full precision and then quantized together, as KIVI does [tokens].
            With 0 a block is quantized as soon as it leaves the residual window. With ``flush`` a query reads the cache
            before its own token rounds anything: the keys quantized so far are those of whole steps before it, and the
            ``residual`` values before its own are in full precision.
        sinks: number of first tokens in full precision [tokens].
        skip: indices of the layers in full precision; -1 is the last layer.
        scales: what keys and values of layers are divided by before they are rounded to fp8, and multiplied by when
            they are read; 1 for layers that are not named.

    Raises:
        ValueError: a number is negative, values have a switch that is for keys, or scales are for another format.

    Example:
        >>> str(Scheme.parse("kivi-2"))
        'k=int2-half.channel32;v=int2-half.token32;residual=128;flush=128'
        >>> Scheme.parse("k=int4.token;v=none").key.format
        'int4'
    """

    key: Side = Side()
    value: Side = Side()
    residual: int = 0
    sinks: int = 0
    skip: tuple[int, ...] = ()
    flush: int = 0
    scales: Scales = ()

    def __post_init__(self) -> None:
        if min(self.residual, self.flush, self.sinks) < 0:
            raise ValueError(f"residual, flush and sinks must be >= 0, got {self}")
        object.__setattr__(self, "skip", tuple(sorted(set(self.skip))))
        if self.value.pre:
            raise ValueError("pre is for keys: values do not rotate")
        if self.scales and not replace(self, scales=()).takes_scales:
            raise ValueError(f"scales are for keys and values in fp8, got k={self.key};v={self.value}")

    def __str__(self) -> str:
        parts = [f"k={self.key}", f"v={self.value}"]
        if self.key.rope:
            parts.append(f"rope={FULL if self.key.rope == Side() else self.key.rope}")
        parts += [f"{name}={getattr(self, name)}" for name in ("residual", "flush", "sinks") if getattr(self, name)]
        if self.skip:
            parts.append(f"skip={'+'.join(map(str, self.skip))}")
        if self.scales:
            parts.append(f"scales={'+'.join(f'{layer}:{key:.9g}:{value:.9g}' for layer, key, value in self.scales)}")
        if parts == ["k=none", "v=none"]:
            return "none"
        return ";".join(parts)

    @property
    def takes_scales(self) -> bool:
        """Whether keys and values are rounded to fp8 at scale 1, which a layer may have others for."""
        return {self.key.format, self.value.format} == {"fp8"} and not self.scales

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
                key = _side(first, [*PRESETS, *FORMATS])
                scheme = cls(key, replace(key, pre=False))
            for part in parts:
                scheme = _with_part(scheme, part)
        except ValueError as error:
            raise ValueError(f"{text}: {error}") from None
        return scheme


@dataclass(frozen=True)
class Preset:
    """A scheme that is known by a name.

    Attributes:
        text: the scheme written out.
        source: the program or publication that it comes from, and where it differs from that.
        compared: the code or definition with which a test compares its rounding, bit for bit.
    """

    text: str
    source: str
    compared: str


_GGML = "gguf.quants, the quantizers of ggml in Python"
_VLLM = "vLLM 0.33's Triton kernels, interpreted"
_PER_HEAD = "vLLM 0.32's Triton kernels, interpreted"
_E4M3 = "torch.float8_e4m3fn, and the definition of e4m3"

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "llama.cpp:q8_0": Preset(
            "k=q8_0.hadamard;v=q8_0.hadamard64",
            "llama.cpp's --cache-type-k and --cache-type-v q8_0: blocks of 32, rotated by Hadamard matrices where "
            "heads are a multiple of 64 (q8_0 alone: LLAMA_ATTN_ROT_DISABLE=1). llama.cpp rounds queries to 8 bits too",
            _GGML,
        ),
        "llama.cpp:q5_0": Preset("k=q5_0.hadamard;v=q5_0.hadamard64", "as llama.cpp:q8_0, 5 bits", _GGML),
        "llama.cpp:q4_0": Preset("k=q4_0.hadamard;v=q4_0.hadamard64", "as llama.cpp:q8_0, 4 bits", _GGML),
        "llama.cpp:q8_0/q4_0": Preset(
            "k=q8_0.hadamard;v=q4_0.hadamard64", "llama.cpp's --cache-type-k q8_0 --cache-type-v q4_0", _GGML
        ),
        "vllm:fp8": Preset(
            "k=fp8;v=fp8",
            "vLLM's --kv-cache-dtype fp8: e4m3 with a scale of 1, as long as no scales were calibrated",
            _E4M3,
        ),
        "vllm:fp8_per_token_head": Preset(
            "k=fp8-scaled;v=fp8-scaled",
            "vLLM's --kv-cache-dtype fp8_per_token_head: e4m3 with a float32 scale for each token and head, which its "
            "Triton kernels for GPUs alone run",
            f"{_PER_HEAD}, before the cast; the cast: {_E4M3}",
        ),
        "vllm:int8_per_token_head": Preset(
            "k=int8-scaled;v=int8-scaled",
            "as vllm:fp8_per_token_head, --kv-cache-dtype int8_per_token_head: integers without a zero point",
            _PER_HEAD,
        ),
        "vllm:int4_per_token_head": Preset(
            "k=int4-rht;v=int4-rht",
            "as vllm:fp8_per_token_head, --kv-cache-dtype int4_per_token_head: integers with a zero point, heads "
            "rotated by a Hadamard matrix with random signs (in bfloat16 on a GPU, in float32 here)",
            _PER_HEAD,
        ),
        "vllm:turboquant-4": Preset(
            "k=turboquant4.hadamard;v=uniform4;skip=-2+-1+0+1",
            "vLLM's --kv-cache-dtype turboquant_4bit_nc (Zandieh et al., arXiv:2504.19874, without QJL): rotated keys "
            "as Lloyd-Max levels, values as integers, two layers at each end in full precision. vLLM reads a prompt "
            "before it rounds it",
            _VLLM,
        ),
        "vllm:turboquant-3": Preset(
            "k=turboquant3.hadamard;v=uniform3;skip=-2+-1+0+1", "as vllm:turboquant-4, 3 bits", _VLLM
        ),
        "vllm:turboquant_k8v4": Preset(
            "k=fp8;v=uniform4;skip=-2+-1+0+1",
            "vLLM's --kv-cache-dtype turboquant_k8v4: keys in fp8 with a scale of 1, not rotated, values and layers as "
            "vllm:turboquant-4",
            f"values: {_VLLM}; keys: {_E4M3}",
        ),
        "vllm:turboquant_k3v4_nc": Preset(
            "k=turboquant3.hadamard;v=uniform4;skip=-2+-1+0+1",
            "vLLM's --kv-cache-dtype turboquant_k3v4_nc: keys as vllm:turboquant-3, values as vllm:turboquant-4",
            _VLLM,
        ),
        "vllm:nvfp4": Preset(
            "k=nvfp4;v=nvfp4",
            "vLLM's and SGLang's --kv-cache-dtype nvfp4: e2m1 in blocks of 16 with an e4m3 scale, and the scale of a "
            "layer 1, as long as none was calibrated. Blackwell GPUs alone run it",
            "vLLM 0.32's ref_nvfp4_quant_dequant",
        ),
        "sglang:fp4_mx_block16": Preset(
            "k=fp4-mx16;v=fp4-mx16",
            "SGLang's --kv-cache-dtype fp4_mx_block16: e2m1 in blocks of 16 with a power of two as scale",
            "SGLang 0.5.23's FP4MXBlock16KVQuantizeUtil",
        ),
        "kvarn-k4v2": Preset(
            "k=kvarn4.channel128.hadamard;v=kvarn2.hadamard;flush=128;sinks=128",
            "Müller et al., KVarN, arXiv:2606.03458, as kvarn_k4v2_g128 of vLLM's pull request 46812: rotated tiles of "
            "128 tokens, normalized along both axes; keys per channel in 4 bits, values per token in 2. The first 128 "
            "tokens and those of an unfinished tile are in full precision. There sliding layers are, too: skip= names "
            "them",
            "the pull request's PyTorch functions",
        ),
        "transformers:quanto-4": Preset(
            "k=int4.token64;v=int4.token64;flush=128",
            "transformers' QuantizedCache with backend quanto, groups of 64 and residual_length 128, which collects "
            "128 tokens. It computes in the model's data type, rounds a prompt at once, and all again with each step",
            "optimum-quanto 0.2.7, in float32",
        ),
        "kivi-4": Preset(
            "k=int4-half.channel32;v=int4-half.token32;residual=128;flush=128",
            "Liu et al., KIVI, arXiv:2402.02750, and their code: keys per channel, values per token, groups of 32. "
            "Keys are quantized 128 at a time: 0 to 127 are in full precision, and the latest 128 values are",
            "KIVI's quant/new_pack.py",
        ),
        "kivi-2": Preset(
            "k=int2-half.channel32;v=int2-half.token32;residual=128;flush=128",
            "as kivi-4, 2 bits",
            "KIVI's quant/new_pack.py",
        ),
        "int8-token": Preset(
            "k=int8;v=int8",
            "the baseline of papers, which no program runs: a scale and a zero point per token and head",
            "plain Python",
        ),
        "int4-token": Preset("k=int4;v=int4", "as int8-token, 4 bits", "plain Python"),
    }
)

_COUNTS = ("residual", "flush", "sinks")


def _with_part(scheme: Scheme, text: str) -> Scheme:
    """Return a scheme with what a part such as ``sinks=4`` states."""
    name, _, value = text.partition("=")
    if name == "k":
        return replace(scheme, key=_side(value, FORMATS))
    if name == "v":
        return replace(scheme, value=_side(value, FORMATS))
    if name == "rope":
        side = Side() if value == FULL else _side(value, [FULL, *FORMATS])
        return replace(scheme, key=replace(scheme.key, rope=side))
    if name == "skip":
        if not re.fullmatch(r"-?[0-9]+(\+-?[0-9]+)*", value):
            raise ValueError(f"skip must be a whole number, or several such as 0+-1, got {value!r}")
        return replace(scheme, skip=tuple(map(int, value.split("+"))))
    if name == "scales":
        try:
            layers = [part.split(":") for part in value.split("+")]
            scales = tuple((int(layer), float(of_keys), float(of_values)) for layer, of_keys, of_values in layers)
        except ValueError:
            raise ValueError(f"scales must be LAYER:KEYS:VALUES+…, such as 0:0.5:0.1, got {value!r}") from None
        return replace(scheme, scales=scales)
    if name not in _COUNTS:
        raise ValueError(f"unknown part {text!r}. Known: k=, v=, {'=, '.join(_COUNTS)}=, skip=, rope=, scales=")
    if not re.fullmatch(r"[0-9]+", value):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    count: dict[str, Any] = {name: int(value)}
    return replace(scheme, **count)


def _side(text: str, known: Collection[str]) -> Side:
    """Return the side that a text such as ``int4.token32.pre`` states; ``known`` names are suggested in an error."""
    name, *words = text.split(".")
    if name not in FORMATS:
        raise ValueError(f"unknown cache format {text!r}.{did_you_mean(text, known)} Known: {', '.join(known)}")
    options: dict[str, Any] = {}
    for word in words:
        sized = re.fullmatch(r"(token|channel|hadamard)([0-9]*)", word)
        if sized and sized[1] == "hadamard":
            options["hadamard"] = int(sized[2] or 1)
        elif sized:
            options |= {"axis": sized[1], "group": int(sized[2] or 0)}
        elif word == "pre":
            options["pre"] = True
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
    form = FORMATS[side.format]
    share = float(head_dim)
    if side.axis == "channel":
        share = side.group
    elif side.features:
        share = head_dim / -(-head_dim // side.features)  # the last group may be short
    bits = form.bits + form.scales * SCALE_BITS / share
    if form.tokens:  # a scale along the other axis, too
        bits += SCALE_BITS / (head_dim if side.axis == "channel" else side.block)
    return bits
