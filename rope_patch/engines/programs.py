"""The programs of which it is known what they do with a config, and the file of what they were seen to do.

``tests/engines/test_engine_rows.py`` asks each program about configs of many families. With ``--write`` it writes
``assets/engines.json``; ``make test-engines`` compares some families with it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rope_patch.engines.forms import Form
from rope_patch.engines.verdicts import DEFAULT_BASE, OTHER, SAME
from rope_patch.runtime.packaged import data_path

UNVERIFIED = "unverified"


@dataclass(frozen=True)
class Program:
    """A program that reads checkpoints.

    Attributes:
        name: its name, as its users write it.
        multimodal: the model types of multimodal checkpoints whose ``text_config`` it reads as the same config alone.
    """

    name: str
    multimodal: Sequence[str] = ()

    @property
    def version(self) -> str:
        """The version that was asked, or of SGLang, which has no package for a CPU, read."""
        return str(asked()[self.name]["version"])


PROGRAMS = {
    "transformers-4": Program("transformers 4", ("gemma3",)),
    "vllm": Program("vLLM", ("gemma3", "gemma4")),
    "sglang": Program("SGLang", ("gemma3",)),
    # What its own converter, convert_hf_to_gguf.py, makes of a folder.
    "llama.cpp": Program("llama.cpp"),
    "mlx": Program("MLX", ("gemma3", "gemma4")),
}
"""The programs, by the name that ``rope-patch doctor --for`` takes."""

ENGINES = {"hf": "transformers", "vllm": "vLLM", "sglang": "SGLang"}
"""The names of the programs for which folders are written, by the name that ``export --to`` takes."""


@functools.cache
def asked() -> dict[str, Any]:
    """Return what programs were seen to do, by their name: their version, the date, and findings by form."""
    return dict(json.loads((data_path("assets") / "engines.json").read_text(encoding="utf-8")))


def seen(program: str, family: str, form: Form) -> dict[str, str]:
    """Return what a program was seen to do with the configs of a family in a form, by layer type.

    Which table it builds, and which layers it gives it to, were seen of different configs.

    Args:
        program: the program, a key of :data:`PROGRAMS`.
        family: the model type.
        form: the form of the config.

    Returns:
        As of :func:`~rope_patch.engines.verdicts.verdict_of`; empty if it was not asked about such a config.
    """
    tables = _row(program, "tables", form.tables, family)
    if not tables:
        found = [_row(program, "tables", general, family) for general in form.more_general]
        tables = next(filter(None, found), {})
        # A wrong base may be the right one by chance, where that is the family's usual one.
        if {DEFAULT_BASE, OTHER} & set(tables.values()):
            return {}
    if not form.layers:
        return tables
    layers = _row(program, "layers", form.layers, family)
    both = tables.keys() & layers.keys()
    return {kind: tables[kind] if layers[kind] == SAME else layers[kind] for kind in both}


def _row(program: str, part: str, form: str, family: str) -> dict[str, str]:
    for families, found in asked()[PROGRAMS[program].name][part].get(form, ()):
        if family in families.split():
            return dict(found)
    return {}
