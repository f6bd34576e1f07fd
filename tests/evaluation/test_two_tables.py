"""Patches of two tables in the evaluations: what is measured on which side of the switch."""

from __future__ import annotations

import pytest
import torch
from support.tiny import ids, small

import rope_patch
from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.modeling.visit_states import visit_states
from rope_patch.options.evaluation import EvalSpec
from rope_patch.patching.install import patched

LONG, BOTH = "yarn:factor=4", "yarn:factor=4@64"
SPEC = EvalSpec((64, 128, 256), windows=2, depths=(0.0, 1.0), samples=1, bucket=64, haystack="noise")


@pytest.fixture(scope="module")
def rows(tokenizer):
    """The scores of the unpatched model, of the long table and of both, on a tiny random model."""
    comparison = compare(small(), tokenizer, ["default", LONG, BOTH], SPEC)
    return comparison, {row.method: row.scores for row in comparison.rows}


def test_perplexity_is_that_of_the_unpatched_model_up_to_the_switch_and_of_the_long_table_beyond(rows):
    default, long, both = (rows[1][name].perplexity for name in ("default", LONG, BOTH))
    assert both.between(0, 64) == pytest.approx(default.between(0, 64), rel=1e-6)
    assert both.between(0, 64) != pytest.approx(long.between(0, 64), rel=1e-4)
    assert both.between(64, 256) == pytest.approx(long.between(64, 256), rel=1e-6)
    assert both.tokens == long.tokens
    assert both.nll == pytest.approx(sum(b.nll * b.tokens for b in both.buckets) / both.tokens, rel=1e-9)
    assert both.stderr is not None and both.bits_per_byte == pytest.approx(long.bits_per_byte * both.nll / long.nll)


def test_each_prompt_is_read_under_the_table_for_its_length(rows):
    for length, right, wrong in ((64, "default", LONG), (128, LONG, "default")):
        both, same, other = (
            [sample.logprob for sample in rows[1][name].retrieval["passkey"].samples(length)]
            for name in (BOTH, right, wrong)
        )
        assert both == pytest.approx(same, rel=1e-5) and both != pytest.approx(other, rel=1e-3)


def test_a_comparison_says_what_was_measured_on_which_windows(rows):
    assert any(BOTH in sentence and "positions up to 64" in sentence for sentence in rows[0].warnings)
    assert '"short_window": 64' in rows[0].to_json()


def test_perplexity_in_chunks_states_the_length_of_each_window():
    model, long = small(), small()
    rope_patch.apply(long, LONG)
    with patched(model, BOTH):
        whole = perplexity(model, ids(100))
        in_chunks = perplexity(model, ids(100), chunk=16)
    assert in_chunks.nll == pytest.approx(whole.nll, abs=1e-5)
    assert whole.nll == pytest.approx(perplexity(long, ids(100)).nll, abs=1e-6)


def test_hidden_states_are_read_under_the_table_for_the_whole_text():
    seen = []
    for method in (BOTH, LONG, "default"):
        model = small()
        with patched(model, method):
            visit_states(
                model, ids(100)[0], lambda layer, role, states, *place: seen.append(states.flatten()), chunk=25
            )
    both, long, short = torch.cat(seen).chunk(3)
    torch.testing.assert_close(both, long)
    assert not torch.allclose(long, short, atol=1e-4)
