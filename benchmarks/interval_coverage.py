"""How often the package's 95 % intervals hold the true value: simulations of 2,000 draws each.

    python benchmarks/interval_coverage.py -o benchmarks/results/interval_coverage.json

Answers are drawn from a normal variable of the haystack and one of the question, below a threshold; ``likeness`` is the
haystack's share of the variance: 0 for prompts that do not hang together, 1 for haystacks whose prompts are all
answered alike. Both methods of a pair read the same haystacks and questions, with correlation .5. Shares are either
fixed or drawn anew each time, evenly from .02 to .98: an interval of few discrete answers covers too much at some
shares and too little at others, and its mean over shares is what it can be held to. Means are of normal values, of
skewed ones (exponential), which losses can be, and of what was measured: for each table of the study of SmolLM2,
windows are drawn from its 24 of WikiText-2, with their differences in loss from the model as it was. The bootstrap,
Student's interval over haystacks, and the permutation of signs are what the interval of retrieval was chosen over.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
from scipy import stats
from tqdm import tqdm

from measuring import command, environment, write
from pages import results
from rope_patch.evaluation.intervals import effective_count, independent_count, paired_means, paired_shares, wilson
from rope_patch.evaluation.losses import mean_per_token

DRAWS = 2000
DEPTHS = 5
HAYSTACKS = (4, 6, 10, 20, 50)
LIKENESS = (0.0, 0.3, 0.7, 1.0)
SHARES: tuple[tuple[float, float] | None, ...] = (None, (0.5, 0.5), (0.95, 0.95), (0.9, 0.6), (0.99, 0.9))
"""Of the two methods; None for shares drawn anew each time."""
QUESTIONS = (10, 20, 50, 200)
UNITS = (4, 10, 50)
Interval = tuple[float, float]
Draw = Callable[[numpy.random.Generator], tuple[float, dict[str, Interval]]]
"""Returns the true value, and the interval of each method."""


def answers(
    rng: numpy.random.Generator, shares: Sequence[float], haystacks: int, depths: int, likeness: float
) -> list[list[list[bool]]]:
    """Return the answers of each method, by haystack and depth."""
    own = rng.standard_normal((1 + len(shares), haystacks, 1)) * math.sqrt(likeness)
    rest = rng.standard_normal((1 + len(shares), haystacks, depths)) * math.sqrt(1 - likeness)
    both = own + rest
    return [
        (math.sqrt(0.5) * (both[0] + both[1 + i]) < stats.norm.ppf(share)).tolist() for i, share in enumerate(shares)
    ]


def draw_shares(
    rng: numpy.random.Generator,
    shares: tuple[float, float] | None,
    haystacks: int,
    depths: int,
    likeness: float,
    others: bool = False,
) -> tuple[float, dict[str, Interval]]:
    """Draw two methods' answers; return the true difference with its intervals."""
    p, q = rng.uniform(0.02, 0.98, 2).tolist() if shares is None else shares
    one, two = answers(rng, (p, q), haystacks, depths, likeness)
    ours, theirs = (list(itertools.chain(*each)) for each in (one, two))
    apart = [[float(a) - float(b) for a, b in zip(*each, strict=True)] for each in zip(one, two, strict=True)]
    found = {"package": paired_shares(ours, theirs, count=effective_count(apart))}
    if others:
        means = numpy.array(apart).mean(1)
        again = means[rng.integers(0, haystacks, (500, haystacks))].mean(1)
        found |= {
            "prompts taken as independent": paired_shares(ours, theirs),
            "design effect alone": paired_shares(ours, theirs, count=independent_count(apart)),
            "student over haystacks": paired_means(means.tolist(), [0.0] * haystacks),
            "bootstrap of haystacks": (float(numpy.quantile(again, 0.025)), float(numpy.quantile(again, 0.975))),
            "permutation of signs": by_signs(means),
        }
    return p - q, found


def by_signs(values: Any) -> Interval:
    """Return the means that a permutation of signs does not reject at 5 %; all of them where it never can.

    The ends lie among the means of subsets (Hartigan 1969): the k-th lowest and highest of the 2^n - 1 of them, with k
    2.5 % of 2^n. Of 4096 random subsets above 12 haystacks.
    """
    n = len(values)
    if n < 6:
        return -1.0, 1.0
    if n <= 12:
        subsets = numpy.array(list(itertools.product((0, 1), repeat=n)))[1:]
    else:
        subsets = numpy.random.default_rng(0).integers(0, 2, (4095, n))
        subsets = subsets[subsets.sum(1) > 0]
    means = numpy.sort(subsets @ values / subsets.sum(1))
    k = max(1, int(0.025 * (len(means) + 1)))
    return float(means[k - 1]), float(means[-k])


def draw_share(
    rng: numpy.random.Generator, share: float | None, haystacks: int, depths: int, likeness: float, others: bool = False
) -> tuple[float, dict[str, Interval]]:
    """Draw one method's answers; return the true share with its intervals."""
    p = float(rng.uniform(0.02, 0.98)) if share is None else share
    (right,) = answers(rng, (p,), haystacks, depths, likeness)
    hits, asked = sum(map(sum, right)), haystacks * depths
    found = {"package": wilson(hits, asked, count=effective_count([[float(x) for x in row] for row in right]))}
    if others:
        found["prompts taken as independent"] = wilson(hits, asked)
    return p, found


def values_of(rng: numpy.random.Generator, shape: str, count: int) -> Any:
    """Return values of mean 0 and variance 1, normal or skewed."""
    return rng.standard_normal(count) if shape == "normal" else rng.exponential(size=count) - 1


def draw_means(rng: numpy.random.Generator, shape: str, windows: int) -> tuple[float, dict[str, Interval]]:
    """Draw paired losses of windows, which differ by .1 on average; return it with Student's interval."""
    theirs = 3 + 0.5 * rng.standard_normal(windows)
    ours = theirs + 0.1 + 0.2 * values_of(rng, shape, windows)
    return 0.1, {"package": paired_means(ours.tolist(), theirs.tolist())}


def draw_measured(
    rng: numpy.random.Generator, differences: Sequence[float], windows: int
) -> tuple[float, dict[str, Interval]]:
    """Draw windows from measured ones; return the mean difference of all of these with Student's interval."""
    drawn = rng.choice(numpy.array(differences), windows)
    return math.fsum(differences) / len(differences), {"package": paired_means(drawn.tolist(), [0.0] * windows)}


def measured_differences() -> dict[str, list[float]]:
    """Return the differences in loss of 24 windows of WikiText-2 from the model as it was, by table and training."""
    rows = [row for row in results("study_smollm2")["text"] if row["text"] == "wikitext" and row["factor"] == 2]
    losses = {(row["table"], row["state"]): next(iter(row["nll"].values())) for row in rows}
    plain = losses.pop(("default", "zero"))
    return {
        f"{table}, {'without LoRA' if state == 'zero' else 'after LoRA'}": [
            a - b for a, b in zip(nll, plain, strict=True)
        ]
        for (table, state), nll in losses.items()
    }


def draw_ratio(rng: numpy.random.Generator, shape: str, documents: int) -> tuple[float, dict[str, Interval]]:
    """Draw documents of 200 to 2,000 tokens; return the mean loss with Student's interval from its standard error."""
    tokens = rng.integers(200, 2001, documents)
    losses = 3 + 0.3 * values_of(rng, shape, documents) + rng.standard_normal(documents) / numpy.sqrt(tokens)
    mean, stderr, _ = mean_per_token([(int(n), float(n * loss)) for n, loss in zip(tokens, losses, strict=True)])
    assert stderr is not None
    reach = float(stats.t.ppf(0.975, documents - 1)) * stderr
    return 3.0, {"package": (mean - reach, mean + reach)}


def coverage(draw: Draw, draws: int, seed: int) -> dict[str, dict[str, float]]:
    """Return of each method how often its interval holds the true value, and its mean width."""
    rng = numpy.random.default_rng(seed)
    inside: dict[str, int] = {}
    width: dict[str, float] = {}
    for _ in range(draws):
        true, found = draw(rng)
        for name, (low, high) in found.items():
            inside[name] = inside.get(name, 0) + (low - 1e-9 <= true <= high + 1e-9)
            width[name] = width.get(name, 0.0) + high - low
    return {name: {"coverage": inside[name] / draws, "mean_width": round(width[name] / draws, 4)} for name in inside}


def cases(*, others: bool) -> list[tuple[dict[str, Any], Draw]]:
    """Return what is simulated: its settings, and what draws it.

    Args:
        others: the intervals that the package's were chosen over, too.
    """
    every: list[tuple[dict[str, Any], Draw]] = []
    for haystacks, likeness in itertools.product(HAYSTACKS, LIKENESS):
        at = {"haystacks": haystacks, "depths": DEPTHS, "likeness": likeness}
        for pair in SHARES:
            draw = functools.partial(draw_shares, shares=pair, **at, others=others)
            every.append(({"interval": "paired shares", "shares": pair or "drawn", **at}, draw))
        for share in dict.fromkeys(None if pair is None else pair[0] for pair in SHARES):
            alone = functools.partial(draw_share, share=share, **at, others=others)
            every.append(({"interval": "share", "shares": share or "drawn", **at}, alone))
    for count in QUESTIONS:
        at = {"haystacks": count, "depths": 1, "likeness": 0.0}
        every.append(({"interval": "paired shares", "shares": "drawn", **at},
                      functools.partial(draw_shares, shares=None, **at)))  # fmt: skip
        every.append(({"interval": "share", "shares": "drawn", **at},
                      functools.partial(draw_share, share=None, **at)))  # fmt: skip
    for shape, units in itertools.product(("normal", "skewed"), UNITS):
        every.append(({"interval": "paired means", "values": shape, "windows": units},
                      functools.partial(draw_means, shape=shape, windows=units)))  # fmt: skip
        every.append(({"interval": "ratio", "values": shape, "documents": units},
                      functools.partial(draw_ratio, shape=shape, documents=units)))  # fmt: skip
    for (table, differences), units in itertools.product(measured_differences().items(), UNITS):
        skew = round(float(stats.skew(differences)), 2)
        at = {"values": "measured", "table": table, "skew": skew, "windows": units}
        every.append(({"interval": "paired means", **at},
                      functools.partial(draw_measured, differences=differences, windows=units)))  # fmt: skip
    return every


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return by interval and method the lowest, the mean and the highest coverage, shares drawn and shares fixed."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kind = row.get("values") or ("shares drawn" if row["shares"] == "drawn" else "shares fixed")
        few = "" if "values" in row else ", one depth" if row["depths"] == 1 else ", five depths"
        for name, found in row["found"].items():
            groups.setdefault(f"{row['interval']}, {kind}{few}: {name}", []).append(found)
    return {
        name: {
            "lowest": min(found["coverage"] for found in group),
            "mean": round(sum(found["coverage"] for found in group) / len(group), 4),
            "highest": max(found["coverage"] for found in group),
            "mean_width": round(sum(found["mean_width"] for found in group) / len(group), 3),
        }
        for name, group in groups.items()
    }


def main() -> None:
    """Simulate and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument("--draws", type=int, default=DRAWS)
    args = parser.parse_args()
    rows = []
    for seed, (settings, draw) in enumerate(tqdm(cases(others=True), unit="case")):
        rows.append({**settings, "found": coverage(draw, args.draws, seed)})
    summary = summarise(rows)
    for name, found in summary.items():
        print(f"{name:75s} {found['lowest']:.3f} to {found['highest']:.3f}, mean {found['mean']:.3f}")
    write(
        {
            "benchmark": "interval_coverage",
            "command": command(),
            "what": f"coverage of 95 % intervals, {args.draws} draws each (standard error .005 at 95 %)",
            "summary": summary,
            "settings": {"draws": args.draws, "confidence": 0.95},
            "environment": environment("numpy", "scipy"),
            "rows": rows,
        },
        args.output,
    )


if __name__ == "__main__":
    main()
