"""What an analysis found, as tables of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rope_patch.analysis.before_after import Difference
from rope_patch.analysis.heads import MAJORITY, SINK, LayerHeads
from rope_patch.analysis.outliers import RATIO, OutlierPair, recall
from rope_patch.analysis.run import Analysis
from rope_patch.evaluation.metrics import number_text, perplexity_text
from rope_patch.modeling.statistics import Capture
from rope_patch.reports.analysis_words import all_heads, named, relative, spans_of, word
from rope_patch.reports.blocks import AnalysisTable, TextCell
from rope_patch.theory.tables import text

OUTLIERS = 24
"""Outlier pairs of a table."""
HEADS = 400
"""Rows of a folded table of heads; all are in analysis.json."""
SINKS = 16
"""Sinks of a table."""


# --- heads -----------------------------------------------------------------------------------------------------------


def habit_tables(analysis: Analysis) -> list[AnalysisTable]:
    """Return the heads with habits: those of position and content first, those that merely rest folded."""
    resting = {"first token", "sink"}
    busy: list[list[TextCell]] = []
    idle: list[list[TextCell]] = []
    for layer, head in all_heads(analysis):
        habits = layer.habits(head)
        if habits:
            (idle if set(habits) <= resting else busy).append(_habit_row(layer, head, habits))
    columns = ("Head", "Habits", "Own", "Previous", "First", "Sinks", "Induction, text", "… repeated",
               "Distance [tokens]", "Entropy [nats]")  # fmt: skip
    caption = (
        "Layer.head; its habits, then shares of its attention: mean weight on its own token, the previous one, the "
        f"first one, on all sinks, and on what followed the same token before. Bold from {MAJORITY:g} on, which makes "
        "a habit. Distance and entropy are means over queries; an entropy of 0 is all attention on one token."
    )
    more = f" The first {HEADS} are shown; all are in analysis.json."
    made = []
    if busy:
        note = more if len(busy) > HEADS else ""
        made.append(AnalysisTable("Heads with habits", caption + note, columns, busy[:HEADS]))
    if idle:
        note = more if len(idle) > HEADS else ""
        made.append(
            AnalysisTable(f"{len(idle)} heads that only rest", caption + note, columns, idle[:HEADS], folded=True)
        )
    return made


def _habit_row(layer: LayerHeads, head: int, habits: Sequence[str]) -> list[TextCell]:
    masses = (
        *(layer.offset_mass[head, 0], layer.offset_mass[head, 1], layer.first_mass[head], layer.sink_mass[head]),
        *(layer.induction_mass[head], layer.repeated_mass[head]),
    )
    return [
        TextCell(named(layer.index, head)),
        TextCell(", ".join(habits), "left"),
        *(TextCell(number_text(float(mass)), "strong" if float(mass) >= MAJORITY else "") for mass in masses),
        TextCell(number_text(float(layer.distance[head]), 1)),
        TextCell(number_text(float(layer.entropy[head]))),
    ]


def bound_table(analysis: Analysis) -> AnalysisTable | None:
    """Return logits of positional heads beside their Cauchy-Schwarz bound (Barbero et al., tables 3 to 5)."""
    rows = []
    for index, head, habits in analysis.heads.positional():
        layer = analysis.heads.layer(index)
        cells = [TextCell(named(index, head)), TextCell(", ".join(habits), "left")]
        for offset, habit in enumerate(("diagonal", "previous token")):
            cells += [TextCell(number_text(float(part[head, offset]))) for part in (layer.logit, layer.bound)]
            cells.append(TextCell(number_text(float(layer.cosine[head, offset])), "strong" if habit in habits else ""))
        rows.append(cells)
    if not rows:
        return None
    more = f" The first {HEADS} are shown." if len(rows) > HEADS else ""
    return AnalysisTable(
        "How near positional heads come to their bound",
        "Mean logit of a query with its own key and with the previous one; the most it could be, ‖q‖‖k‖ times the "
        "scaling (Cauchy–Schwarz); and the mean of their ratio, a cosine: 1 where query and key lie alike in every "
        f"pair (Barbero et al., tables 3 to 5). Bold: the habit.{more}",
        ("Head", "Habits", "Own: logit", "bound", "cosine", "Previous: logit", "bound", "cosine"),
        rows[:HEADS],
    )


def trigger_table(analysis: Analysis) -> AnalysisTable | str:
    """Return the heads that attend to the previous token after certain tokens only, and those tokens."""
    rows = []
    for layer, head in all_heads(analysis):
        if "after a token" in layer.habits(head):
            parts = (layer.trigger_token, layer.trigger_mass, layer.trigger_count)
            tokens = [
                f"{word(analysis, token)} {number_text(mass)} ({count} times)"
                for token, mass, count in zip(*(part[head].tolist() for part in parts), strict=True)
                if token >= 0 and mass >= MAJORITY / 2
            ]
            mean = number_text(float(layer.offset_mass[head, 1]))
            rows.append([TextCell(named(layer.index, head)), TextCell(mean), TextCell(";  ".join(tokens), "tokens")])
    if rows:
        return AnalysisTable(
            "Heads that look back after certain tokens",
            "Barbero et al.’s apostrophe heads: the query right after such a token attends to it, while the head puts "
            "little on the previous token otherwise. Mean: its weight on the previous token over all queries. Then "
            "the tokens, the mean weight of each when it is the previous one, and how often it is: a few occurrences "
            "prove little.",
            ("Head", "Mean", "After the tokens"),
            rows[:HEADS],
        )
    best = max(all_heads(analysis), key=lambda at: float(at[0].trigger_mass[at[1], 0] - at[0].offset_mass[at[1], 1]))
    layer, head = best
    token, mass = int(layer.trigger_token[head, 0]), float(layer.trigger_mass[head, 0])
    told = "No head looks back after certain tokens only (Barbero et al.’s apostrophe heads)."
    if token < 0:
        return f"{told} No token occurs often enough to tell."
    overall = number_text(float(layer.offset_mass[head, 1]))
    return (
        f"{told} The nearest is {named(layer.index, head)}: after “{word(analysis, token)}” it puts "
        f"{number_text(mass)} on it, and {overall} on the previous token overall."
    )


def sink_table(analysis: Analysis) -> AnalysisTable | str:
    """Return the tokens that heads rest on, by how many heads do."""
    found: dict[tuple[int, bool], list[tuple[float, str, int]]] = {}
    strongest = (0.0, "", -1, -1)
    for layer, head in all_heads(analysis):
        for weight, position, token in zip(
            *(part[head].tolist() for part in (layer.sink_weight, layer.sink_position, layer.sink_token)), strict=True
        ):
            strongest = max(strongest, (weight, named(layer.index, head), token, position))
            if weight > SINK:
                found.setdefault((token, position == 0), []).append((weight, named(layer.index, head), position))
    if not found:
        weight, head_name, token, position = strongest
        if token < 0:
            return "No head has a sink: no token draws attention from afar."
        return (
            f"No head has a sink: none puts more than {SINK:g} of its attention on one token from afar. The strongest "
            f"is “{word(analysis, token)}” at position {position} for head {head_name}, with {number_text(weight)}."
        )
    rows = []
    for (token, first), hits in sorted(
        found.items(), key=lambda item: (-len({name for _, name, _ in item[1]}), item[0])
    ):
        weight, head_name, _ = max(hits)
        places = sorted({position for _, _, position in hits})
        where = "first" if first else ", ".join(map(str, places[:4])) + ("…" if len(places) > 4 else "")
        rows.append([
            TextCell(word(analysis, token), "token"), TextCell(where, "left"),
            TextCell(str(len({name for _, name, _ in hits}))), TextCell(head_name), TextCell(number_text(weight)),
        ])  # fmt: skip
    return AnalysisTable(
        "Sinks, by the attention they draw",
        f"Tokens that draw more than {SINK:g} of a head’s attention, averaged over the queries well behind them "
        f"(the strongest few of each head are counted). The {min(len(rows), SINKS)} that serve most heads.",
        ("Token", "Position [tokens]", "Heads", "Most in head", "Weight there"),
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
                TextCell(str(row.still)),
                *(TextCell(share) for share in shares),
            ]
        )
    return AnalysisTable(
        "Outliers inside the bounds",
        "Jonasson, table 2: pairs whose mean is longer than a threshold, and the share of them below the frequency "
        "bound, beyond the angle bound, and beyond it less 0.1 rad. Thresholds are Jonasson’s, and the .99 quantile "
        "of this model.",
        ("States", "Length over", "Outliers", "Still", "Frequency", "Angle", "Relaxed"),
        rows,
    )


PLURAL = {"key": "keys", "query": "queries"}


def outlier_table(analysis: Analysis, states: str) -> AnalysisTable | str:
    """Return the longest mean keys or queries, and why they are."""
    pairs = analysis.outliers(states)
    if not pairs:
        return f"No mean {states} has a pair longer than {RATIO:g} times the median: there is no outlier to list."
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
        f"{shown}: mean {PLURAL[states]} longer than {RATIO:g} times the median of all pairs. Bound: what the angle φ "
        f"must exceed; none where no angle can.{shared}",
        ("Head", "Pair", "Wavelength [tokens]", "Turns", "Length", "Times median", "Deviation [rad]", "Angle φ [rad]",
         "Bound [rad]", "Why"),
        rows,
    )  # fmt: skip


def why(pair: OutlierPair) -> str:
    """Return what the bounds say of an outlier pair, in words."""
    turns = _turns(pair.turns)
    if pair.kind == "still":
        return "Still: does not rotate, a constant at every distance."
    if pair.kind == "full turns":
        alike = f"{PLURAL[pair.states]} point the same way (deviation {number_text(pair.deviation)} rad)"
        return f"Full turns: {turns} of them; the mean survives because {alike}."
    if pair.kind == "offset feature":
        return f"Offset feature: no full turn ({turns}), angle beyond the bound; adds less at every distance than at 0."
    reach = min(pair.phi / (2 * math.pi), pair.turns) * pair.wavelength
    return f"Partial turn: no full turn ({turns}), angle inside the bound; adds most {text(round(reach))} tokens back."


# --- sinks, p, differences -------------------------------------------------------------------------------------------


def preferred_table(analysis: Analysis) -> AnalysisTable:
    """Return the tokens that the mean queries of each layer prefer most, and whether attention goes there."""
    rows = []
    for found in analysis.sinks:
        head = int(found.score[:, 0].argmax())
        token, position, row = (int(part[head, 0]) for part in (found.token, found.position, found.row))
        drawn = analysis.heads.layer(found.layer)
        same = (drawn.sink_position[head] == position) & (drawn.sink_row[head] == row)
        weight = number_text(float(drawn.sink_weight[head][same][0])) if bool(same.any()) else "not among its sinks"
        rows.append([
            TextCell(named(found.layer, head)), TextCell(word(analysis, token), "token"), TextCell(str(position)),
            TextCell(str(row)), TextCell(number_text(float(found.logit[head, 0]))),
            TextCell(number_text(float(found.score[head, 0]), 1)),
            TextCell(number_text(float(found.cosine[head, 0]))), TextCell(weight),
        ])  # fmt: skip
    return AnalysisTable(
        "The strongest of each layer",
        "Of each layer the head and token with the largest score: the key’s logit with the mean query, averaged over "
        "all distances, in standard deviations above the mean of all keys. Cosine: between whole key and whole mean "
        "query, before rotation. Weight: the attention that the token in fact draws from afar.",
        ("Head", "Token", "Position [tokens]", "Row", "Logit", "Score [σ]", "Cosine", "Weight"),
        rows,
    )


def trial_table(analysis: Analysis) -> AnalysisTable:
    """Return what each p stops, what that carries and what it costs."""
    whole = {kind or "all": pairs for kind, pairs in _pairs_of_types(analysis.capture).items()}
    spans = spans_of(analysis)
    rows = []
    for trial in analysis.trials:
        stopped = "; ".join(
            (f"{len(pairs)} of {whole.get(kind, '?')}" + (f" ({kind})" if kind != "all" else ""))
            for kind, pairs in trial.stopped.items()
        )
        cells = [TextCell(f"{trial.p:g}"), TextCell(stopped or "none", "left")]
        cells += [TextCell(_percent(x)) for x in (trial.query_share, trial.key_share, trial.logit_share, trial.turned)]
        for i, value in enumerate(trial.perplexity):
            cells.append(TextCell(perplexity_text(value)))
            cells.append(TextCell("as found" if trial.change is None else _rise(trial.change[i]), "left"))
        rows.append(cells)
    columns = ["p", "Pairs stopped", "Share of queries", "of keys", "of logits", "turned"]
    columns += [name for span in spans for name in (f"Perplexity, {span}", "Change (95 %)")]
    return AnalysisTable(
        "What each p stops, carries and costs",
        "Shares are of norms (of their products for logits), means over heads. Turned: of the products, what rotation "
        "moves within the context, and so what stopping can change. The change of perplexity is paired by window, with "
        f"its 95 % interval. Measured on: {analysis.trial_text}.",
        tuple(columns),
        rows,
    )


def _rise(change: tuple[float, float, float]) -> str:
    told = [f"{number_text(100 * relative(end), 1, sign=True)} %" for end in change]
    if not all(math.isfinite(end) for end in change[1:]):
        return f"{told[0]} (one window: no interval)"
    return f"{told[0]} ({told[1]} to {told[2]})"


def _pairs_of_types(capture: Capture) -> dict[str | None, int]:
    return {layer.layer_type: layer.query.pairs for layer in capture.layers}


def change_table(found: Difference, before: str, after: str) -> AnalysisTable | str:
    """Return the heads that attend in another way."""
    if not found.heads:
        return "No head has another habit, and none has moved a tenth of its attention."
    rows = [[
        TextCell(named(change.layer, change.head)), TextCell(number_text(change.moved)),
        TextCell(", ".join(change.before) or "none", "left"), TextCell(", ".join(change.after) or "none", "left"),
    ] for change in found.heads[:HEADS]]  # fmt: skip
    more = f" The first {HEADS} of {len(found.heads)}." if len(found.heads) > HEADS else ""
    return AnalysisTable(
        "Heads that changed",
        "Those with other habits, or that have moved a tenth or more of their attention to or from their own token, "
        f"the previous or first one, sinks or induction; most moved first.{more}",
        ("Head", "Moved", f"Habits, {before}", f"Habits, {after}"),
        rows,
    )


def places(found: Sequence[tuple[int, int, int]]) -> str:
    """Return layer, head and pair of each, a few dozen at most."""
    if not found:
        return "none"
    listed = ", ".join(f"{layer}.{head} pair {pair}" for layer, head, pair in found[:OUTLIERS])
    return listed + (f" and {len(found) - OUTLIERS} more" if len(found) > OUTLIERS else "")


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
