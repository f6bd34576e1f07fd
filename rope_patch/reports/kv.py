"""The page of ``rope-patch kv-check``."""

from __future__ import annotations

from rope_patch.analysis.outliers import mean_pairs, outlier_sentence
from rope_patch.evaluation.metrics import (
    SAFE_LOST_SHARE,
    column_heading,
    spans_at,
    value_text,
)
from rope_patch.kv_evaluation.results import KVCheck
from rope_patch.kv_evaluation.verdicts import NOISE
from rope_patch.reports.comparison import change_cell, scores_facts
from rope_patch.runtime import page as pages
from rope_patch.runtime.captions import windows_text
from rope_patch.runtime.number_format import kl_text, number_text
from rope_patch.runtime.page import (
    INTERVALS,
    Cell,
    Cells,
    DataTable,
    Note,
    Page,
    Part,
    Section,
)


def page(check: KVCheck) -> Page:
    """Return a check as a page.

    Args:
        check: the check of a checkpoint.
    """
    return Page(f"Quantized caches: {check.model}", [_results(check), _attribution(check), _how(check)])


# --- what survives ---------------------------------------------------------------------------------------------------


def _results(check: KVCheck) -> Section:
    parts: list[Part] = [
        *(Note(f"Note: {sentence}.") for sentence in check.warnings),
        *(Note(check.meant(method)) for method in check.methods if check.meant(method) != method),
        *(_table(check, length) for length in check.lengths),
    ]
    return Section("What survives", [*check.advice(), *check.summary()], parts)


def _table(check: KVCheck, length: int) -> DataTable:
    metrics = list(spans_at(check.spec, length))
    heads = [head for metric, span in metrics for head in (column_heading(metric, span), "Change")]
    columns = ("Format", "Verdict", "Bits", "KL [nats/token]", "Same top token", *heads)
    rows: list[Cells] = []
    for method in check.methods:
        for row in check.of(method):
            cells: Cells = [f"{method}: full precision", Cell("", style="left"), "16", "–", "–"]
            if row.divergence is not None:
                divergence = row.divergences[length]
                verdict = check.verdict(row, length)
                cells = [
                    row.format,
                    Cell("rounds nothing" if verdict.idle else verdict.kind, style=verdict.kind),
                    Cell(number_text(row.cache_bits[length]), number_text(row.bits)),
                    kl_text(divergence.kl),
                    f"{number_text(100 * divergence.top1, 1)} %",
                ]
            for metric, span in metrics:
                change = Cell("–")
                if row.divergence is not None:
                    change = change_cell(metric, check.change(row, metric, span))
                cells += [value_text(metric, metric.value(row.scores, span)), change]
            rows.append(cells)
    limits = check.limits
    caption = (
        f"Safe: the 95 % interval of the change of perplexity lies within "
        f"{100 * limits.tolerance:g} %, at most {100 * SAFE_LOST_SHARE:g} % of the prompts are lost, and KL is at most "
        f"{limits.loss:.4f}; unsafe: KL is larger, an interval shows that one of the others is exceeded, or the change "
        f"exceeds the tolerance by {NOISE:g} nats/token, which no noise explains. Below the bits of a cache stand "
        f"those of its quantized part. {INTERVALS}"
    )
    return DataTable(f"{length} tokens", columns, rows, caption)


# --- where the cost comes from ---------------------------------------------------------------------------------------


def _attribution(check: KVCheck) -> Section:
    # Of several methods most have the same outliers.
    found = [outlier_sentence(one, mean_pairs(one), "key") for one in check.captures.values()]
    causes = list(dict.fromkeys(found))
    costs: list[Cells] = []
    helps: list[Cells] = []
    for row in (row for method in check.methods for row in check.of(method)[1:]):
        lengths = [str(length) for length in check.lengths if check.verdict(row, length).kind == "unsafe"]
        if not lengths or row.attribution is None:
            continue
        attribution = row.attribution
        name = f"{row.method}: {row.format}"
        costs.append(
            [
                name,
                ", ".join(lengths),
                number_text(attribution.whole, 4),
                number_text(attribution.keys, 4),
                Cell(attribution.by_layer, style="text"),
                Cell(attribution.causes or "–", style="text"),
            ]
        )
        for remedy in attribution.remedies:
            offered = Cell(remedy.offered or "–", style="text")
            helps.append([name, Cell(remedy.name, style="text"), kl_text(remedy.kl), offered])
            name = ""
    if not costs:
        return Section("Where the cost comes from", ["No format is unsafe.", *causes], [])
    caption = (
        "KL [nats/token] on two windows at most. Keys: with values in full precision; layers: each with all others in "
        "full precision, and their sum need not be the whole. The error of the attention logits is credited to what "
        "takes it away when it is taken out of the keys: biases first, then the outlier pairs that make no full turn."
    )
    columns = ("Format", "Lengths [tokens]", "KL", "Keys alone", "Layers alone", "Error of logits")
    parts: list[Part] = [DataTable("Unsafe formats", columns, costs, caption)]
    caption = (
        "One change at a time, with KL [nats/token] on the same windows; a mean key is that of these windows. –: no "
        "program that we know of does it."
    )
    parts.append(DataTable("What helps", ("Format", "Change", "KL", "Offered by"), helps, caption))
    return Section("Where the cost comes from", causes, parts)


# --- how it was measured ---------------------------------------------------------------------------------------------


def _how(check: KVCheck) -> Section:
    answer = (
        f"{windows_text(check.windows, check.spec.longest)}. Formats are simulated, not packed: keys and values are "
        "rounded exactly as decoding would round them. Memory is computed from bits, and no time is measured."
    )
    note = (
        "Scales and zero points are float32, except in formats of programs that store them in 16 bits. In half "
        "precision, differences of about 1e-4 nats/token (KL), or 1e-3 where keys have long biases, are noise: full "
        "precision is read by the model’s own attention, a format by this package’s."
    )
    tables = [f"{method}: {kind} {mark}" for method, own in check.tables.items() for kind, mark in own.items()]
    facts = [
        ("Model", check.model),
        ("Methods", ", ".join(check.meant(method) for method in check.methods)),
        ("Tables", "; ".join(tables)),
        *scores_facts(check.rows[0].scores, check.text, check.digest),
    ]
    return Section("How it was measured", [answer], [Note(note), pages.facts(facts, check.environment)])
