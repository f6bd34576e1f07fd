"""Questions about people who go from place to place and carry objects: facts that are scattered through a haystack."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rope_patch.evaluation.tasks.base import Draw, Question, Task

PEOPLE = """
    Alice Anna Anton Bruno Carla Clara David Emma Felix Frank Grace Helen Henry Irene Jack Jane Julia Karl Laura Leo
    Lucy Maria Martin Nora Oscar Paul Peter Rosa Ruth Simon Susan Thomas Tina Victor Walter
"""

PLACES = """
    attic bakery bank barn bathroom bedroom cellar church cinema garage garden gym hall hotel kitchen library market
    museum office park school shop stable station studio theater tower yard
"""

OBJECTS = """
    apple bag ball basket bell book bottle box brush candle coin cup flute hammer hat key kettle knife lamp letter map
    mirror needle orange pen phone pillow ring rope shoe spoon stamp umbrella vase watch
"""

PEOPLE_IN_STORY = 4
"""Smallest number of people in a story: if there are fewer questions, the other people are distractors."""


class StoryTask(Task):
    """A question about one person of a story; the last fact that the answer needs stands at the given depth.

    The facts of all people stand in every prompt, so that a haystack is read once for all its questions.

    Attributes:
        places: number of places that a person goes to.
    """

    source = (
        "Kuratov et al. (2024), BABILong, arXiv:2406.10149, after the task of this number of Weston et al. (2015), "
        "bAbI, arXiv:1502.05698; facts, names and wording are ours, without instructions and worked examples; an "
        "answer ends after as many tokens as the right one has, so that 'the garden or the park' counts as the garden,"
        " where BABILong's scorer counts it wrong"
    )
    anywhere = True
    places: ClassVar[int]

    @abstractmethod
    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Question:
        """Return the question about a person, which hides what that person does.

        Args:
            depth: depth of the last fact that the answer needs.
            person: name of the person.
            thing: object that the person carries, if the task has one.
            places: places that the person goes to, all different.
            draw: source of random values.
        """

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth."""
        count = max(len(depths), PEOPLE_IN_STORY)
        extra = [draw.rng.random() for _ in range(count - len(depths))]
        people = draw.words(PEOPLE.split(), count)
        things = draw.words(OBJECTS.split(), count)
        # The people of a story share a few places, so that a place alone does not give the answer away.
        places = draw.words(PLACES.split(), max(6, self.places))
        threads = [
            self.thread(depth, person, thing, draw.rng.sample(places, self.places), draw)
            for depth, person, thing in zip([*depths, *extra], people, things, strict=True)
        ]
        hidden = sorted((fact for thread in threads for fact in thread.hidden), key=lambda fact: fact[0])
        return [replace(thread, hidden=tuple(hidden)) for thread in threads[: len(depths)]]


def earlier_depths(depth: float, count: int, draw: Draw) -> list[float]:
    """Return ``count`` random depths below ``depth``, rising."""
    return sorted(draw.rng.uniform(0, depth) for _ in range(count))


class OneFact(StoryTask, name="qa1"):
    """Each person goes to two places; the question is where the person is last."""

    places = 2

    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Question:
        """Return two facts, of which the second gives the answer."""
        (before,) = earlier_depths(depth, 1, draw)
        facts = ((before, f" {person} went to the {places[0]}."), (depth, f" {person} went to the {places[1]}."))
        return Question(facts, f" Where is {person}?", f" {person} is in the", (places[1],), (depth,))


class TwoFacts(StoryTask, name="qa2"):
    """Each person takes an object to another place, where half of them leave it; the question is where it is."""

    places = 3

    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Question:
        """Return three or five facts; the last one needed says that the person goes there or leaves it there."""
        leaves = draw.rng.random() < 0.5
        before = earlier_depths(depth, 3 if leaves else 2, draw)
        texts = [
            f" {person} went to the {places[0]}.",
            f" {person} took the {thing}.",
            f" {person} went to the {places[1]}.",
        ]
        facts = list(zip([*before, depth], texts, strict=False))
        if leaves:
            facts.append((depth, f" {person} put down the {thing}."))
            facts.append((draw.rng.uniform(depth, 1), f" {person} went to the {places[2]}."))
        return Question(tuple(facts), f" Where is the {thing}?", f" The {thing} is in the", (places[1],), (depth,))


class ThreeFacts(StoryTask, name="qa3"):
    """Each person carries an object to two or three places; the question is where it was before the second."""

    places = 4

    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Question:
        """Return four or five facts; the last one needed says that the person goes to the third place."""
        texts = [
            f" {person} went to the {places[0]}.",
            f" {person} took the {thing}.",
            f" {person} went to the {places[1]}.",
            f" {person} went to the {places[2]}.",
        ]
        facts = list(zip([*earlier_depths(depth, 3, draw), depth], texts, strict=True))
        if draw.rng.random() < 0.5:
            facts.append((draw.rng.uniform(depth, 1), f" {person} went to the {places[3]}."))
        question = f" Where was the {thing} before it was in the {places[2]}?"
        return Question(tuple(facts), question, f" Before that, the {thing} was in the", (places[1],), (depth,))
