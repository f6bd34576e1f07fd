"""Questions about people who go from place to place and carry objects: facts that are scattered through a haystack."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
"""Fewest people of a story: with fewer questions the others are distractors."""


@dataclass(frozen=True)
class Thread:
    """What one person does.

    Attributes:
        facts: with their depths, which do not fall.
        question: about it.
        answer_prefix: how the answer begins.
        answer: the place asked for.
    """

    facts: tuple[tuple[float, str], ...]
    question: str
    answer_prefix: str
    answer: str


class StoryTask(Task):
    """A question about one person of a story; the last fact that the answer rests on stands at the depth asked for.

    The facts of all people stand in every prompt, so that a haystack is read once for all its questions.

    Attributes:
        places: how many of them a person goes to.
    """

    source = (
        "Kuratov et al. (2024), BABILong, arXiv:2406.10149, after the task of this number of Weston et al. (2015), "
        "bAbI, arXiv:1502.05698; facts, names and wording are ours, without instructions and worked examples"
    )
    anywhere = True
    places: ClassVar[int]

    @abstractmethod
    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Thread:
        """Return what a person does.

        Args:
            depth: of the last fact that the answer rests on.
            person: their name.
            thing: that they carry, if anything.
            places: that they go to, all different.
            draw: random values.
        """

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth."""
        count = max(len(depths), PEOPLE_IN_STORY)
        extra = [draw.rng.random() for _ in range(count - len(depths))]
        people, things = draw.words(PEOPLE.split(), count), draw.words(OBJECTS.split(), count)
        places = draw.words(PLACES.split(), max(6, self.places))
        threads = [
            self.thread(depth, person, thing, draw.rng.sample(places, self.places), draw)
            for depth, person, thing in zip([*depths, *extra], people, things, strict=True)
        ]
        hidden = sorted((fact for thread in threads for fact in thread.facts), key=lambda fact: fact[0])
        return [
            Question(tuple(hidden), thread.question, thread.answer_prefix, (thread.answer,), (depth,))
            for depth, thread in zip(depths, threads, strict=False)
        ]


def earlier(depth: float, count: int, draw: Draw) -> list[float]:
    """Return so many random depths up to one, rising."""
    return sorted(draw.rng.uniform(0, depth) for _ in range(count))


class OneFact(StoryTask, name="qa1"):
    """Each person goes to two places; asked for is the last."""

    places = 2

    def thread(self, depth: float, person: str, thing: str, places: Sequence[str], draw: Draw) -> Thread:
        """Return two facts, the second of which tells."""
        (before,) = earlier(depth, 1, draw)
        facts = ((before, f" {person} went to the {places[0]}."), (depth, f" {person} went to the {places[1]}."))
        return Thread(facts, f" Where is {person}?", f" {person} is in the", places[1])


class TwoFacts(StoryTask, name="qa2"):
    """Each person takes an object to another place; half of them leave it there and go on."""

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


class ThreeFacts(StoryTask, name="qa3"):
    """Each person takes an object and goes to two places with it; half of them go to a third."""

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
