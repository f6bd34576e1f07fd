"""Which cache formats a checkpoint survives, under which tables, and what is to blame.

For every method and scheme: perplexity and retrieval through a cache quantized exactly as decoding would, beside the
same in full precision on the same windows and prompts; how far the next token's distribution moves; and, layer by layer
and pair by pair, what rounding does to attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.evaluation.calibration import calibration
from rope_patch.evaluation.compare import environment, named, under
from rope_patch.evaluation.documents import Source, spread_windows
from rope_patch.evaluation.journal import Journal
from rope_patch.evaluation.prompts import Haystack, PromptMaker
from rope_patch.evaluation.retrieval import check_asked
from rope_patch.evaluation.text import builtin_text
from rope_patch.kv_cache.packed import check_packed, packed_caches
from rope_patch.kv_cache.plans import plan_layers
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.kv_evaluation.measuring import COMPARED, Patched, Setting, causes, means_of, measure, possible
from rope_patch.kv_evaluation.results import KVCheck
from rope_patch.kv_evaluation.verdicts import CheckRow, judge, long_keys
from rope_patch.methods import MethodLike
from rope_patch.modeling.capture import capture
from rope_patch.modeling.statistics import Capture
from rope_patch.patching.apply import for_target
from rope_patch.patching.locate import find_rotary

TOLERANCE = 0.02
"""Rise of perplexity that a safe scheme may cost, relative."""
MORE = {"int2": "int4", "int3": "int4", "int4": "int8"}
"""Formats of values that another may help."""


def remedies(name: str) -> dict[str, Scheme]:
    """Return what may help a scheme that is unsafe, by a name of its own: each a change of one thing.

    Args:
        name: a preset, or a text.
    """
    scheme = Scheme.parse(name)
    k, v = scheme.key, scheme.value

    def changed(**changes: Any) -> Scheme:
        """The scheme with other keys; as it was where that does not go with the rest."""
        try:
            return replace(scheme, key=replace(k, **changes))
        except ValueError:
            return scheme

    def valued(**changes: Any) -> Scheme:
        return replace(scheme, value=replace(v, **changes)) if v.format in MORE else scheme

    made = {
        "pre": changed(pre=True),
        "hadamard": changed(hadamard=True),
        "centre": changed(centre="unrotated"),
        "centreall": changed(centre="all"),
        "pre.centreall": changed(pre=True, centre="all"),
        "keep8": changed(keep=8),
        "channel32": changed(axis="channel", group=32),
        "v.token32": valued(axis="token", group=32),
        f"v.{MORE.get(v.format, v.format)}": valued(format=MORE.get(v.format, v.format)),
        "sinks=4": replace(scheme, sinks=max(4, scheme.sinks)),
        "residual=128": replace(scheme, residual=max(128, scheme.residual)),
    }
    return {f"{name}+{word}": other for word, other in made.items() if other != scheme}


def find_schemes(names: Sequence[str]) -> dict[str, Scheme]:
    """Return the schemes to measure by the names they were given, full precision first.

    Args:
        names: of presets, or texts; one that is full precision is left out, and so is one that is given again.

    Raises:
        ValueError: a bad scheme, two names of one, or none beside full precision.
    """
    made = {"none": Scheme()}
    for name in dict.fromkeys(names):
        scheme = Scheme.parse(name)
        if scheme == Scheme():
            continue
        twin = next((other for other, known in made.items() if known == scheme), None)
        if twin is not None:
            raise ValueError(f"schemes must differ from each other, but {twin!r} and {name!r} both mean {scheme}")
        made[name] = scheme
    if len(made) == 1:
        raise ValueError("give at least one scheme beside none")
    return made


def check_limits(
    lengths: Sequence[int], windows: int | None, context: int | None, tolerance: float, confidence: float = 0.95
) -> None:
    """Raise unless numbers are in their ranges; all as in :func:`kv_check`.

    Raises:
        ValueError: one that is not.
    """
    if min(lengths) < 2 or (windows is not None and windows < 1) or not 0 < confidence < 1 or not tolerance >= 0:
        raise ValueError("lengths must be >= 2, windows >= 1, confidence in (0, 1) and tolerance >= 0")
    if context is not None and context < 1:
        raise ValueError(f"context must be >= 1 token, got {context}")


def kv_check(
    model: nn.Module,
    tokenizer: Any,
    schemes: Sequence[str],
    *,
    lengths: Sequence[int],
    methods: Sequence[MethodLike] = ("default",),
    windows: int | None = None,
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: int = 4,
    seed: int = 0,
    task: str = "passkey",
    text: Source | None = None,
    haystack: str | Path | Haystack = "builtin",
    context: int | None = None,
    tolerance: float = TOLERANCE,
    confidence: float = 0.95,
    chunk: int | None = None,
    try_remedies: bool = False,
    packed: Sequence[str] = (),
    layer_types: Sequence[str] | None = None,
    name: str | None = None,
    resume: str | Path | MutableMapping[str, Any] | None = None,
    progress: Callable[[str, int], None] = lambda stage, tokens: None,
) -> KVCheck:
    """Measure cache schemes under methods on a model; it is as it was at the end.

    Args:
        model: a causal language model; one that is patched already is measured as it is under ``"default"``.
        tokenizer: its own.
        schemes: names of presets, or texts; full precision is always measured too.
        lengths: prompt lengths; perplexity is measured over windows of the longest [tokens].
        methods: in the grammar.
        windows: of text; by default 16, or as many as it has room for.
        depths: of the needles.
        samples: haystacks per length.
        seed: of keys and haystacks.
        task: as in :func:`~rope_patch.evaluation.retrieval.retrieval`.
        text: for perplexity; by default the held-out part of the built-in text.
        haystack: as in ``retrieval``.
        context: distances of the frequency bound that outlier pairs lie under; by default each layer's own [tokens].
        tolerance: rise of perplexity that a safe scheme may cost, relative.
        confidence: of the intervals.
        chunk: tokens per forward pass; whole windows and prompts by default.
        try_remedies: measure what may help, too, wherever a scheme is unsafe at any of the lengths.
        packed: caches of transformers to decode with, in the model as it is, for their bytes and speed; see
            :mod:`rope_patch.kv_cache.packed`.
        layer_types: which tables are patched, on mixed models.
        name: of the model; by default what its config calls itself, which for an adapter is its base.
        resume: file (or mapping) in which finished work is kept: the same call goes on where it was, and reads again
            only the windows that radii come from.
        progress: told method and scheme, and the tokens just read.

    Raises:
        ValueError: a bad scheme, method, task, length or context, two schemes or methods that are one, too little text,
            a model that transformers packs no cache of: before anything is measured.
        ImportError: a packed cache whose backend is not installed.
    """
    given = find_schemes(schemes)
    if not methods or not lengths:
        raise ValueError("give at least one method and one length")
    wanted = [for_target(model, method, max(lengths), layer_types=layer_types) for method in methods]
    labels = [str(method) for method in wanted]
    if len(set(labels)) < len(labels):
        raise ValueError(f"methods must differ from each other, got {', '.join(labels)}")
    lengths, depths = check_asked(task, "single", lengths, depths, samples, chunk)
    lengths = sorted(lengths)
    check_limits(lengths, windows, context, tolerance, confidence)
    check_packed(model, packed)
    source = builtin_text("heldout") if text is None else text
    texts, digest = spread_windows(tokenizer, source, lengths[-1], windows)
    maker = PromptMaker(tokenizer, haystack)
    for length in lengths:
        maker.prompts(task, length, depths, seed=seed)
    record = find_rotary(model).record
    again = record is not None
    options: dict[str, Any] = {"layer_types": layer_types, "freeze_at": None}
    centred = try_remedies or any(scheme.key.centre for scheme in given.values())
    learnt = calibration(tokenizer, model) if centred else None
    here = Setting(
        model,
        tokenizer,
        texts,
        maker,
        lengths,
        depths,
        {"samples": samples, "seed": seed, "task": task},
        chunk,
        context,
        Journal(resume) if isinstance(resume, str | Path) else resume,
        progress,
    )
    means: dict[str, Mapping[int, Tensor] | None] = dict.fromkeys(labels)
    for method, label in zip(wanted, labels, strict=True):  # what does not fit fails before anything is measured
        with under(model, method, again, options), named(label):
            if learnt is not None:
                means[label] = means_of(here, learnt)
            for called, scheme in given.items():
                with named(called):
                    plan_layers(model, scheme, means=means[label], context=context)
    rows: list[CheckRow] = []
    captures: dict[str, Capture] = {}
    for method, label in zip(wanted, labels, strict=True):
        with under(model, method, again, options) as slots, named(label):
            seen = captures[label] = capture(model, torch.stack([window.ids for window in texts[:COMPARED]]))
            now = Patched(label, slots, means[label], seen, long_keys(seen))
            measured = measure(here, now, given)
            base, *others = measured
            unsafe = [
                row
                for row in others
                if any(judge(row, base, length, tolerance, confidence).kind == "unsafe" for length in lengths)
            ]
            rows += [
                replace(row, causes=causes(here, now, row, tolerance)) if row in unsafe else row for row in measured
            ]
            for row in unsafe if try_remedies else ():
                rows += measure(here, now, possible(here, now, remedies(row.scheme)), row.scheme)
    own = str(getattr(model.config, "name_or_path", "") or "").rstrip("/").rpartition("/")[2]
    return KVCheck(
        model=name or own or type(model).__name__,
        rows=tuple(rows),
        lengths=tuple(lengths),
        windows=len(texts),
        text="held-out part of the built-in text" if text is None else getattr(text, "name", "text of the user's own"),
        digest=digest,
        calibration=0 if learnt is None else learnt.numel(),
        compared=len(texts[:COMPARED]),
        context=context,
        captures=captures,
        packed=tuple(packed_caches(model, texts[0].ids, packed)) if packed else (),
        tolerance=tolerance,
        confidence=confidence,
        environment=environment(model),
        loaded=None if record is None else str(record.to_method()),
    )
