"""Tables of the report of an analysis."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rope_patch.analysis.attention_sums import SINK
from rope_patch.analysis.heads import FAR, MAJORITY, LayerHeads
from rope_patch.analysis.outliers import RATIO, OutlierPair
from rope_patch.analysis.recall import recall
from rope_patch.analysis.result import Analysis
from rope_patch.evaluation.intervals import OF_WINDOWS
from rope_patch.evaluation.numbers import number_text, perplexity_text
from rope_patch.modeling.statistics import Capture
from rope_patch.reports.analysis_captions import all_heads, named, relative, spans_of, token_text
from rope_patch.reports.blocks import AnalysisTable, TextCell
from rope_patch.theory.tables import text

OUTLIERS = 24
"""Outlier pairs that a table lists at most."""
HEADS = 400
"""Heads that a table lists at most; all are in analysis.json."""
SINKS = 16
"""Sinks that a table lists at most."""


# --- heads -----------------------------------------------------------------------------------------------------------


def head_type_tables(analysis: Analysis) -> list[AnalysisTable]:
    """Return the heads that are of a type; those that attend to a sink or the first token only in a folded table."""
    sink_types = {"first token", "sink"}
    busy: list[list[TextCell]] = []
    idle: list[list[TextCell]] = []
    for layer, head in all_heads(analysis):
        types = layer.head_types(head)
        if types:
            (idle if set(types) <= sink_types else busy).append(_head_row(layer, head, types))
    columns = ("Head", "Types", "Own", "Previous", "First", "Sinks", "Induction, text", "Induction, repeated",
               "Distance [tokens]", "Entropy [nats]")  # fmt: skip
    caption = (
        "Heads are named layer.head. After the types come attention masses: the mean weight on the query’s own token, "
        "the previous token, the first token, all sinks, and the token that followed the same token before "
        f"(induction). Bold: at least {MAJORITY:g}, the share that makes a type. Distance and entropy are means over "
        "queries; an entropy of 0 means that all attention is on one token."
    )
    more = f" The first {HEADS} are shown; all are in analysis.json."
    tables = []
    if busy:
        note = more if len(busy) > HEADS else ""
        tables.append(AnalysisTable("Heads and their types", caption + note, columns, busy[:HEADS]))
    if idle:
        note = more if len(idle) > HEADS else ""
        tables.append(
            AnalysisTable(
                f"{len(idle)} heads that attend to sinks only", caption + note, columns, idle[:HEADS], folded=True
            )
        )
    return tables


def _head_row(layer: LayerHeads, head: int, types: Sequence[str]) -> list[TextCell]:
    masses = (
        *(layer.offset_mass[head, 0], layer.offset_mass[head, 1], layer.first_mass[head], layer.sink_mass[head]),
        *(layer.induction_mass[head], layer.repeated_mass[head]),
    )
    return [
        TextCell(named(layer.index, head)),
        TextCell(", ".join(types), "left"),
        *(TextCell(number_text(float(mass)), "strong" if float(mass) >= MAJORITY else "") for mass in masses),
        TextCell(number_text(float(layer.distance[head]), 1)),
        TextCell(number_text(float(layer.entropy[head]))),
    ]


def bound_table(analysis: Analysis) -> AnalysisTable | None:
    """Return logits of positional heads beside their Cauchy-Schwarz bound (Barbero et al., tables 3 to 5)."""
    rows = []
    for index, head, types in analysis.heads.positional():
        layer = analysis.heads.layer(index)
        cells = [TextCell(named(index, head)), TextCell(", ".join(types), "left")]
        for offset, head_type in enumerate(("diagonal", "previous token")):
            cells += [TextCell(number_text(float(part[head, offset]))) for part in (layer.logit, layer.bound)]
            cells.append(
                TextCell(number_text(float(layer.cosine[head, offset])), "strong" if head_type in types else "")
            )
        rows.append(cells)
    if not rows:
        return None
    more = f" The first {HEADS} are shown." if len(rows) > HEADS else ""
    return AnalysisTable(
        "Logits of positional heads and their upper bound",
        "Mean logit of a query with its own key and with the previous key; its upper bound, ‖q‖‖k‖ times the scaling "
        "(Cauchy–Schwarz); and the mean of their ratio, a cosine, which is 1 where query and key have the same "
        "direction in every pair (as tables 3 to 5 of Barbero et al. 2024). Bold: the distance of the head’s "
        f"type.{more}",
        ("Head", "Types", "Own: logit", "bound", "cosine", "Previous: logit", "bound", "cosine"),
        rows[:HEADS],
    )


def trigger_table(analysis: Analysis) -> AnalysisTable | str:
    """Return the heads that attend to the previous token after certain tokens only, and those tokens."""
    rows = []
    for layer, head in all_heads(analysis):
        if "after a token" in layer.head_types(head):
            parts = (layer.trigger_token, layer.trigger_mass, layer.trigger_count)
            tokens = [
                f"{token_text(analysis, token)} {number_text(mass)} ({count} times)"
                for token, mass, count in zip(*(part[head].tolist() for part in parts), strict=True)
                if token >= 0 and mass >= MAJORITY / 2
            ]
            mean = number_text(float(layer.offset_mass[head, 1]))
            rows.append([TextCell(named(layer.index, head)), TextCell(mean), TextCell(";  ".join(tokens), "tokens")])
    if rows:
        return AnalysisTable(
            "Heads that attend to the previous token after certain tokens",
            "The apostrophe heads of Barbero et al. (2024): the query right after such a token attends to it, and the "
            "head puts little weight on the previous token otherwise. Mean: its weight on the previous token over all "
            "queries. The last column lists the tokens, the mean weight on each when it is the previous token, and "
            "how often it occurs; a few occurrences are weak evidence.",
            ("Head", "Mean", "After the tokens"),
            rows[:HEADS],
        )
    best = max(all_heads(analysis), key=lambda at: float(at[0].trigger_mass[at[1], 0] - at[0].offset_mass[at[1], 1]))
    layer, head = best
    token, mass = int(layer.trigger_token[head, 0]), float(layer.trigger_mass[head, 0])
    none_found = (
        "No head attends to the previous token after certain tokens only (apostrophe heads, Barbero et al. 2024)."
    )
    if token < 0:
        return f"{none_found} No token occurs often enough to measure it."
    overall = number_text(float(layer.offset_mass[head, 1]))
    return (
        f"{none_found} The closest is {named(layer.index, head)}: right after “{token_text(analysis, token)}” it puts "
        f"a weight of {number_text(mass)} on that token, and {overall} on the previous token overall."
    )


def sink_table(analysis: Analysis) -> AnalysisTable | str:
    """Return the sinks, by the number of heads that attend to them."""
    sinks: dict[tuple[int, bool], list[tuple[float, str, int]]] = {}
    strongest = (0.0, "", -1, -1)
    for layer, head in all_heads(analysis):
        for weight, position, token in zip(
            *(part[head].tolist() for part in (layer.sink_weight, layer.sink_position, layer.sink_token)), strict=True
        ):
            strongest = max(strongest, (weight, named(layer.index, head), token, position))
            if weight > SINK:
                sinks.setdefault((token, position == 0), []).append((weight, named(layer.index, head), position))
    if not sinks:
        weight, head_name, token, position = strongest
        if token < 0:
            return "No head has a sink: no token draws attention from far away."
        return (
            f"No head has a sink: none puts more than {SINK:g} of its attention on one distant token. The strongest "
            f"is “{token_text(analysis, token)}” at position {position} for head {head_name}, with "
            f"{number_text(weight)}."
        )
    rows = []
    for (token, first), hits in sorted(
        sinks.items(), key=lambda item: (-len({name for _, name, _ in item[1]}), item[0])
    ):
        weight, head_name, _ = max(hits)
        places = sorted({position for _, _, position in hits})
        where = "first" if first else ", ".join(map(str, places[:4])) + ("…" if len(places) > 4 else "")
        rows.append([
            TextCell(token_text(analysis, token), "token"), TextCell(where, "left"),
            TextCell(str(len({name for _, name, _ in hits}))), TextCell(head_name), TextCell(number_text(weight)),
        ])  # fmt: skip
    return AnalysisTable(
        "Sinks",
        f"Tokens that draw more than {SINK:g} of a head’s attention, averaged over the queries at least {FAR} tokens "
        f"behind them; the strongest few of each head are counted. The {min(len(rows), SINKS)} sinks of the most "
        "heads are listed.",
        ("Token", "Position [tokens]", "Heads", "Strongest in head", "Weight in that head"),
        rows[:SINKS],
    )


# --- outliers --------------------------------------------------------------------------------------------------------


def recall_table(analysis: Analysis) -> AnalysisTable:
    """Return Jonasson's table 2."""
    rows = []
    for row in recall(analysis.capture, quantiles=(0.99,)).rows:
        shares = [_percent(share) for share in (row.frequency, row.angle, row.relaxed)]
        cut = number_text(row.threshold) if row.quantile is not None else f"{row.threshold:g}"
        rows.append(
            [
                TextCell(PLURAL[row.states]),
                TextCell(cut if row.quantile is None else f"{cut} ({row.quantile:g} quantile)"),
                TextCell(f"{row.outliers} of {row.features}"),
                TextCell(str(row.unrotated)),
                *(TextCell(share) for share in shares),
            ]
        )
    return AnalysisTable(
        "Outliers inside the bounds",
        "As table 2 of Jonasson (2025): the pairs whose mean is longer than a threshold, and the shares of them below "
        "the frequency bound, beyond the angle bound, and beyond the angle bound minus 0.1 rad (relaxed). The "
        "thresholds are those of Jonasson and the 0.99 quantile of this model.",
        ("States", "Length over", "Outliers", "Unrotated", "Frequency", "Angle", "Relaxed"),
        rows,
    )


PLURAL = {"key": "keys", "query": "queries"}


def outlier_table(analysis: Analysis, states: str) -> AnalysisTable | str:
    """Return the outlier pairs of the mean keys or queries, and where they lie with regard to the bounds."""
    pairs = analysis.outliers(states)
    if not pairs:
        return f"No pair of a mean {states} is longer than {RATIO:g} times the median, so there is no outlier to list."
    rows = [[
        TextCell(named(pair.layer, pair.head)), TextCell(str(pair.pair)), TextCell(_wave(pair.wavelength)),
        TextCell(_turns(pair.turns)), TextCell(number_text(pair.radius)), TextCell(number_text(pair.ratio, 1)),
        TextCell(number_text(pair.deviation)), TextCell(number_text(pair.phi)),
        TextCell(number_text(pair.angle) if pair.angle <= 2 * math.pi else "none"), TextCell(why(pair), "long"),
    ] for pair in pairs[:OUTLIERS]]  # fmt: skip
    shown = f"The {OUTLIERS} longest of {len(pairs)}" if len(pairs) > OUTLIERS else f"All {len(pairs)}"
    shared = " A key head that serves several query heads is listed for each." if states == "key" else ""
    return AnalysisTable(
        f"Outlier pairs of the {PLURAL[states]}",
        f"{shown}: mean {PLURAL[states]} longer than {RATIO:g} times the median of all pairs. Bound: the angle that φ "
        f"must exceed for an offset feature; “none” where no angle is enough.{shared}",
        ("Head", "Pair", "Wavelength [tokens]", "Turns", "Length", "Times median", "Deviation [rad]", "Angle φ [rad]",
         "Bound [rad]", "Why"),
        rows,
    )  # fmt: skip


def why(pair: OutlierPair) -> str:
    """Return a sentence on an outlier pair: its kind and what follows from it."""
    turns = _turns(pair.turns)
    if pair.kind == "unrotated":
        return "Unrotated: adds the same at every distance."
    if pair.kind == "full turns":
        alike = f"{PLURAL[pair.states]} point the same way (deviation {number_text(pair.deviation)} rad)"
        return f"Full turns ({turns}): the mean is long although the pair rotates fast, because {alike}."
    if pair.kind == "offset feature":
        return f"Offset feature: no full turn ({turns}), angle beyond the bound; adds less at every distance than at 0."
    reach = min(pair.phi / (2 * math.pi), pair.turns) * pair.wavelength
    return f"Partial turn: no full turn ({turns}), angle inside the bound; adds most {text(round(reach))} tokens back."


# --- sinks, p -------------------------------------------------------------------------------------------


def preferred_table(analysis: Analysis) -> AnalysisTable:
    """Return the tokens that the mean queries of each layer prefer most, and whether attention goes there."""
    rows = []
    for layer in analysis.sinks:
        head = int(layer.score[:, 0].argmax())
        token, position, row = (int(part[head, 0]) for part in (layer.token, layer.position, layer.row))
        drawn = analysis.heads.layer(layer.layer)
        same = (drawn.sink_position[head] == position) & (drawn.sink_row[head] == row)
        weight = number_text(float(drawn.sink_weight[head][same][0])) if bool(same.any()) else "not a sink of the head"
        rows.append([
            TextCell(named(layer.layer, head)), TextCell(token_text(analysis, token), "token"), TextCell(str(position)),
            TextCell(str(row)), TextCell(number_text(float(layer.logit[head, 0]))),
            TextCell(number_text(float(layer.score[head, 0]), 1)),
            TextCell(number_text(float(layer.cosine[head, 0]))), TextCell(weight),
        ])  # fmt: skip
    return AnalysisTable(
        "The preferred token of each layer",
        "For each layer the head and token with the largest score. Score: the key’s logit with the mean query, "
        "averaged over all distances, in standard deviations above the mean of all keys. Cosine: between key and mean "
        "query, before rotation. Weight: the attention weight that the token really draws from distant queries.",
        ("Head", "Token", "Position [tokens]", "Row", "Logit", "Score [σ]", "Cosine", "Weight"),
        rows,
    )


def p_sweep_table(analysis: Analysis) -> AnalysisTable:
    """Return for each p the pairs it zeroes, what they carry, and what that costs."""
    whole = {kind or "all": pairs for kind, pairs in _pairs_of_types(analysis.capture).items()}
    spans = spans_of(analysis)
    rows = []
    for point in analysis.p_sweep:
        stopped = "; ".join(
            (f"{len(pairs)} of {whole.get(kind, '?')}" + (f" ({kind})" if kind != "all" else ""))
            for kind, pairs in point.stopped.items()
        )
        cells = [TextCell(f"{point.p:g}"), TextCell(stopped or "none", "left")]
        cells += [TextCell(_percent(x)) for x in (point.query_share, point.key_share, point.logit_share, point.turned)]
        for i, value in enumerate(point.perplexity):
            cells.append(TextCell(perplexity_text(value)))
            cells.append(TextCell("unchanged" if point.change is None else _rise(point.change[i]), "left"))
        rows.append(cells)
    columns = ["p", "Pairs zeroed", "Share of queries", "Share of keys", "Share of logits", "By distance"]
    columns += [name for span in spans for name in (f"Perplexity, {span}", "Change (95 %)")]
    return AnalysisTable(
        "The p sweep",
        "Shares are the parts of the norms of queries and keys, and of their products (logits), that lie in the "
        "zeroed pairs; means over heads. By distance: the part of the logits that rotation makes depend on distance "
        "within the context, and so the most that zeroing can change. The change of perplexity is paired by window "
        f"and given with its 95 % interval. {OF_WINDOWS} Text: {analysis.p_sweep_text}.",
        tuple(columns),
        rows,
    )


def _rise(change: tuple[float, float, float]) -> str:
    ends = [f"{number_text(100 * relative(end), 1, sign=True)} %" for end in change]
    if not all(math.isfinite(end) for end in change[1:]):
        return f"{ends[0]} (no interval from one window)"
    return f"{ends[0]} ({ends[1]} to {ends[2]})"


def _pairs_of_types(capture: Capture) -> dict[str | None, int]:
    return {layer.layer_type: layer.query.pairs for layer in capture.layers}


# --- text ------------------------------------------------------------------------------------------------------------


def _percent(share: float | None) -> str:
    return (
        "–"
        if share is None or math.isnan(share)
        else f"{100 * share:.0f} %"
        if share >= 0.1
        else f"{100 * share:.1f} %"
    )


def _turns(turns: float) -> str:
    return f"{turns:,.0f}" if turns >= 100 else f"{turns:.2g}" if turns < 10 else f"{turns:.1f}"


def _wave(length: float) -> str:
    return "∞" if math.isinf(length) else text(length)
