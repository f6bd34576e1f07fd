"""The page of ``rope-patch analyze``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rope_patch.analysis.heads import SINK_DISTANCE, SINK_WEIGHT, TYPE_SHARE
from rope_patch.analysis.outliers import OUTLIER_RATIO, RELAXED_ANGLE, bounds, recall
from rope_patch.analysis.result import LIGHT_SHARE, Analysis, findings, light_p
from rope_patch.analysis.single_heads import SHOWN_TOKENS
from rope_patch.frequencies import unrotated
from rope_patch.modeling.state_statistics import LayerCapture
from rope_patch.reports import analysis_figures as figures
from rope_patch.runtime import page as pages
from rope_patch.runtime.captions import ranges_text
from rope_patch.runtime.number_format import number_text
from rope_patch.runtime.page import Cell, Cells, DataTable, Note, Page, Section

MOST_HEADS, MOST_SINKS = 40, 16
"""Number of rows of a table at most."""
TOKENS_PER_LINE = 8
"""Number of tokens in a line of the text that single heads are shown on: more are cut at the edge of a page."""


def page(analysis: Analysis, *, all_figures: bool = False) -> Page:
    """Return an analysis as a page.

    Args:
        analysis: the analysis of a checkpoint.
        all_figures: whether the page has the mean length of each pair by layer, and of each single head what its pairs
            add at each distance and the points of its longest pair, too.
    """
    whole = _page(analysis, _summary, _heads, _outliers, _p_sweep, _single)
    if not all_figures:
        return whole
    more = [figures.radius_by_layer(analysis), *(figures.mean_head(analysis, head) for head in analysis.single_heads)]
    answer = (
        "Figures of the mean queries and keys, and of the longest pair of each single head, for those who look for one."
    )
    return Page(whole.title, [*whole.sections, Section("Further figures", [answer], more)])


def brief(analysis: Analysis) -> Page:
    """Return what a terminal shows of an analysis: its findings, and what p-RoPE would stop."""
    return _page(analysis, _summary, _p_sweep)


def models(analyses: Sequence[Analysis]) -> Page:
    """Return a page with one table of several analyses."""
    rows: list[Cells] = []
    for analysis in analyses:
        heads = sum(layer.heads for layer in analysis.heads.layers)
        every = analysis.pairs["key"]
        outlying = analysis.outliers("key")
        found, among_all = recall(outlying, 0.0), recall(every, 0.0)
        below, beyond = (
            Cell(number_text(found[bound]), f"of all {number_text(among_all[bound])}") for bound in ("below", "beyond")
        )
        light = light_p(analysis)
        rows.append(
            [
                analysis.name,
                f"{len(analysis.heads.positional())} of {heads}",
                f"{len(outlying)} of {len(every)}",
                below,
                beyond,
                "–" if light is None else f"{light:g}",
            ]
        )
    columns = (
        "Model",
        "Positional heads",
        "Outliers of keys",
        "Below the frequency bound",
        "Beyond the angle bound",
        "p",
    )
    caption = (
        f"Outliers: pairs of mean keys over {OUTLIER_RATIO:g} times the median length, by query head, and their shares "
        f"within Jonasson’s bounds (2025). p: the smallest that stops less than {LIGHT_SHARE:.0%} of the logits."
    )
    table = DataTable("Positional heads, outliers and p", columns, rows, caption)
    return Page("How several models use their rotary tables", [Section("One row for each model", [], [table])])


def _page(analysis: Analysis, *sections: Callable[[Analysis], Section]) -> Page:
    return Page(f"How {analysis.name} uses its rotary table", [section(analysis) for section in sections])


def _summary(analysis: Analysis) -> Section:
    return Section("Summary", findings(analysis), [pages.facts(analysis_facts(analysis), analysis.environment)])


def _heads(analysis: Analysis) -> Section:
    positional = analysis.heads.positional()
    shares: dict[bool, list[float]] = {True: [], False: []}
    for layer in analysis.capture.layers:
        norms = layer.query.mean_norm * layer.key_by_query_head.mean_norm
        fast = ~bounds(layer.inv_freq, layer.context)[0]
        for head, share in enumerate((norms[:, fast].sum(1) / norms.sum(1)).tolist()):
            shares[(layer.index, head) in positional].append(share)
    in_positional, in_others = (float(torch.tensor(values).mean()) for values in shares.values())
    answer = "No head is positional: none puts most of its attention at one distance."
    if positional:
        answer = (
            f"Positional heads have {number_text(in_positional)} of the products of their norms in pairs that make "
            f"a full turn within the context, other heads {number_text(in_others)}; Barbero et al. (2024) find "
            "positional heads in the fast pairs."
        )
    parts = [figures.attention_masses, figures.head_norms, figures.norms_by_layer, _head_types, _sinks]
    return Section("Which heads are positional", [answer], [part(analysis) for part in parts])


def _single(analysis: Analysis) -> Section:
    answer = (
        "The clearest head of each kind on the first tokens of the text, or those that were asked for: a positional "
        "head looks alike at every token, one that looks for content does not. The first key, on which many heads "
        "rest, is drawn wider than the others."
    )
    drawn = [figures.single_head(analysis, head.shown) for head in analysis.single_heads]
    return Section("Single heads", [answer], [*drawn, tokens(analysis)])


def _outliers(analysis: Analysis) -> Section:
    answer = (
        "An offset feature is a slow pair that lowers the logit at every distance from 1 on; a sink has a key that it "
        "lowers less (Jonasson 2025)."
    )
    drawn = (figures.outliers, figures.by_distance, figures.largest_features, _recall)
    return Section("Outliers and their bounds", [answer], [part(analysis) for part in drawn])


def _p_sweep(analysis: Analysis) -> Section:
    answer = (
        "p-RoPE keeps the fastest share p of the pairs and stops the others. What these carry does not say what "
        "stopping them costs: rope-patch compare measures that."
    )
    listed = [_sweep(analysis)] if analysis.p_sweep else []
    return Section("What p-RoPE would stop", [answer], listed)


def analysis_facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Return what was analyzed: checkpoint, text, versions."""
    capture = analysis.capture
    rows = analysis.rows
    shape = f"{capture.rows} of {capture.tokens // capture.rows} tokens, {capture.tokens} in all"
    layers = []
    for kind, own in figures.kinds(capture):
        name = f"Layers, {kind}" if kind else "Layers"
        layers.append((name, _layers(own)))
    return [
        ("Model", f"{analysis.name}, {capture.model}"),
        ("Rotary table", analysis.table),
        ("Patch", analysis.method or "none"),
        *layers,
        ("Text", f"{rows.name}; SHA-256 {rows.sha256[:16]}…; token ids {capture.text}"),
        ("Rows", shape),
        ("Names", "Heads are named layer.head; pairs are counted from 0, fastest first; in tokens ␣ is a space."),
    ]


def _layers(layers: Sequence[LayerCapture]) -> str:
    first = layers[0]
    zeroed = int(unrotated(first.inv_freq).sum())
    below, angle = bounds(first.inv_freq, first.context)
    mean_angle = ""
    if zeroed < int(below.sum()):
        mean_angle = f", for which the angle bound is {number_text(float(angle[below].nanmean()))} rad on average"
    return (
        f"{ranges_text([layer.index for layer in layers])}; {first.query.heads} query heads over "
        f"{first.key.heads} key heads; {first.query.pairs} pairs, {int(below.sum())} of them without a full turn "
        f"within {first.context} tokens ({zeroed} unrotated){mean_angle}"
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def _head_types(analysis: Analysis) -> DataTable | Note:
    """Return the heads that are positional or do induction, with their masses, and their logits beside the bound."""
    rows: list[Cells] = []
    for layer in analysis.heads.layers:
        for head in range(layer.heads):
            types = [name for name in layer.head_types(head) if name not in ("first token", "sink")]
            if types:
                mass, distance = layer.offset_mass[head].max(0)
                masses = [number_text(float(x)) for x in (mass, layer.induction_mass[head])]
                of_logit = (layer.logit, layer.logit_spread, layer.logit_bound)
                logit, spread, bound = (number_text(float(x[head, distance]), 1) for x in of_logit)
                name = Cell(", ".join(types), style="left")
                at = f"{layer.index}.{head}"
                rows.append([at, name, str(int(distance)), *masses, Cell(f"{logit} of {bound}", f"± {spread}")])
    if not rows:
        return Note("No head is positional or does induction.")
    columns = (
        "Head",
        "Types",
        "Distance [tokens]",
        "Attention there",
        "Induction",
        "Logit there, of its bound",
    )
    caption = (
        f"At the distance that draws most of a head: its mean attention, of which {TYPE_SHARE:g} makes a type, and the "
        "mean logit of its Cauchy–Schwarz bound, the product of the norms of query and key, with its standard "
        f"deviation over all tokens (Barbero et al. 2024, tables 3 to 5). At most {MOST_HEADS} heads are listed, and "
        "all in analysis.json."
    )
    return DataTable("Positional heads, and heads that do induction", columns, rows[:MOST_HEADS], caption)


def _sinks(analysis: Analysis) -> DataTable | Note:
    """Return the sinks, by the number of heads that attend to them."""
    hits_of: dict[str, list[tuple[float, str, int]]] = {}
    for layer in analysis.heads.layers:
        for head, place in (layer.sink_weight > SINK_WEIGHT).nonzero().tolist():
            token = shown_token(analysis, int(layer.sink_token[head, place]))
            name = f"{layer.index}.{head}"
            position = int(layer.sink_position[head, place])
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
        f"{SINK_DISTANCE} tokens behind them; bytes that are no whole character are written <0xE5>. At most "
        f"{MOST_SINKS} tokens and four positions of each are listed."
    )
    columns = ("Token", "Position [tokens]", "Heads", "Largest weight")
    return DataTable("Sinks", columns, rows[:MOST_SINKS], caption)


def _recall(analysis: Analysis) -> DataTable:
    """Return how many of the outliers lie inside the bounds, by the radius that makes an outlier."""
    rows: list[Cells] = []
    for states in ("key", "query"):
        for row in analysis.recall(states):
            rows.append(
                [
                    figures.PLURAL_OF_ROLE[states],
                    number_text(row["radius"], 1),
                    f"{row['outliers']}",
                    number_text(row["below"]),
                    number_text(row["beyond"]),
                    number_text(row["nearly"]),
                ]
            )
    columns = (
        "Of the mean",
        "Longer than",
        "Outliers",
        "Below the frequency bound",
        "Beyond the angle bound",
        f"Beyond it less {RELAXED_ANGLE:g} rad",
    )
    caption = (
        "Recall of Jonasson’s bounds (2025, table 2) at the paper’s lengths, and at "
        f"{OUTLIER_RATIO:g} times the median length; key heads count once for each query head."
    )
    return DataTable("Outliers inside the bounds", columns, rows, caption)


def _sweep(analysis: Analysis) -> DataTable:
    """Return for each p the pairs that p-RoPE would stop, and what they carry."""
    rows: list[Cells] = []
    for point in analysis.p_sweep:
        rows.append(
            [
                f"{point.p:g}",
                Cell(str(point), style="left"),
                f"{100 * point.query_share:.1f} %",
                f"{100 * point.key_share:.1f} %",
                f"{100 * point.logit_share:.1f} %",
                f"{point.kept} of {point.positional}",
            ]
        )
    columns = ("p", "Pairs stopped", "Share of queries", "Share of keys", "Share of logits", "Positional heads left")
    caption = (
        "Shares of the norms of queries and keys, and of their products (logits), that lie in these pairs. Positional "
        f"heads: of those in layers that change, and that show it on the first {SHOWN_TOKENS} tokens, how many "
        "attend to their distance also where their layer alone is changed."
    )
    return DataTable("The p sweep", columns, rows, caption)


def tokens(analysis: Analysis) -> DataTable:
    """Return the text that single heads are shown on, token by token."""
    names = [shown_token(analysis, token) for token in analysis.single_heads[0].shown.token_ids.tolist()]
    rows: list[Cells] = []
    for start in range(0, len(names), TOKENS_PER_LINE):
        rows.append([str(start), Cell("  ".join(names[start : start + TOKENS_PER_LINE]), style="token")])
    columns = ("Position", "Tokens, two spaces apart")
    return DataTable(f"The text of these figures, {len(names)} tokens", columns, rows, "", folded=True)


def shown_token(analysis: Analysis, token: int) -> str:
    """Return the text of a token on one line; a space is shown as ␣."""
    # repr escapes what is not printable, and adds quotes.
    return repr(analysis.token_texts[token])[1:-1].replace(" ", "␣") or "(empty)"
