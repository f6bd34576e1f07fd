"""The rows that a table is fitted to: text, prompts, and the positions of short ones."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fits import TEXT
from support.prompting import HAY, MAKER, TOKENIZER
from support.subsets import examples

from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.fitting.draw_rows import DrawnRows
from rope_patch.fitting.row_positions import stretched_positions


def rows_of(positions="full", *, answers=True, target=128, seed=1):
    return DrawnRows(TOKENIZER, TEXT, answers=answers, positions=positions, trained=64, target=target, seed=seed)


def drawn(rows, step, goal):
    return [row for part in rows(step, goal) for row in zip(*part[:3], strict=True)]


def test_rows_are_of_text_and_of_prompts():
    rows, lengths = rows_of(), set()
    for step in range(8):
        for goal in (0, 1):
            several = drawn(rows, step, goal)
            lengths.add(len(several[0][0]))
            assert len(several) == (4096 // len(several[0][0]) + 1 - goal) // 2
            assert sum(float(weights.sum()) for *_, weights in several) == pytest.approx(1)
            for ids, labels, weights in several:
                decoded, learned = TOKENIZER.decode(ids), weights > 0
                assert torch.equal(labels != -100, learned) and torch.equal(labels[learned], ids[learned])
                if goal:
                    (digits,) = re.findall(r"pass key is (\d{5})\. Remember", decoded)
                    assert TOKENIZER.decode(ids[learned]) == digits and decoded.endswith(f" {digits}")
                else:
                    assert "pass key" not in decoded and (weights == 0).nonzero().tolist() == [[0]]
    assert min(lengths) < 128 and max(lengths) == 128
    assert rows_of(answers=False).goals == 1


def test_rows_depend_on_seed_and_step_alone():
    ids = [torch.stack([row[0] for row in drawn(rows_of("pose", seed=seed), step, 0)])
           for seed, step in ((1, 3), (1, 3), (2, 3), (1, 4))]  # fmt: skip
    assert torch.equal(ids[0], ids[1]) and not torch.equal(ids[0], ids[2]) and not torch.equal(ids[0], ids[3])


def test_needles_lie_anywhere_and_often_at_the_ends():
    texts = [TOKENIZER.decode(ids, skip_special_tokens=True) for s in range(8) for ids, *_ in drawn(rows_of(), s, 1)]
    first = [text.lstrip().startswith("The pass key is") for text in texts]
    last = [bool(re.search(r"Remember it\. What is the pass key", text)) for text in texts]
    assert all(0.15 < sum(hits) / len(texts) < 0.35 for hits in (first, last))
    assert any(not a and not b for a, b in zip(first, last, strict=True))


def test_rows_that_cannot_be_made_are_refused():
    with pytest.raises(ValueError, match="longer than the text"):
        DrawnRows(TOKENIZER, TEXT[:300], answers=True, positions="full", trained=64, target=4096, seed=0)
    with pytest.raises(ValueError, match="needs at least"):
        DrawnRows(TOKENIZER, TEXT, answers=True, positions="full", trained=16, target=128, seed=0)


# --- skipped positions


def pieces(prompt, positions, decode):
    """The text of a prompt between its skips."""
    cuts = [0, *(i + 1 for i, step in enumerate(positions.diff().tolist()) if step > 1), len(prompt.ids)]
    return [decode(list(prompt.ids[low:high])) for low, high in itertools.pairwise(cuts)]


def decoded(ids):
    return TOKENIZER.decode(ids, skip_special_tokens=True)


@examples
def test_no_needle_and_no_question_is_cut(examples):
    @settings(max_examples=examples, deadline=None)
    @given(depth=st.sampled_from([0.0, 0.01, 0.3, 0.99, 1.0]), seed=st.integers(0, 99), room=st.integers(0, 5000))
    def check(depth, seed, room):
        (prompt,) = MAKER.prompts("passkey", 250, [depth], seed=seed)
        positions = stretched_positions(prompt, MAKER, 250 + room, random.Random(seed))
        assert len(positions) == 250 and int(positions[0]) == 0 and int(positions[-1]) < 250 + room
        assert bool((positions.diff() >= 1).all()), "positions rise"
        parts = pieces(prompt, positions, decoded)
        assert len(parts) <= 3 and sum(prompt.hidden[0][1].strip() in part for part in parts) == 1
        assert parts[-1].endswith(prompt.text[prompt.text.rindex(prompt.question.strip()) :] + prompt.target)

    check()


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.75, 1.0])
def test_a_needle_is_as_far_from_the_question_as_in_a_whole_prompt(depth):
    """The passkey of a prompt of 200 tokens that stands for one of 4000."""
    for seed in range(5):
        (prompt,) = MAKER.prompts("passkey", 200, [depth], seed=seed)
        positions = stretched_positions(prompt, MAKER, 4000, random.Random(seed)).tolist()
        shown = [decoded(list(prompt.ids[: i + 1])) for i in range(200)]
        needle, question = (
            next(place for place, text in zip(positions, shown, strict=True) if words in text)
            for words in ("key is", "What is the pass")
        )
        assert (question - needle) / 4000 == pytest.approx(1 - depth, abs=0.015) and positions[-1] == 3999


class Merging:
    """A tokenizer of characters, in which tokens reach over the ends of a needle and over the start of the question."""

    bos_token_id = None
    pattern = re.compile(r"\S T|\. \S|t\. |.", re.DOTALL)

    def __init__(self):
        self.pieces = {}

    def __call__(self, text, **_):
        if not isinstance(text, str):
            return {"input_ids": [self(item)["input_ids"] for item in text]}
        return {"input_ids": [self.pieces.setdefault(part, len(self.pieces)) for part in self.pattern.findall(text)]}

    def decode(self, ids):
        names = list(self.pieces)
        return "".join(names[i] for i in ids)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_tokens_that_reach_over_an_end_of_a_needle_belong_to_it(depth):
    tokenizer = Merging()
    maker = PromptMaker(tokenizer, HAY)
    for seed in range(20):
        (prompt,) = maker.prompts("passkey", 300, [depth], seed=seed)
        parts = pieces(prompt, stretched_positions(prompt, maker, 2000, random.Random(seed)), tokenizer.decode)
        assert "".join(parts) == prompt.text + prompt.target and len(parts) == (3 if depth == 0.5 else 2)
        assert sum(prompt.hidden[0][1].strip() in part for part in parts) == 1


@pytest.mark.parametrize("goal", [0, 1])
def test_rows_are_short_and_reach_to_the_target(goal):
    reached = []
    for step in range(3):
        for ids, labels, weights, positions in rows_of("pose", target=256)(step, goal):
            assert ids.shape == labels.shape == weights.shape == positions.shape and ids.shape[1] == 64
            assert bool((positions.diff(dim=1) >= 1).all()) and int(positions.max()) < 256
            reached += (positions[:, -1] - positions[:, 0]).tolist()
    assert max(reached) > 245 and min(reached) < 80
    assert all(part[3] is None for part in rows_of()(0, goal)), "whole rows are sent none"
