"""What commands print beside exact match: a few answers and what was not measured."""

from __future__ import annotations

import pytest
from support.commands import DOMAINS, run
from support.report_pages import row

from rope_patch import data_path
from rope_patch.cli.compare import print_table
from rope_patch.evaluation.compare import Comparison
from rope_patch.evaluation.shown_answers import EXACT_MATCH


def comparison(*rows):
    return Comparison(rows, rows[0].scores.spec, 4, "", "a text", None, model="Tiny")


def test_compare_shows_a_wrong_answer_and_a_right_one(capsys):
    print_table(comparison(row("default", [1.0, 1.1], {(8, 0.5): 0})))
    printed = capsys.readouterr().out
    assert f"{EXACT_MATCH}, as in:\n  default, passkey, 8 tokens, depth 50 %: asked for 12, answered" in printed
    assert '"12" (wrong)\n  default, passkey, 4 tokens, depth 0 %: asked for 12, answered "12" (right)\n' in printed


def test_compare_shows_differences_from_the_unpatched_model(capsys):
    """+.1 nats in each of two windows is 10.5 %; four of 18 prompts of 8 tokens fewer are found."""
    worse = row("pi:factor=2", [1.2, 1.3], {(8, 0.5): 2})
    both = comparison(worse, row("default", [1.1, 1.2]))
    print_table(both)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  pi:factor=2: ppl"))
    first, *_, last = str(both).splitlines()  # what a notebook prints
    assert (first, last) == ("Tiny, trained at 4 tokens", line)
    assert "  default: ppl 0-4 3.16, ppl 4-8 3.16, passkey 4 1.00" in str(both)
    assert line.startswith(
        "  pi:factor=2: ppl 0-4: +10.5 % (+10.5 % to +10.5 %); ppl 4-8: +10.5 % (+10.5 % to +10.5 %); "
    )
    assert "; passkey 4: +0.00 (" in line and "; passkey 8: −0.22 (" in line


def test_compare_of_patched_models_alone_shows_differences_from_the_first(capsys):
    print_table(comparison(row("yarn:factor=2", [1.0, 1.1]), row("pi:factor=2", [1.2, 1.4])))
    printed = capsys.readouterr().out
    assert (
        "Against yarn:factor=2, paired by window and by prompt, with 95% intervals:\n  pi:factor=2: ppl 0-4: +"
        in printed
    )


def test_one_method_has_no_differences(capsys):
    print_table(comparison(row("default", [1.0, 1.1])))
    assert "Against" not in capsys.readouterr().out


def test_compare_says_that_the_unpatched_model_was_not_measured(capsys):
    print_table(comparison(row("yarn:factor=2", [1.0, 1.1], {(4, depth): 0 for depth in (0.0, 0.5, 1.0)})))
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("note: 0% of the passkey prompts of 4 tokens are answered") and "--methods" in note


@pytest.mark.parametrize(
    "words", [("compare", "--methods", "default yarn"), ("kv-check", "--formats", "fp8")], ids=lambda words: words[0]
)
def test_perplexity_is_measured_and_reported_alone(tmp_path, words):
    command, *words = words
    words += ["--tasks", "", "--lengths", "64 512", "--windows", "2", "--text", DOMAINS, "-o", tmp_path]
    printed = run(command, data_path("assets") / "llama", *words)
    assert "perplexity" in printed and "exact match" not in printed and "no prompt" not in printed
    (report,) = tmp_path.glob("*.html")
    text = report.read_text()
    assert "A few answers" not in text and "Haystack" not in text
