"""Fits to rows at skipped positions: where prompts are cut, what the model is given, and what such a fit refuses."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from fits import ASSETS, TEXT, Verdicts, fit_by_name, fitted, run_of
from hypothesis import given, settings
from hypothesis import strategies as st
from prompting import HAY, MAKER, ROOM, TOKENIZER, hay_of
from subsets import examples
from tiny import small

import rope_patch
from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.tasks import TASKS
from rope_patch.fitting import Objective
from rope_patch.fitting.positions import stretched_positions
from rope_patch.fitting.rows import Rows
from rope_patch.fitting.texts import TextPart
from rope_patch.patching.locate import find_rotary

POSE = Objective(positions="pose", row_length=48, mix=0.0)


# --- prompts


def pieces(prompt, positions, decode):
    """The text of a prompt between its skips."""
    cuts = [0, *(i + 1 for i, step in enumerate(positions.diff().tolist()) if step > 1), len(prompt.ids)]
    return [decode(list(prompt.ids[low:high])) for low, high in itertools.pairwise(cuts)]


def decoded(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


MAKERS = {task: PromptMaker(TOKENIZER, hay_of(task)) for task in TASKS}


@examples
@pytest.mark.parametrize("task", list(TASKS))
def test_no_needle_and_no_question_is_cut(task, examples):
    @settings(max_examples=examples, deadline=None)
    @given(
        depths=st.lists(st.sampled_from([0.0, 0.01, 0.3, 0.5, 0.99, 1.0]), min_size=1, max_size=4),
        seed=st.integers(0, 99),
        room=st.integers(0, 5000),
    )
    def check(depths, seed, room):
        length = 250 + ROOM.get(task, 0)
        (prompt, *_) = MAKERS[task].prompts(task, length, depths, seed=seed)
        positions = stretched_positions(prompt, MAKERS[task], length + room, random.Random(seed))
        assert len(positions) == length and int(positions[0]) == 0 and int(positions[-1]) < length + room
        assert bool((positions.diff() >= 1).all()), "positions rise"
        parts = pieces(prompt, positions, decoded)
        assert len(parts) <= len(prompt.hidden) + 2
        for _, needle in prompt.hidden:
            assert sum(needle.strip() in part for part in parts) == 1
        asked = prompt.text[prompt.text.rindex(prompt.question.strip()) :] + prompt.target
        assert parts[-1].endswith(asked)

    check()


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_needle_is_as_far_from_the_question_as_in_a_whole_prompt(depth):
    """The passkey of a prompt of 200 tokens that stands for one of 4000."""
    for seed in range(10):
        (prompt,) = MAKER.prompts("passkey", 200, [depth], seed=seed)
        positions = stretched_positions(prompt, MAKER, 4000, random.Random(seed)).tolist()
        shown = [decoded(list(prompt.ids[: i + 1])) for i in range(200)]
        needle = next(place for place, text in zip(positions, shown, strict=True) if "key is" in text)
        question = next(place for place, text in zip(positions, shown, strict=True) if "What is the pass" in text)
        assert (question - needle) / 4000 == pytest.approx(1 - depth, abs=0.015)
        assert positions[-1] == 3999


def test_text_is_cut_at_any_place():
    (prompt,) = MAKER.prompts("passkey", 120, [0.5], seed=1)
    cuts = {
        tuple((stretched_positions(prompt, MAKER, 500, random.Random(seed)).diff() > 1).nonzero().flatten().tolist())
        for seed in range(300)
    }
    befores, afters = ({cut[i] for cut in cuts} for i in (0, 1))
    assert all(len(cut) == 2 for cut in cuts) and len(befores) > 25 and len(afters) > 25
    assert 0 in befores, "right after the first token too"


def test_a_prompt_that_stands_for_itself_is_not_cut():
    (prompt,) = MAKER.prompts("passkey", 120, [0.5], seed=1)
    assert stretched_positions(prompt, MAKER, 120, random.Random(0)).tolist() == list(range(120))


class Merging:
    """A tokenizer of characters, in which tokens reach over the ends of a needle and over the start of the question."""

    bos_token_id = None
    pattern = re.compile(r"\S T|\. \S|t\. |.", re.DOTALL)

    def __init__(self):
        self.pieces = {}

    def __call__(self, text, **_):
        if not isinstance(text, str):
            return {"input_ids": [self(item)["input_ids"] for item in text]}
        parts = self.pattern.findall(text)
        return {"input_ids": [self.pieces.setdefault(part, len(self.pieces)) for part in parts]}

    def decode(self, ids):
        names = list(self.pieces)
        return "".join(names[i] for i in ids)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_tokens_that_reach_over_an_end_of_a_needle_belong_to_it(depth):
    tokenizer = Merging()
    maker = PromptMaker(tokenizer, HAY)
    for seed in range(40):
        (prompt,) = maker.prompts("passkey", 300, [depth], seed=seed)
        parts = pieces(prompt, stretched_positions(prompt, maker, 2000, random.Random(seed)), tokenizer.decode)
        assert "".join(parts) == prompt.text + prompt.target and len(parts) == (3 if depth == 0.5 else 2)
        assert sum(prompt.hidden[0][1].strip() in part for part in parts) == 1
        assert f"What is the pass key? The pass key is {prompt.parts[0]}" in parts[-1]


# --- rows


def of(objective, *, target=512, tokens=512, seed=1):
    return Rows(TOKENIZER, [TextPart("text", TEXT)], objective, 64, target, tokens, seed)


@pytest.mark.parametrize("goal", [0, 1])
def test_rows_are_short_and_reach_to_the_target(goal):
    rows, reached = of(Objective(positions="pose", row_length=64)), []
    for step in range(40):
        for tokens, labels, weights, positions in rows(step, goal):
            assert tokens.shape == labels.shape == weights.shape == positions.shape and tokens.shape[1] == 64
            assert bool((positions.diff(dim=1) >= 1).all()) and int(positions.max()) < 512
            reached += (positions[:, -1] - positions[:, 0]).tolist()
    assert len(reached) == 160
    if goal:  # half of them stand for prompts of the target, the others for shorter ones
        assert 0.35 < sum(distance > 490 for distance in reached) / 160 < 0.75 and min(reached) < 100
    else:
        assert max(reached) > 490 and min(reached) < 80


def test_the_lengths_that_rows_stand_for_follow_the_share_of_full_ones():
    ends = {}
    for full in (0.0, 1.0):
        rows = of(Objective(positions="pose", row_length=64, full=full))
        ends[full] = [int(end) + 1 for step in range(20) for part in rows(step, 1) for end in part[3][:, -1]]
    assert sum(end > 450 for end in ends[1.0]) == 80 > 4 * sum(end > 450 for end in ends[0.0])
    assert min(ends[0.0]) < 100


def test_rows_of_text_have_as_many_chunks_as_asked_for():
    rows = of(Objective(positions="pose", chunks=4))
    skips = [int((row.diff() > 1).sum()) for step in range(20) for part in rows(step, 0) for row in part[3]]
    assert max(skips) == 3
    assert max(int((row.diff() > 1).sum()) for part in of(Objective(positions="pose"))(0, 0) for row in part[3]) == 1


def test_processes_divide_rows_with_their_positions():
    rows = of(POSE)

    def drawn(goal, *share):
        return sorted((*row, *places) for part in rows(7, goal, *share) for row, places in listed(part))

    def listed(part):
        return zip(part[0].tolist(), part[3].tolist(), strict=True)

    for goal in (0, 1):
        whole, first, second = drawn(goal), drawn(goal, 0, 2), drawn(goal, 1, 2)
        assert whole == sorted(first + second) and abs(len(first) - len(second)) <= 1 and len(whole) == 5


def test_rows_of_full_length_are_sent_no_positions():
    assert all(part[3] is None for goal in (0, 1) for part in of(Objective(), tokens=1024)(0, goal))


def test_rows_that_stand_for_shorter_ones_than_themselves_skip_nothing():
    rows = of(Objective(positions="pose", row_length=256, full=0.0), target=256)
    assert all(torch.equal(row, torch.arange(256)) for part in rows(0, 1) for row in part[3])


@pytest.mark.parametrize(
    ("trained", "target", "asked", "longest"),
    [
        (256, 512, None, 256),
        (256, 1024, None, 256),
        (256, 4096, None, 1024),
        (64, 16384, None, 2048),
        (8192, 16384, None, 2048),
        (8192, 16384, 4096, 4096),
        (64, 16384, 128, 128),
    ],
)
def test_rows_have_the_trained_length_or_a_quarter_of_the_target_and_2048_tokens_at_most(
    trained, target, asked, longest
):
    assert Objective(positions="pose", row_length=asked).longest_row(trained, target) == longest
    assert Objective().longest_row(trained, target) == target


# --- the fit


def explicit_loss(model, rows, *, skip):
    """The loss of the text of the first step by transformers' own logits, under a causal mask that is written out."""
    total = 0.0
    for tokens, _, weights, positions in rows(0, 0):
        size = tokens.shape[1]
        mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
        places = positions if skip else torch.arange(size)[None]
        with torch.no_grad():
            logits = model(tokens, position_ids=places, attention_mask=mask, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        total += float((losses * weights[:, 1:].flatten()).sum())
    return total


def test_a_step_reads_its_rows_at_their_positions():
    run, *_ = run_of(TOKENIZER, Verdicts(), objective=POSE)
    model = small()
    rope_patch.apply(model, "yarn:factor=1.5", target_length=96)
    skipped, plain = (explicit_loss(model, run.rows, skip=skip) for skip in (True, False))
    run(1, 0.01, 1, 3, False)
    assert run.losses[0] == pytest.approx(skipped, abs=1e-4) and abs(skipped - plain) > 1e-2


def test_a_step_has_two_rows_by_default_and_4096_tokens_at_least():
    counts = []

    def note(stage, tokens):
        counts.append(tokens if stage.endswith(": fitting") else 0)

    fitted(small(), TOKENIZER, objective=POSE, steps=1, checks=1, batch_tokens=None, on_progress=note)
    assert sum(counts) == 4096 // 48 * 48
    assert max(counts) == 2048 // 48 * 48, "and so many rows are read side by side"


def cosines(model, layer):
    """Collect what the attention of a layer is given as cosines while a table is fitted."""
    collected = []

    def note(module, args, kwargs):
        if torch.is_grad_enabled():
            collected.append((kwargs.get("position_embeddings") or args[1])[0].detach().clone())

    model.model.layers[layer].self_attn.register_forward_pre_hook(note, with_kwargs=True)
    return collected


def test_sliding_layers_with_a_table_of_their_own_get_consecutive_positions():
    """Their window counts tokens: behind a skip they would meet distances that no window holds."""
    model = small("gemma3")
    assert model.config.layer_types == ["sliding_attention", "full_attention"] and model.config.sliding_window < 96
    sliding, full = cosines(model, 0), cosines(model, 1)
    fitted(model, TOKENIZER, objective=POSE, init="abf:factor=10", steps=1, checks=1)
    other = small("gemma3")
    rope_patch.apply(other, "abf:factor=10", target_length=96)
    rotary, rows = find_rotary(other).module, Rows(TOKENIZER, [TextPart("text", TEXT)], POSE, 64, 96, 192, 0)
    (sent,) = [part[3] for part in rows(0, 0)]
    x = torch.zeros(1)
    torch.testing.assert_close(sliding[0], rotary(x, torch.arange(48)[None], "sliding_attention")[0])
    torch.testing.assert_close(full[0], rotary(x, sent, "full_attention")[0])
    assert not torch.equal(sent, torch.arange(48).expand_as(sent))


@pytest.mark.parametrize(("family", "window"), [("mistral", 32), ("gemma2", 16), ("mistral", 95)])
def test_layers_that_share_their_table_with_sliding_ones_are_refused(family, window):
    model = small(family, sliding_window=window)
    rotary = find_rotary(model).module
    message = f"has one rotary table for all layers, and its layers of sliding_attention see {window} tokens of 96"
    with pytest.raises(ValueError, match=message):
        fitted(model, TOKENIZER, objective=POSE)
    assert find_rotary(model).module is rotary and rope_patch.inspect(model).record is None


@pytest.mark.parametrize("window", [96, None])
def test_a_window_that_hides_nothing_is_no_obstacle(window):
    patch = fitted(small("mistral", sliding_window=window), TOKENIZER, objective=POSE, steps=1, checks=1)
    assert len(patch.losses["yarn:factor=1.5"]) == 1


@pytest.mark.parametrize("takes", ["any", "none"])
def test_a_model_that_counts_its_tokens_itself_is_refused(takes):
    model = small()
    forward = model.model.forward
    if takes == "any":
        model.model.forward = lambda position_ids=None, **kwargs: forward(**kwargs)
    else:
        model.model.forward = lambda input_ids, attention_mask=None, use_cache=None: forward(input_ids=input_ids)
    with pytest.raises(ValueError, match="does not hand position_ids to its rotary embedding, so positions cannot be"):
        fitted(model, TOKENIZER, objective=POSE)
    assert rope_patch.inspect(model).record is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": Objective(positions="pose", row_length=97)}, "row_length must be <= 96, the target"),
        ({"objective": Objective(positions="pose", chunks=65)}, "row_length must be >= 65, a token for each chunk"),
        (
            {"objective": POSE, "batch_tokens": 95},
            "batch_tokens must be >= 96, a row of text and one of retrieval of 48 tokens, got 95",
        ),
        ({"objective": Objective(positions="pose", row_length=20)}, "a prompt of passkey needs at least"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_made_are_refused_before_anything_is_changed(changes, message):
    model = small()
    rotary = find_rotary(model).module
    with pytest.raises(ValueError, match=message):
        fitted(model, TOKENIZER, **changes)
    assert find_rotary(model).module is rotary


def test_an_interrupted_fit_goes_on():
    result_cache, stages = {}, []

    def interrupt(stage, tokens):
        stages.append(stage)
        if stage.endswith(": fitting") and "step 2: evaluation" in stages:
            raise KeyboardInterrupt

    whole = fitted(small(), TOKENIZER, objective=POSE)
    with pytest.raises(KeyboardInterrupt):
        fitted(small(), TOKENIZER, objective=POSE, resume=result_cache, on_progress=interrupt)
    steps = []
    again = fitted(small(), TOKENIZER, objective=POSE, resume=result_cache, on_progress=lambda s, _: steps.append(s))
    assert again.losses == whole.losses and again.candidates == whole.candidates
    assert sum(stage.endswith(": fitting") for stage in steps) == 2 * 2, "two steps of four, text and prompts"


@pytest.mark.parametrize("other", [Objective(), Objective(positions="pose", row_length=49)])
def test_what_was_kept_of_other_rows_is_not_taken_up(other):
    result_cache, fewer = {}, {"steps": 2, "checks": 1, "windows": 1}
    fitted(small(), TOKENIZER, objective=other, resume=result_cache, **fewer)
    again, fresh = (
        fitted(small(), TOKENIZER, objective=POSE, resume=resume, **fewer) for resume in (result_cache, None)
    )
    assert again.losses == fresh.losses and again.candidates == fresh.candidates


@pytest.mark.full
def test_such_a_fit_helps_the_bundled_checkpoint():
    """Rows of 256 tokens; better than YaRN on whole windows of 1024 that the choice never saw, passkeys level."""
    model = rope_patch.load(ASSETS / "llama", dtype=torch.float32)
    pose = Objective(positions="pose")
    asked = {"steps": 16, "checks": 1, "windows": 4, "samples": 2, "depths": (0.0, 0.5, 1.0), "batch_tokens": 1024}
    patch = fit_by_name(model, TOKENIZER, target_length=1024, objective=pose, **asked)
    patch.restore()
    methods = ["yarn:factor=4", patch.method]
    comparison = compare(model, TOKENIZER, methods, EvalSpec([256, 1024], windows=8, bucket=256, samples=2))
    for low, high in ((0, 256), (256, 1024)):
        assert comparison.difference(str(patch.method), methods[0], "perplexity", high, low).high < 0
    for length in (256, 1024):
        assert comparison.difference(str(patch.method), methods[0], "retrieval", length).high >= 0
