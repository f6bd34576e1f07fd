"""A UUID that belongs to a UUID, among as many others as the prompt has room for."""

from collections.abc import Iterator

from rope_patch.evaluation.tasks.base import CrowdedTask, Draw, endless_uuids


class NiahMultikey3(CrowdedTask, name="niah_multikey_3"):
    """One UUID for each UUID."""

    source = "Hsieh et al. (2024), RULER, arXiv:2404.06654, multi-key NIAH 3; our sentences, needles at stated depths"
    opening = "Some codes have a magic code."
    needle = " The magic code of {name} is {value}."
    question = " What is the magic code of {name}?"
    answer_prefix = " The magic code of {name} is"

    def draw(self, count: int, several: bool, draw: Draw) -> tuple[list[str], list[str]]:
        """Return UUIDs and those they belong to."""
        return draw.uuids(count), draw.uuids(count)

    def others(self, draw: Draw) -> Iterator[tuple[str, str]]:
        """Yield other UUIDs, two and two."""
        return zip(endless_uuids(draw.rng), endless_uuids(draw.rng), strict=True)
