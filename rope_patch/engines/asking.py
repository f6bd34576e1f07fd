"""Ask an engine for the rotary table, window and context of each layer, by its own code in its own Python.

``rope_patch/engines/ask`` runs there: it imports nothing of ours, and builds the model without weights. What this
cannot show: a rotary module that is built and never called, and a window that is off by one within a kernel.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_patch import frequencies
from rope_patch.engines.ask.__main__ import MARK

MODULES = {
    "transformers-4": "transformers",
    "transformers-5": "transformers",
    "vllm": "vllm",
    "mlx": "mlx",
    "llama.cpp": "llama_cpp",
}
"""The module in ``ask`` that asks a program, by the name that ``rope-patch doctor --for`` takes."""
TOLERANCE = 1e-5
"""Largest relative difference that float32 and another order of operations make in one formula."""
SMALLEST = 1e-9
"""Largest difference of a frequency [rad/token] that is none: an angle of a thousandth at a million tokens."""
_PACKAGES = {"vllm": "vllm", "mlx": "mlx_lm"}


@dataclass(frozen=True, eq=False)
class AskedLayer:
    """One layer with attention as a program runs it.

    Attributes:
        inv_freq: (pairs,) float32 frequencies [rad/token]; None if the layer has no rotary table.
        attention_scaling: the attention factor, by which cos and sin are multiplied.
        window: the number of tokens to which the layer attends; None if it attends to the whole context.
    """

    inv_freq: Tensor | None
    attention_scaling: float | None
    window: int | None

    def same_table(self, other: AskedLayer) -> bool:
        """Tell whether frequencies and attention factor are those of another layer."""
        if self.inv_freq is None or other.inv_freq is None:
            return self.inv_freq is other.inv_freq
        factors = (self.attention_scaling or 0.0, other.attention_scaling or 0.0)
        if self.inv_freq.shape != other.inv_freq.shape or abs(factors[0] - factors[1]) > TOLERANCE:
            return False
        return torch.allclose(self.inv_freq, other.inv_freq, rtol=TOLERANCE, atol=SMALLEST)


@dataclass(frozen=True, eq=False)
class EngineAnswer:
    """What a program does with a checkpoint.

    Attributes:
        version: the version of the program.
        context: the context that the program serves [tokens]; None if it has no limit of its own.
        layers: its layers with attention.
        error: the error with which the program fails; empty if it does not.
        unread: the reason why its model could not be read, so that nothing is known; empty if it was.
    """

    version: str
    context: int | None = None
    layers: tuple[AskedLayer, ...] = ()
    error: str = ""
    unread: str = ""

    def within(self, context: int | None) -> EngineAnswer:
        """Return the answer without the windows that limit nothing within a context [tokens]."""
        layers = self.layers
        if context is not None:
            layers = tuple(replace(layer, window=_limiting(layer.window, context)) for layer in layers)
        return replace(self, layers=layers)


def _limiting(window: int | None, context: int) -> int | None:
    if window is not None and window >= context:
        return None
    return window


def python_of(program: str) -> str | None:
    """Return our own Python where a program is installed beside us; None where it is not."""
    package = _PACKAGES.get(program)
    if package is not None and importlib.util.find_spec(package) is not None:
        return sys.executable
    return None


def ask(program: str, configs: Sequence[Mapping[str, Any]], python: str | Path) -> list[EngineAnswer]:
    """Return the answers of a program about configs.

    Args:
        program: the program, a key of :data:`MODULES`.
        configs: the contents of each config.json.
        python: the Python of the environment in which the program is installed.

    Raises:
        ValueError: the program cannot be run by this Python, with what it said.
    """
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / f"{number}" for number in range(len(configs))]
        for folder, config in zip(folders, configs, strict=True):
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(dict(config)))
        return ask_files(program, [str(folder) for folder in folders], python)


def ask_files(program: str, paths: Sequence[str], python: str | Path) -> list[EngineAnswer]:
    """Return the answers of a program about folders or files, as :func:`ask` does."""
    answers: list[EngineAnswer] = []
    while len(answers) < len(paths):
        version, said, status = _run(program, paths[len(answers) :], python)
        answers += [_answer(version, each) for each in said]
        if len(answers) < len(paths):  # some engines end the process where others raise an error
            answers.append(EngineAnswer(version, error=f"the program ended with status {status}"))
    return answers


def _run(program: str, paths: Sequence[str], python: str | Path) -> tuple[str, list[dict[str, Any]], int]:
    """Return the version of a program, its answers up to the first at which it ended, and its exit status."""
    command = [str(python), "-W", "ignore", str(Path(__file__).with_name("ask")), MODULES[program], *paths]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise ValueError(f"{python} cannot be run: {error}") from None
    marked = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not marked:
        last = (done.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise ValueError(f"{program} did not answer in {python}: {last}")
    version, *answers = marked
    if program.startswith("transformers-") and not version.startswith(program[-1]):
        raise ValueError(f"{python} has transformers {version}: {program} needs one of version {program[-1]}")
    return version, answers, done.returncode


def _answer(version: str, said: Mapping[str, Any]) -> EngineAnswer:
    if "error" in said:
        return EngineAnswer(version, error=said["error"].splitlines()[0])
    if "unread" in said:
        return EngineAnswer(version, unread=said["unread"])
    layers = []
    for layer in said["layers"]:
        inv_freq = layer["inv_freq"]
        if inv_freq is not None:
            inv_freq = frequencies.zero_unrotated(torch.tensor(inv_freq, dtype=torch.float64).float())
            if not inv_freq.any() and layer["attention_scaling"] == 1:
                inv_freq = None  # rotary modules that rotate nothing are those of layers without a table
        layers.append(AskedLayer(inv_freq, layer["attention_scaling"], layer["window"]))
    return EngineAnswer(version, said["context"], tuple(layers))
