"""A check of quantized caches as one HTML file with figures. Needs matplotlib.

Example:
    ``write("kv-check.html", kv_check(model, tokenizer, ["kivi-2"], lengths=[4096]), command="rope-patch kv-check …")``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rope_patch.files import write_atomically
from rope_patch.kv_cache.schemes import PRESETS, Scheme
from rope_patch.kv_evaluation.results import KVCheck
from rope_patch.kv_evaluation.verdicts import LOST, CheckRow, counted, relative, spans, windows_of
from rope_patch.reports import kv_pictures as pictures
from rope_patch.reports.blocks import Block, SchemeRow, SchemeTable, Section
from rope_patch.reports.comparison import Cell, number_text, perplexity_text, render


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
        _blame(check),
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
    percent = f"{100 * check.confidence:g} %"
    limit = f"{100 * check.tolerance:g} %"
    words = (
        f"Safe: the {percent} interval of the change of perplexity lies below {limit}, and at most {100 * LOST:g} % of "
        f"the prompts were lost. Unsafe: that interval lies above {limit}, or the one of retrieval below 0. Undecided: "
        "more windows or prompts are needed, or, where it says so, the scheme rounds nothing at that length, and no "
        "number of them would tell. Changes are paired, on the same windows and prompts as full precision "
        "under the same method; their intervals stand below them. Bits are of an element of the whole cache at that "
        "length; below them, of the part that is quantized, which is what counts at long lengths."
    )
    return Section("results", "What survives", [words, *(_table(check, length) for length in check.lengths)])


def _table(check: KVCheck, length: int) -> SchemeTable:
    asked = check.rows[0].scores.retrieval
    columns = ("Scheme", "Bits", "Perplexity", "Change", asked.task.capitalize(), "Change", "KL [nats/token]",
               "Top choice kept", "Verdict")  # fmt: skip
    lines = []
    for method in check.methods:
        for row in check.of(method):
            score, found = row.scores.perplexity.between(0, length), row.scores.retrieval.accuracy(length)
            if row.divergence is None:
                cells = [Cell("16"), Cell(perplexity_text(score)), Cell("–"), Cell(number_text(found))]
                cells += [Cell("–")] * 3
                lines.append(SchemeRow(f"{method}: full precision", [*cells, Cell("", mark="text")], "first"))
                continue
            verdict = check.verdict(row, length)
            change, low, high = check.change(row, length, "retrieval")
            lines.append(
                SchemeRow(
                    _called(row),
                    [
                        _bits(row, length),
                        Cell(perplexity_text(score)),
                        _percent(*check.change(row, length)),
                        Cell(number_text(found)),
                        Cell(number_text(change, sign=True), _ends(low, high)),
                        Cell(number_text(row.divergence.kl, 4)),
                        Cell(f"{number_text(100 * row.divergence.top1, 1)} %"),
                        Cell(
                            verdict.kind,
                            "rounds nothing" * (verdict.kind == "undecided" and check.idle(row, length)),
                            verdict.kind,
                        ),
                    ],
                    "remedy" if row.remedy_of is not None else "",
                )
            )
    caption = (
        f"At {length} tokens: perplexity at positions below, {asked.task} in prompts of that length "
        f"({len(asked.samples(length))} of them: a loss below {100 * check.blind(length):.0f} % would not be told from "
        f"chance). KL of the next token’s distribution, full precision to quantized, "
        f"and how often both prefer the same token, at all positions of {_windows(check.compared, max(check.lengths))}."
    )
    return SchemeTable(f"{length} tokens", caption, columns, lines)


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
    lines = [
        _explained(row)
        for owner in owners
        for row in (first[owner], *(row for row in reversed(first.values()) if row.remedy_of == owner))
    ]
    words = (
        "k is of keys, v of values: a format, what shares a scale (the features of a token, or of a group of them; "
        "tokens of a channel; a whole block), and switches: pre quantizes keys before rotation; centre takes the "
        "mean of unrotated pairs away, which softmax does not see; centreall that of all pairs as they are stored, "
        "averaged over their rotations, and before rotation (pre) the mean there, which is added when read; keep8 "
        "keeps the pairs under the frequency bound in 8 bits; hadamard mixes features before rounding. The "
        "residual window and sinks, the latest and first tokens, stay in full precision."
    )
    caption = (
        "Effective bits per element of the quantized part, 16-bit scales and zero points included, mean over layers "
        "(under the first method, where methods differ)."
    )
    columns = ("Scheme", "Text", "Bits of keys", "of values", "Residual [tokens]", "Sinks [tokens]", "Source")
    return Section("schemes", "What the schemes mean", [words, SchemeTable("", caption, columns, lines)])


def _explained(row: CheckRow) -> SchemeRow:
    preset, scheme = PRESETS.get(row.scheme), Scheme.parse(row.spelled)
    cells = [
        Cell(row.spelled, mark="text"),
        Cell(number_text(row.key_bits)),
        Cell(number_text(row.value_bits)),
        Cell(str(scheme.residual)),
        Cell(str(scheme.sinks)),
        Cell("a remedy" if row.remedy_of else preset.source if preset else "given as a text", mark="long"),
    ]
    return SchemeRow(_called(row), cells, "remedy" if row.remedy_of is not None else "")


def _blame(check: KVCheck) -> Section:
    lines = [line for row in pictures.given(check) if (line := _blamed(check, row)) is not None]
    if not lines:
        return Section("blame", "What is to blame", ["No scheme that was asked for is unsafe: nothing is to blame."])
    words = (
        "Layers: those that cost more than is tolerated when they alone are quantized, or at least two thirds of what "
        f"the worst layer alone does, in perplexity over {_windows(check.compared, max(check.lengths))}. Values are "
        "to blame where they alone cost more than keys alone. Pairs: where at least half of the squared error of "
        "these layers’ logits lies in other pairs and goes when long mean keys are kept in full precision, the pairs "
        "of those keys, which stretch the scale that all share; elsewhere the pairs that carry half of the error. "
        "All of it over the same windows."
    )
    caption = (
        "Schemes that were asked for, and the lengths at which they are unsafe. Of the remedies tried, the best at the "
        "longest of these: the safe one of fewest bits, or the one of least perplexity. The tables above have them all."
    )
    columns = ("Scheme", "Method", "Lengths [tokens]", "Layers", "Pairs", "Why", "Best remedy")
    return Section("blame", "What is to blame", [words, SchemeTable("", caption, columns, lines)])


def _blamed(check: KVCheck, row: CheckRow) -> SchemeRow | None:
    found = [verdict for length in check.lengths if (verdict := check.verdict(row, length)).kind == "unsafe"]
    if not found:
        return None
    last = found[-1]
    left = last.causes.left if last.causes is not None else None
    rest = "" if left is None else f"; with these in full precision the scheme costs {_share(left)} %"
    if last.causes is not None and last.causes.by_values:
        keys, values = (_share(part) for part in (last.causes.keys, last.causes.values))
        why = f"values alone cost {values} %, keys alone {keys} %"
    elif last.induced is not None:
        why = f"long keys there cost other pairs {100 * last.induced:.0f} % of the logit error"
    elif last.pairs:
        why = "they carry half of the logit error"
    else:
        why = "no key is rounded: values are to blame"
    tried = check.remedies(row, last.length)
    remedy = Cell("none was tried", mark="sentence")
    if tried:
        best, verdict = tried[0]
        change = _percent(*check.change(best, last.length)).text
        told = f"perplexity {change}, {number_text(best.cache_bits[last.length])} bits"
        remedy = Cell(f"{_called(best)}: {verdict.kind}", told, mark=verdict.kind)
    cells = [
        Cell(row.method, mark="text"),
        Cell(", ".join(str(verdict.length) for verdict in found)),
        Cell(spans(last.layers), mark="sentence"),
        Cell(spans(last.pairs) or "–", mark="sentence"),
        Cell(why + rest, mark="sentence"),
        remedy,
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
            "query sees in full precision what has not left the residual window when its token is read, its sinks and "
            "an unfinished block, and everything else as its format holds it, in text as in prompts and answers. "
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
    row = check.rows[0]
    score, found = row.scores.perplexity, row.scores.retrieval
    depths = ", ".join(f"{100 * depth:.3g} %" for depth in sorted({cell.depth for cell in found.cells}))
    asked = {len(cell.samples) for cell in found.cells}
    chunk = "in one pass" if score.chunk >= score.window else f"in passes of {counted(score.chunk, 'token')}"
    stride = " (no stride)" * (check.windows > 1)
    least, most = min(asked), max(asked)
    samples = counted(most, "sample") if least == most else f"{least}–{most} samples"
    bound = "each layer’s own: the context that the config states, or its window"
    return [
        ("Model", check.model),
        ("Methods", ", ".join(check.meant(method) for method in check.methods)),
        ("Tables", "; ".join(f"{method}: {_tables(tables)}" for method, tables in check.tables.items())),
        ("Text", f"{check.text}; SHA-256 {check.digest[:16]}…"),
        (
            "Perplexity",
            f"{windows_of(check.windows, score.window)}{stride}, read {chunk}; {score.tokens} tokens scored",
        ),
        (
            "Retrieval",
            f"task {found.task}; lengths {', '.join(map(str, check.lengths))} tokens; depths {depths}; "
            f"{samples} at each; seed {found.seed}",
        ),
        ("Haystack", f"{found.haystack}; SHA-256 {found.haystack_sha256[:16]}…"),
        (
            "Calibration",
            f"{check.calibration} tokens of the training part of the built-in text, for mean keys"
            if check.calibration
            else "none: no scheme centres keys",
        ),
        ("Distances of the bound", bound if check.context is None else f"{check.context} tokens"),
        ("Cache", "simulated exactly as decoding would quantize it" + "; packed ones beside it" * bool(check.packed)),
        ("Environment", ", ".join(f"{name} {value}" for name, value in check.environment.items()) or "not recorded"),
    ]


def _called(row: CheckRow) -> str:
    """A scheme's name; of a remedy what it adds."""
    return row.scheme if row.remedy_of is None else row.scheme.removeprefix(row.remedy_of)


def _windows(count: int, size: int) -> str:
    return f"{counted(count, 'window')} of {size} tokens"


def _tables(tables: Mapping[str, str]) -> str:
    """Fingerprints by layer type, which says nothing where there is one."""
    return ", ".join(f"{kind} {mark}" for kind, mark in tables.items()) if len(tables) > 1 else "".join(tables.values())


def _percent(estimate: float, low: float, high: float) -> Cell:
    """A change of the loss [nats/token] as one of perplexity."""
    return Cell(f"{_share(estimate)} %", f"{_share(low)} to {_share(high)}" if math.isfinite(high - low) else "")


def _share(nats: float) -> str:
    value = 100 * relative(nats)
    return number_text(value, 2 if abs(value) < 10 else 1 if abs(value) < 1000 else 0, sign=True)


def _bits(row: CheckRow, length: int) -> Cell:
    """Bits of a cache, and below them those of its quantized part where they differ."""
    whole, part = number_text(row.cache_bits[length]), number_text(row.bits)
    return Cell(whole, part if part != whole else "")


def _ends(low: float, high: float) -> str:
    return f"{number_text(low, sign=True)} to {number_text(high, sign=True)}"


def _correlation(value: float | None) -> str:
    return "–" if value is None else number_text(value)
