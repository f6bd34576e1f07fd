"""Imports point up the list of folders only: the order is held by reading the source of every module.

``violations`` checks one module by its text alone, so planted mistakes can show that it goes red. A new folder in
``rope_patch`` fails ``test_imports_point_up`` until ``FOLDERS`` gives it a place; a new file in a folder needs none.
"""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "rope_patch"

# A folder imports from itself and from what stands above it. The modules of the package's own folder come first.
ROOT = "rope_patch"
MODULES = {"frequencies", "tables", "theory", "version"}
FOLDERS = (
    ROOT,
    "runtime",
    "registry",
    "options",
    "texts",
    "methods",
    "patching",
    "gguf",
    "checkpoints",
    "engines",
    "diagnosis",
    "modeling",
    "kv_cache",
    "evaluation",
    "harness",
    "analysis",
    "kv_evaluation",
    "reports",
    "planning",
    "training",
    "extending",
    "integrations",
    "cli",
    "__main__",
    "recipes",
    "eval_tasks",
    "benchmarks",
)
LEVEL = {folder: level for level, folder in enumerate(FOLDERS)}
OUTSIDE = {"recipes", "eval_tasks", "benchmarks", "tests"}  # folders of the repository, not of the package
PURE_MODULES = {"frequencies", "theory"}
PURE = {"torch", "jaxtyping"}  # all that those may import beyond the standard library's
PURE_STDLIB = {"__future__", "collections", "dataclasses", "functools", "hashlib", "itertools", "math"}
PURE_STDLIB |= {"struct", "typing"}


class Import(NamedTuple):
    """One imported name: ``target`` is dotted, relative to rope_patch when ``ours``."""

    target: str
    ours: bool
    lazy: bool  # inside a function: not run when the module is imported
    line: int


def folder_of(module: str) -> str | None:
    """Return the folder of a dotted name below rope_patch; None of one that has no place."""
    first = module.partition(".")[0]
    if first in LEVEL:
        return first
    return ROOT if first in MODULES | {"__init__"} else None


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

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for name in names(node):
            head, _, rest = name.partition(".")
            ours = head == "rope_patch"
            yield Import(rest if ours else name, ours, lazy, node.lineno)  # type: ignore[attr-defined]
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    yield from walk(ast.parse(source), False)


def violations(module: str, source: str) -> list[str]:
    """Return what is wrong with the imports of one module, a sentence each, with its line.

    Args:
        module: dotted name below rope_patch, ``"kv_cache.cache"``, ``"kv_cache.__init__"`` for a package;
            a script beside the package as ``"recipes.finetune_lora"``.
        source: the text of the module.
    """
    if folder_of(module) is None:
        return [f"{module} has no place in the layers: put it into FOLDERS or MODULES of {Path(__file__).name}"]
    messages = []
    for item in imports(module, source):
        reason = _inside(module, item) if item.ours else _third_party(module, item)
        if reason:
            messages.append(f"{module}, line {item.line}: {reason}")
    return messages


def _inside(module: str, item: Import) -> str | None:
    owner, _, name = item.target.rpartition(".")
    if name.startswith("_") and not name.startswith("__") and not owner.startswith(module.removesuffix(".__init__")):
        return f"{name} is private to {owner}"
    folder = folder_of(module)
    target = folder_of(item.target)
    if target is None and owner:
        return f"{item.target} has no place in the layers"
    if target is None and LEVEL[folder or ROOT] < LEVEL["cli"]:
        return f"import {item.target or 'names'} from the module that defines it, not from rope_patch"
    if target is None or module == "__init__":
        return None  # what uses the public names, and what says where they are
    if module in PURE_MODULES and item.target.rpartition(".")[0] not in PURE_MODULES and item.target != "frequencies":
        return f"{module} needs frequencies alone, yet it imports {item.target}"
    if LEVEL[target] > LEVEL[folder or ROOT]:
        return f"{folder} stands above {target}, yet it imports {item.target}"
    return None


def _third_party(module: str, item: Import) -> str | None:
    folder = folder_of(module) or ROOT
    name = item.target.partition(".")[0]
    if name in OUTSIDE and folder not in OUTSIDE:
        return f"{name} is a folder of the repository: the package cannot import it"
    if module in PURE_MODULES and name not in PURE | PURE_STDLIB:
        return f"{module} is pure maths on torch, yet it imports {name}"
    if module == "__init__" and name in {"torch", "transformers", "peft", "lm_eval", "matplotlib"}:
        return f"__init__ does no work at import, yet it imports {name}"
    if name == "transformers" and LEVEL[folder] < LEVEL["patching"]:
        return "transformers is imported from patching on"
    if name == "peft" and LEVEL[folder] < LEVEL["training"]:
        if folder != "checkpoints":
            return "peft is imported in checkpoints, and from training on"
        if not item.lazy:
            return "checkpoints imports peft inside functions only: it is an optional dependency"
    if name == "lm_eval" and folder not in ("harness", "eval_tasks", "benchmarks"):
        return "lm_eval is imported in harness, eval_tasks and benchmarks alone"
    if name == "matplotlib" and folder != "benchmarks" and not module.startswith(("reports.plots.", "runtime.plots")):
        return "matplotlib is imported in reports.plots, runtime.plots and benchmarks alone"
    return None


def cycle(sources: dict[str, str]) -> list[str] | None:
    """Return the modules of one import cycle, or None; ``__init__`` files, which only name things, are left out."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        if module.endswith("__init__"):
            continue
        graph[module] = set()
        for item in imports(module, source):
            if item.ours:
                # The name may be a module, or something defined in the one before the last dot.
                names = (item.target, item.target.rpartition(".")[0])
                graph[module].update([name for name in names if name in sources and name != module][:1])
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


def read_tree() -> dict[str, str]:
    """Return the text of every module: the package's, and the scripts that lie beside it."""
    sources = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    for folder in ("recipes", "eval_tasks", "benchmarks"):
        for path in sorted((PACKAGE.parent / folder).rglob("*.py")):
            name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
            sources[name] = path.read_text(encoding="utf-8")
    return sources


SOURCES = read_tree()


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_up(module):
    messages = violations(module, SOURCES[module])
    assert not messages, "\n".join(messages)


def test_no_import_cycle():
    assert cycle(SOURCES) is None


def test_a_public_name_is_no_module():
    """Importing ``rope_patch.compare``, were there one, would put the module in the place of the function."""
    import rope_patch

    assert not set(rope_patch.__all__) & {module.partition(".")[0] for module in SOURCES}


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("gadgets", "", "gadgets has no place in the layers"),
        ("methods.method", "from ..patching.install import apply", "methods stands above patching"),
        ("methods.method", "import math\ndef f():\n    from ..patching.install import apply", "line 3: methods stands"),
        ("methods.method", "import importlib\nimportlib.import_module('rope_patch.reports.kv')", "above reports"),
        ("patching.install", "from rope_patch import apply", "import apply from the module that defines it"),
        ("patching.install", "from rope_patch.patching.locate import _unwrap", "_unwrap is private to patching.locate"),
        ("__init__", "import torch", "__init__ does no work at import"),
        ("theory", "from .methods import parse", "theory needs frequencies alone"),
        ("frequencies", "import numpy", "frequencies is pure maths"),
        ("checkpoints.adapters", "import peft", "inside functions only"),
        ("cli.app", "from recipes import finetune_lora", "recipes is a folder of the repository"),
    ],
)
def test_planted_violation_is_seen(module, source, message):
    messages = violations(module, source)
    assert len(messages) == 1, messages
    assert message in messages[0]
