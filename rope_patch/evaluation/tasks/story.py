"""A question about people who go from place to place: facts that are scattered through a haystack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rope_patch.evaluation.tasks.base import Draw, Question, Task

PEOPLE = """
    Alice Anna Anton Bruno Carla Clara David Emma Felix Frank Grace Helen Henry Irene Jack Jane Julia Karl Laura Leo
    Lucy Maria Martin Nora Oscar Paul Peter Rosa Ruth Simon Susan Thomas Tina Victor Walter
"""

PLACES = """
    attic bakery bank barn bathroom bedroom cellar church cinema garage garden gym hall hotel kitchen library market
    museum office park school shop stable station studio theater tower yard
"""

PEOPLE_IN_STORY = 4
"""Smallest number of people in a story: if there are fewer questions, the other people are distractors."""


class OneFact(Task, name="qa1"):
    """Each person goes to two places; the question is where one is last, which stands at the given depth.

    The facts of all people stand in every prompt, so that a haystack is read once for all its questions.
    """

    source = (
        "Kuratov et al. (2024), BABILong, arXiv:2406.10149, after the first task of Weston et al. (2015), bAbI, "
        "arXiv:1502.05698; facts, names and wording are ours, without instructions and worked examples; an answer "
        "ends after as many tokens as the right one has, so that 'the garden or the park' counts as the garden, where "
        "BABILong's scorer counts it wrong"
    )
    anywhere = True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth."""
        count = max(len(depths), PEOPLE_IN_STORY)
        extra = [draw.rng.random() for _ in range(count - len(depths))]
        people = draw.words(PEOPLE.split(), count)
        # The people of a story share a few places, so that a place alone does not give the answer away.
        places = draw.words(PLACES.split(), 6)
        stories = []
        for depth, person in zip([*depths, *extra], people, strict=True):
            before, last = draw.rng.sample(places, 2)
            earlier = draw.rng.uniform(0, depth)
            facts = ((earlier, f" {person} went to the {before}."), (depth, f" {person} went to the {last}."))
            stories.append(Question(facts, f" Where is {person}?", f" {person} is in the", (last,), (depth,)))
        hidden = sorted((fact for story in stories for fact in story.hidden), key=lambda fact: fact[0])
        return [replace(story, hidden=tuple(hidden)) for story in stories[: len(depths)]]
