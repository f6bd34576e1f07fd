"""Time and losses of 16-bit weights on this CPU against float32, in pairs: what ``--dtype auto`` rests on.

    OMP_NUM_THREADS=1 python benchmarks/cpu_dtypes.py --model FOLDER -o benchmarks/results/cpu_dtypes.json

A checkpoint (by default the bundled one, which is too small to show much) reads tokens of the built-in text in each
data type: all in turn in one process, in an order that alternates. A figure of time is the median over rounds of the
time over that in float32; the losses are compared token by token. What the CPU can compute in is stated beside them.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from measuring import command, environment, in_own_process, ratio, time_in_turn, write
from rope_patch.cli.loading import cpu_type
from rope_patch.evaluation.documents import spread_windows
from rope_patch.evaluation.text import builtin_text
from rope_patch.modeling.scoring import Reader, losses

TYPES = ("float32", "bfloat16", "float16")
INSTRUCTIONS = ("avx2", "avx512_f", "avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16")


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time all types in turn, and compare their losses with those of float32."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    (window,), _ = spread_windows(tokenizer, builtin_text("heldout"), job["tokens"], 1)
    found: dict[str, torch.Tensor] = {}

    def read(reader: Reader, name: str) -> None:
        found[name] = losses(reader, window.ids[None], [1])[0][0, 1:]

    works = {}
    for name in TYPES:
        model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, name)).eval()
        works[name] = functools.partial(read, Reader(model), name)
    times = time_in_turn(works, job["rounds"], warm_up=1)
    rows = []
    for name in TYPES[1:]:
        apart = found[name] - found["float32"]
        rows.append(
            {
                "dtype": name,
                **{f"{clock}_over_float32": ratio(times[clock], name, "float32") for clock in times},
                "nll": float(found[name].mean()),
                "nll_float32": float(found["float32"].mean()),
                "nll_difference": float(apart.mean()),
                "stderr_of_difference": float(apart.std() / len(apart) ** 0.5),
                "largest_difference_of_a_token": float(apart.abs().max()),
                "auto_reads_it_in": str(cpu_type(getattr(torch, name), torch.cpu.get_capabilities())).partition(".")[2],
            }
        )
    return {"rows": rows}


def main() -> None:
    """Measure everything; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; the bundled one by default")
    parser.add_argument("--tokens", type=int, default=512, help="that are read")
    parser.add_argument("--rounds", type=int, default=3, help="of all types")
    parser.add_argument("--quick", action="store_true", help="a size that takes seconds")
    options = parser.parse_args()
    folder = options.model or rope_patch.data_path("assets") / "llama"
    job = {"model": str(folder), "tokens": 64 if options.quick else options.tokens, "rounds": options.rounds}
    rows = in_own_process(measure, job)["rows"]
    capabilities = torch.cpu.get_capabilities()
    report = {
        "benchmark": "cpu_dtypes",
        "command": command().replace(str(options.model), "FOLDER"),
        "what": "time / time in float32, and losses less those in float32 [nats/token], same ids and checkpoint",
        "summary": {row["dtype"]: {"cpu": row["cpu_over_float32"], "nll": row["nll_difference"]} for row in rows},
        "settings": job | {"model": folder.name},
        "environment": environment() | {name: bool(capabilities.get(name)) for name in INSTRUCTIONS},
        "rows": rows,
    }
    write(report, options.output)
    print(json.dumps(report["summary"], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
