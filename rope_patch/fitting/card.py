"""What is said of a fitted table, in print and on the model card; which files of the base are not carried over."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rope_patch import __version__
from rope_patch.evaluation.answers import EXACT_MATCH, FIRST_CHOICE, markdown_table
from rope_patch.evaluation.metric import PairedDifference
from rope_patch.evaluation.metrics import METRICS
from rope_patch.fitting.candidates import Candidate
from rope_patch.fitting.texts import CARRIES_OVER, POPULATION, SecondDomain

BASE_RECORDS = (
    *("training_log.json", "trainer_state.json", "training_args.bin"),
    *("results.json", "evaluation.json", "fit.svg"),
)
"""Files that say how a checkpoint came about and what it scored: those of the base are not of the fitted model."""

NO_GAIN = (
    "None of these gains on text like the fit's or in prompts is significant: as far as this shows, the start is as "
    "good, and where it is a method with a formula, more programs compute it."
)

TEMPLATE = """---
{head}---
# {base}, rotary table {done} for {length} tokens

The rotary table of this checkpoint was {done} by `rope-patch fit` (version {version}). The weights are those of the
base, {weights}.

- **Base**: `{base}`
- **Method**: {method}
- **Target length**: {length} tokens
{lines}
{scores}
{answers}{notes}`fit.json` has the measurements on held-out text and prompts. Plain transformers loads this folder
as it is.
"""

HEADING = """
## The card of the base model

It describes the base before its rotary table was changed; its scores are not of this model.

"""


def changes(winner: Candidate, start: Candidate, second: SecondDomain) -> list[str]:
    """Return lines that say how a table differs from its start on both domains and in retrieval, with 95 % intervals.

    Args:
        winner: the table in use.
        start: that it came from.
        second: the second domain.
    """
    if winner == start:
        return [f"The table in use is its start as it is. {second.why}".strip()]
    perplexity, retrieval = METRICS["perplexity"], METRICS["retrieval"]

    def line(what: str, where: str, metric: Any, several: Mapping[int, PairedDifference]) -> str:
        return f"{what}: " + ", ".join(f"{where} {n} {metric.describe(change)}" for n, change in several.items())

    lines = [
        "Change from the start, with 95 % intervals:",
        line("- perplexity of held-out text like the fit's", "up to position", perplexity, winner.text_changes(start)),
    ]
    if second.name:
        what = f"- perplexity of a second domain ({second.name}, {len(second.windows)} windows)"
        lines.append(line(what, "up to position", perplexity, winner.second_changes(start)))
    lines.append(line("- share of prompts answered", "at", retrieval, winner.retrieval_changes(start)))
    gains = [change.high < 0 for change in winner.text_changes(start).values()]
    gains += [change.low > 0 for change in winner.retrieval_changes(start).values()]
    if not any(gains):
        lines.append(NO_GAIN)
    return lines


def card(
    source: str,
    patch: Any,
    length: int,
    base_card: str | None,
    *,
    rows: str,
    on_hub: bool,
    weights: str = "unchanged",
) -> str:
    """Return the card: what was fitted and what came of it, then the card of the base.

    Args:
        source: the base as the card names it: a folder's name or a hub id.
        patch: the :class:`~rope_patch.fitting.FittedPatch`.
        length: that the table was fitted to [tokens].
        base_card: contents of the base's ``README.md``; None where it has none.
        rows: length and positions of the rows, as :meth:`~rope_patch.fitting.Objective.describe_rows` says them.
        on_hub: the source is a hub id, which the front matter then names.
        weights: how the weights of the folder differ from those of the base.
    """
    head, body = parts_of(base_card or "")
    head.pop("model-index", None)  # the scores of the base
    start, _, candidate = patch.chosen.rpartition(", ")
    winner, first = patch.winner
    done, method = "fitted", f"gradient descent on the frequencies, started from `{start}` (chosen: {candidate})"
    lines = f"- **Text**: {patch.texts.describe()}, in rows of {rows}"
    if candidate == "start":
        done, lines = "chosen", f"- **Text**: {patch.texts.describe()}"
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
        weights=weights,
        done=done,
        method=method,
        length=length,
        lines=lines,
        scores="\n".join(("", *changes(winner, first, patch.second), "")),
        answers=_answers(winner),
        notes=_notes(patch.unpatched, patch.warnings if candidate != "start" else None),
        version=__version__,
    )
    return f"{ours}{HEADING}{body.lstrip()}" if body.strip() else ours


def retrieval_of(winner: Candidate) -> str:
    """Return what counts as answered, and the shares of a table's answers that are first choice, as sentences."""
    sentence = f"{EXACT_MATCH}; tables are ranked by that first, and by perplexity second."
    if not winner.first_choice:
        return sentence
    shares = ", ".join(f"{share:.2f} at {length} tokens" for length, share in winner.first_choice.items())
    return f"{sentence} {FIRST_CHOICE} Under the table in use this share is {shares}. Answers under it:"


def _answers(winner: Candidate) -> str:
    """Return the same with a few answers as a Markdown table."""
    table = markdown_table(("", answer) for answer in winner.few_answers)
    return f"{retrieval_of(winner)}\n\n{table}\n\n" if winner.few_answers else f"{retrieval_of(winner)}\n\n"


def _notes(unpatched: Sequence[str], warnings: Sequence[str] | None) -> str:
    """Return what to know of the unpatched model, and of a table that was fitted.

    Args:
        unpatched: sentences.
        warnings: about the fitted table, which come with what the intervals speak of, and what is known of such tables
            on other text; None where nothing was fitted.
    """
    population = () if warnings is None else (POPULATION, CARRIES_OVER)
    notes = (*population, *(f"**Note**: {sentence}." for sentence in (*unpatched, *(warnings or ()))))
    return "".join(f"{note}\n\n" for note in notes)


def parts_of(text: str) -> tuple[dict[str, Any], str]:
    """Return the front matter of a card and what follows it; what is no front matter stays text."""
    block = re.match(r"---\r?\n(.*?\r?\n)?---\r?\n", text, re.DOTALL)
    if block is None:
        return {}, text
    try:
        head = yaml.safe_load(block[1] or "") or {}
    except yaml.YAMLError:
        return {}, text
    return (head, text[block.end() :]) if isinstance(head, dict) else ({}, text)
