"""The tables of docs/methods, docs/adapt.md, and newer methods in docs/study.md: from the classes and the results.

    python benchmarks/method_pages.py            # writes them anew; benchmarks/tables_figure.py draws the figures

What stands on a page beside its tables is left as it is.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import rope_patch
from pages import ROOT, markdown_table, page_with, results
from rope_patch.exporting.audit import audit
from rope_patch.exporting.readings import PROGRAMS
from rope_patch.files import write_atomically
from rope_patch.methods import METHODS
from rope_patch.methods.parameters import written
from tables_figure import CONTEXT, FACTOR, LONGROPE, scales, smollm2

PAGES = (*sorted((ROOT / "docs" / "methods").glob("*.md")), ROOT / "docs" / "adapt.md", ROOT / "docs" / "study.md")
MEANINGS = {
    "attention_factor": "factor on cos and sin",
    "attention_scaling": "factor on cos and sin; left out: the checkpoint's own",
    "beta_fast": "pairs with more full turns than this within the context keep their frequency",
    "beta_slow": "pairs with fewer full turns than this are divided by the whole factor",
    "context": "pairs without a full turn within so many tokens stop; left out: the trained context",
    "cutoff_high": "frequencies from this one on stay [rad/token]",
    "cutoff_low": "frequencies up to this one become 0; those between the two become `floor` [rad/token]",
    "factor": "new context divided by the trained one; left out: taken from `target_length`",
    "factors": "a divisor for each pair, fast to slow, joined by `/`; left out: all 1",
    "floor": "frequency of the pairs between the two cutoffs [rad/token]",
    "high_freq_factor": "wavelengths below the context divided by this stay",
    "layer_type": "the layers whose table is replaced, for example `full_attention`; left out: all",
    "low_freq_factor": "wavelengths above the context divided by this are multiplied by the factor",
    "mscale": "with `mscale_all_dim`: the ratio on cos and sin that DeepSeek uses",
    "mscale_all_dim": "see `mscale`",
    "original_max_position_embeddings": "context that the factor multiplies; left out: the trained one",
    "p": "share of the pairs that rotate, rounded down to whole pairs",
    "replace_scaling": "start from the plain table of the base, where a checkpoint is scaled already",
    "rope_theta": "the new base; left out, and without `factor`: 500000",
    "share": "share of the pairs, the slowest, that are faded, rounded to whole pairs",
    "temperature": "attention logits are multiplied by `1 + temperature * ln(factor)`",
    "truncate": "round both ends of the ramp outwards to whole pairs",
    "values": "a frequency for each pair, fast to slow, joined by `/` [rad/token]; left out: the checkpoint's own",
}
"""What each parameter does, but where a method reads it otherwise."""
READ_OTHERWISE = {
    ("abf", "factor"): "in place of `rope_theta`: multiplies the checkpoint's base",
    ("longrope", "factor"): "sets the default of `attention_factor` and nothing else",
    ("longrope", "attention_factor"): "factor on cos and sin; left out: `sqrt(1 + ln(factor) / ln(trained context))`",
    ("mrrope", "attention_factor"): "factor on cos and sin; left out: `0.1 ln(factor) + 1`",
    ("nope", "factor"): "for `temperature`: length of the texts divided by that of the training",
    ("pi", "factor"): "new context divided by the one that the config states; left out: taken from `target_length`",
    ("yarn", "attention_factor"): "factor on cos and sin; left out: `0.1 ln(factor) + 1`",
}


EXAMPLES = {"longrope": LONGROPE, "table": "table:values=" + "/".join(str(0.5**i) for i in range(32))}
"""Lists for the methods that are nothing without one."""


def parameters(*names: str) -> str:
    """Every parameter of methods: default, bounds, meaning."""
    rows = []
    for name in names:
        for f in fields(METHODS[name]):
            bounds = [
                f"{sign} {f.metadata[key]:g}"
                for key, sign in (("above", ">"), ("least", "≥"), ("most", "≤"))
                if f.metadata.get(key) is not None
            ]
            label = f"`{f.name}`" if len(names) == 1 else f"`{name}`: `{f.name}`"
            default = "" if f.default is None else f"`{written(f.default)}`"
            rows.append([label, default, ", ".join(bounds), READ_OTHERWISE.get((name, f.name)) or MEANINGS[f.name]])
    return markdown_table(["parameter", "default", "bounds", "what it does"], rows, rule="---")


def config(method: str) -> str:
    """What ``rope-patch apply`` writes for SmolLM2, and which programs read it as transformers 5 does."""
    model, method = smollm2(), EXAMPLES.get(method, method)
    rope_patch.apply(model, method, target_length=FACTOR * CONTEXT if scales(method) else None)
    with tempfile.TemporaryDirectory() as folder:
        rope_patch.save(model, folder)
        stated = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))["rope_parameters"]
        rows = audit(folder).rows[1:]
        reasons: dict[tuple[str, str], list[str]] = {}
        for row in rows:
            if row.verdict != "agrees":
                fix = (row.fix or "").replace(folder, "FOLDER").replace("-o FOLDER", "-o EXPORTED")
                reasons.setdefault((row.reasons[0], fix), []).append(program(row.program))
    lines = ["```json", *written_out(stated), "```", ""]
    if agree := [program(row.program) for row in rows if row.verdict == "agrees"]:
        lines += [f"On a Llama the same table is computed by transformers 5, {', '.join(agree)}."]
    if reasons:
        lines += ["", "Others, and what to run for them:", ""]
    lines += [f"- {', '.join(names)}: {reason}. `{fix}`" for (reason, fix), names in reasons.items()]
    return "\n".join(lines)


def program(key: str) -> str:
    """Return a program with the version whose code was compared."""
    return f"{PROGRAMS[key].name} ({PROGRAMS[key].version})"


def written_out(stated: dict[str, Any]) -> list[str]:
    """Return ``rope_parameters`` as JSON, with the ends of long lists."""

    def value(one: Any) -> str:
        if isinstance(one, list) and len(one) > 4:
            first, second, *_, last = (f"{number:.4g}" for number in one)
            return f"[{first}, {second}, …, {last}]"
        return json.dumps(one)

    return ['"rope_parameters": {', ",\n".join(f'  "{key}": {value(one)}' for key, one in stated.items()), "}"]


def untrained(*names: str) -> str:
    """Perplexity within and beyond the trained context, and passkeys, of methods beside the table as it was and YaRN's.

    A name stands for the methods whose string begins with it and has no step more.
    """
    rows: dict[str, list[str]] = {}
    for row in results("every_method")["rows"]:
        scores = {key: f"{row[key]['perplexity']:.1f}" for key in ("within", "beyond")}
        answered, asked = row["passkeys"]
        cell = f"{scores['within']}, {scores['beyond']}, {answered}/{asked}"
        rows.setdefault(f"{row['checkpoint']} {row['factor']}×", {})[row["method"]] = cell
    columns = [*dict.fromkeys(("default", "yarn", *names))]
    body = [[label, *(of(cells, name) for name in columns)] for label, cells in rows.items()]
    return markdown_table(["within, beyond, passkeys", *(f"`{name}`" for name in columns)], body)


def of(cells: dict[str, str], name: str) -> str:
    """Return the one cell of a method, whatever its parameters are."""
    steps = name.split("+")
    (cell,) = (
        cell
        for method, cell in cells.items()
        if [step.partition(":")[0] for step in method.split("+")] == [step.partition(":")[0] for step in steps]
    )
    return cell


def trained(*names: str) -> str:
    """The study after LoRA: tables beside the one as it was and YaRN's, a line for each checkpoint and length."""
    columns = [*dict.fromkeys(("default", "YaRN", *names))]
    lines: dict[str, dict[str, str]] = {}
    for row in results("study_methods")["rows"]:
        if row["lora"] and row["passkey"]:
            lines.setdefault(f"{row['checkpoint']} {row['factor']}×", {})[row["table"]] = ends(row)
    body = [[label, *(cells[name] for name in columns)] for label, cells in lines.items()]
    return markdown_table(["first, last bucket, passkeys", *columns], body)


def study(checkpoint: str, state: str) -> str:
    """The study on one checkpoint, untrained or after LoRA: a line for each table, a column for each length."""
    lines: dict[str, list[str]] = {}
    factors = []
    for row in results("study_methods")["rows"]:
        if row["checkpoint"] == checkpoint and row["lora"] == (state == "lora"):
            factors.append(f"{row['factor']}×")
            lines.setdefault(row["table"], [row["table"]]).append(ends(row))
    return markdown_table(["table", *dict.fromkeys(factors)], lines.values())


def ends(row: dict[str, Any]) -> str:
    """Return perplexity of the first and the last bucket, and the share of passkeys at the full length, if any."""
    perplexities = [*row["perplexity"].values()]
    shares = [f"{share:.2f}" for share in [*row["passkey"].values()][-1:]]
    return ", ".join([*(f"{one:.{1 if one < 1000 else 0}f}" for one in (perplexities[0], perplexities[-1])), *shares])


def newer(*names: str) -> str:
    """The rows of some methods with their paired differences from YaRN."""
    rows = []
    for row in results("every_method")["rows"]:
        if row["method"].partition(":")[0] in names or "+" in row["method"]:
            answered, asked = row["passkeys"]
            where = f"{row['checkpoint']} {row['factor']}×"
            scores = [beside_yarn(row[key]) for key in ("within", "beyond")]
            rows.append([where, f"`{row['method']}`", *scores, f"{answered} of {asked}"])
    return markdown_table(["checkpoint", "method", "within 256 tokens", "beyond", "passkeys"], rows, rule="---")


def beside_yarn(score: dict[str, Any]) -> str:
    """Return a perplexity with its change from YaRN's and the 95 % interval of that."""
    text = f"{score['perplexity']:.2f}"
    if score["interval"] is None:
        return text
    middle, low, high = (100 * math.expm1(nll) for nll in (score["nll_minus_yarn"], *score["interval"]))
    return f"{text}, {middle:+.1f} % ({low:+.1f} to {high:+.1f})"


def adapted(checkpoint: str) -> str:
    """The arms of ``make adapt`` on a checkpoint."""

    def share(estimate: float, low: float, high: float, sign: str = "") -> str:
        return f"{estimate:{sign}.2f} ({low:{sign}.2f} to {high:{sign}.2f})"

    rows = []
    for row in results("adapt")["rows"]:
        if row["checkpoint"] == checkpoint:
            perplexities = [f"{of_seeds['mean']:.2f}" for of_seeds in row["perplexity"].values()]
            near, far = row["passkey"].values()
            above = row.get("above_default")
            paired = share(above["difference"], *above["interval_prompts"], sign="+") if above else ""
            shares = [f"{near['exact_match']:.2f}", share(far["exact_match"], *far["interval"]), paired]
            rows.append([row["arm"], *perplexities, *shares])
    head = ["ppl 0-256", "ppl 256-1024", "passkey 256", "passkey 1024", "above default"]
    return markdown_table(["arm", *head], rows)


TABLES = {function.__name__: function for function in (parameters, config, untrained, trained, study, newer, adapted)}


def page_with_tables(page: str) -> str:
    """Return a page with its tables written anew."""
    return page_with(page, lambda kind, *words: TABLES[kind](*words))


def main() -> None:
    """Write the tables of all pages anew."""
    for path in PAGES:
        write_atomically(path, page_with_tables(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
