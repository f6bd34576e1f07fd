"""Functions of all benchmarks: work in a process of its own, peak memory, paired times, and the head of a report.

The scripts are run as files, so Python looks for modules in this folder first: ``from measuring import …``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import rope_patch
from rope_patch.runtime.folders import write_atomically
from rope_patch.runtime.result_cache import finite

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of mallopt, from glibc's malloc.h
tqdm.monitor_interval = 0  # tqdm's monitor thread would make it unsafe to fork
Job = dict[str, Any]
Times = dict[str, dict[str, list[float]]]
"""Clock (``wall``, ``cpu``) to side to the seconds of every round."""

# --- what is measured


def random_llama(shape: Mapping[str, int], context: int) -> LlamaForCausalLM:
    """Return a random model of a shape, float32; the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=3 * shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        max_position_embeddings=context,
    )
    return LlamaForCausalLM(config)


def random_ids(shape: Mapping[str, int], tokens: int) -> torch.Tensor:
    """Return random token ids (tokens,); the same at every call."""
    return torch.randint(3, shape["vocab"], (tokens,), generator=torch.Generator().manual_seed(1))


# --- a process of one's own


def in_own_process(work: Callable[[Job], Job], job: Job) -> Job:
    """Do a job on one thread in a process of its own, forked from this one, which should only have imported modules."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(work, job, theirs))
    process.start()
    # As long as this process held the other end open, recv would not notice that the process died.
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = "it ended without an answer; was memory short?"
    process.join()
    if isinstance(answer, str):
        raise RuntimeError(f"{job} failed with status {process.exitcode}: {answer}")
    return answer


def _serve(work: Callable[[Job], Job], job: Job, answer: Connection) -> None:
    try:
        gc.freeze()  # a garbage collection would touch, and so copy, the memory of everything imported
        torch.set_num_threads(1)
        transformers.utils.logging.set_verbosity_error()
        answer.send(work(job))
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


# --- memory


def give_back_what_is_freed() -> None:
    """Make malloc return freed memory at once, so that a peak is what is held and not the holes in its heap.

    M_MMAP_THRESHOLD is fixed at the 128 KiB that it starts with; glibc would raise it as blocks are freed. Without
    glibc nothing is done.
    """
    if platform.libc_ver()[0] == "glibc":
        glibc = ctypes.CDLL(None)
        glibc.mallopt(M_MMAP_THRESHOLD, 128 * 1024)
        glibc.mallopt(M_TRIM_THRESHOLD, 128 * 1024)


def peak_of(work: Callable[[], Any], device: str = "cpu") -> tuple[Any, Job]:
    """Return the result of some work, and the most memory that it held above what was held before.

    On the CPU this is the highest resident set (VmHWM, cleared just before) less the resident set just before, in a
    process that should be new; on CUDA it is torch's own count.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        forget_peak(device)
        before = torch.cuda.memory_allocated()
        began = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        highest, how = torch.cuda.max_memory_allocated(), "torch.cuda.max_memory_allocated"
    else:
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        before = _status("VmRSS")
        # If clearing is not allowed, the peak is that of the whole process, imports included.
        how = "VmHWM" if forget_peak(device) else "ru_maxrss"
        began = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - began
        highest = _status("VmHWM") if how == "VmHWM" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return result, {"peak_bytes": highest - before, "loaded_bytes": before, "peak_from": how, "seconds": seconds}


def forget_peak(device: str = "cpu") -> bool:
    """Count the peak of memory from now on; return whether this machine allows that."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        # 5 clears VmHWM, see proc(5).
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int:
    """Return a field of /proc/self/status [bytes]."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: on the CPU this benchmark needs Linux")


def megabytes(size: float, digits: int = 1) -> float:
    """Return a number of bytes in MB (1e6 bytes)."""
    return round(size / 1e6, digits)


# --- time


def turns(sides: Sequence[str], rounds: int) -> Iterator[str]:
    """Yield the sides of every round in an alternating order, so that other work of the machine affects all sides."""
    for i in range(rounds):
        yield from sides if i % 2 else reversed(sides)


def time_in_turn(
    works: Mapping[str, Callable[[], Any]], rounds: int, *, warm_up: int = 0, device: str = "cpu"
) -> Times:
    """Time several pieces of work alternately, in one process.

    Args:
        works: the work of each side. If it has a method ``prepare``, that is called first and not timed.
        rounds: the number of rounds that count.
        warm_up: the number of rounds before them, which do not count.
        device: the device that is waited for before a clock is read.
    """
    times: Times = {clock: {side: [] for side in works} for clock in ("wall", "cpu")}
    for side in turns(list(works), warm_up + rounds):
        work = works[side]
        getattr(work, "prepare", lambda: None)()
        synchronize(device)
        began = time.perf_counter(), time.process_time()
        work()
        synchronize(device)
        times["wall"][side].append(time.perf_counter() - began[0])
        times["cpu"][side].append(time.process_time() - began[1])
    return {clock: {side: each[warm_up:] for side, each in sides.items()} for clock, sides in times.items()}


def synchronize(device: str) -> None:
    """Wait until the device has finished its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def spread(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """Return the median and the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": round(middle, digits), "q1": round(low, digits), "q3": round(high, digits)}


def ratio(seconds: Mapping[str, list[float]], over: str, under: str, digits: int = 4) -> dict[str, float]:
    """Return the spread of the ratio of two sides' times, taken round by round."""
    return spread([a / b for a, b in zip(seconds[over], seconds[under], strict=True)], digits)


# --- the report


def command() -> str:
    """Return the command line that ran this script."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def environment(*packages: str, device: str = "cpu", threads: int = 1) -> dict[str, Any]:
    """Return the device and versions that the figures depend on, with those of some more packages."""
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        **{name: metadata.version(name) for name in packages},
        "rope_patch": rope_patch.__version__,
    }


def write(report: Mapping[str, Any] | list[dict[str, Any]], output: Path | None) -> None:
    """Write a report as JSON to a file, or to standard output if there is none."""
    text = json.dumps(finite(report), indent=1, allow_nan=False) + "\n"
    if output is None:
        print(text)
    else:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, text)
