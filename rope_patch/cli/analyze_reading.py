"""What ``rope-patch analyze`` reads: configs and texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_texts(paths: Sequence[Path], pattern: str) -> dict[str, Any] | None:
    """Return the documents of each text by its name; None where none is given.

    Raises:
        ValueError: two texts of one name.
        FileNotFoundError: no such text.
    """
    from rope_patch.evaluation.documents import documents

    named = {path.name or str(path): list(documents(path, pattern=pattern)) for path in paths}
    if len(named) < len(paths):
        raise ValueError("two texts have one name: rename one, since results are given by name")
    return named or None


def read_config(source: str) -> Any:
    """Return the config of the text model of a checkpoint, or of an adapter's base."""
    from rope_patch.checkpoints.adapters import adapter_base, is_adapter
    from rope_patch.checkpoints.reading import load_config

    return load_config(adapter_base(source) if is_adapter(source) else source).get_text_config()
