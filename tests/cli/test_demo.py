"""The demo: ``extend`` on a bundled checkpoint, and the page that shows what it prints."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from support.commands import invoke

import rope_patch
from rope_patch.cli.parsing import parse_words
from rope_patch.options.extend import ExtendOptions
from rope_patch.options.yaml_and_json import to_dict


@pytest.mark.slow
@pytest.mark.usefixtures("figures")
def test_quick_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("demo", "--quick")
    assert result.exit_code == 0
    assert "bit for bit" in result.stderr
    shown = shlex.split(result.stderr.splitlines()[0])
    assert shown[:3] == ["$", "rope-patch", "extend"]
    record = json.loads((tmp_path / "rope-patch-demo" / "rope_patch_extend.json").read_text())
    assert record["chosen"] == "yarn:factor=4"
    assert "yarn:factor=4" in result.stdout
    assert "yarn:factor=4 was chosen" in (tmp_path / "rope-patch-demo" / "report.html").read_text()
    saved = rope_patch.load(tmp_path / "rope-patch-demo")
    assert saved.config.max_position_embeddings == 1024
    assert str(rope_patch.verify(saved).record.to_method()) == "yarn:factor=4"
    shown = parse_words(ExtendOptions, shown[3:]).settings
    assert to_dict(shown) == record["options"] and shown.methods == ("yarn", "nope"), "what it shows is what it ran"


def words(text):
    """The lines of a text with # for each number."""
    return [re.sub(r"[+−]?\d+(\.\d+)?", "#", " ".join(line.split())) for line in text.splitlines() if line.strip()]


@pytest.mark.full
@pytest.mark.usefixtures("figures")
def test_the_page_shows_what_the_demo_prints(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "extend.md").read_text()
    shown = next(text for text in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if "was chosen" in text)
    monkeypatch.chdir(tmp_path)
    printed = invoke("demo").stdout
    assert words(printed) == words(shown) and len(printed.splitlines()) <= 20
