"""The plug-in of axolotl: through axolotl's own plug-in manager where it is installed, else over a stub of its base.

The stub has the hooks of axolotl 0.18.0 that the plug-in overrides.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from support.scored import bold_model
from support.tiny import ids
from transformers import Trainer, TrainingArguments

from rope_patch.checkpoints.adapters import read_record
from rope_patch.patching.locate import locate

pydantic = pytest.importorskip("pydantic")
NAME = "rope_patch.integrations.axolotl"
ROOT = Path(__file__).parents[2]


class StubOfBasePlugin:
    """The hooks of ``BasePlugin`` of axolotl 0.18.0 that are overridden."""

    def get_input_args(self): ...

    def post_model_build(self, cfg, model): ...

    def add_callbacks_pre_trainer(self, cfg, model): ...


@pytest.fixture
def plugin(monkeypatch):
    """The plug-in as axolotl makes it of its name."""
    try:
        from axolotl.integrations.base import load_plugin
    except ImportError:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = StubOfBasePlugin
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        yield importlib.import_module(NAME).RopePatchPlugin()
        sys.modules.pop(NAME, None)
        return
    yield load_plugin(f"{NAME}.RopePatchPlugin")


def options_of(plugin):
    module, _, name = plugin.get_input_args().rpartition(".")
    return getattr(importlib.import_module(module), name)


def cfg(**patch):
    return SimpleNamespace(rope_patch=patch, sequence_len=128)


def test_it_overrides_hooks_that_the_base_has(plugin):
    base = type(plugin).__mro__[1]
    own = [name for name in vars(type(plugin)) if not name.startswith("__")]
    assert own and all(hasattr(base, name) for name in own)


def test_the_key_is_checked_before_anything_is_loaded(plugin):
    kind = options_of(plugin)
    assert kind(rope_patch={"method": "yarn", "target_length": 256}).rope_patch["target_length"] == 256
    for wrong in ({"method": "yarm"}, {"methd": "yarn"}, {"target_length": 256}, {"method": "yarn", "freeze_at": 0}):
        with pytest.raises(pydantic.ValidationError):
            kind(rope_patch=wrong)


def test_the_model_is_patched_for_the_length_of_the_rows_or_the_target(plugin):
    model = bold_model(max_position_embeddings=64)
    plugin.post_model_build(cfg(method="yarn"), model)
    record = locate(model).record
    assert (str(record.to_method()), record.target_length) == ("yarn:factor=2", 128)
    longer = bold_model(max_position_embeddings=64)
    plugin.post_model_build(cfg(method="yarn", target_length=256), longer)
    assert str(locate(longer).record.to_method()) == "yarn:factor=4"
    with pytest.raises(ValueError, match="sequence_len=128"):
        plugin.post_model_build(cfg(method="yarn", target_length=100), bold_model(max_position_embeddings=64))


def test_what_is_saved_has_its_record(plugin, tmp_path):
    asked = cfg(method="yarn", target_length=256)
    model = bold_model(max_position_embeddings=64)
    plugin.post_model_build(asked, model)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    rows = Dataset.from_list([{"input_ids": row.tolist(), "labels": row.tolist()} for row in ids(16, batch=4)])
    args = TrainingArguments(str(tmp_path / "out"), max_steps=1, use_cpu=True, report_to=[], save_steps=1)
    Trainer(model, args, train_dataset=rows, callbacks=plugin.add_callbacks_pre_trainer(asked, model)).train()
    assert str(read_record(tmp_path / "out" / "checkpoint-1").to_method()) == "yarn:factor=4"


def test_the_page_has_a_file_that_the_plug_in_takes(plugin):
    page = (ROOT / "docs" / "trl.md").read_text("utf-8").partition("## axolotl")[2]
    written = yaml.safe_load(page.partition("```yaml")[2].partition("```")[0])
    assert written["plugins"] == [f"{NAME}.{type(plugin).__name__}"] and written["base_model"]
    assert options_of(plugin)(rope_patch=written["rope_patch"])
