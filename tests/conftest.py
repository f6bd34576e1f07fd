"""What every test shares: one thread (tiny models are fastest so), no progress bars, no hub."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers.utils import logging

torch.set_num_threads(1)
logging.disable_progress_bar()
