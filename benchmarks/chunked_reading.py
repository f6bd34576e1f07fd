"""Time of reading a long text in one pass and in chunks, against the bare decoder, in pairs.

    OMP_NUM_THREADS=1 python benchmarks/chunked_reading.py -o benchmarks/results/chunked_reading.json

The model is random, of SmolLM2-135M's width, heads and data type, and a fifth of its layers and vocabulary, so that
attention, linear layers and output head have the shares of time that they have there. ``decoder`` is a forward pass of
the decoder over all tokens without a cache; ``one_pass`` and ``chunked`` are ``perplexity``, the second in chunks
through a cache, and score every token, too; ``chunks_alone`` reads in chunks and scores none. All sides go in turn in
one process, in an order that alternates. The figure is the median over rounds of a side's time over the decoder's.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from measuring import command, environment, in_own_process, random_ids, random_llama, ratio, time_in_turn, write
from rope_patch.evaluation.perplexity import perplexity
from rope_patch.modeling.scoring import Reader

SHAPE = {"vocab": 49152 // 5, "hidden": 576, "layers": 6, "heads": 9, "kv_heads": 3}
QUICK_SHAPE = {"vocab": 500, "hidden": 96, "layers": 2, "heads": 3, "kv_heads": 1}


def works(job: dict[str, Any], losses: dict[str, float]) -> dict[str, Callable[[], Any]]:
    """Return what each side does with the same token ids of the same model; what they say is put into a dictionary."""
    model = random_llama(job["shape"], job["tokens"]).to(getattr(torch, job["dtype"])).eval()
    ids = random_ids(job["shape"], job["tokens"])
    reader = Reader(model)

    @torch.no_grad()
    def decoder() -> None:
        model.model(ids[None], use_cache=False)

    @torch.no_grad()
    def chunks_alone() -> None:
        for _ in reader.read(ids[None], reader.new_cache(len(ids)), job["chunk"]):
            pass

    def scored(side: str, chunk: int | None) -> None:
        losses[side] = perplexity(model, ids, chunk=chunk).nll

    return {
        "decoder": decoder,
        "chunks_alone": chunks_alone,
        "one_pass": functools.partial(scored, "one_pass", None),
        "chunked": functools.partial(scored, "chunked", job["chunk"]),
    }


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time all sides in turn, after each has read a short text."""
    losses: dict[str, float] = {}
    for run in works(job | {"tokens": 2 * job["chunk"]}, {}).values():
        run()
    return {"times": time_in_turn(works(job, losses), job["rounds"]), "losses": losses}


def main() -> None:
    """Measure everything; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--tokens", type=int, help="length of the text; 8192 by default")
    parser.add_argument("--chunk", type=int, help="tokens per forward pass; 1024 by default")
    parser.add_argument("--rounds", type=int, help="of all sides; 3 by default")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--quick", action="store_true", help="a size that takes seconds")
    options = parser.parse_args()
    job = {
        "shape": QUICK_SHAPE if options.quick else SHAPE,
        "tokens": options.tokens or (512 if options.quick else 8192),
        "chunk": options.chunk or (128 if options.quick else 1024),
        "rounds": options.rounds or (2 if options.quick else 3),
        "dtype": options.dtype,
    }
    measured = in_own_process(measure, job)
    times = measured["times"]
    sides = [side for side in times["wall"] if side != "decoder"]
    report = {
        "benchmark": "chunked_reading",
        "command": command(),
        "what": "time of reading a text / time of the bare decoder's one pass over it, same ids and model",
        "summary": {clock: {side: ratio(times[clock], side, "decoder") for side in sides} for clock in ("cpu", "wall")},
        "settings": job,
        "environment": environment(),
        "median_s": {
            clock: {side: round(statistics.median(values), 3) for side, values in each.items()}
            for clock, each in times.items()
        },
        "losses": measured["losses"],
    }
    write(report, options.output)
    print(json.dumps(report["summary"], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
