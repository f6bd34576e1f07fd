"""Measure the errors of attention logits that a quantized cache causes, for each layer.

The model reads in full precision, and the keys of each layer are rounded beside it. So the error of a layer does not
contain that of the layers below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_patch.kv_cache.attention import attending_by
from rope_patch.kv_cache.cache import recording_cos_sin
from rope_patch.kv_cache.layer import QuantizedLayer, SchemeRun
from rope_patch.kv_cache.plans import LayerPlan, plan_layers
from rope_patch.kv_cache.schemes import Scheme
from rope_patch.modeling.attention_layers import AttentionLayer
from rope_patch.modeling.reader import Reader
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.patching.locate import locate

ERROR_QUERIES = 64
"""Number of queries of a text at which errors are measured, spread over its second half."""


@torch.no_grad()
def attention_errors(
    model: nn.Module,
    token_ids: Tensor,
    scheme: Scheme,
    layers: Sequence[AttentionLayer],
    changes: Sequence[Callable[[LayerPlan], LayerPlan]] = (),
) -> list[Tensor]:
    """Measure the errors that a format causes in the scaled logits of every layer, in one pass.

    Args:
        model: a causal language model of transformers.
        token_ids: (tokens,) token ids of a text.
        scheme: how the cache is quantized.
        layers: the attention layers of the model.
        changes: functions that change the plan of a layer, to measure the error without some part of the keys, too.

    Returns:
        For each layer (1 + changes, heads) root mean square of the error, then that under each changed plan; float64 on
        the CPU.

    Raises:
        ValueError: the format does not fit the model (see :func:`~rope_patch.kv_cache.plans.plan_layers`).
    """
    location = locate(model)
    root: Any = location.model
    plans = plan_layers(layers, scheme)
    errors: list[Tensor] = []

    def observe(index: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        cos_sin = {kind: (cos.cpu(), sin.cpu()) for kind, (cos, sin) in plain.cos_sin.items()}
        plan = plans[index]
        stores = []
        for changed in (plan, *(change(plan) for change in changes)):
            store = QuantizedLayer(changed, SchemeRun(plans, cos_sin))
            store.update(key.cpu(), value.cpu())
            store.freeze(query.shape[2])
            stores.append(store)
        errors.append(_errors(stores, query[0].cpu(), scaling))

    plain = SchemeRun(plan_layers(layers, Scheme()), observe=observe)
    reader = Reader(model)  # it reads a few tokens itself, which are not observed
    with in_eval_mode(model), recording_cos_sin(location, plain), attending_by(plain, root):
        reader.states(token_ids[None])
    return errors


def _errors(stores: Sequence[QuantizedLayer], query: Tensor, scaling: float) -> Tensor:
    """Return the errors of a layer: (1 + changes, heads).

    Args:
        stores: the keys of the layer in full precision and quantized, by its plan first, then by each changed plan.
        query: (heads, tokens, head_dim) queries of the layer.
        scaling: factor on q·k.
    """
    plan = stores[0].plan
    (heads, total, _) = query.shape
    source = plan.layer
    # Every query is another token, since there are at least as many tokens as queries.
    places = torch.linspace(total // 2, total - 1, min(ERROR_QUERIES, total - total // 2)).long()
    query = query[:, places].double()
    columns = torch.arange(total)
    distance = places[:, None] - columns
    read_rounded = (distance >= 0) & (distance < (source.window or total)) & (columns >= plan.scheme.sinks)
    read_rounded &= columns < plan.frozen("keys", places[:, None] + 1)

    def rms(store: QuantizedLayer) -> Tensor:
        off = store.keys[0].double() - store.raw_keys[0].double()
        logits = query @ off.repeat_interleave(heads // len(off), 0).mT * scaling
        # Over the keys that are read quantized; all others have no error, and would only dilute the mean.
        squares = torch.where(read_rounded, logits, 0.0).square().sum((1, 2))
        return (squares / read_rounded.sum().clamp_min(1)).sqrt()

    return torch.stack(list(map(rms, stores)))
