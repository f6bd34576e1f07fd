"""What ``rope-patch extend`` does: the options of a run, which ``extend.yaml`` holds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rope_patch.evaluation.effective_length import UNPATCHED
from rope_patch.evaluation.haystack import HAYSTACK
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.exporting.run import TARGETS
from rope_patch.methods import as_method
from rope_patch.methods.two_tables import check_one_table

CANDIDATES = ("yarn", "ntk", "abf", "mrrope", "cope", "llama3", "p_rope")
"""Methods that compete by default, beside the checkpoint as it is."""

AFTER = " after training"
"""What stands after the method of an adapted model."""


@dataclass(frozen=True)
class ExtendOptions:
    """What a run does.

    Attributes:
        model: folder, hub id, adapter or GGUF file.
        length: the context to reach [tokens].
        methods: candidates, as method strings; a factor that is left out follows from the length. ``"default"``, the
            checkpoint as it is, is always measured beside them.
        tolerance: by which share the perplexity within the trained context may rise.
        fit: let a table that is fitted to text compete, too.
        train: adapt the best candidate with LoRA, and evaluate what comes of that.
        train_text: file, folder or dataset to train on; None for the text that ships with Python.
        train_rows: rows of the training, rounded up to a multiple of 8; None for as many as half of the budget has time
            for, 200 without a budget.
        exports: engines to export to as well: ``"vllm"``, ``"sglang"``, and of a GGUF file ``"gguf"``.
        budget: time for measuring and training; None for what suits the size of the model [s].
        tasks: retrieval tasks.
        mode: ``"single"``, or ``"multikey"``, which is harder and reads a haystack once for all depths.
        depths: of the needles.
        text: file or folder for perplexity; None for held-out text that ships with Python.
        haystack: as in :class:`~rope_patch.evaluation.spec.EvalSpec`.
        chat_template: as in the same.
        batch_tokens: as in the same [tokens].
        chunk: as in the same [tokens].
        dtype: that the weights are loaded in, by the command.
        seed: of prompts and training.

    Raises:
        ValueError: a value out of range, or two that exclude each other.
    """

    model: str
    length: int
    methods: tuple[str, ...] = CANDIDATES
    tolerance: float = 0.01
    fit: bool = False
    train: bool = False
    train_text: str | None = None
    train_rows: int | None = None
    exports: tuple[str, ...] = ()
    budget: int | None = None
    tasks: tuple[str, ...] = ("passkey",)
    mode: str = "single"
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    text: str | None = None
    haystack: str | None = HAYSTACK
    chat_template: str = "auto"
    batch_tokens: int = 16384
    chunk: int | None = None
    dtype: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values; lists become tuples."""
        for name in ("methods", "exports", "tasks", "depths"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"{name} must be a list, got {value!r}")
            object.__setattr__(self, name, tuple(value))
        object.__setattr__(self, "methods", tuple(dict.fromkeys(m for m in self.methods if m != UNPATCHED)))
        if not self.methods and not self.fit:
            raise ValueError("name a method beside 'default', which is always measured, or give fit=True (--fit)")
        for method in self.methods:
            check_one_table(as_method(method), "a folder for plain transformers")
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise ValueError(f"tolerance must be a share >= 0 such as 0.01, got {self.tolerance}")
        for name, least in (("length", 2), ("train_rows", 1), ("budget", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        for engine in self.exports:
            if engine not in TARGETS:
                raise ValueError(f"unknown engine {engine!r}. Known: {', '.join(TARGETS)}")
        given = [name for name in ("train_text", "train_rows") if getattr(self, name) is not None]
        if given and not self.train:
            raise ValueError(f"{given[0]} needs train=True (--train)")
        self.spec((self.length,), windows=1, samples=1)

    def spec(self, lengths: tuple[int, ...], *, windows: int, samples: int) -> EvalSpec:
        """Return what is measured.

        Args:
            lengths: of the prompts [tokens].
            windows: of text.
            samples: haystacks for each task and length.
        """
        names = ("tasks", "mode", "depths", "text", "haystack", "chat_template", "batch_tokens", "chunk", "seed")
        return EvalSpec(lengths, windows=windows, samples=samples, **{name: getattr(self, name) for name in names})

    def to_yaml(self) -> str:
        """Return the options as YAML."""
        values = {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()}
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def read_options(path: str | Path) -> dict[str, Any]:
    """Return the options that a file states, by name.

    Raises:
        ValueError: no YAML, or a name that is no option.
        OSError: no such file.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {error}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} must hold options of the form name: value")
    known = [field.name for field in dataclasses.fields(ExtendOptions)]
    for name in values:
        if name not in known:
            raise ValueError(f"{path}: unknown option {name!r}. Known: {', '.join(known)}")
    return dict(values)


def short(method: str, most: int = 40) -> str:
    """Return a method string for a sentence: one of a fitted table names every number.

    >>> short("yarn:factor=2 after training"), short("table:values=0.99/0.51 after training", 18)
    ('yarn:factor=2 after training', 'table:values=0.99/… after training')
    """
    name, after = method.removesuffix(AFTER), AFTER if method.endswith(AFTER) else ""
    return (name if len(name) <= most else f"{name[:most]}…") + after
