"""The rotary module whose tables are parameters."""

from __future__ import annotations

import functools

import pytest
import torch
from support.states import model_of
from support.tiny import ids, tiny_model

import rope_patch
from rope_patch.frequencies import table_of, unrotated
from rope_patch.modeling.trainable_table import TrainableTable
from rope_patch.patching.locate import locate


def trainable(model, method="yarn:factor=2"):
    patch = rope_patch.apply(model, method)
    site = locate(model)
    return site, TrainableTable(site.module, patch.record.layer_types)


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "yarn:factor=2"), ("llama", "p_rope:p=0.5"), ("gemma3", "abf:factor=10"), ("phi", "pi:factor=2"),
     ("glm", "default")],
)  # fmt: skip
def test_untrained_it_computes_what_the_patch_computes(name, method):
    site, table = trainable(model_of(name), method)
    for kind in table.kinds:
        where = () if kind is None else (kind,)
        x, places = torch.zeros(1, 1), torch.arange(300)[None]
        for got, expected in zip(table(x, places, *where), site.module(x, places, *where), strict=True):
            assert torch.equal(got, expected)
    assert torch.equal(table_of(table.method().values), site.module.tables[table.kinds[0]].inv_freq)


def norm(module, offset, x):
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return (offset + module.weight) * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize(
    ("name", "method"), [("llama", "yarn:factor=2"), ("gemma3", "p_rope:p=0.75"), ("glm", "default")]
)
def test_gradients_are_finite_differences(name, method):
    model = model_of(name).double()
    site, table = trainable(model, method)
    rows = ids(40, 2)
    site.put(table)
    for module in model.modules():  # the norms of transformers round to float32 inside
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(norm, module, 1.0 if "Gemma" in type(module).__name__ else 0.0)
    (p,) = table.parameters()
    with torch.no_grad():  # away from the start
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(0), dtype=p.dtype))

    def loss():
        logits = model(rows, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    loss().backward()
    for i in range(p.numel()):
        sides = []
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                p[i] += step
                sides.append(float(loss()))
                p[i] -= step
        assert float(p.grad[i]) == pytest.approx((sides[0] - sides[1]) / 2e-4, abs=1e-6)
    assert float(p.grad.abs().max()) > 1e-5


def test_unrotated_pairs_stay_unrotated():
    _, table = trainable(tiny_model("llama"), "p_rope:p=0.5")
    rests = unrotated(table.module[0].tables[None].inv_freq)
    with torch.no_grad():
        table.log_factors[0].normal_(0, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(table_of(table.method().values) == 0, rests) and int(rests.sum()) == 4
    with pytest.raises(ValueError, match="unrotated"):
        trainable(tiny_model("llama"), "nope")


def test_a_cast_is_refused():
    model = tiny_model("llama")
    site, table = trainable(model)
    site.put(table)
    for cast in (model.bfloat16, model.half, model.float, lambda: model.to(torch.bfloat16)):
        with pytest.raises(TypeError, match="cast"):
            cast()
    assert model.to("cpu") is model and table.log_factors[0].dtype == torch.float64
