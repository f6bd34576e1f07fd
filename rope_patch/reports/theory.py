"""The theory of a table as one HTML file with figures. Needs matplotlib.

Example:
    ``write("theory.html", study("yarn:factor=4"), command="rope-patch theory …")``.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from rope_patch import theory
from rope_patch.files import write_atomically
from rope_patch.frequencies import geometric
from rope_patch.methods import as_method
from rope_patch.plots import base as plots
from rope_patch.plots import theory as plots_theory
from rope_patch.reports.comparison import Picture, picture, render
from rope_patch.tables import RotaryTable
from rope_patch.theory.papers import BOS, KEY, QUERY, in_pair
from rope_patch.theory.tables import MASS, Study, cells, numbers, text

POINTS = 700  # of a curve: all a figure can show

PLAIN = "plain RoPE"


def write(path: str | Path, study: Study, *, command: str | None = None) -> None:
    """Write :func:`page` to a file, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomically(path, page(study, command=command))


def page(study: Study, *, command: str | None = None) -> str:
    """Return a study as one HTML document, the same text for the same study.

    Args:
        study: of a table.
        command: that made it.
    """
    return render(
        "theory.html.jinja",
        title="Theory of a rotary table",
        command=command,
        sections=[],
        heading=study.method,
        described=[
            ("Plain table", f"head_dim {study.head_dim}, rope_theta {study.rope_theta:g}, {len(study.before)} pairs"),
            ("Method", f"{study.method}; attention scaling {study.attention_scaling:.4g}"),
            ("Lengths", f"trained at {study.trained_length} tokens, used at {study.length}"),
        ],
        changed=study.changed,
        facts=[(fact.label, *cells(fact), fact.note) for fact in study.facts],
        papers=[(entry.source, entry.name, *numbers(entry), entry.note) for entry in study.papers],
        figures=pictures(study),
    )


def pictures(study: Study) -> list[Picture]:
    """Return the figures of a study, in the order in which the page tells them."""
    tables = {PLAIN: study.before} | ({study.method: study.after} if study.changed else {})
    figures = [_wavelengths(study), _decay(study, tables), _distances(study, tables), _nearest(study, tables)]
    head = _head(study)
    return [*figures, *([head] if head else []), _content(), _helices()]


def _spread(length: int, *, log: bool = False, points: int = POINTS) -> Tensor:
    """Whole numbers below ``length``, no more than a figure can show; from 0, or from 1 at even ratios."""
    if log:
        places = torch.logspace(0, math.log10(length - 1), points, dtype=torch.float64)
    else:
        places = torch.linspace(0, length - 1, points, dtype=torch.float64)
    return torch.tensor(sorted(set(places.round().long().tolist())))


def _wavelengths(study: Study) -> Picture:
    figure = plots.wavelength_changes(
        {study.method: study.after}, before=study.before, context=study.trained_length, title="Wavelengths"
    )
    return picture(
        figure,
        "Wavelength of each pair, the plain table in grey and the one in use in colour, on a logarithmic scale.",
        "Grey: plain RoPE. The dotted line is the trained length: a pair above it makes no full turn within it, and is "
        "under Jonasson's frequency bound. Triangles at the top are unrotated pairs.",
    )


def _decay(study: Study, tables: dict[str, Tensor]) -> Picture:
    places, size = _spread(study.length, log=True), study.head_dim
    tokens = min(study.trained_length, study.length)
    apart = _spread(tokens, log=True, points=60)

    def kinds(table: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        drawn = theory.randpos_activation(table, apart, tokens=tokens, limit=study.length)
        return {
            "all ones": (places, theory.activation(table, places)),
            "Gaussian, fresh at every distance": (places, theory.gaussian_activation(table, places)[0]),
            "one Gaussian query and key": (places, theory.gaussian_activation(table, places, repeated=True)[0]),
            f"all ones, RandPos: {tokens} positions of {study.length}": (apart, drawn),
        }

    curves_by_table = {name: kinds(table) for name, table in tables.items()}
    panels: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
    for name, curves in curves_by_table.items():
        for kind, (distances, values) in curves.items():
            panels.setdefault(kind, {})[name] = distances, values / size
    figure = plots_theory.decay(panels, title="Does an activation decay with distance?", ylabel="activation / head_dim")
    return picture(
        figure,
        "Activation against distance in four panels: it falls for all-ones vectors and jumps or waves about zero for "
        "independent Gaussian ones.",
        "Barbero et al. figures 2, 8 and 9. Only a query and key that are alike have anything to decay from. "
        "Independent Gaussian ones average 0 at every distance (proposition 3.2), whether fresh everywhere or one "
        "pair repeated. Under RandPos distance is counted in the sequence, and the curve is the exact mean over the "
        "positions drawn.",
    )


def _distances(study: Study, tables: dict[str, Tensor]) -> Picture:
    apart = _spread(study.length, log=True)
    curves = {name: (apart, theory.image_distance(table, apart)) for name, table in tables.items()}
    neighbours = {name: float(values[0]) for name, (_, values) in curves.items()}
    closest = {name: theory.separation(table, study.length) for name, table in tables.items()}
    closest_text = "; ".join(
        f"{name}: {text(images.distance)}, {images.apart} apart" for name, images in closest.items()
    )
    figure = plots_theory.image_distances(curves, neighbours=neighbours, title="How far apart two images are")
    return picture(
        figure,
        f"Distance of two images against that of their positions. The closest two of each table: {closest_text}.",
        "Dotted: the distance of consecutive images. Xiong et al. take it for the smallest; where a curve dips below "
        f"its own dotted line, it is not. The closest two within {study.length} tokens: {closest_text}.",
    )


def _nearest(study: Study, tables: dict[str, Tensor]) -> Picture:
    places = _spread(study.length)
    curves = {
        name: (places, theory.nearest_old(study.before, t, old_length=study.trained_length, new_positions=places)[0])
        for name, t in tables.items()
    }
    figure = plots_theory.nearest_images(
        curves, trained_length=study.trained_length, title="How far each position is from those of training"
    )
    ends = "; ".join(f"{name}: {text(float(values.max()))}" for name, (_, values) in curves.items())
    return picture(
        figure,
        f"Distance of the image at each position from the nearest one seen in training. The largest: {ends}.",
        "Xiong et al.'s d, read from the new images to the old. 0 is an image seen in training; of two unrelated unit "
        "vectors the distance is 1.41.",
    )


def _head(study: Study) -> Picture | None:
    """Wendler's head at three temperatures; none where no factor is enough."""
    query, key = theory.wendler_head(study.after)
    try:
        needed = theory.sharpness_for(study.after, query, key, mass=MASS, length=study.length)
    except ValueError:
        return None
    places = _spread(study.length, log=True)
    curves = {
        f"{text(share * needed)}": (
            places,
            theory.head_mass(study.after, query, key, length=study.length, sharpness=share * needed)[places],
        )
        for share in (0.25, 0.5, 1.0)
    }
    curves["any, without rotation"] = places, 1 / (places + 1.0)
    figure = plots_theory.head_masses(
        curves, title="A previous-token head by hand", ylabel="attention on the previous token", legend="factor alpha"
    )
    return picture(
        figure,
        f"Attention on the previous token against position. A factor of {text(needed)} keeps it at {MASS} or above.",
        f"Wendler's head and Barbero et al.'s theorem 5.3 under {study.method}: with alpha {text(needed)} or more "
        f"every query of {study.length} tokens puts {MASS} on the token before it; a model, which divides by "
        "sqrt(head_dim), needs that much more. Without rotation equal tokens share attention evenly (proposition 5.2).",
    )


def _content() -> Picture:
    table = geometric(1e4, 256)
    cut = as_method("p_rope:p=0.75")(RotaryTable(table, 1.0, 1e4, "default", 8192)).inv_freq
    places = _spread(16385)
    keys = {"the token's key": KEY, "BOS": BOS}
    panels = {
        name: {key: (places, theory.activation(t, places, in_pair(QUERY), in_pair(v))) for key, v in keys.items()}
        for name, t in {"RoPE, base 10000, head_dim 256": table, "p-RoPE, p = 0.75": cut}.items()
    }
    held = 1 + int((theory.worst_lead(table, *map(in_pair, (QUERY, BOS, KEY)), length=20000) > 0).sum())
    figure = plots_theory.content_head(
        panels, marked=8000, title="A head that looks for content: pair 119 of Gemma 7B", ylabel="activation"
    )
    return picture(
        figure,
        "Activations of two keys against distance. Under RoPE both turn over within 13000 tokens, under p-RoPE they "
        "are flat.",
        "Barbero et al. section E.1 and theorem 6.1, with the paper's vectors; the query comes after the key. Dotted: "
        "8000 tokens, where neither has changed sign yet. BOS stays ahead wherever the two stand in contexts of up to "
        f"{held} tokens, and in none beyond. Where the pair is unrotated, it always does.",
    )


def _helices() -> Picture:
    fast, slow, old, new, factor = 0.3, 0.08, 64, 256, 4.0
    line = theory.helix(slow, torch.linspace(0, fast * (old - 1), 400, dtype=torch.float64))
    tokens = fast * torch.arange(new, dtype=torch.float64)
    panels = {
        "RoPE, 4 times as long": theory.helix(slow, tokens),
        "interpolation": theory.helix(slow, tokens / factor),
        "adjusted base": theory.helix(slow / factor, tokens),
    }
    figure = plots_theory.helices(panels, trained=line, title="Two pairs as a helix")
    return picture(
        figure,
        "Three helices: extrapolation leaves the curve of training, interpolation crowds onto it, an adjusted base "
        "winds more tightly beside it.",
        "Xiong et al. figure 8, a sketch with one fast and one slow pair. Interpolation stays on the curve and loses "
        "distance between neighbours; an adjusted base keeps neighbours apart and moves the windings closer together.",
    )
