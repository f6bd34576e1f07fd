"""What a run begins with: the candidates that fit a model, and the windows that are read."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rope_patch.evaluation.compare import UNPATCHED
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.evaluation.time_budget import speed
from rope_patch.extending.measure import Clock, rounds_of, windows_read
from rope_patch.extending.served_by import served_by
from rope_patch.extending.train_adapter import STEP_COST, plan_training
from rope_patch.methods.scaling import owner_of
from rope_patch.options.extend import CANDIDATES, CANDIDATES_ON_SCALED, ExtendSettings
from rope_patch.patching.install import patched
from rope_patch.patching.locate import PatchError, locate
from rope_patch.patching.verify import inspect_model, shortened, trained_length
from rope_patch.planning import plan
from rope_patch.runtime import progress
from rope_patch.runtime.captions import count_text, duration_text
from rope_patch.tables import choose_layer_types

FEW_WINDOWS = 4
"""Windows below which an interval is too wide to be useful."""


@dataclass(frozen=True)
class Start:
    """What a run begins with.

    Attributes:
        options: the options of the run.
        methods: the methods that compete, as method strings with their factors.
        trained_length: the context of the model [tokens].
        suites: the windows that are read, with the needle of each task that may be asked.
        seconds: how long a window takes under one method, by the speed measured now [s].
    """

    options: ExtendSettings
    methods: tuple[str, ...]
    trained_length: int
    suites: tuple[NeedleSuite, ...]
    seconds: float

    @property
    def clock(self) -> Clock:
        """The deadline of the measurements, where they begin now."""
        return Clock(time.monotonic() + self.options.measuring_seconds, self.seconds)

    @property
    def windows(self) -> int:
        """Number of windows that are read at most, under all methods together."""
        rounds = rounds_of(len(self.methods), len(self.suites[0].windows))
        return min(windows_read(rounds), int(self.options.measuring_seconds / self.seconds))


def begin(model: PreTrainedModel, tokenizer: Any, options: ExtendSettings) -> Start:
    """Return what a run begins with.

    Args:
        model: the model to be extended.
        tokenizer: the tokenizer of the model.
        options: the options of the run.

    Raises:
        ValueError: something about the model, the methods or the text cannot be measured or patched, or no layer that
            rotates sees far enough for a longer context to need a patch.
        PatchError: the model is patched already.
    """
    location = locate(model)
    location.check_windowed()
    if location.record is not None:
        raise PatchError(
            f"the model is patched already, with {location.record.to_method()}: give the checkpoint before the patch, "
            "or undo it with rope_patch.restore (rope-patch restore). If its weights were trained under that table, "
            "take rope_patch out of its config.json: the table stays, and is what is extended"
        )
    trained = trained_length(model)
    if options.length <= trained:
        raise ValueError(
            f"the model is trained at {trained} tokens, so {options.length} need no patch: give a longer length"
        )
    if hasattr(model, "peft_config"):
        raise ValueError("an adapter is on the model: merge it first, with model.merge_and_unload()")
    methods = candidates(model, options)
    first, *others = options.evaluation.tasks
    suite = _suite(tokenizer, options, first, trained)
    suites = (suite, *map(suite.asking, others))
    seconds = options.length / speed(model, options.length, chunk=options.evaluation.chunk)
    return Start(options, methods, trained, suites, seconds)


def candidates(model: PreTrainedModel, options: ExtendSettings) -> tuple[str, ...]:
    """Return the methods that compete, with their factors: those that fit the model, and that named programs run.

    Raises:
        ValueError: a method that was named does not fit, or none remains.
    """
    try:
        # Whether the model can be patched at all, before any method is tried.
        with patched(model, UNPATCHED, target_length=options.length):
            pass
    except ValueError as error:  # its table changes with the length
        raise ValueError(f"{error} (rope-patch compare and rope-patch apply --freeze-at; extend cannot)") from error
    methods = options.methods
    by_default = methods == CANDIDATES
    tables = locate(model).tables
    scaled = [tables[kind] for kind in choose_layer_types(tables, None) if not tables[kind].is_plain]
    if by_default and scaled:
        own = [owner.name for owner in map(owner_of, scaled) if owner is not None]
        methods = (*own, *CANDIDATES_ON_SCALED)
    fitting = []
    left_out = defaultdict[str, list[str]](list)
    for name in dict.fromkeys(methods):
        try:
            with patched(model, name, target_length=options.length) as patch:
                method = str(patch.method)
        except ValueError as error:
            if not by_default:
                raise ValueError(f"{name}: {error}") from error
            left_out[str(error)].append(name)
            continue
        if options.for_programs:
            served = served_by(model, method, options.model, options.length)
            missing = [program for program in options.for_programs if program not in served]
            if missing:
                left_out[f"another table in {', '.join(missing)}"].append(name)
                continue
        fitting.append(method)
    for reason, names in left_out.items():
        progress.say(f"left out: {', '.join(names)}: {reason}")
    if not fitting:
        raise ValueError("none of the methods fits the model and the programs: name others (methods, --methods)")
    if len(set(fitting)) < len(fitting):
        raise ValueError(f"methods must differ from each other, got {', '.join(fitting)}")
    return tuple(fitting)


def _suite(tokenizer: Any, options: ExtendSettings, task: str, trained: int) -> NeedleSuite:
    """Return the largest suite, of which each round takes a part."""
    lengths = [trained]
    # The trained length, doubled until well before the target: reports show where a method begins to fail.
    while 2 * lengths[-1] <= 0.75 * options.length:
        lengths.append(2 * lengths[-1])
    largest = replace(options.evaluation, tasks=(task,), lengths=(*lengths, options.length), windows=64)
    try:
        suite = NeedleSuite(largest, tokenizer)
    except ValueError:  # the text has no room for so many windows
        suite = NeedleSuite(replace(largest, windows=None), tokenizer)
    if len(suite.windows) < FEW_WINDOWS:
        progress.say(
            f"the text has room for {count_text(len(suite.windows), 'window')} of {options.length} tokens only, too "
            "few to see small differences; a longer text (--text) has room for more"
        )
    return suite


def describe(model: PreTrainedModel, start: Start, out: Path) -> list[str]:
    """Return what a run will do, a line each: the model, methods, tokens, minutes, memory, and what is written."""
    options = start.options
    length = options.length
    inspection = inspect_model(model)
    lines = [f"{options.model}: {inspection.model_class}, trained at {start.trained_length} tokens; to reach: {length}"]
    lines += [f"note: {warning}" for warning in inspection.warnings]
    lines.append(f"methods: {', '.join(map(shortened, start.methods))}")
    lines.append(f"needle: {' or '.join(suite.task for suite in start.suites)}")
    every = (len(start.methods) + 1) * start.seconds
    lines.append(
        f"a window of {length} tokens takes {duration_text(every)} under all methods and the unpatched model, at the "
        "speed measured now"
    )
    in_all = duration_text(start.windows * start.seconds)
    lines.append(f"reads at most {start.windows * length:,} tokens in all, {in_all}")
    if start.windows <= len(start.methods):
        lines.append("note: by this speed --budget has no time for one window under all methods")
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        memory = plan(model, length=length, dtype=dtype).reading
    except ValueError:  # the plan does not know the shapes of this family
        memory = {}
    if memory:
        answer, weights, cache = (memory[part] / 2**30 for part in ("retrieval", "weights", "KV cache"))
        lines.append(f"memory: {answer:.2g} GiB in {dtype} (weights {weights:.2g}, KV cache {cache:.2g})")
    if options.train:
        training = plan_training(model, options, start.trained_length, length / start.seconds)
        line = f"trains on {training}: about {duration_text(STEP_COST * training.tokens * start.seconds / length)}"
        if memory:
            saving = torch.accelerator.is_available()  # as train_adapter sets it
            step = plan(model, length=training.row, dtype=dtype, checkpointing=saving).total / 2**30
            line += f", {step:.2g} GiB"
        lines.append(line)
    lines.append(f"writes {out}: the checkpoint, its card, report.html and all measurements")
    return lines
