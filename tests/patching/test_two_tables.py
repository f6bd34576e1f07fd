"""Patches with a short and a long table, chosen once for each sequence."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import ids, logits, small, tiny_model
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache

import rope_patch
from rope_patch import PatchError
from rope_patch.methods import parse
from rope_patch.patching.apply import reapply
from rope_patch.patching.generation import reach_of
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.reach import reaching, stated_of
from rope_patch.patching.two_tables import TwoTableRotary

FAMILIES = ("llama", "gemma3")
SWITCH, LONG = 64, "yarn:factor=4"
PLAIN = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

families = pytest.mark.parametrize("family", FAMILIES)


def plain_model(family="llama"):
    """A model whose answers depend on its table: weights of the default size answer alike under both."""
    return tiny_model(family, initializer_range=0.25)


def two(family="llama"):
    """A model of two tables, and the patch."""
    model = plain_model(family)
    return model, rope_patch.apply(model, long=LONG, switch_at=SWITCH, target_length=256)


def only_long(family="llama"):
    model = plain_model(family)
    rope_patch.apply(model, LONG, target_length=256)
    return model


# --- which table


@families
def test_a_short_sequence_is_read_as_by_the_unpatched_model_to_the_last_bit(family):
    model, _ = two(family)
    assert torch.equal(logits(model, ids(SWITCH)), logits(plain_model(family), ids(SWITCH)))


@families
def test_a_long_sequence_is_read_as_under_the_long_table_alone(family):
    model, _ = two(family)
    assert torch.equal(logits(model, ids(SWITCH + 1)), logits(only_long(family), ids(SWITCH + 1)))
    assert not torch.equal(logits(model, ids(SWITCH + 1)), logits(plain_model(family), ids(SWITCH + 1)))


def test_rows_of_a_batch_have_tables_of_their_own():
    model, patch = two()
    tokens = ids(40, batch=3)
    with patch.reaching([40, 200, SWITCH]):
        rows = logits(model, tokens)
    plain, long = logits(plain_model(), tokens), logits(only_long(), tokens)
    torch.testing.assert_close(rows[0], plain[0])
    torch.testing.assert_close(rows[1], long[1])
    torch.testing.assert_close(rows[2], plain[2])
    assert (plain - long).abs().max() > 1e-3


def test_a_pass_without_a_cache_goes_by_the_last_position_of_each_row():
    model, _ = two()
    tokens = ids(20)
    positions = torch.stack([torch.arange(20), torch.arange(20) + 100])
    rows = logits(model, tokens, position_ids=positions)
    torch.testing.assert_close(rows[0], logits(plain_model(), tokens, position_ids=positions)[0])
    torch.testing.assert_close(rows[1], logits(only_long(), tokens, position_ids=positions)[1])


def test_padding_does_not_count():
    model, _ = two()
    tokens, mask = ids(100), torch.ones(2, 100, dtype=torch.long)
    mask[0, 40:] = 0
    rows = logits(model, tokens, attention_mask=mask)
    torch.testing.assert_close(rows[0, :40], logits(plain_model(), tokens[:1, :40])[0])
    torch.testing.assert_close(rows[1], logits(only_long(), tokens)[1])


def test_a_short_method_of_its_own():
    model = plain_model()
    rope_patch.apply(model, f"{LONG}@{SWITCH}@p_rope:p=0.5", target_length=256)
    other = plain_model()
    rope_patch.apply(other, "p_rope:p=0.5")
    assert torch.equal(logits(model, ids(30)), logits(other, ids(30)))
    assert torch.equal(logits(model, ids(70)), logits(only_long(), ids(70)))


def test_the_length_defaults_to_the_stated_context_and_the_factor_to_the_target():
    patch = rope_patch.apply(plain_model(), long="yarn", target_length=512)
    assert str(patch.method) == "yarn:factor=8@64"


def test_sliding_layers_keep_their_one_table():
    model, patch = two("gemma3")
    rotary = find_rotary(model).module
    assert list(rotary.short_tables) == ["full_attention"]
    assert patch.after["sliding_attention"] is patch.before["sliding_attention"]


# --- caches and generation


@families
@pytest.mark.parametrize("new", [20, 100], ids=["stays short", "crosses"])
def test_generation_is_that_of_the_table_for_the_length_it_will_reach(family, new):
    model, _ = two(family)
    reference = plain_model(family) if 40 + new <= SWITCH else only_long(family)
    ours, theirs = (m.generate(ids(40), max_new_tokens=new, **PLAIN) for m in (model, reference))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [{"cache_implementation": "static"}, {"prefill_chunk_size": 16}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 3}],
    ids=str,
)
def test_other_ways_to_generate(options):
    ours, plain, long = (
        m.generate(ids(40, batch=1), max_new_tokens=60, **PLAIN | options)
        for m in (two()[0], plain_model(), only_long())
    )
    assert torch.equal(ours, long) and not torch.equal(plain, long)


def test_speculated_tokens_may_lie_beyond_the_switch():
    options = {"prompt_lookup_num_tokens": 10, "max_new_tokens": 20, **PLAIN}
    prompt = ids(40, batch=1)
    assert torch.equal(two()[0].generate(prompt, **options), plain_model().generate(prompt, **options))


def test_generation_without_a_prompt():
    options = {"bos_token_id": 1, "max_new_tokens": 100, **PLAIN}
    assert torch.equal(two()[0].generate(**options), only_long().generate(**options))


def test_a_patched_model_is_freed_with_its_last_reference():
    model, _patch = two()
    gone = weakref.ref(model)
    del model, _patch
    assert gone() is None


def test_generate_of_a_model_that_nobody_keeps_says_so():
    with pytest.raises(ReferenceError, match="needs a model that is kept"):
        two()[0].generate(ids(8), max_new_tokens=2, **PLAIN)


def test_a_switch_beyond_what_the_short_table_reaches_is_warned_about(caplog):
    rope_patch.apply(plain_model(), long="yarn:factor=8", switch_at=400)
    assert "texts of 64 to 400 tokens are read under the short table, default, which reaches 64" in caplog.text


def test_continuous_batching_is_refused():
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False)
    room = ContinuousBatchingConfig(num_blocks=4, page_size=32, max_batch_tokens=32)  # not the memory of the machine
    answers = two()[0].generate_batch([ids(10, batch=1)[0].tolist()], config, room)
    assert all("reads several sequences as one row" in answer.error for answer in answers.values())


def test_generation_with_left_padding_gives_each_row_its_table():
    model, plain, long = two()[0], plain_model(), only_long()
    assert not torch.equal(*(m.generate(ids(50), max_new_tokens=20, **PLAIN) for m in (plain, long)))
    prompt = ids(50)
    mask = torch.ones_like(prompt)
    mask[0, :40] = 0  # row 0 reaches 10 + 20 tokens, row 1 50 + 20
    prompt[0, :40] = 0
    ours = model.generate(prompt, attention_mask=mask, max_new_tokens=20, **PLAIN)
    assert torch.equal(ours[0], plain.generate(prompt, attention_mask=mask, max_new_tokens=20, **PLAIN)[0])
    assert torch.equal(ours[1], long.generate(prompt, attention_mask=mask, max_new_tokens=20, **PLAIN)[1])
    inferred = model.generate(prompt, max_new_tokens=20, **PLAIN)  # transformers takes the mask from the padding
    assert torch.equal(inferred, ours)


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}], ids=str)
def test_beams_have_the_table_of_their_prompt(options):
    model, long = two()[0], only_long()
    ours, theirs = (m.generate(ids(40), max_new_tokens=30, **PLAIN | options) for m in (model, long))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("by", ["generate", "the caller"])
def test_beams_of_prompts_under_both_tables(by):
    options = {"num_return_sequences": 2, "num_beams": 2, "max_new_tokens": 20, **PLAIN}
    prompt, (model, patch) = ids(50), two()
    prompt[0, :40] = 0  # padding: its beams reach 10 + 20 tokens, those of the other prompt 50 + 20
    with patch.reaching([30, 70]) if by == "the caller" else contextlib.nullcontext():
        ours = model.generate(prompt, **options)
    plain, long = (m.generate(prompt, **options) for m in (plain_model(), only_long()))
    assert torch.equal(ours[:2], plain[:2]) and torch.equal(ours[2:], long[2:])
    assert not torch.equal(plain[2:], long[2:])


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    ("options", "reach"),
    [
        ({}, 60),  # transformers adds 20 tokens
        ({"max_new_tokens": 7}, 47),
        ({"max_length": 90}, 90),
        ({"max_length": 90, "max_new_tokens": 5}, 45),
        ({"generation_config": GenerationConfig(max_new_tokens=9)}, 49),
        ({"generation_config": GenerationConfig(max_new_tokens=9), "max_new_tokens": 3}, 43),
        ({"generation_config": GenerationConfig(max_length=77)}, 77),
    ],
    ids=str,
)
def test_the_length_stated_is_the_one_that_transformers_generates_to(options, reach):
    model = plain_model()
    assert reach_of(model, {"inputs": ids(40), **options}).tolist() == [reach]
    model.generation_config.eos_token_id = None
    assert model.generate(ids(40), do_sample=False, pad_token_id=0, **options).shape[1] == reach


def test_a_cached_call_that_would_cross_unstated_raises():
    model, _ = two()
    cache = model(ids(40)).past_key_values
    with pytest.raises(ValueError, match=r"reaches 80 tokens, beyond the 64 at which its table changes.* short table"):
        model(ids(40), past_key_values=cache)


def test_decoding_token_by_token_raises_at_the_first_token_that_crosses():
    model, _ = two()
    cache = model(ids(SWITCH)).past_key_values
    with pytest.raises(ValueError, match=r"reaches 65 tokens.*with patch\.reaching\(tokens\)"):
        model(ids(1), past_key_values=cache)


@pytest.mark.parametrize("stated", [None, 60, 200])
def test_a_cache_that_this_model_did_not_fill_is_refused(stated):
    model, patch = two()
    with torch.no_grad():
        cache = plain_model()(ids(40)).past_key_values
    stating = patch.reaching(stated) if stated else contextlib.nullcontext()
    with stating, pytest.raises(ValueError, match="holds 40 tokens, and under which table they were read is not known"):
        model(ids(2), past_key_values=cache)


def test_a_cache_that_was_filled_under_other_two_tables_is_refused():
    model, _ = two()
    cache = model(ids(40)).past_key_values
    rope_patch.apply(model, long="abf:factor=8", switch_at=SWITCH, target_length=256, replace=True)
    with pytest.raises(ValueError, match="holds 40 tokens, and under which table they were read is not known"):
        model(ids(2), past_key_values=cache)
    whole = torch.cat((ids(40), ids(4)), dim=1)  # from which generate fills the cache again
    fresh = model.generate(whole, max_new_tokens=8, **PLAIN)
    assert torch.equal(model.generate(whole, past_key_values=cache, max_new_tokens=8, **PLAIN), fresh)


def rearranged(how):
    """A cache of one short and one long row, its rows in another order since."""
    model, patch = two()
    with patch.reaching([40, 200]), torch.no_grad():
        cache = model(ids(40)).past_key_values
    how(cache)
    return model, patch, cache


@pytest.mark.parametrize(
    "how",
    [
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
    ],
    ids=["select", "reorder", "repeat"],
)
def test_rows_of_different_tables_that_were_rearranged_are_refused(how):
    model, _, cache = rearranged(how)
    with pytest.raises(ValueError, match="or their rows were reordered"):
        model(ids(10, batch=cache.layers[0].keys.shape[0]), past_key_values=cache)


def test_rows_of_one_table_may_be_rearranged():
    model, _ = two()
    tokens = ids(80)
    with torch.no_grad():
        cache = model(tokens[:, :70]).past_key_values
        cache.batch_select_indices(torch.tensor([1]))
        after = model(tokens[1:, 70:], past_key_values=cache).logits
    torch.testing.assert_close(after, logits(only_long(), tokens)[1:, 70:], atol=1e-4, rtol=0)


def test_a_copied_cache_goes_on_under_its_tables():
    model, patch = two()
    tokens = ids(50)
    with torch.no_grad():
        with patch.reaching([50, 200]):
            cache = model(tokens[:, :40]).past_key_values
        after = model(tokens[:, 40:], past_key_values=copy.deepcopy(cache)).logits
    torch.testing.assert_close(after[0], logits(plain_model(), tokens)[0, 40:], atol=1e-4, rtol=0)
    torch.testing.assert_close(after[1], logits(only_long(), tokens)[1, 40:], atol=1e-4, rtol=0)


def test_the_mask_of_a_static_cache_says_nothing_of_the_length():
    model, _ = two()
    tokens, mask = ids(80, batch=1), torch.zeros(1, 256, dtype=torch.long)
    mask[:, :80] = 1
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=256)
        read = model(tokens, attention_mask=mask, past_key_values=cache).logits
    torch.testing.assert_close(read, logits(only_long(), tokens), atol=1e-4, rtol=0)


def test_padding_on_the_left_does_not_count_without_positions():
    model, _ = two()
    tokens, mask = ids(80), torch.ones(2, 80, dtype=torch.long)
    mask[0, :50] = 0
    rows = logits(model, tokens, attention_mask=mask)
    torch.testing.assert_close(rows[0, 50:], logits(plain_model(), tokens, attention_mask=mask)[0, 50:])
    torch.testing.assert_close(rows[1], logits(only_long(), tokens)[1])


@families
def test_stated_chunks_equal_one_pass(family):
    model, patch = two(family)
    tokens, cache = ids(100), DynamicCache(config=model.config)
    with patch.reaching(100), torch.no_grad():
        parts = [model(tokens[:, low : low + 25], past_key_values=cache).logits for low in range(0, 100, 25)]
    torch.testing.assert_close(torch.cat(parts, 1), logits(only_long(family), tokens), atol=2e-5, rtol=0)


def test_a_long_sequence_goes_on_without_being_stated_again():
    model, _ = two()
    tokens = ids(80)
    cache = model(tokens[:, :70]).past_key_values
    torch.testing.assert_close(
        model(tokens[:, 70:], past_key_values=cache).logits, logits(only_long(), tokens)[:, 70:], atol=2e-5, rtol=0
    )


def test_a_cache_of_one_table_is_not_read_under_the_other():
    model, patch = two()
    cache = model(ids(30)).past_key_values
    with patch.reaching(200), pytest.raises(ValueError, match=r"cache holds keys of the short table.*more than 64"):
        model(ids(5), past_key_values=cache)
    with patch.reaching(200):
        cache = model(ids(30)).past_key_values
    with patch.reaching(40), pytest.raises(ValueError, match=r"cache holds keys of the long table.*at most 64"):
        model(ids(5), past_key_values=cache)


def test_a_stated_length_that_is_exceeded_raises():
    model, patch = two()
    with patch.reaching(50), pytest.raises(ValueError, match="reaches 80 tokens"):
        model(ids(80))


def test_generate_fills_a_cache_of_the_short_table_again():
    model = two()[0]
    prompt, cache = ids(40), DynamicCache(config=model.config)
    first = model.generate(prompt, past_key_values=cache, max_new_tokens=10, **PLAIN)
    again = model.generate(first, past_key_values=cache, max_new_tokens=60, **PLAIN)
    assert torch.equal(again, only_long().generate(first, max_new_tokens=60, **PLAIN))
    shorter = model.generate(first, past_key_values=DynamicCache(config=model.config), max_new_tokens=5, **PLAIN)
    assert torch.equal(shorter, plain_model().generate(first, max_new_tokens=5, **PLAIN))


def test_generate_refuses_a_cache_that_it_cannot_fill_again():
    for new in (3, 50):  # the new tokens alone, fewer or more than those in the cache
        model = two()[0]
        cache = model(ids(40)).past_key_values
        options = {"attention_mask": torch.ones(2, 40 + new), "max_new_tokens": 60, **PLAIN}
        with pytest.raises(ValueError, match="holds 40 tokens that were read under the other table"):
            model.generate(ids(new), past_key_values=cache, **options)


def test_generate_fills_a_cache_again_that_another_model_filled():
    prompt, model = ids(40), two()[0]
    cache = plain_model()(prompt).past_key_values
    ours = model.generate(ids(50), past_key_values=cache, max_new_tokens=60, **PLAIN)
    assert torch.equal(ours, only_long().generate(ids(50), max_new_tokens=60, **PLAIN))


def test_what_a_caller_states_holds_in_generate():
    model, patch = two()
    with patch.reaching(256):
        ours = model.generate(ids(10), max_new_tokens=5, **PLAIN)
    assert torch.equal(ours, only_long().generate(ids(10), max_new_tokens=5, **PLAIN))


def test_a_failed_pass_leaves_nothing_behind():
    model, _ = two()
    cache = model(ids(40)).past_key_values
    with pytest.raises(ValueError, match="reaches 80 tokens"):
        model(ids(40), past_key_values=cache)
    assert torch.equal(logits(model, ids(30)), logits(plain_model(), ids(30)))


@pytest.mark.parametrize("tokens", [0, -3, 1.5, [], [[1, 2]], True, None, "5", 10**19], ids=str)
def test_a_length_is_a_whole_number_of_tokens(tokens):
    with (
        pytest.raises(ValueError, match="reaching takes a number of tokens >= 1"),
        reaching(torch.nn.Identity(), tokens),
    ):
        pass


def test_a_length_is_stated_of_one_model():
    (model, patch), (other, _) = two(), two("gemma3")
    with patch.reaching(200):
        assert torch.equal(logits(other, ids(30)), logits(plain_model("gemma3"), ids(30)))
        assert torch.equal(logits(model, ids(30)), logits(only_long(), ids(30)))


def test_blocks_of_generators_may_end_in_any_order():
    model, patch = two()

    def stream(length):
        with patch.reaching(length):
            yield

    first, second = stream(200), stream(300)
    next(first), next(second)
    list(first), list(second)
    assert stated_of(find_rotary(model).module) is None


def test_lengths_fit_the_rows():
    model, patch = two()
    with (
        patch.reaching([10, 100]),
        pytest.raises(ValueError, match="2 lengths are stated, and the model is called with 3"),
    ):
        model(ids(10, batch=3))


# --- the model around it


def test_undo_leaves_no_trace():
    model = plain_model()
    before = set(model.__dict__), len(model.model._forward_hooks), len(model.model._forward_pre_hooks)
    patch = rope_patch.apply(model, long=LONG, switch_at=SWITCH)
    assert isinstance(model.model.rotary_emb, TwoTableRotary)
    patch.restore()
    assert (set(model.__dict__), len(model.model._forward_hooks), len(model.model._forward_pre_hooks)) == before
    assert torch.equal(logits(model, ids(100)), logits(plain_model(), ids(100)))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copied_model_has_its_own_generate(copied):
    model = two()[0]
    other = copied(model)
    rope_patch.restore(model)
    assert torch.equal(
        other.generate(ids(40), max_new_tokens=60, **PLAIN), only_long().generate(ids(40), max_new_tokens=60, **PLAIN)
    )
    rope_patch.verify(other)
    rope_patch.restore(other)
    assert "generate" not in other.__dict__


def test_casts_change_neither_table():
    model, _ = two()
    short = model.model.rotary_emb.short_tables[None].inv_freq.clone()
    model.bfloat16().float()
    rope_patch.verify(model)
    assert torch.equal(model.model.rotary_emb._short[0].table(), short)


def test_under_peft():
    model, _ = two()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    ours = adapted.generate(input_ids=ids(40), max_new_tokens=60, **PLAIN)
    assert torch.equal(ours, only_long().generate(ids(40), max_new_tokens=60, **PLAIN))


def test_under_torch_compile():
    model, _ = two()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for size in (40, 90):
            torch.testing.assert_close(compiled(ids(size), use_cache=False).logits, logits(model, ids(size)))


def test_saved_and_loaded(tmp_path):
    model, _ = two()
    rope_patch.save(model, tmp_path)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert stated["rope_parameters"]["rope_type"] == "yarn"
    assert stated["rope_patch"]["method"]["switch_at"] == SWITCH
    loaded = rope_patch.load(tmp_path)
    for size in (40, 90):
        assert torch.equal(logits(loaded, ids(size)), logits(model, ids(size)))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)  # the long table for every length
    assert torch.equal(logits(plain, ids(40)), logits(only_long(), ids(40)))
    assert "sequences of up to 64 tokens are read under another table" in str(rope_patch.inspect(tmp_path))


def test_an_adapter_brings_both_tables(tmp_path):
    base = small()
    base.save_pretrained(tmp_path / "base")
    model = rope_patch.load(tmp_path / "base")
    rope_patch.apply(model, long=LONG, switch_at=SWITCH, target_length=256)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False))
    rope_patch.save(adapted, tmp_path / "adapter")
    loaded = rope_patch.load(tmp_path / "adapter")
    for size in (40, 90):
        assert torch.equal(logits(loaded, ids(size)), logits(adapted, ids(size)))


# --- the record


def test_verify_finds_another_short_table():
    model, _ = two()
    rotary = model.model.rotary_emb
    rope_patch.verify(model)
    other = plain_model()
    rope_patch.apply(other, f"{LONG}@{SWITCH}@p_rope:p=0.5", target_length=256)
    rotary._short = other.model.rotary_emb._short
    with pytest.raises(PatchError, match=r"in use: short table: \[all\]"):
        rope_patch.verify(model)


def test_verify_finds_another_length():
    model, _ = two()
    model.model.rotary_emb.switch_at = 100
    with pytest.raises(PatchError, match="changes at 100 tokens, the record says at 64"):
        rope_patch.verify(model)


def test_an_altered_short_table_is_refused(tmp_path):
    model, _ = two()
    record = copy.deepcopy(model.config.rope_patch)
    record["short_tables"]["all"]["inv_freq"][0] = 2.0
    model.config.rope_patch = record
    with pytest.raises(PatchError, match="record was altered"):
        rope_patch.verify(model)
    del record["short_tables"]
    model.config.rope_patch = record
    with pytest.raises(PatchError, match="record was altered"):
        rope_patch.verify(model)


def test_a_record_of_another_short_table_is_not_applied_again():
    model, patch = two()
    other = rope_patch.apply(plain_model(), f"{LONG}@{SWITCH}@p_rope:p=0.5", target_length=256)
    patch.restore()
    with pytest.raises(PatchError, match=r"its short tables .* are not this model's"):
        reapply(model, replace(patch.record, short_tables=other.record.short_tables))
    assert model.config.to_dict() == plain_model().config.to_dict()


# --- what is refused, with nothing changed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "apply takes a method, or long="),
        ({"long": LONG, "short": LONG}, "the same table: nothing would switch"),
        ({"long": "default"}, "the same table: nothing would switch"),
        ({"long": LONG, "switch_at": 0}, "switch_at must be a whole number of tokens >= 1, got 0"),
        ({"long": LONG, "switch_at": 64.5}, "switch_at must be a whole number of tokens >= 1, got 64.5"),
        ({"long": LONG, "switch_at": "64"}, "switch_at must be a whole number of tokens >= 1, got '64'"),
        ({"long": LONG, "switch_at": True}, "switch_at must be a whole number of tokens >= 1, got True"),
        ({"long": LONG, "switch_at": 256, "target_length": 256}, "the long table would never be used"),
        ({"long": LONG, "short": "pi", "target_length": 256}, "the short method pi needs a factor"),
        ({"long": LONG, "factor": 3}, r"could be of either"),
        ({"long": f"{LONG}@8"}, "two tables at most"),
        ({"short": "default"}, "apply takes a method, or long="),
    ],
    ids=str,
)
def test_errors(options, message):
    model = plain_model()
    before = logits(model)
    with pytest.raises(ValueError, match=message):
        rope_patch.apply(model, **options)
    assert torch.equal(logits(model), before) and not hasattr(model.config, "rope_patch")


def test_method_and_long_exclude_each_other():
    with pytest.raises(ValueError, match="short and switch_at go with long="):
        rope_patch.apply(plain_model(), "yarn:factor=4", short="default")
    with pytest.raises(ValueError, match="give one of them"):
        rope_patch.apply(plain_model(), "yarn:factor=4", long="pi:factor=2")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yarn@64@default@9", "expected LONG@LENGTH or LONG@LENGTH@SHORT"),
        ("yarn@64@", "expected LONG@LENGTH or LONG@LENGTH@SHORT, got 'yarn@64@'"),
        ("@64", "expected LONG@LENGTH or LONG@LENGTH@SHORT, got '@64'"),
        ("yarn@many", "a length is a number of tokens such as 4096 or 4k, got 'many'"),
        ("yarn@64@p_roop", "unknown method 'p_roop'"),
    ],
)
def test_method_strings_that_are_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize("text", ["yarn:factor=4@8192", "abf:factor=4+p_rope:p=0.5@64@p_rope:p=0.9"])
def test_a_method_string_reads_back(text):
    assert str(parse(text)) == text
    assert rope_patch.methods.from_dict(json.loads(json.dumps(parse(text).to_dict()))) == parse(text)


def test_a_chain_of_two_tables_is_refused():
    with pytest.raises(ValueError, match="a chain holds methods of one table"):
        rope_patch.Chain((parse("yarn@64"), parse("nope")))
