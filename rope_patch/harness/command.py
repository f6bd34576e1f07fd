"""The ``rope-patch-eval`` command: lm-eval's own flags and subcommands, with our model type and tasks.

``--import MODULE`` is the one flag of ours: it imports a Python module that defines methods or retrieval
tasks, and may be repeated.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from rope_patch.runtime.command import guarded
from rope_patch.runtime.packaged import data_path
from rope_patch.runtime.text import did_you_mean


def main() -> None:
    """Run lm-eval's command line; errors of the user's making are one line on stderr."""
    status = guarded(_run, "a run with --use_cache FILE goes on where it was, others begin again")
    if status:
        sys.exit(status)


def _run() -> None:
    from lm_eval._cli import HarnessCLI
    from lm_eval.api.registry import model_registry
    from lm_eval.utils import setup_logging

    setup_logging()
    importlib.import_module("lm_eval.models")  # lm-eval registers its own model types only where there are none yet
    if "rope_patch" not in model_registry:  # it is imported when it is asked for
        model_registry.register("rope_patch", target="rope_patch.harness.model:RopePatchLM")
    # lm-eval's own parser would refuse `--import`.
    sys.argv[1:] = without_imports(sys.argv[1:])
    harness = HarnessCLI()
    try:
        harness.execute(with_ours(harness.parse_args()))
    except (Exception, KeyboardInterrupt) as error:
        print(file=sys.stderr)  # so that the message stands below the bar, which lm-eval leaves open
        _, missing, name = str(error).partition("Tasks not found: ")
        if not missing:
            raise
        ours = [path.stem for path in data_path("eval_tasks").glob("*.yaml")]
        raise ValueError(f"{error}.{did_you_mean(name, ours)} All tasks: rope-patch-eval ls tasks") from error


def without_imports(words: list[str]) -> list[str]:
    """Import the modules that ``--import`` names, and return the other words of a command line.

    Raises:
        ValueError: a module is not found, fails, or defines no method, task or metric.
    """
    # All other flags, `--help` too, are for lm-eval's parser; none of them may pass for an abbreviation of ours.
    parser = argparse.ArgumentParser(prog="rope-patch-eval", add_help=False, allow_abbrev=False)
    parser.add_argument("--import", action="append", dest="modules", metavar="MODULE", default=[])
    known, others = parser.parse_known_args(words)
    if known.modules:
        from rope_patch.registry import import_modules

        import_modules(known.modules)
    return others


def with_ours(arguments: Any) -> Any:
    """Add the folder of our tasks to ``--include_path``, before the user's own, and make our model type the default.

    Args:
        arguments: the parsed arguments of lm-eval's command line, changed in place. Its ``--include_path`` may be
            several folders, joined as in ``PATH``; a ``--config`` may hold one too.
    """
    given: dict[str, Any] = {}
    if getattr(arguments, "config", None):
        from lm_eval.config.evaluate_config import EvaluatorConfig

        given = EvaluatorConfig.load_yaml_config(arguments.config)
    if hasattr(arguments, "include_path"):
        own = arguments.include_path or given.get("include_path") or []
        folders = own.split(os.pathsep) if isinstance(own, str) else [str(folder) for folder in own]
        for folder in folders:
            if not os.path.isdir(folder):
                raise FileNotFoundError(f"--include_path: no folder {folder}")
        arguments.include_path = [str(data_path("eval_tasks")), *folders]
    if getattr(arguments, "model", "") is None and "model" not in given:
        arguments.model = "rope_patch"
    return arguments


if __name__ == "__main__":
    main()
