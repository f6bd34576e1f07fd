"""Learned tables: fit the frequencies of a checkpoint to a longer context, its weights frozen.

The table is trained by gradient descent on the logarithm of its frequencies, over rows of text and retrieval prompts of
many lengths, or over short ones at skipped positions. The table is chosen on held-out retrieval first and perplexity
second: it predicts held-out text no worse than its start does, answers not significantly fewer prompts, and predicts a
second domain, text of another kind than the fit's, no worse on average and significantly worse nowhere. A gain on text
like the fit's need not carry over to other text: :data:`CARRIES_OVER` says what was found. Related: LongRoPE (Ding et
al., arXiv:2402.13753) searches the same factors by evolution.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.evaluation.documents import Source
from rope_patch.evaluation.result_cache import ResultCache, finite
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.fitting.candidates import SEED, Candidate, Evaluator, choose
from rope_patch.fitting.estimate import FitCost
from rope_patch.fitting.families import family
from rope_patch.fitting.positions import check_model
from rope_patch.fitting.rows import Objective, Rows
from rope_patch.fitting.running import FitRun, plain_weights
from rope_patch.fitting.texts import (
    CARRIES_OVER,
    FEW_WINDOWS,
    LOSS_ALONE,
    POPULATION,
    FitTexts,
    SecondDomain,
    fit_texts,
    second_domain,
)
from rope_patch.methods import Default, Method, MethodLike
from rope_patch.methods.two_tables import check_one_table
from rope_patch.modeling.scoring import fingerprint
from rope_patch.modeling.trainable_table import Constraint, TrainableTable
from rope_patch.patching.apply import apply
from rope_patch.patching.base_tables import read_tables
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.targets import for_target
from rope_patch.patching.undo import Patch
from rope_patch.processes import processes

__all__ = [
    "CARRIES_OVER",
    "POPULATION",
    "Candidate",
    "Constraint",
    "FittedPatch",
    "Objective",
    "Schedule",
    "TrainableTable",
    "family",
    "fit",
    "held_out_spec",
]


@dataclass(frozen=True, eq=False)
class FittedPatch(Patch):
    """A patch whose table was fitted.

    Attributes:
        candidates: by the start they came from: that start, and what was found from it.
        chosen: name of the one in use.
        losses: of every step's text, by start [nats/token].
        stopped: why a fit ended early, by start; empty where it did not.
        texts: what it was fitted to, and why; None before anything is known.
        second: the second domain.
        warnings: what to know before the table is used, sentences.
        unpatched: what to know of the unpatched model where no table answers prompts within the trained length,
            sentences; it is measured then alone.
    """

    candidates: Mapping[str, tuple[Candidate, ...]] = field(default_factory=dict)
    chosen: str = ""
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)
    texts: FitTexts | None = None
    second: SecondDomain = field(default_factory=SecondDomain)
    warnings: tuple[str, ...] = ()
    unpatched: tuple[str, ...] = ()

    @property
    def winner(self) -> tuple[Candidate, Candidate]:
        """The table in use, and the start that it came from."""
        label, _, name = self.chosen.rpartition(", ")
        tried = self.candidates[label]
        return next(c for c in tried if c.name == name), tried[0]

    def to_dict(self) -> dict[str, Any]:
        """Return what was found, for JSON; None for a loss that is no number."""
        entry = {
            "chosen": self.chosen,
            "method": str(self.method),
            "stopped": {label: why for label, why in self.stopped.items() if why},
            "warnings": list(self.warnings),
            "unpatched": list(self.unpatched),
            "carries_over": CARRIES_OVER,
            "text": None if self.texts is None else self.texts.to_dict(),
            "second_domain": self.second.to_dict(),
            "candidates": {
                label: [c.to_dict() | {"change_from_start": c.changes(tried[0])} for c in tried]
                for label, tried in self.candidates.items()
            },
            "intervals": f"95 %, of the difference from the start. {POPULATION}",
            "losses": {label: list(losses) for label, losses in self.losses.items()},
        }
        result: dict[str, Any] = finite(entry)
        return result


@dataclass(frozen=True)
class Schedule:
    """How a table is trained.

    Attributes:
        steps: of Adam, with a learning rate that rises over an eighth of them and falls to 0; 0 only compares the
            tables to start from.
        batch_tokens: of a step, over all processes; None for two rows of the longest length, which is the target where
            no positions are skipped, 4096 at least [tokens].
        learning_rate: on the logarithms of the frequencies, shared by text and answers as the objective says.
        checks: how often the table is evaluated during the fit, the end included. A table that is worse than its start
            is moved halfway back to it, and what got worse counts more from then on: four times the odds for answers
            where fewer prompts are answered, else for text. If only text is fitted, the table is not moved.
        patience: checks without a better held-out loss before a fit is stopped; it has an effect with more checks than
            that.
        checkpointing: compute activations again in the backward pass, which saves memory.
        seed: of rows and crops; the held-out prompts have a seed of their own, made from it.

    Raises:
        ValueError: a value out of its range.
    """

    steps: int = 40
    batch_tokens: int | None = None
    learning_rate: float = 0.04
    checks: int = 2
    patience: int = 2
    checkpointing: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        for name, least in (("steps", 0), ("checks", 1), ("patience", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be > 0, got {self.learning_rate}")

    def tokens_of_step(self, objective: Objective, trained: int, target: int) -> int:
        """Return the tokens of a step; the lengths as in :meth:`Objective.longest_row`."""
        return self.batch_tokens or max(4096, 2 * objective.longest_row(trained, target))


def held_out_spec(
    model: nn.Module,
    target_length: int,
    *,
    task: str = "passkey",
    seed: int = 0,
    freeze_at: int | None = None,
    **changes: Any,
) -> EvalSpec:
    """Return what a fit is evaluated on by default: 8 windows, and prompts of lengths that double up to the target.

    Args:
        model: to be fitted.
        target_length: to fit to [tokens].
        task: retrieval task.
        seed: of the fit.
        freeze_at: as in :func:`fit`.
        **changes: other fields of :class:`~rope_patch.evaluation.spec.EvalSpec`, such as ``samples``.

    Raises:
        ValueError: a target below the trained length, or one that is no number.
    """
    if not isinstance(target_length, int):
        raise ValueError(f"target_length must be a whole number of tokens, got {target_length!r}")
    tables, _ = read_tables(find_rotary(model), freeze_at=freeze_at)
    trained = min(table.context for table in tables.values())
    if target_length < trained:
        raise ValueError(f"the target of {target_length} tokens lies below the trained length of {trained}")
    given: dict[str, Any] = {"windows": 8, "tasks": (task,), "bucket": target_length, "seed": SEED + seed}
    given["haystack"] = None  # prompts hide their needles in the held-out text
    return EvalSpec(_doubling(trained, target_length), **given | changes)


# Long: the public function, whose options are documented one by one; what it does is in _fit_all and FitRun.
def fit(
    model: nn.Module,
    tokenizer: Any,
    data: Source | Mapping[str, Source] | None = None,
    *,
    target_length: int,
    second: Source | bool = True,
    init: MethodLike | Sequence[MethodLike] = "yarn",
    objective: Objective | None = None,
    constraint: Constraint | None = None,
    schedule: Schedule | None = None,
    spec: EvalSpec | None = None,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    replace: bool = False,
    resume: str | Path | MutableMapping[str, Any] | None = None,
    on_start: Callable[[FitCost], None] = lambda cost: None,
    on_progress: Callable[[str, int], None] = lambda stage, tokens: None,
) -> FittedPatch:
    """Fit the tables of a model to a longer context, and leave the best one in place; no weight is touched.

    A gain on text like the data need not carry over to other text, least of all that of a fit by the loss of text
    alone, ``Objective(retrieval=0)``; :data:`CARRIES_OVER` says what was found. The ``warnings`` of the result are to
    be read before the table is used.

    Args:
        model: a causal language model, bare, quantized or under an adapter.
        tokenizer: its own.
        data: text to fit to; its last tenth is held out, and decides. Passkeys are hidden in a stretch of the rest, a
            million characters and more, drawn by the seed. One source is taken as one kind of text, and Python code
            is mixed in (``Objective(mix=0.5)``); a ``dict`` of sources by name is taken as several kinds, drawn from in
            equal parts, with nothing mixed in. By default Python code alone.
        target_length: to fit to; rows have lengths from the trained one up to it, or are short and stand for such rows
            (``Objective(positions="pose")``). Tables are evaluated on whole rows either way [tokens].
        second: text of another kind than the data, which decides too: a table that predicts it worse than its start on
            average, or significantly worse in a bucket of positions, is not chosen. True for the reference
            documentation of Python, False for none. Best is text of your use that is not like the data.
        init: the table to start from, or several of them, each fitted and all compared. A factor that is left out is
            taken from the target.
        objective: what is minimised; by default :class:`Objective` as it is.
        constraint: what the table may be; by default anything.
        schedule: how it is trained; by default :class:`Schedule` as it is.
        spec: what tables are evaluated on; by default :func:`held_out_spec`. Its longest length must be the target,
            and its task the objective's. Where it names no text, that is the held-out part of the data.
        layer_types: which tables are fitted, on mixed models; as :func:`rope_patch.apply` chooses by default.
        freeze_at: as in ``apply``.
        replace: replace an earlier patch, starting again from the base table.
        resume: file (or mapping) of finished work: the same call continues from there.
        on_start: called with what will be read, once everything is checked.
        on_progress: called with the stage, and the number of tokens just read.

    Returns:
        The patch in place; its ``candidates`` say what was measured.

    Raises:
        ValueError: a target below the trained length, a text shorter than it, options that contradict each other, or
            skipped positions for a model that cannot be given them. Nothing is changed then.
        PatchError: the model is patched already.
    """
    objective, constraint, schedule = objective or Objective(), constraint or Constraint(), schedule or Schedule()
    starts = [init] if isinstance(init, str | Method | Mapping) else list(init)
    if not starts:
        raise ValueError("init names no table to start from")
    usual = held_out_spec(model, target_length, task=objective.task, seed=schedule.seed, freeze_at=freeze_at)
    spec = spec or usual
    if spec.longest != target_length or spec.tasks != usual.tasks or spec.windows == 0:
        raise ValueError(
            f"spec must measure windows of text and the task {objective.task!r} up to the target of {target_length} "
            f"tokens, got {spec}"
        )
    options: dict[str, Any] = {"layer_types": layer_types, "freeze_at": freeze_at}
    methods = [for_target(model, start, target_length, **options) for start in starts]
    for method in methods:
        check_one_table(method, "a start of the fit")
    labels = [str(method) for method in methods]
    if len(set(labels)) < len(labels):
        raise ValueError(f"starts must differ from each other, got {', '.join(labels)}")
    texts = fit_texts(data, objective.mix)
    suite = EvalSuite(spec, tokenizer, text=texts.held_out if spec.text is None else None)
    domain = second_domain(tokenizer, second, data, spec.longest, spec.windows)
    trained = usual.lengths[0]
    tokens = schedule.tokens_of_step(objective, trained, target_length)
    rows = Rows(tokenizer, texts.parts, objective, trained, target_length, tokens, schedule.seed)
    rows.check()
    result_cache = ResultCache(resume) if isinstance(resume, str | Path) else resume
    if processes()[0]:
        result_cache = None  # the first process keeps the work of all
    options |= {"target_length": target_length}
    about = {
        "text": [suite.text_sha256, texts.digest, suite.prompts.haystack.sha256, domain.sha256],
        "objective": asdict(objective) | {"row_length": rows.longest},
        "constraint": asdict(constraint),
        "schedule": asdict(schedule) | {"batch_tokens": tokens, "checkpointing": None},
        "spec": spec.to_dict(),
    }
    evaluator = Evaluator(model, suite, domain.windows, objective, on_progress)

    def start(method: Method) -> FitRun:
        apply(model, method, replace=True, **options)
        identity = {"fit": str(method), "model": fingerprint(model), **about}
        return FitRun(model, method, rows, evaluator, constraint, options, result_cache, identity, on_progress)

    first = apply(model, methods[0], replace=replace, **options)
    try:
        if objective.positions == "pose":
            check_model(model)
        on_start(FitCost(spec, objective, schedule, trained, len(suite.windows), len(domain.windows), len(methods)))
        found = _fit_all(evaluator, methods, start, schedule, first, options, trained, result_cache)
    except BaseException:
        first._state.reinstate()
        raise
    return replace_fields(found, texts=texts, second=domain, warnings=_warnings(objective, schedule, texts, domain))


def _warnings(objective: Objective, schedule: Schedule, texts: FitTexts, domain: SecondDomain) -> tuple[str, ...]:
    """Return what to know before a table is used."""
    sentences = []
    if schedule.steps and not objective.retrieval:
        sentences.append(LOSS_ALONE)
    if schedule.steps and len(texts.parts) == 1:
        sentences.append(f"the table was fitted to one kind of text alone ({texts.describe()}): {texts.why}")
    if domain.why:
        sentences.append(domain.why)
    elif len(domain.windows) < FEW_WINDOWS:
        sentences.append(
            f"the second domain was read in {len(domain.windows)} windows only, so that its intervals are wide: ask "
            "for more windows, or give a longer text with second= (--second-text)"
        )
    return tuple(sentences)


# Many parameters: it is the part of fit() below its checks.
def _fit_all(
    evaluator: Evaluator,
    methods: Sequence[Method],
    start: Callable[[Method], FitRun],
    schedule: Schedule,
    first: Patch,
    options: Mapping[str, Any],
    trained: int,
    result_cache: MutableMapping[str, Any] | None,
) -> FittedPatch:
    """Fit from every start, and leave the best table in place; what ``first`` undoes is undone with it."""
    model, unpatched = evaluator.model, tuple[str, ...]()
    runs: dict[str, FitRun] = {}
    candidates: dict[str, tuple[Candidate, ...]] = {}
    with plain_weights(model):
        for method in methods:
            runs[str(method)] = run = start(method)
            candidates[str(method)] = run(
                schedule.steps,
                schedule.learning_rate,
                schedule.checks,
                schedule.patience,
                schedule.checkpointing,
            )
        if evaluator.fails_within(trained, itertools.chain(*candidates.values())):
            apply(model, Default(), replace=True, **options)
            unpatched = evaluator.unpatched_warnings(trained, result_cache)
    label, winner = choose(candidates)
    last = apply(model, winner.method, replace=True, **options)
    known = {f.name: getattr(last, f.name) for f in fields(Patch)} | {"_state": first._state}  # what restore() gives
    return FittedPatch(
        **known,
        candidates=candidates,
        chosen=f"{label}, {winner.name}",
        losses={label: tuple(run.losses) for label, run in runs.items()},
        stopped={label: run.stopped for label, run in runs.items()},
        unpatched=unpatched,
    )


def _doubling(low: int, high: int) -> list[int]:
    """Return the lengths that double from one to another.

    >>> _doubling(256, 1024), _doubling(256, 1000), _doubling(256, 256)
    ([256, 512, 1024], [256, 512, 1000], [256])
    """
    lengths = []
    while low < high:
        lengths.append(low)
        low *= 2
    return [*lengths, high]
