"""What every test shares: one thread (tiny models are fastest so), no progress bars, no hub."""

from __future__ import annotations

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()


LONGEST = ("test_readme.py", "test_packaging.py")
"""Files with a test of half a minute or more, which begin: at the end, one process would run it and the others wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Leave what importing made out of every later garbage collection: a million objects that nothing frees."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
