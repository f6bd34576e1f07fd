"""Tables of an analysis, and the names of heads and tokens that they share with its figures."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rope_patch.analysis.attention_sums import SINK_WEIGHT
from rope_patch.analysis.heads import SINK_DISTANCE, TYPE_SHARE, LayerHeads
from rope_patch.analysis.outliers import OUTLIER_RATIO
from rope_patch.analysis.result import Analysis
from rope_patch.evaluation.number_format import four_digits, number_text
from rope_patch.reports.page import Cell, Cells, DataTable, Note

PLURAL_OF_ROLE = {"query": "queries", "key": "keys", "value": "values"}
MOST_HEADS, MOST_OUTLIERS, MOST_SINKS = 400, 24, 16
"""Number of rows of a table at most; all are in analysis.json."""
TOKENS_PER_LINE = 8
"""Number of tokens in a line of the text that single heads are shown on: more are cut at the edge of a page."""


# --- heads -----------------------------------------------------------------------------------------------------------


def head_types(analysis: Analysis) -> DataTable | Note:
    """Return the heads that are of a type, with their attention masses."""
    rows: list[Cells] = []
    for layer, head in _all_heads(analysis):
        types = layer.head_types(head)
        if types:
            masses = (
                layer.offset_mass[head, 0],
                layer.offset_mass[head, 1],
                layer.first_mass[head],
                layer.sink_mass[head],
                layer.induction_mass[head],
                layer.repeated_mass[head],
            )
            cells = []
            for mass in masses:
                style = "strong" if float(mass) >= TYPE_SHARE else ""
                cells.append(Cell(number_text(float(mass)), style=style))
            distance = number_text(float(layer.distance[head]), 1)
            entropy = number_text(float(layer.entropy[head]))
            rows.append([f"{layer.index}.{head}", Cell(", ".join(types), style="left"), *cells, distance, entropy])
    if not rows:
        return Note("No head is of a known type.")
    columns = (
        "Head",
        "Types",
        "Own",
        "Previous",
        "First",
        "Sinks",
        "Induction, text",
        "Induction, repeated",
        "Distance [tokens]",
        "Entropy [nats]",
    )
    caption = (
        f"Mean attention weight by what a head attends to; bold from {TYPE_SHARE:g} on, the share that makes a type."
        f"{_more(len(rows), MOST_HEADS)}"
    )
    return DataTable("Heads and their types", columns, rows[:MOST_HEADS], caption)


def sinks(analysis: Analysis) -> DataTable | Note:
    """Return the sinks, by the number of heads that attend to them."""
    heads_by_sink: dict[tuple[int, bool], list[tuple[float, str, int]]] = {}
    for layer, head in _all_heads(analysis):
        parts = (layer.sink_weight[head], layer.sink_position[head], layer.sink_token[head])
        for weight, position, token in zip(*(part.tolist() for part in parts), strict=True):
            if weight > SINK_WEIGHT:
                heads_by_sink.setdefault((token, position == 0), []).append((weight, f"{layer.index}.{head}", position))
    if not heads_by_sink:
        return Note(f"No head has a sink: none puts more than {SINK_WEIGHT:g} of its attention on one distant token.")
    counts = {key: len({name for _, name, _ in hits}) for key, hits in heads_by_sink.items()}
    rows: list[Cells] = []
    for key in sorted(heads_by_sink, key=lambda key: (-counts[key], key))[:MOST_SINKS]:
        weight, head_name, _ = max(heads_by_sink[key])
        where = "first"
        if not key[1]:
            places = sorted({position for _, _, position in heads_by_sink[key]})
            where = ", ".join(map(str, places[:4]))
            if len(places) > 4:
                where += "…"
        token = Cell(token_text(analysis, key[0]), style="token")
        rows.append([token, Cell(where, style="left"), str(counts[key]), head_name, number_text(weight)])
    caption = (
        f"Tokens that draw more than {SINK_WEIGHT:g} of a head’s attention, averaged over the queries at least "
        f"{SINK_DISTANCE} tokens behind them.{_more(len(heads_by_sink), MOST_SINKS)}"
    )
    columns = ("Token", "Position [tokens]", "Heads", "Strongest in head", "Weight in that head")
    return DataTable("Sinks", columns, rows, caption)


# --- outliers --------------------------------------------------------------------------------------------------------


def outlier_pairs(analysis: Analysis, states: str) -> DataTable | Note:
    """Return the outlier pairs of the mean keys or queries, and where they lie with regard to the bounds."""
    pairs = analysis.outliers(states)
    if not pairs:
        return Note(
            f"No pair of a mean {states} is longer than {OUTLIER_RATIO:g} times the median: there is no outlier."
        )
    rows: list[Cells] = [
        [
            f"{pair.layer}.{pair.head}",
            str(pair.pair),
            "∞" if math.isinf(pair.wavelength) else four_digits(pair.wavelength),
            four_digits(pair.turns),
            number_text(pair.radius),
            number_text(pair.ratio, 1),
            number_text(pair.deviation),
            number_text(pair.phi),
            number_text(pair.angle) if pair.angle <= 2 * math.pi else "none",
            Cell(pair.kind, style="left"),
        ]
        for pair in pairs[:MOST_OUTLIERS]
    ]
    caption = (
        "An offset feature makes no full turn, lies at an angle φ beyond its bound, and adds less at every distance "
        f"than at 0; a partial turn adds most at some distance.{_more(len(pairs), MOST_OUTLIERS)}"
    )
    columns = (
        "Head",
        "Pair",
        "Wavelength [tokens]",
        "Turns",
        "Length",
        "Times median",
        "Deviation [rad]",
        "Angle φ [rad]",
        "Bound [rad]",
        "Kind",
    )
    return DataTable(f"Outlier pairs of the {PLURAL_OF_ROLE[states]}", columns, rows, caption)


# --- p ---------------------------------------------------------------------------------------------------------------


def p_sweep(analysis: Analysis) -> DataTable:
    """Return for each p the pairs that p-RoPE would stop, and what they carry."""
    whole = {layer.layer_type or "all": layer.query.pairs for layer in analysis.capture.layers}
    rows: list[Cells] = []
    for point in analysis.p_sweep:
        stopped = []
        for kind, pairs in point.stopped.items():
            text = f"{len(pairs)} of {whole.get(kind, '?')}"
            if kind != "all":
                text += f" ({kind})"
            stopped.append(text)
        shares = [_percent(x) for x in (point.query_share, point.key_share, point.logit_share, point.turned)]
        rows.append([f"{point.p:g}", Cell("; ".join(stopped) or "none", style="left"), *shares])
    columns = ("p", "Pairs stopped", "Share of queries", "Share of keys", "Share of logits", "By distance")
    caption = (
        "Shares of the norms of queries and keys, and of their products (logits), that lie in these pairs; by "
        "distance: the most that stopping them can change."
    )
    return DataTable("The p sweep", columns, rows, caption)


# --- tokens, numbers -------------------------------------------------------------------------------------------------


def tokens(analysis: Analysis) -> DataTable:
    """Return the text that single heads are shown on, token by token."""
    ids = analysis.single_heads[0].token_ids.tolist()
    rows: list[Cells] = [
        [
            str(start),
            *(Cell(token_text(analysis, token), style="token") for token in ids[start : start + TOKENS_PER_LINE]),
        ]
        for start in range(0, len(ids), TOKENS_PER_LINE)
    ]
    columns = ("Position", *(f"+{i}" for i in range(min(TOKENS_PER_LINE, len(ids)))))
    return DataTable(f"The text of these figures, {len(ids)} tokens", columns, rows, "Token by token.", folded=True)


def token_text(analysis: Analysis, token: int) -> str:
    """Return the text of a token on one line; a space is shown as ␣."""
    # repr escapes what is not printable, and adds quotes.
    return repr(analysis.token_text(token))[1:-1].replace(" ", "␣") or "(empty)"


def _all_heads(analysis: Analysis) -> Iterator[tuple[LayerHeads, int]]:
    return ((layer, head) for layer in analysis.heads.layers for head in range(layer.heads))


def _more(count: int, most: int) -> str:
    if count <= most:
        return ""
    return f" The first {most} of {count} are shown; all are in analysis.json."


def _percent(share: float | None) -> str:
    if share is None or math.isnan(share):
        return "–"
    if share >= 0.1:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.1f} %"
