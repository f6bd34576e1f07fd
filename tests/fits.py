"""A short fit of a tiny model to the bundled texts."""

from __future__ import annotations

from pathlib import Path

from tiny import small

import rope_patch
from rope_patch.fitting import Candidate, Constraint, Objective, Schedule, fit, held_out_spec
from rope_patch.fitting.rows import Rows
from rope_patch.fitting.running import FitRun
from rope_patch.fitting.texts import TextPart
from rope_patch.methods import Default

ASSETS = Path(rope_patch.data_path("assets"))

TEXT = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ASSETS / "domains").glob("*.txt")))

ASKED = {"target_length": 96, "steps": 4, "checks": 2, "windows": 2, "samples": 1, "depths": (0.0, 1.0),
         "batch_tokens": 192}  # fmt: skip


ALONE = Objective(mix=0.0)

SCHEDULE = {"steps", "batch_tokens", "learning_rate", "checks", "patience", "checkpointing", "seed"}
SPEC = {"windows", "samples", "depths", "haystack"}


def fit_by_name(model, tokenizer, data=None, **options):
    """A fit whose schedule and spec are made of the options that belong there."""
    schedule = Schedule(**{name: options.pop(name) for name in SCHEDULE & options.keys()})
    asked = {name: options.pop(name) for name in SPEC & options.keys()}
    objective = options.get("objective") or Objective()
    place = {"task": objective.task, "seed": schedule.seed, "freeze_at": options.get("freeze_at")}
    spec = held_out_spec(model, options["target_length"], **place, **asked)
    return fit(model, tokenizer, data, schedule=schedule, spec=spec, **options)


def fitted(model, tokenizer, **changes):
    """A fit to the short texts alone; a tiny model with random weights has nothing to carry over."""
    settings = {**ASKED, "init": "yarn", "second": False, "objective": ALONE, **changes}
    return fit_by_name(model, tokenizer, TEXT, **settings)


def candidate(name, answered, nll, answers=0.1, method=None, second=None):
    """Of ten prompts at each of two lengths, a haystack each, so many were answered; one window of text."""
    hits = {n: tuple((i < count,) for i in range(10)) for n, count in zip((64, 128), answered, strict=True)}
    windows = {n: (value,) for n, value in zip((64, 128), nll, strict=True)}
    return Candidate(name, method or Default(), hits, answers, windows, second or {})


class Verdicts:
    """Stands in for held-out text and prompts: says of a table what a test wants to be said of it.

    ``good`` tells by name which tables are better than the start; or ``scores`` gives a candidate's own.
    """

    def __init__(self, good=lambda name: False, *, scores=None, loss=lambda verdict: sum(verdict.nll.values())):
        self.good, self.scores, self.loss = good, scores, loss
        self.log_factors_of = {}
        self.run = None

    def __call__(self, name, method, result_cache):
        self.log_factors_of[name] = self.run.table.log_factors[0].detach().clone()
        if name == "start":
            return candidate(name, (10, 5), (2.0, 3.0), 0.1, method)
        if self.scores is not None:
            return candidate(name, *self.scores, method)
        nll = (1.9, 2.9) if self.good(name) else (2.1, 3.1)
        return candidate(name, (10, 5), nll, 0.1, method)


class ChangedRows:
    """The rows of a fit, changed: ``change(step, goal, weights)`` returns the weights that count."""

    def __init__(self, rows, change):
        self.rows, self.change = rows, change
        self.goals, self.objective, self.target, self.texts = rows.goals, rows.objective, rows.target, rows.texts

    def __call__(self, step, goal, *share):
        for ids, labels, weights, positions in self.rows(step, goal, *share):
            yield ids, labels, self.change(step, goal, weights), positions


def run_of(tokenizer, verdicts, *, objective=None, change=None, result_cache=None, texts=None):
    """The fit of one start, in the hands of a test: what evaluates it, and what its rows weigh.

    Each step notes its learning rates, text first, and the table before and after it.
    """
    model = small()
    rope_patch.apply(model, "yarn:factor=1.5", target_length=96)
    rows = Rows(tokenizer, texts or [TextPart("text", TEXT)], objective or Objective(), 64, 96, 192, 0)
    options = {"layer_types": None, "freeze_at": None, "target_length": 96}
    run = FitRun(
        *(model, rope_patch.parse("yarn:factor=1.5"), ChangedRows(rows, change) if change else rows, verdicts),
        *(Constraint(), options, result_cache, {}, lambda name, tokens: None),
    )
    verdicts.run = run
    rates, before, after = [], [], []

    def table():
        return sum(part[0].detach() for part in run.parts).clone()

    def begins(optimizer, *_):
        rates.append([group["lr"] for group in optimizer.param_groups])
        before.append(table())

    run.adam.register_step_pre_hook(begins)
    run.adam.register_step_post_hook(lambda *_: after.append(table()))
    return run, rates, before, after
