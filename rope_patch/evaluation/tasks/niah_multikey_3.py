"""A UUID that belongs to another UUID, among as many other pairs as the prompt has room for."""

from rope_patch.evaluation.tasks.base import UuidTask


class NiahMultikey3(UuidTask, name="niah_multikey_3"):
    """One UUID for each UUID."""

    source = (
        "Hsieh et al. (2024), RULER, arXiv:2404.06654, multi-key NIAH 3; our sentences, UUIDs that begin with a digit, "
        "needles at stated depths"
    )
    opening = "Some codes have a magic code."
    needle = " The magic code of {name} is {value}."
    question = " What is the magic code of {name}?"
    answer_prefix = " The magic code of {name} is"
