"""One reading of a window gives what a reading for perplexity and one for each prompt give."""

import pytest
import torch
from support.prompting import TOKENIZER

import rope_patch
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.options.evaluation import EvalSpec
from rope_patch.runtime.progress import listen
from rope_patch.texts.builtin_text import builtin_text

TEXT = builtin_text("heldout").text[:20_000]
SPEC = EvalSpec([256, 512], windows=3, bucket=64)


@pytest.fixture(scope="module", params=[("llama", "passkey"), ("gemma3", "niah")], ids="-".join)
def case(request):
    """A family and a task: one has nothing to do with the other."""
    return request.param


@pytest.fixture(scope="module")
def model(case):
    return rope_patch.load(rope_patch.data_path("assets") / case[0], dtype=torch.float32)


def places(one):
    """Return where the needles of a window begin: each run of tokens that do not count, behind the first."""
    counted = [False, *one.is_text.tolist()[1:]]
    return [i for i in range(1, len(counted)) if counted[i - 1] and not counted[i]]


@pytest.fixture(scope="module")
def suite(case):
    return NeedleSuite(SPEC, TOKENIZER, TEXT).asking(case[1])


@torch.no_grad()
def test_it_gives_what_whole_passes_of_transformers_give(model, suite):
    result = suite.run(model)
    losses = {}
    for number, one in enumerate(suite.laden):
        ids = one.window.source.ids[: 512 - suite.room]
        found = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1].double(), ids[1:], reduction="none")
        # The question at 256 tokens ends a part, whose last state predicts no token.
        counted = [i for i in range(1, len(ids)) if one.is_text[i] and i != 256 - suite.room]
        losses[number] = sum(float(found[i - 1]) for i in counted), len(counted)
        for length in (256, 512):
            prompt = torch.cat([ids[: length - suite.room], torch.tensor(one.question.ids)])
            assert len(prompt) <= length
            logprobs = model(prompt[None]).logits[0].double().log_softmax(-1)
            answer = range(len(prompt) - one.question.answer, len(prompt))
            expected = sum(float(logprobs[i - 1, prompt[i]]) for i in answer)
            sample = result.retrieval[suite.task].samples(length)[number]
            assert sample.logprob == pytest.approx(expected, abs=2e-3)
            right = all(int(logprobs[i - 1].argmax()) == int(prompt[i]) for i in answer)
            assert sample.correct == right
    nll = sum(loss for loss, _ in losses.values()) / sum(count for _, count in losses.values())
    assert result.perplexity.nll == pytest.approx(nll, abs=1e-4)
    assert [document.total_tokens for document in result.perplexity.documents] == [n for _, n in losses.values()]


def test_the_needle_stands_between_words_in_the_middle_and_does_not_count(suite):
    needle = {"passkey": "The pass key is", "niah": "The magic number of"}[suite.task]
    for one in suite.laden:
        (place,) = places(one)
        shown = TOKENIZER.decode(one.window.source.ids[place : place + 24].tolist())
        answer = one.question.parts[0]
        assert shown.strip().startswith(needle) and answer in shown
        size = len(TOKENIZER(shown[: shown.index(answer) + len(answer) + 1])["input_ids"])
        assert not one.is_text[place : place + size].any() and one.is_text[place - 1]
        assert one.is_text.sum() > 0.9 * len(one.is_text)
        assert abs(place - 120) < 40


def test_the_text_is_that_of_plain_windows():
    spec = EvalSpec([256, 512], windows=3)
    plain = EvalSuite(spec, TOKENIZER, text=TEXT)
    suite = NeedleSuite(spec, TOKENIZER, TEXT)
    for one, window in zip(suite.laden, plain.windows, strict=True):
        assert torch.equal(one.window.source.ids[: places(one)[0]], window.ids[: places(one)[0]])
        assert torch.equal(one.window.source.ids[-200:], window.ids[-200:])


def test_finished_windows_are_not_read_again(model, suite):
    stored = {}
    read = []

    def stop(stage, tokens):
        read.append(tokens)
        if sum(read) > 600:
            raise KeyboardInterrupt

    with listen(stop), pytest.raises(KeyboardInterrupt):
        suite.run(model, resume=stored)
    assert len(stored) == 1 + 1, "the fixed logits, and the first window"
    again = []
    with listen(lambda stage, tokens: again.append(tokens)):
        resumed = suite.run(model, resume=stored)
    assert sum(again) == 2 * 512 and resumed == suite.run(model)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (EvalSpec([256], windows=1, tasks=["sums"]), "sums"),
        (EvalSpec([64], windows=1), "64 tokens"),
        (EvalSpec([256, 257], windows=1), "beyond 256"),
    ],
)
def test_what_does_not_fit_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        NeedleSuite(spec, TOKENIZER, TEXT)


@pytest.mark.parametrize("lengths", [[256, 300], [256, 512, 777]], ids=str)
def test_any_length_has_text_in_each_of_its_ranges(model, lengths):
    """Questions take the place of text before each length, which is no reason to lose a range of positions."""
    suite = NeedleSuite(EvalSpec(lengths, windows=1), TOKENIZER, TEXT)
    found = suite.run(model).perplexity
    for start, stop in zip([0, *lengths[:-1]], lengths, strict=True):
        assert found.between(start, stop) > 1
