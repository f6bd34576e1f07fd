"""What a program does with a config: the tables and windows of its layers, and the context that it serves.

It is known from the program itself, which was asked about a config of the same family in the same form, or is asked
now. Of SGLang, which has no package for a CPU, the rows were written by reading its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers.utils.generic import flatten_dict

from rope_patch.engines.asking import MODULES, EngineAnswer
from rope_patch.engines.forms import form_of
from rope_patch.engines.known_answers import seen
from rope_patch.engines.program_contexts import kind_of, served_context
from rope_patch.engines.programs import PROGRAMS
from rope_patch.engines.stated_config import StatedConfig
from rope_patch.engines.verdicts import DROPPED, REFUSES, SAME, WINDOW, verdict_of
from rope_patch.patching.older_keys import stated_twice
from rope_patch.tables import changes_with_length


def to_ask(program: str) -> str:
    """Return the command that asks a program; empty if it cannot be asked."""
    if program not in MODULES:
        return ""
    ask = f"--for {program} --python ENVIRONMENT/bin/python, which asks it"
    if program == "llama.cpp":
        return f"rope-patch export FOLDER --to gguf --converter PATH -o FILE; then rope-patch doctor FILE {ask}"
    return f"rope-patch doctor FOLDER {ask}"


@dataclass(frozen=True)
class Reading:
    """What a program does with a config.

    Attributes:
        version: the version of the program.
        seen: what it does, by layer type, as :func:`~rope_patch.engines.verdicts.verdict_of` says; empty if unknown.
        context: the context that it serves [tokens].
        reasons: sentences on the reasons, as far as they are known.
        unknown: the reason why it is not known what the program does; empty if it is known.
        asked: whether the program was asked about this very config.
    """

    version: str
    seen: Mapping[str | None, str] = field(default_factory=dict)
    context: int = 0
    reasons: tuple[str, ...] = ()
    unknown: str = ""
    asked: bool = False

    def agrees(self, stated: StatedConfig) -> bool:
        """Tell whether the program does what transformers 5 does, over the whole context that is stated."""
        return not self.unknown and set(self.seen.values()) == {SAME} and self.context == stated.context

    @property
    def refused(self) -> str:
        """The error with which the program fails on the config; empty if it does not."""
        text = next(iter(self.seen.values()), "")
        return text.removeprefix(f"{REFUSES}: ") if text.startswith(REFUSES) else ""


def reading_of(program: str, stated: StatedConfig) -> Reading:
    """Return what a program does with a config, from what it was seen to do.

    Args:
        program: the program, a key of :data:`~rope_patch.engines.programs.PROGRAMS`.
        stated: the config that the program reads.
    """
    known = PROGRAMS[program]
    version = known.version
    if reason := _cannot_be_known(program, stated) or changing(stated):
        return Reading(version, unknown=reason)
    form = form_of(stated)
    unscaled = [kind or "" for kind in stated.tables if kind_of(stated.parameters(kind)) == "default"]
    found = {kind or None: text for kind, text in seen(known.name, stated.model_type, form, unscaled).items()}
    if not any(layer.window for layer in stated.layers):  # then it does not matter whether the program knows windows
        found = {kind: SAME if text in (DROPPED, WINDOW) else text for kind, text in found.items()}
    if set(found) != set(stated.tables):
        return Reading(
            version, unknown=f"it was not asked about {stated.model_type} in this form: {form or 'no rotary keys'}"
        )
    try:
        context, reasons = served_context(program, stated.complete)
    except (KeyError, TypeError, ValueError) as error:  # a missing factor, or one that is a string
        return Reading(version, unknown=f"which context it serves cannot be told from such a config: {error}")
    return Reading(version, found, context, reasons)


def reading_asked(answer: EngineAnswer, own: EngineAnswer, stated: StatedConfig) -> Reading:
    """Return what a program does with a config, from its answer.

    Args:
        answer: the answer of the program.
        own: the answer of transformers 5.
        stated: the config about which it was asked.
    """
    if reason := changing(stated):
        return Reading(answer.version, unknown=reason, asked=True)
    found = {kind or None: text for kind, text in verdict_of(answer, own, stated.tables).items()}
    if not found:
        reason = answer.unread or own.unread or own.error or "its layers could not be told apart"
        return Reading(answer.version, unknown=f"it was asked, and the answer could not be read: {reason}", asked=True)
    return Reading(answer.version, found, answer.context or stated.context, asked=True)


def _cannot_be_known(program: str, stated: StatedConfig) -> str:
    """Return why no form of the config says what a program does; empty if one may."""
    if stated.outer_type not in (stated.model_type, *PROGRAMS[program].multimodal):
        return f"its code for {stated.outer_type} checkpoints was not compared"
    if stated.unread:
        return f"whether it reads {', '.join(stated.unread)} was not checked"
    if twice := stated_twice(flatten_dict(dict(stated.raw)), flatten_dict(dict(stated.complete["rope_parameters"]))):
        return f"which value it takes is not known: {'; '.join(twice)}"
    return ""


def changing(stated: StatedConfig) -> str:
    """Return a sentence that says so if a table changes with the length of the text; empty if none does."""
    every = [stated.parameters(kind) for kind in stated.tables]
    if any(changes_with_length({**parameters, "rope_type": kind_of(parameters)}) for parameters in every):
        return (
            "the table changes with the length of the text: there is no one table to compare. Fix it with rope-patch "
            "apply MODEL default --freeze-at LENGTH -o FOLDER"
        )
    return ""
