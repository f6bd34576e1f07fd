"""Where is an object that a person has carried to a place? Two facts tell."""

from collections.abc import Sequence

from rope_patch.evaluation.tasks.base import Draw
from rope_patch.evaluation.tasks.stories import StoryTask, Thread, earlier


class TwoFacts(StoryTask, name="qa2"):
    """Each person takes an object to another place; half of them leave it there and go on."""

    source = (
        "Kuratov et al. (2024), BABILong, arXiv:2406.10149, qa2, after Weston et al. (2015), bAbI, arXiv:1502.05698; "
        "facts, names and wording are ours, without instructions and worked examples"
    )
    places = 3

    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Thread:
        """Return three or five facts; the last of those that tell is that the person goes there, or leaves it there."""
        leaves = draw.rng.random() < 0.5
        before = earlier(depth, 3 if leaves else 2, draw)
        texts = [
            f" {person} went to the {places[0]}.",
            f" {person} took the {thing}.",
            f" {person} went to the {places[1]}.",
        ]
        facts = list(zip([*before, depth], texts, strict=False))
        if leaves:
            facts.append((depth, f" {person} put down the {thing}."))
            facts.append((draw.rng.uniform(depth, 1), f" {person} went to the {places[2]}."))
        return Thread(tuple(facts), f" Where is the {thing}?", f" The {thing} is in the", places[1])
