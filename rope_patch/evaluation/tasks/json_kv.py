"""The value of a key in a JSON object of UUIDs."""

from rope_patch.evaluation.tasks.base import UuidTask


class JsonKV(UuidTask, name="json_kv"):
    """A JSON object with as many pairs of UUIDs as the prompt has room for; one pair is always the last."""

    source = (
        "Liu et al. (2024), Lost in the Middle, arXiv:2307.03172, key-value retrieval, and Yen et al. (2024), HELMET, "
        "arXiv:2410.02694, json_kv, which asks of 105, 220 and 440 pairs at 8192, 16384 and 32768 tokens of Llama 2; "
        "ours has as many as fit, our wording, and no worked examples"
    )
    opening = "A JSON object:\n\n{\n"
    needle = ' "{name}": "{value}",\n'
    # JSON has no comma after the last pair, so this pair is not among those that are placed by depth.
    closing = ' "{name}": "{value}"\n}}\n\n'
    question = '\n\nWhat is the value of the key "{name}" in the JSON object?'
    answer_prefix = " The value is"
