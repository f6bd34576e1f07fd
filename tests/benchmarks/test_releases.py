"""Each row of the page on releases is what its command gives on a tiny model with that release's rotary settings."""

from __future__ import annotations

import pytest

releases = pytest.importorskip("releases", reason="not in the source distribution")


@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda release: release.name)
def test_the_page_says_what_the_command_does(release, tmp_path):
    found = releases.row(release, tmp_path)
    assert found in releases.PAGE.read_text().splitlines()
    refused = release.name in ("Phi-4-mini", "Granite 4.0 H")
    assert ("refused: " in found) == refused
