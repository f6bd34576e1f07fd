"""Where is a person who has gone from place to place? One fact tells."""

from collections.abc import Sequence

from rope_patch.evaluation.tasks.base import Draw
from rope_patch.evaluation.tasks.stories import StoryTask, Thread, earlier


class OneFact(StoryTask, name="qa1"):
    """Each person goes to two places; asked for is the last."""

    source = (
        "Kuratov et al. (2024), BABILong, arXiv:2406.10149, qa1, after Weston et al. (2015), bAbI, arXiv:1502.05698; "
        "facts, names and wording are ours, without instructions and worked examples"
    )
    places = 2

    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Thread:
        """Return two facts, the second of which tells."""
        (before,) = earlier(depth, 1, draw)
        facts = ((before, f" {person} went to the {places[0]}."), (depth, f" {person} went to the {places[1]}."))
        return Thread(facts, f" Where is {person}?", f" {person} is in the", places[1])
