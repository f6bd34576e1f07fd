"""Numbers as text for people: changes of perplexity, true minus signs, infinities."""

from __future__ import annotations

import math


def relative(nats: float) -> float:
    """Return a change of perplexity as a share of it, from one of the loss [nats/token]."""
    return math.expm1(nats) if nats < 700 else math.inf


def percent(nats: float) -> str:
    """Return a change of the loss as one of perplexity.

    >>> percent(math.log(1.5)), percent(-0.0003), percent(20.0)
    ('+50.0 %', '−0.03 %', 'over +1000 %')
    """
    share = 100 * relative(nats)
    if share > 1000:
        return "over +1000 %"
    return f"{number_text(share, 2 if abs(share) < 10 else 1, sign=True)} %"


def perplexity_text(value: float) -> str:
    """Return a perplexity with three or four digits that count."""
    if not math.isfinite(value):
        return number_text(value)
    return f"{value:.{2 if value < 100 else 1 if value < 1000 else 0}f}" if value < 1e6 else f"{value:.2e}"


def number_text(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """Return a number for people: a true minus, ∞ where there is no end, a dash where there is no value."""
    if math.isnan(value):
        return "–"
    text = f"{value:{'+' if sign else ''}z.{digits}f}".replace("inf", "∞")
    return text.replace("-", "−")


def four_digits(value: float | None, missing: str = "none") -> str:
    """Return a number with four digits that count, whole from a thousand on; ``missing`` for None.

    >>> four_digits(0.0721), four_digits(54410.3), four_digits(2.0), four_digits(-85.47)
    ('0.0721', '54,410', '2', '−85.47')
    """
    if value is None:
        return missing
    return (f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}").replace("-", "−")
