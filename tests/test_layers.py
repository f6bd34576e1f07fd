"""Imports point down only: the order of the modules, held by reading their source.

``violations`` judges one module by its text alone, so planted mistakes can show that it goes red.
A new file in ``rope_patch`` fails ``test_arrows_point_down`` until ``ORDER`` or ``MODULES`` gives it a place.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rope_patch"

# Lowest first. Names on one line are neighbours and may import each other; otherwise a module imports
# only from the lines above its own.
ORDER: tuple[tuple[str, ...], ...] = (
    ("blame", "frequencies", "files", "processes"),
    ("rotary", "registry", "methods"),
    ("theory",),
    ("record",),
    ("sites", "spelling", "probing", "surgery", "verification"),
    ("gguf_file", "gguf_table", "from_gguf"),
    ("checkpoints", "folders"),
    ("kv_cache", "analysis"),
    ("evaluation",),
    (
        *("fitting", "kv_judging", "kv_results", "kv_measuring", "kv_check", "training", "planning", "export"),
        *("trials", "analyze", "before_after"),
    ),
    ("theory_papers", "theory_tables"),
    (
        *("report", "plots", "plots_theory", "theory_report", "plots_analysis", "plots_outliers"),
        *("analysis_words", "analysis_tables", "analysis_pictures", "analysis_report"),
        *("plots_kv", "kv_pictures", "kv_report"),
    ),
    ("__init__",),  # the public names: below the top, so that no module of the library imports them back
    (
        *("cli", "theory_command", "analyze_command", "kv_command", "fit_command", "export_command", "loading", "demo"),
        *("recipes", "eval_tasks", "benchmarks"),
    ),
)
LEVEL = {unit: level for level, units in enumerate(ORDER) for unit in units}
BOTTOM = "_paths"  # imports nothing of ours; everyone may import it
OPEN = {
    "analysis",
    "kv_cache",
    "fitting",
    "training",
    "planning",
    "export",
    "recipes",
    "eval_tasks",
    "benchmarks",
}  # may hold any file
MODULES = {
    "theory": {"__init__", "decay", "constructions", "images"},
    "evaluation": {
        *("__init__", "text", "documents", "domains", "calibration", "prompts", "intervals", "journal", "scoring"),
        *("answering", "prefill", "perplexity", "retrieval", "compare"),
        *("lm_eval_model", "lm_eval_cli", "lm_eval_tasks"),
    },
}
OUTSIDE = {"recipes", "eval_tasks", "benchmarks", "tests"}  # folders of the repository, not of the package
PLOTS = {"plots", "plots_theory", "plots_analysis", "plots_outliers", "plots_kv"}
PURE = {"torch", "jaxtyping"}  # all that frequencies and theory may import beyond the standard library's
PURE_STDLIB = {"__future__", "collections", "dataclasses", "functools", "hashlib", "itertools", "math"}
PURE_STDLIB |= {"struct", "typing"}


class Import(NamedTuple):
    """One imported name: ``target`` is dotted, relative to rope_patch when ``ours``."""

    target: str
    ours: bool
    lazy: bool  # inside a function, or for type checkers only: not run when the module is imported
    typing_only: bool
    line: int


def unit_of(module: str) -> str:
    """Return the name that ORDER knows a module by: ``kv_cache.cache`` belongs to ``kv_cache``."""
    return module.partition(".")[0]


def is_known(module: str) -> bool:
    unit, _, rest = module.partition(".")
    if unit in OPEN:
        return True
    if unit in MODULES:
        return rest in MODULES[unit]
    return not rest and (unit in LEVEL or unit == BOTTOM)


def imports(module: str, source: str) -> Iterator[Import]:
    """Yield every import of a module, those inside functions too.

    A package is named ``kv_cache.__init__``, so that its relative imports resolve as its files' do.
    """
    folder = ["rope_patch", *module.split(".")[:-1]]

    def names(node: ast.AST) -> list[str]:
        match node:
            case ast.Import():
                return [alias.name for alias in node.names]
            case ast.ImportFrom():
                base = folder[: len(folder) - node.level + 1] if node.level else []
                stem = ".".join([*base, *([node.module] if node.module else [])])
                return [f"{stem}.{alias.name}" for alias in node.names]
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__")):
                match node.args:
                    case [ast.Constant(value=str(name)), *_] if not name.startswith("."):
                        return [name]
                    case [ast.Constant(value=str(name)), *_]:
                        return [f"rope_patch{name}"]
        return []

    def walk(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        for name in names(node):
            head, _, rest = name.partition(".")
            ours = head == "rope_patch"
            yield Import(rest if ours else name, ours, lazy, typing_only, node.lineno)  # type: ignore[attr-defined]
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from walk(child, True, True)
            for child in node.orelse:
                yield from walk(child, lazy, typing_only)
            return
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside, typing_only)

    yield from walk(ast.parse(source), False, False)


def target_unit(target: str) -> str:
    """Return the unit an import of ours reaches; a name that is no module is one of ``__init__``."""
    unit = unit_of(target)
    return unit if unit in LEVEL or unit == BOTTOM else "__init__"


def violations(module: str, source: str) -> list[str]:
    """Return what is wrong with the imports of one module, a sentence each, with its line.

    Args:
        module: dotted name below rope_patch, ``"kv_cache.cache"``, ``"kv_cache.__init__"`` for a package;
            a script beside the package as ``"recipes.finetune_lora"``.
        source: the text of the module.
    """
    if not is_known(module):
        return [f"{module} has no place in the layers: put it into ORDER or MODULES of {Path(__file__).name}"]
    found = []
    for item in imports(module, source):
        reason = _inside(module, item) if item.ours else _third_party(module, item)
        if reason:
            found.append(f"{module}, line {item.line}: {reason}")
    return found


def _inside(module: str, item: Import) -> str | None:
    unit, target = unit_of(module), target_unit(item.target)
    if "." in item.target and unit_of(item.target) not in {*LEVEL, BOTTOM}:
        return f"{unit_of(item.target)} has no place in the layers"
    if target in (BOTTOM, unit) or item.target == "__version__":
        return None
    if unit == BOTTOM:
        return f"{BOTTOM} imports nothing of ours, yet it imports {target}"
    if unit == "theory" and target != "frequencies":
        return f"theory needs frequencies alone, yet it imports {target}"
    if unit == "kv_cache" and target == "evaluation":
        return "kv_cache never imports evaluation: kv_check joins them"
    if target == "__init__" and LEVEL[unit] < LEVEL[target]:
        name = item.target or "names"
        return f"import {name} from the defining module, not from rope_patch: that is an arrow up"
    if LEVEL[target] > LEVEL[unit]:
        return f"an arrow up: {unit} imports {target}"
    return None


def _third_party(module: str, item: Import) -> str | None:
    unit, name = unit_of(module), unit_of(item.target)
    level = LEVEL.get(unit, -1)
    if name in OUTSIDE and unit not in OUTSIDE:
        return f"{name} is a folder of the repository: the package cannot import it"
    if unit in ("frequencies", "theory") and name not in PURE | PURE_STDLIB:
        return f"{unit} is pure maths on torch, yet it imports {name}"
    if unit == "__init__" and name in {"torch", "transformers", "peft", "lm_eval", "matplotlib"}:
        return f"__init__ does no work at import, yet it imports {name}"
    if name == "transformers" and level < LEVEL["surgery"]:
        return "transformers is imported from surgery upwards"
    if name == "peft" and level < LEVEL["training"]:
        if unit != "checkpoints":
            return "peft is imported in checkpoints, training and above"
        if not item.lazy:
            return "checkpoints imports peft inside functions only: it is an optional dependency"
    harness = module.startswith("evaluation.lm_eval_") or unit in ("eval_tasks", "benchmarks")
    if name == "lm_eval" and not harness:
        return "lm_eval is imported in evaluation/lm_eval_*.py, eval_tasks and benchmarks alone"
    if name == "matplotlib" and module not in PLOTS:
        return "matplotlib is imported in plots*.py alone"
    return None


def cycle(sources: dict[str, str]) -> list[str] | None:
    """Return the modules of one import cycle, or None. What only type checkers see is no import."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for item in imports(module, source):
            if not item.ours or item.typing_only:
                continue
            # The name may be a module, a package, or something defined in the one before the last dot.
            owner = item.target.rpartition(".")[0]
            for name in (item.target, f"{item.target}.__init__", owner, f"{owner}.__init__"):
                if name in sources and name != module:
                    graph[module].add(name)
                    break
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


def read_tree() -> dict[str, str]:
    """Return the text of every module: the package's, and the scripts that lie beside it."""
    found = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    for folder in ("recipes", "eval_tasks", "benchmarks"):
        for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            found[name] = path.read_text(encoding="utf-8")
    return found


SOURCES = read_tree()


@pytest.mark.parametrize("module", SOURCES)
def test_arrows_point_down(module: str) -> None:
    found = violations(module, SOURCES[module])
    assert not found, "\n".join(found)


def test_no_import_cycle() -> None:
    assert cycle(SOURCES) is None


def test_the_tree_is_read() -> None:
    assert {"__init__", "_paths", "frequencies", "rotary", "methods"} <= SOURCES.keys()


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("gadgets", "", "gadgets has no place in the layers"),
        ("evaluation.gadgets", "", "evaluation.gadgets has no place in the layers"),
        ("frequencies.inner", "", "frequencies.inner has no place in the layers"),
        ("methods", "from rope_patch.surgery import apply", "methods imports surgery"),
        ("methods", "from .surgery import apply", "methods imports surgery"),
        ("methods", "from . import surgery", "methods imports surgery"),
        ("methods", "import rope_patch.surgery as s", "methods imports surgery"),
        ("methods", "import math\ndef f():\n    from .surgery import apply", "line 3: an arrow up"),
        ("methods", "class A:\n    async def f(self):\n        import rope_patch.cli", "methods imports cli"),
        ("methods", "if TYPE_CHECKING:\n    from .surgery import Patch", "methods imports surgery"),
        (
            "methods",
            "try:\n    from .surgery import apply\nexcept ImportError: pass",
            "methods imports surgery",
        ),
        ("methods", "import importlib\nimportlib.import_module('rope_patch.plots')", "methods imports plots"),
        ("methods", "import_module('.plots', 'rope_patch')", "methods imports plots"),
        ("methods", "from .theory import decay", "methods imports theory"),
        ("cli", "from rope_patch.gadgets import whir", "gadgets has no place in the layers"),
        ("surgery", "from rope_patch import apply", "import apply from the defining module"),
        ("surgery", "import rope_patch", "import names from the defining module, not from rope_patch"),
        ("record", "from .surgery import apply", "record imports surgery"),
        ("__init__", "from .cli import main", "__init__ imports cli"),
        ("__init__", "import torch", "__init__ does no work at import"),
        ("_paths", "from .frequencies import turns", "_paths imports nothing of ours"),
        ("theory.__init__", "from ..methods import parse", "theory needs frequencies alone"),
        ("theory.helices", "", "theory.helices has no place in the layers"),
        ("kv_cache.cache", "from ..evaluation.text import builtin_text", "kv_cache never imports evaluation"),
        ("kv_cache.__init__", "from ..evaluation import text", "kv_cache never imports evaluation"),
        ("kv_cache.__init__", "from .. import evaluation", "kv_cache never imports evaluation"),
        ("analysis.heads", "from rope_patch.evaluation import text", "analysis imports evaluation"),
        ("evaluation.compare", "from ..report import write", "evaluation imports report"),
        ("training.loss", "from ..plots import figure", "training imports plots"),
        ("report", "from .demo import run", "report imports demo"),
        ("frequencies", "import numpy", "frequencies is pure maths"),
        ("frequencies", "from transformers import AutoConfig", "frequencies is pure maths"),
        ("methods", "def f():\n    import transformers", "transformers is imported from surgery upwards"),
        ("theory.decay", "import transformers.utils", "theory is pure maths"),
        ("theory.images", "def f():\n    import numpy", "theory is pure maths"),
        ("surgery", "def f():\n    import peft", "peft is imported in checkpoints"),
        ("checkpoints", "import peft", "inside functions only"),
        (
            "checkpoints",
            "try:\n    from peft import PeftModel\nexcept ImportError: pass",
            "inside functions only",
        ),
        ("evaluation.compare", "def f():\n    import lm_eval", "lm_eval is imported in"),
        ("cli", "def f():\n    from lm_eval.api import model", "lm_eval is imported in"),
        ("recipes.lora", "import lm_eval", "lm_eval is imported in"),
        ("report", "def f():\n    import matplotlib.pyplot as plt", "matplotlib is imported in plots"),
        ("theory_report", "import matplotlib", "matplotlib is imported in plots"),
        ("cli", "from recipes import finetune_lora", "recipes is a folder of the repository"),
    ],
)
def test_planted_violation_is_seen(module: str, source: str, message: str) -> None:
    found = violations(module, source)
    assert len(found) == 1, found
    assert message in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("frequencies", "import math\nimport torch\nfrom jaxtyping import Float"),
        (
            "methods",
            "from ._paths import data_path\nfrom .rotary import RotaryTable\nfrom . import frequencies",
        ),
        ("rotary", "from rope_patch.methods import parse"),
        ("record", "from rope_patch import __version__\nfrom .methods import parse"),
        ("theory.images", "from ..frequencies import turns\nfrom .decay import activation\nimport torch"),
        ("surgery", "import transformers\nfrom .theory import decay"),
        ("checkpoints", "def f():\n    from peft import PeftModel"),
        ("checkpoints", "if TYPE_CHECKING:\n    from peft import PeftModel"),
        ("kv_cache.cache", "from .schemes import parse\nfrom ..analysis.capture import stream"),
        ("evaluation.__init__", "from .perplexity import perplexity"),
        ("evaluation.lm_eval_model", "from lm_eval.api.model import LM"),
        (
            "kv_check",
            "from .kv_cache import cache\nfrom .evaluation import perplexity\nfrom .planning import plan",
        ),
        ("training.trainer", "from peft import LoraConfig"),
        ("plots", "import matplotlib.pyplot as plt"),
        ("plots_theory", "import matplotlib\nfrom .plots import svg"),
        ("__init__", "from ._paths import data_path\ndef __getattr__(n):\n    from .report import write"),
        ("cli", "import rope_patch\nfrom rope_patch import apply\nfrom .demo import run"),
        ("eval_tasks.passkey.utils", "import lm_eval\nfrom rope_patch.evaluation import retrieval"),
        ("recipes.finetune_lora", "import peft\nfrom rope_patch import apply"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    found = violations(module, source)
    assert not found, "\n".join(found)


def test_planted_cycle_is_seen() -> None:
    sources = {
        "kv_cache.__init__": "from .cache import Cache",
        "kv_cache.cache": "from . import schemes",
        "kv_cache.schemes": "def f():\n    from ..analysis.heads import g",
        "analysis.heads": "from rope_patch.kv_cache.cache import Cache",
    }
    found = cycle(sources)
    assert found is not None
    assert set(found) == {"kv_cache.cache", "kv_cache.schemes", "analysis.heads"}


def test_what_only_type_checkers_see_closes_no_cycle() -> None:
    sources = {
        "rotary": "if TYPE_CHECKING:\n    from .methods import Method",
        "methods": "from .rotary import RotaryTable",
    }
    assert cycle(sources) is None
