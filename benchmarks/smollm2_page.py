"""The tables of docs/smollm2.md, from the results of the study and of the answers.

    python benchmarks/smollm2_page.py docs/smollm2.md

Each table stands between two comments that name it, and is written anew from benchmarks/results; the rest is
left as it is.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pages import markdown_table as table
from pages import page_with, results
from rope_patch.files import write_atomically
from smollm2_cells import FITTED, METHODS

STATES = {"zero": "no", "pose": "yes", "full": "yes, full rows"}
Report = dict[str, Any]
NOTHING = "not measured yet"
SHOWN = {"cope": "abf+cope"}
"""Tables whose name in the results says less than their method does."""


def in_order(rows: Iterable[Report]) -> list[Report]:
    """Return rows in the order of the tables in the study, those without training first."""
    tables = [*METHODS, *FITTED]
    return sorted(filter(is_first, rows), key=lambda row: (row["state"] != "zero", tables.index(row["table"])))


def is_first(row: Report) -> bool:
    """Whether a row is of the target length and the seed that the page is about."""
    return (row["factor"], row["seed"]) == (2, 0)


def shown(row: Report) -> str:
    """Return the name of a row's table for reading."""
    return SHOWN.get(row["table"], row["table"])


def short(length: int) -> str:
    """Return a length for reading: 1024 is 1k."""
    return f"{length // 1024}k" if length and length % 1024 == 0 else str(length)


def percent(change: dict[str, Any] | None) -> str:
    """Return a difference of losses as a change of perplexity, with its interval."""
    if change is None:
        return ""
    estimate = f"{100 * math.expm1(change['estimate']):+.1f} %"
    if change["interval"] is None:
        return estimate
    low, high = change["interval"]
    return f"{estimate} ({100 * math.expm1(low):+.1f} to {100 * math.expm1(high):+.1f})"


def text(report: Report) -> str:
    """Perplexity on novels by position."""
    rows = [row for row in in_order(report["text"]) if row["text"] == "novels"]
    if not rows:
        return NOTHING
    spans = list(rows[0]["perplexity"])
    ends = [[short(int(end)) for end in span.split("-")] for span in spans]
    head = ["table", "LoRA", *(f"{low} to {high}" for low, high in ends)]
    return table(
        head,
        ([shown(row), STATES[row["state"]], *(f"{row['perplexity'][span]:.1f}" for span in spans)] for row in rows),
    )


def within(report: Report) -> str:
    """What a table costs within 1024 tokens of WikiText-2, against the model as it was."""
    rows = [row for row in in_order(report["text"]) if (row["length"], row["text"]) == (1024, "wikitext")]
    return table(
        ["table", "LoRA", "perplexity", "change"],
        (
            [
                shown(row),
                STATES[row["state"]],
                f"{row['perplexity']['0-1024']:.1f}",
                percent(row.get("nll_minus_unpatched", {}).get("0-1024")),
            ]
            for row in rows
        ),
    )


def passkeys(report: Report) -> str:
    """Right answers by length, and those whose digits are all first choice."""
    rows = in_order(report["passkey"])
    if not rows:
        return NOTHING
    lengths = sorted({row["length"] for row in rows})
    found: dict[tuple[str, str, str], dict[int, str]] = {}
    for row in rows:
        answers = f"{row['exact_match']} of {row['prompts']}"
        found.setdefault((shown(row), STATES[row["state"]], row["by"]), {})[row["length"]] = answers
    return table(
        ["table", "LoRA", "read by", *map(short, lengths)],
        ([*which, *(cells.get(length, "") for length in lengths)] for which, cells in found.items()),
    )


def caches(report: Report) -> str:
    """What quantized caches cost in perplexity."""
    if not report["caches"]:
        return NOTHING
    schemes = list(dict.fromkeys(row["scheme"] for row in report["caches"]))
    found: dict[tuple[str, str], dict[str, str]] = {}
    for row in in_order(report["caches"]):
        found.setdefault((shown(row), STATES[row["state"]]), {})[row["scheme"]] = percent(row["nll_cost"])
    return table(
        ["table", "LoRA", *schemes],
        ([*which, *(cells.get(scheme, "") for scheme in schemes)] for which, cells in found.items()),
    )


def outliers(report: Report) -> str:
    """How many outlier pairs lie inside the bounds."""
    heads = next((value for name, value in report.items() if name.startswith("heads")), None)
    if heads is None:
        return NOTHING
    rows = []
    for name, counts in heads["outliers"].items():
        inside = [counts["below the frequency bound"], counts["beyond the angle bound too"]]
        rows.append([name, str(counts["outliers"]), *map(str, inside)])
    return table(["outliers", "number", "below the frequency bound", "beyond the angle bound too"], rows)


def sweep(report: Report) -> str:
    """Which p the usage of the pairs suggests, and what p costs."""
    heads = next((value for name, value in report.items() if name.startswith("heads")), None)
    if heads is None:
        return NOTHING
    rows = []
    for point in heads["p_sweep"]:
        shares = [point["query_share"], point["key_share"], point["logit_share"], point["turned"]]
        cost = "" if point["change"] is None else percent(dict(estimate=point["change"][0][0],
                                                               interval=point["change"][0][1:]))  # fmt: skip
        rows.append([f"{point['p']:g}", *(f"{100 * share:.0f} %" for share in shares), cost])
    head = ["p", "of queries", "of keys", "of logits", "of logits, by distance", "perplexity within the context"]
    return table(head, rows)


def answers(report: Report) -> str:
    """Passkeys with the space before the number in the answer, and in the prompt."""
    lengths = sorted({int(length) for shares in report["passkeys"].values() for length in shares})
    rows = []
    for name, shares in report["passkeys"].items():
        cells = [shares.get(str(length)) for length in lengths]
        rows.append([name, *(f"{c['before']} → {c['after']} of {c['prompts']}" if c else "" for c in cells)])
    return table(["haystack, prompt", *map(short, lengths)], rows)


TABLES: dict[str, tuple[str, Callable[[Report], str]]] = {
    "answers": ("answers_smollm2", answers),
    **{each.__name__: ("study_smollm2", each) for each in (text, within, passkeys, caches, outliers, sweep)},
}
"""Name of each table, to the results it is made of and what makes it."""


def page_with_tables(page: str) -> str:
    """Return a page with its tables made anew.

    Raises:
        ValueError: a name that no table has.
    """

    def made(name: str) -> str:
        if name not in TABLES:
            raise ValueError(f"no table is named {name!r}. Known: {', '.join(TABLES)}")
        source, function = TABLES[name]
        return function(results(source))

    return page_with(page, made)


def main() -> None:
    """Write the tables of a page anew."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = Path(sys.argv[1])
    write_atomically(path, page_with_tables(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
