"""The ``rope-patch`` command: finds the subcommand, runs it and shows errors."""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rope_patch.cli.parsing import UsageError, described, parse_words
from rope_patch.options import COMMANDS
from rope_patch.reports.plots import require_matplotlib
from rope_patch.runtime.command import run_and_exit
from rope_patch.runtime.progress import listen
from rope_patch.runtime.text import did_you_mean

ABOUT = (
    "Adapt Hugging Face checkpoints to longer contexts by changing their rotary position embeddings.",
    "A method, such as yarn or p_rope, computes a new table of rotary frequencies; rope-patch methods lists all of "
    "them. A patched checkpoint is one whose table was replaced; plain transformers loads it.",
    "Lengths are numbers of tokens, written as 8192 or 8k. rope-patch COMMAND --help describes a command.",
)

UNPARSED = ("finetune", "kv-check")
"""The commands that look at their words before these are parsed, for ``--smoke`` and ``--list``."""


def main() -> None:
    """Run the ``rope-patch`` command."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns about missing kernels that no command uses
    run_and_exit(lambda: dispatch(sys.argv[1:]))


def dispatch(words: Sequence[str]) -> int:
    """Run the command that the first word names, and return its exit status.

    Raises:
        UsageError: there is no such command.
    """
    name, *rest = words or ("",)
    if name == "--version":
        from rope_patch.version import __version__

        print(f"rope-patch {__version__}")
        return 0
    if name in ("", "--help", "-h"):
        print(help_text())
        return 0 if name else 2
    if "--serve" in rest:  # plan --serve has options of its own
        rest.remove("--serve")
        name += " --serve"
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}.{did_you_mean(name, COMMANDS)} rope-patch --help lists all of them")
    given: Any = rest
    if name not in UNPARSED:
        given = parse_words(COMMANDS[name], rest)
        if getattr(given, "report", False):  # a report has figures
            require_matplotlib()
    # Only the module of this command is imported, and --help has ended the process by now, so that it is fast.
    module = name.replace(" --", "_").replace("-", "_")
    run: Callable[[Any], int | None] = getattr(importlib.import_module(f"rope_patch.cli.{module}"), module)
    with listen(on_sentence=lambda sentence: print(sentence, file=sys.stderr)):
        return run(given) or 0


def help_text() -> str:
    """Return the help: the purpose of the package, and a sentence for each command."""
    width = min(shutil.get_terminal_size().columns, 120)
    longest = max(map(len, COMMANDS))
    lines = ["usage: rope-patch [--version] [--help] COMMAND ...", ""]
    for paragraph in ABOUT:
        lines += [textwrap.fill(paragraph, width), ""]
    for name, options in COMMANDS.items():
        sentence = described(options).partition("\n\n")[0]
        indent = " " * (longest + 4)
        lines.append(textwrap.fill(sentence, width, initial_indent=f"  {name:{longest}}  ", subsequent_indent=indent))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
