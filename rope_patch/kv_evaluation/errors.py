"""What quantizing a cache does to logits and outputs of attention, pair by pair, layer by layer.

One forward pass in full precision serves any number of schemes: each layer's keys and values are rounded where they
appear, and the error is taken at a sample of queries. So a layer's error is its own, not what the layers below it add.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from rope_patch.kv_cache.attention import attend, padding_mask, running
from rope_patch.kv_cache.cache import noting_turns
from rope_patch.kv_cache.layer import QuantizedLayer, SchemeRun
from rope_patch.kv_cache.plans import LayerPlan, features_of, plan_layers
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.modeling.attention_probe import attending_with
from rope_patch.modeling.modes import in_eval_mode
from rope_patch.modeling.statistics import pairs_of
from rope_patch.patching.locate import device_of, locate
from rope_patch.runtime.progress import Progress

NAME = "rope_patch_kv_errors"
QUERIES = 64
"""Queries of a text at which errors are taken, spread over its second half."""


@dataclass(frozen=True, eq=False)
class LayerErrors:
    """What a scheme does to one layer. Tensors are float64 on the CPU, by query head.

    Attributes:
        layer: index.
        logit: (heads,) rms error of the scaled logits with quantized keys.
        spread: (heads,) standard deviation of those logits, to compare with.
        pair: (heads, pairs) rms of what each pair adds to that error.
        output: (heads,) error of the attention's output, relative to it; keys and values both quantized.
        direct: (heads,) share of the squared logit error that lies in the outlier pairs; nan without any.
        induced: (heads,) share that goes when the outlier pairs are kept in full precision; nan without any, under a
            Hadamard matrix, which leaves no pair to keep, and where heads share a scale.
    """

    layer: int
    logit: Tensor
    spread: Tensor
    pair: Tensor
    output: Tensor
    direct: Tensor
    induced: Tensor


@torch.no_grad()
def attention_errors(
    model: nn.Module,
    token_ids: Tensor,
    schemes: Mapping[str, Scheme],
    *,
    means: Mapping[int, Tensor] | None = None,
    context: int | None = None,
    outliers: Mapping[int, Tensor] | None = None,
    queries: int = QUERIES,
) -> dict[str, tuple[LayerErrors, ...]]:
    """Measure what schemes do to the attention of every layer, in one pass.

    Args:
        model: a causal language model of transformers.
        token_ids: (tokens,) the text.
        schemes: by name.
        means: as for :func:`~rope_patch.kv_cache.plans.plan_layers`.
        context: as for ``plan_layers`` [tokens].
        outliers: (key heads, pairs) bool of each layer: the pairs whose direct and induced shares are asked for.
        queries: at which errors are taken.

    Raises:
        ValueError: as for ``plan_layers``; a text that is not one row of tokens.
    """
    if token_ids.ndim != 1 or not len(token_ids):
        raise ValueError(f"token_ids must be (tokens,), got shape {tuple(token_ids.shape)}")
    site = locate(model)
    root: Any = site.model
    decoder = root.get_decoder() if hasattr(root, "get_decoder") else root
    plans = {name: plan_layers(model, scheme, means=means, context=context) for name, scheme in schemes.items()}
    plain = SchemeRun(plan_layers(model, Scheme()))
    study = _Study(plans, plain, outliers or {}, queries)
    progress = Progress(len(token_ids) * len(schemes), reads=len(token_ids))
    with contextlib.ExitStack() as stack:
        stack.enter_context(in_eval_mode(model))
        stack.enter_context(noting_turns(site, plain))
        stack.enter_context(running(plain, root))
        stack.callback(_STUDY.reset, _STUDY.set(study))
        stack.enter_context(attending_with(root, NAME))
        stack.enter_context(progress.within_pass(decoder, len(token_ids)))
        decoder(input_ids=token_ids[None].to(device_of(root.get_input_embeddings())), use_cache=False)
    progress.finish()
    return {name: tuple(layer_errors) for name, layer_errors in study.layer_errors.items()}


class _Study:
    """The schemes to measure, and the errors of the layers measured so far."""

    def __init__(
        self, plans: Mapping[str, dict[int, LayerPlan]], run: SchemeRun, outliers: Mapping[int, Tensor], queries: int
    ) -> None:
        self.plans, self.run, self.outliers, self.queries = plans, run, outliers, queries
        self.layer_errors: dict[str, list[LayerErrors]] = {name: [] for name in plans}

    def add(self, index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """Measure one layer: query (1, heads, tokens, head_dim), key and value of the key heads."""
        total = query.shape[2]
        count = min(self.queries, total - total // 2)
        places = torch.linspace(total // 2, total - 1, count).long()  # no two alike: there are more tokens than queries
        queries = query[0, :, places].double()
        turns = {kind: (cos.cpu(), sin.cpu()) for kind, (cos, sin) in self.run.turns.items()}
        for name, plans in self.plans.items():
            plan = plans[index]
            store = QuantizedLayer(plan, SchemeRun(plans, turns))
            store.update(key, value)
            store.freeze(total)
            self.layer_errors[name].append(self._errors(plan, store, queries, places, scaling))

    def _errors(
        self, plan: LayerPlan, store: QuantizedLayer, query: Tensor, places: Tensor, scaling: float
    ) -> LayerErrors:
        heads, total = query.shape[0], store.raw_keys.shape[2]
        groups = heads // store.raw_keys.shape[1]
        raw_key, key, raw_value, value = (
            states[0].double().repeat_interleave(groups, 0)
            for states in (store.raw_keys, store.keys, store.raw_values, store.values)
        )
        columns = torch.arange(total)
        apart = places[:, None] - columns
        visible = (apart >= 0) & (apart < (plan.window or total))
        frozen = {
            name: torch.zeros(len(places), len(columns), dtype=torch.bool)
            if side.format == "none"
            else (columns >= plan.sinks) & (columns < plan.frozen(name, places[:, None] + 1))
            for name, side in (("key", plan.key), ("value", plan.value))
        }
        wrong = visible & frozen["key"]
        count = wrong.sum().clamp_min(1)
        logits = query @ raw_key.mT * scaling
        off = torch.where(wrong, query @ (key - raw_key).mT * scaling, 0.0)
        rms = (off.square().sum((1, 2)) / count).sqrt()
        by_pair = torch.stack(
            [
                (
                    torch.where(wrong, torch.einsum("hqx,hkx->hqk", q, d) * scaling, 0.0).square().sum((1, 2)) / count
                ).sqrt()
                for q, d in zip(
                    pairs_of(query, plan.pairs, plan.interleaved).unbind(2),
                    pairs_of(key - raw_key, plan.pairs, plan.interleaved).unbind(2),
                    strict=True,
                )
            ],
            dim=1,
        )
        rounded_logits = torch.where(wrong, logits, torch.nan)
        spread = (
            (torch.nanmean(rounded_logits.square(), (1, 2)) - torch.nanmean(rounded_logits, (1, 2)).square())
            .clamp_min(0)
            .sqrt()
        )
        weights, rough = (_weights(plan, part, visible) for part in (logits, logits + off))
        out = weights @ raw_value
        got = (rough * frozen["value"]) @ value + (rough * ~frozen["value"]) @ raw_value
        output = (got - out).square().sum((1, 2)).sqrt() / out.square().sum((1, 2)).sqrt().clamp_min(1e-300)
        direct, induced = self._shares(plan, store, query, off, wrong, scaling, groups)
        return LayerErrors(plan.index, rms, spread.nan_to_num(), by_pair, output, direct, induced)

    def _shares(
        self,
        plan: LayerPlan,
        store: QuantizedLayer,
        query: Tensor,
        off: Tensor,
        wrong: Tensor,
        scaling: float,
        groups: int,
    ) -> tuple[Tensor, Tensor]:
        """Return direct and induced shares of the outlier pairs, by query head."""
        heads = query.shape[0]
        direct, induced = torch.full((2, heads), torch.nan, dtype=torch.float64)
        marked = self.outliers.get(plan.index)
        if marked is None or plan.key.format == "none":
            return direct, induced
        whole = off.square().sum((1, 2))
        for head in range(heads):
            mask = marked[head // groups]
            if not mask.any() or not whole[head] > 0:
                continue
            features = features_of(mask, query.shape[-1], plan.interleaved)
            raw, rounded = (states[0, head // groups].double() for states in (store.raw_keys, store.keys))
            inside = torch.where(wrong, query[head][:, features] @ (rounded - raw)[:, features].T * scaling, 0.0)
            direct[head] = (inside * off[head]).sum() / whole[head]
            if plan.key.hadamard:
                continue
            mean = None if plan.shifted else _of_head(plan.mean, head // groups)  # stored keys are shifted already
            exact_plan = replace(plan, exact=features, mean=mean)
            again = QuantizedLayer(exact_plan, SchemeRun({plan.index: exact_plan}, store.run.turns))
            one = slice(head // groups, head // groups + 1)
            again.update(store.raw_keys[:, one], store.raw_values[:, one])
            again.freeze(store.raw_keys.shape[2])
            left = torch.where(wrong, query[head] @ (again.keys[0, 0].double() - raw).T * scaling, 0.0)
            induced[head] = 1 - left.square().sum() / whole[head]
        return direct, induced


def _of_head(mean: Tensor | None, head: int) -> Any:
    return None if mean is None else mean[head : head + 1]


def _weights(plan: LayerPlan, logits: Tensor, visible: Tensor) -> Tensor:
    capped = logits if plan.softcap is None else plan.softcap * torch.tanh(logits / plan.softcap)
    return capped.masked_fill(~visible, -torch.inf).softmax(-1)


_STUDY: ContextVar[_Study | None] = ContextVar("_STUDY", default=None)


def _measure(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend in full precision, and measure on the way; see AttentionInterface."""
    study = _STUDY.get()
    assert study is not None
    scaling = kwargs.get("scaling") or query.shape[-1] ** -0.5
    index = int(module.layer_idx)  # type: ignore[arg-type]
    study.add(index, query.cpu(), key.cpu(), value.cpu(), scaling)
    return attend(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(NAME, _measure)
AttentionMaskInterface.register(NAME, padding_mask)
