"""Finished work is found again if all that made it is the same, and measured again if anything is not."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.evaluated import check_cache, compared
from support.prompting import HAY, TOKENIZER
from support.scored import spy_ids
from support.subsets import covering
from support.tiny import small
from tokenizers import Regex, decoders

import rope_patch
from rope_patch.evaluation import finished_work
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.evaluation.retrieval.measure import retrieval
from rope_patch.evaluation.tasks import TASKS
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.formats import FORMATS, Format, nonzero
from rope_patch.modeling.identity import FIXED_TOKENS
from rope_patch.options.evaluation import EvalSpec
from rope_patch.runtime.progress import listen
from rope_patch.texts.builtin_text import builtin_text
from rope_patch.texts.documents import TokenDocument

TEXT = builtin_text("heldout").text[:10_000]


# --- keys: everything that makes a number is a part of the key under which it is stored


def rows(seed=0, special=0):
    ids = torch.randint(3, 900, (48,), generator=torch.Generator().manual_seed(seed))
    return [TokenDocument("row", ids, None, tuple(ids[:special].tolist()))]


def score(model, stored, ids=None, **changes):
    asked = {"window": 48, "buckets": (0, 16, 48), "chunk": 16}
    return perplexity(model, ids or rows(), **{**asked, **changes}, resume=stored)


def ask(model, stored, task="passkey", **changes):
    asked = {"lengths": [150], "depths": [0.5], "samples": 1, "haystack": HAY}
    return retrieval(model, TOKENIZER, task, **{**asked, **changes}, resume=stored)


def through(scheme, measure):
    def measured(model, stored):
        with quantized(model, scheme) as factory:
            return measure(model, stored, cache=factory)

    return measured


def needle(model, stored, edit=lambda suite: None, **changes):
    suite = NeedleSuite(replace(EvalSpec([256, 400], windows=1, bucket=64), **changes), TOKENIZER, TEXT)
    edit(suite)
    return suite.run(model, resume=stored)


def with_another_room(suite):
    suite.room += 1


def with_another_question(suite):
    (one,) = suite.laden
    suite.laden = [replace(one, question=replace(one.question, ids=(*one.question.ids[1:], one.question.ids[0])))]


def with_one_token_less(suite):
    (one,) = suite.laden
    is_text = one.is_text.clone()
    is_text[20] = False
    suite.laden = [replace(one, is_text=is_text)]


def check(model, stored, formats=("k=int3;v=none",), **changes):
    asked = {"lengths": (48,), "windows": 2, "depths": (0.0,), "samples": 1, "text": TEXT, "haystack": "noise"}
    found = check_cache(model, TOKENIZER, formats, **{**asked, **changes}, tolerance=0.0, resume=stored)
    return found.to_json(), [row.scores for row in found.rows]  # the JSON holds no answers


CHANGES = {
    score: {
        "text": partial(score, ids=rows(seed=1)),
        "first token that counts": partial(score, ids=rows(special=4)),
        "ranges": partial(score, buckets=(0, 48)),
        "chunk": partial(score, chunk=24),
        "cache": through("int3", score),
    },
    ask: {
        "prompt": partial(ask, seed=1),
        "chunk": partial(ask, chunk=20),
        "cache": through("int3", ask),
    },
    needle: {
        "text": partial(needle, windows=2),
        "question": partial(needle, edit=with_another_question),
        "lengths": partial(needle, lengths=(256, 320, 400)),
        "ranges": partial(needle, bucket=32),
        "chunk": partial(needle, chunk=100),
        "room of the question": partial(needle, edit=with_another_room),
        "tokens that count": partial(needle, edit=with_one_token_less),
    },
    check: {
        "format": partial(check, formats=("k=int2;v=none",)),
        "lengths": partial(check, lengths=(40, 48)),
        "windows": partial(check, windows=1),
        "chunk": partial(check, chunk=20),
    },
}


@pytest.mark.parametrize(("measure", "part"), [(kind, part) for kind, parts in CHANGES.items() for part in parts])
def test_a_number_is_stored_under_all_that_makes_it(measure, part):
    model = small(num_hidden_layers=1)
    stored = {}
    before = [measure(model, stored)]
    finished = len(stored)
    assert CHANGES[measure][part](model, stored) == CHANGES[measure][part](model, None), "as without finished work"
    assert len(stored) > finished
    finished = len(stored)
    assert [measure(model, stored)] == before and len(stored) == finished, "both are found again"


PARTS_OF_THE_MODEL = {
    "weights": lambda model: model.lm_head.weight.data.mul_(1.001),
    "table": lambda model: rope_patch.apply(model, "p_rope", p=0.5),
    "data type": lambda model: model.double(),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "what was changed in memory": lambda model: model.model.layers[0].register_forward_hook(lambda m, a, out: 2 * out),
}


@covering(part=list(PARTS_OF_THE_MODEL), measure=list(CHANGES))
def test_another_model_is_measured_again(measure, part):
    stored = {}
    measure(small(), stored)
    model = small()
    finished = len(stored)
    PARTS_OF_THE_MODEL[part](model)
    assert measure(model, stored) == measure(model, None) and len(stored) > finished


def test_a_model_that_was_changed_in_memory_is_named_in_one_line_and_found_again_when_it_is_changed_back():
    model = small(num_hidden_layers=1)
    stored = {}
    said = []
    layer = model.model.layers[0]
    attention = model.model.layers[0].self_attn
    with listen(on_sentence=said.append):
        found = []
        for scaling in (attention.scaling, 1.0, attention.scaling):
            layer.self_attn.scaling = scaling
            found.append(score(model, stored).nll)
        assert found[0] == found[2] != found[1] and len(stored) == 2 * 2
        assert len(said) == 1 and "measured again" in said[0]
        for scheme in ("int3", "int2"):
            through(scheme, score)(model, stored)
        assert len(said) == 1, "another cache is no change of the model"


# --- answers are graded when they are read


def tokens_read(model, measure):
    with spy_ids(model) as read:
        found = measure(model)
    return sum(ids.numel() for ids in read) - FIXED_TOKENS, found


def with_a_mended_decoder(model, tokenizer, monkeypatch):
    backend = tokenizer.backend_tokenizer
    monkeypatch.setattr(backend, "decoder", decoders.Sequence([backend.decoder, decoders.Replace(Regex("[a-z]"), "?")]))


def with_other_stops(model, tokenizer, monkeypatch):
    model.generation_config.eos_token_id = list(range(3, 1024))


def with_a_mended_task(model, tokenizer, monkeypatch):
    for name in ("passkey", "niah"):
        monkeypatch.setattr(TASKS[name], "correct", lambda part, output: not output.startswith(part), raising=False)


@pytest.mark.parametrize("measure", [ask, needle])
@pytest.mark.parametrize("change", [with_a_mended_decoder, with_other_stops, with_a_mended_task])
def test_answers_are_graded_by_what_grades_now(measure, change, monkeypatch):
    model = small()
    stored = {}
    before = measure(model, stored)
    change(model, TOKENIZER, monkeypatch)
    read, found = tokens_read(model, lambda model: measure(model, stored))
    assert read == 0 and before != found == measure(model, None)


# --- formats of a user's own


def rounded(x, dim, bits):
    scale = x.abs().amax(dim, keepdim=True) / (2 ** (bits - 1) - 0.5)
    return (x / nonzero(scale)).round() * scale


def test_a_format_that_reads_a_value_at_run_time_is_measured_anew():
    settings = {"bits": 2}
    model = small(num_hidden_layers=1)
    stored = {}
    found = []

    class Reading(Format, name="reading"):
        bits = 8

        def round(self, x, dim):
            return rounded(x, dim, settings["bits"])

    for settings["bits"] in (2, 8):
        found.append(check(model, stored, ("reading",)))
        assert found[-1] == check(model, None, ("reading",))
    FORMATS.pop("reading")
    assert found[0] != found[1]


# --- what it costs


def test_weights_are_hashed_once_and_fixed_tokens_read_once_a_patch(monkeypatch):
    model = small(num_hidden_layers=1)
    counts = {"weights_digest": 0, "fixed_logits": 0}
    for name in counts:
        original = getattr(finished_work, name)

        def counted(*args, name=name, original=original):
            counts[name] += 1
            return original(*args)

        monkeypatch.setattr(finished_work, name, counted)
    asked = {"lengths": [150], "windows": 1, "samples": 1, "depths": [0.5], "text": TEXT, "haystack": "noise"}
    compared(model, TOKENIZER, ["default", "yarn:factor=2"], **asked, tasks=["passkey", "niah"], resume={})
    assert counts == {"weights_digest": 1, "fixed_logits": 2}
    check(model, {}, ("int4-token", "k=int3;v=none"), methods=("default", "nope"))
    assert counts == {"weights_digest": 2, "fixed_logits": 4}
