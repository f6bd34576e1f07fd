"""Measure a format under a method that is in place, for a check of quantized caches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rope_patch.evaluation.compare import naming_method
from rope_patch.evaluation.count_tokens import tokens_to_read
from rope_patch.kv_cache.blocks import scheme_identity
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.schemes import Scheme, Side
from rope_patch.kv_evaluation.attention_errors import attention_errors
from rope_patch.kv_evaluation.attribution import (
    MOST_REMEDIES,
    Attribution,
    Change,
    error_shares,
    remedies,
    with_sides,
    without_causes,
)
from rope_patch.kv_evaluation.cache_size import cache_bits, heads_of, stored_states
from rope_patch.kv_evaluation.check_setting import COMPARED_WINDOWS, ERROR_TOKENS, Setting, WindowStates
from rope_patch.kv_evaluation.layer_outputs import LayerOutputs
from rope_patch.kv_evaluation.verdicts import CheckRow, Divergence
from rope_patch.modeling.inputs import tensor_hash
from rope_patch.modeling.read_at_once import rows_at_once, scored_at_once
from rope_patch.modeling.reader import Reader
from rope_patch.options.evaluation import EvalSpec
from rope_patch.runtime import progress


def measure_formats(setting: Setting, formats: Mapping[str, Scheme]) -> list[CheckRow]:
    """Measure formats under a method that is in place.

    Args:
        setting: the setting of the check.
        formats: the formats that are measured, by name.
    """
    rows = []
    for name, scheme in formats.items():
        with naming_method(name), progress.stage(f"{setting.method}, {name}"):
            rows.append(_measure(setting, name, scheme))
    return rows


def _measure(setting: Setting, name: str, scheme: Scheme) -> CheckRow:
    """Measure one format, known by a name."""
    quantizing = scheme != Scheme()
    divergences: dict[int, Divergence] = {}
    # One window at a time, so that what a cache rounds has the same digits whatever the other windows are.
    with quantized(setting.model, scheme, layers=setting.layers) as factory:
        cache = factory if quantizing else None
        states = setting.states
        if quantizing:
            states = WindowStates(setting.reader, setting.compared, setting.chunk, factory)
        scores = setting.suite.run(setting.model, cache=cache, window_batch=1, resume=setting.work, known=states.of)
        if quantizing:
            divergences = _divergences(setting, scheme, states)
    stored = stored_states(setting.layers, heads_of(setting.capture), scheme)
    return CheckRow(
        method=setting.method,
        format=name,
        format_text=str(scheme),
        scores=scores,
        tables=setting.tables,
        divergences=divergences,
        key_bits=fmean(states.bits for states in stored if states.name == "keys"),
        value_bits=fmean(states.bits for states in stored if states.name == "values"),
        cache_bits={length: cache_bits(stored, length) for length in setting.lengths},
    )


def _shares(setting: Setting, scheme: Scheme) -> dict[str, float]:
    """Measure the causes of the errors of attention at the beginning of the first window."""
    ids = setting.suite.windows[0].ids[:ERROR_TOKENS]
    changes = without_causes(setting.layers, setting.capture)

    def measure() -> dict[str, float]:
        errors = attention_errors(setting.model, ids, scheme, setting.layers, list(changes.values()))
        return error_shares(errors, list(changes))

    # Which pairs are outliers is measured on the compared windows.
    about = {"scheme": scheme_identity(scheme), "ids": tensor_hash(ids), "compared": tensor_hash(setting.compared)}
    return dict(setting.finished(len(ids), {"error shares": measure}, **about)["error shares"])


def measure_attribution(setting: Setting, row: CheckRow) -> Attribution:
    """Measure the costs of a format's parts on the compared windows, and what would help.

    Args:
        setting: the setting of the check.
        row: the row of the format.
    """
    scheme = Scheme.parse(row.format_text)
    tokens = setting.compared.numel()
    ids = tensor_hash(setting.compared)
    outputs = LayerOutputs(setting.reader, setting.layers)

    def kl(change: Change, first: int = 0) -> float:
        first *= not setting.chunk  # where chunks are read, the first layers say how much there is already
        if first:
            outputs.read(setting.compared)
        with quantized(setting.model, scheme, layers=setting.layers) as factory:
            factory.run.plans = {index: change(plan) for index, plan in factory.run.plans.items()}
            begin = outputs.passes_from(first)
            states = WindowStates(setting.reader, setting.compared, setting.chunk, factory, begin)
            return float(_compared(setting, states)[0].mean())

    def measured(changes: Mapping[str, Change], first: Mapping[str, int] = MappingProxyType({})) -> list[float]:
        parts = {
            f"attribution by KL: {part}": partial(kl, change, first.get(part, 0)) for part, change in changes.items()
        }
        costs = setting.finished(tokens, parts, scheme=scheme_identity(scheme), ids=ids, chunk=setting.chunk)
        return list(costs.values())

    assert row.divergence is not None
    whole = row.divergence.kl
    owners = [layer.index for layer in setting.layers if layer.keys_of == layer.index]
    single = {f"layer {layer}": layer for layer in owners}
    parts = {name: with_sides(Side(), Side(), {*owners} - {layer}) for name, layer in single.items()}
    keys, *costs = measured({"keys": with_sides(scheme.key, Side()), **parts}, single)
    layers = dict(zip(owners, costs, strict=True))
    possible = remedies(scheme, setting, layers, of_keys=keys > whole / 2)
    values = measured({remedy.name: change for remedy, change in possible})
    helps = [replace(remedy, kl=value) for (remedy, _), value in zip(possible, values, strict=True)]
    left = _passes(len(setting.layers)) - 1 - len(owners) - len(helps)
    progress.more(-left * tokens)
    shares = _shares(setting, scheme)
    return Attribution(whole, keys, layers, shares, tuple(sorted(helps, key=lambda remedy: remedy.kl)))


def _passes(layers: int) -> int:
    """Return how often :func:`measure_attribution` reads its windows at most."""
    return 1 + layers + MOST_REMEDIES  # the 1 is for keys


def tokens_to_attribute(spec: EvalSpec, layers: int) -> int:
    """Return the number of tokens that each unsafe format adds under each method, at most."""
    return _passes(layers) * _tokens_compared(spec) + min(ERROR_TOKENS, spec.longest)


def tokens_to_check(spec: EvalSpec, formats: int, methods: int) -> int:
    """Return the number of tokens that a check reads if no format is unsafe.

    Under each method these are the windows and prompts, in full precision and through each format. The compared windows
    count twice in full precision: when they are read, for the statistics of keys, and when they are scored.

    Args:
        spec: the spec of the check, which states a number of windows, that of the suite.
        formats: number of formats besides full precision.
        methods: number of methods under which the formats are checked.
    """
    return methods * ((1 + formats) * tokens_to_read(spec) + _tokens_compared(spec))


def _tokens_compared(spec: EvalSpec) -> int:
    return min(COMPARED_WINDOWS, spec.windows or 0) * spec.longest


def _divergences(setting: Setting, scheme: Scheme, states: WindowStates) -> dict[int, Divergence]:
    """Compare the distribution of the next token with and without a format.

    Returns:
        The comparison over the positions below each length.
    """

    def measure() -> dict[str, Any]:
        measured = _compared(setting, states)
        divergences = {}
        for length in setting.lengths:
            below = measured[..., :length].flatten(1)
            kl, top1 = below.mean(1).tolist()
            divergences[str(length)] = {"kl": kl, "top1": top1, "tokens": below.shape[1]}
        return divergences

    ids = setting.compared
    about = {
        "scheme": scheme_identity(scheme),
        "ids": tensor_hash(ids),
        "chunk": setting.chunk,
        "lengths": list(setting.lengths),
    }
    kind = "divergence, float32 logits"
    stored = setting.finished(0, {kind: measure}, **about)[kind]
    return {int(length): Divergence(**part) for length, part in stored.items()}


@torch.no_grad()
def _compared(setting: Setting, states: WindowStates) -> Tensor:
    """Return KL and whether the first choice is the same: (2, windows, tokens)."""
    pairs = zip(setting.states.all(), states.all(), strict=True)
    return torch.stack([kl_by_position(setting.reader, plain, rough) for plain, rough in pairs], 1)


def kl_by_position(reader: Reader, plain: Tensor, rough: Tensor) -> Tensor:
    """Return KL and whether the first choice is the same, (2, tokens), a slice of positions at a time.

    Args:
        reader: the model, taken apart.
        plain: (tokens, hidden) last hidden states in full precision.
        rough: those through a quantized cache.
    """
    parts = []
    size = scored_at_once(len(plain), plain.device.type)
    for states in zip(torch.split(plain, size), torch.split(rough, size), strict=True):
        logits = [reader.own_logits(part) for part in states]
        few = rows_at_once(logits[0])
        for rows in zip(*(torch.split(each, few) for each in logits), strict=True):
            p, q = (part.float().log_softmax(-1) for part in rows)
            kl = (p.exp() * (p - q)).sum(-1)
            same = p.argmax(-1) == q.argmax(-1)
            parts.append(torch.stack([kl, same.to(kl.dtype)]))
    return torch.cat(parts, 1).cpu().double()
