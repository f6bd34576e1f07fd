"""Turn errors that a library raises about a user's file into messages that name the file and the problem."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

_OTHER_CAUSES = (OSError, ImportError, MemoryError, torch.OutOfMemoryError, SafetensorError)
"""Errors that are not about the content of a file: it is missing or truncated, or a package or memory is missing."""


@contextlib.contextmanager
def as_value_error(what: str) -> Iterator[None]:
    """Raise what a library raises in this block as one ``ValueError`` that begins with ``what``.

    Args:
        what: the beginning of the message, which names the file and what failed: ``"DIR/config.json: transformers
            cannot build the model it describes"``.

    Raises:
        ValueError: raised in place of the library's own error, which is its cause. Errors of ours, missing files and
            packages, and used-up memory pass as they are.
    """
    try:
        yield
    except _OTHER_CAUSES:
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        raise ValueError(f"{what} ({in_one_line(error)})") from error


def in_one_line(error: BaseException) -> str:
    """Return an error's type and message on one line: a message alone may be no more than a key or a number."""
    message = " ".join(str(error).split())
    if len(message) > 400:
        message = message[:400] + " …"
    return f"{type(error).__name__}: {message}"


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object that a JSON file holds.

    Raises:
        OSError: the file cannot be read, is no JSON, or holds a list, a word or a number.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    # JSON that is nested too deeply ends in a RecursionError.
    except (ValueError, RecursionError) as error:
        raise OSError(f"{path} is damaged, it is no JSON ({error}): copy or download it again") from error
    if not isinstance(data, dict):
        raise OSError(f"{path} must hold a JSON object, and holds {json.dumps(data)[:60]}: copy or download it again")
    return data


def _is_ours(error: BaseException) -> bool:
    """Tell whether this package raised an error itself, in words that say what to do."""
    # Errors of other types that arise in our code are defects, and say nothing of what to do.
    if not isinstance(error, ValueError | TypeError):
        return False
    # The last frame of the traceback is the one that raised it.
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).partition(".")[0] == __name__.partition(".")[0]
