"""Positions that skip ahead: what is drawn, and which options of them exclude each other."""

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rope_patch.modeling.positions import skipped_positions


@settings(deadline=None, max_examples=60)
@given(size=st.integers(5, 40), room=st.integers(0, 60), chunks=st.integers(1, 5), seed=st.integers(0, 99))
def test_every_chunk_counts_on_and_the_next_one_skips_ahead(size, room, chunks, seed):
    positions = skipped_positions(random.Random(seed), size, size + room, chunks).tolist()
    steps = [after - before for before, after in itertools.pairwise(positions)]
    assert len(positions) == size and positions[0] == 0 and positions[-1] < size + room
    assert all(step >= 1 for step in steps) and sum(step > 1 for step in steps) < chunks


def test_skips_of_every_length_up_to_the_target_are_drawn():
    ends = {int(skipped_positions(random.Random(seed), 8, 16)[-1]) for seed in range(200)}
    assert ends == set(range(7, 16))


def test_skips_are_drawn_uniformly_as_the_paper_says():
    """With two chunks half of the skips are below half of the room; the larger of two draws would be in a quarter."""
    skips = [int(skipped_positions(random.Random(seed), 8, 1008)[-1]) - 7 for seed in range(2000)]
    assert abs(sum(skip <= 500 for skip in skips) / 2000 - 0.5) < 0.05


def test_what_is_drawn_for_a_seed_stays_what_it_was():
    """So that a run that was begun goes on with the positions that it had."""
    assert [skipped_positions(random.Random(f"3/{i}"), 10, 777, 3).tolist() for i in range(2)] == [
        [0, 1, 2, 3, 4, 5, 6, 116, 117, 536],
        [0, 1, 2, 91, 92, 93, 94, 98, 99, 100],
    ]
