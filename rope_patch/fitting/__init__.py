"""Learned tables: fit the frequencies of a checkpoint to a longer context, its weights frozen.

The table is trained by gradient descent on the logarithm of its frequencies, over rows of text and retrieval prompts
of many lengths; what is kept is chosen on held-out retrieval first and perplexity second, and there reads no worse
than its start and finds not surely less. Related: LongRoPE (Ding et al., arXiv:2402.13753) searches the same factors
by evolution.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from rope_patch.evaluation.documents import Source, spread_windows
from rope_patch.evaluation.journal import Journal, finite
from rope_patch.evaluation.prompts import Haystack, PromptMaker
from rope_patch.evaluation.retrieval import check_asked
from rope_patch.fitting.judging import SEED, Candidate, Judging, best
from rope_patch.fitting.rows import Objective, Rows, split_text
from rope_patch.fitting.running import Run, plain_weights
from rope_patch.methods import Method, MethodLike
from rope_patch.modeling.scoring import fingerprint
from rope_patch.modeling.trainable_table import Constraint, TrainableTable
from rope_patch.patching.apply import Patch, apply, for_target
from rope_patch.patching.base_tables import read_slots
from rope_patch.patching.locate import find_rotary
from rope_patch.processes import processes
from rope_patch.words import did_you_mean

__all__ = ["Candidate", "Constraint", "FittedPatch", "Objective", "TrainableTable", "family", "fit"]

_PARTS = [f"p_rope:p={p}" for p in (1, 0.9, 0.75, 0.6, 0.5, 0.4, 0.25)]
FAMILIES: Mapping[str, Sequence[str]] = {
    "p_rope": [*_PARTS, *(f"abf:factor={base}+{part}" for base in (10, 50) for part in _PARTS)]
}
"""What ``family`` knows: p of p-RoPE, with the base found, 10 and 50 times it."""
"""Methods whose ``factor`` is the one that the context grows by, and is filled in."""


@dataclass(frozen=True, eq=False)
class FittedPatch(Patch):
    """A patch whose table was fitted.

    Attributes:
        candidates: by the start they came from: that start, and what was found from it.
        chosen: name of the one in use.
        losses: of every step's text, by start [nats/token].
        stopped: why a fit ended early, by start; empty where it did not.
    """

    candidates: Mapping[str, tuple[Candidate, ...]] = field(default_factory=dict)
    chosen: str = ""
    losses: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    stopped: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return what was found, for JSON; None for a loss that is no number."""
        found = {
            "chosen": self.chosen,
            "method": str(self.method),
            "stopped": {label: why for label, why in self.stopped.items() if why},
            "candidates": {label: [c.to_dict() for c in tried] for label, tried in self.candidates.items()},
            "losses": {label: list(losses) for label, losses in self.losses.items()},
        }
        made: dict[str, Any] = finite(found)
        return made


def fit(
    model: nn.Module,
    tokenizer: Any,
    data: Source | None = None,
    *,
    target_length: int,
    init: MethodLike | Sequence[MethodLike] = "yarn",
    objective: Objective | None = None,
    constraint: Constraint | None = None,
    steps: int = 40,
    batch_tokens: int | None = None,
    learning_rate: float = 0.04,
    checks: int = 2,
    patience: int = 2,
    windows: int = 8,
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 4,
    haystack: str | Path | Haystack | None = None,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    replace: bool = False,
    checkpointing: bool = False,
    seed: int = 0,
    resume: str | Path | MutableMapping[str, Any] | None = None,
    progress: Callable[[str, int], None] = lambda name, tokens: None,
) -> FittedPatch:
    """Fit the tables of a model to a longer context, and leave the best one in place; no weight is touched.

    Args:
        model: a causal language model, bare, quantized or under an adapter.
        tokenizer: its own.
        data: text to fit to; its last tenth is held out, and decides. Passkeys are hidden in a stretch of the rest, a
            million characters and more, drawn by the seed. By default the training part of the built-in text.
        target_length: to fit to; rows have lengths from the trained one up to it [tokens].
        init: the table to start from, or several of them, each fitted and all compared. A factor that is left out is
            taken from the target.
        objective: what is minimised; by default :class:`Objective` as it is.
        constraint: what the table may be; by default anything.
        steps: of Adam, with a learning rate that rises over an eighth of them and falls to 0.
        batch_tokens: of a step, over all processes; two rows of the target by default, 4096 at least [tokens].
        learning_rate: on the logarithms of the frequencies, shared by text and answers as ``objective`` says.
        checks: how often the table is judged on the way, the end included. From one that is worse than its start the
            fit goes on from half of the way, with four times the odds of answers' weight where less was found, else of
            text's; where text alone is fitted to it goes on as it was.
        patience: checks without a better held-out loss before a fit is stopped; so it takes more checks than that.
        windows: of held-out text, as long as the target.
        depths: of the needles of held-out prompts.
        samples: haystacks at each length; the lengths double from the trained one to the target.
        haystack: of the held-out prompts, as in :func:`~rope_patch.evaluation.retrieval.retrieval`; by default the
            held-out text.
        layer_types: which tables are fitted, on mixed models; as :func:`rope_patch.apply` chooses by default.
        freeze_at: as in ``apply``.
        replace: replace an earlier patch, starting again from the base table.
        checkpointing: compute activations again in the backward pass, for memory.
        seed: of rows, crops, prompts.
        resume: file (or mapping) in which finished work is kept: the same call goes on where it was.
        progress: told what is done, and the tokens just read.

    Returns:
        The patch in place; its ``candidates`` say what was measured.

    Raises:
        ValueError: a target below the trained length, a text shorter than it, options that cannot be: before anything
            is changed.
        PatchError: the model is patched already.
    """
    objective, constraint = objective or Objective(), constraint or Constraint()
    starts = [init] if isinstance(init, str | Method | Mapping) else list(init)
    for name, value in (("steps", steps), ("checks", checks), ("patience", patience), ("windows", windows)):
        if value < (0 if name == "steps" else 1):
            raise ValueError(f"{name} must be >= {0 if name == 'steps' else 1}, got {value}")
    if not starts:
        raise ValueError("init names no table to start from")
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise ValueError(f"learning_rate must be > 0, got {learning_rate}")
    slots, _ = read_slots(find_rotary(model), freeze_at=freeze_at)
    trained = min(slot.context for slot in slots.values())
    if target_length < trained:
        raise ValueError(f"the target of {target_length} tokens lies below the trained length of {trained}")
    wanted = [for_target(model, s, target_length, layer_types=layer_types, freeze_at=freeze_at) for s in starts]
    labels = [str(method) for method in wanted]
    if len(set(labels)) < len(labels):
        raise ValueError(f"starts must differ from each other, got {', '.join(labels)}")
    lengths = _doubling(trained, target_length)
    lengths, depths = check_asked(objective.task, "single", lengths, depths, samples, None)
    fitted, held_out = split_text(data)
    texts, digest = spread_windows(tokenizer, held_out, target_length, windows)
    rows = Rows(
        tokenizer, fitted, objective, trained, target_length, batch_tokens or max(4096, 2 * target_length), seed
    )
    judged = Judging(model, tokenizer, texts, lengths, depths, samples, objective, seed,
                      PromptMaker(tokenizer, haystack or Haystack(held_out, "held-out text")), progress)  # fmt: skip
    for length in lengths:
        judged.maker.prompts(objective.task, length, depths, seed=SEED + seed)
    rows.check()
    kept = Journal(resume) if isinstance(resume, str | Path) else resume
    if processes()[0]:
        kept = None  # the first process keeps the work of all
    options: dict[str, Any] = {"layer_types": layer_types, "freeze_at": freeze_at, "target_length": target_length}
    candidates: dict[str, tuple[Candidate, ...]] = {}
    losses: dict[str, tuple[float, ...]] = {}
    stopped: dict[str, str] = {}
    first = apply(model, wanted[0], replace=replace, **options)
    try:
        with plain_weights(model):
            for label, method in zip(labels, wanted, strict=True):
                apply(model, method, replace=True, **options)
                about = {
                    "fit": label,
                    "model": fingerprint(model),
                    "text": [digest, rows.digest, judged.maker.haystack.sha256],
                    "objective": asdict(objective),
                    "constraint": asdict(constraint),
                    "asked": [
                        steps,
                        learning_rate,
                        checks,
                        patience,
                        windows,
                        list(depths),
                        samples,
                        rows.tokens,
                        seed,
                    ],
                }
                run = Run(model, method, rows, judged, constraint, options, kept, about, progress)
                candidates[label] = run(steps, learning_rate, checks, patience, checkpointing)
                losses[label], stopped[label] = tuple(run.losses), run.stopped
            found = {label: best(several) for label, several in candidates.items()}
            label = max(found, key=lambda name: max(found[name].rank, candidates[name][0].rank))
        last = apply(model, found[label].method, replace=True, **options)
    except BaseException:
        first._state.reinstate()
        raise
    known = {f.name: getattr(last, f.name) for f in fields(Patch)} | {"_state": first._state}  # what restore() gives
    name = f"{label}, {found[label].name}"
    return FittedPatch(**known, candidates=candidates, chosen=name, losses=losses, stopped=stopped)


def family(name: str) -> list[str]:
    """Return the members of a family that are worth judging: to be given as ``init``, with ``steps=0``.

    Raises:
        ValueError: an unknown family.

    Example:
        >>> family("p_rope")[:3]
        ['p_rope:p=1', 'p_rope:p=0.9', 'p_rope:p=0.75']
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}.{did_you_mean(name, FAMILIES)} Known: {', '.join(FAMILIES)}")
    return list(FAMILIES[name])


def _doubling(low: int, high: int) -> list[int]:
    """Return the lengths that double from one to another.

    >>> _doubling(256, 1024), _doubling(256, 1000), _doubling(256, 256)
    ([256, 512, 1024], [256, 512, 1000], [256])
    """
    made = []
    while low < high:
        made.append(low)
        low *= 2
    return [*made, high]
