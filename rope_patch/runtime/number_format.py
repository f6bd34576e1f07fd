"""Numbers as text for reports: changes of perplexity, minus signs, infinity."""

from __future__ import annotations

import math


def relative(nats: float) -> float:
    """Return the relative change of perplexity that a change of the loss makes [nats/token]."""
    # math.expm1 raises OverflowError for larger losses.
    return math.expm1(nats) if nats < 700 else math.inf


def percent(nats: float) -> str:
    """Return a change of the loss as a change of perplexity in percent.

    >>> percent(math.log(1.5)), percent(-0.0003), percent(20.0)
    ('+50.0 %', '−0.03 %', 'over +1000 %')
    """
    share = 100 * relative(nats)
    if share > 1000:
        return "over +1000 %"
    digits = 2 if abs(share) < 10 else 1
    return f"{number_text(share, digits, sign=True)} %"


def perplexity_text(value: float) -> str:
    """Return a perplexity rounded to three or four significant digits."""
    if not math.isfinite(value):
        return number_text(value)
    if value < 100:
        return f"{value:.2f}"
    if value < 1000:
        return f"{value:.1f}"
    if value < 1e6:
        return f"{value:.0f}"
    return f"{value:.2e}"


def probability_text(logprob: float) -> str:
    """Return the probability of a log-probability in percent [nats].

    >>> probability_text(-0.15), probability_text(-15.0)
    ('86 %', 'under 0.1 %')
    """
    share = 100 * math.exp(logprob)
    if share < 0.1:
        return "under 0.1 %"
    digits = 0 if share >= 10 else 1
    return f"{share:.{digits}f} %"


def kl_text(value: float) -> str:
    """Return a KL divergence with four decimals; a smaller one is not written as 0.

    >>> kl_text(0.0312), kl_text(3.2e-6)
    ('0.0312', '3.2e-06')
    """
    if 0 < value < 1e-4:
        return f"{value:.1e}"
    return number_text(value, 4)


def number_text(value: float, digits: int = 2, *, sign: bool = False) -> str:
    """Return a number for reports, with a minus sign instead of a hyphen, ∞ for infinity and a dash for NaN."""
    if math.isnan(value):
        return "–"
    # The option z writes what rounds to zero without a minus sign.
    text = f"{value:z.{digits}f}"
    if sign:
        text = f"{value:+z.{digits}f}"
    return text.replace("inf", "∞").replace("-", "−")
