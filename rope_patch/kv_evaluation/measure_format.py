"""Measure a format under a method that is in place, for a check of quantized caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.compare import naming_method
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.plans import LayerPlan
from rope_patch.kv_cache.schemes import Scheme, Side
from rope_patch.kv_evaluation.attention_errors import LayerErrors, attention_errors
from rope_patch.kv_evaluation.attribution import Attribution, longest_keys, worst_layers, worst_pairs
from rope_patch.kv_evaluation.cache_size import cache_bits, stored_states, token_bytes
from rope_patch.kv_evaluation.check_setting import COMPARED_WINDOWS, ERROR_TOKENS, MethodInPlace, Setting
from rope_patch.kv_evaluation.verdicts import CheckRow, Divergence
from rope_patch.modeling.attention_layers import split_pairs
from rope_patch.modeling.inputs import ids_hash
from rope_patch.modeling.scoring import LOGITS_AT_ONCE, CacheFactory, Reader
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.runtime import progress
from rope_patch.runtime.progress import Progress


def measure_formats(setting: Setting, patched: MethodInPlace, formats: Mapping[str, Scheme]) -> list[CheckRow]:
    """Measure formats under a method that is in place.

    Args:
        setting: the setting of the check.
        patched: the method that is in place.
        formats: the formats that are measured, by name.
    """
    # Read once: the distributions of all formats are compared with those that these states give.
    with progress.stage(f"{patched.method}, none"):
        patched.states = _states(setting, None)
    rows = []
    for name, scheme in formats.items():
        with naming_method(name), progress.stage(f"{patched.method}, {name}"):
            rows.append(_measure(setting, patched, name, scheme))
    return rows


def _measure(setting: Setting, patched: MethodInPlace, name: str, scheme: Scheme) -> CheckRow:
    """Measure one format, known by a name, under a method that is in place."""
    quantizing = scheme != Scheme()
    divergences: dict[int, Divergence] = {}
    errors: tuple[LayerErrors, ...] = ()
    # One window at a time, so that what a cache rounds has the same digits whatever the other windows are.
    with quantized(setting.model, scheme, layers=setting.layers) as factory:
        cache = factory if quantizing else None
        scores = setting.suite.run(setting.model, cache=cache, window_batch=1, resume=setting.result_cache)
        if quantizing:
            divergences = _divergences(setting, patched, scheme, factory)
    stored = stored_states(setting.layers, patched.capture, scheme)
    bits = {name: [states.bits for states in stored if states.name == name] for name in ("keys", "values")}
    if quantizing:
        errors = _errors(setting, scheme)
    return CheckRow(
        method=patched.method,
        format=name,
        format_text=str(scheme),
        scores=scores,
        tables=patched.tables,
        divergences=divergences,
        key_bits=math.fsum(bits["keys"]) / len(bits["keys"]),
        value_bits=math.fsum(bits["values"]) / len(bits["values"]),
        cache_bits={length: cache_bits(stored, length) for length in setting.lengths},
        token_bytes=token_bytes(stored),
        errors=errors,
    )


def _errors(setting: Setting, scheme: Scheme) -> tuple[LayerErrors, ...]:
    """Measure the errors of attention at the beginning of the first window."""
    ids = setting.suite.windows[0].ids[:ERROR_TOKENS]

    def measure() -> list[Any]:
        errors = attention_errors(setting.model, ids, scheme, setting.layers)
        return [[error.layer, error.logit.tolist(), error.pair.tolist()] for error in errors]

    stored = setting.finished(len(ids), measure, kind="errors", scheme=scheme.identity, ids=ids_hash(ids))
    return tuple(
        LayerErrors(layer, *(torch.tensor(part, dtype=torch.float64) for part in parts)) for layer, *parts in stored
    )


def measure_attribution(setting: Setting, patched: MethodInPlace, row: CheckRow) -> Attribution:
    """Measure the costs of a format's parts on the compared windows.

    Args:
        setting: the setting of the check.
        patched: the method that is in place.
        row: the row of the format.
    """
    windows, layers = setting.suite.windows[:COMPARED_WINDOWS], patched.capture.layers
    scheme = Scheme.parse(row.format_text)
    passes = 0

    def loss(part: str, change: Callable[[LayerPlan], LayerPlan]) -> float:
        nonlocal passes
        passes += 1
        with quantized(setting.model, scheme, layers=setting.layers) as factory:
            factory.run.plans = {index: change(plan) for index, plan in factory.run.plans.items()}
            cache = replace(factory, identity=f"{factory.identity}, {part}")
            window, resume = setting.suite.spec.longest, setting.result_cache
            return perplexity(
                setting.model, windows, window=window, chunk=setting.chunk, cache=cache, resume=resume
            ).nll

    def in_full(plan: LayerPlan, *names: str) -> LayerPlan:
        return replace(plan, sides=plan.sides | dict.fromkeys(names, Side()))

    def only(layer: int) -> Callable[[LayerPlan], LayerPlan]:
        return lambda plan: plan if plan.layer.keys_of == layer else in_full(plan, "keys", "values")

    # Full precision is read through the same attention function, so that nothing but rounding makes a difference.
    full = loss("full precision", lambda plan: in_full(plan, "keys", "values"))
    costs = {layer.index: loss(f"layer {layer.keys_of}", only(layer.keys_of)) - full for layer in layers}
    worst = worst_layers(costs, setting.limits.tolerance)
    attribution = Attribution(
        whole=loss("whole", lambda plan: plan) - full,
        keys=loss("keys", lambda plan: in_full(plan, "values")) - full,
        values=loss("values", lambda plan: in_full(plan, "keys")) - full,
        layers=costs,
        worst=worst,
    )
    candidates: list[tuple[int, ...]] = []
    # Pairs are looked for in keys alone, since values are not rotated. After a Hadamard transform each feature is a
    # mixture of all pairs, so that no pair can be left out.
    if abs(attribution.values) <= abs(attribution.keys) and not scheme.key.hadamard:
        if scheme.key.axis == "token":
            # Long keys stretch the scale that the features of a token share: their error lies in other pairs.
            candidates.append(longest_keys(patched.capture, worst))
        candidates.append(worst_pairs([error for error in row.errors if error.layer in worst]))
    least = abs(attribution.whole)
    for pairs in dict.fromkeys(candidates):
        if pairs:
            left = loss(f"without pairs {pairs} of layers {worst}", partial(_exact_pairs, worst, pairs)) - full
            if abs(left) < least:
                least = abs(left)
                attribution = replace(attribution, pairs=pairs, left=left)
    progress.known((passes_of_attribution(len(layers)) - passes) * setting.compared.numel())
    return attribution


def _exact_pairs(layers: Sequence[int], pairs: Sequence[int], plan: LayerPlan) -> LayerPlan:
    """Return the plan of a layer with some pairs of its keys in full precision, if it is one of these layers."""
    source = plan.layer
    if source.index not in layers:
        return plan
    exact = torch.zeros(source.parts["key"].head_dim, dtype=torch.bool)
    for half in split_pairs(exact, source.table.pairs, source.interleaved):
        half[[pair for pair in pairs if pair < source.table.pairs]] = True
    return replace(plan, exact=exact)


def passes_of_attribution(layers: int) -> int:
    """Return how often :func:`measure_attribution` reads its windows at most."""
    # In full precision, the whole format, keys, values, twice without some pairs, and each layer.
    return 6 + layers


def _states(setting: Setting, cache: CacheFactory | None) -> list[Tensor]:
    """Return the last hidden states of the compared windows, read through a quantized cache or in full precision."""
    ids = setting.compared
    reader = Reader(setting.model)
    windows = []
    read = Progress(ids.numel())
    with torch.no_grad(), in_eval_mode(setting.model):
        for row in ids:
            past: Any = None
            if cache is not None:
                past = cache()
            elif setting.chunk:
                past = reader.new_cache(len(row))
            windows.append(torch.cat([part[0] for _, part in reader.read(row[None], past, setting.chunk, read)]))
    read.finish()
    return windows


def _divergences(
    setting: Setting, patched: MethodInPlace, scheme: Scheme, cache: CacheFactory
) -> dict[int, Divergence]:
    """Compare the distribution of the next token with and without a format, a slice of positions at a time.

    Returns:
        The comparison over the positions below each length.
    """

    @torch.no_grad()
    def measure() -> dict[str, Any]:
        parts, reader = [], Reader(setting.model)
        rough = _states(setting, cache)
        for one, other in zip(patched.states, rough, strict=True):
            for low in range(0, len(one), LOGITS_AT_ONCE):
                p, q = (reader.logits(part[low : low + LOGITS_AT_ONCE]).log_softmax(-1) for part in (one, other))
                kl, same = (p.exp() * (p - q)).sum(-1), p.argmax(-1) == q.argmax(-1)
                parts.append(torch.stack([kl, same.to(kl.dtype)]).cpu().double())
        # (KL and whether the first choice is the same, windows, tokens)
        measured = torch.cat(parts, 1).reshape(2, *setting.compared.shape)
        below = {length: measured[..., :length].flatten(1) for length in setting.lengths}
        means = {length: part.mean(1).tolist() for length, part in below.items()}
        return {str(n): {"kl": kl, "top1": top1, "tokens": below[n].shape[1]} for n, (kl, top1) in means.items()}

    ids = setting.compared
    about = {"scheme": scheme.identity, "ids": ids_hash(ids), "chunk": setting.chunk, "lengths": list(setting.lengths)}
    stored = setting.finished(ids.numel(), measure, kind="divergence", **about)
    return {int(length): Divergence(**part) for length, part in stored.items()}
