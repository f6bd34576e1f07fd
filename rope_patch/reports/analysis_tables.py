"""Tables of an analysis, and the names of heads and tokens that they share with its figures."""

from __future__ import annotations

from rope_patch.analysis.attention_sums import SINK_WEIGHT
from rope_patch.analysis.heads import SINK_DISTANCE, TYPE_SHARE
from rope_patch.analysis.outliers import OUTLIER_RATIO
from rope_patch.analysis.result import Analysis
from rope_patch.evaluation.number_format import number_text
from rope_patch.reports.analysis_figures import PLURAL_OF_ROLE
from rope_patch.reports.page import Cell, Cells, DataTable, Note

MOST_HEADS, MOST_SINKS = 40, 16
"""Number of rows of a table at most; all are in analysis.json."""
TOKENS_PER_LINE = 8
"""Number of tokens in a line of the text that single heads are shown on: more are cut at the edge of a page."""


# --- heads -----------------------------------------------------------------------------------------------------------


def head_types(analysis: Analysis) -> DataTable | Note:
    """Return the heads that are positional or do induction, with their masses, and their logits beside the bound."""
    rows: list[Cells] = []
    for layer in analysis.heads.layers:
        for head in range(layer.heads):
            types = [name for name in layer.head_types(head) if name not in ("first token", "sink")]
            if types:
                mass, distance = layer.offset_mass[head].max(0)
                masses = [number_text(float(x)) for x in (mass, layer.induction_mass[head], layer.repeated_mass[head])]
                logit = " of ".join(number_text(value, 1) for value in analysis.logits.get((layer.index, head), ()))
                name = Cell(", ".join(types), style="left")
                rows.append([f"{layer.index}.{head}", name, str(int(distance)), *masses, logit])
    if not rows:
        return Note("No head is positional or does induction.")
    columns = (
        "Head",
        "Types",
        "Distance [tokens]",
        "Attention there",
        "Induction, text",
        "Induction, repeated",
        "Logit there, of its bound",
    )
    caption = (
        f"At the distance that draws most of a head: its mean attention, of which {TYPE_SHARE:g} makes a type, and the "
        "mean logit beside its Cauchy–Schwarz bound, the product of the norms of query and key (Barbero et al. 2024, "
        f"tables 3 to 5).{_more(len(rows), MOST_HEADS)}"
    )
    return DataTable("Positional heads, and heads that do induction", columns, rows[:MOST_HEADS], caption)


def sinks(analysis: Analysis) -> DataTable | Note:
    """Return the sinks, by the number of heads that attend to them."""
    hits_of: dict[str, list[tuple[float, str, int]]] = {}
    for layer in analysis.heads.layers:
        for head, place in (layer.sink_weight > SINK_WEIGHT).nonzero().tolist():
            token = token_text(analysis, int(layer.sink_token[head, place]))
            name, position = f"{layer.index}.{head}", int(layer.sink_position[head, place])
            hits_of.setdefault(token, []).append((float(layer.sink_weight[head, place]), name, position))
    if not hits_of:
        return Note(f"No head has a sink: none puts more than {SINK_WEIGHT:g} of its attention on one distant token.")
    rows: list[Cells] = []
    for token, hits in hits_of.items():
        weights, names, positions = zip(*hits, strict=True)
        places = Cell(", ".join(map(str, sorted(set(positions))[:4])), style="left")
        rows.append([Cell(token, style="token"), places, str(len(set(names))), number_text(max(weights))])
    rows.sort(key=lambda row: -int(str(row[2])))
    caption = (
        f"Tokens that draw more than {SINK_WEIGHT:g} of a head’s attention, averaged over the queries at least "
        f"{SINK_DISTANCE} tokens behind them; bytes that are no whole character are written <0xE5>, and four positions "
        f"are named at most.{_more(len(rows), MOST_SINKS)}"
    )
    columns = ("Token", "Position [tokens]", "Heads", "Largest weight")
    return DataTable("Sinks", columns, rows[:MOST_SINKS], caption)


# --- outliers --------------------------------------------------------------------------------------------------------


def recall(analysis: Analysis) -> DataTable:
    """Return how many of the outliers lie inside the bounds, by the radius that makes an outlier."""
    rows: list[Cells] = []
    for states in ("key", "query"):
        for row in analysis.recall(states):
            shares = [number_text(row[name]) for name in ("below", "beyond")]
            rows.append([PLURAL_OF_ROLE[states], number_text(row["radius"], 1), f"{row['outliers']}", *shares])
    columns = ("Of the mean", "Longer than", "Outliers", "Below the frequency bound", "Beyond the angle bound")
    caption = (
        "Recall of Jonasson’s bounds (2025, table 2) at the paper’s lengths, and at "
        f"{OUTLIER_RATIO:g} times the median length; key heads count once for each query head."
    )
    return DataTable("Outliers inside the bounds", columns, rows, caption)


# --- p ---------------------------------------------------------------------------------------------------------------


def p_sweep(analysis: Analysis) -> DataTable:
    """Return for each p the pairs that p-RoPE would stop, and what they carry."""
    rows: list[Cells] = []
    for point in analysis.p_sweep:
        shares = (point.query_share, point.key_share, point.logit_share, point.turned)
        rows.append([f"{point.p:g}", Cell(str(point), style="left"), *(f"{100 * share:.1f} %" for share in shares)])
    columns = ("p", "Pairs stopped", "Share of queries", "Share of keys", "Share of logits", "By distance")
    caption = (
        "Shares of the norms of queries and keys, and of their products (logits), that lie in these pairs; by "
        "distance: the most that stopping them can change."
    )
    return DataTable("The p sweep", columns, rows, caption)


# --- tokens, numbers -------------------------------------------------------------------------------------------------


def tokens(analysis: Analysis) -> DataTable:
    """Return the text that single heads are shown on, token by token."""
    names = [token_text(analysis, token) for token in analysis.single_heads[0].token_ids.tolist()]
    rows: list[Cells] = []
    for start in range(0, len(names), TOKENS_PER_LINE):
        rows.append([str(start), Cell("  ".join(names[start : start + TOKENS_PER_LINE]), style="token")])
    columns = ("Position", "Tokens, two spaces apart")
    return DataTable(f"The text of these figures, {len(names)} tokens", columns, rows, "", folded=True)


def token_text(analysis: Analysis, token: int) -> str:
    """Return the text of a token on one line; a space is shown as ␣."""
    # repr escapes what is not printable, and adds quotes.
    return repr(analysis.token_texts[token])[1:-1].replace(" ", "␣") or "(empty)"


def _more(count: int, most: int) -> str:
    if count <= most:
        return ""
    return f" The first {most} of {count} are shown; all are in analysis.json."
