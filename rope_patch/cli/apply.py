"""``rope-patch apply``."""

from __future__ import annotations

import shlex
from typing import Any

from rope_patch.checkpoints.folder_patch import patch_folder
from rope_patch.checkpoints.source_files import how_to_load
from rope_patch.cli.printing import print_json
from rope_patch.engines.compare_programs import programs_that_agree
from rope_patch.engines.programs import PROGRAMS
from rope_patch.gguf.patch import patch_gguf
from rope_patch.methods import as_method
from rope_patch.options.checkpoints import ApplyOptions
from rope_patch.runtime.folders import is_gguf


def apply(options: ApplyOptions) -> None:
    """Run ``rope-patch apply`` with its options."""
    model = options.model
    output = options.output
    method = as_method(":".join([options.method, *options.parameters]))
    how: dict[str, Any] = {"replace": options.replace, "overwrite": options.force}
    how |= options.patching.arguments()
    if is_gguf(model):
        patch = patch_gguf(model, method, output, **how)
    else:
        patch = patch_folder(model, method, output, **how)
    if options.as_json:
        print_json({"output": str(output), "record": patch.record.to_dict()})
        return
    print(patch)
    if is_gguf(model):
        context = patch.record.stated_length
        print(f"wrote {output}: {shlex.join(['llama-cli', '-m', str(output), '-c', str(context)])} runs it")
        if patch.record.target_length is None:
            print(f"the file states {context} tokens, and llama.cpp reads no more: for more give --target-length")
    else:
        print(f"wrote {output}: {how_to_load(output)} loads it, with or without rope_patch")
        names = [f"{PROGRAMS[name].name} {PROGRAMS[name].version}" for name in programs_that_agree(output)]
        if names:
            print(f"runs as it is in {', '.join(names)}; rope-patch doctor {output} says more")
