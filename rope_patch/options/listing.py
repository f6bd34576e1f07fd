"""The options of commands that list what there is."""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.options import shared
from rope_patch.options.fields import OptionSet, flag


@dataclass(frozen=True)
class MethodsOptions(OptionSet, command="methods"):
    """List the methods that change a rotary table, with their parameters and defaults."""

    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()


@dataclass(frozen=True)
class TasksOptions(OptionSet, command="tasks"):
    """List the long-context tasks for lm-evaluation-harness, and the folder that holds them.

    Example: ``lm_eval --include_path "$(rope-patch tasks --folder)" --tasks rope_passkey …``
    """

    folder: bool = flag("Print only the folder, for lm_eval --include_path.")
