"""The options of commands that read, patch and check a checkpoint without running it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.fields import OptionSet, contained, flag, word
from rope_patch.options.shared import Patching

_NEW_CHECKPOINT = (
    "The output folder, or the output file if MODEL is a GGUF file. A folder must be new or empty, and a file new, "
    "unless --force is given."
)


@dataclass(frozen=True)
class InspectOptions(OptionSet, command="inspect"):
    """Show the rotary tables of a checkpoint or adapter: type, wavelengths, scaling, and the patch that made them.

    Only the config is read, or the header of a GGUF file, not the weights.

    Example: ``rope-patch inspect ./llama``
    """

    model: str = shared.model()
    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()


@dataclass(frozen=True)
class ApplyOptions(OptionSet, command="apply"):
    """Write a copy of a checkpoint with patched rotary tables, which transformers loads without this package.

    Only the config changes. The weights are copied byte for byte and never loaded. If MODEL is a GGUF file, the output
    is one too, which llama.cpp runs: only its table changes.

    Example: ``rope-patch apply ./llama abf rope_theta=500000 -o ./llama-abf``
    """

    model: str = shared.checkpoint()
    method: str = word(
        "The method: a name such as yarn, or a method string such as yarn:factor=4. Several methods are joined with +; "
        "METHOD@LENGTH leaves texts of up to that many tokens as they are. rope-patch methods lists all of them.",
        metavar="METHOD",
        positional=True,
    )
    output: Path = shared.new_output(_NEW_CHECKPOINT, "PATH")
    parameters: tuple[str, ...] = word(
        "The parameters of the method, if METHOD is only a name.",
        (),
        metavar="KEY=VALUE",
        positional=True,
        repeated=True,
    )
    patching: Patching = contained(Patching)
    replace: bool = flag("If the model is patched already, replace that patch; without this, it is an error.")
    force: bool = shared.force()
    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()

    def params(self) -> dict[str, str]:
        """Return the parameters of the method by name.

        Raises:
            ValueError: a word that is not of the form key=value.
        """
        params = {}
        for item in self.parameters:
            key, equals, value = item.partition("=")
            if not (equals and key and value):
                raise ValueError(f"expected key=value after the method, got {item!r}")
            params[key] = value
        return params


@dataclass(frozen=True)
class VerifyOptions(OptionSet, command="verify"):
    """Check that a patched checkpoint or adapter still has the rotary tables that were recorded when it was patched.

    The command fails if the patch was lost or changed, or if a file of weights is damaged. Of a GGUF file its keys and
    factors are compared with the record.

    Example: ``rope-patch verify ./llama-abf``
    """

    model: str = shared.model()
    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()


@dataclass(frozen=True)
class RestoreOptions(OptionSet, command="restore"):
    """Write a copy of a patched checkpoint with the rotary tables that it had before the patch.

    A GGUF file is not restored: its patch was written into a copy.

    Example: ``rope-patch restore ./llama-abf -o ./llama``
    """

    model: str = word(
        "A patched checkpoint: a local folder or a Hugging Face hub id.", metavar="MODEL", positional=True
    )
    output: Path = shared.new_output()
    force: bool = shared.force()
    imports: tuple[str, ...] = shared.imports()


@dataclass(frozen=True)
class AuditOptions(OptionSet, command="audit"):
    """Show which rotary table each program will compute from a checkpoint, where they disagree, why, and what to run.

    Programs read the same config.json in different ways: some ignore a factor, a share, or everything but the base,
    without a word. For each layer type this prints the table, the factor on cos and sin and the context that
    transformers 5, transformers 4, vLLM, SGLang and llama.cpp compute. Only the config is read, or the header of a
    GGUF file, not the weights. For llama.cpp a folder is read as its own converter writes it. The reference is
    transformers 5, and for a GGUF file llama.cpp: transformers' own reader leaves out most of its table.

    The exit status is 0 if all programs agree and 3 if one computes something else. Programs that refuse the
    checkpoint, or whose code was not compared on such models ("unverified"), do not affect the exit status, and neither
    does transformers' reader of a GGUF file.

    With ``--method`` the checkpoint is one that has no patch. The options that are printed are checked to give the very
    table of the method; where a program's options cannot say it, the reason and the command that works instead are
    printed, and the exit status is 3.

    Examples: ``rope-patch audit ./llama-yarn --engine vllm``, ``rope-patch audit ./llama --method yarn:factor=4``
    """

    model: str = shared.checkpoint()
    engines: tuple[str, ...] = word(
        "A program to compare with transformers 5: transformers-4, vllm, sglang or llama.cpp. "
        "Repeat it for more. By default all of them.",
        (),
        metavar="ENGINE",
        name="engine",
        repeated=True,
    )
    method: str | None = word(
        "Print the options by which vLLM, SGLang and llama.cpp run this unchanged checkpoint under a method, for "
        "example yarn:factor=4.",
        None,
        metavar="METHOD",
    )
    patching: Patching = contained(Patching, without=("freeze_at",))
    imports: tuple[str, ...] = shared.imports()
    as_json: bool = shared.as_json()

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.method is None and self.patching != Patching():
            raise ValueError("--target-length and --layer-type go with --method: name one, or leave them out")
