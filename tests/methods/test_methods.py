"""The methods: what each does to a table, by hand and against transformers, and how each is written and read back."""

import dataclasses
import inspect
import json
import math
import re
import typing
from dataclasses import dataclass

import pytest
import torch
from lm_eval.utils import simple_parse_args_string
from transformers import LlamaConfig, PhiConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

from rope_patch.methods import METHODS, Chain, Method, Scaling, as_method, create, field_help, from_dict, parse
from rope_patch.methods.abf import ABF
from rope_patch.methods.already_scaled import context_reached
from rope_patch.methods.default import Default
from rope_patch.methods.llama3 import Llama3
from rope_patch.methods.longrope import LongRope
from rope_patch.methods.mrrope import MrRope
from rope_patch.methods.nope import NoPE
from rope_patch.methods.ntk import NTK
from rope_patch.methods.p_rope import PRope
from rope_patch.methods.p_rope_reversed import PRopeReversed
from rope_patch.methods.partial import Partial
from rope_patch.methods.pi import PI
from rope_patch.methods.table import Table
from rope_patch.methods.truncated import Truncated
from rope_patch.methods.yarn import Yarn
from rope_patch.tables import RotaryTable

ALL = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)

# Every method with parameter values, as method strings.
FORMS = {
    "default": ("default",),
    "p_rope": ("p_rope:p=0.5", "p_rope:p=0.25"),
    "nope": ("nope",),
    "p_rope_reversed": ("p_rope_reversed:p=0.5", "p_rope_reversed:p=0.25"),
    "partial": ("partial:p=0.5", "partial:p=0.25"),
    "truncated": ("truncated:context=100", "truncated:cutoff_low=0.005:cutoff_high=0.05:floor=0.02"),
    "abf": ("abf:rope_theta=500000", "abf:factor=8"),
    "ntk": ("ntk:factor=8", "ntk:factor=2.5"),
    "pi": ("pi:factor=8", "pi:factor=2.5"),
    "yarn": ("yarn:factor=8", "yarn:factor=8:beta_fast=16:attention_factor=1.5:truncate=false"),
    "mrrope": ("mrrope:factor=8", "mrrope:factor=27:beta_fast=300:attention_factor=1.5"),
    "llama3": ("llama3:factor=8", "llama3:factor=4:low_freq_factor=2:original_max_position_embeddings=512"),
    "longrope": ("longrope:factors=1/2/4/8", "longrope:factors=1/1.5/2/3:attention_factor=1.5"),
    "table": ("table:values=1/0.5/0.25/0", "table:values=0.3/0.2/0.1/1e-07:attention_scaling=1.25"),
}
SCALING = [name for name, cls in METHODS.items() if issubclass(cls, Scaling)]  # a factor, or a target to take it from
EVERY_FORM = [form for forms in FORMS.values() for form in forms]


def slot(
    rope_type="default",
    *,
    head_dim=8,
    rope_theta=1e4,
    context=4096,
    **parameters,
):
    """A table as transformers builds it. By default 1, 0.1, 0.01, 0.001 rad/token, trained on 4096 tokens."""
    encoded = {"rope_type": rope_type, "rope_theta": rope_theta, **parameters}
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=head_dim, max_position_embeddings=context, rope_parameters=encoded)
    )
    return RotaryTable(
        inv_freq=rotary.inv_freq.clone(),
        attention_scaling=rotary.attention_scaling,
        rope_theta=rope_theta,
        rope_type=rope_type,
        max_position_embeddings=context,
        original_max_position_embeddings=parameters.get("original_max_position_embeddings"),
        path="model.rotary_emb",
        rope_parameters=encoded,
    )


def llama3_slot(head_dim=32):
    smoothing = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return slot("llama3", head_dim=head_dim, original_max_position_embeddings=512, **smoothing)


def yarn_slot(head_dim=32):
    return slot("yarn", head_dim=head_dim, factor=4.0, original_max_position_embeddings=1024)


def linear_slot(head_dim=32):
    return slot("linear", head_dim=head_dim, factor=2.0)


SCALED = pytest.mark.parametrize("make_slot", [llama3_slot, yarn_slot, linear_slot])


def check_table(after, by_hand, scaling=1.0):
    """Compare with numbers worked out by hand; zeros are exact."""
    torch.testing.assert_close(after.inv_freq, torch.tensor(by_hand, dtype=torch.float32), rtol=1e-5, atol=0)
    assert after.attention_scaling == pytest.approx(scaling, rel=1e-6)


def same(a, b):
    return torch.equal(a.inv_freq, b.inv_freq) and a.attention_scaling == b.attention_scaling


# --- every method ----------------------------------------------------------------------------------------------------


@ALL
def test_a_method_needs_no_parameters(method):
    assert METHODS[method.name] is method
    assert type(parse(method.name)) is method
    assert parse(method.name) == create(method.name) == from_dict({"method": method.name}) == method()


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_form_reads_back_in_every_notation(form):
    method = parse(form)
    assert str(method) == form
    assert as_method(form) == as_method(method) == as_method(method.to_dict()) == as_method([method]) == method
    assert hash(parse(form)) == hash(method)
    assert eval(repr(method), {type(method).__name__: type(method)}) == method


@pytest.mark.parametrize("form", EVERY_FORM + [name for name in METHODS if name not in SCALING])
def test_a_method_leaves_a_float32_table_of_the_same_length_and_the_argument_alone(form):
    base_slot = slot()
    before = base_slot.inv_freq.clone()
    after = parse(form)(base_slot)
    assert after.inv_freq.shape == (4,)
    assert after.inv_freq.dtype == torch.float32
    assert (after.inv_freq >= 0).all()
    assert torch.equal(base_slot.inv_freq, before)
    assert (after.path, after.layer_type, after.max_position_embeddings) == ("model.rotary_emb", None, 4096)


# What transformers has an encoding for. The others have no rope type of their own.
NATIVE = {
    "default": "default",
    "nope": "proportional",
    "p_rope": "proportional",
    "abf": "default",
    "pi": "linear",
    "ntk": "default",
    "yarn": "yarn",
    "llama3": "llama3",
    "longrope": "longrope",
}


@pytest.mark.parametrize("form", EVERY_FORM)
def test_the_native_encoding_is_what_transformers_builds_the_same_table_from(form):
    method = parse(form)
    after = method(slot())
    encoded = after.rope_parameters
    assert (encoded or {}).get("rope_type") == NATIVE.get(method.name)
    if encoded is None:
        assert after.rope_type == "custom"
        return
    stock = slot(**json.loads(json.dumps(encoded)))
    assert same(stock, after)
    assert (after.rope_type, after.rope_theta) == (encoded["rope_type"], encoded["rope_theta"])


def test_keys_of_the_models_own_are_kept_in_an_encoding():
    base_slot = dataclasses.replace(slot(), other_keys={"partial_rotary_factor": 0.4, "mrope_section": [1, 2, 1]})
    assert PI(factor=2.0)(base_slot).rope_parameters == {
        "partial_rotary_factor": 0.4,
        "mrope_section": [1, 2, 1],
        "rope_type": "linear",
        "rope_theta": 1e4,
        "factor": 2.0,
    }
    assert PRope(p=0.5)(base_slot).rope_parameters is None, "its factor would be read as the model's shape"


# --- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_slot", [slot, llama3_slot, yarn_slot, linear_slot])
@pytest.mark.parametrize("form", ["default", "p_rope:p=1", "p_rope_reversed:p=1", "table", "truncated:context=1000000"])
def test_identities_return_the_very_slot(form, make_slot):
    base_slot = make_slot(head_dim=32)
    assert parse(form)(base_slot) is base_slot


@pytest.mark.parametrize(
    "form", ["partial:p=1", "abf:factor=1", "pi:factor=1", "ntk:factor=1", "mrrope:factor=1", "abf:rope_theta=10000"]
)
def test_identities_of_a_plain_table(form):
    base_slot = slot(head_dim=64)
    assert same(parse(form)(base_slot), base_slot)


# --- each method -----------------------------------------------------------------------------------------------------


def test_nope_zeroes_every_frequency():
    after = NoPE()(slot())
    check_table(after, [0, 0, 0, 0])
    assert NoPE()(after) is after
    assert same(PRope(p=0)(slot()), after)


def test_the_temperature_of_nope_multiplies_logits():
    # logits are multiplied by 1 + 0.5 ln 8 = 2.0397208, cos and sin by its root 1.4281879
    after = NoPE(factor=8, temperature=0.5)(slot())
    check_table(after, [0, 0, 0, 0], 1.4281879)
    assert (after.rope_type, after.rope_parameters) == ("custom", None)
    check_table(parse("yarn:factor=4+nope:factor=8:temperature=0.5")(slot()), [0, 0, 0, 0], 1.4281879 * 1.138629)
    for wrong in ({"factor": 8}, {"temperature": 0.5}):
        with pytest.raises(ValueError, match="together"):
            NoPE(**wrong)


def test_p_rope_by_hand():
    # int(0.75 * 8 // 2) = 3 and int(0.5 * 8 // 2) = 2 of the four pairs turn, the fastest
    check_table(PRope()(slot()), [1, 0.1, 0.01, 0])
    check_table(PRope(p=0.5)(slot()), [1, 0.1, 0, 0])
    check_table(PRope(p=0.49)(slot()), [1, 0, 0, 0])  # floor: 0.49 * 8 = 3.92, // 2 = 1


@pytest.mark.parametrize(
    ("p", "head_dim", "theta", "rotating"),
    [
        (0.7, 128, 1e4, 44),  # 0.7 * 128 = 89.6, // 2 = 44
        (0.25, 256, 1e4, 32),
        # In these shapes the beginning of the whole table differs from transformers' table in the last bit.
        (0.75, 128, 1e6, 48),
        (0.5, 96, 5e5, 24),
    ],
)
def test_p_rope_is_the_table_of_transformers_to_the_last_bit(p, head_dim, theta, rotating):
    config = LlamaConfig(
        head_dim=head_dim,
        rope_parameters={"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": p},
    )
    after = PRope(p=p)(slot(rope_theta=theta, head_dim=head_dim))
    assert torch.equal(after.inv_freq, ROPE_INIT_FUNCTIONS["proportional"](config)[0])
    assert int((after.inv_freq > 0).sum()) == rotating


def test_p_rope_of_a_scaled_table_keeps_the_scaling():
    base_slot = yarn_slot()
    after = PRope(p=0.5)(base_slot)
    assert torch.equal(after.inv_freq[:8], base_slot.inv_freq[:8])
    assert (after.inv_freq[8:] == 0).all()
    assert after.attention_scaling == base_slot.attention_scaling > 1
    assert (after.rope_type, after.rope_parameters) == ("custom", None)  # proportional has no scaling


def test_p_rope_reversed_by_hand():
    check_table(PRopeReversed()(slot()), [0, 0.1, 0.01, 0.001])
    check_table(PRopeReversed(p=0.49)(slot()), [0, 0, 0, 0.001])  # floor, as in p_rope
    check_table(PRopeReversed(p=0)(slot()), [0, 0, 0, 0])


def test_partial_by_hand():
    # p = 0.5: two pairs over 4 features, 10000 ** -0 and 10000 ** (-2/4) = 0.01
    check_table(Partial(p=0.5)(slot()), [1, 0.01, 0, 0])
    # p = 0.75: 10000 ** (-2i/6) = 1, 0.0464159, 0.00215443
    check_table(Partial()(slot()), [1, 0.0464159, 0.00215443, 0])
    check_table(Partial(p=0)(slot()), [0, 0, 0, 0])
    check_table(Partial(p=0.49)(slot()), [1, 0, 0, 0])  # floor, as in p_rope


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_partial_turns_as_phi_does(p):
    config = PhiConfig(
        hidden_size=64,
        num_attention_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": p},
    )
    phi, _ = PhiRotaryEmbedding.compute_default_rope_parameters(config)
    after = Partial(p=p)(slot(head_dim=64))
    assert len(phi) == 32 * p
    assert torch.equal(after.inv_freq[: len(phi)], phi)
    assert (after.inv_freq[len(phi) :] == 0).all()


def test_abf_by_hand():
    # base 1e8: 10 ** (-2i); ten thousand times the base found is the same
    check_table(ABF(rope_theta=1e8)(slot()), [1, 1e-2, 1e-4, 1e-6])
    check_table(ABF(factor=1e4)(slot()), [1, 1e-2, 1e-4, 1e-6])
    # Xiong et al.: beta = 50, 10k to 500k
    assert ABF(factor=50)(slot()).rope_theta == ABF()(slot()).rope_theta == 500000


def test_pi_by_hand():
    check_table(PI(factor=4)(slot()), [0.25, 0.025, 0.0025, 0.00025])


def test_pi_divides_a_scaled_table_as_found():
    base_slot = yarn_slot()
    after = PI(factor=2)(base_slot)
    assert torch.equal(after.inv_freq, base_slot.inv_freq / 2)
    assert after.attention_scaling == base_slot.attention_scaling
    assert (after.rope_type, after.rope_parameters) == ("custom", None)


def test_a_second_pi_raises_the_factor_of_the_first():
    plain = slot(head_dim=32)
    for after in (PI(factor=4)(linear_slot()), parse("pi:factor=2+pi:factor=4")(plain)):
        assert torch.equal(after.inv_freq, plain.inv_freq / 8)
        assert (after.rope_type, after.rope_parameters["factor"]) == ("linear", 8)


def test_pairs_slower_than_1e20th_become_unrotated():
    # 2e18 slows 1, 0.1, 0.01, 0.001 to 5e-19, 5e-20 and two below 1e-20
    check_table(PI(factor=2e18)(slot()), [5e-19, 5e-20, 0, 0])


def test_ntk_by_hand():
    # base 10000 * 8 ** (8/6) = 160000 = 20 ** 4: 20 ** -i; the slowest is slowed by 8
    check_table(NTK(factor=8)(slot()), [1, 0.05, 0.0025, 0.001 / 8])
    # 1000 ** (4/3) = 10000: base 1e8
    check_table(NTK(factor=1000)(slot()), [1, 1e-2, 1e-4, 1e-6])


def test_yarn_by_hand():
    # In 4096 tokens pair i turns 651.9 / 10**i times, so one that turns b times sits at log10(651.9 / b): 1.309 for
    # b = 32 and 2.814 for b = 1, outwards to 1 and 3: ramp 0 0 1/2 1. Pair 2: 0.01 * (1/2 + 1/2 / 4). 0.1 ln 4 + 1
    check_table(Yarn(factor=4)(slot()), [1, 0.1, 0.00625, 0.00025], 1.138629)
    check_table(Yarn(factor=1)(slot()), [1, 0.1, 0.01, 0.001], 1)  # no scaling at factor 1
    assert Yarn(factor=4, attention_factor=1.5, mscale=1, mscale_all_dim=0.5)(slot()).attention_scaling == 1.5
    # mscale: (0.1 ln 40 + 1) / (0.05 ln 40 + 1) = 1.368888 / 1.184444
    assert Yarn(factor=40, mscale=1, mscale_all_dim=0.5)(slot()).attention_scaling == pytest.approx(1.155722, rel=1e-6)


def test_yarn_ramps_over_the_context_before_scaling():
    # In 41 tokens pair i turns 6.525 / 10**i times. The ramp's ends, log10(6.525 / 32) = -0.69 and log10(6.525) = 0.81,
    # become 0 and 1, rounded outwards and clamped: all but pair 0 are divided by 4.
    after = Yarn(factor=4, original_max_position_embeddings=41)(slot())
    check_table(after, [1, 0.025, 0.0025, 0.00025], 1.138629)
    assert dict(after.rope_parameters or {})["original_max_position_embeddings"] == 41
    short = dataclasses.replace(slot(), original_max_position_embeddings=41)
    assert same(Yarn(factor=4)(short), after)


@pytest.mark.parametrize("method", [Yarn, MrRope])
def test_yarn_and_mrrope_need_a_base_above_one(method):
    with pytest.raises(ValueError, match="rope_theta"):
        method(factor=4)(slot(rope_theta=1.0))


def test_mrrope_by_hand():
    # In 4096 tokens pair i turns 651.9 / 10**i times. The ends, log10(651.9 / 32) = 1.31 and log10(651.9) = 2.81,
    # become 1 and 3: pair 2 is divided by 8 ** (1*2 / (2*3)) = 2, pair 3 by 8. 0.1 ln 8 + 1 = 1.2079442
    check_table(MrRope(factor=8)(slot()), [1, 0.1, 0.005, 0.000125], 1.2079442)
    # beta_fast 300: the ends 0 and 3, pairs 1 and 2 divided by 27 ** (2/12) = 1.7320508 and 27 ** (6/12) = 5.1961524
    wider = MrRope(factor=27, beta_fast=300, attention_factor=1.5)(slot())
    check_table(wider, [1, 0.057735027, 0.0019245009, 0.001 / 27], 1.5)


def test_mrrope_whose_ends_meet_divides_what_lies_behind():
    # In 41 tokens pair i turns 6.525 / 10**i times: both ends, clamped, are 0 for turns of 32 and 7.
    check_table(MrRope(factor=4, beta_slow=7)(slot(context=41)), [1, 0.025, 0.0025, 0.00025], 1.138629)


def test_llama3_by_hand():
    # L = 4096: wavelengths 6.28, 62.8, 628 < 1024 are kept, 6283 > 4096 is stretched by 8
    check_table(Llama3(factor=8)(slot()), [1, 0.1, 0.01, 0.000125])
    # L = 1024, pair 2: (1024/628.3 - 1) / (4 - 1) = 0.2099, and 0.01 * ((1 - 0.2099) / 8 + 0.2099)
    check_table(Llama3(factor=8, original_max_position_embeddings=1024)(slot()), [1, 0.1, 0.003086761, 0.000125])


def test_longrope_by_hand():
    check_table(LongRope(factors=(1, 2, 4, 1e39))(slot()), [1, 0.05, 0.0025, 0])
    check_table(LongRope(factors=(2, 2, 4, 1), attention_factor=1.5)(slot()), [0.5, 0.05, 0.0025, 0.001], 1.5)
    # sqrt(1 + ln 8 / ln 4096) = sqrt(1 + 3/12) = 1.118034
    check_table(LongRope(factor=8)(slot()), [1, 0.1, 0.01, 0.001], 1.118034)
    assert LongRope(factor=0.5)(slot()).attention_scaling == 1


def test_longrope_writes_one_list_and_one_length_so_that_nothing_switches():
    encoded = dict(LongRope(factors=(1, 2, 4, 8), attention_factor=1.5)(slot()).rope_parameters or {})
    assert encoded["short_factor"] == encoded["long_factor"] == [1, 2, 4, 8]
    assert encoded["original_max_position_embeddings"] == 4096
    assert encoded["short_mscale"] == encoded["long_mscale"] == encoded["attention_factor"] == 1.5  # mscale: for vLLM
    assert not {"short_mscale", "long_mscale"} & dict(LongRope()(slot()).rope_parameters or {}).keys()


def test_longrope_of_a_scaled_table_divides_it_as_found():
    base_slot = yarn_slot()
    after = LongRope(factors=[2.0] * 16, factor=8)(base_slot)
    assert torch.equal(after.inv_freq, base_slot.inv_freq / 2)
    # L = 1024 = 2 ** 10, before YaRN: sqrt(1 + 3/10) on top of 0.1 ln 4 + 1
    assert after.attention_scaling == pytest.approx(math.sqrt(1.3) * 1.138629, rel=1e-6)
    assert (after.rope_type, after.rope_parameters) == ("custom", None)
    assert LongRope(attention_factor=1.5)(base_slot).attention_scaling == 1.5


def test_truncated_at_a_context_by_hand():
    # 2 pi / 100 = 0.0628: 0.01 and 0.001 never complete a turn. 2 pi / 4096 = 0.00153: 0.001 does not.
    check_table(Truncated(context=100)(slot()), [1, 0.1, 0, 0])
    check_table(Truncated()(slot()), [1, 0.1, 0.01, 0])
    # the context before scaling, whatever length the scaled checkpoint states
    check_table(Truncated()(dataclasses.replace(slot(), original_max_position_embeddings=100)), [1, 0.1, 0, 0])


def test_truncated_at_cutoffs_by_hand():
    check_table(Truncated(cutoff_low=0.005, cutoff_high=0.05, floor=0.02)(slot()), [1, 0.1, 0.02, 0])
    check_table(Truncated(cutoff_low=0.005, cutoff_high=0.05)(slot()), [1, 0.1, 0, 0])
    # exactly at the cutoffs: f = high is kept, f = low is zeroed
    base_slot = Table(values=(1, 0.5, 0.25, 0.125))(slot())
    check_table(Truncated(cutoff_low=0.125, cutoff_high=0.5, floor=0.2)(base_slot), [1, 0.5, 0.2, 0])
    check_table(Truncated(cutoff_low=0.25, cutoff_high=0.25, floor=0.2)(base_slot), [1, 0.5, 0.25, 0])


def test_table_by_hand():
    check_table(Table(values=(1, 0.5, 1e-21, 0))(slot()), [1, 0.5, 0, 0])
    check_table(Table(attention_scaling=1.25)(slot()), [1, 0.1, 0.01, 0.001], 1.25)
    base_slot = yarn_slot(head_dim=8)
    check_table(Table(values=(1, 0.5, 0.25, 0))(base_slot), [1, 0.5, 0.25, 0], base_slot.attention_scaling)


# --- scaled checkpoints ----------------------------------------------------------------------------------------------


@SCALED
def test_a_pattern_of_pairs_is_not_recomputed_unasked(make_slot):
    """The error names what serves: a method that changes the table as it is, or a config without the scaling."""
    with pytest.raises(ValueError, match=r"p_rope .* config\.json"):
        create("partial")(make_slot())
    create("partial")(make_slot().plain())


@pytest.mark.parametrize("make_slot", [llama3_slot, yarn_slot])
@pytest.mark.parametrize("name", ["ntk", "yarn", "mrrope", "llama3"])
def test_a_factor_counts_from_the_stated_context(name, make_slot):
    """4096 tokens are stated, so twice that is 16 times 512 and 8 times 1024."""
    scaled = make_slot()
    method = parse(name).for_target(scaled, 8192)
    assert method.factor == 2 and method.reach(scaled) == 8192
    after = method(scaled)
    if scaled.rope_type == name:
        assert after.rope_parameters == {**scaled.rope_parameters, "factor": 2 * scaled.rope_parameters["factor"]}
    whole = create(name, factor=8192 / scaled.context)(slot(head_dim=32, context=scaled.context))
    assert same(after, whole)


def test_yarn_that_reaches_further_than_the_config_states_counts_from_what_it_reaches():
    """Factor 4 over 1024 under a stated 1500: 8192 is twice 4096."""
    scaled = dataclasses.replace(yarn_slot(), max_position_embeddings=1500)
    assert parse("yarn").for_target(scaled, 8192).factor == 2
    assert same(parse("mrrope:factor=2")(scaled), parse("mrrope:factor=8")(slot(head_dim=32, context=1024)))


def test_the_context_before_a_linear_scaling_is_asked_for():
    """A stated context of 4096 may hold the factor 2, or not."""
    with pytest.raises(ValueError, match=r"2048 tokens if the stated 4096 already include the factor, 4096"):
        parse("yarn:factor=2")(linear_slot())
    after = parse("yarn:factor=2:original_max_position_embeddings=2048")(linear_slot())
    assert same(after, parse("yarn:factor=4")(slot(head_dim=32, context=2048)))


@SCALED
def test_a_larger_base_keeps_the_type_of_the_checkpoint(make_slot):
    scaled = make_slot()
    after = parse("abf:factor=4")(scaled)
    assert after.rope_parameters == {**scaled.rope_parameters, "rope_theta": 4 * scaled.rope_theta}
    assert after.attention_scaling == scaled.attention_scaling and not same(after, scaled)


def test_settings_of_the_checkpoint_are_kept_and_an_implied_attention_factor_follows():
    settings = {"beta_fast": 64.0, "beta_slow": 2.0, "truncate": False}
    implied = 0.1 * math.log(4) + 1
    for stated, expected in ((1.5, 1.5), (implied, 0.1 * math.log(8) + 1)):
        scaled = slot(
            "yarn", head_dim=32, factor=4.0, original_max_position_embeddings=1024, **settings, attention_factor=stated
        )
        after = parse("yarn:factor=2")(scaled)
        assert after.rope_parameters == {
            **scaled.rope_parameters,
            "factor": 8.0,
            "attention_factor": pytest.approx(expected),
        }
        assert after.attention_scaling == pytest.approx(expected)
    assert parse("yarn:factor=2:beta_slow=3")(scaled).rope_parameters["beta_slow"] == 3


YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}
SMOOTHED = {"factor": 4.0, "original_max_position_embeddings": 512, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
STATED = [
    *(("yarn", YARN | {"beta_fast": fast, "beta_slow": slow}) for fast, slow in ((1, 1), (1, 32), (0, 1), (32, 0))),
    ("yarn", YARN | {"beta_fast": None, "beta_slow": 2.0}),
    ("yarn", YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "truncate": False}),
    ("yarn", YARN | {"beta_slow": 2.0, "truncate": None}),
    ("yarn", YARN | {"mscale": 0, "mscale_all_dim": 1.0}),
    *(("llama3", SMOOTHED | {"low_freq_factor": low, "high_freq_factor": high}) for low, high in ((1, 1), (4, 1))),
]


@pytest.mark.parametrize(("rope_type", "stated"), STATED)
@pytest.mark.parametrize("factor", [4.0, 1.0])
def test_what_a_checkpoint_states_has_no_bounds(rope_type, stated, factor):
    """Kimi K2 has equal betas, Llama 4 Scout equal factors of frequency; transformers takes 0 for the default."""
    stated = stated | {"factor": factor}
    scaled = slot(rope_type, head_dim=32, **stated)
    raised = parse(f"{rope_type}:factor=2")(scaled)
    assert same(raised, slot(rope_type, head_dim=32, **stated | {"factor": 2 * factor}))
    assert raised.rope_parameters == {**scaled.rope_parameters, "factor": 2 * factor}
    assert same(parse("abf:factor=4")(scaled), slot(rope_type, head_dim=32, rope_theta=4e4, **stated))


def test_a_yarn_whose_factor_is_null_has_the_ratio_of_its_contexts():
    stated = YARN | {"beta_fast": 64.0, "factor": None}
    assert same(
        parse("yarn:factor=2")(slot("yarn", head_dim=32, **stated)),
        slot("yarn", head_dim=32, **stated | {"factor": 8.0}),
    )


@pytest.mark.parametrize(
    ("text", "rope_type", "stated"),
    [
        ("yarn:factor=2:beta_fast=1.5", "yarn", YARN | {"beta_fast": 64, "beta_slow": 2}),
        ("llama3:factor=2:high_freq_factor=3", "llama3", SMOOTHED | {"low_freq_factor": 4, "high_freq_factor": 8}),
    ],
)
def test_an_argument_that_contradicts_what_the_checkpoint_states_beside_it_is_refused(text, rope_type, stated):
    with pytest.raises(ValueError, match=r"exceed .*config\.json"):
        parse(text)(slot(rope_type, head_dim=32, **stated))
    parse(f"{rope_type}:factor=2")(slot(rope_type, head_dim=32, **stated))


def test_an_argument_is_taken_beside_equal_ends_that_the_checkpoint_states():
    kimi = slot("yarn", head_dim=32, **YARN, beta_fast=1.0, beta_slow=1.0)
    assert parse("yarn:factor=2:attention_factor=1")(kimi).attention_scaling == 1
    assert parse("yarn:factor=2:beta_fast=8")(kimi).rope_parameters["beta_fast"] == 8


@pytest.mark.parametrize(
    ("rope_type", "stated", "context", "reached"),
    [
        ("default", {}, 1024, 1024),
        ("yarn", YARN, 1500, 4096),
        ("yarn", YARN, 8192, 8192),
        ("linear", {"factor": 4.0}, 1024, 1024),
        ("linear", YARN, 1024, 4096),
        ("llama3", SMOOTHED, 512, 2048),
        ("llama3", SMOOTHED, 1024, 1024),  # half, as Llama 3.2
        ("llama3", SMOOTHED, 4096, 4096),  # twice, as Llama 3.1
    ],
)
def test_what_a_table_reaches_is_what_its_type_means(rope_type, stated, context, reached):
    """A factor of 2 stretches that to twice as much under every method that has one, on a plain table, too."""
    scaled = slot(rope_type, head_dim=32, context=context, **stated)
    assert context_reached(scaled) == reached
    for name in SCALING:
        assert parse(name).for_target(scaled, 2 * reached).factor == 2
        assert parse(f"{name}:factor=2").reach(scaled) == 2 * reached


def test_a_longrope_whose_context_was_left_counts_from_its_factor():
    """One list for all lengths, factor 4 over 1024: twice its reach is 8 times 1024."""
    divisors = [1 + i / 4 for i in range(16)]
    scaled = slot("longrope", head_dim=32, context=1024, **YARN, short_factor=divisors, long_factor=divisors)
    assert parse("pi").for_target(scaled, 8192).factor == 2
    assert same(parse("yarn:factor=2")(scaled), parse("yarn:factor=8")(slot(head_dim=32, context=1024)))


@pytest.mark.parametrize("text", ["yarn:factor=4", "mrrope:factor=4", "ntk:factor=4", "llama3:factor=4"])
def test_pairs_that_do_not_rotate_stay_unrotated(text):
    stopped = PRope(p=0.5)(slot(head_dim=32))
    after = parse(text)(stopped)
    plain = parse(text)(slot(head_dim=32))
    assert torch.equal(after.inv_freq[:8], plain.inv_freq[:8]) and not after.inv_freq[8:].any()
    assert after.attention_scaling == plain.attention_scaling


def test_replace_scaling_is_no_parameter_any_more():
    assert from_dict({"method": "p_rope", "p": 0.5, "replace_scaling": False}) == PRope(p=0.5)
    with pytest.raises(ValueError, match="replace_scaling"):
        from_dict({"method": "yarn", "factor": 4.0, "replace_scaling": True})


@pytest.mark.parametrize("text", ["table:attention_scaling=1.25+abf", "table:values=1/0.5/0.25/0+abf"])
def test_what_a_step_before_scaled_is_not_recomputed(text):
    with pytest.raises(ValueError, match="recomputes"):
        parse(text)(slot())


# --- chains ----------------------------------------------------------------------------------------------------------


def test_a_chain_applies_from_left_to_right():
    # The cut at 2 pi / 100 = 0.0628 leaves 1 and 0.1; interpolated first, only 0.25 is above it.
    check_table(parse("truncated:context=100+pi:factor=4")(slot()), [0.25, 0.025, 0, 0])
    check_table(parse("pi:factor=4+truncated:context=100")(slot()), [0.25, 0, 0, 0])


def test_abf_then_p_rope_keeps_a_native_encoding():
    after = parse("abf:rope_theta=100000000+p_rope:p=0.5")(slot())
    check_table(after, [1, 0.01, 0, 0])
    assert after.rope_parameters == {"rope_type": "proportional", "rope_theta": 1e8, "partial_rotary_factor": 0.5}
    assert same(slot(**after.rope_parameters), after)


def test_p_rope_twice_keeps_the_smaller_fraction():
    after = parse("p_rope:p=0.75+p_rope:p=0.25")(slot())
    check_table(after, [1, 0, 0, 0])
    assert after.rope_parameters == {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    check_table(parse("p_rope:p=0.25+p_rope:p=0.75")(slot()), [1, 0, 0, 0])


def test_sequences_flatten():
    chain = as_method(["abf+table", {"method": "p_rope", "p": 0.5}, parse("yarn+nope"), PI(factor=2)])
    assert chain.steps == (ABF(), Table(), PRope(p=0.5), Yarn(), NoPE(), PI(factor=2))


# --- method strings -------------------------------------------------------------------------------------------------


def test_every_form_passes_through_lm_eval():
    """Its own parser of ``--model_args``."""
    text = "+".join(EVERY_FORM)
    assert simple_parse_args_string(f"pretrained=x,method={text}") == {"pretrained": "x", "method": text}


def test_the_grammar_writes_the_leading_parameter_and_what_is_not_default():
    assert str(PI()) == "pi"
    assert str(PI(factor=4)) == "pi:factor=4"
    assert str(Yarn(factor=1e20, truncate=False)) == "yarn:factor=1e20:truncate=false"
    assert str(ABF(factor=0.1)) == "abf:factor=0.1"
    assert str(Truncated(context=4096)) == "truncated:context=4096"
    assert str(Table(values=[1, 1e-12, 0])) == "table:values=1/1e-12/0"
    assert str(Chain((Default(), PRope(p=0.5)))) == "default+p_rope:p=0.5"


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (" pi : factor=8 + nope ", Chain((PI(factor=8), NoPE()))),
        ("yarn:factor=8:truncate=False", Yarn(factor=8, truncate=False)),
        ("abf:rope_theta=none:factor=8", ABF(factor=8)),
        ("abf:rope_theta=5e5", ABF(rope_theta=500000)),
    ],
    ids=str,
)
def test_method_strings_may_be_written_in_other_ways(text, method):
    assert parse(text) == method


def test_values_become_the_declared_types():
    yarn = create("yarn", factor="8", truncate="false", original_max_position_embeddings="4096", mscale="none")
    assert yarn == Yarn(factor=8.0, truncate=False, original_max_position_embeddings=4096)
    assert [type(v) for v in (yarn.factor, yarn.truncate, yarn.original_max_position_embeddings)] == [float, bool, int]
    assert Table(values=torch.tensor([1.0, 0.5])).values == Table(values="1/0.5").values == (1.0, 0.5)


def test_field_help_shows_the_default_as_the_grammar_writes_it():
    assert [field_help(f) for f in dataclasses.fields(ABF)] == ["rope_theta=…", "factor=…"]
    assert [field_help(f) for f in dataclasses.fields(NoPE)] == ["factor=…", "temperature=0"]


# --- errors ----------------------------------------------------------------------------------------------------------

POSITIVE = {
    "abf": ("rope_theta", "factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"),
    "mrrope": ("beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings"),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("factor", "attention_factor"),
    "truncated": ("context",),
    "table": ("attention_scaling",),
}


@pytest.mark.parametrize(("name", "parameter"), [(name, key) for name, keys in POSITIVE.items() for key in keys])
@pytest.mark.parametrize("value", [0, -2])
def test_these_parameters_are_positive(name, parameter, value):
    with pytest.raises(ValueError, match=parameter):
        create(name, **{parameter: value})


@pytest.mark.parametrize("name", SCALING)
@pytest.mark.parametrize("factor", [0, -2, 0.999])
def test_a_factor_does_not_shorten_the_context(name, factor):
    with pytest.raises(ValueError, match="factor"):
        create(name, factor=factor)


FLOATS = [
    (name, field.name)
    for name, cls in METHODS.items()
    for field in dataclasses.fields(cls)
    if typing.get_type_hints(cls)[field.name] in (float, float | None)
]


@pytest.mark.parametrize(("name", "parameter"), FLOATS)
def test_every_number_is_finite(name, parameter):
    for value in (math.nan, math.inf, -math.inf, "nan", "-inf"):
        with pytest.raises(ValueError, match="finite"):
            create(name, **{parameter: value})


@pytest.mark.parametrize("name", ["p_rope", "p_rope_reversed", "partial"])
@pytest.mark.parametrize("p", [-0.01, 1.5])
def test_p_is_a_fraction(name, p):
    with pytest.raises(ValueError, match="p must"):
        create(name, p=p)


# a call that goes wrong, and a word of its message
ERRORS = [
    (lambda: parse("prope"), "p_rope"),
    (lambda: parse("pi:facter=8"), "factor"),
    (lambda: parse("pi:name=3"), "name"),
    (lambda: parse("default:p=0"), "no parameters"),
    (lambda: parse("pi:8"), "key=value"),
    (lambda: parse("pi:factor=2:factor=4"), "twice"),
    (lambda: parse("pi:factor=four"), "four"),
    (lambda: PI(factor=True), "True"),
    (lambda: LongRope(factor=None), "None"),
    (lambda: Yarn(truncate=1), "true or false"),
    (lambda: parse("truncated:context=4096.5"), "whole"),
    (lambda: parse("table:values=1,2"), "'/'"),
    (lambda: Table(values=3.0), "list"),
    (lambda: Table(layer_type="a:b"), "word"),
    (lambda: Table(values=()), "values"),
    (lambda: as_method("yarn:factor=8", truncate=False), "not both"),
    (lambda: from_dict({"p": 0.5}), "'method'"),
    (lambda: from_dict({"method": "chain", "steps": [], "p": 0.5}), "steps"),
    (lambda: Chain((PI(),)), "two"),
    (lambda: ABF(rope_theta=5e5, factor=8), "not both"),
    (lambda: Yarn(beta_fast=1, beta_slow=1), "exceed"),
    (lambda: Llama3(low_freq_factor=4), "exceed"),
    (lambda: LongRope(factors=(1, 0, 1, 1)), "> 0"),
    (lambda: LongRope(factors=(1, 2, 3))(slot()), "per pair"),
    (lambda: Table(values=(1, -0.5)), ">= 0"),
    (lambda: Truncated(cutoff_low=0.1), "together"),
    (lambda: Truncated(context=100, cutoff_low=0.1, cutoff_high=0.2), "not both"),
    (lambda: Truncated(cutoff_low=0.2, cutoff_high=0.1), "cutoff_low <= cutoff_high"),
    (lambda: Truncated(cutoff_low=0.1, cutoff_high=0.2, floor=-0.1), "floor"),
    (lambda: Truncated(floor=0.1), "floor"),
    (lambda: NTK(factor=4)(slot(head_dim=2)), "rotary_dim"),
]


@pytest.mark.parametrize(("call", "word"), ERRORS)
def test_wrong_input_is_refused(call, word):
    with pytest.raises(ValueError, match=re.escape(word)):
        call()


@pytest.mark.parametrize("nothing", [[], (), 3, None], ids=str)
def test_as_method_takes_no_other_form(nothing):
    with pytest.raises(TypeError, match="expected"):
        inspect.unwrap(as_method)(nothing)  # the types of its arguments are not what is checked here


@pytest.mark.parametrize("form", [PI(), {"method": "pi"}, ["pi"]], ids=["PI", "dict", "list"])
def test_keywords_only_go_with_a_name(form):
    with pytest.raises(TypeError, match="factor"):
        as_method(form, factor=8)


# --- methods of the user's own ---------------------------------------------------------------------------------------


@pytest.fixture
def registry():
    """Forget the methods a test defines."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.usefixtures("registry")
def test_a_method_of_the_users_own():
    @dataclass(frozen=True)
    class Slowed(Method, name="slowed"):
        """Every pair slowed by ``by``; it returns a whole table."""

        by: float = 2.0

        def check(self):
            if self.by < 1:
                raise ValueError(f"by must be >= 1, got {self.by}")

        def __call__(self, slot):
            return slot.becomes(slot.inv_freq / self.by)

    assert parse("slowed:by=4") == Slowed(by=4) == from_dict(json.loads(json.dumps(Slowed(by=4).to_dict())))
    check_table(parse("slowed:by=10+p_rope:p=0.5")(slot()), [0.1, 0.01, 0, 0])
    with pytest.raises(ValueError, match="by must"):
        create("slowed", by=0.5)


@pytest.mark.usefixtures("registry")
def test_a_method_may_work_in_place():
    @dataclass(frozen=True)
    class Halved(Method, name="halved"):
        def inv_freq(self, table):
            return table.inv_freq.mul_(0.5)

    before = slot()
    check_table(Halved()(before), [0.5, 0.05, 0.005, 0.0005])
    assert same(before, slot())


@pytest.mark.usefixtures("registry")
def test_a_subclass_without_a_name_is_not_registered():
    class Base(Method):
        """Stand for what two methods share."""

    assert METHODS.keys() == FORMS.keys()
    with pytest.raises(NotImplementedError):
        Base()(slot())


# --- the slot --------------------------------------------------------------------------------------------------------


def test_nested_chains_are_flat():
    nested = Chain((Chain((PI(), NTK())), NoPE()))
    assert nested == parse(str(nested)) == from_dict(json.loads(json.dumps(nested.to_dict())))
    assert from_dict({"method": "chain", "steps": ["pi", "ntk"]}) == Chain((PI(), NTK()))
    assert {nested: "found"}[parse("pi+ntk+nope")] == "found"


# --- the target ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target", "resolved"),
    [
        ("yarn", 16384, "yarn:factor=4"),
        ("pi", 10240, "pi:factor=2.5"),
        ("yarn:original_max_position_embeddings=2048", 16384, "yarn:factor=8:original_max_position_embeddings=2048"),
        ("yarn:factor=8", 16384, "yarn:factor=8"),  # further than asked is fine
        ("p_rope:p=0.25+pi", 32768, "p_rope:p=0.25+pi:factor=8"),
        ("pi:factor=2+yarn:truncate=false", 32768, "pi:factor=2+yarn:factor=4:truncate=false"),
        ("abf+pi:factor=2", 32768, "abf:rope_theta=500000+pi:factor=2"),  # how far a base reaches, nobody says
        ("table:values=1/0.5/0.25/0", 32768, "table:values=1/0.5/0.25/0"),
        ("pi:factor=3", None, "pi:factor=3"),
    ],
)
def test_a_factor_left_out_is_taken_from_the_target(text, target, resolved):
    assert str(parse(text).for_target(slot(), target)) == resolved  # of a table of 4096 tokens


@pytest.mark.parametrize(
    ("text", "target", "word"),
    [
        ("yarn", None, "target_length"),
        ("p_rope+pi", None, "target_length"),
        ("yarn:factor=4", 32768, "16384 tokens.* 32768.* factor=8"),
        ("p_rope:p=0.5+pi:factor=2", 32768, "factor=8"),
        ("yarn+pi", 32768, "one"),
        ("longrope", 8192, "factors"),
        ("table", 8192, "values"),
    ],
)
def test_a_target_out_of_reach_is_refused(text, target, word):
    with pytest.raises(ValueError, match=word):
        parse(text).for_target(slot(), target)


def test_the_advised_factor_is_taken():
    with pytest.raises(ValueError, match="give factor=") as caught:
        parse("yarn:factor=2").for_target(slot(context=6144), 131071)
    advised = re.search(r"give (factor=[\d.]+),", str(caught.value))
    assert advised is not None
    parse(f"yarn:{advised[1]}").for_target(slot(context=6144), 131071)


@pytest.mark.parametrize(
    ("text", "reach"),
    [
        ("yarn:factor=4", 16384),
        ("p_rope:p=0.5+pi:factor=2", 8192),
        ("yarn", None),
        ("abf+pi:factor=2", None),
    ],
)
def test_how_far_a_method_says_it_reaches(text, reach):
    assert parse(text).reach(slot()) == reach
