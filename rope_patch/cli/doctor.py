"""``rope-patch doctor``."""

from __future__ import annotations

from rope_patch.checkpoints.folder_patch import repair_folder
from rope_patch.cli.printing import print_json
from rope_patch.diagnosis.doctor import doctor as diagnose
from rope_patch.options.checkpoints import DoctorOptions


def doctor(options: DoctorOptions) -> int:
    """Run ``rope-patch doctor`` with its options; return its exit status."""
    if options.output is not None:
        record = repair_folder(options.model, options.output)
        context = record.stated_length
        print(f"wrote {options.output}: {record.to_method()} over {context} tokens, as the patch record describes it")
        return 0
    diagnosis = diagnose(
        options.model, for_programs=options.for_programs, config_only=options.config_only, python=options.python
    )
    if options.as_json:
        print_json(diagnosis.to_dict())
    else:
        print(diagnosis)
    return diagnosis.status
