"""Check what patching does on one model type: ten checks on a tiny random model, with four methods.

YaRN (with a longer context) and ABF have an encoding of their own in the config, the halved table needs the longrope
form, p-RoPE takes either. If a check fails, the same is tried without a patch: what transformers or PEFT cannot do with
the original model is no fault of the patch, so the check is left out, with a note.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import rope_patch
from family_models import CONTEXT, IDS, in_own_memory, tiny_model

METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "target_length": 256},
    "abf": {"factor": 50.0},
    "p_rope": {"p": 0.5},
    "table": {},  # the values of the model's own table, halved
}
NEW_TOKENS = 8
Report = dict[str, Any]
_LORA: dict[str, Any] = {"r": 2, "target_modules": "all-linear", "exclude_modules": r".*\bmamba\b.*"}


class NotOurs(Exception):
    """The model fails a check without a patch, too."""


def run_checks(job: tuple[str, str]) -> Report:
    """Run the checks of a model type, except the reload without rope_patch, for which folders are left behind.

    Args:
        job: the model type, and an empty folder to save models in.

    Returns:
        The model's class, an outcome with ``result`` and ``reason``, and an outcome for each method in ``methods``.
    """
    model_type, folder = job
    report: Report = {"model_class": "", "methods": {}, "left_out": {}}
    try:
        model = tiny_model(model_type)
        report["model_class"] = type(model).__name__
        original = logits(model)
        if not torch.isfinite(original).all():
            raise ValueError("its logits are not finite")
    except Exception as error:
        return report | {"result": "not built", "reason": describe(error)}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            slots = rope_patch.inspect(model).tables
    except Exception as error:
        return report | classify(error, model)
    trial = Trial(model, original, Path(folder), {slot.layer_type: slot for slot in slots})
    return report | {"methods": {name: trial.run(name) for name in METHODS}, "left_out": trial.left_out}


def classify(error: Exception, model: Any) -> Report:
    """Return the outcome that an error of ``inspect`` or ``apply`` means; a refusal must name the model's class."""
    result, reason = "crashes", describe(error)
    if isinstance(error, ValueError) and "no rotary table" in reason:
        tables = {
            type(module).__name__
            for module in model.modules()
            if any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
        }
        rotating = {cls.__name__ for cls in {type(module) for module in model.modules()} if rotates(cls)}
        if tables:
            reason += f", but it has {', '.join(sorted(tables))}"
        else:
            result = "no rotary table"
            reason += "".join(f"; {name} rotates without one" for name in sorted(rotating))
    elif isinstance(error, ValueError) and type(model).__name__ in reason:
        result = "refused"
    return {"result": result, "reason": reason}


def rotates(cls: type) -> bool:
    """Return whether a class computes a rotary embedding, by its name, or by the source of an attention class."""
    if "Rotary" in cls.__name__:
        return True
    return "Attention" in cls.__name__ and "rotary" in ("\n" + inspect.getsource(cls)).partition("\nclass ")[2]


def describe(error: BaseException) -> str:
    """Return an error in a line, with its type unless it is one that rope_patch raises on purpose."""
    text = " ".join(str(error).split())
    return text if type(error) in (ValueError, rope_patch.PatchError) else f"{type(error).__name__}: {text}"


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Return the logits of a full forward pass."""
    return model(IDS, use_cache=False).logits.contiguous()


@torch.no_grad()
def cache_error(model: Any) -> float:
    """Return the largest difference between the logits of cached generation and those of a full forward pass."""
    # Generation passes the end of the context, where dynamic tables change.
    prompt = IDS[:, : CONTEXT - NEW_TOKENS // 2]
    generated = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        # Only ordinary tokens are generated, those that IDS are drawn from.
        suppress_tokens=[0, 1, 2, *range(90, 96)],
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    full = model(generated.sequences, use_cache=False).logits[:, prompt.shape[1] - 1 : -1]
    return float((torch.stack(generated.logits, 1) - full).abs().max())


class Trial:
    """A tiny model that is tested under one method after another."""

    def __init__(self, model: Any, original: Tensor, folder: Path, slots: dict[str | None, Any]) -> None:
        self.model, self.original, self.folder, self.slots = model, original, folder, slots
        self.left_out: dict[str, str] = {}
        self.unpatched = copy.deepcopy(model)
        # This writes class and dtype into the config, so it comes before the config is stored.
        model.save_pretrained(folder / "unpatched")
        torch.save({"float32": original}, folder / "unpatched.pt")
        self.config = model.config.to_dict()

    def apply(self, model: Any, name: str) -> Any:
        """Patch a model; of several tables, the one for full attention is patched, or the first if there is none."""
        kind = "full_attention" if "full_attention" in self.slots else next(iter(self.slots))
        options = dict(METHODS[name]) | ({} if kind is None else {"layer_types": (kind,)})
        if name == "table":
            options["values"] = tuple((self.slots[kind].inv_freq / 2).tolist())
        return rope_patch.apply(model, name, **options)

    def run(self, name: str) -> Report:
        """Run the checks with one method and return its outcome, with the checks that fail."""
        config = self.model.config.to_dict()
        try:
            patch = self.apply(self.model, name)
        except Exception as error:
            outcome = classify(error, self.model)
            if not torch.equal(logits(self.model), self.original) or self.model.config.to_dict() != config:
                outcome = {"result": "crashes", "reason": f"it changes the model, then raises: {outcome['reason']}"}
            return outcome
        try:
            patched = logits(self.model)
        except Exception as error:
            patch.restore()
            return {"result": "crashes", "reason": f"the patched model does not run: {describe(error)}"}
        checks: dict[str, Callable[[], Any]] = {
            "effect": lambda: self.effect(patch, patched),
            "verified": lambda: bool(rope_patch.verify(self.model)),
            "cached": self.cached,
            "saved": lambda: self.saved(name, patched),
            "cast": self.cast,
            "adapter": lambda: self.adapter(name),
            "restored": lambda: self.restored(patch),
        }
        problems = {check: self.problem(check, run) for check, run in checks.items()}
        fails = {check: problem for check, problem in problems.items() if problem}
        return {"result": "in part" if fails else "works", "reason": "", "fails": fails}

    def problem(self, check: str, run: Callable[[], Any]) -> str:
        """Return what is wrong; "" if the check passes or does not count."""
        try:
            outcome = run()
        except NotOurs as error:
            self.left_out[check] = str(error)
            return ""
        except Exception as error:
            return describe(error)
        return "" if outcome is True else str(outcome)

    def effect(self, patch: Any, patched: Tensor) -> bool | str:
        """Check that the logits change, unless the method leaves this table as it is (p-RoPE on a p-RoPE table)."""
        if all(torch.equal(patch.before[kind].inv_freq, slot.inv_freq) for kind, slot in patch.after.items()):
            return True
        change = float((patched - self.original).abs().max())
        return change > 1e-5 or f"the logits change by {change:.1g} only"

    def cached(self) -> bool | str:
        """Check that cached generation equals the full forward pass."""
        try:
            if (error := cache_error(self.model)) <= 1e-4:
                return True
            outcome = f"the cache gives logits {error:.1g} off"
        except Exception as error:
            outcome = describe(error)
        try:
            if (error := cache_error(self.unpatched)) <= 1e-4:
                return outcome
        except Exception as error:
            raise NotOurs(f"without a patch generate() fails too: {describe(error)}") from error
        raise NotOurs(f"without a patch the cache gives logits {error:.1g} off too")

    def saved(self, name: str, patched: Tensor) -> bool:
        """Save the patched model and its logits in both data types, for the process without rope_patch."""
        rope_patch.save(self.model, self.folder / name)
        expected = {"float32": patched}
        with contextlib.suppress(ValueError):  # AutoModelForCausalLM cannot load what some classes save
            model = self.reloaded("bfloat16")
            self.apply(model, name)
            expected["bfloat16"] = logits(model)
        torch.save(expected, self.folder / f"{name}.pt")
        return True

    def cast(self) -> bool | str:
        """Check that a cast to bfloat16 and back leaves cos and sin as they were, and that the patch verifies."""
        cast = copy.deepcopy(self.model).to(torch.bfloat16).float()
        rope_patch.verify(cast)
        return all(map(torch.equal, cos_and_sin(self.model), cos_and_sin(cast))) or "cos and sin change"

    def adapter(self, name: str) -> bool | str:
        """Check that a random LoRA adapter over the patched model gives equal logits after being saved and loaded."""
        try:
            model, bare = self.reloaded(), self.reloaded()
            expected = logits(with_lora(bare, self.folder / "adapter"))
            again = peft.PeftModel.from_pretrained(self.reloaded(), self.folder / "adapter").eval()
        except Exception as error:
            raise NotOurs(f"without a patch transformers or PEFT fails: {describe(error)}") from error
        if not torch.equal(logits(again), expected):
            raise NotOurs("without a patch PEFT reloads an adapter with other logits")
        self.apply(model, name)
        adapted, folder = with_lora(model), self.folder / f"{name}-adapter"
        expected = logits(adapted)
        rope_patch.save(adapted, folder)
        return torch.equal(logits(in_own_memory(rope_patch.load(folder))), expected) or "it loads with other logits"

    def reloaded(self, dtype: str = "float32") -> Any:
        """Return the unpatched model, loaded from its folder."""
        return in_own_memory(AutoModelForCausalLM.from_pretrained(self.folder / "unpatched", dtype=dtype))

    def restored(self, patch: Any) -> bool | str:
        """Check that undoing the patch restores the logits and the config."""
        patch.restore()
        if not torch.equal(logits(self.model), self.original):
            return "the logits are others"
        config = self.model.config.to_dict()
        changed = sorted(key for key in config | self.config if config.get(key) != self.config.get(key))
        return not changed or f"the config differs in {', '.join(changed)}"


def with_lora(model: Any, folder: Path | None = None) -> Any:
    """Add a random LoRA adapter to a model, and save it if there is a folder."""
    torch.manual_seed(0)
    # Not initialized as usual, with zeros: such an adapter would change nothing.
    adapted = peft.get_peft_model(model, peft.LoraConfig(**_LORA, init_lora_weights=False)).eval()
    if folder is not None:
        adapted.save_pretrained(folder)
    return adapted


def cos_and_sin(model: Any) -> list[Tensor]:
    """Return cos and sin of every patched table, as the rotary modules give them."""
    positions = torch.arange(64)[None]
    tables: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, rope_patch.PatchedRotary):
            for kind in module.tables:
                tables += module(torch.zeros(1), positions, **({} if kind is None else {"layer_type": kind}))
    return tables
