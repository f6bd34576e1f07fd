"""What commands print beside exact match: the answer first, and what was not measured."""

import pytest
from support.commands import DOMAINS, run
from support.report_pages import row
from support.tiny import LLAMA

from rope_patch.cli.printing import show_page
from rope_patch.evaluation.compare import Comparison
from rope_patch.reports.comparison import page


def comparison(*rows):
    return Comparison(rows, rows[0].scores.spec, 4, "", "a text", model="Tiny")


def printed_page(capsys, shown):
    show_page(page([shown]))
    return capsys.readouterr().out


def test_compare_shows_the_answer_first_then_scores_and_differences(capsys):
    """+.1 nats in each of two windows; four of 18 prompts of 8 tokens fewer are found."""
    both = comparison(row("pi:factor=2", [1.2, 1.3], {(8, 0.5): 2}), row("default", [1.1, 1.2]))
    printed = printed_page(capsys, both)
    answer, table, changes = map(printed.index, ("Perplexity at positions 4-8", "Scores", "Change from"))
    assert answer < table < changes
    (line,) = (line.split() for line in printed[changes:].splitlines() if line.split()[:1] == ["pi:factor=2"])
    assert line[1:5] == ["+10.5", "%", "+10.5", "%"] and "−0.22" in line
    *_, last = str(both).splitlines()  # what a notebook prints
    assert last.startswith("  pi:factor=2: ppl 0-4: +10.5 % (+10.5 % to +10.5 %); ")
    assert "; passkey 4: +0.00 (" in last and "; passkey 8: −0.22 (" in last


@pytest.mark.parametrize("width", [20, 60, 200])
def test_a_narrow_terminal_keeps_names_and_numbers(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    both = comparison(row("yarn:factor=2", [1.0, 1.1]), row("default", [1.1, 1.2]))
    table = printed_page(capsys, both).partition("Scores")[2].partition("ppl: ")[0]
    assert "  yarn:factor=2" in table and "  default" in table
    assert table.count("2.86") == 2 and table.count("3.16") == 2
    assert "0.54" in table, "intervals may be broken, but no number is"
    assert ("0.54 to 1.00" in table) == (width == 200)


@pytest.mark.parametrize(
    "words", [("compare", "--methods", "default yarn"), ("kv-check", "--formats", "fp8")], ids=lambda words: words[0]
)
def test_perplexity_is_measured_and_reported_alone(tmp_path, words):
    command, *words = words
    words += ["--tasks", "", "--lengths", "64 512", "--windows", "2", "--text", DOMAINS, "-o", tmp_path]
    printed = run(command, LLAMA, *words)
    assert "perplexity" in printed and "exact match" not in printed and "no prompt" not in printed
    (report,) = tmp_path.glob("*.html")
    text = report.read_text()
    assert "Haystack" not in text
