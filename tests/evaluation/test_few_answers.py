"""What reports show beside exact match: a few answers, and what was not measured."""

from __future__ import annotations

import pytest
from support.evaluated import answered, result_of

from rope_patch.evaluation.compare import Comparison, Row
from rope_patch.evaluation.retrieval.measure import RetrievalCell, RetrievalResult
from rope_patch.reports.comparison import answers

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


def test_a_wrong_answer_comes_first_and_then_a_right_one_each_with_length_and_depth():
    """Of six answers the last two are right: those of the second haystack at .5 and 1."""
    (table,) = answers([("yarn", scores((2, 6, 0)))])
    rows = [(name, length, depth, verdict.text) for name, _, length, depth, _, _, verdict in table.rows]
    assert rows == [("yarn", "64", "0 %", "wrong"), ("yarn", "64", "50 %", "right"), ("yarn", "256", "0 %", "wrong")]
    assert [row[5].text for row in table.rows] == ['"64 0 0.0"', '"64 4 0.5"', '"256 0 0.0"']


# --- the unpatched model was not measured


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
