"""The golden record: every probe is in it, and a number that changed is found."""

from __future__ import annotations

import copy
import json

import golden
import pytest


@pytest.fixture
def record():
    return json.loads(golden.RECORD.read_text("utf-8"))


def test_every_probe_is_in_the_record_and_none_failed(record):
    assert set(record) == {"environment", *golden.PROBES}
    assert len(record["tables"]) == len(golden.SHAPES) == 35
    assert not [path for path, _ in golden.leaves(record) if path.endswith("failed")]


def test_a_changed_number_is_found(record):
    assert golden.differences(record, record) == ([], 0.0)
    changed = copy.deepcopy(record)
    changed["tables"]["qwen3"]["p_rope:p=0.75"] = "of another table"
    changed["compare"]["llama"]["default"]["nll"] *= 1 + 1e-3
    changed["compare"]["llama"]["default"]["tokens"] += 1
    del changed["plan"]
    lines, _ = golden.differences(record, changed, tolerance=1e-4)
    assert len(lines) == 3 + len(record["plan"])
    lines, largest = golden.differences(record, changed, tolerance=1e-2)
    assert len(lines) == 2 + len(record["plan"]) and largest == pytest.approx(1e-3, rel=0.01)


def test_what_is_absent_on_one_side_is_not_compared():
    assert golden.differences({"a": {"b": 1.0}}, {"a": golden.ABSENT}) == ([], 0.0)


def test_a_commit_is_measured_by_its_own_script(tmp_path):
    own = tmp_path / "tests" / "tools" / "golden.py"
    own.parent.mkdir(parents=True)
    own.touch()
    assert golden.script_of(tmp_path) == own


def test_a_commit_without_a_script_is_measured_by_this_one(tmp_path):
    assert golden.script_of(tmp_path).samefile(golden.__file__)
