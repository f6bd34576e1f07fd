"""What is generated of the pages: commands, methods, and model families.

python docs/commands.py            # writes docs/commands.md, docs/families.md, and the tables of methods in
                                   # docs/methods.md and docs/results/tables.md
python docs/commands.py --check    # fails where one is not current, as `make check` asks
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from rope_patch.frequencies import geometric
from rope_patch.methods import METHODS, Method, field_help
from rope_patch.methods.default import Default
from rope_patch.options import COMMANDS
from rope_patch.options.fields import Option, OptionSet, leaves
from rope_patch.tables import RotaryTable

PAGE = Path(__file__).with_name("commands.md")
METHODS_PAGE = PAGE.with_name("methods.md")
MEASURED_PAGE = PAGE.with_name("results") / "tables.md"
FAMILIES_PAGE = PAGE.with_name("families.md")
ROOT = PAGE.parents[1]
HEAD = """\
# Command line

```bash
rope-patch methods
rope-patch doctor smollm2-yarn
rope-patch apply smollm2-yarn p_rope p=0.5 --replace -o smollm2-p-rope
rope-patch doctor smollm2-p-rope --for vllm
rope-patch restore smollm2-p-rope -o smollm2-again
rope-patch plan Llama-3.1-8B --length 128k --gpu-memory 141
rope-patch plan Llama-3.1-8B --serve --gpu-memory 24
rope-patch tasks
rope-patch recipes copy my-recipes
```

Lengths are numbers of tokens, written as 8192 or 8k; lists are one word, separated by spaces or commas. Long commands
say first how many tokens they read and how long that takes ([less or more](measure.md)). Every command has `--help`.
This page is made from the options by `docs/commands.py`.
"""


METHODS_HEAD = "| name | what it does to the table | written for transformers as |"
PARAMETERS_HEAD = """\
## Parameters of methods

A parameter is written behind the name of its [method](methods.md), as in `yarn:factor=4:beta_fast=16`. One that is
shown without a default may be left out.
"""
MEASURED_HEAD = "| method | llama 4× | gemma3 4× |"
MEASURED = (
    "yarn:factor=4",
    "mrrope:factor=4",
    "llama3:factor=4",
    "abf:factor=50",
    "ntk:factor=4",
    "default",
    "p_rope:p=0.5",
    "truncated",
    "partial:p=0.5",
    "pi:factor=4",
    "p_rope_reversed:p=0.5",
    "nope",
)
"""The methods of the measured table."""

HEAD_OF_FAMILIES = """\
# Model families

Which of the {total} causal language model types of transformers can be patched ({versions}). `rope-patch doctor MODEL`
looks at a checkpoint itself.

Every type was built as a tiny random model, patched with four methods, and checked: perplexity and training loss are
the model's own; generation with a cache, plain reloading, a cast to bfloat16, a LoRA adapter and restoring are right to
the last bit ([results](../benchmarks/results/families.json), by `python -m pytest tests/families -m full --write`).

| result | types | meaning |
|---|---|---|"""
RESULTS = {
    "works": "every check passes, with every method that is not refused",
    "fails": "a check fails, or an error gives no reason or a wrong one",
    "refused": "`apply` raises an error that gives the reason, and changes nothing",
    "no rotary table": "no rotary embedding, or an embedding without a table of frequencies (BERT, GPT-2, Mamba …)",
    "not built": "no tiny model could be built, or it does not run by itself",
}
"""The results of a family, and what they mean."""
LISTED = "works"
"""The result whose types are listed by name. Types without a rotary table are left out; all others have a reason."""


def page() -> str:
    """Return the page as Markdown: the commands, and the parameters of the methods."""
    commands = [section(name, kind) for name, kind in COMMANDS.items()]
    return "\n".join([HEAD, *commands, PARAMETERS_HEAD, *map(parameters, own_methods())])


def section(name: str, kind: type[OptionSet]) -> str:
    """Return the part of one command: what it does, and its options."""
    text = re.sub(r"\n {4}", "\n", (kind.__doc__ or "").strip()).replace("``", "`")
    return "\n".join([f"## {name}", "", text, "", *map(item, leaves(kind)), ""])


def item(leaf: Option) -> str:
    """Return an option as an item of a list."""
    names = [f"`{flag}`" for flag in (*leaf.short, leaf.flag)]
    if leaf.kind is dict:
        names = [f"`{leaf.name}.KEY=VALUE`"]
    metavar = "" if leaf.positional or not leaf.metavar else f" *{leaf.metavar}*"
    hint = " Required." if leaf.default is MISSING else f" Default: `{leaf.shown}`." if leaf.shown else ""
    return f"- {', '.join(names)}{metavar}: {leaf.help}{hint}"


def parameters(method: type[Method]) -> str:
    """Return the part of one method: what it does, and its parameters."""
    lines = [f"### {method.name}", "", what_it_does(method), ""]
    lines += [parameter(method, f) for f in fields(method)] or ["It has no parameters."]
    return "\n".join([*lines, ""])


def parameter(method: type[Method], f: Field[Any]) -> str:
    """Return a parameter as an item of a list, with its bounds, and what the docstring of its class says of it."""
    signs = {"above": ">", "least": "≥", "most": "≤"}
    bounds = [f"{sign} {f.metadata[key]:g}" for key, sign in signs.items() if f.metadata.get(key) is not None]
    within = f" ({', '.join(bounds)})" if bounds else ""
    entry = rf"\n    {f.name}: (.*(?:\n {{8}}.*)*)"
    found = [re.search(entry, inspect.cleandoc(cls.__doc__ or "")) for cls in method.__mro__]
    said = next(filter(None, found), None)
    if said is None:
        sys.exit(f"{method.__name__} says nothing of {f.name}: its docstring needs it under Args")
    meaning = re.sub(r"\s+", " ", said[1]).replace("``", "`")
    return f"- `{field_help(f).removesuffix('=…')}`{within}: {meaning}"


def own_methods() -> list[type[Method]]:
    """Return the methods of the package."""
    return [method for method in METHODS.values() if method.__module__.startswith("rope_patch.")]


def methods_page() -> str:
    """Return docs/methods.md with the methods as their classes say."""
    return with_table(METHODS_PAGE, [METHODS_HEAD, "|---|---|---|", *map(in_the_list, own_methods())])


def measured_page() -> str:
    """Return docs/results/tables.md with the table of every method as the results have it."""
    rows = [MEASURED_HEAD, "|---|---:|---:|"]
    for method in MEASURED:
        cells = [untrained(method, checkpoint) for checkpoint in ("llama", "gemma3")]
        rows.append(f"| `{method.removesuffix(':factor=4')}` | {' | '.join(cells)} |")
    return with_table(MEASURED_PAGE, rows)


def with_table(path: Path, rows: list[str]) -> str:
    """Return a page with other rows in the table that has the first of these as its head."""
    before, head, after = path.read_text(encoding="utf-8").partition(rows[0])
    if not head:
        sys.exit(f"{path} holds no table that begins with {rows[0]}")
    return before + "\n".join(rows) + "\n\n" + after.partition("\n\n")[2]


def in_the_list(method: type[Method]) -> str:
    """Return a method as a row of the list: the page with its formula, what it does, and how it is written."""
    formula = f"\ndef {method.name}(i, f)"
    pages = [page for page in sorted((ROOT / "docs" / "methods").glob("*.md")) if formula in page.read_text("utf-8")]
    if not pages:
        sys.exit(f"no page of docs/methods has the formula of {method.name}: def {method.name}(i, f)")
    plain = RotaryTable(geometric(1e4, 8), 1.0, 1e4, "default", 4096, path="").plain()
    encoding = method().for_target(plain, 16384 if method().needs_target else None).rope_parameters(plain)
    form = "`longrope` form"
    if method is Default:
        form = "as found"
    elif encoding is not None:
        form = f"`{encoding['rope_type']}`"
    return f"| [`{method.name}`](methods/{pages[0].name}) | {what_it_does(method)} | {form} |"


def what_it_does(method: type[Method]) -> str:
    """Return the first line of the docstring of a method."""
    return (method.__doc__ or "").strip().splitlines()[0].replace("``", "`")


def families_page() -> str:
    """Return docs/families.md as the results have it."""
    report = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text(encoding="utf-8"))
    rows = report["results"]
    versions = ", ".join(f"{name} {report['environment'][name]}" for name in ("transformers", "peft", "torch"))
    lines = [HEAD_OF_FAMILIES.format(versions=versions, total=len(rows))]
    lines += [f"| {result} | {report['counts'].get(result, 0)} | {meaning} |" for result, meaning in RESULTS.items()]
    lines += ["", "| type | result | reason |", "|---|---|---|"]
    for row in rows:
        if row["result"] not in (LISTED, "no rotary table"):
            reason = textwrap.shorten(row["reason"], 60, placeholder=" …").replace("|", "\\|")
            lines.append(f"| `{row['type']}` | {row['result']} | {reason} |")
    names = [f"`{row['type']}`" for row in rows if row["result"] == LISTED]
    lines += ["", f"## {LISTED.capitalize()}", "", ", ".join(names)]
    return "\n".join([*lines, ""])


def untrained(method: str, checkpoint: str) -> str:
    """Return perplexity within and beyond the trained context, and the share of passkeys found, at 4 times it."""
    like = {"checkpoint": checkpoint, "factor": 4, "method": method}
    results = ROOT / "benchmarks" / "results" / "every_method.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    (row,) = [row for row in rows if like.items() <= row.items()]
    found, asked = row["passkeys"]
    return f"{row['within']:.1f}, {row['beyond']:.1f}, {found / asked:.2f}"


if __name__ == "__main__":
    pages = {PAGE: page(), METHODS_PAGE: methods_page(), MEASURED_PAGE: measured_page(), FAMILIES_PAGE: families_page()}
    for path, text in pages.items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not current: make commands")
