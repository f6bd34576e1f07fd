"""What commands share: a checkpoint or adapter, its tokenizer, and the words of options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TYPES = ("auto", "float32", "bfloat16", "float16")


def check_dtype(dtype: str) -> None:
    """Raise unless a word names a data type.

    Raises:
        ValueError: an unknown word.
    """
    if dtype not in TYPES:
        raise ValueError(f"dtype must be one of {', '.join(TYPES)}, got {dtype!r}")


def check_device(device: str) -> None:
    """Raise unless a model can be put on a device of this machine.

    Args:
        device: as torch names them, or ``"auto"``.

    Raises:
        ValueError: an unknown device, or one that is not there.
    """
    import torch

    if device == "auto":
        return
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1 or another of torch's, got {device!r}") from None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.type == "cuda" and (wanted.index or 0) >= count:
        here = f"has {count} GPU{'s' * (count > 1)}, counted from 0" if count else "sees no GPU"
        raise ValueError(f"no device {device!r}: torch {here}")
    try:
        float(torch.ones((), device=wanted))  # which a device without numbers, such as meta, cannot give
    except Exception as error:  # of many kinds: a backend says in its own way that it is not there
        reason = str(error).partition("\n")[0]
        raise ValueError(f"no device {device!r} to compute on: {reason}") from None


def check_source(source: str) -> None:
    """Raise where a checkpoint is a folder by its name, and is not there.

    Args:
        source: folder or hub id, which has at most one slash.

    Raises:
        FileNotFoundError: no such folder.
    """
    if Path(source).exists():
        return
    parts = source.split("/")
    if source.startswith((".", "~")) or not all(parts) or len(parts) > 2 or "\\" in source:
        raise FileNotFoundError(f"no folder {source}")


def load_tokenizer(source: str) -> Any:
    """Return a checkpoint's tokenizer, or that of an adapter's base where it has none of its own.

    Args:
        source: folder or hub id.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: it has none that can be loaded.
    """
    from rope_patch.checkpoints.adapters import adapter_base, is_adapter
    from rope_patch.checkpoints.reading import read_tokenizer

    check_source(source)
    bare = is_adapter(source) and not (Path(source) / "tokenizer_config.json").exists()
    try:
        return read_tokenizer(adapter_base(source) if bare else source)
    except ValueError as error:
        if Path(source).exists():
            raise
        reason = str(error.__cause__).partition("\n")[0]
        raise FileNotFoundError(f"no folder {source}, and the hub gives no tokenizer of that name: {reason}") from None


def load_model(source: str, method: str | None, device: str, dtype: str) -> Any:
    """Load a checkpoint or an adapter over its base, patched as it says.

    Args:
        source: folder or hub id.
        method: patch to apply, in the grammar.
        device: ``"auto"`` spreads the model over what is there.
        dtype: one of ``TYPES``.

    Raises:
        ValueError: an unknown method.
        OSError: no such checkpoint.
    """
    import torch

    from rope_patch.checkpoints.save_load import load

    placed: dict[str, Any] = {"device_map": "auto"} if device == "auto" else {}
    loaded: Any = load(source, method, dtype=dtype if dtype == "auto" else getattr(torch, dtype), **placed)
    return (loaded if placed else loaded.to(device)).eval()


def items(text: str) -> list[str]:
    """Return the words of a list, which commas or blanks divide."""
    return text.replace(",", " ").split()


def depth(text: str) -> float:
    """Return the depth of a needle.

    Raises:
        ValueError: no number.
    """
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a depth is a number from 0 to 1, got {text!r}") from None
