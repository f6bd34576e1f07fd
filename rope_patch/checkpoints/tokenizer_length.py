"""The length at which the tokenizer in a checkpoint's folder cuts texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rope_patch.patching.locate import PatchError
from rope_patch.patching.record import PatchRecord
from rope_patch.runtime.errors import read_json
from rope_patch.runtime.folders import write_atomically

_SETTINGS_FILE = "tokenizer_config.json"
LENGTH_KEY = "model_max_length"
FOUND_KEY = "rope_patch"
"""Key in tokenizer_config.json for the values before the patch, which a restore needs. transformers keeps such keys."""


def raise_length(folder: Path, record: PatchRecord, beside: Path | None = None) -> None:
    """Raise the length at which a folder's tokenizer cuts texts to the context that a patch states.

    With ``truncation=True``, as pipelines and sentence-transformers call it, a tokenizer cuts at its own
    ``model_max_length``, whatever the config of the model says.

    Args:
        folder: the folder.
        record: the record of the patch.
        beside: the folder that ``folder`` will be moved over, whose tokenizer stays if ``folder`` has none.
    """
    settings = _settings(folder)
    if beside is not None and not (folder / _SETTINGS_FILE).exists():
        settings = _settings(beside)
    if _cuts_below(settings, record):
        # A second patch must not overwrite the length from before the first.
        settings.setdefault(FOUND_KEY, {LENGTH_KEY: settings[LENGTH_KEY]})
        _write_settings(folder, settings | {LENGTH_KEY: record.target_length})


def restore_length(folder: Path) -> None:
    """Undo :func:`raise_length` in a folder."""
    settings = _settings(folder)
    if (original := settings.pop(FOUND_KEY, None)) is not None:
        _write_settings(folder, settings | original)


def check_length(folder: Path, record: PatchRecord) -> None:
    """Raise PatchError if a folder's tokenizer cuts texts below the context that its patch states.

    Raises:
        PatchError: it does; the message names both lengths.
    """
    settings = _settings(folder)
    if _cuts_below(settings, record):
        raise PatchError(
            f"{folder}: its tokenizer cuts texts at {settings[LENGTH_KEY]} tokens, and the patch states a context of "
            f"{record.target_length}. Set {LENGTH_KEY} in {_SETTINGS_FILE} to that, or save the model again"
        )


def stated_length(folder: Path) -> float | None:
    """Return the length at which a folder's tokenizer cuts texts [tokens]; None if none is stated."""
    own = _settings(folder).get(LENGTH_KEY)
    return own if isinstance(own, int | float) else None


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS_FILE
    try:
        settings = read_json(path)
    except OSError:  # there is none, or it is damaged, which is reported when the tokenizer is loaded
        return {}
    before = settings.get(FOUND_KEY, {LENGTH_KEY: 0})
    # A restore writes it into the file, where other keys would change the tokenizer, or name code that a loader runs.
    if not isinstance(before, dict) or [*before] != [LENGTH_KEY] or not isinstance(before[LENGTH_KEY], int | float):
        raise PatchError(
            f"{path}: its {FOUND_KEY!r} must hold the {LENGTH_KEY} from before the patch and nothing else, got "
            f"{before!r}: restore the file from its source"
        )
    return settings


def _cuts_below(settings: dict[str, Any], record: PatchRecord) -> bool:
    """Tell whether a tokenizer cuts texts below the context that a patch states."""
    own = settings.get(LENGTH_KEY)
    return isinstance(own, int | float) and own < (record.target_length or 0)


def _write_settings(folder: Path, settings: dict[str, Any]) -> None:
    # In the form that transformers writes, so that a comparison shows only the changed keys.
    text = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False)
    write_atomically(folder / _SETTINGS_FILE, text + "\n")
