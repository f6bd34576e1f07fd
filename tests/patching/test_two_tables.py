"""Patches with a short and a long table, chosen once for each sequence."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from dataclasses import replace

import pytest
import torch
from support.tiny import ids, logits, tiny_model
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig

import rope_patch
from rope_patch import PatchError, TwoTables
from rope_patch.methods import Default, from_dict, parse
from rope_patch.patching.cache_argument import cache_argument, cache_in
from rope_patch.patching.install import reapply
from rope_patch.patching.two_tables import reach_of

SWITCH, LONG, BOTH = 64, "yarn:factor=4", "yarn:factor=4@64"
PLAIN = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

families = pytest.mark.parametrize("family", ("llama", "gemma3"))


def plain_model(family="llama"):
    """A model whose answers depend on its table: weights of the default size answer alike under both."""
    return tiny_model(family, initializer_range=0.25)


def two(family="llama", method=BOTH):
    """A model of two tables, and the patch."""
    model = plain_model(family)
    return model, rope_patch.apply(model, method, target_length=256)


def only_long(family="llama"):
    return two(family, LONG)[0]


def three(call, family="llama"):
    """What a model of two tables, the unpatched one and one of the long table give."""
    return [call(model) for model in (two(family)[0], plain_model(family), only_long(family))]


def generated(model, prompt, new, **options):
    return model.generate(prompt, max_new_tokens=new, **PLAIN | options)


def close(one, other):
    torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


# --- which table


@families
def test_a_sequence_is_read_as_under_the_table_for_its_length_to_the_last_bit(family):
    ours, plain, long = three(lambda model: logits(model, ids(SWITCH)), family)
    assert torch.equal(ours, plain) and not torch.equal(plain, long)
    ours, plain, long = three(lambda model: logits(model, ids(SWITCH + 1)), family)
    assert torch.equal(ours, long)


def test_lengths_fit_the_rows():
    model, patch = two()
    with patch.reaching([10, 100]), pytest.raises(ValueError, match="2 lengths"):
        model(ids(10, batch=3))


def test_a_pass_without_a_cache_goes_by_the_last_position_of_each_row():
    positions = torch.stack([torch.arange(20), torch.arange(20) + 100])
    rows, plain, long = three(lambda model: logits(model, ids(20), position_ids=positions))
    close(rows, torch.stack([plain[0], long[1]]))


@pytest.mark.parametrize("text", [slice(0, 40), slice(60, 100)], ids=["right", "left"])
def test_padding_does_not_count(text):
    mask = torch.ones(2, 100, dtype=torch.long)
    mask[0] = 0
    mask[0, text] = 1
    rows, plain, long = three(lambda model: logits(model, ids(100), attention_mask=mask))
    close(rows[0, text], plain[0, text])
    close(rows[1], long[1])


def test_a_short_method_of_its_own():
    model, other = two(method=f"{BOTH}@p_rope:p=0.5")[0], two(method="p_rope:p=0.5")[0]
    assert torch.equal(logits(model, ids(30)), logits(other, ids(30)))
    assert torch.equal(logits(model, ids(70)), logits(only_long(), ids(70)))


def test_a_switch_beyond_what_the_short_table_reaches_is_warned_about(caplog):
    two(method="yarn:factor=4@100")
    assert "texts of 64 to 100 tokens" in caplog.text


# --- generation


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (20, {}),  # stays short
        (100, {}),  # crosses
        (60, {"cache_implementation": "static"}),
        (60, {"prefill_chunk_size": 16}),
        (20, {"prompt_lookup_num_tokens": 10}),  # tokens beyond the switch are speculated, and dropped again
    ],
)
def test_generation_is_that_of_the_table_for_the_length_it_will_reach(new, options):
    ours, plain, long = three(lambda model: generated(model, ids(40, batch=1), new, **options))
    assert torch.equal(ours, plain if 40 + new <= SWITCH else long) and not torch.equal(plain, long)


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "inferred"])
def test_padded_prompts_have_tables_of_their_own(masked):
    """Row 0 and its beams reach 10 + 20 tokens, row 1 and its beams 50 + 20."""
    prompt = ids(50)
    prompt[0, :40] = 0
    options = {"num_return_sequences": 2, "num_beams": 2} | ({"attention_mask": prompt != 0} if masked else {})
    ours, plain, long = three(lambda model: generated(model, prompt, 20, **options))
    assert torch.equal(ours[:2], plain[:2]) and torch.equal(ours[2:], long[2:])
    assert not torch.equal(plain[2:], long[2:])


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize(
    ("options", "reach"),
    [
        ({}, 60),  # transformers adds 20 tokens
        ({"max_length": 90}, 90),
        ({"generation_config": GenerationConfig(max_new_tokens=9), "max_length": 90}, 49),
    ],
    ids=str,
)
def test_the_length_stated_is_the_one_that_transformers_generates_to(options, reach):
    model = plain_model()
    assert reach_of(model, {"inputs": ids(40), **options}).tolist() == [reach]
    model.generation_config.eos_token_id = None
    assert model.generate(ids(40), do_sample=False, pad_token_id=0, **options).shape[1] == reach


def test_what_a_caller_states_holds_in_generate():
    model, patch = two()
    with patch.reaching(256):
        assert torch.equal(generated(model, ids(10), 5), generated(only_long(), ids(10), 5))


def test_continuous_batching_is_refused():
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False)
    room = ContinuousBatchingConfig(num_blocks=4, page_size=32, max_batch_tokens=32)  # not the memory of the machine
    answers = two()[0].generate_batch([ids(10, batch=1)[0].tolist()], config, room)
    assert all("reads several sequences as one row" in answer.error for answer in answers.values())


# --- caches


def read(model, tokens, cache=None, **options):
    """Read tokens through a cache; return the logits and the cache."""
    with torch.no_grad():
        output = model(tokens, **{cache_argument(model): cache}, use_cache=True, **options)
    return output.logits, cache or cache_in(output)


@families
def test_stated_chunks_equal_one_pass(family):
    model, patch = two(family)
    cache = DynamicCache(config=model.config)
    with patch.reaching(100):
        parts = [read(model, part, cache)[0] for part in ids(100).split(25, dim=1)]
    close(torch.cat(parts, 1), logits(only_long(family), ids(100)))


def test_a_pass_that_would_cross_unstated_raises_and_leaves_nothing_behind():
    model, patch = two()
    _, cache = read(model, ids(SWITCH))
    with pytest.raises(ValueError, match="reaches"):
        read(model, ids(1), cache)
    with patch.reaching(50), pytest.raises(ValueError, match="reaches"):
        model(ids(80))
    assert torch.equal(logits(model, ids(30)), logits(plain_model(), ids(30)))


@pytest.mark.parametrize(("filled", "asked"), [(40, 200), (200, 40)], ids=["short", "long"])
def test_a_cache_of_one_table_is_not_read_under_the_other(filled, asked):
    model, patch = two()
    with patch.reaching(filled):
        _, cache = read(model, ids(30))
    with patch.reaching(asked), pytest.raises(ValueError, match="table"):
        read(model, ids(5), cache)
    if asked > SWITCH:
        with pytest.raises(ValueError, match="table"):
            generated(model, ids(40), 60, **{cache_argument(model): cache})


def test_a_cache_that_was_not_filled_under_these_tables_is_refused():
    model, _ = two()
    _, foreign = read(plain_model(), ids(40))
    _, earlier = read(model, ids(40))
    rope_patch.apply(model, "abf:factor=8@64", target_length=256, replace=True)
    for cache in (foreign, earlier):
        with pytest.raises(ValueError, match="known"):
            read(model, ids(2), cache)
        with pytest.raises(ValueError, match="known"):
            generated(model, ids(50), 60, **{cache_argument(model): cache})


def test_rows_of_different_tables_that_were_rearranged_are_refused():
    model, patch = two()
    with patch.reaching([40, 200]):
        _, cache = read(model, ids(40))
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="reordered"):
        read(model, ids(10), cache)


def test_rows_of_one_table_may_be_rearranged_and_go_on_without_being_stated_again():
    model, _ = two()
    _, cache = read(model, ids(80)[:, :70])
    cache.batch_select_indices(torch.tensor([1]))
    close(read(model, ids(80)[1:, 70:], cache)[0], logits(only_long(), ids(80))[1:, 70:])


# --- what is stated


@pytest.mark.parametrize("tokens", [0, 1.5, [], True], ids=str)
def test_a_length_is_a_whole_number_of_tokens(tokens):
    with pytest.raises(ValueError, match="tokens"), two()[1].reaching(tokens):
        pass


def test_what_is_stated_is_of_one_model_and_ends_in_any_order():
    (model, patch), other = two(), two()[0]
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(patch.reaching(200)), second.enter_context(patch.reaching(300))
    first.close()
    assert torch.equal(logits(model, ids(30)), logits(only_long(), ids(30)))
    assert torch.equal(logits(other, ids(30)), logits(plain_model(), ids(30)))
    second.close()
    assert torch.equal(logits(model, ids(30)), logits(plain_model(), ids(30)))


# --- the model around it


def test_undo_leaves_no_trace():
    model = plain_model()
    before = set(model.__dict__), len(model.model._forward_hooks), len(model.model._forward_pre_hooks)
    rope_patch.apply(model, BOTH).restore()
    assert (set(model.__dict__), len(model.model._forward_hooks), len(model.model._forward_pre_hooks)) == before


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copied_model_has_its_own_generate(copied):
    model = two()[0]
    other = copied(model)
    rope_patch.restore(model)
    assert torch.equal(generated(other, ids(40), 60), generated(only_long(), ids(40), 60))
    rope_patch.restore(other)
    assert "generate" not in other.__dict__


@pytest.mark.full
def test_under_torch_compile():
    model, _ = two()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for size in (40, 90):
            close(compiled(ids(size), use_cache=False).logits, logits(model, ids(size)))


def test_saved_and_loaded(tmp_path):
    model, _ = two()
    rope_patch.save(model, tmp_path)
    loaded = rope_patch.load(tmp_path)
    for size in (40, 90):
        assert torch.equal(logits(loaded, ids(size)), logits(model, ids(size)))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)  # the long table for every length
    assert torch.equal(logits(plain, ids(40)), logits(only_long(), ids(40)))
    assert "sequences of up to 64 tokens" in str(rope_patch.inspect(tmp_path))


# --- the record


def test_verify_finds_another_short_table_and_another_length():
    model, _ = two()
    rotary = model.model.rotary_emb
    own, rotary._short = rotary._short, two(method=f"{BOTH}@p_rope:p=0.5")[0].model.rotary_emb._short
    with pytest.raises(PatchError, match="short table"):
        rope_patch.verify(model)
    rotary._short, rotary.switch_at = own, 100
    with pytest.raises(PatchError, match="100"):
        rope_patch.verify(model)


def test_a_record_without_its_short_table_is_refused():
    model, _ = two()
    model.config.rope_patch = {key: value for key, value in model.config.rope_patch.items() if key != "short_tables"}
    with pytest.raises(PatchError, match="was altered"):
        rope_patch.verify(model)


def test_a_record_of_another_short_table_is_not_applied_again():
    model, patch = two()
    _, other = two(method=f"{BOTH}@p_rope:p=0.5")
    patch.restore()
    with pytest.raises(PatchError, match="short tables"):
        reapply(model, replace(patch.record, short_tables=other.record.short_tables))
    assert model.config.to_dict() == plain_model().config.to_dict()


# --- the method


@pytest.mark.parametrize("text", [BOTH, "abf:factor=4+p_rope:p=0.5@64@p_rope:p=0.9"])
def test_a_method_string_reads_back(text):
    assert str(parse(text)) == text
    assert from_dict(json.loads(json.dumps(parse(text).to_dict()))) == parse(text)


def test_the_method_of_an_earlier_record_is_read():
    parts = {"long": {"method": "yarn", "factor": 4.0}, "short": {"method": "default"}, "switch_at": 64}
    assert (
        from_dict({"method": "two_tables", **parts}) == parse(BOTH) == TwoTables(parse(LONG), Default(), switch_at=64)
    )


@pytest.mark.parametrize("text", ["yarn@64@default@9", "yarn@64@", "@64", "yarn@many", "yarn@64@p_roop", "yarn@0"])
def test_method_strings_that_are_wrong(text):
    with pytest.raises(ValueError, match=r"LONG@LENGTH|length|p_roop|>= 1"):
        parse(text)


@pytest.mark.parametrize(
    "build",
    [
        lambda: TwoTables(parse(LONG), switch_at=64.5),
        lambda: TwoTables(parse(BOTH), switch_at=8),
        lambda: rope_patch.Chain((parse(BOTH), parse("nope"))),
    ],
    ids=["half a token", "in another", "in a chain"],
)
def test_what_two_tables_cannot_be_made_of(build):
    with pytest.raises(ValueError, match=r"whole|two|chain"):
        build()
