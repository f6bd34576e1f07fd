"""A check of quantized caches as one HTML file with figures. Needs matplotlib.

Example:
    ``write("kv-check.html", kv_check(model, tokenizer, ["kivi-2"], lengths=[4096]), command="rope-patch kv-check …")``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rope_patch.evaluation.intervals import OF_PROMPTS, OF_WINDOWS
from rope_patch.evaluation.metrics import LOST, METRICS, Metric, PairedDifference, Span, spans_at
from rope_patch.evaluation.numbers import number_text, relative
from rope_patch.files import write_atomically
from rope_patch.kv_cache.schemes import PRESETS, Scheme
from rope_patch.kv_evaluation.captions import counted, spans, windows_of
from rope_patch.kv_evaluation.noise import PERTURBATION
from rope_patch.kv_evaluation.results import KVCheck
from rope_patch.kv_evaluation.verdicts import CheckRow
from rope_patch.reports import kv_pictures as pictures
from rope_patch.reports.blocks import Block, SchemeRow, SchemeTable, Section
from rope_patch.reports.comparison import Cell, haystack_of, render
from rope_patch.reports.kv_answers import answers_table, value_cell


def write(path: str | Path, check: KVCheck, *, command: str | None = None) -> None:
    """Write :func:`page` to a file, whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomically(path, page(check, command=command))


def page(check: KVCheck, *, command: str | None = None) -> str:
    """Return a check as one HTML document, the same text for the same check.

    Args:
        check: of a checkpoint.
        command: that made it.
    """
    parts = (
        _results(check),
        _tradeoffs(check),
        _schemes(check),
        _attribution(check),
        _prediction(check),
        _packed(check),
        _how(check),
    )
    return render(
        "kv_check.html.jinja",
        title=f"Quantized caches: {check.model}",
        command=command,
        summary=check.summary(),
        facts=_facts(check),
        sections=[part for part in parts if part is not None],
    )


# --- sections --------------------------------------------------------------------------------------------------------


def _results(check: KVCheck) -> Section:
    percent = f"{100 * check.limits.confidence:g} %"
    limit = f"{100 * check.limits.tolerance:g} %"
    words = (
        f"Safe: the {percent} interval of the change of perplexity lies below {limit}, and at most {100 * LOST:g} % of "
        f"the prompts were lost. Unsafe: that interval lies above {limit}, or the one of retrieval below 0. Undecided: "
        "more windows or prompts are needed, or, where it says so, the scheme rounds nothing at that length, so more "
        "of them would not help. Changes are paired, on the same windows and prompts as full precision "
        "under the same method; their intervals stand below them. Retrieval is exact match of greedy decoding; below "
        "it stands the share of answers that are first choice. Bits are of an element of the whole cache at that "
        "length; below them, of the part that is quantized, which is what counts at long lengths. "
        f"{OF_WINDOWS} {OF_PROMPTS}"
    )
    notes = [f"Note: {sentence}." for sentence in check.warnings]
    tables = [_table(check, length) for length in check.lengths]
    return Section("results", "What survives", [*notes, words, *tables, answers_table(check)])


def _table(check: KVCheck, length: int) -> SchemeTable:
    metrics = list(spans_at(check.spec, length))
    heads = [head for metric, span in metrics for head in (_head(metric, span), "Change")]
    columns = ("Scheme", "Bits", *heads, "Noise", "KL [nats/token]", "Top choice kept", "Verdict")
    lines = []
    for method in check.methods:
        base = check.of(method)[0]
        for row in check.of(method):
            values = [value_cell(metric, row.scores, span) for metric, span in metrics]
            if row.divergence is None:
                cells = [Cell("16"), *(cell for value in values for cell in (value, Cell("–")))]
                cells += [Cell("–"), Cell("–"), Cell("–"), Cell("", mark="text")]
                lines.append(SchemeRow(f"{method}: full precision", cells, "first"))
                continue
            cells = [_bits(row, length)]
            for value, (metric, span) in zip(values, metrics, strict=True):
                change = metric.difference(row.scores, base.scores, span, check.limits.confidence)
                cells += [value, _change(metric, change)]
            noise = row.noise.get(length, math.nan)
            cells += [Cell(f"±{number_text(100 * relative(noise))} %" if noise == noise else "–")]
            cells += [Cell(number_text(row.divergence.kl, 4)), Cell(f"{number_text(100 * row.divergence.top1, 1)} %")]
            verdict = check.verdict(row, length)
            idle = verdict.kind == "undecided" and check.idle(row, length)
            cells.append(Cell(verdict.kind, "rounds nothing" if idle else "", verdict.kind))
            lines.append(SchemeRow(row.scheme, cells))
    caption = (
        f"At {length} tokens: perplexity at positions below, {', '.join(check.spec.tasks)} in prompts of that length "
        f"({'; '.join(check.prompts(length))}). Noise: how far the perplexity of one window moves when its embeddings "
        f"are perturbed by {PERTURBATION:g} of their size (in half precision by the last place): the mean over n "
        "windows moves about 1/√n as far, and a smaller change tells nothing. KL of the next token’s distribution, "
        f"full precision to quantized, and how often both prefer the same token, at "
        f"all positions of {_windows(check.compared, max(check.lengths))}."
    )
    return SchemeTable(f"{length} tokens", caption, columns, lines)


def _head(metric: Metric, span: Span) -> str:
    """The task of retrieval, else the metric's name and its task."""
    name = metric.name.replace("_", " ").capitalize()
    return str(span.task).capitalize() if metric.name == "retrieval" else f"{name}, {span.task}" if span.task else name


def _tradeoffs(check: KVCheck) -> Section:
    shares = pictures.shares(check)
    blocks: list[Block] = [
        *pictures.tradeoffs(check, max(check.lengths)),
        pictures.by_layer(check),
        pictures.by_wavelength(check),
        pictures.radii(check),
        shares or "No head has outlier pairs: there are no shares to draw.",
    ]
    return Section("figures", "Bits, layers and pairs", blocks)


def _schemes(check: KVCheck) -> Section:
    first = {row.scheme: row for row in reversed(check.rows) if row.divergence is not None}
    owners = dict.fromkeys(row.scheme for row in pictures.given(check))
    lines = [_explained(first[owner]) for owner in owners]
    words = (
        "k is of keys, v of values: a format, what shares a scale (the features of a token, or of a group of them; "
        "tokens of a channel; a whole block), and switches: pre quantizes keys before rotation; centre takes the "
        "mean of unrotated pairs away, which softmax does not see; centreall that of all pairs as they are stored, "
        "averaged over their rotations, and before rotation (pre) the mean there, which is added when read; keep8 "
        "keeps the pairs under the frequency bound in 8 bits; hadamard mixes features before rounding. The "
        "residual window and sinks, the latest and first tokens, stay in full precision; with a flush keys wait in "
        "full precision until there are so many, are then quantized together, and the window is of values alone."
    )
    caption = (
        "Effective bits per element of the quantized part, 16-bit scales and zero points included, mean over layers "
        "(under the first method, where methods differ)."
    )
    columns = ("Scheme", "Text", "Bits of keys", "of values", "Residual [tokens]", "Sinks [tokens]", "Source")
    return Section("schemes", "What the schemes mean", [words, SchemeTable("", caption, columns, lines)])


def _explained(row: CheckRow) -> SchemeRow:
    preset, scheme = PRESETS.get(row.scheme), Scheme.parse(row.scheme_text)
    cells = [
        Cell(row.scheme_text, mark="text"),
        Cell(number_text(row.key_bits)),
        Cell(number_text(row.value_bits)),
        Cell(str(scheme.residual), f"flush {scheme.flush}" if scheme.flush else ""),
        Cell(str(scheme.sinks)),
        Cell(preset.source if preset else "given as a text", mark="long"),
    ]
    return SchemeRow(row.scheme, cells)


def _attribution(check: KVCheck) -> Section:
    lines = [line for row in pictures.given(check) if (line := _attribution_row(check, row)) is not None]
    if not lines:
        return Section(
            "attribution",
            "Where the cost comes from",
            ["No scheme that was asked for is unsafe: there is nothing to attribute."],
        )
    by_cost = (
        "Layers: those that cost more than is tolerated when they alone are quantized, or at least two thirds of what "
        f"the worst layer alone does, in perplexity over {_windows(check.attributed, max(check.lengths))}. Values are "
        "named where they alone cost more than keys alone."
    )
    by_error = (
        "Layers: those whose attention outputs have at least two thirds of the worst layer’s mean error; what each "
        "layer alone costs was left out to save time."
    )
    words = (
        f"{by_cost if check.attributed else by_error} Pairs: where at least half of the squared error of "
        "these layers’ logits lies in other pairs and goes when long mean keys are kept in full precision, the pairs "
        "of those keys, which stretch the scale that all share; elsewhere the pairs that carry half of the error. "
        "All of it over the same windows."
    )
    caption = "Schemes that were asked for, and the lengths at which they are unsafe."
    columns = ("Scheme", "Method", "Lengths [tokens]", "Layers", "Pairs", "Why")
    return Section("attribution", "Where the cost comes from", [words, SchemeTable("", caption, columns, lines)])


def _attribution_row(check: KVCheck, row: CheckRow) -> SchemeRow | None:
    unsafe = [verdict for length in check.lengths if (verdict := check.verdict(row, length)).kind == "unsafe"]
    if not unsafe:
        return None
    last = unsafe[-1]
    left = last.attribution.left if last.attribution is not None else None
    rest = "" if left is None else f"; with these in full precision the scheme costs {_percent(left)}"
    if last.attribution is not None and last.attribution.by_values:
        keys, values = (_percent(part) for part in (last.attribution.keys, last.attribution.values))
        why = f"values alone cost {values}, keys alone {keys}"
    elif last.induced is not None:
        why = f"long keys there cost other pairs {100 * last.induced:.0f} % of the logit error"
    elif last.pairs:
        why = "they carry half of the logit error"
    else:
        why = "no key is rounded: it comes from the values"
    cells = [
        Cell(row.method, mark="text"),
        Cell(", ".join(str(verdict.length) for verdict in unsafe)),
        Cell(spans(last.layers), mark="sentence"),
        Cell(spans(last.pairs) or "–", mark="sentence"),
        Cell(why + rest, mark="sentence"),
    ]
    return SchemeRow(row.scheme, cells)


def _prediction(check: KVCheck) -> Section:
    lines = [
        SchemeRow(row.scheme, [Cell(row.method, mark="text"), *(Cell(_correlation(value)) for value in row.prediction)])
        for row in pictures.given(check)
    ]
    words = (
        "Can statistics of the keys tell, without quantizing, which pairs will be wrong? A pair’s mean key has a "
        "length, its queries a mean norm: their product bounds what an offset can add to a logit. Jonasson’s frequency "
        "bound needs the table alone: pairs with a wavelength beyond the context."
    )
    caption = (
        "Spearman’s rank correlation, over all pairs of all heads and layers, of the measured rms error of a pair’s "
        "part of the logit with the one and with the other; 1 is the same order, 0 none. A dash: nothing varies."
    )
    columns = ("Scheme", "Method", "Length of the mean key × norm of the query", "Under the bound")
    return Section("prediction", "What could have been predicted", [words, SchemeTable("", caption, columns, lines)])


def _packed(check: KVCheck) -> Section | None:
    if not check.packed:
        return None
    words = (
        "Caches of transformers, packed, while the model as it was given decodes greedily behind one window: their "
        "bytes and speed are real. What they cost in perplexity is not measured through them: their first pass attends "
        "to keys before rounding. Their groups are features of one token."
    )
    lines = [
        SchemeRow(
            item.name,
            [
                Cell(number_text(item.bits), "of 16"),
                Cell(number_text(item.stored / 1e6)),
                Cell(number_text(1000 * item.seconds)),
                Cell(f"{number_text(item.seconds / item.full_seconds)} ×"),
                Cell(f"{100 * item.agree:.0f} %"),
            ],
        )
        for item in check.packed
    ]
    columns = ("Cache", "Bits", "Stored [MB]", "Decoding [ms/token]", "Beside full precision", "Same tokens")
    caption = (
        f"At {check.packed[0].tokens} tokens. Bits of the whole cache, where the model’s own precision counts as 16. "
        "Same tokens: decoded until one differs."
    )
    return Section("packed", "Packed caches", [words, SchemeTable("", caption, columns, lines)])


def _how(check: KVCheck) -> Section:
    return Section(
        "how",
        "How it was measured",
        [
            "Schemes are simulated, not packed: keys and values are rounded to what a format can hold and back, so "
            "nothing here says what memory or time a scheme saves. The rounding is exactly that of decoding: every "
            "query sees in full precision what its scheme has not quantized when its token is read (the residual "
            "window, keys that wait for a flush, sinks, an unfinished block), and everything else as its format holds "
            "it, in text as in prompts and answers. "
            "Scales and zero points are float32, also where the model computes in half precision; packed caches store "
            "16 bits of each, as the bits are counted here.",
            "Full precision is read by the model’s own attention, a scheme by this package’s. In half precision the "
            "two do not round alike: differences of about 1e-4 nats/token (KL) are noise there, not the scheme’s.",
            "A layer that slides holds its window alone, and rounds nothing of it where the residual window is as "
            "long. Layers and pairs: one pass in full precision, in which each layer’s keys and values are rounded "
            "where they appear; errors are taken at queries of the second half of the text.",
        ],
    )


# --- words -----------------------------------------------------------------------------------------------------------


def _facts(check: KVCheck) -> list[tuple[str, str]]:
    """What was measured, on what, and with what."""
    spec, scores = check.spec, check.rows[0].scores
    retrieval = next(iter(scores.retrieval.values()))
    depths = ", ".join(f"{100 * depth:.3g} %" for depth in spec.depths)
    chunk = "in one pass" if spec.chunk is None or spec.chunk >= spec.longest else f"in passes of {spec.chunk} tokens"
    stride = " (no stride)" * (check.windows > 1)
    tokens = scores.perplexity.tokens if scores.perplexity else 0
    tasks = f"{'tasks' if len(spec.tasks) > 1 else 'task'} {', '.join(spec.tasks)}"
    bound = "each layer’s own: the context that the config states, or its window"
    return [
        ("Model", check.model),
        ("Methods", ", ".join(check.meant(method) for method in check.methods)),
        ("Tables", "; ".join(f"{method}: {_tables(tables)}" for method, tables in check.tables.items())),
        ("Text", f"{check.text}; SHA-256 {check.digest[:16]}…"),
        (
            "Perplexity",
            f"{windows_of(check.windows, spec.longest)}{stride}, read {chunk}; {tokens} tokens scored",
        ),
        (
            "Retrieval",
            f"{tasks}, mode {spec.mode}; lengths {', '.join(map(str, check.lengths))} tokens; depths {depths}; "
            f"{counted(spec.samples, 'sample')} at each; seed {spec.seed}",
        ),
        ("Haystack", haystack_of(retrieval)),
        (
            "Calibration",
            f"{check.calibration} tokens of the training part of the built-in text, for mean keys"
            if check.calibration
            else "none: no scheme centres keys",
        ),
        ("Distances of the bound", bound if check.limits.context is None else f"{check.limits.context} tokens"),
        ("Cache", "simulated exactly as decoding would quantize it" + "; packed ones beside it" * bool(check.packed)),
        ("Environment", ", ".join(f"{name} {value}" for name, value in check.environment.items()) or "not recorded"),
    ]


def _windows(count: int, size: int) -> str:
    return f"{counted(count, 'window')} of {size} tokens"


def _tables(tables: Mapping[str, str]) -> str:
    """Fingerprints by layer type, which says nothing where there is one."""
    return ", ".join(f"{kind} {mark}" for kind, mark in tables.items()) if len(tables) > 1 else "".join(tables.values())


def _change(metric: Metric, change: PairedDifference) -> Cell:
    """A change, and below it its interval where there is one."""
    estimate, low, high = map(metric.format_change, change)
    return Cell(estimate, f"{low} to {high}" if math.isfinite(change.high - change.low) else "")


def _percent(nats: float) -> str:
    """A change of the loss as one of perplexity [%]."""
    return METRICS["perplexity"].format_change(nats)


def _bits(row: CheckRow, length: int) -> Cell:
    """Bits of a cache, and below them those of its quantized part where they differ."""
    whole, part = number_text(row.cache_bits[length]), number_text(row.bits)
    return Cell(whole, part if part != whole else "")


def _correlation(value: float | None) -> str:
    return "–" if value is None else number_text(value)
