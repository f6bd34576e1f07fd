"""Learned tables: fit the frequencies of a checkpoint to a longer context, with its weights frozen.

The table is trained by gradient descent on the logarithms of its frequencies, over rows of text and retrieval prompts
of many lengths, or over short rows at skipped positions. The table is chosen on held-out data, by retrieval first and
by perplexity second: it predicts held-out text no worse than its start does, does not answer significantly fewer
prompts, and predicts a second domain, the documentation of Python, no worse on average and significantly worse nowhere.
A gain on text like that of the fit need not carry over to other text. Related: LongRoPE (Ding et al., arXiv:2402.13753)
searches the same factors by evolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from rope_patch.evaluation.documents import Source
from rope_patch.evaluation.suite import ANSWERED_SHARE, EvalSuite
from rope_patch.fitting.candidates import RETRIEVAL_TASK, Candidate, Evaluator, best
from rope_patch.fitting.draw_rows import DrawnRows
from rope_patch.fitting.fit_run import FitRun
from rope_patch.fitting.texts import second_domain, split_text
from rope_patch.methods.two_tables import check_one_table
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.fit import FitSettings
from rope_patch.patching.install import Patch, apply, for_target
from rope_patch.patching.locate import locate

__all__ = ["Candidate", "FittedPatch", "fit", "held_out_spec"]

SEED_OFFSET = 2_000_003
"""Number that is added to the seed of held-out prompts, so that a comparison with a small seed has other prompts."""
TEXT_ALONE = (
    "with retrieval=0 (--retrieval 0) the table was fitted by the loss of text alone: no prompt took part, so it may "
    "answer fewer of them, and it is fits of this kind that were found worse on text of another kind"
)
NO_ANSWERS = (
    "no table answers the passkeys of the trained length, so prompts say nothing about the tables here: choose by text "
    "of your own"
)


@dataclass(frozen=True, eq=False)
class FittedPatch(Patch):
    """A patch whose table was fitted.

    Attributes:
        candidates: the start, and the tables that were fitted from it.
        chosen: name of the candidate in use; ``"start"`` if no other is better.
        losses: loss of the text in each step [nats/token].
        stopped: the reason why the fit ended early; "" if it did not.
        warnings: sentences that should be read before the table is used.
    """

    candidates: tuple[Candidate, ...] = ()
    chosen: str = "start"
    losses: tuple[float, ...] = ()
    stopped: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def winner(self) -> Candidate:
        """The candidate whose table is in use."""
        return next(candidate for candidate in self.candidates if candidate.name == self.chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return the candidates, the choice and the losses as a dict for JSON."""
        return {
            "chosen": self.chosen,
            "method": str(self.method),
            "stopped": self.stopped,
            "warnings": list(self.warnings),
            "candidates": [candidate.to_dict(self.candidates[0]) for candidate in self.candidates],
            "losses": list(self.losses),
        }


def held_out_spec(model: nn.Module, target_length: int, *, seed: int = 0, **changes: Any) -> EvalSpec:
    """Return the default spec of a fit's evaluation: 8 windows, and prompts of lengths that double up to the target.

    Args:
        model: the model whose table will be fitted.
        target_length: the context to which the table will be fitted [tokens].
        seed: seed of the fit.
        **changes: other fields of :class:`~rope_patch.evaluation.spec.EvalSpec`, such as ``samples``.

    Raises:
        ValueError: the target is below the trained length, or is not a whole number.
    """
    if not isinstance(target_length, int):
        raise ValueError(f"target_length must be a whole number of tokens, got {target_length!r}")
    tables = locate(model).static_tables(None)
    trained = min(table.context for table in tables.values())
    if target_length < trained:
        raise ValueError(f"the target of {target_length} tokens lies below the trained length of {trained}")
    given: dict[str, Any] = {
        "windows": 8,
        "tasks": (RETRIEVAL_TASK,),
        "bucket": target_length,
        "seed": SEED_OFFSET + seed,
    }
    given["haystack"] = None  # prompts hide their needles in the held-out text
    return EvalSpec(_doubling_lengths(trained, target_length), **given | changes)


def fit(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: Source | None = None,
    *,
    spec: EvalSpec | None = None,
    **options: Any,
) -> FittedPatch:
    """Fit the tables of a model to a longer context, and leave the best one in place; no weight is changed.

    Read the ``warnings`` of the result before the table is used.

    Args:
        model: a causal language model without a patch, bare or under an adapter.
        tokenizer: the tokenizer of the model.
        data: the text to which the table is fitted. Its last tenth is held out, and the table is chosen on it. Passkeys
            are hidden in a part of the rest. By default it is the code of Python's standard library.
        spec: the spec by which tables are evaluated; by default :func:`held_out_spec`. Its longest length must be the
            target. If it names no text, the held-out part of the data is used.
        **options: fields of :class:`~rope_patch.options.fit.FitSettings`: ``target_length``, the method ``init`` (a
            method string or a method) from whose table the fit starts, ``retrieval``, ``positions``, ``steps`` and
            ``seed``.

    Returns:
        The patch in place, whose ``candidates`` hold the measurements.

    Raises:
        ValueError: the target is below the trained length, the text is shorter than the target, a value is out of its
            range, or positions would be skipped in a model for which that is wrong. Nothing is changed then.
        PatchError: the model is patched already.
    """
    settings = FitSettings(**options)
    target_length, retrieval = settings.target_length, settings.retrieval
    default_spec = held_out_spec(model, target_length, seed=settings.seed)
    spec, trained = spec or default_spec, default_spec.lengths[0]
    if spec.longest != target_length or RETRIEVAL_TASK not in spec.tasks or spec.windows == 0:
        raise ValueError(f"spec must measure windows and passkeys of the target of {target_length} tokens, got {spec}")
    method = for_target(model, settings.init, target_length)
    check_one_table(method, "the start of a fit")
    text, held_out = split_text(data)
    suite = EvalSuite(spec, tokenizer, text=held_out if spec.text is None else None)
    second = second_domain(tokenizer, data, spec.longest, spec.windows)
    cut: dict[str, Any] = {"positions": settings.positions, "trained": trained, "target": target_length}
    cut["seed"] = settings.seed
    rows = DrawnRows(tokenizer, text, answers=retrieval > 0, **cut)
    first = apply(model, method, target_length=target_length)
    # From here on any error, and Ctrl-C, leaves the model unpatched.
    try:
        run = FitRun(method, rows, Evaluator(model, suite, second), retrieval)
        candidates = run(settings.steps)
        chosen = best(candidates)
        last = apply(model, chosen.method, replace=True, target_length=target_length)
    except BaseException:
        first.reinstate()
        raise
    unanswered = max(candidate.means["retrieval"][trained] for candidate in candidates) < ANSWERED_SHARE
    warnings = [] if retrieval else [TEXT_ALONE]
    if unanswered:
        warnings.append(NO_ANSWERS)
    return FittedPatch.joined(
        first,
        last,
        candidates=candidates,
        chosen=chosen.name,
        losses=tuple(run.losses),
        stopped=run.stopped,
        warnings=tuple(warnings),
    )


def _doubling_lengths(low: int, high: int) -> list[int]:
    """Return lengths that double from one length up to another, which is the last.

    >>> _doubling_lengths(256, 1024), _doubling_lengths(256, 1000), _doubling_lengths(256, 256)
    ([256, 512, 1024], [256, 512, 1000], [256])
    """
    lengths = []
    while low < high:
        lengths.append(low)
        low *= 2
    return [*lengths, high]
