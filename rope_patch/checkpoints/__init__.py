"""Patched models and adapters on the disk."""

from rope_patch.checkpoints.adapters import (
    adapter_base,
    is_adapter,
    read_record,
    write_record,
)
from rope_patch.checkpoints.inspect_verify import inspect, verify
from rope_patch.checkpoints.save_load import load, load_adapter, save
from rope_patch.checkpoints.source_files import load_config
from rope_patch.checkpoints.tokenizer_files import read_tokenizer

__all__ = [
    "adapter_base",
    "inspect",
    "is_adapter",
    "load",
    "load_adapter",
    "load_config",
    "read_record",
    "read_tokenizer",
    "save",
    "verify",
    "write_record",
]
