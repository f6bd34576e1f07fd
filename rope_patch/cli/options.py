"""Every option that several commands share, defined once, and how commands print; ``loading`` has what loads models.

Options that count tokens take 8192 or 8k. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.printing import command_line as command_line
from rope_patch.cli.printing import print_json as print_json
from rope_patch.runtime.text import parse_duration, parse_length

RESULT_CACHE = "finished.jsonl"
"""Finished work, in the output folder: the same command reads it when it is run again."""


class OptionError(TypeError):
    """A wrong value of an option; typer lets it pass, and :func:`rope_patch.cli.app.guarded` prints it in one line."""


# --- values ----------------------------------------------------------------------------------------------------------


def items(text: str) -> list[str]:
    """Return the items of a list that is separated by commas or spaces."""
    return text.replace(",", " ").split()


def depth(text: str) -> float:
    """Return the depth of an answer in a prompt.

    Raises:
        ValueError: no number.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a depth is a number from 0 to 1, got {text!r}") from None


def value_of(option: str, read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a parser for typer, whose error names the option; what is a value already, as a default is, stays.

    >>> value_of("--chunk", parse_length)("8k"), value_of("--chunk", parse_length)(8192)
    (8192, 8192)
    """

    def parse(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return read(value)
        except ValueError as error:
            raise OptionError(f"{option}: {error}") from None

    return parse


def list_of(option: str, read: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Return a parser for typer of a list in one value, separated by commas or spaces.

    >>> list_of("--lengths", parse_length)("4k, 512")
    [4096, 512]
    """
    return value_of(option, lambda text: [read(item) for item in items(text)])


def tokens(option: str, description: str, **settings: Any) -> Any:
    """Return an option that counts tokens, written as 8192 or 8k."""
    return typer.Option(option, parser=value_of(option, parse_length), metavar="TOKENS", help=description, **settings)


def _import(modules: list[str] | None) -> list[str] | None:
    if modules:
        from rope_patch.evaluation.importing import import_modules

        import_modules(modules)
    return modules


# --- what is read and written ----------------------------------------------------------------------------------------

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint or a PEFT adapter: a local folder, a Hugging Face hub id or a GGUF file. An adapter is "
        "loaded onto its base model, with the rotary patch that it was trained under.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A checkpoint: a local folder, a Hugging Face hub id or a GGUF file.",
        show_default=False,
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write the results to.")]
NewFolder = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        help="The folder to write. It must be new or empty, unless --force is given.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Write the output even if that folder or file is already there.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for use in scripts.")]
Report = Annotated[
    bool, typer.Option(help="Write the HTML report. It needs matplotlib: pip install 'rope_patch[plots]'.")
]

# --- the patch -------------------------------------------------------------------------------------------------------

Import = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        callback=_import,
        is_eager=True,
        help="A Python module of yours to import first, which defines methods, retrieval tasks or metrics. Repeat it "
        "for more.",
        show_default=False,
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="METHOD",
        help="Patch the model with this method first, for example yarn:factor=4. Parameters are written as "
        "NAME:key=value, and several methods are joined with +.",
        show_default=False,
    ),
]
Methods = Annotated[
    Sequence[str],
    typer.Option(
        "--methods",
        parser=value_of("--methods", items),
        metavar="METHODS",
        help='The methods to compare, separated by spaces, for example "default yarn:factor=4 p_rope:p=0.5". "default" '
        "is the model as it is; rope-patch methods lists the others.",
    ),
]
Replace = Annotated[
    bool,
    typer.Option(
        "--replace", help="If the model is patched already, replace that patch; without this, it is an error."
    ),
]

# --- the evaluation --------------------------------------------------------------------------------------------------

Lengths = Annotated[
    Sequence[int],
    typer.Option(
        "--lengths",
        parser=list_of("--lengths", parse_length),
        metavar="TOKENS",
        help='The prompt lengths of the retrieval task, for example "4k 16k 32k". Perplexity is measured on text as '
        "long as the longest.",
        show_default=False,
    ),
]
Text = Annotated[
    Path | None,
    typer.Option(
        "--text",
        metavar="PATH",
        help="The text for perplexity: a file, or a folder of .txt files. By default, text that ships with Python.",
        show_default=False,
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        "--budget",
        parser=value_of("--budget", parse_duration),
        metavar="TIME",
        help="The time to aim at, such as 5m, 30m or 2h, by the measured speed of the model. Less text is read then, "
        "and fewer prompts where there are any, so that intervals get wider; the command says what else is left out.",
        show_default=False,
    ),
]
Haystack = Annotated[
    str,
    typer.Option(
        "--haystack",
        metavar="NAME|PATH",
        help="The text that the retrieval task hides its answers in: noise (a few sentences repeated), builtin (text "
        "that ships with Python, mostly code), or a file or folder of yours.",
    ),
]
ChatTemplate = Annotated[
    str,
    typer.Option(
        "--chat-template",
        metavar="auto|on|off",
        help="Whether retrieval prompts go through the chat template of the tokenizer. auto means: if it has one.",
    ),
]
Tasks = Annotated[
    Sequence[str],
    typer.Option(
        "--tasks",
        parser=list_of("--tasks", str),
        metavar="TASKS",
        help="The retrieval tasks, separated by spaces: passkey (one number), niah (a number for a word), multivalue, "
        "multiquery, vt (variable tracking), niah_multikey_2, niah_multikey_3, json_kv, passage_retrieval, cwe and fwe "
        "(common and frequent words), or qa1, qa2 and qa3 (facts of a story).",
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        "--mode", metavar="MODE", help="single (each prompt hides one answer) or multikey (one at every depth)."
    ),
]
Depths = Annotated[
    Sequence[float],
    typer.Option(
        "--depths",
        parser=list_of("--depths", depth),
        metavar="DEPTHS",
        help="Where in the prompt the answer is hidden, separated by spaces: 0 is the start, 1 the end.",
    ),
]
Samples = Annotated[
    int,
    typer.Option("--samples", metavar="COUNT", help="The number of haystacks for each task and length."),
]
Windows = Annotated[
    int | None,
    typer.Option(
        "--windows",
        metavar="COUNT",
        help="The number of pieces of text that perplexity is measured on, each as long as the longest length. By "
        "default 16, or fewer if the text is too short or the model is large.",
        show_default=False,
    ),
]
LongPPL = Annotated[
    bool,
    typer.Option(
        "--longppl/--no-longppl",
        help="Measure LongPPL too (arXiv:2410.23771): the perplexity over the tokens that the unpatched model predicts "
        "well only with a long context. They are chosen once, which takes several times as long as reading the text.",
    ),
]
Chunk = Annotated[
    int | None,
    tokens(
        "--chunk",
        "Read long inputs in chunks of this size: slower, but memory holds little more than the KV cache. By default "
        "each input is read at once.",
        show_default=False,
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="NUMBER", help="The random seed: it decides what is drawn, such as prompts.")
]

# --- the machine -----------------------------------------------------------------------------------------------------

Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Where the model runs: auto (a GPU if there is one, otherwise the CPU), cpu, cuda, cuda:1 …, or balanced "
        "(spread over all GPUs; needs the accelerate package).",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="The data type: auto (the checkpoint's; float32 if the CPU is slower in it), float32, bfloat16, float16.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="COUNT",
        min=1,
        help="The number of CPU threads. If it is not given, PyTorch decides.",
    ),
]
GpuMemory = Annotated[
    float,
    typer.Option("--gpu-memory", metavar="GIB", help="The memory of one GPU in GiB, as nvidia-smi shows it."),
]

# --- what commands print ---------------------------------------------------------------------------------------------


def chosen(command: typer.Context) -> set[str]:
    """Return the parameters of a running command that were given on the command line."""
    sources = {name: command.get_parameter_source(name) for name in command.params}
    return {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}


@contextlib.contextmanager
def resumable(saved: Path, *, again: str = "the same command") -> Iterator[None]:
    """Where the user interrupts this block, say where finished work is, and how to continue.

    Args:
        saved: file or folder of the finished work; nothing is printed where it does not exist.
        again: the command that continues.
    """
    try:
        yield
    except KeyboardInterrupt:
        if saved.exists():
            print(f"Finished work is saved in {saved}. Run {again} again to continue from there.", file=sys.stderr)
        raise
