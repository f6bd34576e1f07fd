"""What a check of quantized caches measures of a scheme under a method that is in place."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.compare import named
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.plans import LayerPlan, features_of, plan_layers
from rope_patch.kv_cache.schemes import FORMATS, Scheme, Side, effective_bits
from rope_patch.kv_evaluation.attribution import Attribution, attribute, longest_keys
from rope_patch.kv_evaluation.errors import LayerErrors, attention_errors
from rope_patch.kv_evaluation.setting import ERRORS, MethodInPlace, Setting
from rope_patch.kv_evaluation.verdicts import CheckRow, Divergence
from rope_patch.modeling.capture import capture
from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.scoring import CacheFactory, Reader, fingerprint
from rope_patch.runtime import progress
from rope_patch.runtime.finished import finite, key
from rope_patch.runtime.progress import Progress

SLICE = 256


def measure(setting: Setting, patched: MethodInPlace, schemes: Mapping[str, Scheme]) -> list[CheckRow]:
    """Measure schemes under a method that is in place.

    Args:
        setting: what is the same for all.
        patched: the method.
        schemes: by name.
    """
    quantizing = {name: scheme for name, scheme in schemes.items() if scheme != Scheme()}
    with progress.stage(f"{patched.method}, attention errors"):
        errors = _errors(setting, patched, quantizing)
    full_states: list[Tensor] = []  # of the compared windows in full precision: read once, if at all
    rows = []
    for name, scheme in schemes.items():
        with named(name), progress.stage(f"{patched.method}, {name}"):
            rows.append(_measure(setting, patched, name, scheme, errors.get(name, ()), full_states))
    if quantizing and not full_states:  # every comparison was finished before
        with progress.stage(f"{patched.method}, none"):
            progress.advance(setting.compared.numel())
    return rows


def _measure(
    setting: Setting,
    patched: MethodInPlace,
    name: str,
    scheme: Scheme,
    layer_errors: tuple[LayerErrors, ...],
    full_states: list[Tensor],
) -> CheckRow:
    """Measure one scheme under a method that is in place; ``full_states`` as for :func:`_divergence`."""
    quantizing = scheme != Scheme()
    with quantized(setting.model, scheme, **patched.plan_options(setting)) as factory:
        cache = factory if quantizing else None
        scores = setting.suite.run(setting.model, cache=cache, window_batch=1, resume=setting.result_cache)
    key_bits, value_bits, cache_bits = _bits(setting, patched, scheme)
    return CheckRow(
        method=patched.method,
        scheme=name,
        scheme_text=str(scheme),
        scores=scores,
        tables=patched.tables,
        divergence=_divergence(setting, patched, scheme, full_states) if quantizing else None,
        key_bits=key_bits,
        value_bits=value_bits,
        cache_bits=cache_bits,
        errors=layer_errors,
    )


# --- parts -----------------------------------------------------------------------------------------------------------


def means_of(setting: Setting, calibration_rows: Tensor) -> dict[int, Tensor]:
    """Return the mean key of each head before rotation, by layer."""
    mark = (
        key(kind="means", model=fingerprint(setting.model), ids=_sha(calibration_rows))
        if setting.result_cache is not None
        else ""
    )
    means = (setting.result_cache or {}).get(mark)
    if means is not None:
        progress.advance(calibration_rows.numel())
    else:
        captured = capture(setting.model, calibration_rows)
        means = [[layer.index, layer.key.mean.tolist()] for layer in captured.layers]
        if setting.result_cache is not None:
            setting.result_cache[mark] = means
    return {index: torch.tensor(mean, dtype=torch.float64) for index, mean in means}


def _errors(
    setting: Setting, patched: MethodInPlace, schemes: Mapping[str, Scheme]
) -> dict[str, tuple[LayerErrors, ...]]:
    """Measure attention errors in one pass, of the schemes whose errors are not in the result cache."""
    ids = setting.suite.windows[0].ids[:ERRORS]
    options = patched.plan_options(setting) | {"outliers": patched.long_pairs}
    if setting.result_cache is None:
        return attention_errors(setting.model, ids, schemes, **options) if schemes else {}
    long = {index: mask.tolist() for index, mask in patched.long_pairs.items()}
    about = {"kind": "errors", "model": fingerprint(setting.model), "ids": _sha(ids), "long": long}
    marks = {name: key(**about, cache=_identity(setting, patched, scheme)) for name, scheme in schemes.items()}
    fresh = {name: scheme for name, scheme in schemes.items() if marks[name] not in setting.result_cache}
    measured = attention_errors(setting.model, ids, fresh, **options) if fresh else {}
    progress.advance(len(ids) * (len(schemes) - len(fresh)))
    for name, layer_errors in measured.items():
        setting.result_cache[marks[name]] = finite(
            [[_plain(getattr(e, item.name)) for item in fields(e)] for e in layer_errors]
        )
    return {
        name: tuple(LayerErrors(layer, *map(_tensor, rest)) for layer, *rest in setting.result_cache[mark])
        for name, mark in marks.items()
    }


def _identity(setting: Setting, patched: MethodInPlace, scheme: Scheme) -> str:
    with quantized(setting.model, scheme, **patched.plan_options(setting)) as factory:
        return factory.identity


def _sha(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _tensor(values: Any) -> Tensor:
    """Return a stored list as a tensor; None stands for a number that is not finite."""
    if values and isinstance(values[0], list):
        return torch.stack([_tensor(row) for row in values])
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def _bits(setting: Setting, patched: MethodInPlace, scheme: Scheme) -> tuple[float, float, dict[int, float]]:
    """Return effective bits of keys and values, mean over layers, and those of whole caches by length."""
    plans, full = plan_layers(setting.model, scheme, **patched.plan_options(setting)), FORMATS["none"]
    bits: tuple[list[float], list[float]] = ([], [])
    stored, elements = dict.fromkeys(setting.lengths, 0.0), dict.fromkeys(setting.lengths, 0)
    for layer in (layer for layer in patched.capture.layers if layer.keys_of == layer.index):
        plan = plans[layer.index]
        kept_pairs = 0 if plan.kept_features is None else int(plan.kept_features.sum()) // 2
        sides = (("key", plan.key, layer.key), ("value", plan.value, layer.value))
        for side_bits, (name, side, states) in zip(bits, sides, strict=True):
            heads, width = states.mean.shape
            own = effective_bits(side, head_dim=width, kept_pairs=kept_pairs)
            side_bits.append(own)
            for length in setting.lengths:
                held = min(length, plan.window or length)
                end = plan.frozen(name, length + bool(plan.flush))  # what the next query reads is what is stored
                rounded = max(0, end - max(plan.sinks, length - held)) if side.format != "none" else 0
                stored[length] += heads * width * (own * rounded + full * (held - rounded))
                elements[length] += heads * width * held
    whole = {length: stored[length] / elements[length] for length in setting.lengths}
    return math.fsum(bits[0]) / len(bits[0]), math.fsum(bits[1]) / len(bits[1]), whole


def measure_attribution(setting: Setting, patched: MethodInPlace, row: CheckRow) -> Attribution:
    """Measure what parts of a scheme cost on the first windows."""
    model, scheme = setting.model, Scheme.parse(row.scheme_text)
    windows = setting.suite.windows[: setting.attributed]
    size = setting.lengths[-1]
    reads = readings(len(patched.capture.layers))
    mark = ""
    if setting.result_cache is not None:
        about = {"model": fingerprint(model), "ids": [_sha(window.ids) for window in windows]}
        mark = key(
            kind="attribution",
            cache=_identity(setting, patched, scheme),
            chunk=setting.chunk,
            limit=setting.limits.tolerance,
            **about,
        )
        if mark in setting.result_cache:
            progress.advance(reads * len(windows) * size)
            stored = setting.result_cache[mark]
            return Attribution(**{**stored, "layers": {int(index): cost for index, cost in stored["layers"].items()}})

    def loss(change: Callable[[LayerPlan], LayerPlan] | None) -> float:
        with quantized(model, scheme, **patched.plan_options(setting)) as factory:
            if change is not None:
                factory.run.plans = {index: change(plan) for index, plan in factory.run.plans.items()}
            chunk = None if setting.chunk is None else min(setting.chunk, size)
            options: dict[str, Any] = {"chunk": chunk, "cache": factory}
            return perplexity(model, windows, window=size, **options).nll

    def only(layer: int) -> Callable[[LayerPlan], LayerPlan]:
        return lambda plan: plan if plan.keys_of == layer else replace(plan, key=Side(), value=Side())

    full = loss(lambda plan: replace(plan, key=Side(), value=Side()))
    attribution = Attribution(
        whole=loss(None) - full,
        keys=loss(lambda plan: replace(plan, value=Side())) - full,
        values=loss(lambda plan: replace(plan, key=Side())) - full,
        layers={layer.index: loss(only(layer.keys_of)) - full for layer in patched.capture.layers},
    )
    named_layers, pairs, _ = attribute(row.errors, longest_keys(patched.capture), attribution, setting.limits.tolerance)
    if pairs and not scheme.key.hadamard:
        widths = {layer.index: layer.key.mean.shape[1] for layer in patched.capture.layers}

        def without(plan: LayerPlan) -> LayerPlan:
            mask = torch.isin(torch.arange(plan.pairs), torch.tensor(pairs))
            exact = features_of(mask, widths[plan.index], plan.interleaved)
            return replace(plan, exact=exact) if plan.index in named_layers else plan

        attribution = replace(attribution, left=loss(without) - full)
    else:
        progress.advance(len(windows) * size)
    if setting.result_cache is not None:
        setting.result_cache[mark] = finite(asdict(attribution))
    return attribution


def readings(layers: int) -> int:
    """Return how often :func:`measure_attribution` reads its windows: whole, each part, each layer, named pairs."""
    return 5 + layers


@torch.no_grad()
def _divergence(setting: Setting, patched: MethodInPlace, scheme: Scheme, full: list[Tensor]) -> Divergence:
    """Compare the next token's distribution with and without a scheme, a slice of positions at a time.

    ``full`` is filled with the states in full precision when they are first needed.
    """
    model, chunk, result_cache = setting.model, setting.chunk, setting.result_cache
    ids = setting.compared
    about = {"model": fingerprint(model), "ids": _sha(ids), "chunk": chunk} if result_cache is not None else {}
    mark = key(kind="divergence", cache=_identity(setting, patched, scheme), **about)
    if result_cache is not None and mark in result_cache:
        progress.advance(ids.numel())
        return Divergence(**result_cache[mark])

    def states(cache: CacheFactory | None) -> list[Tensor]:
        reader, progress = (
            Reader(model),
            Progress(
                ids.numel(),
            ),
        )
        windows = []
        for row in ids:
            past = cache() if cache is not None else reader.new_cache(len(row)) if chunk else None
            windows.append(torch.cat([part[0] for _, part in reader.read(row[None], past, chunk, progress)]))
        progress.finish()
        return windows

    total, same, count = 0.0, 0, 0
    with in_eval_mode(model):
        if not full:
            with progress.stage(f"{patched.method}, none"):
                full[:] = states(None)
        with quantized(model, scheme, **patched.plan_options(setting)) as factory:
            rough = states(factory)
        reader = Reader(model)
        for one, other in zip(full, rough, strict=True):
            for low in range(0, len(one), SLICE):
                p, q = (reader.logits(part[low : low + SLICE]).log_softmax(-1) for part in (one, other))
                total += float((p.exp() * (p - q)).sum())
                same += int((p.argmax(-1) == q.argmax(-1)).sum())
                count += len(p)
    divergence = Divergence(total / count, same / count, count)
    if result_cache is not None:
        result_cache[mark] = asdict(divergence)
    return divergence
