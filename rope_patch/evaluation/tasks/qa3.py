"""Where was an object before it was somewhere else? Three facts tell."""

from collections.abc import Sequence

from rope_patch.evaluation.tasks.base import Draw
from rope_patch.evaluation.tasks.stories import StoryTask, Thread, earlier


class ThreeFacts(StoryTask, name="qa3"):
    """Each person takes an object and goes to two places with it; half of them go to a third."""

    source = (
        "Kuratov et al. (2024), BABILong, arXiv:2406.10149, qa3, after Weston et al. (2015), bAbI, arXiv:1502.05698; "
        "facts, names and wording are ours, without instructions and worked examples"
    )
    places = 4

    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Thread:
        """Return four or five facts; the last of those that tell is that the person goes to the third place."""
        facts = [
            *zip(
                earlier(depth, 3, draw),
                (
                    f" {person} went to the {places[0]}.",
                    f" {person} took the {thing}.",
                    f" {person} went to the {places[1]}.",
                ),
                strict=True,
            ),
            (depth, f" {person} went to the {places[2]}."),
        ]
        if draw.rng.random() < 0.5:
            facts.append((draw.rng.uniform(depth, 1), f" {person} went to the {places[3]}."))
        question = f" Where was the {thing} before it was in the {places[2]}?"
        return Thread(tuple(facts), question, f" Before that, the {thing} was in the", places[1])
