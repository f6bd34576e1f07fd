"""``rope-patch settings``."""

from __future__ import annotations

from dataclasses import asdict

from rope_patch.cli.printing import print_json
from rope_patch.engines.flags import checkpoint_under
from rope_patch.engines.statements import STATEMENTS, statement_of
from rope_patch.methods import as_method
from rope_patch.options.checkpoints import SettingsOptions

INEXPRESSIBLE = 3
"""Exit status where a program that is named cannot state the table of a method."""


def settings(options: SettingsOptions) -> int:
    """Run ``rope-patch settings`` with its options; return its exit status."""
    method = as_method(":".join([options.method, *options.parameters]))
    patching = options.patching
    checkpoint = checkpoint_under(
        options.model, method, target_length=patching.target_length, layer_types=patching.layer_types
    )
    written = {}
    refused = {}
    for program in options.for_programs or STATEMENTS:
        try:
            written[program] = statement_of(checkpoint, program)
        except ValueError as error:
            refused[program] = str(error)
    if not written:
        raise ValueError("; ".join(f"{program}: {why}" for program, why in refused.items()))
    if options.as_json:
        without = [{"program": program, "refused": why} for program, why in refused.items()]
        print_json([asdict(one) for one in written.values()] + without)
    else:
        for program, one in written.items():
            print(f"{program}:  # {one.shown_by}")
            for line in (*one.lines, *(f"# {note}" for note in one.notes)):
                print(f"  {line}")
        for program, why in refused.items():
            print(f"{program}: {why}")
    return INEXPRESSIBLE if refused and options.for_programs else 0
