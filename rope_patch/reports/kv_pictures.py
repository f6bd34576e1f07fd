"""Figures of a check of quantized caches, each with what it shows in words and how to read it. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rope_patch.analysis.outliers import RATIO
from rope_patch.evaluation.metrics import Metric, Span, spans_at
from rope_patch.evaluation.numbers import number_text
from rope_patch.frequencies import wavelength
from rope_patch.kv_evaluation.results import KVCheck, answered
from rope_patch.kv_evaluation.setting import ERRORS
from rope_patch.kv_evaluation.verdicts import CheckRow
from rope_patch.plots import kv as plots_kv
from rope_patch.plots.analysis import PAIRS, heat_maps, pair_map
from rope_patch.plots.kv import Spot, Waves
from rope_patch.reports.analysis_captions import Kind, kinds, stacked
from rope_patch.reports.comparison import Picture, picture, short_names

COLORS = "A scheme has one colour in all figures."


def given(check: KVCheck) -> list[CheckRow]:
    """Return the rows of the schemes that were asked for, full precision left out."""
    return [row for method in check.methods for row in check.of(method) if row.errors]


def schemes(check: KVCheck) -> dict[str, str]:
    """Return the schemes that were asked for, and a name of each that fits a figure."""
    names = list(dict.fromkeys(row.scheme for row in given(check)))
    return dict(zip(names, short_names(names), strict=True))


def methods(check: KVCheck) -> dict[str, str]:
    """Return the methods, and a name of each that fits a figure."""
    return dict(zip(check.methods, short_names(check.methods), strict=True))


def tradeoffs(check: KVCheck, length: int) -> list[Picture]:
    """Return what each scheme costs in perplexity and in retrieval, against the bits of a cache of a length."""
    front_said = (
        "Grey steps are the front: nothing that was tried lies beyond them. Vertical lines are intervals. Bits are of "
        f"the whole cache at {length} tokens: scales, sinks, the residual window and unfinished blocks are in them. "
        f"{COLORS}"
    )
    lost = [name for method, name in methods(check).items() if not _answers(check, method, length)]
    hopeless = (
        f" Full precision answers none of them under {', '.join(lost)}: nothing can be lost there." if lost else ""
    )
    pictures = []
    for metric, span in spans_at(check.spec, length):
        panels = {name: _spots(check, method, length, metric, span) for method, name in methods(check).items()}
        ylabel, caption = _tradeoff_words(metric, span, hopeless)
        figure = plots_kv.tradeoff(
            panels,
            list(schemes(check).values()),
            title=f"What {metric.name} costs at {length} tokens",
            ylabel=ylabel,
            lower=metric.lower_is_better,
            limit=100 * check.limits.tolerance if metric.name == "perplexity" else None,
        )
        values = [
            f"{name}: "
            + ", ".join(f"{spot.label} {number_text(spot.value, 2, sign=True)}" for spot in spots if spot.label)
            for name, spots in panels.items()
        ]
        pictures.append(picture(figure, f"{caption} {'; '.join(values)}.", f"{caption} {front_said}"))
    return pictures


def _tradeoff_words(metric: Metric, span: Span, hopeless: str) -> tuple[str, str]:
    """Label of the axis, and caption."""
    if metric.name == "perplexity":
        ylabel = f"change of perplexity [%], linear within ±{plots_kv.LINEAR:g} %"
        return ylabel, f"Perplexity at positions below {span.stop} against bits; lower is better."
    if span.task is not None and metric.name == "retrieval":
        return f"change of {span.task}, share of prompts", (
            f"Share of {span.task} prompts of {span.stop} tokens that are answered right, less that in full precision; "
            f"higher is better.{hopeless}"
        )
    better = "lower" if metric.lower_is_better else "higher"
    caption = f"{metric.name.capitalize()} at {span.stop} tokens, less that in full precision; {better} is better."
    return f"change of {metric.name}, {metric.unit}", caption


def _answers(check: KVCheck, method: str, length: int) -> int:
    return sum(answered(check.of(method)[0], length))


def _spots(check: KVCheck, method: str, length: int, metric: Metric, span: Span) -> list[Spot]:
    names, rows = schemes(check), check.of(method)
    scale = 100 if metric.name == "perplexity" else 1
    spots = []
    for row in rows:
        change, verdict = (0.0, 0.0, 0.0), ""
        if row.errors:
            measured = metric.difference(row.scores, rows[0].scores, span, check.limits.confidence)
            estimate, low, high = (scale * metric.relative_change(value) for value in measured)
            change, verdict = (estimate, low, high), check.verdict(row, length).kind
        name = names.get(row.scheme, "")
        spots.append(Spot(name, row.cache_bits[length], *change, verdict, name))
    return spots


def by_wavelength(check: KVCheck) -> Picture | str:
    """Return what each pair adds to the error of the logits; a sentence where no key is rounded."""
    names = schemes(check)
    panels: dict[str, Waves] = {}
    findings = []
    for method, name in methods(check).items():
        rows = [row for row in given(check) if row.method == method]
        for kind in kinds(check.captures[method]):
            errors = {names[row.scheme]: _pair_errors(row, kind) for row in rows}
            label = f"{name}: {kind.name}" if kind.name else name
            panels[label] = Waves(wavelength(kind.inv_freq.double()), errors, check.limits.context or kind.context)
            for scheme, values in errors.items():
                if float(values.max()) > 0:
                    findings.append(f"{label}, {scheme}: pair {int(values.argmax())}")
    if not findings:
        return f"No key is rounded at {_tokens(check)} tokens: there is no error of pairs to draw."
    figure = plots_kv.errors_by_wavelength(panels, list(names.values()), title="Which pairs carry the error")
    return picture(
        figure,
        f"Lines of logit error over wavelength. The pair with the largest: {'; '.join(findings)}.",
        "What the rounding of each pair of the keys adds to a logit, root mean square over heads, layers and queries; "
        "the fastest pair is leftmost, unrotated pairs are at the right edge. Right of the line marked 2π/L, "
        "Jonasson’s frequency bound, pairs make no full turn within the context. Where long pairs stretch the scale of "
        f"others, the error is in all pairs alike, and the section below says where it comes from. {COLORS}",
    )


def _pair_errors(row: CheckRow, kind: Kind) -> Tensor:
    """Root mean square error of each pair over heads and layers of a kind: (pairs,)."""
    indices = {layer.index for layer in kind.layers}
    parts = [error.pair for error in row.errors if error.layer in indices]
    return torch.cat(parts).square().mean(0).sqrt() if parts else torch.zeros(len(kind.inv_freq), dtype=torch.float64)


def radii(check: KVCheck) -> Picture:
    """Return the length of mean keys."""
    grid = []
    findings = []
    for method, name in methods(check).items():
        for kind in kinds(check.captures[method]):
            values = stacked([layer.key.radius.amax(0) for layer in kind.layers])
            title = f"{name}: {kind.name}" if kind.name else name
            grid.append(pair_map(title, values, kind.rows, kind.inv_freq, check.limits.context or kind.context))
            row, pair = divmod(int(values.argmax()), values.shape[1])
            findings.append(f"{title}: {number_text(float(values.max()))} in layer {kind.rows[row]}, pair {pair}")
    across = 2 if len(grid) > 1 else 1
    figure = heat_maps(
        [grid[i : i + across] for i in range(0, len(grid), across)],
        title="How long mean keys are",
        xlabel=PAIRS,
        ylabel="layer",
        labels=["length of the mean key, of the head where it is longest"],
    )
    return picture(
        figure,
        f"Heat maps of the length of mean keys, layers by pairs. Longest: {'; '.join(findings)}.",
        "A pair that is long on average is an offset: it takes room on the scale of all that share it, and centring "
        "takes it away. Keys before rotation, from the text of the check; an arrow on the colours says that larger "
        "values have the last one. The line marked 2π/L is Jonasson’s frequency bound: pairs on its slow side make no "
        f"full turn within the context. Longest: {'; '.join(findings)}.",
    )


def shares(check: KVCheck) -> Picture | None:
    """Return direct against induced shares of outlier pairs; None where no head has any."""
    names, titles = schemes(check), methods(check)
    panels: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for row in given(check):
        direct, induced = (
            torch.cat([getattr(error, side) for error in row.errors if len(getattr(error, side))])
            for side in ("direct", "induced")
        )
        both = direct.isfinite() & induced.isfinite()
        if both.any():
            panels.setdefault(names[row.scheme], {})[titles[row.method]] = direct[both], induced[both]
    if not panels:
        return None
    findings = [
        f"{scheme}, {method}: {_percent(direct)} and {_percent(induced)}"
        for scheme, parts in panels.items()
        for method, (direct, induced) in parts.items()
    ]
    figure = plots_kv.outlier_shares(panels, title="Do outlier pairs spoil others?")
    return picture(
        figure,
        f"Points of direct against induced share, a panel per scheme. Medians: {'; '.join(findings)}.",
        f"Outlier pairs are those whose mean key is over {RATIO:g} times as long as the median. A point is a head that "
        "has some: of its squared logit error, what lies in them (across), and what goes when they are kept in full "
        "precision (up). On the diagonal they harm themselves alone; above it they spoil other pairs through a scale "
        "that they stretch.",
    )


def _percent(shares: Tensor) -> str:
    return f"{number_text(100 * float(shares.median()), 0)} %"


def _tokens(check: KVCheck) -> int:
    """Tokens of the text that errors are taken on."""
    return min(ERRORS, max(check.lengths))


def by_layer(check: KVCheck) -> Picture | str:
    """Return the error of each layer's output; a sentence where nothing is rounded."""
    names, titles = schemes(check), methods(check)
    panels: dict[str, dict[str, tuple[Sequence[int], Sequence[float]]]] = {name: {} for name in titles.values()}
    findings = []
    for row in given(check):
        layers = [error.layer for error in row.errors]
        values = [100 * float(error.output.nan_to_num().mean()) for error in row.errors]
        panels[titles[row.method]][names[row.scheme]] = layers, values
        worst = max(range(len(values)), key=values.__getitem__)
        findings.append(
            f"{titles[row.method]}, {names[row.scheme]}: {number_text(values[worst], 1)} % in layer {layers[worst]}"
        )
    if not any(value > 0 for curves in panels.values() for _, values in curves.values() for value in values):
        return f"Nothing is rounded at {_tokens(check)} tokens: there is no error of layers to draw."
    figure = plots_kv.errors_by_layer(panels, list(names.values()), title="Which layers are harmed")
    return picture(
        figure,
        f"Lines of output error over layers. The worst: {'; '.join(findings)}.",
        "Error of the output of attention relative to its size, mean over heads, keys and values both quantized. Each "
        "layer is given what it sees in full precision, so this is its own error; without a point it rounds nothing "
        f"that its queries see. {COLORS}",
    )
