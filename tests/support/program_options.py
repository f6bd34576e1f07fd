"""The options by which a program runs an unchanged checkpoint under a method, in one call."""

from __future__ import annotations

from rope_patch.engines.flags import checkpoint_under, flags_of


def flags(source, method, program, **patching):
    return flags_of(checkpoint_under(source, method, **patching), program)
