"""The page of all commands and the YAML file of all options of a recipe, made from the options.

python docs/commands.py            # writes docs/commands.md and recipes/configs/lora.yaml
python docs/commands.py --check    # fails where one is not current, as `make check` asks
"""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING
from pathlib import Path

from rope_patch.options import COMMANDS
from rope_patch.options.fields import Option, OptionSet, leaves
from rope_patch.options.finetune import RecipeOptions
from rope_patch.options.yaml_and_json import from_dict, to_yaml

PAGE = Path(__file__).with_name("commands.md")
RECIPE = PAGE.parents[1] / "recipes" / "configs" / "lora.yaml"
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
say first how many tokens they read, and `--budget 30m` reads what fits into a time. Every command has `--help`. This
page is made from the options by `docs/commands.py`.
"""


HEAD_OF_RECIPE = """\
# Every option with its default, and what it does. Copy what you change; the rest may be left out. Three options have no
# default: model.name, data.length and output. This file is made by `docs/commands.py`.
#
#   python recipes/finetune_lora.py recipes/configs/lora.yaml --smoke
#   python recipes/finetune_lora.py recipes/configs/lora.yaml model.name=FOLDER patch.method=yarn data.length=32k \\
#       output=out
#
# Of several files, later ones replace values of earlier ones; key=value overrides (train.steps=100) replace both.
"""


def recipe() -> str:
    """Return every option of a recipe as YAML; the length of the rows is a comment, since it must be chosen."""
    required = {"model": {"name": "llama"}, "data": {"length": "32k"}, "output": "build/finetuned"}
    text = to_yaml(from_dict(RecipeOptions, required))
    return HEAD_OF_RECIPE + text.replace("\n  length: 32k\n", "\n  # length: 32k\n")


def page() -> str:
    """Return the page as Markdown."""
    return "\n".join([HEAD, *(section(name, kind) for name, kind in COMMANDS.items())])


def section(name: str, kind: type[OptionSet]) -> str:
    """Return the part of one command: what it does, and its options."""
    text = re.sub(r"\n {4}", "\n", (kind.__doc__ or "").strip()).replace("``", "`")
    return "\n".join([f"## {name}", "", text, "", *map(item, leaves(kind)), ""])


def item(leaf: Option) -> str:
    """Return an option as an item of a list."""
    names = [f"`{flag}`" for flag in (*leaf.short, leaf.flag)]
    metavar = "" if leaf.positional or not leaf.metavar else f" *{leaf.metavar}*"
    hint = " Required." if leaf.default is MISSING else f" Default: `{leaf.shown}`." if leaf.shown else ""
    return f"- {', '.join(names)}{metavar}: {leaf.help}{hint}"


if __name__ == "__main__":
    for path, text in ((PAGE, page()), (RECIPE, recipe())):
        if sys.argv[1:] != ["--check"]:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not current: make commands")
