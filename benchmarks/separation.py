"""Which score of which retrieval task tells methods apart on small models, for the tokens that it reads.

    python benchmarks/separation.py llama gemma3 -o benchmarks/results/separation.json
    python benchmarks/separation.py build/smollm2/SmolLM2-135M-Instruct --length 12288 --factor 2 --samples 2 -o FILE

Each task is measured unpatched, under YaRN and under ABF. Three scores of the same answers are compared: the exact
match, the ratio of matching characters (difflib's, as OpenAI grades MRCR), and the log-probability of the right answer.
For two methods, the squared effect (mean of the paired differences over their standard deviation) divided by the
thousands of tokens that a prompt takes is how fast evidence grows with what is read. Finished tasks stay in build/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

import rope_patch
from measuring import command, environment, write
from rope_patch.evaluation.compare import compare
from rope_patch.evaluation.retrieval.measure import Sample
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.evaluation.tasks import TASKS, Draw, Question, Task
from rope_patch.evaluation.tasks.base import ADJECTIVES, NOUNS, CrowdedTask, endless_pairs
from rope_patch.evaluation.tasks.niah_multikey_2 import NiahMultikey2
from rope_patch.options.evaluation import EvalSpec

# --- candidates, which are no tasks of the package --------------------------------------------------------------------

KINDS = ["ballad", "letter", "note", "poem", "report", "riddle", "song", "speech", "story", "tale"]


class Mrcr(CrowdedTask, name="mrcr"):
    """Two requests for the same piece of writing, of whose answers the first or the second is to be repeated."""

    source = (
        "OpenAI (2025), MRCR, after Vodrahalli et al. (2024), Michelangelo, arXiv:2409.12640, with two needles; ours "
        "has lines of random words where theirs are by a model, and no random prefix to repeat"
    )
    opening = "A conversation."
    needle = " User: Write a {name}. Assistant: {value}."
    question = "{name}"
    digits, anywhere = 0, False

    def values_and_names(self, count: int, draw: Draw) -> tuple[list[str], list[str]]:
        """Return lines, and the pieces of writing that they answer."""
        return draw.of_common_length(endless_lines, count), draw.of_common_length(endless_requests, count)

    def others(self, draw: Draw) -> Iterator[tuple[str, str]]:
        """Yield other requests and answers."""
        return zip(endless_requests(draw.rng), endless_lines(draw.rng), strict=False)

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return a question for each depth; the needle at a depth below one half is the first of the two."""
        questions = []
        for one, twin in zip(super().questions(depths, draw), endless_lines(draw.rng), strict=False):
            (depth,), which = one.depths, "first" if one.depths[0] < 0.5 else "second"
            other = (depth + 0.5 if which == "first" else depth - 0.5), self.needle.format(name=one.text, value=twin)
            text = f" User: Repeat the {which} {one.text}, word for word. Assistant:"
            questions.append(replace(one, hidden=tuple(sorted((*one.hidden, other))), text=text))
        return questions


class MkNiahBasic(NiahMultikey2, name="mk_niah_basic"):
    """A number of ten digits for two words, among others."""

    source = "RULERv2 (NVIDIA-NeMo/Skills, ruler2, mk_niah_basic); our sentences and words, needles at stated depths"
    digits = 10


class MvNiahBasic(Task, name="mv_niah_basic"):
    """Several numbers of two words, among others with as many numbers each."""

    source = "RULERv2 (NVIDIA-NeMo/Skills, ruler2, mv_niah_basic); our sentences and words, a value at each depth"
    joined = anywhere = True

    def questions(self, depths: Sequence[float], draw: Draw) -> list[Question]:
        """Return the one question that asks for all numbers."""
        values, (name,) = draw.numbers(len(depths), 10), draw.of_common_length(endless_pairs, 1)
        pieces, names = list[str](), (other for other in endless_pairs(draw.rng) if other != name)

        def context(size: int) -> list[str]:
            while len(pieces) < size:
                keys = list(itertools.islice(names, 16)) * len(depths)
                draw.rng.shuffle(keys)
                pieces.extend(f" One magic number of {key} is {draw.rng.randrange(10**9, 10**10)}." for key in keys)
            return pieces[:size]

        needles = (f" One magic number of {name} is {value}." for value in values)
        text, prefix = f" What are all the magic numbers of {name}?", f" In order, the magic numbers of {name} are"
        opening, hidden = "Some words have magic numbers.", tuple(zip(depths, needles, strict=True))
        return [Question(hidden, text, prefix, tuple(values), tuple(depths), context, opening)]


def tokens_computed(spec: EvalSpec) -> float:
    """Return how many tokens the model computes in one run: fewer than the prompts hold.

    Prompts of one haystack share the text before the needle, and the model computes that part once.
    """
    # The prompt with the deepest needle is computed whole. A prompt with its needle at depth d shares its first d with
    # that one, so only the remaining 1 - d of it is computed.
    whole = len(spec.depths) - math.fsum(spec.depths[:-1])  # prompts, counted in lengths
    prompts = spec.samples * math.fsum(1 if TASKS.find(task).joined else whole for task in spec.tasks)
    return (spec.windows or 0) * spec.longest + prompts * sum(spec.lengths)


def endless_requests(rng: random.Random) -> Iterator[str]:
    """Yield pieces of writing that may be asked for, all different."""
    for pair in endless_pairs(rng):
        yield f"{rng.choice(KINDS)} about the {pair.replace('-', ' ')}"


def endless_lines(rng: random.Random) -> Iterator[str]:
    """Yield lines of four things."""
    adjectives, nouns = ADJECTIVES.split(), NOUNS.split()
    while True:
        yield ", ".join(f"{rng.choice(adjectives)} {rng.choice(nouns)}" for _ in range(4))


# --- what is measured -------------------------------------------------------------------------------------------------

SCORES = {
    "exact": lambda sample: sample.correct,
    "ratio": lambda sample: SequenceMatcher(None, sample.expected, sample.output.strip()).ratio(),
    "logprob": lambda sample: sample.logprob,
}
"""The scores of an answer."""


def prompts(task: str, haystacks: list[tuple[Sample, ...]]) -> list[Sample]:
    """Return a sample for each prompt: where one asks for several parts, the share that is right of all of them."""
    if not TASKS[task].joined:
        return [sample for haystack in haystacks for sample in haystack]
    return [
        replace(
            parts[0],
            expected=", ".join(part.expected for part in parts),
            correct=statistics.fmean(part.correct for part in parts),
            logprob=math.fsum(part.logprob for part in parts),
        )
        for parts in haystacks
    ]


def pair(ours: list[float], theirs: list[float], tokens: float) -> dict[str, float]:
    """Return how two methods differ in one score, prompt by prompt.

    Args:
        ours: the score of each prompt under one method.
        theirs: the same under another.
        tokens: tokens that a prompt takes under each of the two methods.
    """
    changes = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, count = statistics.fmean(changes), len(changes)
    # Where all prompts change alike there is no spread: the effect is then said to be as large as they are many.
    spread = statistics.stdev(changes) or abs(mean) / math.sqrt(count)
    effect = (mean / spread) ** 2 if mean else 0.0
    return {"mean": mean, "t": math.copysign(math.sqrt(effect * count), mean), "per_ktok": effect / tokens * 1e3}


def measured(model: Any, tokenizer: Any, task: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what the scores of one task say of each pair of methods, at one length."""
    spec = EvalSpec([given.length], tasks=[task], windows=0, samples=given.samples, depths=given.depths)
    started = time.perf_counter()
    methods = ["default", *(f"{name}:factor={given.factor}" for name in ("yarn", "abf"))]
    found = compare(model, tokenizer, methods, EvalSuite(spec, tokenizer), resume=folder / f"{task}.jsonl")
    answers = [prompts(task, row.scores.retrieval[task].haystacks(given.length)) for row in found.rows]
    tokens = tokens_computed(spec) / len(answers[0])
    values = {name: [[float(of(one)) for one in row] for row in answers] for name, of in SCORES.items()}
    return {
        "task": task,
        "length": given.length,
        "prompts": len(answers[0]),
        "seconds": round(time.perf_counter() - started, 1),
        "means": {name: [round(statistics.fmean(row), 4) for row in rows] for name, rows in values.items()},
        "pairs": {
            name: {
                f"{methods[b]} - {methods[a]}": pair(rows[b], rows[a], tokens)
                for a, b in itertools.combinations(range(len(methods)), 2)
            }
            for name, rows in values.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="bundled models (llama, gemma3) or folders")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="retrieval tasks")
    parser.add_argument("--length", type=int, default=1024, help="length of prompt and answer [tokens]")
    parser.add_argument("--factor", type=int, default=4, help="factor of YaRN and of ABF")
    parser.add_argument("--samples", type=int, default=16, help="haystacks")
    parser.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.5, 0.9], help="depths of the needles")
    parser.add_argument("--dtype", default="float32", help="data type of the model")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of the results, which are added to")
    given = parser.parse_args()
    threads = int(os.environ["OMP_NUM_THREADS"])
    torch.set_num_threads(threads)
    report = {
        "benchmark": "separation",
        "command": command(),
        "what": "how well three scores of retrieval tasks tell methods apart, for the tokens read",
        "environment": environment(threads=threads),
        "rows": [],
    }
    if given.output.exists():
        report = json.loads(given.output.read_text())
    for source in given.models:
        folder = rope_patch.data_path("assets") / source if source in ("llama", "gemma3") else Path(source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        model = rope_patch.load(folder, dtype=getattr(torch, given.dtype)).eval()
        work = Path("build/separation") / folder.name
        work.mkdir(parents=True, exist_ok=True)
        for task in given.tasks:
            row = {"model": folder.name} | measured(model, tokenizer, task, given, work)
            row |= {"command": command(), "threads": threads}
            same = ("model", "task", "length")
            report["rows"] = [old for old in report["rows"] if any(old[key] != row[key] for key in same)] + [row]
            write(report, given.output)


if __name__ == "__main__":
    main()
