"""Compute the logits of a saved folder in plain transformers, in a process that cannot import this package."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from rope_patch.checkpoints.source_files import loader_name, on_device

COMPARED_TOKENS = 200
"""Length of the row that both processes read [tokens]."""

# What a user without this package does. Importing rope_patch there would fail.
PROGRAM = """
import json, sys
sys.modules["rope_patch"] = None
import torch
from safetensors.torch import load_file, save_file
import transformers
folder, ids, out, options, loader = sys.argv[1:]
with torch.no_grad():
    model = getattr(transformers, loader).from_pretrained(folder, dtype="auto", **json.loads(options)).eval()
    logits = model(load_file(ids)["ids"].to(model.device), use_cache=False).logits
    save_file({"logits": logits.cpu().contiguous()}, out)
"""


def probe_logits(model: Any) -> torch.Tensor:
    """Return a model's logits for a fixed row of tokens, (1, tokens, vocabulary), on the CPU."""
    with torch.no_grad():
        logits: torch.Tensor = model(
            _ids(model.config.get_text_config().vocab_size, model.device), use_cache=False
        ).logits
    return logits.cpu()


def plain_logits(
    folder: str | Path, vocabulary: int, device: Any = "cpu", *, attention: str | None = None
) -> torch.Tensor:
    """Return the logits that plain transformers computes from a folder, for the tokens of :func:`probe_logits`.

    Args:
        folder: the folder of a checkpoint.
        vocabulary: size of the model's vocabulary.
        device: device on which the logits are computed, or that of each module.
        attention: the attention implementation to load it with; by default that of transformers.

    Raises:
        RuntimeError: transformers cannot load the folder; the message ends with its output.
    """
    options: dict[str, Any] = {"attn_implementation": attention, **on_device(device)}
    with tempfile.TemporaryDirectory() as scratch:
        save_file({"ids": _ids(vocabulary, "cpu")}, f"{scratch}/ids")
        files = [str(folder), f"{scratch}/ids", f"{scratch}/logits"]
        command = [sys.executable, "-c", PROGRAM, *files, json.dumps(options, default=str), loader_name(folder)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            raise RuntimeError(f"plain transformers could not load {folder}:\n{done.stderr[-2000:]}")
        return load_file(f"{scratch}/logits")["logits"]


def _ids(vocabulary: int, device: Any) -> torch.Tensor:
    # Any tokens do, as long as both processes read the same.
    return (torch.arange(3, 3 + COMPARED_TOKENS, device=device)[None]) % vocabulary
