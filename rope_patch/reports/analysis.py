"""An analysis as one HTML file with figures. Needs matplotlib.

Example:
    ``write("analysis.html", analyze(model, tokenizer, rows), command="rope-patch analyze …")``.
"""

from __future__ import annotations

from pathlib import Path

from rope_patch.analysis.before_after import Difference, changes, differences
from rope_patch.analysis.run import Analysis, findings
from rope_patch.files import write_atomically
from rope_patch.plots.outliers import NEAR
from rope_patch.reports import analysis_pictures as pictures
from rope_patch.reports import analysis_tables as tables
from rope_patch.reports.analysis_words import facts, word
from rope_patch.reports.blocks import Block, ListColumns, Section, TokenLines
from rope_patch.reports.comparison import render

LINE = 16
"""Tokens of a line of the text that single heads are shown on."""


def write(path: str | Path, analysis: Analysis, *, against: Analysis | None = None, command: str | None = None) -> None:
    """Write :func:`page` to a file, whole or not at all.

    Raises:
        ValueError: as for :func:`page`.
        OSError: the folder cannot be written.
    """
    write_atomically(path, page(analysis, against=against, command=command))


def page(analysis: Analysis, *, against: Analysis | None = None, command: str | None = None) -> str:
    """Return an analysis as one HTML document, the same text for the same analysis.

    Args:
        analysis: of a checkpoint.
        against: of another one on the same text, fine-tuned for example: what it does differently is told.
        command: that made them.

    Raises:
        ValueError: the two analyses cannot be compared.
    """
    return render(
        "analysis.html.jinja",
        title=f"How {analysis.name} uses its rotary table",
        command=command,
        sections=sections(analysis, against),
        facts=facts(analysis),
        findings=findings(analysis),
    )


def sections(analysis: Analysis, against: Analysis | None = None) -> list[Section]:
    """Return the page's parts after its summary, in the order in which it tells them.

    Raises:
        ValueError: the two analyses cannot be compared.
    """
    found = None if against is None else differences(analysis, against)  # raises before anything is drawn
    made = [_heads(analysis), _views(analysis), _usage(analysis), _outliers(analysis), _means(analysis)]
    made += [_sinks(analysis), _trials(analysis)]
    return made if against is None or found is None else [*made, _differences(analysis, against, found)]


def _heads(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "A head has a habit when at least half of its attention follows it; for induction that on random tokens that "
        "come twice counts too, and for looking back after certain tokens what three of them draw. Diagonal and "
        "previous-token heads need position, and Barbero et al. find that they use the fastest pairs for it; "
        "induction looks for content; a head at rest on a sink does next to nothing for the query at hand.",
        pictures.habits(analysis),
    ]
    blocks += tables.habit_tables(analysis) or ["No head has a habit."]
    bound = tables.bound_table(analysis)
    blocks += [
        bound or "No head is positional: there are no logits to hold against their bound.",
        tables.trigger_table(analysis),
        tables.sink_table(analysis),
    ]
    return Section("heads", "Which heads are positional", blocks)


def _views(analysis: Analysis) -> Section:
    if not analysis.views:
        return Section("single", "Single heads", ["No single head was looked at."])
    ids = analysis.views[0].token_ids.tolist()
    lines = [
        (start, [word(analysis, token) for token in ids[start : start + LINE]]) for start in range(0, len(ids), LINE)
    ]
    blocks: list[Block] = [
        "Barbero et al., figures 5 to 7 and 14 to 18: one head at a time on the first row of the text. In a "
        "positional head look for long fast pairs, the same at every token, and for a bar that favours one distance; "
        "in a head that looks for content, for slow pairs that are long at some tokens only. In the maps of norms a "
        "horizontal band is a pair that is long at every token, a vertical line a token that is long in many pairs. "
        f"{pictures.LINE}",
        *(pictures.view(analysis, view) for view in analysis.views),
        TokenLines(f"The text of these figures, {len(ids)} tokens", lines),
    ]
    return Section("single", "Single heads", blocks)


def _usage(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "The norms of a query’s and a key’s pair bound what it can add to their logit (Cauchy–Schwarz), so long pairs "
        "are the ones that a model uses. Barbero et al. find most length at the slow end, where rotation changes "
        "little, and long fast pairs in few heads: the positional ones.",
        pictures.norms(analysis),
        pictures.head_norms(analysis),
    ]
    if len(analysis.capture.groups) > 1:
        blocks.append(pictures.group_norms(analysis))
    return Section("usage", "Which frequencies are used", blocks)


def _outliers(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "A pair whose mean query and key are long adds to the logit by distance alone, whatever the tokens. Jonasson "
        "says where such outliers arise: in pairs that make no full turn within the context L (frequency f below "
        "2π/L), at angles beyond π + L f / 2 from mean query to mean key. There the pair’s logit is smaller at every "
        "distance than at 0.",
        *pictures.outlier_scatter(analysis),
        pictures.features(analysis),
        tables.recall_table(analysis),
        *(tables.outlier_table(analysis, states) for states in ("key", "query")),
    ]
    return Section("outliers", "Outliers and their bounds", blocks)


def _means(analysis: Analysis) -> Section:
    found = bool(analysis.heads.positional())
    chosen = pictures.clearest(analysis.heads)
    told = "the clearest positional heads" if found else "the nearest to a positional head, since there is none"
    blocks: list[Block] = [
        "Jonasson, figures 5 to 7 and 10: the logit of the mean query with the mean key is, over distance, a sum of "
        f"waves, one per pair. Shown of {told}. Where that sum alone would make the habit, the habit is one of "
        f"position, not of content, and rests on the pairs without which the sum loses its shape. Beyond {NEAR} "
        "tokens, where waves cannot be told apart, dashes are means and grey is the range of the sum. Below: dots are "
        "the mean query as its position grows, in the planes of the longest pairs; squares are the keys that it "
        "prefers, each at its own position. Queries and keys are drawn relative to their longest: a key on the side "
        "of the dots adds to its logit.",
        *(pictures.mean_logit(analysis, layer, head) for layer, head in chosen),
    ]
    return Section("means", "What the mean query says about distance", blocks)


def _sinks(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "A sink draws attention from wherever the query stands. Jonasson finds its key aligned with the mean query in "
        "the offset features. This score knows keys alone and takes the mean query for all queries; the last column "
        "says whether attention in fact goes there.",
        tables.preferred_table(analysis),
    ]
    return Section("sinks", "Tokens that the mean query prefers", blocks)


def _trials(analysis: Analysis) -> Section:
    blocks: list[Block] = [
        "p-RoPE lets the fastest share p of the pairs turn and stops the slow ones (Barbero et al., section 6). "
        "Stopped pairs serve content, at any distance; what is lost is what their slow turning told of distance.",
        analysis.advice.reason,
    ]
    if any(trial.change is not None for trial in analysis.trials):
        blocks.append(pictures.trial_shares(analysis))
    if analysis.trials:
        blocks.append(tables.trial_table(analysis))
    return Section("p", "Which p of p-RoPE", blocks)


def _differences(analysis: Analysis, against: Analysis, found: Difference) -> Section:
    ours, theirs = analysis.name, against.name
    if ours == theirs:
        ours, theirs = f"{ours} (1)", f"{theirs} (2)"
    blocks: list[Block] = [
        f"Both read the same text. All of the above is about {ours} ({analysis.method or 'no method in place'}); "
        f"{theirs} ({against.method or 'no method in place'}) is held against it. {' '.join(changes(found, theirs))}",
        ListColumns([(ours, findings(analysis)), (theirs, findings(against))]),
        tables.change_table(found, ours, theirs),
        pictures.norm_changes(analysis, found, ours, theirs),
        f"Keys that are outliers in {theirs} alone: {tables.places(found.gained)}.",
        f"Keys that are outliers in {ours} alone: {tables.places(found.lost)}.",
    ]
    return Section("against", f"What {theirs} does differently", blocks)
