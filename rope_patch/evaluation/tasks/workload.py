"""Work that low-bit caches break before passkeys: repeating a tool call, and adding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

from rope_patch.evaluation.tasks.base import ADJECTIVES, NOUNS, Draw, NeedleTask, Question, Task

EXAMPLES = (0.0, 0.5, 1.0)
"""Depths of the sums that are shown."""


def endless_calls(rng: random.Random) -> Iterator[str]:
    """Yield tool calls as JSON, from the name of the tool on."""
    adjectives, nouns = ADJECTIVES.split(), NOUNS.split()
    while True:
        arguments = {"item": f"{rng.choice(adjectives)} {rng.choice(nouns)}", "count": rng.randrange(100, 1000)}
        call = json.dumps({"name": f"order_{rng.choice(nouns)}", "arguments": arguments})
        yield call.removeprefix('{"name": ')


class ToolCall(NeedleTask, name="tool_call"):
    """A tool call of a user, to be repeated as it is."""

    source = "ours; a JSON object as chat templates write tool calls"
    needle = ' The tool call for the {name} is {{"name": {value}.'
    question = " What is the tool call for the {name}?"
    answer_prefix = ' The tool call for the {name} is {{"name":'

    def values(self, count: int, draw: Draw) -> list[str]:
        """Return different tool calls, equally long in tokens."""
        return draw.of_common_length(endless_calls, count)


class Sums(Task, name="sums"):
    """The sum of two numbers of two digits, after other sums that stand in the text as examples."""

    source = "ours"

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth; all of them share the examples."""
        pairs = [(draw.rng.randrange(10, 50), draw.rng.randrange(10, 50)) for _ in range(len(depths) + len(EXAMPLES))]
        shown = zip(EXAMPLES, pairs[len(depths) :], strict=True)
        examples = tuple((depth, f" {a} + {b} = {a + b}.") for depth, (a, b) in shown)
        return [
            Question(
                hidden=examples,
                text=f" What is {a} + {b}?",
                answer_prefix=f" {a} + {b} =",
                parts=(str(a + b),),
                depths=(depth,),
            )
            for depth, (a, b) in zip(depths, pairs, strict=False)
        ]
