"""The ledger: every method × model × context of benchmarks/results, in one table of the site; made anew at each build.

python docs/ledger.py > ledger.md                      # the page
python docs/ledger.py --check comparison.json          # would a result of `rope-patch compare` of others be taken?

What was never measured is an empty cell. Results of others lie in benchmarks/results/compared, as comparison.json is
written; a file that is not as it should be ends the build with the reason.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rope_patch.evaluation.compare import SCHEMA
from rope_patch.evaluation.intervals import paired_means, wilson
from rope_patch.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRAINED = {"smollm2": 8192, "gemma3": 32768, "qwen": 32768, "qwen-1.5b": 32768}
NAMES = {
    "smollm2": "SmolLM2-135M-Instruct",
    "gemma3": "Gemma 3 270M",
    "qwen": "Qwen2.5-Coder-0.5B-Instruct",
    "qwen-1.5b": "Qwen2.5-Coder-1.5B-Instruct",
}
COLUMNS = (
    ("Model", "text"),
    ("Method", "text"),
    ("Trained at", "number"),
    ("Read at", "number"),
    ("ppl within", "number"),
    ("change", "number"),
    ("ppl beyond", "number"),
    ("change", "number"),
    ("passkeys", "number"),
    ("Source", "text"),
)
SORTING = """
<script>
for (const head of document.querySelectorAll("#ledger th")) head.addEventListener("click", () => {
  const at = head.cellIndex, body = head.closest("table").tBodies[0], up = head.ariaSort !== "ascending";
  const key = row => row.cells[at].dataset.sort;
  const empty = row => key(row) === "";
  const compare = (a, b) => head.dataset.kind === "number" ? key(a) - key(b) : key(a).localeCompare(key(b));
  const rows = [...body.rows].sort((a, b) => empty(a) - empty(b) || (up ? compare(a, b) : compare(b, a)));
  for (const other of head.parentNode.cells) other.ariaSort = "none";
  head.ariaSort = up ? "ascending" : "descending";
  body.append(...rows);
});
</script>
"""


@dataclass
class Entry:
    """What was measured of a method on a model at a length.

    Attributes:
        model: the name of the checkpoint.
        method: the method string.
        adapted: whether the weights were trained under the method.
        trained_length: the context that the model was trained at [tokens].
        length: the length that is read [tokens].
        source: the file of the result.
        nll: the loss of each window, by the span of positions (``"0-1024"``) [nats/token].
        perplexity: the perplexity within and beyond the trained context, where the windows are not recorded.
        answered: the number of prompts of this length that are answered, and of all.
    """

    model: str
    method: str
    adapted: bool
    trained_length: int
    length: int
    source: Path
    nll: dict[str, list[float]] = field(default_factory=dict)
    perplexity: tuple[float | None, float | None] = (None, None)
    answered: tuple[int, int] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from other entries of its file."""
        return self.source, self.model, self.method, self.adapted, self.length

    def losses(self, beyond: bool) -> list[float]:
        """Return the loss of each window, within or beyond the trained context."""
        sums: list[float] = []
        tokens = 0
        for span, windows in self.nll.items():
            start, stop = map(int, span.split("-"))
            if (start >= self.trained_length) == beyond:
                sums = sums or [0.0] * len(windows)
                sums = [old + (stop - start) * new for old, new in zip(sums, windows, strict=True)]
                tokens += stop - start
        return [one / tokens for one in sums]


# --- one reader for each layout of a file ----------------------------------------------------------------------------


def of_smollm2(data: Mapping[str, Any], source: Path) -> Iterator[Entry]:
    """Yield the entries of study_smollm2.json."""
    for cell in (*data["text"], *data["passkey"]):
        if cell["length"] <= 1024 or cell.get("by") == "llama.cpp":
            continue
        method = data["settings"]["methods"].get(cell["table"], cell["table"])
        method = method.format(factor=cell["factor"], context=TRAINED["smollm2"])
        entry = Entry(NAMES["smollm2"], method, cell["state"] != "zero", TRAINED["smollm2"], cell["length"], source)
        if "nll" in cell:
            entry.nll = cell["nll"]
        else:
            entry.answered = cell["exact_match"], cell["prompts"]
        yield entry


def of_families(data: Mapping[str, Any], source: Path) -> Iterator[Entry]:
    """Yield the entries of study_families.json, whose windows are cells of their own where they are long."""
    for cell in data["cells"]:
        if cell["where"] or cell["kind"] not in ("text", "passkey"):
            continue
        model = cell["model"]
        entry = Entry(NAMES[model], cell["table"], cell["adapted"], TRAINED[model], cell["length"], source)
        if cell["kind"] == "text":
            entry.nll = cell["nll"]
        else:
            entry.answered = sum(cell["correct"]), len(cell["correct"])
        yield entry


def of_methods(data: Mapping[str, Any], source: Path) -> Iterator[Entry]:
    """Yield the entries of study_methods.json, which holds no windows."""
    for row in data["rows"]:
        if row["table"] in data["settings"]["methods"]:
            trained, *_, length = sorted(map(int, row["perplexity"]))
            entry = Entry(f"{row['checkpoint']} (toy)", row["methods"][0], row["lora"], trained, length, source)
            within, beyond = (row["perplexity"][str(one)] for one in (trained, length))
            entry.perplexity = within, beyond
            if prompts := row["prompts"].get(str(length)):
                entry.answered = round(row["passkey"][str(length)] * prompts), prompts
            yield entry


def of_comparison(data: Mapping[str, Any], source: Path) -> Iterator[Entry]:
    """Yield the entries of a comparison.json, at its longest length."""
    length = data["lengths"][-1]
    for row in data["rows"]:
        name = data["model"].partition(" ")[2] or data["model"]
        adapted = row.get("trained", False)
        method = row["method"].removesuffix(" after training")
        entry = Entry(name, method, adapted, data["trained_length"], length, source)
        text = row["perplexity"]
        if text is not None:
            spans = [f"{bucket['start']}-{bucket['stop']}" for bucket in text["buckets"]]
            entry.nll = {
                span: [document["nll"][at] / document["tokens"][at] for document in text["documents"]]
                for at, span in enumerate(spans)
            }
        cells = row["retrieval"].get("passkey", {}).get("cells", [])
        right = [sample["correct"] for cell in cells if cell["length"] == length for sample in cell["samples"]]
        if right:
            entry.answered = sum(right), len(right)
        yield entry


READERS = {"study_smollm2": of_smollm2, "study_families": of_families, "study_methods": of_methods}
"""The reader of each file of benchmarks/results that holds scores of methods, by its name."""


def refused(data: Any) -> str:
    """Return why a result of ``rope-patch compare`` is not taken; empty if it is."""
    if not isinstance(data, Mapping) or "rows" not in data or "columns" not in data:
        return "it is no comparison.json, which `rope-patch compare MODEL … -o OUT` writes into OUT"
    if data.get("schema") != SCHEMA:
        return f"its schema is {data.get('schema')}, and {SCHEMA} is read: measure again with this version"
    if not data["model"].partition(" ")[2]:
        return "it does not name the checkpoint: give a folder or hub id that can be found again"
    if "default" not in [row["method"] for row in data["rows"]]:
        return "the unpatched model is not among its methods: add default, without which no change can be told"
    if not data.get("environment", {}).get("rope_patch"):
        return "it does not say which version of rope_patch measured it"
    for row in data["rows"]:
        if row["perplexity"] is not None and not all(map(math.isfinite, _numbers(row["perplexity"]["documents"]))):
            return f"{row['method']} has a loss that is no finite number"
    return ""


def _numbers(documents: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    for document in documents:
        yield from (math.nan if one is None else float(one) for one in document["nll"])


def entries() -> list[Entry]:
    """Return every entry once: text and prompts of one method, model and length joined, windows in their order."""
    found: list[Iterator[Entry]] = []
    for name, reader in READERS.items():
        source = RESULTS / f"{name}.json"
        found.append(reader(json.loads(source.read_text("utf-8")), source))
    for source in sorted((RESULTS / "compared").glob("*.json")):
        data = json.loads(source.read_text("utf-8"))
        if why := refused(data):
            raise ValueError(f"{source}: {why}")
        found.append(of_comparison(data, source))
    joined: dict[tuple[Any, ...], Entry] = {}
    for entry in itertools.chain(*found):
        whole = joined.setdefault(entry.key, entry)
        if whole is entry:
            continue
        for span, windows in entry.nll.items():
            whole.nll[span] = [*whole.nll.get(span, []), *windows]
        whole.answered = whole.answered or entry.answered
    return list(joined.values())


# --- the page --------------------------------------------------------------------------------------------------------


def page() -> str:
    """Return the page in Markdown, with its table in HTML."""
    measured = entries()
    rows = [cells(entry, measured) for entry in measured]
    places = dict.fromkeys((entry.model, entry.trained_length, entry.length) for entry in measured)
    for model, trained, length in places:
        here = {re.split(r"\W", one.method)[0] for one in measured if (one.model, one.length) == (model, length)}
        for method in sorted(set(METHODS) - here - {"table"}):
            names = [(model, model), (method, method), (str(trained), trained), (str(length), length)]
            rows.append([*names, *[("", "")] * (len(COLUMNS) - len(names))])
    heads = "".join(f'<th data-kind="{kind}" style="cursor:pointer">{name}</th>' for name, kind in COLUMNS)
    body = "\n".join(f"<tr>{''.join(_cell(*one) for one in row)}</tr>" for row in rows)
    listed = {entry.source for entry in measured}
    others = [
        f"[{path.stem}](benchmarks/results/{path.name})"
        for path in sorted(RESULTS.glob("*.json"))
        if path not in listed
    ]
    return f"""---
hide: [navigation]
---
# Ledger

Every table that was measured on every checkpoint, from the JSON files of the benchmarks; click on a heading to sort. An
empty row is a method that nobody has measured there. *Within* and *beyond* are positions up to the trained context and
after it; a *change* is that of perplexity from the unpatched model on the same windows, with its 95 % interval;
passkeys are answered exactly, with Wilson's interval. Files that hold no windows have no change.

<div style="overflow-x:auto"><table id="ledger"><thead><tr>{heads}</tr></thead><tbody>
{body}
</tbody></table></div>
{SORTING}
A comparison of yours: put the `comparison.json` of `rope-patch compare` into `benchmarks/results/compared`;
`python docs/ledger.py --check FILE` says whether it is taken.

Measured otherwise, in files of their own: {", ".join(others)}.
"""


def cells(entry: Entry, measured: Sequence[Entry]) -> list[tuple[str, Any]]:
    """Return the cells of an entry, each with what it is sorted by."""
    method = f"{entry.method} after LoRA" if entry.adapted else entry.method
    shown: list[tuple[str, Any]] = [(entry.model, entry.model), (method, method)]
    shown += [(str(one), one) for one in (entry.trained_length, entry.length)]
    unpatched = [one for one in measured if one.key == (entry.source, entry.model, "default", False, entry.length)]
    for beyond in (False, True):
        losses, before = entry.losses(beyond), [loss for one in unpatched for loss in one.losses(beyond)]
        value = math.exp(math.fsum(losses) / len(losses)) if losses else entry.perplexity[beyond]
        shown.append(("", "") if value is None else (f"{value:.3g}", value))
        if len(losses) < 2 or len(losses) != len(before) or entry is unpatched[0]:
            shown.append(("", ""))
            continue
        change = math.expm1(math.fsum(losses) / len(losses) - math.fsum(before) / len(before))
        low, high = (100 * math.expm1(one) for one in paired_means(losses, before))
        shown.append((f"{100 * change:+.3g} % ({low:+.3g} to {high:+.3g})", change))
    if entry.answered is None:
        shown.append(("", ""))
    else:
        right, asked = entry.answered
        low, high = wilson(right, asked)
        shown.append((f"{right} of {asked} ({low:.2f} to {high:.2f})", right / asked))
    path = entry.source.relative_to(RESULTS).as_posix()
    link = f'<a href="../benchmarks/results/{path}">{entry.source.stem}</a> {commit(entry.source)}'
    return [*shown, (link, entry.source.stem)]


def _cell(text: str, key: Any) -> str:
    if not text.startswith("<a "):
        text = html.escape(text)
    return f'<td data-sort="{html.escape(str(key))}">{text}</td>'


COMMITS: dict[Path, str] = {}


def commit(path: Path) -> str:
    """Return the last commit of a file, in short; empty outside a repository."""
    if path not in COMMITS:
        command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", str(path)]
        COMMITS[path] = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return COMMITS[path]


def main(words: Sequence[str]) -> int:
    """Print the page, or whether a file is taken."""
    if not words:
        print(page())
        return 0
    if words[0] != "--check" or len(words) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        why = refused(json.loads(Path(words[1]).read_text("utf-8")))
    except (OSError, ValueError) as error:
        why = f"it cannot be read: {error}"
    print(f"refused: {why}" if why else "taken")
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
