"""Sentences about a checkpoint before it is extended, and about programs that read the result differently."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from rope_patch.diagnosis.check import DIFFERS, UNKNOWN
from rope_patch.diagnosis.programs import programs_agree
from rope_patch.options.extend import ExtendSettings
from rope_patch.patching.verify import inspect_model
from rope_patch.planning import plan


def describe_model(model: PreTrainedModel, options: ExtendSettings, trained_length: int) -> list[str]:
    """Return a description of a model, one sentence to an entry.

    Args:
        model: the model in memory.
        options: the options of the run.
        trained_length: the context that the model was trained with [tokens].
    """
    inspection = inspect_model(model)
    lines = [
        f"{options.model}: {inspection.model_class}, trained at {trained_length} tokens; to reach: "
        f"{options.length} ({options.length / trained_length:g} times)"
    ]
    lines += [f"note: {warning}" for warning in inspection.warnings]
    dtype = str(model.dtype).removeprefix("torch.")
    try:
        memory = plan(model, length=options.length, dtype=dtype).reading
    except ValueError:  # the plan does not know the shapes of this family
        return lines
    answer, weights, cache = (memory[part] / 2**30 for part in ("retrieval", "weights", "KV cache"))
    sizes = f"{answer:.2g} GiB in {dtype} (weights {weights:.2g}, KV cache {cache:.2g})"
    return [*lines, f"to answer a prompt of {options.length} tokens takes {sizes}"]


def other_programs(source: str | Path) -> tuple[str, ...]:
    """Return which programs compute another table than transformers 5, and what to run instead, a sentence each.

    Args:
        source: the folder of the checkpoint.
    """
    sentences: dict[str, list[str]] = {}
    try:
        for check in programs_agree(source):
            if check.state in (DIFFERS, UNKNOWN):
                meaning = check.meaning[:1].upper() + check.meaning[1:]
                parts = [check.found, meaning, check.fix and f"Run: {check.fix}"]
                sentence = ". ".join(part for part in parts if part)
                # A fix that begins with "none: " says why no command writes what the program reads right.
                sentence = sentence.replace("Run: none: ", "No command mends that: ")
                sentences.setdefault(sentence, []).append(check.name)
    except ValueError as error:  # a family that nothing is known of
        return (f"what other programs compute from its config is not known: {error}",)
    return tuple(f"{', '.join(names)}: {sentence}" for sentence, names in sentences.items())
