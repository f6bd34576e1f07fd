"""The demo: ``extend`` on a bundled checkpoint."""

import json
import shlex

import pytest
from support.commands import invoke

import rope_patch
from rope_patch.cli.parsing import parse_words
from rope_patch.options.extend import ExtendOptions


def test_what_is_shown_is_what_is_run(monkeypatch):
    runs = []
    monkeypatch.setattr("rope_patch.cli.demo.extend", lambda given: runs.append(given.settings) or 3)
    result = invoke("demo", "--quick", "--shape", "gemma3")
    shown = shlex.split(result.stderr.splitlines()[0])
    assert shown[:3] == ["$", "rope-patch", "extend"]
    assert runs == [parse_words(ExtendOptions, shown[3:]).settings]
    assert runs[0].methods == ("yarn", "nope") and result.exit_code == 3


@pytest.mark.full
@pytest.mark.usefixtures("figures")
@pytest.mark.parametrize("shape", ["llama", "gemma3"])
def test_quick_demo(tmp_path, monkeypatch, shape):
    monkeypatch.chdir(tmp_path)
    result = invoke("demo", "--quick", "--shape", shape)
    assert result.exit_code == 0
    assert "bit for bit" in result.stderr
    record = json.loads((tmp_path / "rope-patch-demo" / "rope_patch_extend.json").read_text())
    assert record["chosen"] == "yarn:factor=4"
    assert "yarn:factor=4" in result.stdout
    assert "yarn:factor=4 was chosen" in (tmp_path / "rope-patch-demo" / "report.html").read_text()
    saved = rope_patch.load(tmp_path / "rope-patch-demo")
    assert saved.config.max_position_embeddings == 1024
    assert str(rope_patch.verify(saved).record.to_method()) == "yarn:factor=4"
