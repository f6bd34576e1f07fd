"""Measure on a GPU every number of this project that a CPU cannot give.

    python benchmarks/gpu.py --tiny                                       # rehearsed on a CPU, in seconds
    python benchmarks/gpu.py --list                                       # the stages, their time, what is missing here
    python benchmarks/gpu.py --rehearse -o FILE                           # estimated without a GPU, in minutes
    python benchmarks/gpu.py --text novels/*.txt --budget 25m             # on a GPU; the same command goes on

The stages stand in the order of their worth. Each is a list of cells; a finished cell is in the JSON at once and is not
measured again, so that a run may be stopped at any moment. A cell begins only if its estimated time fits into what is
left of the budget. A cell that lacks something (a package, a text, a GPU) is written under ``skipped`` with the reason;
what ran out of memory is a result.

Time on one H100 [minutes], measured: a 1.5, most of it compiling, c 2 without its rows of 128k, d 1 at 32k; estimated:
b 4.5, c 10.5 and d 17 in all, e 3. Shorter rows come first in each stage, so that one that is cut off has every length
but the longest.

Random weights take the place of checkpoints wherever only memory, time or equality is measured. Text is always given
by ``--text``, never Python's own, which differs from release to release; in a rehearsal a text of this package is read.
Needed are torch, transformers, peft and accelerate; everything else is optional, and ``--list`` names it.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several GPUs Trainer would split the batch

import torch
import transformers

from gpu_stages import correctness, decoding, overhead, reading, training
from gpu_stages.base import Setting, Stage
from gpu_stages.manifest import NEEDS, lacking
from gpu_stages.running import Suite
from measuring import write
from rope_patch.runtime.packaged import data_path

STAGES: tuple[Stage, ...] = tuple(module.STAGE for module in (correctness, overhead, training, reading, decoding))
ROOT = Path(__file__).resolve().parents[1]


def seconds(text: str) -> float:
    """Return a time such as 90s, 25m or 2h [s].

    >>> seconds("25m"), seconds("90s"), seconds("1.5h")
    (1500.0, 90.0, 5400.0)
    """
    found = re.fullmatch(r"([0-9.]+)([smh])", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a time is a number with s, m or h, such as 25m, got {text!r}")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def chosen(text: str) -> list[Stage]:
    """Return the stages that a list of letters names, in their own order.

    Raises:
        argparse.ArgumentTypeError: a letter names no stage.
    """
    known = {stage.key: stage for stage in STAGES}
    unknown = [key for key in text.split(",") if key not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown stage {unknown[0]!r}. Known: {', '.join(known)}")
    return [stage for key, stage in known.items() if key in text.split(",")]


def listing(stages: Sequence[Stage], setting: Setting) -> str:
    """Return a text about the stages: what they measure, their time, what they need and what is missing here."""
    lines = []
    for stage in stages:
        cells = stage.cells(setting)
        minutes = sum(cell.seconds for cell in cells) / 60
        lines += [f"{stage.key}. {stage.title}: {len(cells)} cells, about {minutes:.1f} min", f"   {stage.what}"]
        asked = dict.fromkeys([*stage.needs, *(name for cell in cells for name in cell.needs)])
        for name in asked:
            count = len(cells) if name in stage.needs else sum(name in cell.needs for cell in cells)
            reason = "; ".join(lacking([name], setting))
            state = f"MISSING: {reason}" if reason else "here"
            lines.append(f"   needs {name} for {count} of {len(cells)} cells ({NEEDS[name]}); {state}")
    return "\n".join(lines)


def main() -> None:
    """Measure the cells that have no result yet, or list them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; benchmarks/results/gpu.json by default")
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="English text, files")
    parser.add_argument("--stages", type=chosen, default=list(STAGES), help="letters, such as a,c")
    parser.add_argument("--budget", type=seconds, default=1500.0, help="time of the whole run; 25m by default")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--tiny", action="store_true", help="rehearse every stage with tiny models")
    parser.add_argument("--again", action="store_true", help="measure finished cells again")
    parser.add_argument("--rehearse", action="store_true", help="estimate costs of an 8B model on an H100, without one")
    parser.add_argument("--list", action="store_true", help="list the stages, and measure nothing")
    given = parser.parse_args()
    if given.rehearse:
        from gpu_stages import rehearse  # which needs the helpers of the tests

        write(rehearse.rows(), given.output or ROOT / "benchmarks" / "results" / "gpu_rehearsal.json")
        return
    for path in given.text:
        if not path.is_file():
            parser.error(f"no file {path}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no GPU: give --device cpu with --tiny to rehearse")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if given.device == "auto" else given.device
    text = given.text or ([data_path("assets") / "domains" / "english.txt"] if given.tiny else [])
    name = "build/gpu_tiny.json" if given.tiny else "benchmarks/results/gpu.json"
    output = given.output or ROOT / name
    setting = Setting(given.tiny, device, text)
    if given.list:
        print(listing(given.stages, setting))
        return
    if device == "cpu" and not given.tiny:
        parser.error("there is no GPU here: --tiny rehearses the stages on a CPU")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("rope_patch").setLevel(logging.ERROR)  # it warns about each method here that changes nothing
    gc.collect()
    gc.freeze()  # the many collections between cells then skip the objects that imports created
    try:
        suite = Suite(setting, output, given.budget, again=given.again)
        left = suite.run(given.stages)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(f"\nstopped: finished cells are in {output}, and the same command goes on")
    print(f"written to {output}" + (f"; {len(left)} cells are left" if left else ""))
    if suite.failed:
        sys.exit(f"error: {len(suite.failed)} cells failed: {', '.join(suite.failed)}")


if __name__ == "__main__":
    main()
