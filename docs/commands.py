"""What is generated of the pages: commands, parameters, measured methods, and model families.

python docs/commands.py            # writes docs/commands.md, docs/families.md and a table in docs/methods.md
python docs/commands.py --check    # fails where one is not current, as `make check` asks
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from rope_patch.methods import METHODS, Method, field_help
from rope_patch.options import COMMANDS
from rope_patch.options.fields import Option, OptionSet, leaves

PAGE = Path(__file__).with_name("commands.md")
METHODS_PAGE = PAGE.with_name("methods.md")
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
rope-patch tasks
rope-patch recipes copy my-recipes
```

Lengths are numbers of tokens, written as 8192 or 8k; lists are one word, separated by spaces or commas. Long commands
say first how many tokens they read and how long that takes ([less or more](measure.md)). Every command has `--help`.
This page is made from the options by `docs/commands.py`.
"""


HEAD_OF_PARAMETERS = """\
## Parameters of the methods

A parameter is written behind the name of its method, as in `yarn:factor=4:beta_fast=16`. One that is shown without a
default may be left out.
"""
MEANINGS = {
    "attention_factor": "the factor on cos and sin; left out, the method computes it",
    "attention_scaling": "the factor on cos and sin; left out, the checkpoint's own",
    "beta_fast": "pairs that make more full turns than this within the trained context keep their frequency",
    "beta_slow": "pairs that make fewer full turns than this are divided by the whole factor",
    "context": "pairs without a full turn within so many tokens stop; left out, the trained context",
    "cutoff_low": "frequencies up to this one become 0; those between the two cutoffs become `floor` [rad/token]",
    "cutoff_high": "frequencies from this one on stay [rad/token]",
    "factor": "the new context divided by the stated one; left out, it follows from the target length",
    "factors": "a divisor for each pair, fast to slow, joined by `/`; left out, all are 1",
    "floor": "the frequency of the pairs between the two cutoffs [rad/token]",
    "high_freq_factor": "pairs that make at least so many full turns keep their frequency",
    "layer_type": "the layers whose table is replaced, for example `full_attention`; left out, all of them",
    "low_freq_factor": "pairs that make at most so many full turns are divided by the whole factor",
    "mscale": "with `mscale_all_dim`: DeepSeek's ratio on cos and sin",
    "mscale_all_dim": "with `mscale`: DeepSeek's ratio on cos and sin",
    "original_max_position_embeddings": "the context before any scaling; left out, the one that the checkpoint says",
    "p": "the share of the pairs that rotate, rounded down to whole pairs",
    "rope_theta": "the new base; 500000 where `factor` is left out, too",
    "temperature": "attention logits are multiplied by `1 + temperature * ln(factor)`",
    "truncate": "whether both ends of the ramp are rounded outwards to whole pairs",
    "values": "a frequency for each pair, fast to slow, joined by `/` [rad/token]; left out, the checkpoint's own",
    "abf factor": "in place of `rope_theta`: multiplies the checkpoint's base",
    "longrope factor": "sets the default of `attention_factor` and nothing else",
    "nope factor": "for `temperature`: the length of the texts divided by that of the training",
}
"""What a parameter does, by its name; where methods differ, by the names of both."""

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

Which of the {total} causal language model types of transformers can be patched. `rope-patch doctor MODEL` looks at a
checkpoint itself, whose options may differ from its type's default config.

```bash
python -m pytest tests/families -m full -n 2 --write
python docs/commands.py
```

write this page, here with {versions}; without `--write` a changed result
fails a test. Every type is built as a tiny random model and patched with `yarn`, `abf`, `p_rope` and a halved `table`.
Eleven checks follow. Perplexity and the training loss must be the model's own. The others hold to the last bit: among
them that the logits change, generation with a cache, saving and loading without `rope_patch`, a cast to bfloat16, a
LoRA adapter (under the first method), and restoring
([results](../benchmarks/results/families.json)). A check that fails without a patch too does not count. `doctor` must
say OK before a patch, and under `yarn` and `p_rope`.

| result | types | meaning |
|---|---|---|"""
RESULTS = {
    "works": "every check passes, with every method that is not refused",
    "fails": "a check fails, or an error gives no reason or a wrong one",
    "refused": "`apply` raises an error that gives the reason, and changes nothing",
    "no rotary table": "the model has no rotary embedding, or one without a table of frequencies",
    "not built": "no tiny model could be built, or it does not run by itself",
}
"""The results of a family, and what they mean."""
LISTED = ("works", "no rotary table")
"""Results whose types are listed by name alone; types with another result are listed with the reason."""


def page() -> str:
    """Return the page as Markdown."""
    commands = [section(name, kind) for name, kind in COMMANDS.items()]
    own = [method for method in METHODS.values() if method.__module__.startswith("rope_patch.")]
    return "\n".join([HEAD, *commands, HEAD_OF_PARAMETERS, *map(parameters, own)])


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
    what = (method.__doc__ or "").strip().splitlines()[0].replace("``", "`")
    lines = [f"### {method.name}", "", what, ""]
    lines += [parameter(method.name, f) for f in fields(method)] or ["It has no parameters."]
    return "\n".join([*lines, ""])


def parameter(method: str, f: Field[Any]) -> str:
    """Return a parameter as an item of a list, with its bounds."""
    signs = {"above": ">", "least": "≥", "most": "≤"}
    bounds = [f"{sign} {f.metadata[key]:g}" for key, sign in signs.items() if f.metadata.get(key) is not None]
    within = f" ({', '.join(bounds)})" if bounds else ""
    meaning = MEANINGS.get(f"{method} {f.name}") or MEANINGS.get(f.name)
    return f"- `{field_help(f).removesuffix('=…')}`{within}" + (f": {meaning}." if meaning else "")


def methods_page() -> str:
    """Return docs/methods.md with the measured table as the results have it."""
    before, head, after = METHODS_PAGE.read_text(encoding="utf-8").partition(MEASURED_HEAD)
    if not head:
        sys.exit(f"{METHODS_PAGE} holds no table that begins with {MEASURED_HEAD}")
    rows = [head, "|---|---:|---:|"]
    for method in MEASURED:
        cells = [untrained(method, checkpoint) for checkpoint in ("llama", "gemma3")]
        rows.append(f"| `{method.removesuffix(':factor=4')}` | {' | '.join(cells)} |")
    return before + "\n".join(rows) + "\n\n" + after.partition("\n\n")[2]


def families_page() -> str:
    """Return docs/families.md as the results have it."""
    report = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text(encoding="utf-8"))
    rows = report["results"]
    versions = ", ".join(f"{name} {report['environment'][name]}" for name in ("transformers", "peft", "torch"))
    lines = [HEAD_OF_FAMILIES.format(versions=versions, total=len(rows))]
    lines += [f"| {result} | {report['counts'].get(result, 0)} | {meaning} |" for result, meaning in RESULTS.items()]
    lines += ["", "| type | result | reason |", "|---|---|---|"]
    for row in rows:
        if row["result"] not in LISTED:
            reason = textwrap.shorten(row["reason"], 100, placeholder=" …").replace("|", "\\|")
            lines.append(f"| `{row['type']}` | {row['result']} | {reason} |")
    for result in LISTED:
        names = [f"`{row['type']}`" for row in rows if row["result"] == result]
        lines += ["", f"## {result.capitalize()}", "", ", ".join(names)]
    return "\n".join([*lines, ""])


def untrained(method: str, checkpoint: str) -> str:
    """Return perplexity within and beyond the trained context, and the passkeys found, at 4 times without training."""
    like = {"checkpoint": checkpoint, "factor": 4, "method": method}
    results = ROOT / "benchmarks" / "results" / "every_method.json"
    rows = json.loads(results.read_text(encoding="utf-8"))["rows"]
    (row,) = [row for row in rows if like.items() <= row.items()]
    found, asked = row["passkeys"]
    return f"{row['within']['perplexity']:.1f}, {row['beyond']['perplexity']:.1f}, {found}/{asked}"


if __name__ == "__main__":
    pages = {PAGE: page(), METHODS_PAGE: methods_page(), FAMILIES_PAGE: families_page()}
    for path, text in pages.items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not current: make commands")
