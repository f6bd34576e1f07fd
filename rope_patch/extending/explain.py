"""All sentences about a run: what it will read, what was chosen at what price, what is open, and what would help."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rope_patch.evaluation.metrics import METRICS, change_sentence
from rope_patch.extending.choose import Choice
from rope_patch.extending.evidence import Evidence, Findings
from rope_patch.extending.served_by import NAMES
from rope_patch.options.extend import ExtendSettings
from rope_patch.runtime.captions import count_text, duration_text, names_text
from rope_patch.runtime.number_format import percent, perplexity_text, probability_text, relative

RULES = (
    "Of the methods that reach the length and cost no more than the tolerance, those are dropped that are clearly "
    "worse than the best in retrieval (the interval lies beyond 0.1 nats), then in perplexity beyond the context, then "
    "in price within it (beyond 2 %). Of the rest the cheapest is chosen; between prices that differ by less than 2 %, "
    "the method that more programs run"
)
"""How the choice is made, as a sentence for reports."""

TITLES = {"retrieval": "retrieval", "perplexity": "perplexity beyond the context", "cost": "price"}
"""The criteria in words."""


def explain(measured: Findings, choice: Choice, options: ExtendSettings, out: Path) -> list[str]:
    """Return why a method was chosen, the price first, or why none was and what would help: sentences.

    Args:
        measured: the evidence of the last round.
        choice: the choice.
        options: the options of the run.
        out: the folder that is written.
    """
    chosen = choice.chosen
    if chosen is None:
        allowed = percent(math.log1p(options.tolerance))
        sentences = [f"Nothing was written: no method reaches {measured.target} tokens at a price of up to {allowed}."]
        for one in choice.order:
            sentences.append(f"{one.name}: {_price(one, measured)}; {_scores(one, measured)}.")
        return [*sentences, f"What would help: {_advice(choice.order, options)}."]
    sentences = [f"{chosen.name} was chosen. The price: {_price(chosen, measured)}."]
    if chosen.served_by:
        sentences.append(_runs_in(chosen, options, out))
    if chosen.reaches == "open" or not chosen.confirmed:
        prompts = count_text(len(chosen.retrieval), "prompt")
        sentences.append(
            f"Unconfirmed: {prompts} cannot show that it retrieves from {measured.target} tokens. A larger --budget "
            "asks more; --train may help."
        )
    scores = _scores(chosen, measured)
    sentences.append(f"{scores[0].upper()}{scores[1:]}.")
    for criterion, title in TITLES.items():
        names = [one.name for one in choice.order if choice.dropped.get(one.label) == criterion]
        if names:
            sentences.append(f"Clearly worse in {title}: {names_text(names)}.")
    others = choice.level[1:]
    if others:
        why = "it is the cheapest of them"
        if any(one.price.estimate < chosen.price.estimate for one in others):
            why = "more programs run it"
        sentences.append(f"Not told apart from {names_text([one.name for one in others])}: {why}.")
    return sentences


def _price(one: Evidence, measured: Findings) -> str:
    change = change_sentence(METRICS["perplexity"], one.price)
    return f"within the trained {measured.within} tokens perplexity changes by {change}"


def _scores(one: Evidence, measured: Findings) -> str:
    """Return what a method reaches at the target, with what the unpatched model does there and within its context."""
    base = measured.unpatched
    prompts = len(one.retrieval)

    def perplexity(losses: Sequence[float]) -> str:
        return perplexity_text(1 + relative(fmean(losses)))

    return (
        f"of {count_text(prompts, 'prompt')} of {measured.target} tokens it answers {one.answered} (unpatched "
        f"{base.answered}, and {base.answered_within} within {measured.within}), right answers have a probability of "
        f"{probability_text(-fmean(one.retrieval))} ({probability_text(-fmean(base.retrieval))}), and perplexity at "
        f"positions {measured.half} to {measured.target} is {perplexity(one.perplexity)} "
        f"({perplexity(base.perplexity)}, and {perplexity(base.end)} at {measured.half_within} to {measured.within})"
    )


def _runs_in(chosen: Evidence, options: ExtendSettings, out: Path) -> str:
    """Return which programs run what is written, which with which command, and which do not."""
    as_it_is = [NAMES[program] for program, flags in chosen.served_by.items() if not flags]
    parts = [f"It runs as it is in {names_text(['transformers 5', *as_it_is])}"]
    for program, flags in chosen.served_by.items():
        if flags and program not in options.for_programs:
            words = [options.model, chosen.method, "--target-length", str(options.length), "--for", program]
            flags = f"of {shlex.join(['rope-patch', 'settings', *words])}"
        if flags:
            parts.append(f"{NAMES[program]} runs the checkpoint before it with the options {flags}")
    missing = [name for program, name in NAMES.items() if program not in chosen.served_by]
    if missing:
        parts.append(f"not in {names_text(missing)} (rope-patch doctor {shlex.quote(str(out))} says why)")
    return f"{'; '.join(parts)}."


def _advice(order: Sequence[Evidence], options: ExtendSettings) -> str:
    """Return what would help where no method can be chosen."""
    advice = ["--train-rows" if options.train else "--train", "a larger --budget", "a smaller --length"]
    reaching = [one for one in order if one.reaches != "no" and relative(fmean(one.cost)) <= 1]
    if reaching:
        least = min(reaching, key=lambda one: fmean(one.cost))
        # Rounded up, so that the method passes with the tolerance that is printed.
        enough = math.ceil(1000 * relative(fmean(least.cost))) / 1000
        advice.insert(0, f"--tolerance {enough:g}, with which {least.name} is chosen")
    return ", ".join(advice)


def no_time(methods: Sequence[str], window: float, options: ExtendSettings) -> list[str]:
    """Return why nothing was measured: not even one window fits into the budget.

    Args:
        methods: the methods that compete.
        window: how long a window takes under one of them [s].
        options: the options of the run.
    """
    every = (len(methods) + 1) * window
    count = count_text(len(methods), "method")
    all_of_them = budget_text(every, options)
    one = budget_text(2 * window, options)
    help = f"--budget {all_of_them}, in which what is finished is used again"
    if one != all_of_them:
        help += f", or fewer methods: for one of them --budget {one} will do"
    return [
        f"Nothing was written: a window of {options.length} tokens takes about {duration_text(every)} under {count} "
        "and the unpatched model on this machine, for which --budget has no time.",
        f"What would help: {help}.",
    ]


def budget_text(seconds: float, options: ExtendSettings) -> str:
    """Return the budget that has so much time for measuring, with a reserve, as ``--budget`` takes it."""
    minutes = math.ceil(1.2 * seconds / options.measuring_share / 60)
    if minutes < 120:
        return f"{minutes}m"
    return f"{math.ceil(minutes / 60)}h"
