"""What an 8B model costs on an H100, rehearsed without one: no cost is above its bar."""

import importlib

import pytest
from support.subsets import full

pytest.importorskip("gpu_stages", reason="not in the source distribution")
rehearse = importlib.import_module("gpu_stages.rehearse")

# Ceilings of all 32 layers: times of ours over those of the side that is named, or counts of ours. Each is what was
# rehearsed when it was written, rounded up; a change that costs less lowers it.
BARS = {
    ("perplexity", 8192): {"lm_eval": 1.01, "waits": 10},
    ("perplexity", 32768): {"lm_eval": 1.01, "waits": 10},
    ("retrieval", 32768): {"generate": 0.8},
    ("kv_pass", 8192): {"plain": 1.3, "launches": 4_400},
    ("kv_pass", 32768): {"plain": 1.2, "launches": 4_400},
    ("analyze", 8192): {"hooks": 3.2, "launches": 36_000, "waits": 60},
    ("analyze", 32768): {"hooks": 3.6, "launches": 74_000, "waits": 60},
}


# At 32768 tokens it takes seconds, and a change that costs more shows at 8192 too.
@pytest.mark.parametrize(("what", "length"), [full(*case) if case[1] == 32768 else case for case in BARS])
def test_no_cost_is_above_its_bar(what, length):
    bars = BARS[what, length]
    sides = ["ours", *(name for name in bars if (what, name) in rehearse.SIDES)]
    ours, *others = rehearse.rows([(length, what, side) for side in sides], processes=1)
    costs = ours | {other["side"]: ours["model_ms"] / other["model_ms"] for other in others}
    assert {name: cost for name, cost in costs.items() if cost > bars.get(name, cost)} == {}
