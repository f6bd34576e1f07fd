"""The length at which the tokenizer in a checkpoint's folder cuts texts."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

from rope_patch.errors import read_json
from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import PatchRecord
from rope_patch.runtime.folders import write_atomically

_SETTINGS_FILE = "tokenizer_config.json"
LENGTH_KEY = "model_max_length"
FOUND_KEY = "rope_patch"
"""In tokenizer_config.json: what the patch found there, for whoever restores it. transformers keeps unknown keys."""


def raise_length(folder: Path, record: PatchRecord) -> None:
    """Let a folder's tokenizer cut texts no earlier than at the context that a patch states.

    With ``truncation=True``, as pipelines and sentence-transformers call it, a tokenizer cuts at its own
    ``model_max_length``, whatever the config of the model says.
    """
    settings = _settings_below(folder, record)
    if settings is not None:
        settings.setdefault(FOUND_KEY, {LENGTH_KEY: settings[LENGTH_KEY]})
        _write_settings(folder, settings | {LENGTH_KEY: record.target_length})


def bring_settings(old: Path, folder: Path) -> None:
    """Copy the settings of a tokenizer that stays in a folder into the one that is moved there, to be raised too."""
    if (old / _SETTINGS_FILE).is_file() and not (folder / _SETTINGS_FILE).exists():
        shutil.copyfile(old / _SETTINGS_FILE, folder / _SETTINGS_FILE)


def restore_length(folder: Path) -> None:
    """Undo :func:`raise_length`."""
    settings = _settings(folder)
    if (found := settings.pop(FOUND_KEY, None)) is not None:
        _write_settings(folder, settings | found)


def check_length(folder: Path, record: PatchRecord) -> None:
    """Raise where a folder's tokenizer cuts texts below the context that its patch states.

    Raises:
        PatchError: with both lengths.
    """
    if (settings := _settings_below(folder, record)) is not None:
        raise PatchError(
            f"{folder}: its tokenizer cuts texts at {settings[LENGTH_KEY]} tokens, and the patch states a context of "
            f"{record.target_length}. Set {LENGTH_KEY} in {_SETTINGS_FILE} to that, or save the model again"
        )


def stated_length(folder: Path) -> float | None:
    """Return the length at which a folder's tokenizer cuts texts [tokens]; None where none is stated."""
    own = _settings(folder).get(LENGTH_KEY)
    return own if isinstance(own, int | float) else None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS_FILE
    with contextlib.suppress(OSError):  # a damaged file is for whoever loads the tokenizer to report
        return read_json(path) if path.is_file() else {}
    return {}


def _settings_below(folder: Path, record: PatchRecord) -> dict[str, Any] | None:
    """Return the settings of a tokenizer whose length is below the stated context; None of any other."""
    stated, own = record.target_length, stated_length(folder)
    return _settings(folder) if stated is not None and own is not None and own < stated else None


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)  # as transformers writes it
    write_atomically(folder / _SETTINGS_FILE, text + "\n")
