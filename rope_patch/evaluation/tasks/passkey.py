"""Passkey retrieval: a number hidden in a text, and asked for at its end."""

from rope_patch.evaluation.tasks.base import Draw, NeedleTask


class Passkey(NeedleTask, name="passkey"):
    """One number of five digits."""

    source = (
        "Mohtashami & Jaggi (2023), arXiv:2305.16300; ours has our wording, and numbers of five digits where theirs "
        "are up to 50000"
    )
    needle = " The pass key is {value}. Remember it."
    question = " What is the pass key?"
    answer_prefix = " The pass key is"
    digits = 5

    def names(self, count: int, draw: Draw) -> list[str]:
        """Return empty names: there is one number in each prompt, so it needs no name."""
        return [""] * count
