"""Stage a: does a patched model compute on a GPU what it should?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import rope_patch
from gpu_stages.base import Cell, Results, Setting, Stage, twin
from rope_patch.patching.locate import locate

MODES = {"float32": ("float32", "highest"), "tf32": ("float32", "high"), "bfloat16": ("bfloat16", "highest")}
"""Mode to the dtype of the model and the precision of torch's matrix products in float32."""
MODELS = ("Llama-3.2-1B", "gemma-3-1b")
IDENTITIES = ("default", "p_rope:p=1")
POSITIONS = (1, 4095, 131071, 1_000_000)


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Set the precision of float32 matrix products within a ``with`` block."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def difference(ours: Tensor, theirs: Tensor) -> dict[str, Any]:
    """Return whether two tensors are equal to the last bit, and by how much they differ."""
    largest = float((ours.double() - theirs.double()).abs().max())
    return {
        "equal": torch.equal(ours, theirs),
        "largest": largest,
        "relative": largest / max(float(theirs.double().abs().max()), 1e-30),
    }


def model_of(setting: Setting, name: str, mode: str) -> Any:
    """Return the model of a shape, which is held until another one is requested."""
    dtype = MODES[mode][0]
    return setting.held(("correctness", name, dtype), lambda: setting.random_model(name, dtype))


def identity(setting: Setting, name: str, mode: str, attention: str, _: Results) -> dict[str, Any]:
    """Compare the last hidden states of a patched and an unpatched model under tables that change nothing."""
    model = model_of(setting, name, mode)
    ids = setting.ids(setting.size(4096, 48), model.config.vocab_size)[None]
    found: dict[str, Any] = {}
    with torch.no_grad(), matmul_precision(MODES[mode][1]):
        plain = twin(model)
        plain.set_attn_implementation(attention)
        expected = plain.model(ids, use_cache=False).last_hidden_state
        # The same model twice: a difference here is not caused by a patch.
        found["unpatched again"] = difference(plain.model(ids, use_cache=False).last_hidden_state, expected)
        for method in IDENTITIES:
            patched = twin(model)
            patched.set_attn_implementation(attention)
            rope_patch.apply(patched, method)
            found[method] = difference(patched.model(ids, use_cache=False).last_hidden_state, expected)
            del patched
    return {"hidden_states": found}


def compiled(setting: Setting, mode: str, _: Results) -> dict[str, Any]:
    """Compare compiled models, patched and unpatched, with each other and with the model as it is."""
    model = model_of(setting, MODELS[0], mode)
    ids = setting.ids(setting.size(2048, 48), model.config.vocab_size)[None]
    backend = "inductor" if setting.device == "cuda" else "eager"  # on a CPU, inductor would call a C++ compiler
    with torch.no_grad(), matmul_precision(MODES[mode][1]):
        states = {"eager": model.model(ids, use_cache=False).last_hidden_state}
        for side, method in (("compiled", None), ("patched", IDENTITIES[0])):
            one = twin(model)
            if method is not None:
                rope_patch.apply(one, method)
            run: Any = torch.compile(one.model, backend=backend, dynamic=False)
            states[side] = run(ids, use_cache=False).last_hidden_state
            torch.compiler.reset()
    return {
        "backend": backend,
        "patched against compiled": difference(states["patched"], states["compiled"]),
        "compiled against eager": difference(states["compiled"], states["eager"]),
    }


def positions(setting: Setting, mode: str, _: Results) -> dict[str, Any]:
    """Compare cos and sin at far positions with the same table in float64."""
    model = model_of(setting, MODELS[0], mode)
    config = model.config
    theta, width = config.rope_parameters["rope_theta"], config.head_dim
    x = torch.zeros(1, 1, config.hidden_size, dtype=model.dtype, device=setting.device)
    sides: dict[str, Any] = {"unpatched": twin(model), "patched, float32": twin(model)}
    rope_patch.apply(sides["patched, float32"], "default")
    exact = [theta ** (-2 * i / width) for i in range(width // 2)]
    in_use = locate(model).module.inv_freq.double().tolist()  # far positions multiply its rounding to float32
    tables = {"the exact table": exact, "the table in use": in_use}
    found: dict[str, dict[str, dict[str, float]]] = {name: {side: {} for side in sides} for name in tables}
    with torch.no_grad(), matmul_precision(MODES[mode][1]):
        for position in POSITIONS:
            where = torch.tensor([[position]], device=setting.device)
            for side, one in sides.items():
                got = torch.cat([part[0, :, : width // 2] for part in locate(one).module(x, where)]).double().cpu()
                for name, table in tables.items():
                    angles = torch.tensor(table, dtype=torch.float64) * position
                    expected = torch.stack([angles.cos(), angles.sin()])
                    found[name][side][str(position)] = float((got - expected).abs().max())
    return {"what": "largest difference of cos and sin from those in float64, by position", "against": found}


def loss(setting: Setting, mode: str, _: Results) -> dict[str, Any]:
    """Compare the loss of TRL's head and its gradient with those of transformers' own forward pass."""
    from trl.trainer.utils import add_fused_lm_head  # slow

    model = model_of(setting, MODELS[0], mode)
    ids = setting.ids(setting.size(4096, 300), model.config.vocab_size)[None]
    weight = model.model.norm.weight.requires_grad_(True)
    values, gradients = {}, {}
    try:
        with matmul_precision(MODES[mode][1]):
            add_fused_lm_head(model)
            for side in ("transformers", "trl"):
                value = model(input_ids=ids, labels=ids, use_cache=False, fused_lm_head=side == "trl").loss
                value.backward()
                values[side], gradients[side] = float(value.detach()), weight.grad.clone()
                weight.grad = None
    finally:
        weight.requires_grad_(False)
        setting.drop()  # its forward pass was replaced
    return {
        "loss": values,
        "loss_difference": abs(values["trl"] - values["transformers"]),
        "gradient of the last norm": difference(gradients["trl"], gradients["transformers"]),
    }


def cells(setting: Setting) -> list[Cell]:
    """Return the cells, those of the plainer model first."""
    listed = []
    for name in MODELS:
        for mode in MODES:
            kinds = ("sdpa", "eager", *(["flash_attention_2"] if mode == "bfloat16" else []))
            for kind in kinds:
                needs = ("flash-attn", "GPU") if kind.startswith("flash") else ()
                measure = partial(identity, setting, name, mode, kind)
                listed.append(Cell(f"identity-{name}-{mode}-{kind}", setting.seconds(6), measure, needs))
    for mode in MODES:
        listed.append(
            Cell(f"positions-{mode}", setting.seconds(3), partial(positions, setting, mode), settings={"at": POSITIONS})
        )
        listed.append(Cell(f"loss-{mode}", setting.seconds(6), partial(loss, setting, mode)))
    for mode in setting.size(("float32", "bfloat16"), ("bfloat16",)):
        listed.append(Cell(f"compile-{mode}", setting.seconds(60), partial(compiled, setting, mode)))
    return listed


def summary(done: Results) -> dict[str, Any]:
    """Return the cells in which a patch that should change nothing changed something."""
    states = {name: cell["hidden_states"] for name, cell in done.items() if "hidden_states" in cell}
    return {
        "identities compared": len(states) * len(IDENTITIES),
        "not equal to the last bit": {
            f"{name}, {method}": found[method]
            for name, found in states.items()
            for method in IDENTITIES
            if not found[method]["equal"]
        },
        "largest loss difference": max((c["loss_difference"] for c in done.values() if "loss" in c), default=None),
    }


STAGE = Stage(
    "a",
    "correctness",
    "A patch that changes nothing against the unpatched model, in float32, TF32 and bfloat16, under each attention "
    "kernel and compiled; cos and sin at position 1,000,000; our loss against transformers' own.",
    cells,
    summary=summary,
)
