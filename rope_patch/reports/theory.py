"""The report of ``rope-patch theory``: one HTML file with figures. Needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rope_patch import theory
from rope_patch.evaluation.numbers import four_digits, percent_text
from rope_patch.reports.page import Cell, Cells, DataTable, Figure, Page, Part, Section, drawn
from rope_patch.reports.plots import base as plots
from rope_patch.reports.plots.theory import curves
from rope_patch.study import MASS, Study, papers

POINTS = 700  # of a curve: all a figure can show


def page(study: Study) -> Page:
    """Return a study as a page.

    Args:
        study: of a table.
    """
    answer = (
        f"{study.method} on {study.base}: head_dim {2 * len(study.before)}, rope_theta {study.rope_theta:g}, attention "
        f"scaling {study.attention_scaling:.4g}, trained at {study.trained_length} tokens and used at {study.length}."
    )
    columns = ["Quantity", "Before", study.method, "Remark"]
    rows: list[Cells] = [
        [fact.label, four_digits(fact.before), four_digits(fact.after), Cell(fact.note, style="text")]
        for fact in study.facts()
    ]
    caption = f"{study.base.capitalize()} before the method, and the method’s table."
    table = DataTable("The table in numbers", columns, rows, caption)
    parts: list[Part] = [table, *_wavelengths(study), _decay(study), *_head(study), _nearest(study)]
    return Page("Theory of a rotary table", [Section(study.method, [answer], parts), _papers()])


def _papers() -> Section:
    rows: list[Cells] = []
    for entry in papers():
        source, note = Cell(entry.source, style="left"), Cell(entry.note, style="text")
        numbers = four_digits(entry.ours), four_digits(entry.printed, ""), percent_text(entry.difference)
        rows.append([entry.name, source, *numbers, note])
    columns = ("Quantity", "Source", "Ours", "Printed", "Difference", "Remark")
    caption = "Computed here and as printed, for fixed tables whatever the options."
    return Section("The papers’ numbers", [], [DataTable("Numbers that papers print", columns, rows, caption)])


# --- figures ---------------------------------------------------------------------------------------------------------


def _tables(study: Study) -> dict[str, Tensor]:
    return {"before": study.before} | ({study.method: study.after} if study.changed else {})


def _spread(length: int) -> Tensor:
    """Whole numbers from 1 to below ``length`` at even ratios, no more than a figure can show."""
    places = torch.logspace(0, math.log10(length - 1), POINTS, dtype=torch.float64)
    return torch.tensor(sorted(set(places.round().long().tolist())))


def _wavelengths(study: Study) -> list[Figure]:
    if not study.changed:
        return []
    context, title = study.trained_length, "Factors on the wavelengths"
    figure = plots.factors_by_wavelength({study.method: study.after}, before=study.before, context=context, title=title)
    caption = "A pair right of the dotted line makes no full turn within the trained length."
    return [drawn(figure, caption)]


def _decay(study: Study) -> Figure:
    apart, head_dim = _spread(study.length), 2 * len(study.before)
    kinds: dict[str, Callable[[Tensor], Tensor]] = {
        "all ones": lambda table: theory.activation(table, apart),
        "Gaussian, fresh at every distance": lambda table: theory.gaussian_activation(table, apart),
        "one Gaussian query and key": lambda table: theory.gaussian_activation(table, apart, repeated=True),
    }
    panels = {
        kind: {name: (apart, curve(table) / head_dim) for name, table in _tables(study).items()}
        for kind, curve in kinds.items()
    }
    figure = curves(
        panels, title="Does an activation decay with distance?", xlabel="distance", ylabel="activation / head_dim"
    )
    caption = (
        "Barbero et al. figures 2, 8 and 9: all-ones vectors decay, independent Gaussian ones average 0 at every "
        "distance (proposition 3.2)."
    )
    return drawn(figure, caption)


def _head(study: Study) -> list[Figure]:
    """Wendler's head at three temperatures; none where no factor is enough."""
    query, key = theory.wendler_head(study.after)
    try:
        needed = theory.sharpness_for(study.after, query, key, mass=MASS, length=study.length)
    except ValueError:
        return []
    places = _spread(study.length)
    lines = {}
    for factor in (0.25 * needed, 0.5 * needed, needed):
        mass = theory.head_mass(study.after, query, key, length=study.length, sharpness=factor)
        lines[f"alpha = {four_digits(factor)}"] = places, mass[places]
    lines["any, without rotation"] = places, 1 / (places + 1.0)
    figure = curves(
        {study.method: lines},
        title="A previous-token head by hand",
        xlabel="position of the query",
        ylabel="attention weight",
    )
    caption = (
        f"Attention on the previous token in Wendler’s head (Barbero et al. theorem 5.3): a factor of "
        f"{four_digits(needed)} keeps it at {MASS} or above at every position."
    )
    return [drawn(figure, caption)]


def _nearest(study: Study) -> Figure:
    places = torch.linspace(0, study.length - 1, min(POINTS, study.length), dtype=torch.float64).round().long()
    lines = {}
    for name, table in _tables(study).items():
        old = study.trained_length
        lines[name] = places, theory.nearest_old(study.before, table, old_length=old, new_positions=places)[0]
    ylabel = "distance to the\nnearest trained image"
    figure = curves(
        {study.method: lines},
        title="How far each position is from those of training",
        xlabel="position",
        ylabel=ylabel,
        log=False,
    )
    caption = "Xiong et al.’s d, from new images of a unit vector to old ones; unrelated vectors are 1.41 apart."
    return drawn(figure, caption)
