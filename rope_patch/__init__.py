"""Adapt Hugging Face checkpoints to longer contexts by changing their rotary position embeddings.

>>> import rope_patch
>>> str(rope_patch.PRope(p=0.5))
'p_rope:p=0.5'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.3.0"

_HOME = {
    "methods": "METHODS ABF PI Chain Default Llama3 LongRope Method MrRope NTK NoPE PRope PRopeReversed Partial "
    "Table Truncated Yarn parse",
    "tables": "RotaryTable",
    "patching.rotary": "PatchedRotary",
    "patching.install": "Patch apply patched restore",
    "patching.locate": "PatchError",
    "checkpoints.callback": "RopePatchCallback",
    "checkpoints": "inspect load load_adapter save verify",
    "diagnosis.callback": "RopeDoctorCallback",
    "diagnosis.check": "Diagnosis",
    "diagnosis.doctor": "doctor",
    "evaluation.perplexity.measure": "perplexity",
    "evaluation.retrieval.measure": "retrieval",
    "evaluation.compare": "compare",
    "options.evaluation": "EvalSpec",
    "evaluation.suite": "EvalSuite",
    "kv_evaluation.kv_check": "kv_check",
    "planning": "Plan plan",
    "analysis.analyze": "analyze",
    "engines.write_export": "export",
    "extending.extend": "extend",
    "packaged": "data_path",
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names.split()}
__all__ = sorted([*_MODULE_OF, "__version__"])

if TYPE_CHECKING:
    # Otherwise each name would get a statement of its own.
    # isort: off
    from rope_patch.analysis.analyze import analyze as analyze
    from rope_patch.checkpoints.callback import RopePatchCallback as RopePatchCallback
    from rope_patch.checkpoints.inspect_verify import inspect as inspect, verify as verify
    from rope_patch.checkpoints.save_load import load as load, load_adapter as load_adapter, save as save
    from rope_patch.diagnosis.callback import RopeDoctorCallback as RopeDoctorCallback
    from rope_patch.diagnosis.check import Diagnosis as Diagnosis
    from rope_patch.diagnosis.doctor import doctor as doctor
    from rope_patch.engines.write_export import export as export
    from rope_patch.evaluation.compare import compare as compare
    from rope_patch.evaluation.perplexity.measure import perplexity as perplexity
    from rope_patch.evaluation.retrieval.measure import retrieval as retrieval
    from rope_patch.evaluation.suite import EvalSuite as EvalSuite
    from rope_patch.extending.extend import extend as extend
    from rope_patch.kv_evaluation.kv_check import kv_check as kv_check
    from rope_patch.methods import (
        ABF as ABF,
        METHODS as METHODS,
        NTK as NTK,
        PI as PI,
        Chain as Chain,
        Default as Default,
        Llama3 as Llama3,
        LongRope as LongRope,
        Method as Method,
        MrRope as MrRope,
        NoPE as NoPE,
        Partial as Partial,
        PRope as PRope,
        PRopeReversed as PRopeReversed,
        Table as Table,
        Truncated as Truncated,
        Yarn as Yarn,
        parse as parse,
    )
    from rope_patch.options.evaluation import EvalSpec as EvalSpec
    from rope_patch.packaged import data_path as data_path
    from rope_patch.patching.install import Patch as Patch, apply as apply, patched as patched, restore as restore
    from rope_patch.patching.locate import PatchError as PatchError
    from rope_patch.patching.rotary import PatchedRotary as PatchedRotary
    from rope_patch.planning import Plan as Plan, plan as plan
    from rope_patch.tables import RotaryTable as RotaryTable


def __getattr__(name: str) -> Any:
    """Import a public name on first use: ``import rope_patch`` itself does no work."""
    if name in _MODULE_OF:
        found = getattr(importlib.import_module(f"rope_patch.{_MODULE_OF[name]}"), name)
        globals()[name] = found  # the next use finds it there
        return found
    raise AttributeError(f"module 'rope_patch' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
