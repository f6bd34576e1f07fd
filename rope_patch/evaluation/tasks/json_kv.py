"""The value of a key in a JSON object of UUIDs."""

from collections.abc import Sequence

from rope_patch.evaluation.tasks.base import Draw, Question, Task, drawn_once, endless_uuids


class JsonKV(Task, name="json_kv"):
    """A JSON object with as many pairs of UUIDs as the prompt has room for; one pair is always the last."""

    source = (
        "Liu et al. (2024), Lost in the Middle, arXiv:2307.03172, key-value retrieval, and Yen et al. (2024), HELMET, "
        "arXiv:2410.02694, json_kv, which asks of 105, 220 and 440 pairs at 8192, 16384 and 32768 tokens of Llama 2; "
        "ours has as many as fit, our wording, and no worked examples"
    )
    anywhere = True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth; the other pairs are the same for all."""
        values = draw.of_common_length(endless_uuids, len(depths))
        keys = draw.of_common_length(endless_uuids, len(depths))
        others = (
            f' "{key}": "{value}"'
            for key, value in zip(endless_uuids(draw.rng), endless_uuids(draw.rng), strict=False)
            if key not in keys and value not in values
        )
        # JSON has no comma after the last pair, so this pair is not among those that are placed by depth.
        last = next(others)
        context = drawn_once(f"{pair},\n" for pair in others)
        return [
            Question(
                hidden=((depth, f' "{key}": "{value}",\n'),),
                text=f'\n\nWhat is the value of the key "{key}" in the JSON object?',
                answer_prefix=" The value is",
                parts=(value,),
                depths=(depth,),
                context=context,
                opening="A JSON object:\n\n{\n ",
                closing=f"{last}\n}}\n\n",
            )
            for depth, key, value in zip(depths, keys, values, strict=True)
        ]
