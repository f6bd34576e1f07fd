"""Say for every causal language model type of the installed transformers what patching does there.

    python benchmarks/families.py                 # all types, in a few minutes of one core
    python benchmarks/families.py llama qwen3     # some types, to the terminal

Each type is built as a tiny random model (``family_models.py``) and goes through ten checks under four methods
(``family_checks.py``). One process runs the checks; another one, where rope_patch cannot be imported, reloads what was
saved. If one dies or takes too long, the report says so, and a new process continues with the next type. The full run
writes ``benchmarks/results/families.json`` and the page ``docs/families.md``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from tqdm import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

# None of this imports rope_patch: the process that reloads is forked from this one.
from family_models import IDS, TYPES, in_own_memory

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "families.json"
PAGE = ROOT / "docs" / "families.md"
# Seconds that a job may take: a tiny model that needs longer hangs.
TIME_LIMIT = 120
MEANINGS = {
    "works": "every check passes, with every method that is not refused",
    "in part": "`apply` succeeds and a later check fails",
    "refused": "`apply` raises an error that gives the reason, and changes nothing",
    "no rotary table": "the model has no rotary embedding, or one without a table of frequencies",
    "crashes": "an error that gives no reason, or a wrong one, or a patched model that does not run",
    "not built": "no tiny model could be built, or it does not run by itself",
}
CHECKS = {
    "built": "the tiny model is built, and its own forward pass runs",
    "located": "`rope_patch.inspect` finds the rotary tables",
    "applied": "`rope_patch.apply` succeeds with at least one of the methods",
    "effect": "the logits change",
    "verified": "`rope_patch.verify` passes",
    "cached": "generation with a cache gives the logits of a full forward pass, to 1e-4",
    "saved": "what `rope_patch.save` writes gives equal logits without rope_patch, loaded in float32 and in bfloat16",
    "cast": "casting the model to bfloat16 and back leaves cos and sin as they were",
    "adapter": "a random LoRA adapter, saved by `rope_patch.save` and loaded by `rope_patch.load`, gives equal logits",
    "restored": "`Patch.restore` gives back equal logits and the config",
}
# From mildest to worst: a type has the worst result of its methods.
WEIGHT = ["not built", "no rotary table", "refused", "works", "in part", "crashes"]
PAGE_HEAD = """# Model families

Which of the {total} causal language model types of transformers can be patched. `rope-patch doctor MODEL` looks at a
checkpoint itself, whose options may differ from its type's default config.

```bash
python benchmarks/families.py
```

writes this page, here with {versions}. Every type is built as a tiny
random model and patched with `yarn`, `abf`, `p_rope` and a halved `table`. Ten checks follow, equal to the last bit:
among them that the logits change, generation with a cache, saving and loading without `rope_patch`, a cast to bfloat16,
a LoRA adapter, and restoring ([results](../benchmarks/results/families.json)). A check that fails without a patch too
does not count.

| result | types | meaning |
|---|---|---|"""
LISTED = ("works", "no rotary table")
"""Results whose types are listed by name alone; types with another result are listed with the reason."""
Report = dict[str, Any]

# --- processes


class Worker:
    """A process that does one job after another, and is replaced if it dies or takes too long."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self.process: Any = None

    def __call__(self, job: Any) -> Any:
        """Return what the work returns.

        Raises:
            RuntimeError: the process died, exceeded the time limit, or the checks themselves raised an error.
        """
        if self.process is None:
            context = multiprocessing.get_context("fork")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(self.work, theirs), daemon=True)
            self.process.start()
            # As long as this process held the worker's end open, recv would not notice that the worker died.
            theirs.close()
        self.pipe.send(job)
        try:
            if self.pipe.poll(TIME_LIMIT):
                # An answer that is text is the message of an error in the worker.
                if not isinstance(answer := self.pipe.recv(), str):
                    return answer
                raise RuntimeError(f"the checks themselves failed: {answer}")
            problem = f"it took more than {TIME_LIMIT} s"
        except EOFError:
            problem = "its process died"
        self.process.kill()
        self.process = None
        raise RuntimeError(problem)


def _serve(work: Callable[[Any], Any], pipe: Any) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    while True:
        job = pipe.recv()
        try:
            answer = work(job)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pipe.send(answer)


def run_checks(job: tuple[str, str]) -> Report:
    """Run the checks of one type; rope_patch is imported in this process only."""
    import family_checks

    return family_checks.run_checks(job)


@torch.no_grad()
def reload_folders(folder: str) -> dict[str, str]:
    """Load every saved model with transformers alone and compare its logits; return what is wrong, by folder."""
    sys.modules["rope_patch"] = None  # type: ignore[assignment]  # importing it would fail
    problems = {}
    for logits in Path(folder).glob("*.pt"):
        problems[logits.stem] = ""
        for dtype, expected in torch.load(logits).items():
            try:
                model = AutoModelForCausalLM.from_pretrained(logits.with_suffix(""), dtype=dtype)
            except Exception as error:
                problems[logits.stem] = f"{type(error).__name__}: {' '.join(str(error).split())}"
                continue
            error = float((in_own_memory(model)(IDS, use_cache=False).logits - expected).abs().max())
            if error:
                problems[logits.stem] = f"in {dtype} it reloads with logits {error:.1g} off"
    return problems


# --- results


def examine(model_type: str, checks: Worker, reloads: Worker) -> Report:
    """Return the report on one type."""
    problems: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = checks((model_type, folder))
            problems = reloads(folder) if report["methods"] else {}
        except RuntimeError as error:
            report = {"model_class": "", "result": "crashes", "reason": str(error), "methods": {}, "left_out": {}}
    return conclude(model_type, report, problems)


def conclude(model_type: str, report: Report, problems: dict[str, str]) -> Report:
    """Combine the outcomes of the methods and of reloading into one result, the state of every check, and reasons."""
    # If the unpatched model does not reload either, the patch is not to blame.
    if problems.get("unpatched"):
        report["left_out"]["saved"] = f"without a patch: {problems['unpatched']}"
        problems = {}
    for name, outcome in report["methods"].items():
        if problems.get(name):
            outcome["result"] = "in part"
            outcome["fails"].setdefault("saved", problems[name])
    outcomes: dict[str, Report] = report["methods"]
    worst = max(outcomes.values(), key=lambda outcome: WEIGHT.index(outcome["result"]), default=report)
    fails: dict[str, str] = {}
    for name, outcome in outcomes.items():
        for check, problem in outcome.get("fails", {}).items():
            fails.setdefault(check, f"with {name}: {problem}")
    applied = any("fails" in outcome for outcome in outcomes.values())
    reached = {"built": report.get("result") != "not built", "located": bool(outcomes)}
    states = {check: "passes" if reached.get(check, applied) else "not reached" for check in CHECKS}
    states |= dict.fromkeys(report["left_out"], "left out") | dict.fromkeys(fails, "fails")
    return {
        "type": model_type,
        "model_class": report["model_class"],
        "result": worst["result"],
        "reason": worst["reason"] or _grouped("fails", fails),
        "checks": states,
        "methods": {name: _outcome(outcome, worst["reason"]) for name, outcome in outcomes.items()},
        "left_out": report["left_out"],
    }


def _outcome(outcome: Report, given: str) -> str:
    if "fails" in outcome:
        return f"fails {', '.join(outcome['fails'])}" if outcome["fails"] else "works"
    return outcome["result"] if outcome["reason"] == given else f"{outcome['result']}: {outcome['reason']}"


def _grouped(label: str, reasons: dict[str, str]) -> str:
    """Join reasons into a sentence; one that several checks or methods share is named once."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return "; ".join(f"{label} {', '.join(group)} ({shorten(reason)})" for reason, group in names.items())


def examine_all(model_types: list[str]) -> list[Report]:
    """Return a report on each type."""
    checks, reloads = Worker(run_checks), Worker(reload_folders)
    return [examine(model_type, checks, reloads) for model_type in tqdm(model_types, desc="types")]


# --- the page


def shorten(text: str, limit: int = 260) -> str:
    """Return a text that is cut at a word and safe in a Markdown table."""
    text = text.replace("|", "\\|")
    return text if len(text) <= limit else text[: text.rindex(" ", 0, limit)] + " …"


def page(report: Report) -> str:
    """Return the page docs/families.md for a report."""
    versions = ", ".join(f"{name} {report['environment'][name]}" for name in ("transformers", "peft", "torch"))
    lines = [PAGE_HEAD.format(versions=versions, total=len(report["results"]))]
    lines += [f"| {name} | {report['counts'].get(name, 0)} | {meaning} |" for name, meaning in MEANINGS.items()]
    reasons = [each for each in report["results"] if each["result"] not in LISTED]
    lines += ["", "| type | result | reason |", "|---|---|---|"]
    lines += [f"| `{each['type']}` | {each['result']} | {shorten(each['reason'], 100)} |" for each in reasons]
    for result in LISTED:
        names = [f"`{each['type']}`" for each in report["results"] if each["result"] == result]
        lines += ["", f"## {result.capitalize()}", "", ", ".join(names)]
    return "\n".join([*lines, ""])


def main() -> None:
    """Examine the types; write the report and the page, or print the results of some types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all of them by default")
    parser.add_argument("-o", "--output", type=Path, help=f"JSON file; {RESULTS.name} for a full run")
    options = parser.parse_args()
    if unknown := set(options.types) - set(TYPES):
        parser.error(f"not a causal language model type of transformers {transformers.__version__}: {sorted(unknown)}")
    results = examine_all(options.types or TYPES)

    from measuring import command, environment, write  # imports rope_patch

    report = {
        "benchmark": "families",
        "command": command(),
        "what": "ten checks of every causal language model type, each a tiny random model, under four methods",
        "counts": dict(Counter(each["result"] for each in results)),
        "environment": environment("peft"),
        "results": results,
    }
    write(report, options.output if options.types else options.output or RESULTS)
    if not options.types:
        PAGE.write_text(page(report))
    print(report["counts"], file=sys.stderr)


if __name__ == "__main__":
    main()
