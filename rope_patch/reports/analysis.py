"""The page of ``rope-patch analyze``."""

from __future__ import annotations

from collections.abc import Callable

from rope_patch.analysis.outliers import bounds
from rope_patch.analysis.result import Analysis, findings
from rope_patch.evaluation.number_format import number_text
from rope_patch.frequencies import unrotated
from rope_patch.modeling.attention_layers import layers_text
from rope_patch.reports import analysis_figures as figures
from rope_patch.reports import analysis_tables as tables
from rope_patch.reports import page as pages
from rope_patch.reports.layer_kinds import Kind, kinds
from rope_patch.reports.page import Page, Section


def page(analysis: Analysis) -> Page:
    """Return an analysis as a page.

    Args:
        analysis: the analysis of a checkpoint.
    """
    return _page(analysis, _summary, _heads, _single, _usage, _outliers, _p_sweep)


def brief(analysis: Analysis) -> Page:
    """Return what a terminal shows of an analysis: its findings, and what p-RoPE would stop."""
    return _page(analysis, _summary, _p_sweep)


def _page(analysis: Analysis, *sections: Callable[[Analysis], Section]) -> Page:
    return Page(f"How {analysis.name} uses its rotary table", [section(analysis) for section in sections])


def _summary(analysis: Analysis) -> Section:
    return Section("Summary", findings(analysis), [pages.facts(facts(analysis), analysis.environment)])


def _heads(analysis: Analysis) -> Section:
    answer = (
        "A head is of a type when at least half of its attention goes where the type says; diagonal heads (own token) "
        "and previous-token heads need position (Barbero et al. 2024)."
    )
    shown_tables = [tables.head_types(analysis), tables.sinks(analysis)]
    return Section("Which heads are positional", [answer], [*shown_tables, figures.attention_masses(analysis)])


def _single(analysis: Analysis) -> Section:
    answer = (
        "A positional head has fast pairs that are long at every token and adds to one distance; a head that looks for "
        "content has slow pairs that are long at some tokens only (Barbero et al. 2024)."
    )
    figures_of_heads = [figures.single_head(analysis, head) for head in analysis.single_heads]
    return Section("Single heads", [answer], [*figures_of_heads, tables.tokens(analysis)])


def _usage(analysis: Analysis) -> Section:
    answer = (
        "A pair adds at most the product of its norms in query and key to their logit (Cauchy–Schwarz), so the long "
        "pairs are those that the model uses."
    )
    return Section("Which frequencies are used", [answer], [figures.norms(analysis)])


def _outliers(analysis: Analysis) -> Section:
    answer = (
        "A pair whose mean query and mean key are long adds a part to the logit that depends on distance and not on "
        "the tokens; Jonasson (2025) expects such outliers in pairs that make no full turn within the context, at "
        "angles beyond a bound of their own."
    )
    listed = [tables.outlier_pairs(analysis, states) for states in ("key", "query")]
    return Section("Outliers and their bounds", [answer], listed)


def _p_sweep(analysis: Analysis) -> Section:
    answer = (
        "p-RoPE keeps the fastest share p of the pairs and stops the others. What these carry does not say what "
        "stopping them costs: rope-patch compare measures that."
    )
    listed = []
    if analysis.p_sweep:
        listed.append(tables.p_sweep(analysis))
    return Section("What p-RoPE would stop", [answer], listed)


def facts(analysis: Analysis) -> list[tuple[str, str]]:
    """Return what was analyzed: checkpoint, text, versions."""
    capture = analysis.capture
    rows = analysis.rows
    shape = f"{capture.rows} of {capture.tokens // capture.rows} tokens, {capture.tokens} in all"
    if capture.chunk:
        shape += f", read {capture.chunk} tokens at a time"
    layers = []
    for kind in kinds(capture):
        name = f"Layers, {kind.name}" if kind.name else "Layers"
        layers.append((name, _layers(kind)))
    return [
        ("Model", f"{analysis.name}, {capture.model}"),
        ("Rotary table", analysis.table),
        ("Patch", analysis.method or "none"),
        ("Context", f"{analysis.context} tokens"),
        *layers,
        ("Text", f"{rows.name}; SHA-256 {rows.sha256[:16]}…; token ids {capture.text}"),
        ("Rows", shape),
        ("Names", "Heads are named layer.head; pairs are counted from 0, fastest first; in tokens ␣ is a space."),
    ]


def _layers(kind: Kind) -> str:
    layer, zeroed = kind.layers[0], int(unrotated(kind.inv_freq).sum())
    below, angle = bounds(kind.inv_freq, kind.context)
    mean_angle = ""
    if zeroed < int(below.sum()):
        mean_angle = f", for which the angle bound is {number_text(float(angle[below].nanmean()))} rad on average"
    return (
        f"{layers_text([layer.index for layer in kind.layers])}; {layer.query.heads} query heads over "
        f"{layer.key.heads} key heads; {layer.query.pairs} pairs, {int(below.sum())} of them without a full turn "
        f"within {kind.context} tokens ({zeroed} unrotated){mean_angle}"
    )
