"""What patching and ``doctor`` do on every causal language model type of transformers, each a tiny random model.

    python -m pytest tests/families -m full -n 2            # compares with benchmarks/results/families.json
    python -m pytest tests/families -m full -n 2 --write    # writes it; `make commands` then writes docs/families.md

YaRN (with a longer context) and ABF have an encoding of their own in the config, the halved table needs the longrope
form, p-RoPE takes either. What transformers or PEFT cannot do with the original model is no fault of the patch: such a
check is left out, with a note.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.fresh import stock_logits
from support.patches import cos_sin
from support.round_trip import assert_cached_equals_full
from support.scored import assert_read_as_it_is
from support.tiny import logits
from transformers import AutoModelForCausalLM

import rope_patch
from family_models import IDS, TYPES, in_own_memory, tiny_model

pytest.importorskip("measuring", reason="not in the source distribution")
METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "target_length": 256},
    "abf": {"factor": 50.0},
    "p_rope": {"p": 0.5},
    "table": {},  # the values of the model's own table, halved
}
CHECKS = ("built", "read", "located", "applied", "effect", "verified", "cached", "saved", "cast", "adapter", "restored")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of the families' own code
@pytest.mark.parametrize("kind", TYPES)
def test_a_family_works_or_is_refused_as_its_row_says(kind, tmp_path, committed, record_property):
    row = {"type": kind, "model_class": "", "result": "works", "reason": "", "checks": dict.fromkeys(CHECKS, "passes")}
    row |= {"methods": {}, "left_out": {}}
    try:
        examine(row, tmp_path)
    except Exception as error:
        if committed is not None:
            raise
        row |= {"result": "fails", "reason": describe(error)}
    record_property("row", row)
    if committed is not None:
        # Why a check is left out is said in the words of transformers and PEFT, which change with their releases.
        for one in (row, committed[kind]):
            one["left_out"] = sorted(one["left_out"])
        assert row == committed[kind]


def examine(row: dict[str, Any], folder: Path) -> None:
    """Check one family.

    Args:
        row: a row of families.json, which is filled in.
        folder: an empty folder for what is saved.
    """
    checks = row["checks"]
    try:
        model = tiny_model(row["type"])
        row["model_class"] = type(model).__name__
        assert torch.isfinite(logits(model, IDS)).all(), "its logits are not finite"
    except Exception as error:
        row |= {"result": "not built", "reason": describe(error)}
        checks |= dict.fromkeys(CHECKS, "not reached")
        return
    checks["read"] = reading(model)
    model.save_pretrained(folder / "unpatched")  # this writes class and dtype into the config
    try:
        tables = rope_patch.inspect(model).tables
    except ValueError as error:
        row |= refusal(error, model)
        checks |= dict.fromkeys(CHECKS[2:], "not reached")
        for source in (model, folder / "unpatched"):
            with contextlib.suppress(ValueError):  # AutoModelForCausalLM cannot load what some classes save
                assert not rope_patch.doctor(source).found("differs")
        return
    trial = Trial(model, folder, {table.layer_type: table for table in tables}, row["left_out"])
    for check in (trial.cached, trial.saved, trial.adapter):
        try:
            check("unpatched")
        except Exception as error:
            row["left_out"][check.__name__] = f"without a patch: {describe(error):.120}"
            checks[check.__name__] = "left out"
    trial.doctor("unpatched")
    for name in METHODS:
        # Whether an adapter can be saved and loaded depends on the family, and not on the method.
        row["methods"][name] = trial.run(name, adapter="works" not in row["methods"].values())
    if "works" not in row["methods"].values():
        row |= {"result": "refused", "reason": row["methods"]["yarn"]}
        checks |= dict.fromkeys(CHECKS[3:], "not reached")


class Trial:
    """A tiny model that is tested under one method after another, and as it is under the name "unpatched"."""

    def __init__(self, model: Any, folder: Path, tables: dict[str | None, Any], left_out: dict[str, str]) -> None:
        self.model = model
        self.folder = folder
        self.tables = tables
        self.left_out = left_out
        self.original = logits(model, IDS)
        self.config = model.config.to_dict()

    def apply(self, model: Any, name: str) -> Any:
        """Patch a model; of several tables, the one for full attention is patched, or the first if there is none."""
        if name == "unpatched":
            return None
        kind = "full_attention" if "full_attention" in self.tables else next(iter(self.tables))
        options = dict(METHODS[name])
        if kind is not None:
            options["layer_types"] = (kind,)
        if name == "table":
            options["values"] = tuple((self.tables[kind].inv_freq / 2).tolist())
        return rope_patch.apply(model, name, **options)

    def run(self, name: str, adapter: bool) -> str:
        """Run the checks with one method; return "works", or why it is refused."""
        try:
            patch = self.apply(self.model, name)
        except ValueError as error:
            self.unchanged()
            return refusal(error, self.model)["reason"]
        change = (logits(self.model, IDS) - self.original).abs().max()
        # A p-RoPE table stays as it is under p-RoPE.
        same = all(torch.equal(patch.before[kind].inv_freq, table.inv_freq) for kind, table in patch.after.items())
        assert same or change > 1e-5
        rope_patch.verify(self.model)
        for check in (self.cached, self.saved, self.adapter):
            if check.__name__ not in self.left_out and (adapter or check != self.adapter):
                check(name)
        cast = copy.deepcopy(self.model).to(torch.bfloat16).float()
        rope_patch.verify(cast)
        places = torch.arange(64)[None]
        for kind in self.tables:
            assert all(map(torch.equal, cos_sin(self.model, places, kind), cos_sin(cast, places, kind)))
        if name in ("yarn", "p_rope"):
            self.doctor(name)
        patch.restore()
        self.unchanged()
        return "works"

    def unchanged(self) -> None:
        """Check that the model computes what it did, and that its config says so."""
        assert torch.equal(logits(self.model, IDS), self.original)
        assert self.model.config.to_dict() == self.config

    def doctor(self, name: str) -> None:
        """Check that ``doctor`` raises no alarm, in memory and of the folder."""
        sources = [self.model]
        if "saved" not in self.left_out:
            sources.append(self.folder / name)
        for source in sources:
            report = rope_patch.doctor(source)
            assert report.ok, report

    def cached(self, name: str) -> None:
        """Check that cached generation, past the end of the context, equals the full forward pass."""
        assert_cached_equals_full(self.model, IDS[:, :60])

    def saved(self, name: str) -> None:
        """Check that a saved model gives equal logits without rope_patch, in float32 and in bfloat16."""
        if name != "unpatched":
            rope_patch.save(self.model, self.folder / name)
        model = self.reloaded("bfloat16")
        self.apply(model, name)
        expected = {f"{name}@float32": logits(self.model, IDS), f"{name}@bfloat16": logits(model, IDS)}
        plain = stock_logits(self.folder, IDS, *expected)
        for reload, ours in expected.items():
            assert torch.equal(plain[reload], ours), f"{reload} reloads with other logits"

    def adapter(self, name: str) -> None:
        """Check that a random LoRA adapter gives equal logits after being saved and loaded."""
        model = self.reloaded()
        self.apply(model, name)
        torch.manual_seed(0)
        # Not initialized as usual, with zeros: such an adapter would change nothing.
        config = LoraConfig(r=2, target_modules="all-linear", exclude_modules=r".*\bmamba\b.*", init_lora_weights=False)
        adapted = get_peft_model(model, config).eval()
        expected = logits(adapted, IDS)
        folder = self.folder / f"{name}-adapter"
        if name == "unpatched":
            adapted.save_pretrained(folder)
            again = PeftModel.from_pretrained(self.reloaded(), folder)
        else:
            rope_patch.save(adapted, folder)
            again = rope_patch.load(folder)
        assert torch.equal(logits(in_own_memory(again), IDS), expected), "an adapter loads with other logits"

    def reloaded(self, dtype: str = "float32") -> Any:
        """Return the unpatched model, loaded from its folder."""
        return in_own_memory(AutoModelForCausalLM.from_pretrained(self.folder / "unpatched", dtype=dtype))


def reading(model: Any) -> str:
    """Read a model by parts and train it by parts, and return "passes", "refused", or "left out" without a loss."""
    row = IDS[:1, :24]
    with torch.no_grad():
        try:
            model(row, labels=row)
        except Exception:
            return "left out"
    try:
        assert_read_as_it_is(model)
    except ValueError as error:
        assert type(model).__name__ in str(error)
        return "refused"
    return "passes"


def describe(error: Exception) -> str:
    """Return an error in a line, with its type unless it is one that is raised on purpose."""
    text = " ".join(str(error).split())
    if type(error) in (ValueError, AssertionError, rope_patch.PatchError):
        return text
    return f"{type(error).__name__}: {text}"


def refusal(error: ValueError, model: Any) -> dict[str, str]:
    """Return the result that an error of ``inspect`` or ``apply`` means; it must name the model's class."""
    reason = describe(error)
    assert type(model).__name__ in reason, "the error does not name the model"
    if "no rotary table" not in reason:
        return {"result": "refused", "reason": reason}
    assert not [name for name, _ in model.named_buffers() if name.endswith("inv_freq")], "it has a table"
    rotating = {cls.__name__ for cls in {type(module) for module in model.modules()} if rotates(cls)}
    reason += "".join(f"; {name} rotates without one" for name in sorted(rotating))
    return {"result": "no rotary table", "reason": reason}


def rotates(cls: type) -> bool:
    """Return whether a class computes a rotary embedding, by its name, or by the source of an attention class."""
    if "Rotary" in cls.__name__:
        return True
    return "Attention" in cls.__name__ and "rotary" in ("\n" + inspect.getsource(cls)).partition("\nclass ")[2]
