"""A folder that was patched by a method whose class is defined in a user's script, where it is not."""

from __future__ import annotations

import pytest
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


def test_the_module_of_a_method_must_be_imported_before_a_model_that_it_patched_is_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "methods_of_a_missing_class.py").write_text(SCRIPT)
    import_modules(["methods_of_a_missing_class"])
    model = tiny_model()
    rope_patch.apply(model, "of_a_script:by=5")
    rope_patch.save(model, tmp_path / "saved")
    cls = METHODS.data.pop("of_a_script")
    for use in (rope_patch.load, rope_patch.inspect, rope_patch.verify):
        with pytest.raises(ValueError, match="--import"):
            use(tmp_path / "saved")
    METHODS.data["of_a_script"] = cls
    try:
        assert torch.equal(logits(rope_patch.load(tmp_path / "saved").eval(), ids()), logits(model.eval(), ids()))
    finally:
        del METHODS.data["of_a_script"]
