"""Perplexity against the naive computation from whole logits."""

import math
import statistics

import pytest
import torch
from support.largest import Largest
from support.patches import method_for
from support.scored import Caches, bold_model, check_reader, naive, spy_ids
from support.tiny import ARCHITECTURES, ids, tiny_model
from transformers import DynamicCache

import rope_patch
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.modeling import reader as reading
from rope_patch.modeling.read_at_once import LOGITS_AT_ONCE
from rope_patch.patching.cache_argument import cache_argument
from rope_patch.runtime.progress import listen
from rope_patch.texts.documents import TokenDocument, encode

VOCABULARY = 96

# --- the value


@pytest.mark.parametrize(
    ("family", "spec"),
    [*((family, "p_rope:p=0.5") for family in ARCHITECTURES), ("llama", "default"), ("gemma3", "yarn")],
)
def test_perplexity_equals_the_naive_computation(family, spec):
    model = bold_model(family)
    rows = ids(60, batch=3)
    stock = naive(model, rows)
    method = method_for("yarn") if spec == "yarn" else rope_patch.parse(spec)
    with rope_patch.patched(model, method):
        expected = naive(model, rows)
        result = perplexity(model, rows, buckets=range(1, 61))
    assert result.nll == pytest.approx(float(expected.double().mean()), abs=1e-5)
    assert [b.nll for b in result.buckets] == pytest.approx(expected.double().mean(0).tolist(), abs=1e-5)
    assert result.perplexity == math.exp(result.nll)
    assert (result.tokens, result.windows, result.window, result.stride, result.chunk) == (3 * 59, 3, 60, 60, 60)
    # What is measured is the patch. Gemma 4's own table is p-RoPE with p = 0.25, which p = 0.5 leaves as it is.
    moved = float((expected - stock).abs().max())
    same = spec == "default" or (family, spec) == ("gemma4", "p_rope:p=0.5")
    assert moved == 0 if same else moved > 1e-3


def test_logits_of_all_tokens_never_exist():
    def rows(tensor):
        return tensor.shape[:-1].numel() if tensor.shape[-1] == VOCABULARY else 0

    model = bold_model()
    row = ids(700, batch=1)
    with Largest(rows) as widest:
        result = perplexity(model, row)
    assert 0 < widest.largest <= LOGITS_AT_ONCE == 256
    assert result.nll == pytest.approx(float(naive(model, row).double().mean()), abs=1e-5)


# --- chunks and caches


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", "yarn"),
        ("mistral", "yarn"),
        ("gemma2", "default"),
        ("gemma3", "yarn"),
        ("gemma4", "default"),
    ],
)
def test_chunked_prefill_equals_one_pass(family, spec):
    """Windows of 40 tokens: longer than the sliding window of every family that has one (32 or 16)."""
    model = bold_model(family)
    rows = ids(40, batch=2)
    with rope_patch.patched(model, method_for(spec)):
        whole = perplexity(model, rows, buckets=range(1, 41))
        for chunk in (1, 7, 33):
            with spy_ids(model) as seen:
                result = perplexity(model, rows, chunk=chunk, buckets=range(1, 41))
            assert result.chunk == chunk
            lengths = [min(chunk, 40 - start) for start in range(0, 40, chunk)]
            assert [tokens.shape[1] for tokens in seen] == 2 * lengths
            assert [b.nll for b in result.buckets] == pytest.approx([b.nll for b in whole.buckets], abs=1e-5), chunk


@pytest.mark.parametrize("chunk", [None, 7])
def test_the_factory_is_asked_for_one_cache_per_window(chunk):
    model = bold_model("gemma3")
    rows = ids(40, batch=3)
    caches = Caches(model)
    result = perplexity(model, rows, cache=caches, chunk=chunk)
    assert len(caches.made) == 3
    assert caches.read == [40, 40, 40]
    assert result.nll == pytest.approx(perplexity(model, rows).nll, abs=1e-5)


def test_the_cache_of_chunks_forgets_what_sliding_layers_do_not_read():
    model = bold_model("gemma3")
    check_reader(model)
    seen = set()

    def keep(module, args, kwargs):
        if kwargs["use_cache"]:  # the logits are computed without the decoder's layers
            seen.add(kwargs[cache_argument(module)])

    model.model.register_forward_pre_hook(keep, with_kwargs=True)
    perplexity(model, ids(60, batch=1), chunk=8)
    (cache,) = seen
    sliding, full = (layer.keys.shape[-2] for layer in cache.layers)
    assert sliding < model.config.sliding_window == 16 and full == 60


def test_windows_of_a_model_with_sliding_layers_are_read_in_chunks_unless_asked_otherwise(monkeypatch):
    monkeypatch.setattr(reading, "SLIDING_CHUNK", 20)
    hybrid = bold_model("gemma3")
    rows = ids(60, batch=2)
    chunked = perplexity(hybrid, rows)
    whole = perplexity(hybrid, rows, chunk=60)
    assert (chunked.chunk, perplexity(bold_model(), rows).chunk) == (20, 60)
    assert chunked.nll == pytest.approx(whole.nll, abs=1e-6)


# --- windows, buckets, errors of the mean


def by_hand(model, row, window, stride, special=0):
    """Each token's position and loss in the first window that holds it with a context, and the number of windows.

    Each window begins with the first ``special`` tokens of the row.
    """
    scored = {}
    starts = [0]
    while starts[-1] + window < len(row):
        starts.append(min(starts[-1] + stride, len(row) - window))  # the last one ends with the text
    for start in starts:
        ids = torch.cat([row[:special], row[start + special : start + window]])
        for i, loss in enumerate(naive(model, ids[None])[0], start=1):
            scored.setdefault(start + i, (i, float(loss)))
    return scored, len(starts)


@pytest.mark.parametrize(
    ("length", "window", "stride"), [(50, 16, 5), (50, 16, 16), (48, 16, 16), (50, 50, 7), (33, 16, 15)]
)
def test_each_token_is_scored_once_with_the_most_context(length, window, stride):
    model = bold_model()
    text = ids(length, batch=1)[0]
    reports = []
    scored, windows = by_hand(model, text, window, stride)
    low = (min(position for position, _ in scored.values()) + window) // 2
    options = {"window": window, "stride": stride, "buckets": (low, window)}
    with listen(lambda stage, tokens: reports.append(tokens)):
        result = perplexity(model, text, **options)
    assert (result.tokens, result.windows, sum(reports)) == (len(scored), windows, window * windows)
    assert result.nll == pytest.approx(statistics.fmean(loss for _, loss in scored.values()), abs=1e-5)
    late = [loss for position, loss in scored.values() if position >= low]
    assert result.buckets[0].tokens == len(late)
    assert result.buckets[0].nll == pytest.approx(statistics.fmean(late), abs=1e-5)


def test_a_text_is_one_window_by_default_and_rows_are_windows_already():
    model = bold_model()
    text = ids(48, batch=1)[0]
    one = perplexity(model, text)
    assert (one.windows, one.window, one.stride, one.chunk, one.tokens) == (1, 48, 48, 48, 47)
    assert one == perplexity(model, text[None]) == perplexity(model, text.tolist())
    cut = perplexity(model, text, window=16)
    rows = perplexity(model, text.reshape(3, 16))
    assert cut.nll == rows.nll and cut.documents[1].name == "row 0[16:32]"


@pytest.mark.parametrize("mode", [True, False])
def test_no_gradient_is_kept_and_nothing_is_left_behind(mode):
    model = bold_model().train(mode)
    rows = ids(20)
    with torch.enable_grad():
        perplexity(model, rows)
    assert model.training is mode and all(p.grad is None for p in model.parameters())


# --- refusals


@pytest.mark.parametrize(
    ("chunk", "bad", "position"),
    [(None, math.nan, 0), (None, math.inf, 298), (100, -math.inf, 290)],
)
def test_logits_that_are_not_finite_are_named_by_the_token_they_predict(chunk, bad, position):
    model = bold_model()
    row = ids(300, batch=1)
    done = 0

    def spoil(module, args, logits):
        nonlocal done
        if done <= position < done + logits.shape[1]:
            logits[0, position - done, row[0, position + 1]] = bad
        done += logits.shape[1]

    check_reader(model)
    model.lm_head.register_forward_hook(spoil)
    with pytest.raises(ValueError, match=f"position {position + 1} of window 0:300 of row 0 "):
        perplexity(model, row, chunk=chunk)


@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        (ids(8)[0, 0], {}, "axes"),
        (ids(8), {"window": 4}, "windows already"),
        (ids(8)[0], {"window": 0}, "got 0"),
        (ids(8)[0], {"window": 4, "stride": 5}, "stride"),
        (ids(8), {"chunk": 0}, "chunk"),
        (ids(8), {"buckets": (0, 4, 4)}, "buckets"),
        (ids(8), {"resume": {}, "cache": DynamicCache}, "resume"),
        (ids(8) + 90, {}, "token ids"),
        (ids(8).float(), {}, "float32"),
        ([], {"window": 8}, "nothing to score"),
        ([TokenDocument("a", ids(8)[0])], {}, "window="),
        ([ids(8)[0]], {"window": 8}, "encode"),
        ([TokenDocument("two special tokens", ids(8)[0], prefix=(3, 4))], {"window": 2}, "at least 3"),
    ],
)
def test_perplexity_refuses_before_it_runs(tokens, arguments, message):
    model = tiny_model()
    with spy_ids(model) as seen, pytest.raises((ValueError, TypeError), match=message):
        perplexity(model, tokens, **arguments)
    assert not seen


# --- documents, batches, finished work


class Letters:
    """A fast tokenizer of characters: ids 3 and up, offsets as a fast tokenizer tells them."""

    bos_token_id = 1
    eos_token_id = 2
    is_fast = True

    def __call__(self, text, *, add_special_tokens, verbose=True, return_offsets_mapping=False):
        assert add_special_tokens is False
        made = {"input_ids": [3 + ord(c) % 93 for c in text]}
        if return_offsets_mapping:
            made["offset_mapping"] = [(i, i + 1) for i in range(len(text))]
        return made


@pytest.mark.parametrize(("batch", "chunk", "stride"), [(1, None, 16), (2, 7, 16), (4, None, None)])
def test_documents_are_scored_whole_each_with_its_own_sum(batch, chunk, stride):
    """Without a stride a window, which begins with a special token, has 23 tokens of its text."""
    model = bold_model("gemma3")  # whose sliding layers see 16 tokens, padding or not
    texts = ["The first document is about rivers — and mountains.", "Short.", "A third one, longer. " * 4, "Short.", ""]
    documents = list(encode(Letters(), texts))
    sizes = [len(text.encode()) for text in texts]
    expected = [by_hand(model, document.ids, 24, stride or 23, special=1)[0] for document in documents[:4]]
    sums = [sum(loss for _, loss in scored.values()) for scored in expected]
    result = perplexity(model, iter(documents), window=24, stride=stride, batch=batch, chunk=chunk)
    assert [d.name for d in result.documents] == ["row 0", "row 1", "row 2", "row 3"]
    # BOS in front: each token of a text is predicted
    assert [d.total_tokens for d in result.documents] == [len(text) for text in texts[:4]]
    assert [d.total_nll for d in result.documents] == pytest.approx(sums, abs=1e-4)
    assert [d.bytes for d in result.documents] == sizes[:4]
    assert result.nll == pytest.approx(sum(sums) / result.tokens, abs=1e-6)
    assert result.bits_per_byte == pytest.approx(sum(sums) / math.log(2) / sum(sizes))


def test_without_a_first_token_the_bytes_of_what_is_not_predicted_are_not_counted():
    model = bold_model()
    (document,) = encode(Letters(), "é and èo", prefix=())
    result = perplexity(model, [document], window=16)
    assert result.tokens == 7 and result.documents[0].bytes == len(" and èo".encode())
    cut = perplexity(model, [document], window=4, stride=4)  # two windows, the first token of each has no context
    assert cut.documents[0].bytes == len(" an") and cut.tokens == 3 + 3
    assert cut.documents[1].bytes == len(" èo".encode())  # not the d
    assert cut.bits_per_byte == pytest.approx(cut.nll * 6 / math.log(2) / 7)


def test_documents_are_read_one_at_a_time():
    asked = []
    reports = []

    def stream():
        for i in range(6):
            asked.append(i)
            yield TokenDocument(f"d{i}", ids(12, seed=i)[0])

    with listen(lambda stage, tokens: reports.append(asked[-1])):
        perplexity(bold_model(), stream(), window=12)
    assert set(reports) == set(range(6)) and reports == sorted(reports), "each is scored before the next is asked for"


def test_positions_that_no_document_reaches_are_left_out():
    documents = [TokenDocument("a", ids(10)[0]), TokenDocument("b", ids(12)[0])]
    result = perplexity(bold_model(), documents, window=40, buckets=(0, 8, 16, 40))
    assert [(b.start, b.stop, b.tokens) for b in result.buckets] == [(0, 8, 14), (8, 16, 6)]
    with pytest.raises(ValueError, match="buckets"):
        result.between(16, 40)


def test_a_table_that_changes_with_the_length_is_read_whole_or_not_at_all():
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 32}
    spelled = {"rope_type": "longrope", "rope_theta": 10000.0, **factors}
    model = bold_model("phi3", rope_parameters=spelled, max_position_embeddings=64)
    rows = ids(40, batch=1)
    assert perplexity(model, rows).nll == pytest.approx(naive(model, rows).mean().item(), abs=1e-5)
    for options in ({"chunk": 8}, {"cache": DynamicCache}):
        with pytest.raises(ValueError, match="freeze_at"):
            perplexity(model, rows, **options)
    with pytest.raises(ValueError, match="length"):
        perplexity(model, ids(40), batch=2)
    rope_patch.apply(model, "default", freeze_at=40)
    assert perplexity(model, rows, chunk=8).nll == pytest.approx(naive(model, rows).mean().item(), abs=1e-5)


def test_offloaded_weights_are_read_where_they_go(tmp_path):
    from accelerate import disk_offload

    rows = ids(40)
    model = bold_model(tie_word_embeddings=False)
    expected = perplexity(model, rows, chunk=8).nll
    disk_offload(model, offload_dir=str(tmp_path), execution_device="cpu")
    assert perplexity(model, rows, chunk=8, resume={}).nll == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("family", "batch"), [("llama", 1), ("gemma3", 2)])
def test_reading_in_chunks_makes_no_mask_and_no_copy_of_the_cache(family, batch):
    """Nothing as large as chunk × context, and keys in one place; sliding layers keep the masks of their windows."""

    def elements(tensor):
        return tensor.numel() if tensor.ndim == 4 and tensor.shape[-1] > 400 else 0

    model = bold_model(family, num_key_value_heads=1, max_position_embeddings=1024)
    rows = ids(512, batch=batch)
    with Largest(elements) as seen:
        perplexity(model, rows, chunk=128, batch=batch)
    assert seen.largest <= 64 * 512
    with Largest(elements) as stock, torch.no_grad():
        cache = DynamicCache(config=model.config)
        for i in range(0, 512, 128):
            model(rows[:, i : i + 128], **{cache_argument(model): cache})
    assert stock.largest >= 128 * 512, "the measure sees what it should"


def test_the_attention_chosen_since_is_kept():
    model = bold_model()
    rows = ids(40)
    reader = reading.Reader(model)
    for chosen in ("sdpa", "eager"):
        model.set_attn_implementation(chosen)
        reading.losses(reader, rows, [1, 1], chunk=8)
        assert model.config._attn_implementation == chosen

    def stop(*_):
        raise KeyboardInterrupt

    model.model.layers[1].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        perplexity(model, rows, chunk=8)
    assert model.config._attn_implementation == "eager"
