"""The report of ``rope-patch analyze``: one HTML file with figures. Needs matplotlib.

Example:
    ``write("analysis.html", rope_patch.analyze(model, tokenizer), command="rope-patch analyze …")``.
"""

from __future__ import annotations

from pathlib import Path

from rope_patch.analysis.result import Analysis, findings
from rope_patch.files import write_atomically
from rope_patch.plots.outliers import NEAR
from rope_patch.reports import analysis_figures as figures
from rope_patch.reports import analysis_mean_logits as mean_logits
from rope_patch.reports import analysis_tables as tables
from rope_patch.reports.analysis_captions import facts, token_text
from rope_patch.reports.blocks import Block, Section, TokenLines
from rope_patch.reports.comparison import render

LINE = 16
"""Tokens per line of the text that single heads are shown on."""


def write(path: str | Path, analysis: Analysis, *, command: str | None = None) -> None:
    """Write :func:`page` to a file, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomically(path, page(analysis, command=command))


def page(analysis: Analysis, *, command: str | None = None) -> str:
    """Return an analysis as one HTML document, the same text for the same analysis.

    Args:
        analysis: of a checkpoint.
        command: the command line that made it.
    """
    return render(
        "analysis.html.jinja",
        title=f"How {analysis.name} uses its rotary table",
        command=command,
        sections=sections(analysis),
        facts=facts(analysis),
        findings=findings(analysis),
    )


def sections(analysis: Analysis) -> list[Section]:
    """Return the sections of the page after its summary, in their order."""
    parts = (_heads, _views, _usage, _outliers, _means, _sinks, _p_sweep)
    return [part(analysis) for part in parts]


def _heads(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "A head is of a type when at least half of its attention goes where the type says. An induction head attends "
        "to the token that followed the same token before; it is measured on the text and on repeated random tokens. "
        "A head of type “after a token” attends to the previous token only after certain tokens, of which at least "
        "three must draw that much. Diagonal heads (own token) and previous-token heads need position, and Barbero et "
        "al. (2024) find that they use the fastest pairs for it. Induction heads look for content. A head that "
        "attends to a sink or to the first token contributes almost nothing for the query.",
        figures.attention_masses(analysis),
    ]
    blocks += tables.head_type_tables(analysis) or ["No head is of a known type."]
    bound = tables.bound_table(analysis)
    blocks += [
        bound or "No head is positional, so there are no logits to compare with their bound.",
        tables.trigger_table(analysis),
        tables.sink_table(analysis),
    ]
    return Section("heads", "Which heads are positional", blocks)


def _views(analysis: Analysis) -> Section:
    if not analysis.views:
        return Section("single", "Single heads", ["No single head was analyzed."])
    ids = analysis.views[0].token_ids.tolist()
    lines = [
        (start, [token_text(analysis, token) for token in ids[start : start + LINE]])
        for start in range(0, len(ids), LINE)
    ]
    blocks: list[Block] = [
        "One head at a time on the first row of the text, as in figures 5 to 7 and 14 to 18 of Barbero et al. (2024). "
        "In the maps of norms a horizontal band is a pair that is long at every token; a vertical line is a token "
        "that is long in many pairs. A positional head has fast pairs that are long at every token, and bars that "
        "favour one distance. A head that looks for content has slow pairs that are long at some tokens only. "
        f"{figures.LINE}",
        *(figures.view(analysis, view) for view in analysis.views),
        TokenLines(f"The text of these figures, {len(ids)} tokens", lines),
    ]
    return Section("single", "Single heads", blocks)


def _usage(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "A pair adds at most the product of its norms in query and key to their logit (Cauchy–Schwarz), so the long "
        "pairs are those that a model uses. Barbero et al. (2024) find the longest pairs at the slow end, where "
        "rotation changes little, and long fast pairs in few heads: the positional ones.",
        figures.norms(analysis),
        figures.head_norms(analysis),
    ]
    if len(analysis.capture.groups) > 1:
        blocks.append(figures.group_norms(analysis))
    return Section("usage", "Which frequencies are used", blocks)


def _outliers(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "A pair whose mean query and mean key are long adds a part to the logit that depends on the distance and not "
        "on the tokens. According to Jonasson (2025) such outliers arise in pairs that make no full turn within the "
        "context length L (frequency f below 2π/L), and at angles from mean query to mean key beyond π + L f / 2. The "
        "logit of such a pair is smaller at every distance than at 0.",
        *figures.outlier_scatter(analysis),
        figures.features(analysis),
        tables.recall_table(analysis),
        *(tables.outlier_table(analysis, states) for states in ("key", "query")),
    ]
    return Section("outliers", "Outliers and their bounds", blocks)


def _means(analysis: Analysis) -> Section:
    any_positional = bool(analysis.heads.positional())
    chosen = mean_logits.clearest(analysis.heads)
    shown = (
        "the clearest positional heads" if any_positional else "the most positional head, since none is of that type"
    )
    blocks: list[Block] = [
        "The logit of the mean query with the mean key is a sum of waves over the distance, one wave per pair, as in "
        f"figures 5 to 7 and 10 of Jonasson (2025). The figures show {shown}. Where the sum alone has a peak at the "
        "distance that the head attends to, the head works by position and not by content, and it depends on the "
        f"pairs without which the sum loses that peak. Beyond {NEAR} tokens single waves are too narrow to draw: "
        "dashed lines are means there, and grey is the range of the sum. In the lower row, dots are the mean query as "
        "its position grows, in the planes of the longest pairs, and squares are the keys that it prefers, each at "
        "its own position. Queries and keys are drawn relative to the longest of each; a key on the side of the dots "
        "has a higher logit.",
        *(mean_logits.mean_logit(analysis, layer, head) for layer, head in chosen),
    ]
    return Section("means", "The mean logit over distance", blocks)


def _sinks(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "A sink is a token that draws attention from every position. Jonasson (2025) finds that its key is aligned "
        "with the mean query in the offset features. The score in this table uses the keys and the mean query only; "
        "the last column says how much attention the token really draws.",
        tables.preferred_table(analysis),
    ]
    return Section("sinks", "Tokens that the mean query prefers", blocks)


def _p_sweep(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "p-RoPE rotates the fastest share p of the pairs and sets the frequencies of the others to zero (Barbero et "
        "al. 2024, section 6). An unrotated pair compares content in the same way at every distance; what is lost is "
        "the information about distance that its slow rotation carried.",
        analysis.advice.reason,
    ]
    if any(point.change is not None for point in analysis.p_sweep):
        blocks.append(figures.p_sweep_shares(analysis))
    if analysis.p_sweep:
        blocks.append(tables.p_sweep_table(analysis))
    return Section("p", "Which p of p-RoPE", blocks)
