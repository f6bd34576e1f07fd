"""Classes and functions of all stages: a cell, a stage, their setting, random models of known shapes, and token ids."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rope_patch.runtime.packaged import data_path

Results = Mapping[str, Mapping[str, Any]]
"""The finished cells of a stage, by name."""
_TINY: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
_LAYERS = ["sliding_attention", "full_attention"]
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_TINY},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 32, "layer_types": _LAYERS, **_TINY},
}
"""Shapes of tiny models that take the place of the real ones in a rehearsal."""
PEAKS = (("B200", 2250.0), ("H200", 989.0), ("H100 PCIe", 756.0), ("H100", 989.0), ("A100", 312.0), ("L40S", 362.0))
"""Dense bfloat16 peaks by a part of the device's name, from the makers' data sheets [TFLOP/s]."""


def peak_tflops(device: str) -> float | None:
    """Return the dense bfloat16 peak of a device by its name; None where it is not known [TFLOP/s].

    >>> peak_tflops("NVIDIA H200"), peak_tflops("x86_64")
    (989.0, None)
    """
    return next((peak for name, peak in PEAKS if name in device), None)


@dataclass(frozen=True)
class Cell:
    """One measurement, which is written as soon as it is finished.

    Attributes:
        name: the name of the cell within its stage.
        seconds: the time that the cell is expected to take on one H200, an estimate [s].
        measure: a function of the finished cells of its stage that returns the result as JSON values.
        needs: the names of the manifest that the cell needs beside those of its stage.
        settings: everything that the result depends on, as JSON values; a finished cell with other settings is measured
            again.
    """

    name: str
    seconds: float
    measure: Callable[[Results], dict[str, Any]]
    needs: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """Cells that answer one question.

    Attributes:
        key: the letter that names the stage on the command line.
        title: a few words that name the question.
        what: a sentence or two about what the stage measures.
        cells: a function of the setting that makes the cells; it must be quick and load nothing.
        needs: the names of the manifest that every cell needs.
        summary: a function that draws conclusions from the finished cells; None if there are none.
    """

    key: str
    title: str
    what: str
    cells: Callable[[Setting], list[Cell]]
    needs: tuple[str, ...] = ()
    summary: Callable[[Results], dict[str, Any]] | None = None


@dataclass
class Setting:
    """The setting that all stages share.

    Attributes:
        tiny: whether this is a rehearsal with tiny models.
        device: the device, ``cpu`` or ``cuda``.
        text: the files of English text that are read.
    """

    tiny: bool
    device: str
    text: Sequence[Path]
    _held: tuple[Any, Any] | None = None

    def size(self, real: Any, tiny: Any) -> Any:
        """Return the first of two sizes, or in a rehearsal the second."""
        return tiny if self.tiny else real

    def seconds(self, real: float) -> float:
        """Return the time that a cell is expected to take [s]: its estimate, or a second in a rehearsal."""
        return 1.0 if self.tiny else real

    @cached_property
    def device_name(self) -> str:
        """The name of the device."""
        import platform

        return torch.cuda.get_device_name() if self.device == "cuda" else platform.machine()

    # --- models

    def config(self, name: str, **changes: Any) -> Any:
        """Return the config of a shape that ships with the package, or in a rehearsal of the tiny one in its place."""
        family = "gemma3" if name.startswith("gemma-3") else "llama"
        shape = (
            TINY[family] if self.tiny else json.loads((data_path("assets") / "configs" / f"{name}.json").read_text())
        )
        return AutoConfig.for_model(**{"max_position_embeddings": 8192, **shape, **changes})

    def random_model(self, name: str, dtype: str = "bfloat16", attention: str = "sdpa", **changes: Any) -> Any:
        """Return a model with random weights in eval mode; the same weights at every call."""
        torch.manual_seed(0)
        config = self.config(name, **changes)
        with torch.device(self.device):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
        for module in model.modules():
            if "RotaryEmbedding" in type(module).__name__:
                # Computed on the CPU, as from_pretrained does: a power may differ in the last bit on a GPU.
                model._init_weights(module)
        return model.eval().requires_grad_(False)

    def held(self, key: Any, build: Callable[[], Any]) -> Any:
        """Return the object that was built last if it has this key; otherwise drop it, and build one."""
        # One object at a time: two models of 8B might not fit into the memory of a GPU.
        if self._held is None or self._held[0] != key:
            self.drop()
            self._held = key, build()
        return self._held[1]

    def drop(self) -> None:
        """Drop the model that is held, and release its memory."""
        self._held = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    # --- tokens

    def ids(self, tokens: int, vocab: int, seed: int = 1) -> Tensor:
        """Return random token ids (tokens,) on the device; the same at every call."""
        return torch.randint(3, vocab, (tokens,), generator=torch.Generator().manual_seed(seed)).to(self.device)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the bundled checkpoint; its 1024 ids are within the vocabulary of every model here."""
        return AutoTokenizer.from_pretrained(data_path("assets") / "llama")

    @cached_property
    def texts(self) -> dict[str, str]:
        """The texts that were given, by file name."""
        return {path.name: path.read_text(encoding="utf-8") for path in self.text}

    @cached_property
    def text_sha256(self) -> str:
        """The first 16 hex digits of the SHA-256 of the texts."""
        digest = hashlib.sha256()
        for name, text in self.texts.items():
            digest.update(f"{name}\0{text}\0".encode())
        return digest.hexdigest()[:16]

    def text_ids(self, tokens: int) -> Tensor:
        """Return the first tokens of the texts (tokens,); texts that are too short are repeated from the start."""
        stream = self._stream
        return stream.repeat(-(-tokens // len(stream)))[:tokens].to(self.device)

    @cached_property
    def _stream(self) -> Tensor:
        encoded = self.tokenizer("\n\n".join(self.texts.values()), add_special_tokens=False, verbose=False)
        return torch.tensor(encoded["input_ids"])


def twin(model: Any) -> Any:
    """Return a copy of a model that shares its weights."""
    # deepcopy takes objects in its memo as copied already, so the parameters stay the same tensors.
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def gib(size: float) -> float:
    """Return a number of bytes in GiB (2**30 bytes)."""
    return round(size / 2**30, 3)
