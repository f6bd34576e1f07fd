"""``patch.method=fit`` of the recipe: fits a table to the run's own text before its weights are trained."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rope_patch.methods import Method
    from rope_patch.training.recipe import RecipeOptions

RESULT_CACHE = "fit.jsonl"
"""Finished parts of a fit, in the ``work`` folder of a run."""
CHARACTERS = 8_000_000
"""Characters of a run's text that a table is fitted to, at least."""
CHARACTERS_PER_TOKEN = 6
"""Characters of text that each token of the held-out windows may need."""


def fit_table(model: Any, tokenizer: Any, options: RecipeOptions, work: Path) -> Method:
    """Fit the table of a run to its own text; weights and table of the model are left as they were.

    Args:
        model: bare, on any device; it is moved to this process's own.
        tokenizer: of the model.
        options: its sections ``fit`` and ``patch`` are read, and of ``data`` the source of the text.
        work: folder for the result cache and ``fit.json``.

    Returns:
        The table, as a method.
    """
    from accelerate import PartialState

    from rope_patch.files import write_atomically
    from rope_patch.fitting import Constraint, Objective, Schedule, fit, held_out_spec
    from rope_patch.fitting.texts import LIMIT, VALIDATION
    from rope_patch.training.sources import open_source, plain_texts
    from rope_patch.training.tables import FITTED

    settings, patch = options.fit, options.patch
    needed = round(CHARACTERS_PER_TOKEN * settings.windows * options.target_length / VALIDATION)
    data = None  # of the built-in text the code: its documentation is the second domain
    if options.data.source != "builtin":
        texts = plain_texts(tokenizer, open_source(options.data, options.train.seed), options.data)
        data = list(first_characters(min(LIMIT, max(CHARACTERS, needed)), texts))
    if options.model.quantization == "none":
        model.to(PartialState().device)
    fitted = fit(
        model,
        tokenizer,
        data,
        target_length=options.target_length,
        second={"builtin": True, "none": False}.get(settings.second_text, Path(settings.second_text)),
        init=settings.init.split(),
        objective=Objective(
            settings.retrieval,
            settings.task,
            positions=settings.positions,
            row_length=settings.row_length,
            chunks=settings.chunks,
            mix=settings.mix,
        ),
        constraint=Constraint(settings.band, settings.monotone, settings.curve, settings.scaling),
        schedule=Schedule(
            steps=settings.steps,
            batch_tokens=settings.batch_tokens,
            learning_rate=settings.learning_rate,
            checkpointing=options.train.checkpointing,
            seed=options.train.seed,
        ),
        spec=held_out_spec(
            model,
            options.target_length,
            task=settings.task,
            seed=options.train.seed,
            freeze_at=patch.freeze_at,
            windows=settings.windows,
            samples=settings.samples,
        ),
        layer_types=patch.layer_types,
        freeze_at=patch.freeze_at,
        replace=patch.replace,
        resume=work / RESULT_CACHE,
    )
    fitted.restore()
    if PartialState().is_main_process:
        write_atomically(work / FITTED, json.dumps(fitted.to_dict(), indent=1, allow_nan=False))
    return fitted.method


def first_characters(characters: int, texts: Iterable[str]) -> Iterator[str]:
    """Yield texts until they have this many characters together; the last one is yielded whole.

    >>> list(first_characters(5, ["abc", "def", "ghi"]))
    ['abc', 'def']
    """
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return
