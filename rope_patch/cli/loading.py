"""Functions of all commands that run a model: processes, device, data type, tokenizer and model."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rope_patch.options.shared import Machine

BALANCED = "balanced"
"""The name for all GPUs together, among which accelerate divides the layers."""


@contextlib.contextmanager
def working_together(output: Path, files: Sequence[str]) -> Iterator[bool]:
    """Join the processes of a command within a ``with`` block; only the first one prints and writes.

    Args:
        output: the folder that the first process locks and creates.
        files: the names of the files that it will write there.

    Yields:
        Whether this process is the first or the only one.
    """
    from rope_patch.runtime.folders import folder_to_write
    from rope_patch.runtime.parallel import joined_processes

    with contextlib.ExitStack() as stack:
        rank = stack.enter_context(joined_processes())
        if rank:
            silent = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(silent))
            stack.enter_context(contextlib.redirect_stderr(silent))
        else:
            stack.enter_context(folder_to_write(output, files))
        yield rank == 0


def prepare(machine: Machine) -> None:
    """Check the device before anything is loaded, set CPU threads, and turn off transformers' progress bars.

    Raises:
        ValueError: an unknown device, or one that is not there.
    """
    import torch
    from transformers.utils import logging as hf_logging

    check_device(machine.device)
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    hf_logging.disable_progress_bar()


def check_device(device: str) -> None:
    """Raise unless this machine has a device that a model can run on.

    Args:
        device: the name of a device as torch writes it, ``"auto"`` or ``"balanced"``.

    Raises:
        ValueError: an unknown device, or one that is not there.
    """
    import torch

    if device == BALANCED and not torch.accelerator.is_available():
        raise ValueError("no device 'balanced': torch sees no GPU to spread a model over")
    if device in ("auto", BALANCED):
        return
    try:
        float(torch.ones((), device=device))  # a device without numbers, such as meta, raises
    except Exception as error:  # each backend has its own error for a device that is not there
        reason = str(error).partition("\n")[0]
        raise ValueError(f"no device {device!r} to compute on: {reason}") from None


def load_tokenizer(source: str) -> Any:
    """Return a checkpoint's tokenizer, or that of an adapter's base if the adapter has none of its own.

    Args:
        source: a folder, a hub id or a GGUF file.

    Raises:
        ValueError: there is no such folder, no checkpoint in it, or no tokenizer that can be loaded.
    """
    from rope_patch.checkpoints.adapters import adapter_base, is_adapter, naming_base
    from rope_patch.checkpoints.tokenizer_files import read_tokenizer
    from rope_patch.runtime.folders import check_source

    check_source(source)
    if not is_adapter(source) or (Path(source) / "tokenizer_config.json").exists():
        return read_tokenizer(source)
    with naming_base(source):
        return read_tokenizer(adapter_base(source))


def load_model(source: str, machine: Machine = Machine(), method: str | None = None, **apply_options: Any) -> Any:
    """Load a checkpoint, or an adapter over its base, with its patch in place.

    Args:
        source: a folder, a hub id or a GGUF file; for a GGUF file the type of its weights is printed.
        machine: the device and data type that the model runs with; ``dtype="auto"`` means that of the checkpoint, or on
            a CPU the one that :func:`cpu_type` returns.
        method: the patch to apply, as a method string.
        **apply_options: options of :func:`rope_patch.apply` for ``method``.

    Raises:
        ValueError: the method is unknown, or there is no such folder or no checkpoint in it.
        OSError: there is nothing that can be loaded, or no such repository.
    """
    from rope_patch.checkpoints.save_load import load
    from rope_patch.checkpoints.source_files import on_device
    from rope_patch.modeling.environment import weights_in_file
    from rope_patch.runtime.parallel import choose_device

    onto_gpu = on_device(choose_device(machine.device))
    loaded: Any = load(source, method, dtype=machine.dtype, **apply_options, **onto_gpu)
    for weights in weights_in_file(loaded).values():
        print(f"{source}: the weights are {weights}", file=sys.stderr)
    if not onto_gpu:
        if loaded.device.type != "cpu":  # transformers puts quantized weights onto a GPU where there is one
            loaded = loaded.to("cpu")
        if machine.dtype == "auto":
            loaded = in_cpu_type(source, loaded)
    return loaded.eval()


def cpu_type(stored: Any, capabilities: Mapping[str, Any]) -> Any:
    """Return the data type in which a CPU runs 16-bit weights: float32 if it has no instructions for theirs.

    With them SmolLM2-135M reads 512 tokens in bfloat16 in .42 of the time of float32, and its loss agrees (-.002 nats,
    standard error .002); in float16, without them, it takes 3.5 times as long (``benchmarks/results/cpu_dtypes.json``).
    Every 16-bit number is also a float32 number, so float32 rounds nothing. Weights of float32 stay as they are:
    rounding them would change the results.

    Args:
        stored: the data type of the weights.
        capabilities: the capabilities of the CPU, as ``torch.cpu.get_capabilities`` returns them; only x86 is known.
    """
    import torch

    needed = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}
    if stored not in needed or capabilities.get("architecture") != "x86_64":
        return stored
    if any(capabilities.get(name) for name in needed[stored]):
        return stored
    return torch.float32


def in_cpu_type(source: str, loaded: Any) -> Any:
    """Return a model on the CPU in the data type for ``--dtype auto``, and print it if it is not the checkpoint's."""
    import torch

    stored = loaded.dtype
    better = cpu_type(stored, torch.cpu.get_capabilities())
    if better == stored or getattr(loaded.config, "quantization_config", None) is not None:
        return loaded
    short = str(better).removeprefix("torch.")
    kept = str(stored).removeprefix("torch.")
    print(
        f"{source}: read in {short}, which this CPU computes faster than the checkpoint's {kept}, in twice the memory: "
        f"--dtype {kept} keeps it",
        file=sys.stderr,
    )
    return loaded.to(better)


def say_tokens(
    model: Any, tokens: int, length: int, *, rows: int = 1, chunk: int | None = None, more: str = ""
) -> None:
    """Print how many tokens a command reads, and about how long that takes at the speed that is measured now.

    Args:
        model: the model that reads them.
        tokens: the number of tokens that are read.
        length: the length of the longest row [tokens].
        rows: the number of rows that are read side by side.
        chunk: the length of a forward pass [tokens]; None for whole rows.
        more: what else takes time, as the end of the sentence.
    """
    from rope_patch.evaluation.time_budget import speed
    from rope_patch.runtime.captions import duration_text

    seconds = tokens / speed(model, length, rows=rows, chunk=chunk)
    print(f"reads {tokens:,} tokens, about {duration_text(seconds)} at the speed measured now{more}", file=sys.stderr)
