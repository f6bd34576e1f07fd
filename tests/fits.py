"""A short fit of a tiny model to the bundled texts."""

from __future__ import annotations

from pathlib import Path

import rope_patch
from rope_patch.fitting import Objective, Schedule, fit, held_out_spec

ASSETS = Path(rope_patch.data_path("assets"))

TEXT = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ASSETS / "domains").glob("*.txt")))

ASKED = {"target_length": 96, "steps": 4, "checks": 2, "windows": 2, "samples": 1, "depths": (0.0, 1.0),
         "batch_tokens": 192}  # fmt: skip


SCHEDULE = {"steps", "batch_tokens", "learning_rate", "checks", "patience", "checkpointing", "seed"}
SPEC = {"windows", "samples", "depths"}


def fit_by_name(model, tokenizer, data=None, **options):
    """A fit whose schedule and spec are made of the options that belong there."""
    schedule = Schedule(**{name: options.pop(name) for name in SCHEDULE & options.keys()})
    asked = {name: options.pop(name) for name in SPEC & options.keys()}
    objective = options.get("objective") or Objective()
    place = {"task": objective.task, "seed": schedule.seed, "freeze_at": options.get("freeze_at")}
    spec = held_out_spec(model, options["target_length"], **place, **asked)
    return fit(model, tokenizer, data, schedule=schedule, spec=spec, **options)


def fitted(model, tokenizer, **changes):
    return fit_by_name(model, tokenizer, TEXT, **{**ASKED, "init": "yarn", **changes})
