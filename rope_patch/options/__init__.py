"""Declares the options of every command once, as dataclasses of plain values.

The command line, YAML files, checks of values and the pages of documentation follow from their fields
(:mod:`rope_patch.options.fields`). Nothing here imports torch, so that ``--help`` is fast.
"""

from rope_patch.options.analyze import AnalyzeOptions
from rope_patch.options.checkpoints import ApplyOptions, DoctorOptions, RestoreOptions, SettingsOptions
from rope_patch.options.evaluation import CompareOptions, EvalSpec
from rope_patch.options.export import ExportOptions
from rope_patch.options.extend import ExtendOptions
from rope_patch.options.fields import OptionSet
from rope_patch.options.finetune import FinetuneOptions
from rope_patch.options.kv_check import KvCheckOptions
from rope_patch.options.plan import PlanOptions, ServeOptions
from rope_patch.options.shipped import DemoOptions, MethodsOptions, RecipesOptions, TasksOptions

COMMANDS: dict[str, type[OptionSet]] = {
    kind.command: kind
    for kind in (
        ExtendOptions,
        DoctorOptions,
        SettingsOptions,
        MethodsOptions,
        ApplyOptions,
        RestoreOptions,
        TasksOptions,
        CompareOptions,
        PlanOptions,
        ServeOptions,
        FinetuneOptions,
        AnalyzeOptions,
        KvCheckOptions,
        ExportOptions,
        DemoOptions,
        RecipesOptions,
    )
}
"""The options of every command by its name, in the order of the help."""

__all__ = ["COMMANDS", "EvalSpec"]
