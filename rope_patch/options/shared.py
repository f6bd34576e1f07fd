"""Options that several commands have: the checkpoint, the patch, the machine and the output."""

from __future__ import annotations

from dataclasses import MISSING, asdict, dataclass
from pathlib import Path
from typing import Any

from rope_patch.options.fields import OptionSet, flag, option, path, tokens, whole, word
from rope_patch.runtime.text import parse_memory

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Patching(OptionSet):
    """The settings of a patch, which are arguments of :func:`rope_patch.apply`."""

    target_length: int | None = tokens(
        "The new context length. It is written into the config, and sets the scaling factor where the method gives "
        "none.",
        None,
    )
    layer_types: tuple[str, ...] | None = word(
        "The rotary table to patch, for models that have one per layer type, such as sliding_attention in Gemma 3. "
        "Repeat it for more. By default full_attention.",
        None,
        metavar="TYPE",
        name="layer-type",
        repeated=True,
    )
    freeze_at: int | None = tokens(
        "Needed for models whose rotary table changes with the length of the text (rope types dynamic and longrope): "
        "use the table of this length throughout.",
        None,
    )

    def arguments(self) -> dict[str, Any]:
        """Return the options as arguments of a function."""
        return asdict(self)


@dataclass(frozen=True)
class Machine(OptionSet):
    """The device and the data type that a model runs with."""

    device: str = word(
        "Where the model runs: auto (a GPU if there is one, otherwise the CPU), cpu, cuda, cuda:1, mps, xpu …, or "
        "balanced (spread over all GPUs).",
        "auto",
        metavar="DEVICE",
    )
    dtype: str = word(
        "The data type: auto (the checkpoint's; float32 if the CPU is slower in it), float32, bfloat16, float16.",
        "auto",
        metavar="DTYPE",
        choices=DTYPES,
    )
    threads: int | None = whole("The number of CPU threads. If it is not given, PyTorch decides.", None, least=1)


# --- single options --------------------------------------------------------------------------------------------------


def model(more: str = "", **options: Any) -> Any:
    """Return the field for a checkpoint or adapter."""
    return word(
        "A checkpoint or a PEFT adapter: a local folder, a Hugging Face hub id or a GGUF file. An adapter is loaded "
        f"onto its base model, with the rotary patch that it was trained under.{more}",
        metavar="MODEL",
        positional=True,
        **options,
    )


def applied_method() -> Any:
    """Return the field for the method that a command is about."""
    return word(
        "The method: a name such as yarn, or a method string such as yarn:factor=4. Several methods are joined with +. "
        "rope-patch methods lists all of them.",
        metavar="METHOD",
        positional=True,
    )


def parameters() -> Any:
    """Return the field for the parameters of a method."""
    return word(
        "The parameters of the method, which may also be written behind its name.",
        (),
        metavar="KEY=VALUE",
        positional=True,
        repeated=True,
    )


def programs(help: str) -> Any:
    """Return the field for programs."""
    return word(f"{help} Several names go into quotes, or repeat it.", (), metavar="PROGRAM", name="for", repeated=True)


def names_in(values: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in values, of which each may hold several."""
    return tuple(name for value in values for name in value.split())


def output(folder: str) -> Any:
    """Return the field for the folder of results, with its default."""
    return path("The folder to write the results to.", Path(folder), metavar="FOLDER", short=("-o",))


def new_output(
    help: str = "The folder to write. It must be new or empty, unless --force is given.", metavar: str = "FOLDER"
) -> Any:
    """Return the field for a new folder or file, which must be given."""
    return path(help, metavar=metavar, short=("-o",))


def methods(default: Any = MISSING) -> Any:
    """Return the field for the methods to compare."""
    return word(
        'The methods to compare, separated by spaces, for example "default yarn:factor=4 p_rope:p=0.5". "default" is '
        "the model as it is; rope-patch methods lists the others.",
        default,
        metavar="METHODS",
        several=True,
    )


def method() -> Any:
    """Return the field for a method that the model is patched with before anything else."""
    return word(
        "Patch the model with this method first, for example yarn:factor=4. Parameters are written as NAME:key=value, "
        "and several methods are joined with +.",
        None,
        metavar="METHOD",
    )


def chunk() -> Any:
    """Return the field for the number of tokens in a forward pass."""
    return tokens(
        "Read long inputs in chunks of this size: slower, but memory holds little more than the KV cache. By default "
        "each input is read at once, unless chunks are faster (models with sliding windows).",
        None,
    )


def gpu_memory(default: Any = 80.0) -> Any:
    """Return the field for the memory of a GPU, written as 24 or 24GB, with its default."""
    help = "The memory of one GPU in GiB, as nvidia-smi shows it."
    return option(help, default, metavar="GIB", kind=float, read=parse_memory, above=0)


def force() -> Any:
    """Return the field that allows overwriting the output."""
    return flag("Write the output even if that folder or file is already there.")


def report() -> Any:
    """Return the field for whether the HTML report is written."""
    return flag("Write the HTML report and its figures. It needs matplotlib: pip install 'rope_patch[plots]'.", True)


def as_json() -> Any:
    """Return the field for whether the result is printed as JSON."""
    return flag("Print the result as JSON, for use in scripts.", name="json")


# --- what commands begin with ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ImportOptions(OptionSet):
    """The option of a command that takes modules of the user's own, which are imported before it reads any other."""

    imports: tuple[str, ...] = word(
        "A Python module of yours to import first, which defines methods, tasks, metrics or cache formats: "
        "docs/your-own.md has one of each. Repeat it for more.",
        (),
        metavar="MODULE",
        name="import",
        repeated=True,
    )


@dataclass(frozen=True, kw_only=True)
class CommandOptions(ImportOptions):
    """The options of a command that also prints its result as JSON."""

    as_json: bool = as_json()
