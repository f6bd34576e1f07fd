"""One-pass attention over a quantized cache against decoding token by token: the same loss, at what speed.

    OMP_NUM_THREADS=1 python benchmarks/kv_check.py -o benchmarks/results/kv_check.json

Both sides score the same tokens of the same random Llama under the same scheme. ``decoded`` feeds a token at a time
through the streaming cache with the model's own attention; ``one_pass`` reads all of them at once. Time: both in one
process, in turn, in an order that alternates; the figure is the median over rounds of decoded's time / one_pass's. The
losses are compared in float64, where no code flips on rounding noise, and in float32.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor
from tqdm import tqdm

from measuring import command, environment, random_ids, random_llama, ratio, spread, time_in_turn, write
from rope_patch.kv_cache.cache import quantized

SHAPE = {"vocab": 4000, "hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2}
SCHEMES = ("int4-token", "kivi-2-window", "k=int4.channel32.pre;v=int4.token32;residual=32;sinks=4", "fp8")
BAR, CLOSE = 10.0, 1e-5


@torch.no_grad()
def loss(model: Any, ids: Tensor, scheme: str, *, exact: bool) -> Tensor:
    """Return the loss of each predicted token, in one pass or decoded token by token."""
    with quantized(model, scheme, exact=exact) as factory:
        past = factory()
        size = len(ids) if exact else 1
        parts = [
            model(ids[None, start : start + size], past_key_values=past, use_cache=True).logits[0]
            for start in range(0, len(ids), size)
        ]
    return torch.nn.functional.cross_entropy(torch.cat(parts)[:-1].double(), ids[1:], reduction="none")


def main() -> None:
    """Compare losses, then times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=None, help="JSON to write; printed otherwise")
    parser.add_argument("--quick", action="store_true", help="one scheme, few tokens")
    given = parser.parse_args()
    torch.set_num_threads(1)
    schemes = SCHEMES[:1] if given.quick else SCHEMES
    lengths, rounds = ((48,), 1) if given.quick else ((512, 1024, 2048), 3)
    model = random_llama(SHAPE, max(lengths)).eval()
    rows = []
    for scheme in tqdm(schemes):
        for tokens in lengths:
            ids = random_ids(SHAPE, tokens)
            works = {
                "decoded": lambda ids=ids, scheme=scheme: loss(model, ids, scheme, exact=False),
                "one_pass": lambda ids=ids, scheme=scheme: loss(model, ids, scheme, exact=True),
            }
            seconds = time_in_turn(works, rounds)["wall"]
            single = (works["decoded"]() - works["one_pass"]()).abs().max()
            model.double()
            exact = (works["decoded"]() - works["one_pass"]()).abs().max()
            model.float()
            rows.append(
                {
                    "scheme": scheme,
                    "tokens": tokens,
                    "seconds": {side: spread(values) for side, values in seconds.items()},
                    "decoded_over_one_pass": ratio(seconds, "decoded", "one_pass", 2),
                    "largest_loss_difference_float64": float(exact),
                    "largest_loss_difference_float32": float(single),
                }
            )
    slowest = min(row["decoded_over_one_pass"]["median"] for row in rows)
    apart = max(row["largest_loss_difference_float64"] for row in rows)
    bars = {"at_least_10_times_faster": slowest >= BAR, "same_loss_in_float64": apart <= CLOSE}
    summary = {"least_speedup": slowest, "largest_loss_difference_float64": apart, "bar_reached": bars}
    report = {
        "benchmark": "kv_check",
        "command": command(),
        "what": "seconds of decoding token by token / of one pass, over the same quantized cache, and their losses",
        "summary": summary,
        "settings": {"shape": SHAPE, "rounds": rounds},
        "environment": environment(),
        "rows": rows,
    }
    write(report, given.output)


if __name__ == "__main__":
    main()
