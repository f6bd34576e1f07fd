"""The ``rope-patch`` command: parsing and printing only."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from rope_patch.cli.analyze import analyze
from rope_patch.cli.apply import apply
from rope_patch.cli.audit import audit
from rope_patch.cli.compare import compare
from rope_patch.cli.demo import demo
from rope_patch.cli.export import export
from rope_patch.cli.extend import extend
from rope_patch.cli.finetune import finetune
from rope_patch.cli.fit import fit
from rope_patch.cli.inspect import inspect
from rope_patch.cli.kv_check import kv_check
from rope_patch.cli.methods import methods
from rope_patch.cli.plan import plan
from rope_patch.cli.recipes import recipes
from rope_patch.cli.restore import restore
from rope_patch.cli.tasks import tasks
from rope_patch.cli.theory import theory
from rope_patch.cli.verify import verify

app = typer.Typer(
    help="Adapt Hugging Face checkpoints to longer contexts by changing their rotary position embeddings.\n\n"
    "A method, such as yarn or p_rope, computes a new table of rotary frequencies; **rope-patch methods** lists all of "
    "them. A patched checkpoint is one whose table was replaced; plain transformers loads it.\n\n"
    "Lengths are numbers of tokens, written as 8192 or 8k.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(recipes, name="recipes")
for command in (
    *(
        extend,
        methods,
        inspect,
        apply,
        verify,
        restore,
        tasks,
        compare,
        plan,
        finetune,
        theory,
        analyze,
        kv_check,
        fit,
        export,
    ),
    *(audit, demo),
):
    app.command(command.__name__.replace("_", "-"))(command)


def _version(requested: bool) -> None:
    if requested:
        from rope_patch import __version__

        print(f"rope-patch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the ``rope-patch`` command."""
    run(app)


def run(app: typer.Typer) -> None:
    """Run a command; errors of the user's making are one line on stderr."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports missing kernels that no command uses
    try:
        app()
    except (KeyboardInterrupt, SystemExit) as stop:  # typer turns Ctrl-C into a silent exit
        if isinstance(stop, SystemExit) and stop.code != 130:
            raise
        print("interrupted: no file was left half written", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("ROPE_PATCH_DEBUG"):
            raise
        hint = (
            ': pip install "rope_patch[plots]", or give --no-report'
            if "No module named 'matplotlib" in str(error)
            else ""
        )
        system = isinstance(error, OSError) and error.filename is not None and error.strerror is not None
        message = f"{str(error.filename)!r}: {error.strerror.lower()}" if system else str(error)  # type: ignore[union-attr]
        print(f"error: {message}{hint}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # of a library: its name helps
        if os.environ.get("ROPE_PATCH_DEBUG"):
            raise
        message = " ".join(str(error).split())[:500]
        print(f"error: {type(error).__name__}: {message} (ROPE_PATCH_DEBUG=1 shows where)", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
