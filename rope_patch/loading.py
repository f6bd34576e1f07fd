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


def load_tokenizer(source: str) -> Any:
    """Return a checkpoint's tokenizer, or that of an adapter's base where it has none of its own.

    Args:
        source: folder or hub id.

    Raises:
        ValueError: it has none that can be loaded.
    """
    from transformers import AutoTokenizer

    from rope_patch.checkpoints import adapter_base, is_adapter

    bare = is_adapter(source) and not (Path(source) / "tokenizer_config.json").exists()
    try:
        return AutoTokenizer.from_pretrained(adapter_base(source) if bare else source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} has no tokenizer that can be loaded: {str(error).splitlines()[0]}") from None


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

    from rope_patch.checkpoints import load

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
