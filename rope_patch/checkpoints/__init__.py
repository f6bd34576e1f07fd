"""Patched models and adapters on the disk."""

from rope_patch.checkpoints.adapters import (
    ADAPTER_FILE,
    CONFIG_FILE,
    RECORD_FILE,
    RopePatchCallback,
    adapter_base,
    adapter_config,
    is_adapter,
    put_record,
    read_record,
    write_record,
)
from rope_patch.checkpoints.checking import Verification, inspect, verify
from rope_patch.checkpoints.reading import building, check_older_keys, config_json, load_config, read_tokenizer
from rope_patch.checkpoints.save_load import load, load_adapter, save

__all__ = [
    "ADAPTER_FILE",
    "CONFIG_FILE",
    "RECORD_FILE",
    "RopePatchCallback",
    "Verification",
    "adapter_base",
    "adapter_config",
    "building",
    "check_older_keys",
    "config_json",
    "inspect",
    "is_adapter",
    "load",
    "load_adapter",
    "load_config",
    "put_record",
    "read_record",
    "read_tokenizer",
    "save",
    "verify",
    "write_record",
]
