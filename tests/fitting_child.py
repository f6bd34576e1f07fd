"""Run in several processes: what each of them finds in the fit of ``fits.py``, as ``RANK.json`` in a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fits import ASSETS, fitted
from tiny import small
from transformers import AutoTokenizer


def main(folder: Path) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    patch = fitted(small(), AutoTokenizer.from_pretrained(ASSETS / "llama"))
    results = [patch.losses, patch.chosen, patch.after[None].inv_freq.tolist()]
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
