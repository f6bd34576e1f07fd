"""The page about TRL: its code runs, and skipped positions reach the model."""

import re
import shutil
from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM
from support.tiny import LLAMA

import rope_patch
from rope_patch.patching.rotary import PatchedRotary

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's and PEFT's own
def test_the_page_trains_at_skipped_positions(tmp_path, monkeypatch):
    pytest.importorskip("trl")
    shutil.copytree(LLAMA, tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    reached = []
    forward = PatchedRotary.forward

    def watched(self, x, position_ids, *args, **kwargs):
        if position_ids.shape == (8, 128):  # a batch of training, and no check of the table
            reached.append(int(position_ids.max()))
        return forward(self, x, position_ids, *args, **kwargs)

    monkeypatch.setattr(PatchedRotary, "forward", watched)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    code = code.replace(
        "max_steps=2,", "max_steps=2, save_steps=2, use_cpu=True, bf16=False, report_to=[],"
    )  # no GPU here
    exec(compile(code, str(PAGE), "exec"), {"__name__": "page"})
    assert len(reached) == 2 and all(127 < position < 1024 for position in reached)
    for folder in ("out/checkpoint-2", "llama-adapter"):
        assert rope_patch.verify(rope_patch.load(folder)).method == "yarn:factor=4"
        assert rope_patch.verify(folder).method == "yarn:factor=4"  # the tokenizer beside it, too
        assert rope_patch.verify(AutoPeftModelForCausalLM.from_pretrained(folder)).method == "yarn:factor=4"
    for folder in ("llama-patched", "llama-merged"):
        assert rope_patch.verify(rope_patch.load(folder)).method == "yarn:factor=4"
