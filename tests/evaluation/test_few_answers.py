"""Scores within the trained length that reports warn of."""

from __future__ import annotations

import pytest
from support.evaluated import answered, result_of

from rope_patch.evaluation.compare import Comparison, Row
from rope_patch.evaluation.retrieval.measure import RetrievalCell, RetrievalResult

DEPTHS = (0.0, 0.5, 1.0)


def scores(right):
    """Two haystacks at three depths of each length: so many answers are right, from the last one asked backwards.

    The output names length, haystack and depth.
    """
    cells = []
    for length, count in zip((64, 128, 256), right, strict=True):
        for at, depth in enumerate(DEPTHS):
            places = [3 * haystack + at for haystack in range(2)]
            samples = [answered("7", f"{length} {i} {depth}", i >= 6 - count, -1.0) for i in places]
            cells.append(RetrievalCell(length, depth, tuple(samples)))
    return result_of(None, RetrievalResult("passkey", tuple(cells), 0, "noise", "", None, ()))


PATCHED = {"environment": {"patch before": "pi:factor=2"}}


@pytest.mark.parametrize(
    ("right", "trained", "fields", "words"),
    [
        ({"yarn": (4, 0, 0), "pi": (2, 0, 0)}, 64, {}, ("4 of 6", "default")),
        ({"pi": (2, 1, 0)}, 200, {}, ("1 of 6", "128")),  # the worst within it
        ({"default": (2, 0, 0), "yarn": (2, 0, 0)}, 64, {}, ("2 of 6", "without a patch")),
        ({"yarn": (5, 0, 0)}, 64, {}, None),  # answered: .83 of .75
        ({"yarn": (5, 0, 0), "pi": (0, 0, 0)}, 64, {}, None),  # one method does, so the task is not too hard
        ({"yarn": (0, 0, 0)}, 32, {}, None),  # nothing was measured within the trained length
        ({"yarn": (0, 0, 0)}, 64, PATCHED, None),
    ],
)
def test_low_scores_within_the_trained_length_are_warned_of(right, trained, fields, words):
    rows = tuple(Row(method, scores(counts), ()) for method, counts in right.items())
    warnings = Comparison(rows, rows[0].scores.spec, trained, "", "", None, **fields).warnings
    assert len(warnings) == (words is not None)
    assert all(word in warnings[0] for word in words or ())
