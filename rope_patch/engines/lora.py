"""Adapters beside an exported base: which adapters engines take, and the files that engines need of one."""

from __future__ import annotations

import shutil
from pathlib import Path

from rope_patch.checkpoints.adapters import ADAPTER_FILE, RECORD_FILE
from rope_patch.engines.verified_versions import ENGINES
from rope_patch.errors import read_json

_FILES = (ADAPTER_FILE, "adapter_model.safetensors", RECORD_FILE)


def check_adapter(source: str | Path, to: str) -> None:
    """Raise ValueError unless an engine that serves LoRA beside a base takes an adapter.

    Args:
        source: the folder of the adapter.
        to: the engine, a key of :data:`~rope_patch.engines.verified_versions.ENGINES`.

    Raises:
        ValueError: the adapter holds more than low-rank matrices; merging it works everywhere.
        FileNotFoundError: the source is not a local folder with safetensors.
    """
    folder = Path(source)
    for name in _FILES[:2]:  # an adapter that was trained without a patch has no record
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has no {name}: download or save the adapter again")
    config = read_json(folder / ADAPTER_FILE)
    reasons = [
        reason
        for reason, bad in (
            (f"it is of type {config.get('peft_type')}", config.get("peft_type") != "LORA"),
            (f"it trains whole modules {config.get('modules_to_save')}", bool(config.get("modules_to_save"))),
            (f"it trains biases ({config.get('bias')})", config.get("bias", "none") != "none"),
            ("it trains biases of its own (lora_bias)", bool(config.get("lora_bias"))),
            ("it is DoRA", bool(config.get("use_dora"))),
        )
        if bad
    ]
    if reasons:
        raise ValueError(
            f"{ENGINES[to].name} takes plain LoRA matrices beside a base, and {folder} is more: {'; '.join(reasons)}. "
            "Export it merged, without --lora"
        )


def copy_adapter(source: str | Path, folder: Path) -> None:
    """Copy the files of an adapter, with its patch record, into a new folder."""
    folder.mkdir()
    for name in _FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)
