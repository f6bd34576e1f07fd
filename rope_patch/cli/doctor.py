"""``rope-patch doctor``."""

from __future__ import annotations

from dataclasses import asdict

from rope_patch.checkpoints.folder_patch import repair_folder
from rope_patch.cli.printing import print_json
from rope_patch.diagnosis.doctor import doctor as diagnose
from rope_patch.engines.flags import WRITERS, checkpoint_under, flags_of
from rope_patch.engines.verified_versions import UNVERIFIED
from rope_patch.options.checkpoints import DoctorOptions

INEXPRESSIBLE = 3
"""Exit status where a program's options cannot express the table of a method."""


def doctor(options: DoctorOptions) -> int:
    """Run ``rope-patch doctor`` with its options; return its exit status."""
    if options.method is not None:
        return _print_flags(options, options.method)
    if options.output is not None:
        record = repair_folder(options.model, options.output)
        context = record.stated_length
        print(f"wrote {options.output}: {record.to_method()} over {context} tokens, as the patch record describes it")
        return 0
    diagnosis = diagnose(options.model, for_programs=options.for_programs, config_only=options.config_only)
    if options.as_json:
        print_json(diagnosis.to_dict())
    else:
        print(diagnosis)
    return diagnosis.status


def _print_flags(options: DoctorOptions, method: str) -> int:
    """Print the options by which each program runs an unchanged checkpoint under a method, or why there are none."""
    patching = options.patching
    checkpoint = checkpoint_under(
        options.model, method, target_length=patching.target_length, layer_types=patching.layer_types
    )
    written = {}
    refused = {}
    for program in options.for_programs or WRITERS:
        try:
            written[program] = flags_of(checkpoint, program)
        except ValueError as error:
            refused[program] = str(error)
    if not written:
        raise ValueError("; ".join(f"{program}: {why}" for program, why in refused.items()))
    if options.as_json:
        without = [{"program": program, "refused": why} for program, why in refused.items()]
        print_json([asdict(one) for one in written.values()] + without)
    else:
        for program, one in written.items():
            shown = one.shown_by
            if UNVERIFIED not in shown:
                shown = f"checked against {shown}"
            print(f"{program}:")
            for line in (*one.lines, f"# {shown}", *(f"# {note}" for note in one.notes)):
                print(f"  {line}")
        for program, why in refused.items():
            print(f"{program}: {why}")
    return INEXPRESSIBLE if refused else 0
