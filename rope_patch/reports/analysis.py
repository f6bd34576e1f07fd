"""The page of ``rope-patch analyze``."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rope_patch.analysis.outliers import bounds
from rope_patch.analysis.result import Analysis, findings
from rope_patch.evaluation.number_format import number_text
from rope_patch.frequencies import unrotated
from rope_patch.reports import analysis_figures as figures
from rope_patch.reports import analysis_tables as tables
from rope_patch.reports import page as pages
from rope_patch.reports.layer_kinds import Kind, kinds
from rope_patch.reports.page import Page, Section
from rope_patch.runtime.captions import ranges_text


def page(analysis: Analysis) -> Page:
    """Return an analysis as a page.

    Args:
        analysis: the analysis of a checkpoint.
    """
    return _page(analysis, _summary, _heads, _outliers, _p_sweep, _single)


def brief(analysis: Analysis) -> Page:
    """Return what a terminal shows of an analysis: its findings, and what p-RoPE would stop."""
    return _page(analysis, _summary, _p_sweep)


def _page(analysis: Analysis, *sections: Callable[[Analysis], Section]) -> Page:
    return Page(f"How {analysis.name} uses its rotary table", [section(analysis) for section in sections])


def _summary(analysis: Analysis) -> Section:
    return Section("Summary", findings(analysis), [pages.facts(facts(analysis), analysis.environment)])


def _heads(analysis: Analysis) -> Section:
    positional = analysis.heads.positional()
    shares: dict[bool, list[float]] = {True: [], False: []}
    for layer in analysis.capture.layers:
        norms = layer.query.mean_norm * layer.key_by_query_head.mean_norm
        fast = ~bounds(layer.inv_freq, layer.context)[0]
        for head, share in enumerate((norms[:, fast].sum(1) / norms.sum(1)).tolist()):
            shares[(layer.index, head) in positional].append(share)
    in_positional, in_others = (float(torch.tensor(values).mean()) for values in shares.values())
    answer = (
        f"Positional heads have {number_text(in_positional)} of the products of their norms in pairs that make a full "
        f"turn within the context, other heads {number_text(in_others)}; Barbero et al. (2024) find positional heads "
        "in the fast pairs."
    )
    parts = [figures.attention_masses, figures.head_norms, tables.head_types, tables.sinks]
    if len(set(analysis.rows.groups)) > 1:
        parts.insert(2, figures.norms_by_text)
    return Section("Which heads are positional", [answer], [part(analysis) for part in parts])


def _single(analysis: Analysis) -> Section:
    answer = (
        "The clearest head of each kind on the first tokens of the text, or those that were asked for: a positional "
        "head looks alike at every token, one that looks for content does not."
    )
    drawn = [figures.single_head(analysis, head) for head in analysis.single_heads]
    return Section("Single heads", [answer], [*drawn, tables.tokens(analysis)])


def _outliers(analysis: Analysis) -> Section:
    answer = (
        "An offset feature is a slow pair that lowers the logit at every distance from 1 on; a sink has a key that it "
        "lowers less (Jonasson 2025)."
    )
    drawn = (figures.outliers, figures.by_distance, figures.largest_features, tables.recall)
    return Section("Outliers and their bounds", [answer], [part(analysis) for part in drawn])


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
        f"{ranges_text([layer.index for layer in kind.layers])}; {layer.query.heads} query heads over "
        f"{layer.key.heads} key heads; {layer.query.pairs} pairs, {int(below.sum())} of them without a full turn "
        f"within {kind.context} tokens ({zeroed} unrotated){mean_angle}"
    )
