"""Perplexity against the naive computation from whole logits."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
import statistics

import pytest
import torch
from patches import method_for
from scored import CAPPED, Caches, bold_model, naive, spy, spy_ids
from tiny import ARCHITECTURES, ids, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DynamicCache, GraniteConfig

import rope_patch
from rope_patch.evaluation.documents import TokenDocument, encode
from rope_patch.evaluation.losses import Bucket, DocumentScore, PerplexityResult
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.modeling import scoring
from rope_patch.modeling.scoring import SLICE

VOCABULARY = 96

# --- the value


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


def test_a_list_of_ids_is_one_text():
    model, row = bold_model(), ids(40)[0]
    assert perplexity(model, row.tolist()) == perplexity(model, row)
    with pytest.raises(TypeError, match=r"documents must come from encode\(tokenizer, source\), got float"):
        perplexity(model, [1.0, 2.0], window=8)


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
    monkeypatch.setattr(scoring, "SLICE", 33)
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


# --- chunks and caches


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


# --- windows, buckets, errors of the mean


@pytest.mark.parametrize(
    ("length", "window", "stride"), [(50, 16, 5), (50, 16, 16), (48, 16, 16), (50, 16, 1), (50, 50, 7), (33, 16, 15)]
)
def test_each_token_is_scored_once_with_the_most_context(length, window, stride):
    model, text = bold_model(), ids(length, batch=1)[0]
    starts = [*range(0, length - window + 1, stride)]
    if starts[-1] + window < length:
        starts.append(length - window)  # moved back, to end with the text
    scored = {}  # token: (position in its window, loss)
    for start in starts:
        losses = naive(model, text[None, start : start + window])[0]
        for position in range(1, window):
            # Earlier windows begin further from the token: they give it more context.
            scored.setdefault(start + position, (position, float(losses[position - 1])))
    alone = {start for start in starts if start not in scored}
    assert alone == ({0} if stride < window else set(range(0, length - window + 1, stride)))  # no overlap: no context
    reports = []
    result = perplexity(model, text, window=window, stride=stride, on_progress=reports.append)
    assert result.tokens == len(scored)
    assert result.nll == pytest.approx(statistics.fmean(loss for _, loss in scored.values()), abs=1e-5)
    assert (result.windows, result.window, result.stride) == (len(starts), window, stride)
    assert set(itertools.accumulate(reports)) >= {window * (i + 1) for i in range(len(starts))}
    assert sum(reports) == window * len(starts)
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
    cut, rows = perplexity(model, text, window=16), perplexity(model, text.reshape(3, 16))
    assert (cut.nll, cut.stderr, cut.buckets) == (rows.nll, rows.stderr, rows.buckets)
    assert (cut.windows, cut.tokens) == (3, 45)
    assert [d.name for d in cut.documents] == ["row 0[0:16]", "row 0[16:32]", "row 0[32:48]"]
    assert [d.name for d in rows.documents] == ["row 0", "row 1", "row 2"]


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
    assert read["schema"] == 2 and read["stderr"] is None
    read["buckets"] = tuple(Bucket(**bucket) for bucket in read["buckets"])
    read["documents"] = tuple(
        DocumentScore(**{name: tuple(v) if isinstance(v, list) else v for name, v in d.items()})
        for d in read["documents"]
    )
    read["prefix"] = tuple(read["prefix"])
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


# --- refusals


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
    message = f"the loss at position {position + 1} of window 0:300 of row 0 is not finite: NaN or infinite logits"
    with pytest.raises(ValueError, match=f"^{message}, try float32$"):
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


# --- documents, batches, finished work


def texts():
    return ["The first document is about rivers — and mountains.", "Short.", "A third one, somewhat longer. " * 4, ""]


class Letters:
    """A fast tokenizer of characters: ids 3 and up, offsets as a fast tokenizer tells them."""

    bos_token_id, eos_token_id, is_fast = 1, 2, True

    def __call__(self, text, *, add_special_tokens, verbose=True, return_offsets_mapping=False):
        assert add_special_tokens is False
        made = {"input_ids": [3 + ord(c) % 93 for c in text]}
        if return_offsets_mapping:
            made["offset_mapping"] = [(i, i + 1) for i in range(len(text))]
        return made


def by_hand(model, documents, window, stride):
    """Sum and count of losses per document, each token in the first window that holds it with a context."""
    made = []
    for document in documents:
        row, scored = document.ids, {}
        starts = [0]
        while starts[-1] + window < len(row):
            starts.append(min(starts[-1] + stride, len(row) - window))
        for start in starts:
            losses = naive(model, row[None, start : start + window])[0]
            for i, loss in enumerate(losses):
                scored.setdefault(start + i + 1, float(loss))
        made.append(scored)
    return made


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("chunk", [None, 7])
def test_documents_are_scored_whole_each_with_its_own_sum(batch, chunk):
    model, tokenizer = bold_model(), Letters()
    documents = list(encode(tokenizer, texts()))
    expected = by_hand(model, documents[:3], 24, 16)
    result = perplexity(model, iter(documents), window=24, stride=16, batch=batch, chunk=chunk, buckets=(0, 8, 24))
    assert [d.name for d in result.documents] == ["row 0", "row 1", "row 2"] and result.skipped == 1
    for document, scored, text in zip(result.documents, expected, texts(), strict=False):
        assert document.total_tokens == len(scored) == len(text)  # BOS in front: each of its tokens is predicted
        assert document.total_nll == pytest.approx(sum(scored.values()), abs=1e-4)
        assert document.bytes == len(text.encode())
        assert document.bits_per_byte == pytest.approx(sum(scored.values()) / math.log(2) / len(text.encode()))
    total = sum(sum(scored.values()) for scored in expected)
    assert result.tokens == sum(map(len, expected)) and result.nll == pytest.approx(total / result.tokens, abs=1e-6)
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / sum(len(t.encode()) for t in texts()))
    assert result.prefix == (1,)
    # The ratio estimator's error over documents of unequal length.
    spread = sum((sum(s.values()) - result.nll * len(s)) ** 2 for s in expected)
    assert result.stderr == pytest.approx(math.sqrt(spread * 3 / 2) / result.tokens, rel=1e-4)


def test_without_a_first_token_the_bytes_of_what_is_not_predicted_are_not_counted():
    model = bold_model()
    (document,) = encode(Letters(), "é and èo", bos=False)
    result = perplexity(model, [document], window=16)
    assert result.tokens == 7 and result.documents[0].bytes == len(" and èo".encode())
    cut = perplexity(model, [document], window=4, stride=4)  # two windows, the first token of each has no context
    assert cut.documents[0].bytes == len(" an") and cut.tokens == 3 + 3
    assert cut.documents[1].bytes == len(" èo".encode())  # not the d
    assert cut.bits_per_byte == pytest.approx(cut.nll * 6 / math.log(2) / 7)


def test_documents_are_read_one_at_a_time():
    model, seen = bold_model(), []

    def stream():
        for i in range(6):
            seen.append(i)
            yield TokenDocument(f"d{i}", ids(12, seed=i)[0])

    reports = []
    perplexity(model, stream(), window=12, on_progress=lambda n: reports.append(seen[-1]))
    assert sorted(set(reports)) == [0, 1, 2, 3, 4, 5] and reports == sorted(reports)
    assert all(reports.count(i) > 1 for i in range(6)), "each was scored before the next was asked for, layer by layer"


def test_the_number_is_the_same_in_every_batch_and_with_padding():
    model = bold_model("gemma3")
    documents = [TokenDocument(str(n), ids(n, seed=n)[0]) for n in (30, 7, 19, 2, 30)]
    one = perplexity(model, documents, window=30)
    for batch in (2, 4, 5):
        other = perplexity(model, documents, window=30, batch=batch)
        assert other.nll == pytest.approx(one.nll, abs=1e-6)
        assert [d.total_nll for d in other.documents] == pytest.approx([d.total_nll for d in one.documents], abs=1e-4)


def test_kept_windows_are_not_scored_again(tmp_path):
    model, rows = bold_model(), ids(40, batch=5)
    whole = perplexity(model, rows, buckets=(0, 20, 40))
    done = 0

    def stop(tokens):
        nonlocal done
        done += tokens
        if done == 3 * 40:  # the last token of a window is reported when its scores are kept
            raise KeyboardInterrupt

    journal = tmp_path / "finished.jsonl"
    with pytest.raises(KeyboardInterrupt):
        perplexity(model, rows, buckets=(0, 20, 40), resume=journal, on_progress=stop)
    with spy_ids(model) as seen:
        resumed = perplexity(model, rows, buckets=(0, 20, 40), resume=journal)
    assert len(seen) == 2 and resumed == whole
    with spy_ids(model) as seen:
        assert perplexity(model, rows, buckets=(0, 20, 40), resume=journal) == whole
    assert not seen


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_equal_windows_are_kept_once_and_each_other_with_its_own_score(tmp_path, batch):
    model, one, other = bold_model(), ids(20, seed=1)[0], ids(20, seed=2)[0]
    documents = [TokenDocument(f"d{i}", row) for i, row in enumerate([one, one, other, one, other])]
    plain = perplexity(model, documents, window=20)
    for _ in range(2):
        kept = perplexity(model, documents, window=20, batch=batch, resume=tmp_path / "finished.jsonl")
        assert [d.total_nll for d in kept.documents] == pytest.approx([d.total_nll for d in plain.documents])
    assert (tmp_path / "finished.jsonl").read_bytes().count(b"\n") == 2


def test_positions_that_no_document_reaches_are_left_out():
    documents = [TokenDocument("a", ids(10)[0]), TokenDocument("b", ids(12)[0])]
    result = perplexity(bold_model(), documents, window=40, buckets=(0, 8, 16, 40))
    assert [(b.start, b.stop, b.tokens) for b in result.buckets] == [(0, 8, 14), (8, 16, 6)]
    with pytest.raises(ValueError, match="not made of whole buckets"):
        result.between(16, 40)


def test_adapters_are_told_apart(tmp_path):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model, rows, kept = get_peft_model(bold_model(), config), ids(40), {}
    model.add_adapter("other", config)
    seen = []

    def measure():
        result = perplexity(model, rows, resume=kept)
        assert result == perplexity(model, rows), "finished work of another state was taken"
        seen.append(result.nll)

    measure()
    with model.disable_adapter():
        measure()
    model.set_adapter("other")
    measure()
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["other"] *= 3
    measure()
    assert len(set(seen)) == 4


def test_a_table_that_changes_with_the_length_is_read_whole_or_not_at_all():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    spelled = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    model, rows = bold_model("phi3", rope_parameters=spelled, max_position_embeddings=64), ids(40, batch=1)
    assert perplexity(model, rows).nll == pytest.approx(naive(model, rows).mean().item(), abs=1e-5)
    for options in ({"chunk": 8}, {"cache": DynamicCache}):
        with pytest.raises(ValueError, match=r"rotary table changes with the length.*freeze_at=LENGTH"):
            perplexity(model, rows, **options)
    with pytest.raises(ValueError, match="rotary table changes with the length"):
        perplexity(model, ids(40), batch=2)
    rope_patch.apply(model, "default", freeze_at=40)
    assert perplexity(model, rows, chunk=8).nll == pytest.approx(naive(model, rows).mean().item(), abs=1e-5)


def test_offloaded_weights_are_read_where_they_go(tmp_path):
    from accelerate import cpu_offload, disk_offload

    rows = ids(40)
    expected = perplexity(bold_model(), rows, chunk=8).nll
    model = cpu_offload(bold_model(), execution_device="cpu")
    assert perplexity(model, rows, chunk=8, resume={}).nll == pytest.approx(expected, abs=1e-6)
    model = bold_model(tie_word_embeddings=False)
    expected = perplexity(model, rows).nll
    disk_offload(model, offload_dir=str(tmp_path), execution_device="cpu")
    assert perplexity(model, rows, resume={}).nll == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gemma4"])
@pytest.mark.parametrize("batch", [1, 2])
def test_reading_in_chunks_makes_no_mask_and_no_copy_of_the_cache(family, batch):
    """Nothing as large as chunk × context, and keys in one place; sliding layers keep the masks of their windows."""

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim == 4 and tensor.shape[-1] > 400:
                    self.elements = max(self.elements, tensor.numel())
            return out

    model, rows = bold_model(family, num_key_value_heads=1, max_position_embeddings=1024), ids(512, batch=batch)
    with Largest() as seen:
        perplexity(model, rows, chunk=128, batch=batch)
    assert seen.elements <= 64 * 512
    with Largest() as stock, torch.no_grad():
        cache = DynamicCache(config=model.config)
        for i in range(0, 512, 128):
            model(rows[:, i : i + 128], past_key_values=cache)
    assert stock.elements >= 128 * 512 or family == "mistral", "the measure sees what it should"


@pytest.mark.parametrize("change", ["rows", "buckets", "chunk", "weights", "patch", "dtype"])
def test_work_kept_under_another_setting_is_not_taken(tmp_path, change):
    model, rows, options = bold_model(), ids(40, batch=2), {"buckets": (0, 20, 40), "chunk": 40}
    journal = tmp_path / "finished.jsonl"
    perplexity(model, rows, **options, resume=journal)
    match change:
        case "rows":
            rows = ids(40, batch=2, seed=1)
        case "buckets":
            options["buckets"] = (0, 10, 40)
        case "chunk":
            options["chunk"] = 20
        case "weights":
            with torch.no_grad():
                model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
        case "patch":
            rope_patch.apply(model, "p_rope", p=0.5)
        case "dtype":
            model = model.bfloat16()
    with spy_ids(model) as seen:
        result = perplexity(model, rows, **options, resume=journal)
    assert seen and result == perplexity(model, rows, **options)


@pytest.mark.parametrize(
    ("tokens", "arguments", "error", "message"),
    [
        ([], {"window": 8}, ValueError, "nothing to score: 0 documents, none with two tokens"),
        ([TokenDocument("a", ids(8)[0])], {}, ValueError, "documents need window="),
        ([ids(8)[0]], {"window": 8}, TypeError, "documents must come from encode"),
        ([TokenDocument("a", torch.tensor([1]))], {"window": 8}, ValueError, "nothing to score: 1 documents"),
        (ids(8), {"batch": 0}, ValueError, "batch must be >= 1, got 0"),
        (ids(8), {"resume": {}, "cache": DynamicCache}, ValueError, "resume cannot tell one cache from another"),
        (ids(8) + 90, {}, ValueError, "token ids must be in [0, 96), got"),
        (ids(8).float(), {}, ValueError, "token_ids must be whole numbers, got torch.float32"),
    ],
)
def test_documents_are_refused_before_the_model_runs(tokens, arguments, error, message):
    model = tiny_model()
    with spy_ids(model) as seen, pytest.raises(error, match=f"^{re.escape(message)}"):
        perplexity(model, tokens, **arguments)
    assert not seen


def test_adapters_without_a_scaling_and_tables_changed_by_hand_are_told_apart():
    from peft import IA3Config, get_peft_model

    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = get_peft_model(bold_model(), config)
    on = scoring.fingerprint(model)
    with model.disable_adapter():
        assert scoring.fingerprint(model) != on
    assert scoring.fingerprint(model) == on
    bare = bold_model(head_dim=128)
    seen = {scoring.fingerprint(bare)}
    bare.model.rotary_emb.inv_freq[1::2] *= 0.5
    seen.add(scoring.fingerprint(bare))
    bare.model.rotary_emb.attention_scaling = 1.7
    seen.add(scoring.fingerprint(bare))
    assert len(seen) == 3


def changed_a_little(model):
    model.model.embed_tokens.weight[11:15] *= 1 + 2**-7


def two_rows_swapped(model):
    model.lm_head.weight[[3, 90]] = model.lm_head.weight[[90, 3]]


def the_last_bit(model):
    weight = model.model.layers[1].mlp.down_proj.weight
    weight[-1, -1] = torch.nextafter(weight[-1, -1], weight.new_tensor(9.0))


def a_steering_hook(model, strength=1.0):
    direction = torch.full((64,), strength)
    model.model.layers[0].register_forward_hook(lambda module, args, output: output + direction)


def another_steering_hook(model):
    a_steering_hook(model, strength=2.0)


def merged_into_part_of_the_vocabulary(model):
    """PEFT writes to ``weight.data``, which no version counter of torch sees."""
    model.model.embed_tokens.weight.data[[1, 2, 3, 5]] += 0.5


def a_hook_with_another_constant(model):
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 3)


def a_hook_over_a_list(model, heads=(1,)):
    ablated = {"heads": [*heads]}
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * len(ablated["heads"]))


def a_hook_over_another_list(model):
    a_hook_over_a_list(model, heads=(2,))


class Steering:
    __slots__ = ("unset", "vector")

    def __init__(self, strength):
        self.vector = torch.full((64,), strength)

    def __call__(self, module, args, output):
        return output + self.vector


def an_object_as_a_hook(model, strength=1.0):
    model.model.layers[0].register_forward_hook(Steering(strength))


def another_object_as_a_hook(model):
    model.model.layers[0].register_forward_hook(functools.partial(Steering(2.0)))


CHANGES = [
    a_hook_with_another_constant,
    a_hook_over_a_list,
    a_hook_over_another_list,
    an_object_as_a_hook,
    another_object_as_a_hook,
    changed_a_little,
    two_rows_swapped,
    the_last_bit,
    a_steering_hook,
    another_steering_hook,
    merged_into_part_of_the_vocabulary,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_change_of_a_model_gives_another_fingerprint(dtype):
    seen = {scoring.fingerprint(tiny_model().to(dtype))}
    changes = CHANGES if dtype == torch.float32 else [changed_a_little, two_rows_swapped]
    for change in changes:
        model = tiny_model().to(dtype)
        with torch.no_grad():
            change(model)
        seen.add(scoring.fingerprint(model))
    assert len(seen) == len(changes) + 1


def test_equal_models_have_one_fingerprint(tmp_path):
    def model():
        model = tiny_model()
        a_hook_over_a_list(model)
        an_object_as_a_hook(model)
        return model

    one, other = model(), model()
    before = scoring.fingerprint(one)
    assert scoring.fingerprint(other) == before
    one.save_pretrained(tmp_path)
    assert scoring.fingerprint(one) == before


@pytest.mark.parametrize("bits", [{"load_in_4bit": True}, {"load_in_8bit": True}])
def test_scales_of_quantized_weights_are_part_of_a_fingerprint(bits, tmp_path):
    """Codes of a weight and of its double are equal, and only the scales differ."""

    def quantized(factor):
        model = tiny_model()
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight *= factor
        model.save_pretrained(tmp_path / str(factor))
        config = BitsAndBytesConfig(**bits)
        return AutoModelForCausalLM.from_pretrained(tmp_path / str(factor), quantization_config=config)

    once = scoring.fingerprint(quantized(1))
    assert scoring.fingerprint(quantized(1)) == once != scoring.fingerprint(quantized(2))


def test_finished_work_of_a_model_is_not_taken_for_that_of_one_with_four_trained_tokens(tmp_path):
    model, rows, finished = tiny_model(), ids(40), {}
    before = perplexity(model, rows, resume=finished)
    with torch.no_grad():
        read = [token for token in rows[0].unique().tolist() if token % 3]  # whose rows a coarse sample would miss
        model.lm_head.weight[read[:4]] += 1.0
    assert perplexity(model, rows, resume=finished).perplexity == perplexity(model, rows).perplexity
    assert perplexity(model, rows).perplexity != before.perplexity


def test_weights_offloaded_from_a_model_are_part_of_its_fingerprint():
    from accelerate import cpu_offload

    def offloaded(change):
        model = tiny_model()
        with torch.no_grad():
            model.model.norm.weight[7] += change
        return scoring.fingerprint(cpu_offload(model, execution_device="cpu"))

    assert offloaded(0.25) == offloaded(0.25) != offloaded(0.5)


def test_the_attention_chosen_since_is_kept():
    model, rows = bold_model(), ids(40)
    reader = scoring.Reader(model)
    for chosen in ("eager", "sdpa"):
        model.set_attn_implementation(chosen)
        scoring.losses(reader, rows, [1, 1], chunk=8)
        assert model.config._attn_implementation == chosen

    def stop(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        perplexity(model, rows, chunk=8)
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
