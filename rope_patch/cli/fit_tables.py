"""What ``rope-patch fit`` prints and draws."""

from __future__ import annotations

import sys
from typing import Any


def print_fit(patch: Any) -> None:
    """Print what was fitted to, and how every table did on held-out text and prompts and on the second domain."""
    import math

    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from rope_patch.fitting import CARRIES_OVER, POPULATION
    from rope_patch.fitting.card import changes, retrieval_of

    console = Console(width=None if sys.stdout.isatty() else 160)
    print(f"Rows are drawn from {patch.texts.describe()}: {patch.texts.why}.")
    (first, *_), *_ = patch.candidates.values()
    table = Table(title=escape(_title(patch.second)), box=box.SIMPLE_HEAD, title_justify="left")
    table.add_column("start")
    table.add_column("table")
    for high in first.nll:
        table.add_column(f"ppl to {high}", justify="right")
    for high in first.second_nll:
        table.add_column(f"second to {high}", justify="right")
    for high in first.hits:
        table.add_column(f"answered at {high}", justify="right")
    table.add_column("answer loss", justify="right")
    table.add_column("")
    for label, several in patch.candidates.items():
        for candidate in several:
            chosen = patch.chosen == f"{label}, {candidate.name}"
            worse = "" if candidate.never_worse(several[0]) else "worse than its start"
            table.add_row(
                escape(label) if candidate is several[0] else "",
                candidate.name,
                *[f"{math.exp(value):.3f}" for value in candidate.nll.values()],
                *[f"{math.exp(value):.3f}" for value in candidate.second_nll.values()],
                *[f"{value:.2f}" for value in candidate.retrieval.values()],
                f"{candidate.answers:.3f}",
                "chosen" if chosen else worse,
                style="bold" if chosen else "",
            )
        if patch.stopped[label]:
            table.caption = f"{escape(label)}: {escape(patch.stopped[label])}"
        table.add_section()
    console.print(table)
    winner, start = patch.winner
    for line in changes(winner, start, patch.second):
        print(line)
    print(retrieval_of(winner))
    for answer in winner.few_answers:
        print(f"  {answer}")
    print(f"{POPULATION} {CARRIES_OVER}")
    for sentence in (*patch.unpatched, *patch.warnings):
        print(f"Warning: {sentence}.")


def _title(second: Any) -> str:
    title = (
        "perplexity of held-out text up to a position, prompts answered at a length, and the loss of the answers [nats]"
    )
    return f"{title}; second: {second.name}" if second.name else title


def figure_of(patch: Any, target: int) -> Any:
    """Draw the table in use among others of the same factor."""
    from rope_patch.methods import as_method
    from rope_patch.plots import base as plots

    kind = patch.record.layer_types[0]
    before, after = patch.before[kind], patch.after[kind]
    factor = max(1.0, target / before.context)
    shown = {f"in use: {patch.chosen}": after.inv_freq}
    for text in (f"pi:factor={factor:g}", "abf", f"yarn:factor={factor:g}", "p_rope:p=0.5"):
        try:
            shown[text] = as_method(text)(before).inv_freq
        except ValueError:  # a base table that is scaled already
            continue
    title = f"The fitted table among others, for {target} tokens"
    return plots.factors_by_wavelength(shown, before=before.inv_freq, context=target, title=title)
