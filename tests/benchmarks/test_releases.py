"""Each row of the page on releases is what its command gives on a tiny model with that release's rotary settings."""

import pytest
from support.subsets import full

releases = pytest.importorskip("releases", reason="not in the source distribution")


# A plain table, each kind of scaling, and what is refused.
FIRST = (
    *("Llama 3.2 1B, 3B", "Qwen3 with the YaRN of its card", "DeepSeek V3, R1", "OLMo 3 7B, 32B", "Mistral 7B 0.1"),
    *("Gemma 3 270M, 1B", "Phi-4-mini", "Granite 4.0 H"),
)
CASES = [release if release.name in FIRST else full(release) for release in releases.RELEASES]


@pytest.mark.parametrize("release", CASES, ids=lambda release: release.name)
def test_the_page_says_what_the_command_does(release, tmp_path):
    found = releases.row(release, tmp_path)
    assert found in releases.PAGE.read_text().splitlines()
    refused = release.name in ("Phi-4-mini", "Granite 4.0 H")
    assert ("refused: " in found) == refused
