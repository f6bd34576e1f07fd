"""Time rows that a model reads alone and beside another program, by how long the threads of OpenMP spin.

    python benchmarks/busy_cpu.py -o benchmarks/results/busy_cpu.json

Each reading is a process of its own with as many threads as there are cores, since libgomp reads ``GOMP_SPINCOUNT``
when torch is imported. Beside it runs nothing, or another such process under libgomp's default, which reads rows
without a pause. Where the system puts the threads decides a lot, so that each cell lists several processes [s].
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from measuring import command, environment, random_ids, random_llama, write
from rope_patch.runtime.command import SPINS

SMOLLM2 = {"vocab": 49152, "hidden": 576, "layers": 30, "heads": 9, "kv_heads": 3}
ROWS = (128, 1024)
DEFAULT = "default"


@torch.no_grad()
def read(dtype: str, repetitions: int) -> None:
    """Print the seconds that rows take, as JSON; without repetitions read rows until the process is ended."""
    model = random_llama(SMOLLM2, max(ROWS)).to(getattr(torch, dtype)).eval()
    ids = random_ids(SMOLLM2, max(ROWS))

    def seconds(length: int) -> float:
        started = time.perf_counter()
        model.model(ids[None, :length], use_cache=False)
        return time.perf_counter() - started

    seconds(ROWS[0])
    print("ready", flush=True)
    while not repetitions:
        seconds(ROWS[1])
    print(json.dumps({length: statistics.median(seconds(length) for _ in range(repetitions)) for length in ROWS}))


def started(spins: str, dtype: str, repetitions: int) -> subprocess.Popen[str]:
    """Start a process that reads, and wait until it does."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    if spins != DEFAULT:
        variables["GOMP_SPINCOUNT"] = spins
    words = [sys.executable, __file__, "--dtype", dtype, "--read", str(repetitions), "-o", os.devnull]
    process = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", help="data type of the model")
    parser.add_argument("--repetitions", type=int, default=3, help="readings of each row, of which the median counts")
    parser.add_argument("--processes", type=int, default=5, help="processes of each cell")
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of the results")
    given = parser.parse_args()
    if given.read is not None:
        read(given.dtype, given.read)
        return
    report = {
        "benchmark": "busy_cpu",
        "command": command(),
        "what": "seconds that a row of so many tokens takes, by GOMP_SPINCOUNT and by what runs beside it",
        "environment": environment(threads=torch.get_num_threads()),
        "rows": [],
    }
    for beside in ("nothing", "a program"):
        other = None if beside == "nothing" else started(DEFAULT, given.dtype, 0)
        readings: dict[str, list[dict[str, float]]] = {DEFAULT: [], SPINS: []}
        try:
            for _ in range(given.processes):  # in turn, so that both see the same machine
                for spins, found in readings.items():
                    found.append(json.loads(started(spins, given.dtype, given.repetitions).communicate()[0]))
        finally:
            if other:
                other.terminate()
                other.wait()
        for spins, found in readings.items():
            seconds = {length: sorted(round(one[str(length)], 3) for one in found) for length in ROWS}
            report["rows"].append({"spins": spins, "beside": beside, "seconds": seconds})
            print(report["rows"][-1], flush=True)
        write(report, given.output)


if __name__ == "__main__":
    main()
