"""Which programs run a checkpoint under a method: the only place of ``extend`` that asks what programs compute."""

from __future__ import annotations

import tempfile
from pathlib import Path

from transformers import PreTrainedModel

from rope_patch.engines.compare_programs import programs_that_agree
from rope_patch.engines.flags import ENGINES, checkpoint_under
from rope_patch.engines.programs import PROGRAMS
from rope_patch.patching.install import patched
from rope_patch.patching.older_keys import add_older_keys

NAMES = {program: known.name for program, known in PROGRAMS.items()}
"""The programs that may be asked for, by the name of an option, with the name of a sentence."""


def served_by(model: PreTrainedModel, method: str, source: str, length: int) -> dict[str, str]:
    """Return the programs that run a checkpoint under a method, with the options that they need.

    The options of a program that computes the table from the config that would be written are empty. Those of another
    one belong to the checkpoint before the patch. A program that runs neither is left out.

    Args:
        model: the model, without a patch; its config is what programs read.
        method: the method as a method string.
        source: the checkpoint that the model was loaded from.
        length: the context that the method is made for [tokens].
    """
    with tempfile.TemporaryDirectory() as folder, patched(model, method, target_length=length):
        model.config.save_pretrained(folder)
        add_older_keys(Path(folder))
        try:
            agreeing = programs_that_agree(folder)
        except ValueError:  # a family that nothing is known of
            return {}
    served = {}
    for program in NAMES:
        if program in agreeing:
            served[program] = ""
        elif program in ENGINES:
            try:
                checkpoint = checkpoint_under(source, method, target_length=length)
                served[program] = " ".join(ENGINES[program](checkpoint).lines)
            except (ValueError, OSError):  # it cannot state this table, or the source is a model in memory
                continue
    return served
