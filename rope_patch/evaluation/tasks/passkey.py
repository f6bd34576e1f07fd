"""Passkey retrieval: a number hidden in a text, and asked for at its end."""

from rope_patch.evaluation.tasks.base import NeedleTask


class Passkey(NeedleTask, name="passkey"):
    """One number of five digits. In mode ``multikey``, which is ours, a number with a name at every depth."""

    source = "Mohtashami & Jaggi (2023), arXiv:2305.16300"
    needle = " The pass key is {value}. Remember it."
    question = " What is the pass key?"
    answer_prefix = " The pass key is"
    digits = 5
    named = False
    multikey = (
        " The pass key {name} is {value}. Remember it.",
        " What is the pass key {name}?",
        " The pass key {name} is",
    )
