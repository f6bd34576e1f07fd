"""Schemes as text, and their rounding against the code of the programs that run them and against plain Python."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from lm_eval._cli import HarnessCLI
from lm_eval.utils import simple_parse_args_string
from support.rounding import ORDERED, naive

from rope_patch.kv_cache.blocks import fake_quantize, mix
from rope_patch.kv_cache.formats import FORMATS
from rope_patch.kv_cache.schemes import PRESETS, Scheme, Side, effective_bits

FORMS = [
    "none",
    "k=int2.channel32;v=int2.token32;residual=128",
    "k=int2.channel32.pre;v=int2.token32;residual=128;sinks=4;skip=0+27",
    "k=int4;v=none",
    "k=int8.pre.hadamard;v=int8.token16.hadamard",
    "k=q4_0.token32.pre;v=q4_0",
    "k=fp8;v=fp8-scaled.token128",
    "k=int3.channel8.pre;v=none;skip=3",
    "k=none;v=none;sinks=1",
    "k=int2.channel32;v=int2.token32;residual=128;flush=128;sinks=2",
    "k=q4_0.hadamard;v=q8_0.hadamard64;skip=-2+0",
    "k=kvarn4.channel128.hadamard;v=kvarn2;flush=128;sinks=128",
    "k=int4;v=int4;rope=full",
    "k=fp8;v=fp8;scales=0:0.25:0.123456789+3:1:1e-05",
    "k=int2.channel32.pre;v=int2;rope=int8.channel32.hadamard16;residual=32",
]


def block(shape=(2, 3, 5, 10), seed=0, dtype=torch.float64):
    """Random states (rows, heads, tokens, features) whose features and tokens differ in size and middle."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = x * torch.rand(shape[-1], generator=generator, dtype=torch.float64).exp() ** 3
    return (x + 2 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)).to(dtype)


def side(text):
    return Scheme.parse(f"k={text}").key


# --- schemes as text


@pytest.mark.parametrize("text", FORMS)
def test_forms_round_trip(text):
    scheme = Scheme.parse(text)
    assert str(scheme) == text
    assert Scheme.parse(str(scheme)) == scheme and hash(scheme) == hash(Scheme.parse(text))


def test_presets_by_hand():
    kivi = Scheme.parse("kivi-2")
    assert kivi == Scheme(Side("int2-half", "channel", 32), Side("int2-half", "token", 32), residual=128, flush=128)
    assert Scheme.parse("llama.cpp:q4_0") == Scheme(Side("q4_0", hadamard=1), Side("q4_0", hadamard=64))
    assert Scheme.parse("vllm:turboquant-3").skip == (-2, -1, 0, 1)
    assert Scheme.parse("int4-token") == Scheme(Side("int4"), Side("int4"))
    assert Scheme.parse("llama.cpp:q8_0/q4_0") == Scheme(Side("q8_0", hadamard=1), Side("q4_0", hadamard=64))
    assert Scheme.parse("vllm:turboquant_k8v4").key == Side("fp8")
    assert Scheme.parse("vllm:int4_per_token_head") == Scheme(Side("int4-rht"), Side("int4-rht"))
    kvarn = Scheme.parse("kvarn-k4v2")
    assert (kvarn.key.block, kvarn.value.block, kvarn.flush, kvarn.sinks) == (128, 128, 128, 128)


def test_rotary_features_may_have_a_side_of_their_own():
    assert Scheme.parse("kivi-2;rope=full").key == Side("int2-half", "channel", 32, rope=Side())
    scheme = Scheme.parse("k=int4;v=int2;rope=fp8")
    assert scheme.key == Side("int4", rope=Side("fp8")) and scheme.value == Side("int2")


def test_one_side_for_both_leaves_the_rotation_to_keys():
    scheme = Scheme.parse("int4.token8.pre.hadamard;sinks=2")
    assert scheme.key == Side("int4", "token", 8, pre=True, hadamard=1)
    assert scheme.value == Side("int4", "token", 8, hadamard=1) and scheme.sinks == 2
    assert Scheme.parse("int4.token") == Scheme.parse("int4") == Scheme(Side("int4"), Side("int4"))
    assert Scheme.parse("none") == Scheme()


@pytest.mark.parametrize("text", [*PRESETS, *FORMS])
def test_every_form_passes_through_both_parsers_of_lm_eval(text, monkeypatch):
    line = f"pretrained=x,kv_cache={text}"
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", "--model_args", line])
    assert HarnessCLI().parse_args().model_args["kv_cache"] == text
    assert simple_parse_args_string(line)["kv_cache"] == (None if text == "none" else text)  # a word of Python


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "Known: llama.cpp:q8_0"),
        ("kivi2", "Did you mean 'kivi-2'"),
        ("mxfp4", "Did you mean 'nvfp4'"),  # of version 0.3
        ("kivi-2.pre", "unknown cache format 'kivi-2.pre'"),
        ("k=int4.channel", "channelN with N tokens, got channel0"),
        ("k=none.token8", "full precision"),
        ("k=int4.hadamard48", "power of two, got hadamard48"),
        ("k=int4;v=int4.pre", "pre is for keys"),
        ("kivi-2;sinks=-1", "sinks must be a whole number, got '-1'"),
        ("kivi-2;sink=1", "unknown part 'sink=1'. Known: k=, v="),
        ("k=int4.token;v=int4.tok", "unknown word 'tok' in 'int4.tok'"),
        ("vllm:fp8;scales=0:1", "LAYER:KEYS:VALUES"),
        ("kivi-2;scales=0:1:1", "scales are for keys and values in fp8"),
        ("k=int4;v=int4;rope=int4.channel8", "blocks of tokens as other features"),
        ("k=int4;v=int4;rope=int4.pre", "pre is written in k="),
        ("k=none;v=int4;rope=full", "no rope"),
        ("k=kvarn2.token16", "among all features of a token"),
    ],
)
def test_errors_name_the_scheme_and_what_is_wrong(text, word):
    with pytest.raises(ValueError, match=word) as caught:
        Scheme.parse(text)
    assert str(caught.value).startswith(f"{text}: ")


@pytest.mark.parametrize(
    ("made", "options", "word"),
    [
        (Scheme, {"residual": -1}, "residual"),
        (Side, {"format": "int4", "axis": "row"}, "row"),
        (Side, {"format": "int4", "group": -1}, "token-1"),
    ],
)
def test_schemes_made_in_python_are_checked(made, options, word):
    with pytest.raises(ValueError, match=word):
        made(**options)


@pytest.mark.parametrize(
    ("text", "head_dim", "bits"),
    [
        ("int2.channel32", 128, 2 + 32 / 32),  # scale and zero point of 16 bits each, 32 tokens
        ("int8.token64", 80, 8 + 32 / 40),  # two groups of 80 features, of 64 and 16
        ("fp8", 64, 8.0),  # no scale
        ("fp8-scaled", 64, 8 + 32 / 64),  # a scale of 32 bits
        ("q5_0", 128, 5 + 16 / 32),
        ("turboquant4.hadamard", 128, 4 + 16 / 128),  # the norm
        ("int4-rht", 128, 4 + 32 / 128),  # the zero point is in the scale
        ("nvfp4", 64, 4 + 8 / 16),  # scales of 8 bits
        ("kvarn4.channel128.hadamard", 64, 4 + 32 / 128 + 16 / 64),  # and a scale for each token
        ("kvarn2", 64, 2 + 32 / 64 + 16 / 128),  # and a scale for each feature of 128 tokens
    ],
)
def test_effective_bits_by_hand(text, head_dim, bits):
    assert effective_bits(side(text), head_dim) == pytest.approx(bits)


# --- rounding against what is known to be right


ROUNDED = [
    *(f"{form}.{axis}" for form in ("int8", "int4", "int3", "int2", "fp8-scaled") for axis in ("token", "channel5")),
    "int4.token4",
    "int4.token16",
    "int4.token1",
    "fp8-scaled.token4",
    "fp8",
    "fp8.channel5",
]


@pytest.mark.parametrize("text", ROUNDED)
def test_rounding_equals_plain_python(text):
    x = block((2, 5, 3, 10)).transpose(1, 2)  # in another order of memory
    original = x.clone()
    got = fake_quantize(x, side(text))
    assert torch.equal(x, original), "what is read is not written to"
    assert got.shape == x.shape and got.dtype == x.dtype
    for row, raw in zip(got, x, strict=True):
        error = 1e-6 if "-scaled" in text else 1e-12  # those of vLLM are computed in float32
        torch.testing.assert_close(row, naive(raw, side(text)), rtol=error, atol=error)
    assert text == "int4.token1" or float((got - x).abs().max()) > 1e-3


def test_fp8_with_a_scale_of_one_is_a_cast_that_saturates():
    x = torch.linspace(-440, 440, 4001).view(1, 1, 1, -1)
    assert torch.equal(fake_quantize(x, side("fp8")), x.to(torch.float8_e4m3fn).float())
    huge = torch.tensor([[[[1e6, -460.0, 1e-9, 0.0]]]])
    assert fake_quantize(huge, side("fp8")).tolist() == [[[[448.0, -448.0, 0.0, 0.0]]]]
    assert ORDERED[-1] == 448 and len(ORDERED) == 253  # 256 codes: two of NaN, two of zero


@pytest.mark.parametrize("text", ROUNDED)
@pytest.mark.parametrize("value", [0.0, -3.7, 1e-30, 12345.678])
def test_zeros_and_with_a_zero_point_any_constant_group_are_exact(text, value):
    if value == 0 or text.startswith("int"):
        x = torch.full((1, 2, 5, 10), value)
        assert torch.equal(fake_quantize(x, side(text)), x)


@pytest.mark.parametrize("text", ["int4.token4", "fp8-scaled.channel5", "int2.hadamard", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(text, dtype):
    x = block(dtype=dtype)
    assert torch.equal(fake_quantize(x, side(text)), fake_quantize(x.float(), side(text)).to(dtype))


@pytest.mark.parametrize("text", ["int2.channel5", "int4.token4", "q4_0.token", "fp8"])
@pytest.mark.parametrize("shape", [(0, 2, 5, 10), (1, 2, 0, 10), (1, 2, 1, 10)])
def test_empty_and_small_blocks(text, shape):
    x = block(shape)
    got = fake_quantize(x, side(text))
    assert got.shape == x.shape
    if text == "int2.channel5" and shape[2] == 1:
        assert torch.equal(got, x), "a scale and a zero point of its own"


# --- rounding against the programs that run it

GOLDEN = json.loads((Path(__file__).parent / "golden_formats.json").read_text())
"""What the programs' own code returned for 128 states, in hexadecimal: KIVI's ``quant/new_pack.py`` (876b4d2), the
Triton kernels of TurboQuant in vLLM 0.33, which Triton 3.6 interpreted, optimum-quanto 0.2.7,
``ref_nvfp4_quant_dequant`` of vLLM 0.32, its kernels of a scale per token and head as
``tests/engines/test_token_head_formats.py`` runs them, ``FP4MXBlock16KVQuantizeUtil`` of SGLang 0.5.23, and the PyTorch
functions of KVarN in vLLM's pull request 46812 (231f52a and eb70063, 8 iterations). Of the keys of TurboQuant it is
what vLLM multiplies rotated queries by."""


@pytest.mark.parametrize("text", GOLDEN["rounded"])
def test_rounding_is_that_of_the_programs_own_code(text):
    golden = GOLDEN["rounded"][text]
    expected = torch.frombuffer(bytearray.fromhex(golden["numbers"]), dtype=getattr(torch, golden["dtype"]))
    states = torch.frombuffer(bytearray.fromhex(GOLDEN["states"]), dtype=torch.float16).view(golden["shape"])
    if text.startswith(("turboquant", "uniform")):
        third = states.float() / 3  # no float16: the scales must be rounded to one
        got = FORMATS[text].round(mix(third) if text.startswith("turboquant") else third, -1).half()
    else:
        got = fake_quantize(states.to(expected.dtype), side(text))  # quanto was given float32
    assert torch.equal(got, expected.view(golden["shape"]))


def test_heads_that_are_no_power_of_two_are_rotated_in_blocks_that_share_a_scale():
    x = block((2, 2, 5, 32), dtype=torch.float32)
    assert torch.equal(
        fake_quantize(x.repeat(1, 1, 1, 3), side("int4-rht")), fake_quantize(x, side("int4-rht")).repeat(1, 1, 1, 3)
    )


FOUR_BITS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("name", ["nvfp4", "fp4-mx16"])
@pytest.mark.parametrize("scale", [1.0, 0.25, 8.0])
def test_four_bit_floats_are_the_nearest_and_ties_go_where_the_program_sends_them(name, scale):
    ties = [(low + high) / 2 for low, high in itertools.pairwise(FOUR_BITS)]
    # Of two neighbours that with an even mantissa, 0, 1, 2 or 4; in SGLang the larger.
    expected = FOUR_BITS[1:] if name == "fp4-mx16" else [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    for values, rounded in ((FOUR_BITS, FOUR_BITS), ([*ties, 6.0], [*expected, 6.0]), ([0.3, 2.4, 5.1], [0.5, 2, 6])):
        x = torch.tensor([[[[*values, 6.0], [-value for value in (*values, 6.0)]]]]) * scale
        positive = torch.tensor([*rounded, 6.0]) * scale
        assert torch.equal(fake_quantize(x, side(name))[0, 0], torch.stack([positive, -positive]))


def test_scales_of_nvfp4_hold_zeros_and_end_at_the_largest_float8():
    x = torch.full((1, 1, 1, 16), 7.0)
    assert torch.equal(fake_quantize(0 * x, side("nvfp4")), 0 * x)
    assert float(fake_quantize(1e4 * x, side("nvfp4")).max()) == 6 * 448  # the largest that a scale of 1 can hold


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q4_0"])
def test_blocks_of_32_are_those_of_gguf(name):
    x = block((2, 3, 5, 96), dtype=torch.float32)
    x[0, 0, 0] = 0
    x[0, 0, 1, :32] = torch.arange(-16, 16) + 0.5  # ties of rounding, and of the largest number
    kind = GGMLQuantizationType[name.upper()]
    expected = quants.dequantize(quants.quantize(np.ascontiguousarray(x), kind), kind)
    assert torch.equal(fake_quantize(x, side(name)), torch.from_numpy(expected))


def test_llama_cpp_rotates_heads_whose_size_is_a_multiple_of_64():
    for width, parts in ((128, 64), (96, None), (32, None)):
        x = block((1, 2, 3, width), dtype=torch.float32)
        expected = fake_quantize(x, side("q4_0"))
        if parts:
            expected = mix(fake_quantize(mix(x, parts), side("q4_0")), parts)
        assert torch.equal(fake_quantize(x, side("q4_0.hadamard64")), expected)
        # Keys are rotated as a whole.
        assert torch.equal(fake_quantize(x, side("q4_0.hadamard")), expected) == (width < 128)


# --- the Hadamard matrix


@pytest.mark.parametrize("width", [7, 12, 80, 96])
def test_the_mix_is_its_own_inverse_in_parts_of_a_power_of_two(width):
    matrix = mix(torch.eye(width, dtype=torch.float64))
    torch.testing.assert_close(matrix @ matrix, torch.eye(width, dtype=torch.float64))
    assert ((matrix != 0).sum(1) == width & -width).all()  # the largest power of two that divides it
    x = block((2, 3, 5, width))
    y = block((2, 3, 5, width), seed=1)
    torch.testing.assert_close((mix(x) * mix(y)).sum(-1), (x * y).sum(-1))
