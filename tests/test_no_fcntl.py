"""The first steps with a patch where Python has no ``fcntl``, as on Windows, whose CI row runs this file."""

import torch
from safetensors.torch import load_file
from support.fresh import run_code, stock_logits

# Everywhere else the modules and functions that Windows lacks are taken away, as far as rope_patch might use them.
PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

sys.modules["fcntl"] = None
for name in ("fork", "register_at_fork", "pread", "pwrite", "symlink"):
    vars(os).pop(name, None)
import rope_patch
from rope_patch.runtime.result_cache import ResultCache

root = Path(sys.argv[1])
torch.manual_seed(0)
shape = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, max_position_embeddings=64)).eval()
tokens = torch.arange(3, 67)[None]
logits = lambda model: model(tokens, use_cache=False).logits.contiguous()
with torch.no_grad():
    before = logits(model)
    rope_patch.apply(model, "p_rope:p=0.5")
    after = logits(model)
    for name in ("saved", "saved", "again"):  # a folder that exists, too
        rope_patch.save(model, root / name)
    rope_patch.verify(root / "saved")
    assert torch.equal(logits(rope_patch.load(root / "saved").eval()), after)
    rope_patch.restore(model)
    assert torch.equal(logits(model), before) and not torch.equal(before, after)
for _ in range(2):
    ResultCache(root / "cache")["name"] = [1.5]
assert [json.loads(line)["value"] for line in (root / "cache").read_bytes().splitlines()] == [[1.5], [1.5]]
save_file({"tokens": tokens, "logits": after}, root / "ours")
"""


def test_a_patch_is_applied_saved_loaded_and_taken_back(tmp_path):
    done = run_code(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    ours = load_file(tmp_path / "ours")
    assert torch.equal(stock_logits(tmp_path, ours["tokens"], "saved", "again")["again"], ours["logits"])
    left = [path.name for path in tmp_path.rglob("*") if ".rope-patch" in path.name]
    assert not left
