"""What a check of quantized caches measures of a scheme under a method that is in place."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from scipy import stats
from torch import Tensor, nn

from rope_patch import frequencies
from rope_patch.evaluation.compare import Row, named
from rope_patch.evaluation.documents import TokenDocument
from rope_patch.evaluation.result_cache import finite, key
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.evaluation.prompts import PromptMaker
from rope_patch.evaluation.retrieval import retrieval
from rope_patch.kv_cache.cache import quantized
from rope_patch.kv_cache.plans import LayerPlan, features_of, plan_layers
from rope_patch.kv_cache.schemes import FORMATS, Scheme, Side, effective_bits
from rope_patch.kv_evaluation.errors import LayerErrors, attention_errors
from rope_patch.kv_evaluation.verdicts import Attribution, CheckRow, Divergence, blame, longest_keys
from rope_patch.modeling.capture import capture
from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.scoring import CacheFactory, Reader, fingerprint
from rope_patch.modeling.statistics import Capture
from rope_patch.tables import RotaryTable

COMPARED = 2
"""Windows whose distributions are compared, and whose statistics tell radii and outliers."""
ERRORS = 2048
"""Tokens of the text at which attention errors are taken, at most [tokens]."""
SLICE = 256


@dataclass(eq=False)
class Setting:
    """What is the same for all methods and schemes."""

    model: nn.Module
    tokenizer: Any
    texts: Sequence[TokenDocument]
    maker: PromptMaker
    lengths: Sequence[int]
    depths: Sequence[float]
    asked: Mapping[str, Any]
    chunk: int | None
    context: int | None
    kept: MutableMapping[str, Any] | None
    progress: Callable[[str, int], None]


@dataclass(frozen=True, eq=False)
class Patched:
    """A method in place."""

    method: str
    slots: tuple[RotaryTable, ...]
    means: Mapping[int, Tensor] | None
    seen: Capture
    long: Mapping[int, Tensor]

    def options(self, here: Setting) -> dict[str, Any]:
        """What plans need."""
        return {"means": self.means, "context": here.context}


def measure(here: Setting, now: Patched, schemes: Mapping[str, Scheme], cause: str | None = None) -> list[CheckRow]:
    """Measure schemes under a method that is in place."""
    model, options = here.model, now.options(here)
    some = {name: scheme for name, scheme in schemes.items() if scheme != Scheme()}
    errors = _errors(here, now, some)
    full: list[Tensor] = []  # states of the compared windows in full precision: read once, if at all
    made = []
    for name, scheme in schemes.items():
        stage = f"{now.method}, {name}"
        with named(name), quantized(model, scheme, **options) as factory:
            cache = factory if name in some else None
            shared: dict[str, Any] = {
                "cache": cache,
                "resume": here.kept,
                "progress": functools.partial(here.progress, stage),
            }
            longest = here.lengths[-1]
            score = perplexity(
                model,
                here.texts,
                window=longest,
                buckets=[0, *here.lengths],
                chunk=None if here.chunk is None else min(here.chunk, longest),
                **shared,
            )
            found = retrieval(
                model,
                here.tokenizer,
                lengths=here.lengths,
                depths=here.depths,
                haystack=here.maker,
                chunk=here.chunk,
                **here.asked,
                **shared,
            )
        own = errors.get(name, ())
        made.append(
            CheckRow(
                now.method,
                name,
                str(scheme),
                Row(now.method, score, found, now.slots),
                _divergence(here, now, scheme, full) if name in some else None,
                *_bits(here, now, scheme),
                own,
                _prediction(now.seen, own, here.context),
                cause,
            )
        )
    return made


# --- parts -----------------------------------------------------------------------------------------------------------


def means_of(here: Setting, learnt: Tensor) -> dict[int, Tensor]:
    """Return the mean key of each head before rotation, by layer."""
    mark = key(kind="means", model=fingerprint(here.model), ids=_sha(learnt)) if here.kept is not None else ""
    found = (here.kept or {}).get(mark)
    if found is None:
        found = [[layer.index, layer.key.mean.tolist()] for layer in capture(here.model, learnt).layers]
        if here.kept is not None:
            here.kept[mark] = found
    return {index: torch.tensor(mean, dtype=torch.float64) for index, mean in found}


def _errors(here: Setting, now: Patched, schemes: Mapping[str, Scheme]) -> dict[str, tuple[LayerErrors, ...]]:
    """Measure attention errors, of the schemes whose errors are not kept, in one pass."""
    ids, options = here.texts[0].ids[:ERRORS], now.options(here)
    if here.kept is None:
        return attention_errors(here.model, ids, schemes, outliers=now.long, **options)
    long = {index: mask.tolist() for index, mask in now.long.items()}
    about = {"kind": "errors", "model": fingerprint(here.model), "ids": _sha(ids), "long": long}
    marks = {name: key(**about, cache=_identity(here, now, scheme)) for name, scheme in schemes.items()}
    fresh = {name: scheme for name, scheme in schemes.items() if marks[name] not in here.kept}
    measured = attention_errors(here.model, ids, fresh, outliers=now.long, **options) if fresh else {}
    for name, made in measured.items():
        here.kept[marks[name]] = finite([[_plain(getattr(e, item.name)) for item in fields(e)] for e in made])
    return {
        name: tuple(LayerErrors(layer, *map(_tensor, rest)) for layer, *rest in here.kept[mark])
        for name, mark in marks.items()
    }


def _identity(here: Setting, now: Patched, scheme: Scheme) -> str:
    with quantized(here.model, scheme, **now.options(here)) as factory:
        return factory.identity


def _sha(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def _tensor(values: Any) -> Tensor:
    """What was kept as a list, None where it was not finite."""
    if values and isinstance(values[0], list):
        return torch.stack([_tensor(row) for row in values])
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def possible(here: Setting, now: Patched, tried: Mapping[str, Scheme]) -> dict[str, Scheme]:
    """Return the schemes that this model allows, and that do something on it: at the longest length, at least."""
    made = {}
    for name, scheme in tried.items():
        try:
            plans = plan_layers(here.model, scheme, **now.options(here)).values()
        except ValueError:
            continue
        centred = any(plan.mean is not None and bool(plan.mean.any()) for plan in plans)
        kept = any(plan.kept is not None for plan in plans)
        _, _, bits = _bits(here, now, scheme)
        rounds = bits[here.lengths[-1]] != FORMATS["none"]
        if (centred or not scheme.key.centre) and (kept or not scheme.key.keep) and rounds:
            made[name] = scheme
    return made


def _bits(here: Setting, now: Patched, scheme: Scheme) -> tuple[float, float, dict[int, float]]:
    """Return effective bits of keys and values, mean over layers, and those of whole caches by length."""
    plans, full = plan_layers(here.model, scheme, **now.options(here)), FORMATS["none"]
    bits: tuple[list[float], list[float]] = ([], [])
    stored, elements = dict.fromkeys(here.lengths, 0.0), dict.fromkeys(here.lengths, 0)
    for layer in (layer for layer in now.seen.layers if layer.keys_of == layer.index):
        plan = plans[layer.index]
        kept = 0 if plan.kept is None else int(plan.kept.sum()) // 2
        for made, side, states in zip(bits, (plan.key, plan.value), (layer.key, layer.value), strict=True):
            heads, width = states.mean.shape
            own = effective_bits(side, head_dim=width, heads=heads, kept=kept)
            made.append(own)
            for length in here.lengths:
                held = min(length, plan.window or length)
                end = plan.sinks + max(0, length - plan.residual - plan.sinks) // side.block * side.block
                rounded = max(0, end - max(plan.sinks, length - held)) if side.format != "none" else 0
                stored[length] += heads * width * (own * rounded + full * (held - rounded))
                elements[length] += heads * width * held
    whole = {length: stored[length] / elements[length] for length in here.lengths}
    return math.fsum(bits[0]) / len(bits[0]), math.fsum(bits[1]) / len(bits[1]), whole


def attribution(here: Setting, now: Patched, row: CheckRow, tolerance: float) -> Attribution:
    """Measure what parts of a scheme cost on the compared windows."""
    model, scheme = here.model, Scheme.parse(row.scheme_text)
    mark = ""
    if here.kept is not None:
        about = {"model": fingerprint(model), "ids": [_sha(window.ids) for window in here.texts[:COMPARED]]}
        mark = key(kind="attribution", cache=_identity(here, now, scheme), chunk=here.chunk, limit=tolerance, **about)
        if mark in here.kept:
            found = here.kept[mark]
            return Attribution(**{**found, "layers": {int(index): cost for index, cost in found["layers"].items()}})

    def loss(change: Callable[[LayerPlan], LayerPlan] | None) -> float:
        with quantized(model, scheme, **now.options(here)) as factory:
            if change is not None:
                factory.run.plans = {index: change(plan) for index, plan in factory.run.plans.items()}
            size = here.lengths[-1]
            chunk = None if here.chunk is None else min(here.chunk, size)
            return perplexity(model, here.texts[:COMPARED], window=size, chunk=chunk, cache=factory).nll

    def only(layer: int) -> Callable[[LayerPlan], LayerPlan]:
        return lambda plan: plan if plan.keys_of == layer else replace(plan, key=Side(), value=Side())

    full = loss(lambda plan: replace(plan, key=Side(), value=Side()))
    made = Attribution(
        whole=loss(None) - full,
        keys=loss(lambda plan: replace(plan, value=Side())) - full,
        values=loss(lambda plan: replace(plan, key=Side())) - full,
        layers={layer.index: loss(only(layer.keys_of)) - full for layer in now.seen.layers},
    )
    layers, pairs, _ = blame(row.errors, longest_keys(now.seen), made, tolerance)
    if pairs and not scheme.key.hadamard:
        widths = {layer.index: layer.key.mean.shape[1] for layer in now.seen.layers}

        def without(plan: LayerPlan) -> LayerPlan:
            mask = torch.isin(torch.arange(plan.pairs), torch.tensor(pairs))
            exact = features_of(mask, widths[plan.index], plan.interleaved)
            return replace(plan, exact=exact) if plan.index in layers else plan

        made = replace(made, left=loss(without) - full)
    if here.kept is not None:
        here.kept[mark] = finite(asdict(made))
    return made


def _prediction(seen: Capture, errors: Sequence[LayerErrors], context: int | None) -> tuple[float | None, float | None]:
    """Return how well radius and bound rank the pairs by their logit error."""
    found: list[Tensor] = []
    sizes: list[Tensor] = []
    below: list[Tensor] = []
    for error in errors:
        layer = seen.layer(error.layer)
        bound = frequencies.offset_frequency_bound(layer.context if context is None else context)
        found.append(error.pair.flatten())
        sizes.append((layer.key_by_query_head.radius * layer.query.mean_norm).flatten())
        below.append((layer.inv_freq < bound).double().expand(layer.query.heads, -1).flatten())
    if not found:
        return None, None

    def order(one: Tensor, other: Tensor) -> float | None:
        if not float(one.std()) > 0 or not float(other.std()) > 0:  # nothing is rounded, or all pairs are under it
            return None
        return float(stats.spearmanr(one, other).statistic)

    return order(torch.cat(found), torch.cat(sizes)), order(torch.cat(found), torch.cat(below))


@torch.no_grad()
def _divergence(here: Setting, now: Patched, scheme: Scheme, full: list[Tensor]) -> Divergence:
    """Compare the next token's distribution with and without a scheme, a slice of positions at a time.

    ``full`` is filled with the states in full precision when they are first needed.
    """
    model, chunk, kept = here.model, here.chunk, here.kept
    ids = torch.stack([window.ids for window in here.texts[:COMPARED]])
    about = {"model": fingerprint(model), "ids": _sha(ids), "chunk": chunk} if kept is not None else {}
    mark = key(kind="divergence", cache=_identity(here, now, scheme), **about)
    if kept is not None and mark in kept:
        return Divergence(**kept[mark])

    def states(cache: CacheFactory | None) -> list[Tensor]:
        reader = Reader(model)
        made = []
        for row in ids:
            past = cache() if cache is not None else reader.new_cache(len(row)) if chunk else None
            made.append(torch.cat([part[0] for _, part in reader.read(row[None], past, chunk)]))
        return made

    total, same, count = 0.0, 0, 0
    with in_eval_mode(model):
        full[:] = full or states(None)
        with quantized(model, scheme, **now.options(here)) as factory:
            rough = states(factory)
        reader = Reader(model)
        for one, other in zip(full, rough, strict=True):
            for low in range(0, len(one), SLICE):
                p, q = (reader.logits(part[low : low + SLICE]).log_softmax(-1) for part in (one, other))
                total += float((p.exp() * (p - q)).sum())
                same += int((p.argmax(-1) == q.argmax(-1)).sum())
                count += len(p)
    made = Divergence(total / count, same / count, count)
    if kept is not None:
        kept[mark] = asdict(made)
    return made
