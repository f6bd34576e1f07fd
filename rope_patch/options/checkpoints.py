"""The options of commands that read, patch and check a checkpoint without running it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rope_patch.options import shared
from rope_patch.options.fields import contained, flag, path, word
from rope_patch.options.shared import CommandOptions, ImportOptions, Patching


@dataclass(frozen=True)
class ApplyOptions(CommandOptions, command="apply"):
    """Write a copy of a checkpoint with patched rotary tables, which transformers loads without this package.

    Only the config changes. The weights are copied byte for byte and never loaded. If MODEL is a GGUF file, the output
    is one too, which llama.cpp runs: only its table changes.

    Example: ``rope-patch apply ./llama abf rope_theta=500000 -o ./llama-abf``
    """

    model: str = word(
        "A checkpoint: a local folder, a Hugging Face hub id or a GGUF file.", metavar="MODEL", positional=True
    )
    method: str = shared.applied_method()
    output: Path = shared.new_output(
        "The output folder, or the output file if MODEL is a GGUF file. A folder must be new or empty, and a file new, "
        "unless --force is given.",
        "PATH",
    )
    parameters: tuple[str, ...] = shared.parameters()
    patching: Patching = contained(Patching)
    replace: bool = flag("If the model is patched already, replace that patch; without this, it is an error.")
    force: bool = shared.force()


@dataclass(frozen=True)
class RestoreOptions(ImportOptions, command="restore"):
    """Write a copy of a patched checkpoint with the rotary tables that it had before the patch.

    A GGUF file is not restored: its patch was written into a copy.

    Example: ``rope-patch restore ./llama-abf -o ./llama``
    """

    model: str = word(
        "A patched checkpoint: a local folder or a Hugging Face hub id.", metavar="MODEL", positional=True
    )
    output: Path = shared.new_output()
    force: bool = shared.force()


@dataclass(frozen=True)
class DoctorOptions(CommandOptions, command="doctor"):
    """Check any checkpoint: is the rotary table in use the table that was meant? Also in other programs.

    The table that transformers computes is compared with the config and with the patch record, if there is one; the
    stated contexts, the weights files and leftovers of other saves are checked. Then it prints what transformers 4,
    vLLM, SGLang, llama.cpp and MLX compute from the same files and, where a program differs, why and what to run. Only
    the config and the headers of files are read, not the weights. Models in memory: ``rope_patch.doctor(model)``.

    The exit status is 0 if all checks hold, 1 if something differs, and 3 if a check could not be made. Other programs
    count only if they are named with ``--for``.

    With ``--repair``, a copy of a patched folder is written with the config that its patch record describes.

    Examples: ``rope-patch doctor ./llama``, ``rope-patch doctor ./llama-yarn --for "vllm llama.cpp"``,
    ``rope-patch doctor ./llama-yarn --for vllm --python ~/vllm/bin/python``
    """

    model: str = shared.model()
    for_programs: tuple[str, ...] = shared.programs(
        "A program that will run this checkpoint: transformers-4, vllm, sglang, llama.cpp or mlx. What this program "
        "computes then counts for the exit status."
    )
    python: Path | None = path(
        "The Python of the environment in which the one program of --for is installed. That program is asked what it "
        "computes from these very files. SGLang cannot be asked.",
        None,
        metavar="PYTHON",
    )
    config_only: bool = flag("Do not check the weights files; they may be missing, as in a CI.")
    repair: bool = flag("Write a copy of a patched folder whose config was changed after the patch; needs -o.")
    output: Path | None = path(
        "With --repair: the folder to write, which must be new or empty.", None, metavar="FOLDER", short=("-o",)
    )

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        object.__setattr__(self, "for_programs", shared.names_in(self.for_programs))
        if self.repair != (self.output is not None):
            raise ValueError("--repair and -o FOLDER go together: a repaired copy is written into that folder")
        if self.repair and (self.config_only or self.for_programs or self.as_json):
            raise ValueError("--repair writes a folder and checks nothing: give MODEL and -o FOLDER alone")


@dataclass(frozen=True)
class SettingsOptions(CommandOptions, command="settings"):
    """Print what to write into your own configuration, so that a program runs an unchanged checkpoint under a method.

    Trainers and engines take the rotary settings of a config in ways of their own. What is printed is complete, ready
    to paste, and states the version of the program that it was written from. Only the config of the checkpoint is read.

    The exit status is 3 if a program that is named cannot state the table; then ``rope-patch apply`` writes a folder.

    Examples: ``rope-patch settings ./llama yarn --target-length 128k``,
    ``rope-patch settings ./llama yarn:factor=4 --for "trl vllm"``
    """

    model: str = shared.model()
    method: str = shared.applied_method()
    parameters: tuple[str, ...] = shared.parameters()
    patching: Patching = contained(Patching, without=("freeze_at",))
    for_programs: tuple[str, ...] = shared.programs(
        "A program: transformers, transformers-4, trl, axolotl, llama-factory, ms-swift, verl, vllm, sglang, llama.cpp "
        "or mlx. By default all of them."
    )

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        object.__setattr__(self, "for_programs", shared.names_in(self.for_programs))
