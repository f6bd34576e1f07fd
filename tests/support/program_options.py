"""The options by which a program runs an unchanged checkpoint under a method, in one call."""

from rope_patch.engines.flags import checkpoint_under
from rope_patch.engines.statements import statement_of


def flags(source, method, program, **patching):
    return statement_of(checkpoint_under(source, method, **patching), program)
