"""The ledger of the site: what stands in the results, once, and which comparisons of others are taken."""

import re
import runpy
from pathlib import Path

import pytest
from support.commands import run
from support.patches import read_json
from support.tiny import LLAMA

SCRIPT = Path(__file__).parents[2] / "docs" / "ledger.py"
pytestmark = pytest.mark.skipif(not SCRIPT.is_file(), reason="not in the source distribution")


@pytest.fixture(scope="module")
def ledger():
    return runpy.run_path(str(SCRIPT))


def rows(page):
    found = re.findall(r"<tr>(.*?)</tr>", page)[1:]  # the first holds the headings
    return [[re.sub("<[^>]*>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in found]


def test_each_cell_stands_once_and_what_was_not_measured_is_empty(ledger):
    table = rows(ledger["page"]())
    names = [(*row[:4], row[9].split(" ")[0]) for row in table]
    assert len(set(names)) == len(names) > 100
    found = dict(zip(names, table, strict=True))
    yarn = found["SmolLM2-135M-Instruct", "yarn:factor=2", "8192", "16384", "study_smollm2"]
    assert yarn[8].startswith("6 of 8 (0.41") and yarn[5].startswith("+3.41 %")  # the README: 3 to 4 %
    empty = [row for row in table if not row[9]]
    assert all(row[4:] == [""] * 6 for row in empty)
    assert ["SmolLM2-135M-Instruct", "longrope", "8192", "16384"] in [row[:4] for row in empty]


@pytest.mark.full  # it runs a comparison
def test_a_comparison_is_taken_or_refused_with_the_reason(ledger, tmp_path):
    asked = ("--lengths", "64", "--windows", "2", "--samples", "1", "--depths", "0.5", "--no-report")
    run("compare", LLAMA, "--methods", "default yarn:factor=4", *asked, "-o", tmp_path)
    path = tmp_path / "comparison.json"
    assert ledger["main"](["--check", str(path)]) == 0
    before, after = ledger["of_comparison"](read_json(path), path)
    assert (before.method, after.method, after.length) == ("default", "yarn:factor=4", 64)
    assert len(after.losses(beyond=False)) == 2 and after.answered[1] == 1
    for change, said in (
        (lambda data: data.update(schema=4), "schema"),
        (lambda data: data["rows"].pop(0), "default"),
    ):
        data = read_json(path)
        change(data)
        assert said in ledger["refused"](data)
