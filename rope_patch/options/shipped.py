"""The options of commands that list, copy and try what ships with this package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.fields import OptionSet, flag, path, whole, word
from rope_patch.options.shared import CommandOptions


@dataclass(frozen=True)
class MethodsOptions(CommandOptions, command="methods"):
    """List the methods that change a rotary table, with their parameters and defaults."""


@dataclass(frozen=True)
class TasksOptions(OptionSet, command="tasks"):
    """List the long-context tasks for lm-evaluation-harness, and the folder that holds them.

    Example: ``lm_eval --include_path "$(rope-patch tasks --folder)" --tasks rope_passkey …``
    """

    folder: bool = flag("Print only the folder, for lm_eval --include_path.")


@dataclass(frozen=True)
class RecipesOptions(OptionSet, command="recipes"):
    """Copy the training scripts and their YAML configs into a folder of yours, where you can change them.

    Example: ``rope-patch recipes copy ./my-recipes``
    """

    action: str = word("What to do: copy.", metavar="copy", positional=True, choices=("copy",))
    folder: Path = path("The folder to copy the recipes into.", metavar="FOLDER", positional=True)
    force: bool = shared.force()


@dataclass(frozen=True)
class DemoOptions(OptionSet, command="demo"):
    """Run ``rope-patch extend`` on a small checkpoint that ships with this package, in about two minutes.

    It measures 7 methods at four times the context length that the checkpoint was trained at, chooses one, writes a
    checkpoint and checks that plain transformers loads it. The folder holds ``report.html``.
    """

    output: Path = shared.output("rope-patch-demo")
    shape: str = word("The bundled checkpoint to use: llama or gemma3.", "llama", choices=("llama", "gemma3"))
    quick: bool = flag("Measure only two methods, in half a minute.")
    threads: int = whole("The number of CPU threads.", 1, least=1)
