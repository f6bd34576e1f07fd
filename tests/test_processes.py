"""Several processes save one model: the first one writes, the others wait, and none hangs or breaks the folder."""

from __future__ import annotations

import json

import pytest
import saving_child
from forks import together

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What two processes saw."""
    root = tmp_path_factory.mktemp("processes")
    errors = together(lambda rank: saving_child.main(root), root)
    return [json.loads((root / f"outcomes-{rank}.json").read_text()) for rank in range(2)], errors


def test_accelerates_idiom_and_a_call_in_every_process_write_whole_folders(outcomes):
    for each in outcomes[0]:
        for turn in range(3):
            assert (each[f"flag {turn}"], each[f"every rank {turn}"], each[f"whole {turn}"]) == ("ok", "ok", True)


def test_whoever_returns_finds_the_folder_whole(outcomes):
    assert [each["whole at once"] for each in outcomes[0]] == [True, True]
    assert [each["twice into one folder"] for each in outcomes[0]] == ["ok", "ok"]


def test_the_first_process_may_save_alone(outcomes):
    assert [(each["first alone"], each["whole alone"]) for each in outcomes[0]] == [("ok", True)] * 2


def test_gathered_weights_are_those_of_the_first_process(outcomes):
    assert [(each["gathered"], each["whole gathered"]) for each in outcomes[0]] == [("ok", True)] * 2


def test_an_error_of_the_first_process_is_everyones(outcomes):
    first, second = outcomes[0]
    assert first["in the way"].startswith("NotADirectoryError: ")
    assert second["in the way"] == f"RuntimeError: in the first process: {first['in the way']}"


def test_a_first_process_that_never_comes_is_waited_for_and_told_of(outcomes):
    (first, second), errors = outcomes
    assert first["never came"] == "ok"
    assert second["never came"].startswith("RuntimeError: the first process did not finish, or never began: save to ")
    assert "still waiting for the first process to finish" in errors[1]


def test_an_adapter_has_its_record_and_nothing_is_left(outcomes):
    assert [(each["adapter"], each["record"], each["left"]) for each in outcomes[0]] == [("ok", "yarn", [])] * 2
