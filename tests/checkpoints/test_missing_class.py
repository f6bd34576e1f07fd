"""A folder that was patched by a method whose class is defined in a user's script, where it is not."""

from __future__ import annotations

import torch
from support.tiny import ids, logits, tiny_model

import rope_patch
from rope_patch import METHODS
from rope_patch.registry import import_modules

SCRIPT = """
from dataclasses import dataclass

from rope_patch.methods import Method


@dataclass(frozen=True)
class Bent(Method, name="of_a_script"):
    by: float = 3.0

    def inv_freq(self, table):
        return table.inv_freq / self.by
"""


def test_without_the_module_the_recorded_tables_are_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "methods_of_a_missing_class.py").write_text(SCRIPT)
    import_modules(["methods_of_a_missing_class"])
    model = tiny_model().eval()
    rope_patch.apply(model, "of_a_script:by=5")
    rope_patch.save(model, tmp_path / "saved")
    try:
        assert str(rope_patch.verify(tmp_path / "saved").method) == "of_a_script:by=5"
    finally:
        del METHODS.data["of_a_script"]
    loaded = rope_patch.load(tmp_path / "saved").eval()
    assert torch.equal(logits(loaded, ids()), logits(model, ids()))
    assert rope_patch.doctor(tmp_path / "saved").ok
    rope_patch.restore(loaded)
    assert torch.equal(logits(loaded, ids()), logits(tiny_model().eval(), ids()))
