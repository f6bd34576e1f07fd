"""Perplexity against the naive computation, retrieval against greedy generation, the built-in corpus against files."""

from __future__ import annotations

import builtins
import hashlib
import itertools
import json
import math
import os
import random
import re
import statistics
import subprocess
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from test_recipes import recipe
from test_surgery import method_for
from tiny import ARCHITECTURES, ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, GraniteConfig

import rope_patch
from rope_patch.evaluation import perplexity as perplexity_module
from rope_patch.evaluation.perplexity import SLICE, Bucket, PerplexityResult, perplexity
from rope_patch.evaluation.retrieval import (
    NEEDLE,
    QUESTION,
    RetrievalCell,
    RetrievalResult,
    passkey_prompt,
    retrieval,
)
from rope_patch.evaluation.text import builtin_text

CAPPED = ("gemma2", "gemma3", "gemma4")
SPLITS = ("train", "heldout", "haystack")
VOCABULARY = 96


def bold_model(family="llama", **changes):
    """A tiny model whose attention and logits are far from uniform, so that a wrong position or cap shows."""
    if family in CAPPED:
        changes = {"final_logit_softcapping": 1.5, **changes}
    return tiny_model(family, initializer_range=0.2, **changes)


@torch.no_grad()
def naive(model, rows):
    """Loss of each predicted token from whole logits: (windows, tokens - 1) [nats]."""
    logits = model(rows, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].float().transpose(1, 2), rows[:, 1:], reduction="none")


@contextmanager
def spy(module):
    """The number of rows of each call to a layer: the product of all axes but the last."""
    rows = []
    handle = module.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:-1].numel()))
    try:
        yield rows
    finally:
        handle.remove()


@contextmanager
def spy_ids(model):
    """The token ids of each call to the embedding."""
    seen = []
    handle = model.get_input_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    try:
        yield seen
    finally:
        handle.remove()


class Caches:
    """A factory that keeps what it made."""

    def __init__(self, model):
        self.model, self.made = model, []

    def __call__(self):
        self.made.append(DynamicCache(config=self.model.config))
        return self.made[-1]

    @property
    def read(self):
        """Tokens in each, by its own count (in a full layer: sliding ones forget)."""
        return [cache.get_seq_length(1) for cache in self.made]


# --- perplexity: the value


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("spec", ["default", "yarn", "p_rope:p=0.5"])
def test_perplexity_equals_the_naive_computation(family, spec):
    model, rows = bold_model(family), ids(60, batch=3)
    stock = naive(model, rows)
    method = method_for(family, "yarn") if spec == "yarn" else rope_patch.parse(spec)
    with rope_patch.patched(model, method):
        expected = naive(model, rows)
        result = perplexity(model, rows, buckets=range(1, 61))
    assert result.nll == pytest.approx(float(expected.double().mean()), abs=1e-5)
    assert [b.nll for b in result.buckets] == pytest.approx(expected.double().mean(0).tolist(), abs=1e-5)
    assert result.perplexity == math.exp(result.nll)
    assert result.buckets[7].perplexity == math.exp(result.buckets[7].nll)
    assert (result.tokens, result.windows, result.window, result.stride, result.chunk) == (3 * 59, 3, 60, 60, 60)
    # What is measured is the patch. Gemma 4's own table is p-RoPE with p = 0.25, which p = 0.5 leaves as it is.
    moved = float((expected - stock).abs().max())
    same = spec == "default" or (family, spec) == ("gemma4", "p_rope:p=0.5")
    assert moved == 0 if same else moved > 1e-3


@pytest.mark.parametrize("family", CAPPED)
def test_the_final_softcap_is_applied_and_would_be_missed(family):
    rows = ids(60, batch=3)
    capped, free = bold_model(family), bold_model(family, final_logit_softcapping=None)
    assert capped.config.get_text_config().final_logit_softcapping == 1.5
    # With logits in [-1.5, 1.5] no token is less likely than exp(-1.5) / (exp(-1.5) + 95 exp(1.5)).
    result, without = perplexity(capped, rows, buckets=range(1, 61)), perplexity(free, rows)
    assert max(b.nll for b in result.buckets) < math.log(1 + 95 * math.e**3)
    assert without.nll == pytest.approx(float(naive(free, rows).mean()), abs=1e-5)
    assert abs(without.nll - result.nll) > 0.1


def test_equally_likely_tokens_have_the_vocabulary_for_perplexity():
    model = tiny_model(tie_word_embeddings=False)
    torch.nn.init.zeros_(model.lm_head.weight)
    result = perplexity(model, ids(20, batch=3))
    assert result.nll == pytest.approx(math.log(96), abs=1e-6)
    assert result.perplexity == pytest.approx(96, abs=1e-4)
    assert result.stderr == pytest.approx(0, abs=1e-7)


def test_log_probabilities_of_a_bfloat16_model_are_computed_in_float32():
    model, rows = bold_model().to(torch.bfloat16), ids(60, batch=4)
    result = perplexity(model, rows)
    with torch.no_grad():
        logits = torch.stack([model.lm_head(model.model(row[None]).last_hidden_state[0, :-1]) for row in rows])
        rounded = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    assert logits.dtype == rounded.dtype == torch.bfloat16
    wanted = torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:])
    assert result.nll == pytest.approx(float(wanted), abs=1e-5)
    assert abs(result.nll - float(rounded.double().mean())) > 1e-4


def test_logits_of_all_tokens_never_exist(monkeypatch):
    class Widest(TorchDispatchMode):
        """The most rows of any tensor as wide as the vocabulary, made by any operation."""

        rows = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim and tensor.shape[-1] == VOCABULARY:
                    self.rows = max(self.rows, tensor.shape[:-1].numel())
            return out

    model, row = bold_model(), ids(700, batch=1)
    assert SLICE == 256
    with spy(model.lm_head) as rows, Widest() as widest:
        result = perplexity(model, row)
    assert max(rows) <= SLICE and sum(rows) == 699
    assert widest.rows <= SLICE
    assert result.nll == pytest.approx(float(naive(model, row).double().mean()), abs=1e-5)
    monkeypatch.setattr(perplexity_module, "SLICE", 33)
    with spy(model.lm_head) as rows:
        small = perplexity(model, row, chunk=100)
    assert max(rows) <= 33 and sum(rows) == 699
    assert small.nll == pytest.approx(result.nll, abs=1e-5)
    with Widest() as whole, torch.no_grad():
        model(row, use_cache=False)
    assert whole.rows == 700, "the measure sees what it should"


def test_logits_are_scaled_as_the_model_scales_them():
    torch.manual_seed(0)
    sizes = tiny_model().config.to_dict()
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = GraniteConfig(**{key: sizes[key] for key in keys}, initializer_range=0.2, logits_scaling=8.0)
    model, rows = AutoModelForCausalLM.from_config(config).eval(), ids(20)
    assert perplexity(model, rows).nll == pytest.approx(float(naive(model, rows).mean()), abs=1e-5)


# --- perplexity: chunks and caches


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gemma3", "gemma4"])
@pytest.mark.parametrize("spec", ["default", "yarn"])
def test_chunked_prefill_equals_one_pass(family, spec):
    """Windows of 60 tokens: longer than the sliding window of every family that has one (32 or 16)."""
    model, rows = bold_model(family), ids(60, batch=2)
    assert (getattr(model.config, "sliding_window", None) or 0) < 60
    with rope_patch.patched(model, method_for(family, spec)):
        whole = perplexity(model, rows, buckets=range(1, 61))
        for chunk in (1, 7, 16, 17, 33, 59, 60):
            with spy_ids(model) as seen:
                result = perplexity(model, rows, chunk=chunk, buckets=range(1, 61))
            assert result.chunk == chunk
            lengths = [chunk] * (60 // chunk) + [60 % chunk] * (60 % chunk > 0)
            assert [tokens.shape[1] for tokens in seen] == 2 * lengths
            assert [b.nll for b in result.buckets] == pytest.approx([b.nll for b in whole.buckets], abs=1e-5), chunk


def test_without_what_came_before_chunks_would_differ():
    """The control: the chunk alone, with no cache, is another loss."""
    model, row = bold_model(), ids(60, batch=1)
    assert abs(perplexity(model, row[:, 30:]).nll - perplexity(model, row, buckets=(31, 60)).buckets[0].nll) > 1e-2


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_the_factory_is_asked_for_one_cache_per_window(family, chunk):
    model, rows = bold_model(family), ids(40, batch=3)
    caches = Caches(model)
    result = perplexity(model, rows, cache=caches, chunk=chunk)
    assert len(caches.made) == 3
    assert caches.read == [40, 40, 40]
    assert result.nll == pytest.approx(perplexity(model, rows).nll, abs=1e-5)


def test_the_cache_of_chunks_forgets_what_sliding_layers_do_not_read():
    model, seen = bold_model("gemma3"), set()

    def keep(module, args, kwargs):
        seen.add(kwargs["past_key_values"])

    model.model.register_forward_pre_hook(keep, with_kwargs=True)
    perplexity(model, ids(60, batch=1), chunk=8)
    (cache,) = seen
    sliding, full = (layer.keys.shape[-2] for layer in cache.layers)
    assert sliding < model.config.sliding_window == 16 and full == 60


def test_what_the_cache_returns_is_what_attention_reads():
    class Forgetful(DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            keys, values = super().update(keys, values, *args, **kwargs)
            return keys, torch.zeros_like(values)

    model, rows = bold_model(), ids(40)
    assert abs(perplexity(model, rows, cache=Forgetful).nll - perplexity(model, rows).nll) > 1e-2


@pytest.mark.filterwarnings("ignore")
def test_chunks_of_a_model_in_training():
    model, rows = bold_model(), ids(60)
    whole = perplexity(model, rows).nll
    model.train()
    model.gradient_checkpointing_enable()
    try:
        chunked = perplexity(model, rows, chunk=7).nll
    except ValueError:
        return  # a refusal is as good
    assert chunked == pytest.approx(whole, abs=1e-5)


# --- perplexity: windows, buckets, errors of the mean


@pytest.mark.parametrize(
    ("length", "window", "stride"), [(50, 16, 5), (50, 16, 16), (48, 16, 16), (50, 16, 1), (50, 50, 7), (33, 16, 15)]
)
def test_each_token_is_scored_once_with_the_most_context(length, window, stride):
    model, text = bold_model(), ids(length, batch=1)[0]
    starts = range(0, length - window + 1, stride)
    scored = {}  # token: (position in its window, loss)
    for start in starts:
        losses = naive(model, text[None, start : start + window])[0]
        for position in range(1, window):
            # Earlier windows begin further from the token: they give it more context.
            scored.setdefault(start + position, (position, float(losses[position - 1])))
    starts_alone = {start for start in starts if start not in scored}
    assert starts_alone == ({0} if stride < window else set(starts))  # no overlap: a window's first token has none
    told = []
    result = perplexity(model, text, window=window, stride=stride, progress=told.append)
    assert result.tokens == len(scored)
    assert result.nll == pytest.approx(statistics.fmean(loss for _, loss in scored.values()), abs=1e-5)
    assert (result.windows, result.window, result.stride) == (len(starts), window, stride)
    assert told == [window] * len(starts)
    positions = sorted({position for position, _ in scored.values()})
    for low, high in itertools.pairwise((positions[0], (positions[0] + window) // 2, window)):
        part = [loss for position, loss in scored.values() if low <= position < high]
        (bucket,) = perplexity(model, text, window=window, stride=stride, buckets=(low, high)).buckets
        assert (bucket.start, bucket.stop, bucket.tokens) == (low, high, len(part))
        assert bucket.nll == pytest.approx(statistics.fmean(part), abs=1e-5)


def test_a_text_is_one_window_by_default_and_rows_are_windows_already():
    model, text = bold_model(), ids(48, batch=1)[0]
    one = perplexity(model, text)
    assert (one.windows, one.window, one.stride, one.chunk, one.tokens) == (1, 48, 48, 48, 47)
    assert one == perplexity(model, text[None])
    cut = perplexity(model, text, window=16)
    assert cut == perplexity(model, text.reshape(3, 16))
    assert (cut.windows, cut.tokens) == (3, 45)


def test_buckets_hold_their_positions_and_no_others():
    model, rows = bold_model(), ids(40, batch=3)
    losses = naive(model, rows).double()  # position p is column p - 1
    edges = (0, 1 + 1, 8, 20, 40)
    result = perplexity(model, rows, buckets=edges)
    assert [(b.start, b.stop) for b in result.buckets] == [(0, 2), (2, 8), (8, 20), (20, 40)]
    assert [b.tokens for b in result.buckets] == [3 * 1, 3 * 6, 3 * 12, 3 * 20]  # position 0 is not predicted
    for b in result.buckets:
        assert b.nll == pytest.approx(float(losses[:, max(b.start, 1) - 1 : b.stop - 1].mean()), abs=1e-5)
    assert sum(b.tokens * b.nll for b in result.buckets) / result.tokens == pytest.approx(result.nll, abs=1e-9)
    part = perplexity(model, rows, buckets=(5, 9))
    assert [(b.start, b.stop, b.tokens) for b in part.buckets] == [(5, 9, 12)]
    assert part.nll == result.nll, "the whole is of all positions, whatever the buckets"
    (whole,) = perplexity(model, rows).buckets
    assert (whole.start, whole.stop, whole.tokens, whole.nll) == (0, 40, result.tokens, result.nll)


def test_standard_errors_by_hand():
    model, rows = bold_model(), ids(40, batch=5)
    losses = naive(model, rows).double()
    result = perplexity(model, rows, buckets=(0, 10, 40))

    def by_hand(part):
        means = [statistics.fmean(row) for row in part.tolist()]
        middle = sum(means) / 5
        return math.sqrt(sum((m - middle) ** 2 for m in means) / 4) / math.sqrt(5)  # n - 1 = 4

    assert result.stderr == pytest.approx(by_hand(losses), abs=1e-6)
    assert result.buckets[0].stderr == pytest.approx(by_hand(losses[:, :9]), abs=1e-6)
    assert result.buckets[1].stderr == pytest.approx(by_hand(losses[:, 9:]), abs=1e-6)
    assert result.stderr > 1e-3
    single = perplexity(model, rows[:1])
    assert single.stderr is None and single.buckets[0].stderr is None
    # Of overlapping windows only the first scores its early positions: one window, no error of a mean.
    early, late = perplexity(model, rows[0], window=16, stride=4, buckets=(0, 12, 16)).buckets
    assert early.tokens == 11 and early.stderr is None
    assert late.tokens == 4 * 7 and late.stderr > 0  # windows start at 0, 4, … 24


def test_perplexity_as_json():
    result = perplexity(bold_model(), ids(20, batch=1), buckets=(0, 4, 20))
    read = json.loads(result.to_json())
    assert read["schema"] == 1 and read["stderr"] is None
    read["buckets"] = tuple(Bucket(**bucket) for bucket in read["buckets"])
    assert PerplexityResult(**read) == result
    with pytest.raises(ValueError, match="not JSON compliant"):
        PerplexityResult(**{**read, "nll": math.nan}).to_json()


@pytest.mark.parametrize("mode", [True, False])
def test_no_gradient_is_kept_and_nothing_is_left_behind(mode):
    model = bold_model().train(mode)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = ids(20)
    copy = rows.clone()
    perplexity(model, rows)
    assert model.training is mode
    assert torch.equal(rows, copy)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# --- perplexity: refusals


@pytest.mark.parametrize("chunk", [None, 100, 77])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 76, 290, 298])
def test_logits_that_are_not_finite_are_named_by_the_token_they_predict(chunk, bad, position):
    model, row = bold_model(), ids(300, batch=1)
    done = 0

    def spoil(module, args, logits):
        nonlocal done
        if done <= position < done + len(logits):
            logits[position - done, row[0, position + 1]] = bad
        done += len(logits)

    model.lm_head.register_forward_hook(spoil)
    message = f"the loss at position {position + 1} of window 0 is not finite: NaN or infinite logits"
    with pytest.raises(ValueError, match=message):
        perplexity(model, row, chunk=chunk)


@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        (ids(8)[0, 0], {}, "token_ids must have one or two axes, got shape ()"),
        (ids(8)[None], {}, "token_ids must have one or two axes, got shape (1, 2, 8)"),
        (ids(8), {"window": 4}, "token_ids with two axes are windows already: give neither window nor stride"),
        (ids(8), {"stride": 4}, "token_ids with two axes are windows already: give neither window nor stride"),
        (ids(8)[:, :1], {}, "a window needs at least 2 tokens to predict one, got 1"),
        (ids(8)[0], {"window": 1}, "a window needs at least 2 tokens to predict one, got 1"),
        (ids(8)[0, :1], {}, "a window needs at least 2 tokens to predict one, got 1"),
        (ids(8)[:0], {}, "no window to score"),
        (ids(8)[0], {"window": 9}, "the text has 8 tokens, less than one window of 9"),
        (ids(8)[0], {"stride": 0}, "stride must be in [1, 8] tokens, got 0"),
        (ids(8)[0], {"window": 4, "stride": 5}, "stride must be in [1, 4] tokens, got 5"),
        (ids(8), {"chunk": 0}, "chunk must be in [1, 8] tokens, got 0"),
        (ids(8), {"chunk": 9}, "chunk must be in [1, 8] tokens, got 9"),
        (ids(8), {"buckets": ()}, "buckets must rise within 0 and 8, the first past position 1, got []"),
        (ids(8), {"buckets": (4,)}, "buckets must rise within 0 and 8, the first past position 1, got [4]"),
        (ids(8), {"buckets": (0, 4, 4)}, "buckets must rise within 0 and 8, the first past position 1, got [0, 4, 4]"),
        (ids(8), {"buckets": (4, 0)}, "buckets must rise within 0 and 8, the first past position 1, got [4, 0]"),
        (ids(8), {"buckets": (-1, 4)}, "buckets must rise within 0 and 8, the first past position 1, got [-1, 4]"),
        (ids(8), {"buckets": (0, 9)}, "buckets must rise within 0 and 8, the first past position 1, got [0, 9]"),
    ],
)
def test_perplexity_refuses_before_it_runs(tokens, arguments, message):
    model = tiny_model()
    with spy_ids(model) as seen, pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        perplexity(model, tokens, **arguments)
    assert not seen


def test_a_bucket_with_nothing_to_score_is_refused():
    with pytest.raises(ValueError, match=r"the first past position 1, got \[0, 1, 8\]$"):
        perplexity(tiny_model(), ids(8), buckets=(0, 1, 8))


@pytest.mark.parametrize(("tokens", "window"), [(torch.tensor([], dtype=torch.int64), None), (ids(8)[0], 0)])
def test_an_empty_text_or_window_is_named(tokens, window):
    with pytest.raises(ValueError, match="a window needs at least 2 tokens to predict one, got 0"):
        perplexity(tiny_model(), tokens, window=window)


# --- retrieval: the prompts


@pytest.fixture(scope="session")
def tokenizer():
    return recipe.train_tokenizer(builtin_text("train").documents[:40])


@pytest.fixture(scope="session")
def hay(tokenizer):
    """Text for a haystack."""
    return "\n\n".join(builtin_text("haystack").documents[:3])


@pytest.fixture(scope="session")
def hay_ids(tokenizer, hay):
    return encode(tokenizer, hay)


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def length_of(tokenizer, template):
    """Tokens of a template with its key."""
    return len(encode(tokenizer, template.format(key="12345")))


def reader(family="llama", **changes):
    """A tiny model that reads the tokenizer of the fixture."""
    if family == "gemma4":
        changes["vocab_size_per_layer_input"] = recipe.VOCABULARY
    special = {"bos_token_id": recipe.BOS, "eos_token_id": recipe.EOS, "pad_token_id": recipe.PAD}
    return tiny_model(family, vocab_size=recipe.VOCABULARY, initializer_range=0.2, **special, **changes)


def key_of(tokenizer, prompt):
    return tokenizer.decode(prompt.ids[-prompt.answer :]).strip()


def without_bos(tokenizer):
    """A tokenizer like Qwen's, which has none."""
    bare = recipe.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    assert bare.bos_token_id is None
    return bare


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("length", [64, 65, 200])
@pytest.mark.parametrize("depth", [0, 0.0, 0.1, 0.5, 0.99, 1, 1.0])
def test_a_prompt_is_made_as_it_says(tokenizer, hay_ids, bos, length, depth):
    tokenizer = tokenizer if bos else without_bos(tokenizer)
    prompt = passkey_prompt(tokenizer, hay_ids, length, depth, random.Random(f"{length}{depth}"))
    assert len(prompt.ids) == length
    key = key_of(tokenizer, prompt)
    assert re.fullmatch(r"\d{5}", key)
    start = [recipe.BOS] if bos else []
    needle, question = (encode(tokenizer, text.format(key=key)) for text in (NEEDLE, QUESTION))
    assert prompt.answer == len(question) - len(encode(tokenizer, QUESTION.format(key="")[:-1]))
    assert tokenizer.decode(needle).count(key) == 1
    room = length - len(start) - len(needle) - len(question)
    before = len(start) + round(depth * room)
    assert list(prompt.ids[: len(start)]) == start
    assert list(prompt.ids[before : before + len(needle)]) == needle
    assert list(prompt.ids[-len(question) :]) == question
    rest = prompt.ids[len(start) : before] + prompt.ids[before + len(needle) : -len(question)]
    assert len(rest) == room
    assert f" {' '.join(map(str, rest))} " in f" {' '.join(map(str, hay_ids))} ", "one stretch of the haystack"
    if depth == 0:
        assert list(prompt.ids[: len(start) + len(needle)]) == [*start, *needle]
    if depth == 1:
        assert list(prompt.ids[-len(needle) - len(question) :]) == needle + question


def test_the_shortest_prompt_and_the_shortest_haystack(tokenizer, hay_ids):
    shortest = 1 + length_of(tokenizer, NEEDLE) + length_of(tokenizer, QUESTION)
    rng = random.Random(0)
    assert len(passkey_prompt(tokenizer, [], shortest, 0.5, rng).ids) == shortest
    with pytest.raises(ValueError, match=f"^a passkey prompt needs at least {shortest} tokens .*, got {shortest - 1}$"):
        passkey_prompt(tokenizer, hay_ids, shortest - 1, 0.5, rng)
    assert len(passkey_prompt(tokenizer, hay_ids[:50], shortest + 50, 0.5, rng).ids) == shortest + 50
    with pytest.raises(ValueError, match=r"^the haystack has 49 tokens, 50 are needed: give a longer one as text=$"):
        passkey_prompt(tokenizer, hay_ids[:49], shortest + 50, 0.5, rng)


def test_any_stretch_of_the_haystack_may_be_taken(tokenizer, hay_ids):
    needle, question = length_of(tokenizer, NEEDLE), length_of(tokenizer, QUESTION)
    made = [passkey_prompt(tokenizer, hay_ids[:53], 51 + needle + question, 0.0, random.Random(i)) for i in range(60)]
    # 50 tokens of 53: from the first, the second, the third or the fourth on.
    assert {p.ids[1 + needle : -question] for p in made} == {tuple(hay_ids[i : i + 50]) for i in range(4)}


def test_needle_and_question_hold_the_key_once_and_the_question_ends_with_it():
    assert NEEDLE.count("{key}") == QUESTION.count("{key}") == 1
    assert QUESTION.endswith(" {key}")


def test_keys_are_random(tokenizer, hay_ids):
    keys = [key_of(tokenizer, passkey_prompt(tokenizer, hay_ids, 64, 0.5, random.Random(i))) for i in range(200)]
    assert len(set(keys)) > 190
    assert {key[0] for key in keys} == {key[4] for key in keys} == set("0123456789")


class Wordy:
    """A tokenizer of characters and of what matches a pattern."""

    bos_token_id = None

    def __init__(self, pattern):
        self.pattern = pattern

    def __call__(self, text, **_):
        return {"input_ids": [ord(part.group()[-1]) for part in re.finditer(rf"{self.pattern}|.", text)]}


@pytest.mark.parametrize("pattern", [r" is \d+", r" is \d"], ids=["all digits", "the first digit"])
def test_a_tokenizer_that_merges_the_answer_with_the_question_is_refused(pattern):
    with pytest.raises(ValueError, match="merges the answer with the question: passkey cannot be scored with it"):
        passkey_prompt(Wordy(pattern), [5] * 500, 200, 0.5, random.Random(0))


def test_keys_of_different_lengths_are_refused():
    asked = {"lengths": [200], "depths": [0.5], "samples": 20, "text": "x" + "yz" * 200}
    with pytest.raises(ValueError, match="gives keys of different lengths: passkey cannot be scored with it"):
        retrieval(tiny_model(vocab_size=128), Wordy(r"(\d)\1+"), **asked)  # 55 is one token, 56 are two


def prompts_of(model, tokenizer, **arguments):
    """The prompts that reach the model, in order, and the result."""
    with spy_ids(model) as seen:
        result = retrieval(model, tokenizer, **arguments)
    return [tuple(row.tolist()) for batch in seen for row in batch], result


def test_the_same_seed_gives_the_same_prompts(tokenizer, hay):
    model = reader()
    asked = {"lengths": [64, 96], "depths": [0.0, 0.5], "samples": 3, "text": hay}
    first, result = prompts_of(model, tokenizer, **asked)
    assert len(set(first)) == 12 and [len(p) for p in first] == [64] * 6 + [96] * 6
    assert prompts_of(model, tokenizer, **asked) == (first, result)
    assert prompts_of(model, tokenizer, **{**asked, "seed": 0}) == (first, result)
    other, _ = prompts_of(model, tokenizer, **asked, seed=1)
    assert not set(other) & set(first)
    # A cell's prompts are its own: not moved by which others are asked, in which order or how many at a time.
    turned, _ = prompts_of(model, tokenizer, **{**asked, "lengths": [96, 64], "depths": [0.5]})
    assert turned == first[9:] + first[3:6]
    fewer, _ = prompts_of(model, tokenizer, **{**asked, "samples": 2, "batch_tokens": 1})
    assert fewer == [p for i, p in enumerate(first) if i % 3 < 2]


def test_a_depth_is_a_number_however_it_is_written(tokenizer, hay):
    model, asked = reader(), {"lengths": [64], "samples": 2, "text": hay}
    whole, real = (prompts_of(model, tokenizer, depths=depths, **asked) for depths in ([0, 1], [0.0, 1.0]))
    assert whole == real


def test_batches_hold_at_most_batch_tokens(tokenizer, hay):
    model = reader()
    asked = {"lengths": [64, 100], "depths": [0.5], "samples": 5, "text": hay}
    expected = retrieval(model, tokenizer, **asked)
    for batch_tokens, sizes in ((1, [1] * 10), (199, [3, 2] + [1] * 5), (200, [3, 2, 2, 2, 1]), (10**6, [5, 5])):
        told = []
        with spy_ids(model) as seen:
            result = retrieval(model, tokenizer, **asked, batch_tokens=batch_tokens, progress=told.append)
        assert [len(batch) for batch in seen] == sizes
        assert told == [batch.numel() for batch in seen]
        for cell, wanted in zip(result.cells, expected.cells, strict=True):
            assert cell.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert (cell.correct, cell.digits) == (wanted.correct, wanted.digits)


# --- retrieval: the scores

ASKED = {"lengths": [72], "depths": [0.0, 0.5, 1.0], "samples": 4}
ANSWER = 6  # a space and five digits, in this tokenizer


@pytest.fixture(scope="session", params=["llama", "gemma3"])
def memorised(request, tokenizer, hay):
    """A model that learnt by heart all answers of depth 0.0, two of 0.5 and half of each of the other two there."""
    model = reader(request.param)
    prompts, _ = prompts_of(model, tokenizer, **ASKED, text=hay)
    rows = torch.tensor(prompts)
    known = torch.zeros(12, ANSWER, dtype=torch.bool)
    known[:6] = True
    known[6:8, :3] = True
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(200):
        logits = model(rows[:8], use_cache=False, logits_to_keep=ANSWER + 1).logits[:, :-1]
        if bool((logits.argmax(-1) == rows[:8, -ANSWER:])[known[:8]].all()):
            break
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:8, -ANSWER:], reduction="none")
        loss[known[:8]].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        pytest.fail("not learnt in 200 steps")
    return model.eval(), rows


@torch.no_grad()
def generated(model, rows):
    """Whether greedy decoding gives the whole answer, per prompt."""
    hits = []
    for row in rows:
        told = row[None, :-ANSWER]
        out = model.generate(told, attention_mask=torch.ones_like(told), max_new_tokens=ANSWER, do_sample=False)
        hits.append(out[0, told.shape[1] :].tolist() == row[-ANSWER:].tolist())
    return hits


def test_exact_matches_are_those_of_greedy_generation(memorised, tokenizer, hay):
    model, rows = memorised
    hits = generated(model, rows)
    assert hits == [True] * 6 + [False] * 6, "the model was to know these and no others"
    for batch_tokens in (1, 10**6):
        result = retrieval(model, tokenizer, **ASKED, text=hay, batch_tokens=batch_tokens)
        assert [cell.correct for cell in result.cells] == [sum(hits[i : i + 4]) for i in (0, 4, 8)] == [4, 2, 0]
        asked = [(cell.length, cell.depth, cell.samples) for cell in result.cells]
        assert asked == [(72, 0.0, 4), (72, 0.5, 4), (72, 1.0, 4)]
        assert result.accuracy(72) == 6 / 12


def test_shares_and_log_probabilities_by_hand(memorised, tokenizer, hay):
    model, rows = memorised
    result = retrieval(model, tokenizer, **ASKED, text=hay)
    with torch.no_grad():
        logits = model(rows, use_cache=False).logits.double()
    # The token at position t is predicted at t - 1.
    logprobs, right = [], []
    for row, scores in zip(rows, logits, strict=True):
        table = scores - scores.logsumexp(-1, keepdim=True)
        answer = range(72 - ANSWER, 72)
        logprobs.append(sum(float(table[t - 1, row[t]]) for t in answer))
        right.append([int(scores[t - 1].argmax()) == int(row[t]) for t in answer])
    assert any(any(r) and not all(r) for r in right), "some answers are to be half right"
    for i, cell in enumerate(result.cells):
        mine = slice(4 * i, 4 * i + 4)
        assert cell.logprob == pytest.approx(statistics.fmean(logprobs[mine]), abs=1e-4)
        assert cell.digits == pytest.approx(statistics.fmean(itertools.chain(*right[mine])))
        assert cell.correct == sum(map(all, right[mine]))
    assert result.cells[0].digits == 1.0 > result.cells[1].digits > result.cells[2].digits


@pytest.mark.parametrize("per_batch", [1, 2, 3])
def test_through_a_cache_the_scores_are_the_same(memorised, tokenizer, hay, per_batch):
    """On Gemma 3 the sliding layers keep 16 of the 72 tokens."""
    model, _ = memorised
    caches = Caches(model)
    plain = retrieval(model, tokenizer, **ASKED, text=hay)
    with spy_ids(model) as seen:
        cached = retrieval(model, tokenizer, **ASKED, text=hay, cache=caches, batch_tokens=72 * per_batch)
    batches = 3 * math.ceil(4 / per_batch)
    assert len(caches.made) == batches
    # All but the answer in one pass, then all but its last token, one at a time.
    assert [tokens.shape[1] for tokens in seen] == ([72 - ANSWER] + [1] * (ANSWER - 1)) * batches
    assert caches.read == [71] * batches
    for with_cache, without in zip(cached.cells, plain.cells, strict=True):
        assert with_cache.logprob == pytest.approx(without.logprob, abs=1e-4)
        assert (with_cache.correct, with_cache.digits) == (without.correct, without.digits)


def test_what_the_cache_returns_is_what_is_scored(tokenizer, hay):
    class Forgetful(DynamicCache):
        def update(self, keys, values, *args, **kwargs):
            keys, values = super().update(keys, values, *args, **kwargs)
            return keys, torch.zeros_like(values)

    model, asked = reader(), {"lengths": [72], "depths": [0.5], "samples": 2, "text": hay}
    plain, other = (retrieval(model, tokenizer, **asked, cache=cache).cells[0] for cache in (None, Forgetful))
    assert abs(plain.logprob - other.logprob) > 0.1


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_family_is_scored_under_a_patch(family, tokenizer, hay):
    model, asked = reader(family), {"lengths": [80], "depths": [0.5], "samples": 2, "text": hay}
    stock, _ = prompts_of(model, tokenizer, **asked)
    with rope_patch.patched(model, rope_patch.parse("p_rope:p=0.5")), torch.no_grad(), spy(model.lm_head) as rows:
        plain = retrieval(model, tokenizer, **asked).cells[0]
        assert rows == [2 * (ANSWER + 1)], "logits of the answer only"
        cached = retrieval(model, tokenizer, **asked, cache=lambda: DynamicCache(config=model.config)).cells[0]
        prompts = torch.tensor(stock)
        table = model(prompts, use_cache=False).logits[:, -ANSWER - 1 : -1].log_softmax(-1)
    expected = table.gather(-1, prompts[:, -ANSWER:, None]).sum() / 2
    assert plain.logprob == pytest.approx(float(expected), abs=1e-4)
    assert cached.logprob == pytest.approx(plain.logprob, abs=1e-4)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_retrieval_refuses_logits_that_are_not_finite(tokenizer, hay, cached, bad):
    model = reader()

    def spoil(module, args, logits):
        logits[0, -1] = bad

    model.lm_head.register_forward_hook(spoil)
    cache = DynamicCache if cached else None
    if not cached:  # its last row is of the token after the answer, which nobody asks for
        model.lm_head.register_forward_hook(lambda module, args, logits: logits.roll(1, 1))
    with pytest.raises(ValueError, match=r"^the model gives NaN or infinite logits for an answer$"):
        retrieval(model, tokenizer, lengths=[72], depths=[0.5], samples=1, text=hay, cache=cache)


@pytest.mark.filterwarnings("ignore")
def test_retrieval_through_a_cache_of_a_model_in_training(tokenizer, hay):
    model, asked = reader(), {"lengths": [72], "depths": [0.5], "samples": 2, "text": hay}
    plain = retrieval(model, tokenizer, **asked)
    model.train()
    model.gradient_checkpointing_enable()
    try:
        cached = retrieval(model, tokenizer, **asked, cache=DynamicCache)
    except ValueError:
        return  # a refusal is as good
    assert cached.cells[0].logprob == pytest.approx(plain.cells[0].logprob, abs=1e-4)


# --- retrieval: results and refusals


def result_of(*counts):
    cells = tuple(RetrievalCell(n, depth, asked, right, 0.5, -1.0) for n, depth, asked, right in counts)
    return RetrievalResult("passkey", cells, 0, "0" * 64, None)


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [
        (8, 10, 0.490, 0.943),  # Newcombe 1998 gives such intervals to three places
        (0, 10, 0.0, 0.278),  # z² / (n + z²) = 3.8416 / 13.8416
        (10, 10, 0.722, 1.0),
        (81, 263, 0.255, 0.366),  # Newcombe 1998, table I: 0.2553 to 0.3662
    ],
)
def test_wilson_interval(right, asked, low, high):
    result = result_of((256, 0.0, asked, right))
    assert result.interval(256) == pytest.approx((low, high), abs=6e-4)
    assert result.accuracy(256) == right / asked


def test_accuracy_is_over_the_depths_of_one_length():
    result = result_of((256, 0.0, 4, 4), (256, 1.0, 6, 4), (512, 0.0, 10, 1))
    assert result.accuracy(256) == 0.8
    assert result.interval(256) == pytest.approx((0.490, 0.943), abs=6e-4)
    assert result.accuracy(512) == 0.1
    low, high = result.interval(256, z=1.0)
    assert 0.490 < low < 0.8 < high < 0.943
    assert result.interval(256, z=0.0) == pytest.approx((0.8, 0.8))
    for ask in (result.accuracy, result.interval):
        with pytest.raises(ValueError, match=re.escape("no cell of length 300. Known: [256, 512]")):
            ask(300)


def test_retrieval_as_json(tokenizer, hay):
    result = retrieval(reader(), tokenizer, lengths=[64, 72], depths=[0.0, 1.0], samples=2, seed=3, text=hay)
    read = json.loads(result.to_json())
    assert (read["schema"], read["task"], read["seed"]) == (1, "passkey", 3)
    read["cells"] = tuple(RetrievalCell(**cell) for cell in read["cells"])
    assert RetrievalResult(**read) == result
    spoilt = RetrievalResult("passkey", (RetrievalCell(64, 0.0, 1, 0, 0.0, math.nan),), 0, "", None)
    with pytest.raises(ValueError, match="not JSON compliant"):
        spoilt.to_json()


def test_a_result_names_its_haystack(tokenizer, hay):
    model, asked = reader(), {"lengths": [64], "depths": [0.5], "samples": 1}
    mine = retrieval(model, tokenizer, **asked, text=hay)
    assert (mine.haystack, mine.python_version) == (hashlib.sha256(hay.encode()).hexdigest(), None)
    prompts, builtin = prompts_of(model, tokenizer, **asked)
    corpus = builtin_text("haystack")
    assert (builtin.haystack, builtin.python_version) == (corpus.sha256, corpus.python_version)
    assert builtin.python_version == ".".join(map(str, sys.version_info[:3]))
    needle, question = length_of(tokenizer, NEEDLE), length_of(tokenizer, QUESTION)
    after = prompts[0][1 + round(0.5 * (63 - needle - question)) + needle : -question]
    assert tokenizer.decode(after[1:-1]) in corpus.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "pass_key"}, "unknown task 'pass_key'. Known: passkey"),
        ({"depths": [0.5, 1.01]}, "depth must be in [0, 1], got 1.01"),
        ({"depths": [-0.1]}, "depth must be in [0, 1], got -0.1"),
        ({"depths": [math.nan]}, "depth must be in [0, 1], got nan"),
        ({"depths": []}, "depths is empty"),
        ({"lengths": []}, "lengths is empty"),
        ({"samples": 0}, "samples must be >= 1, got 0"),
        ({"lengths": [3]}, "a passkey prompt needs at least 41 tokens with this tokenizer, got 3"),
        ({"text": ""}, "the haystack has 0 tokens, 31 are needed: give a longer one as text="),
        ({"lengths": [10**7]}, "the haystack has "),
    ],
)
def test_retrieval_refuses_before_it_runs(tokenizer, hay, arguments, message):
    assert 1 + length_of(tokenizer, NEEDLE) + length_of(tokenizer, QUESTION) == 41
    model = reader()
    arguments = {"lengths": [72], "depths": [0.5], "samples": 1, "text": hay} | arguments
    with spy_ids(model) as seen, pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        retrieval(model, tokenizer, **arguments)
    assert not seen


def test_a_length_that_does_not_fit_is_refused_before_the_others_run(tokenizer, hay):
    model = reader()
    with spy_ids(model) as seen, pytest.raises(ValueError, match="needs at least"):
        retrieval(model, tokenizer, lengths=[72, 3], depths=[0.5], samples=1, text=hay)
    assert not seen


# --- the built-in corpus


def test_the_splits_are_disjoint_and_non_empty():
    corpora = [builtin_text(split) for split in SPLITS]
    assert [corpus.split for corpus in corpora] == list(SPLITS)
    for one, other in itertools.combinations(corpora, 2):
        assert not set(one.documents) & set(other.documents)
    for corpus in corpora:
        assert len(corpus.documents) > 20
        assert all(document.strip() for document in corpus.documents)
        assert corpus.text == "\n\n".join(corpus.documents)
        assert corpus.sha256 == hashlib.sha256("\0".join(corpus.documents).encode()).hexdigest()
    # 80, 10 and 10 %.
    train, heldout, haystack = (len(corpus.documents) for corpus in corpora)
    assert 0.7 < train / (train + heldout + haystack) < 0.9
    assert 0.5 < heldout / haystack < 2


def test_language_topics_docstrings_and_source_are_all_there():
    documents = [document for split in SPLITS for document in builtin_text(split).documents]
    source = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text().strip()
    assert documents.count(source) == 1
    assert any('The "if" statement' in document for document in documents)
    assert any(document.startswith("math\n\n") or document.startswith("_io\n\n") for document in documents)


def test_the_corpus_is_the_same_each_time():
    for split in SPLITS:
        assert builtin_text.__wrapped__(split) == builtin_text.__wrapped__(split)
        assert builtin_text(split) is builtin_text(split)


def test_the_corpus_is_the_same_in_each_process():
    code = f"from rope_patch.evaluation.text import builtin_text as t; print(*(t(s).sha256 for s in {SPLITS}))"
    spoken = {"args": [sys.executable, "-c", code], "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(**spoken, env={**os.environ, "PYTHONHASHSEED": seed}) for seed in ("1", "2")]
    one, other = (process.communicate(timeout=60)[0].split() for process in processes)
    assert one == other and len(set(one)) == 3


def test_the_corpus_does_not_depend_on_what_the_process_did(monkeypatch):
    before = [builtin_text.__wrapped__(split).sha256 for split in SPLITS]
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)  # by typer: the command line, and not the library
    monkeypatch.setattr(sys, "last_type", OverflowError, raising=False)  # by an uncaught error in a notebook
    monkeypatch.setattr(builtins, "display", re.compile, raising=False)  # by IPython
    assert [builtin_text.__wrapped__(split).sha256 for split in SPLITS] == before


@pytest.mark.parametrize("split", ["test", "Train", "", None])
def test_an_unknown_split_is_refused(split):
    with pytest.raises(ValueError, match=re.escape(f"unknown split {split!r}. Known: train, heldout, haystack")):
        builtin_text(split)


def union(monkeypatch, root):
    """All documents made of a made-up standard library."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    documents = []
    for split in SPLITS:
        documents += builtin_text.__wrapped__(split).documents
    return documents


def test_tests_installed_packages_tables_and_stubs_are_left_out(monkeypatch, tmp_path):
    kept = ["good.py", "package/inner.py", "package/testing.py", "json/decoder.py", "package/config-3/kept.py"]
    dropped = [
        "test/test_x.py",
        "package/tests/case.py",
        "package/test/case.py",
        "site-packages/torch/nn.py",
        "dist-packages/numpy/core.py",
        "encodings/cp1252.py",
        "idlelib/run.py",
        "tkinter/ttk.py",
        "turtledemo/clock.py",
        "lib2to3/pytree.py",
        "ensurepip/__main__.py",
        "pydoc_data/topics.py",
        "__pycache__/good.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux.py",
        "notes.txt",
    ]
    for name in kept + dropped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# MARK {name}\n" + "x = 1\n" * 50)
    (tmp_path / "stub.py").write_text("# MARK stub.py")  # 200 characters or fewer
    (tmp_path / "latin.py").write_bytes(b"# MARK latin.py \xff\xfe\n" + b"y = 2\n" * 50)
    documents = union(monkeypatch, tmp_path)
    found = [re.match(r"# MARK (\S+)", document)[1] for document in documents if document.startswith("# MARK")]
    assert sorted(found) == sorted([*kept, "latin.py"])


def test_files_are_read_in_the_order_of_their_names(monkeypatch, tmp_path):
    names = [f"{folder}{i % 7}/{i:02}.py" for folder in "cab" for i in range(20)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"# MARK {name}\n" + "x = 1\n" * 50)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    read = 0
    for split in SPLITS:
        found = re.findall(r"# MARK (\S+)", builtin_text.__wrapped__(split).text)
        assert found == sorted(found)
        read += len(found)
    assert read == len(names)


def test_a_python_without_its_source_is_refused(monkeypatch, tmp_path):
    with pytest.raises(FileNotFoundError, match="carries no source of its standard library: give a text of your own"):
        union(monkeypatch, tmp_path)


def test_no_real_test_or_installed_package_is_in_the_corpus():
    documents = {document for split in SPLITS for document in builtin_text(split).documents}
    root = Path(sysconfig.get_path("stdlib"))
    others = [*root.glob("test/test_[a-d]*.py"), *Path(pytest.__file__).parent.parent.glob("_pytest/*.py")]
    others += root.glob("site-packages/pip/_internal/*.py")
    assert len(others) > 20
    assert not documents & {path.read_text(encoding="utf-8", errors="ignore").strip() for path in others}
