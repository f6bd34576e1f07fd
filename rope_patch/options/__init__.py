"""What can be set, declared once: the options of every command, as dataclasses of plain values.

The command line, YAML files, checks of values and pages follow from their fields (:mod:`rope_patch.options.fields`).
Nothing here imports torch.
"""

from rope_patch.options.compare import CompareOptions
from rope_patch.options.evaluation import EvalSpec
from rope_patch.options.fields import COMMANDS

__all__ = ["COMMANDS", "CompareOptions", "EvalSpec"]
