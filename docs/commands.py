"""The page of all commands, from their options.

python docs/commands.py            # writes docs/commands.md
python docs/commands.py --check    # fails where it is not current, as `make check` asks
"""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING
from pathlib import Path

from rope_patch.options import COMMANDS
from rope_patch.options.fields import Leaf, OptionSet, leaves

PAGE = Path(__file__).with_name("commands.md")
HEAD = """\
# Command line

```bash
rope-patch methods
rope-patch inspect smollm2-yarn
rope-patch apply smollm2-yarn p_rope p=0.5 --replace -o smollm2-p-rope
rope-patch verify smollm2-p-rope
rope-patch restore smollm2-p-rope -o smollm2-again
rope-patch plan Llama-3.1-8B --length 128k --gpu-memory 141
rope-patch theory --method p_rope:p=0.75 -o theory
rope-patch tasks
rope-patch recipes copy my-recipes
```

Lengths are numbers of tokens, written as 8192 or 8k; lists are one word, separated by spaces or commas. Long commands
say first how many tokens they read, and `--budget 30m` reads what fits into a time. Every command has `--help`. This
page is made from the options by `docs/commands.py`.
"""


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([HEAD, *(section(name, kind) for name, kind in COMMANDS.items())])


def section(name: str, kind: type[OptionSet]) -> str:
    """Return the part of one command: what it does, and its options."""
    text = re.sub(r"\n {4}", "\n", (kind.__doc__ or "").strip()).replace("``", "`")
    return "\n".join([f"## {name}", "", text, "", *map(item, leaves(kind)), ""])


def item(leaf: Leaf) -> str:
    """Return an option as an item of a list."""
    names = [f"`{flag}`" for flag in (*leaf.option.short, leaf.flag)]
    metavar = "" if leaf.option.positional or not leaf.option.metavar else f" *{leaf.option.metavar}*"
    hint = " Required." if leaf.default is MISSING else f" Default: `{leaf.shown}`." if leaf.shown else ""
    return f"- {', '.join(names)}{metavar}: {leaf.option.help}{hint}"


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        sys.exit("docs/commands.md is not current: make commands")
