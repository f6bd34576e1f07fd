"""A checkpoint at a longer context, in one call: candidates are measured, the best is chosen, written and checked."""

from rope_patch.extending.result import Extended as Extended
from rope_patch.extending.run import extend as extend
