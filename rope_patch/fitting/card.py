"""The model card of a fitted checkpoint, and which files of its base are not carried over."""

from __future__ import annotations

import re
from typing import Any

import yaml

from rope_patch import __version__

BASE_RECORDS = (
    *("training_log.json", "trainer_state.json", "training_args.bin"),
    *("results.json", "evaluation.json", "fit.svg"),
)
"""Files that say how a checkpoint came about and what it scored: those of the base are not of the fitted model."""

TEMPLATE = """---
{head}---
# {base}, rotary table {done} for {length} tokens

The rotary table of this checkpoint was {done} by `rope-patch fit` (version {version}). The weights are those of the
base, unchanged.

- **Base**: `{base}`
- **Method**: {method}
- **Target length**: {length} tokens
{lines}

`fit.json` has the measurements on held-out text and prompts. Plain transformers loads this folder as it is.
"""

HEADING = """
## The card of the base model

It describes the base before the fit; its scores are not of this model.

"""


def card(source: str, chosen: str, text: str, length: int, base_card: str | None, *, rows: str, on_hub: bool) -> str:
    """Return the card: what was fitted, then the card of the base.

    Args:
        source: the base as the card names it: a folder's name or a hub id.
        chosen: the table in use, as :class:`~rope_patch.fitting.FittedPatch` names it.
        text: what the table was fitted to.
        length: that it was fitted to [tokens].
        base_card: contents of the base's ``README.md``; None where it has none.
        rows: length and positions of the rows, as :meth:`~rope_patch.fitting.Objective.describe_rows` says them.
        on_hub: the source is a hub id, which the front matter then names.
    """
    head, body = _parts(base_card or "")
    head.pop("model-index", None)  # the scores of the base
    start, _, candidate = chosen.rpartition(", ")
    done, method = "fitted", f"gradient descent on the frequencies, started from `{start}` (chosen: {candidate})"
    lines = f"- **Text**: {text}, in rows of {rows}"
    if candidate == "start":
        done, lines = "chosen", f"- **Text**: {text}"
        method = f"`{start}` as it is, the best of those evaluated on held-out text and prompts"
    tags = head.get("tags")
    given = tags if isinstance(tags, list) else [] if tags is None else [tags]
    head = {"library_name": "transformers", **head}
    head["tags"] = list(dict.fromkeys([*given, "rope_patch", "long-context"]))
    if on_hub:
        head["base_model"] = source
    ours = TEMPLATE.format(
        head=yaml.safe_dump(head, sort_keys=False, allow_unicode=True),
        base=source,
        done=done,
        method=method,
        length=length,
        lines=lines,
        version=__version__,
    )
    return f"{ours}{HEADING}{body.lstrip()}" if body.strip() else ours


def _parts(text: str) -> tuple[dict[str, Any], str]:
    """Return the front matter of a card and what follows it; what is no front matter stays text."""
    block = re.match(r"---\r?\n(.*?\r?\n)?---\r?\n", text, re.DOTALL)
    if block is None:
        return {}, text
    try:
        head = yaml.safe_load(block[1] or "") or {}
    except yaml.YAMLError:
        return {}, text
    return (head, text[block.end() :]) if isinstance(head, dict) else ({}, text)
