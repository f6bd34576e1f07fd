"""Compare tokens and time of our retrieval grid with lm-eval's own ``generate_until``, on identical prompts.

    OMP_NUM_THREADS=1 python benchmarks/retrieval_grid.py -o benchmarks/results/retrieval_grid.json

The bundled checkpoints are patched, and asked for a key at each of 11 depths. Both sides get the same prompts, one at a
time, run in one process in turn, in an order that alternates; their answers are compared string by string. Two figures:
``asking``, from prompts to answers, and ``whole``, from the haystack's text to scores, prompts made on both sides. The
figure is the median over rounds of lm-eval's CPU time / ours; above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_patch
from measuring import command, environment, ratio, time_in_turn, write
from rope_patch.evaluation.generate_answers import answer_prompts
from rope_patch.evaluation.prompts import Prompt, PromptMaker
from rope_patch.evaluation.retrieval import retrieval
from rope_patch.modeling.scoring import Reader

CHECKPOINTS = ("llama", "gemma3")
TASK = "passkey"
SEED = 0


class Counter:
    """Counts the tokens that a model's decoder reads."""

    def __init__(self, model: Any) -> None:
        self.tokens = 0
        model.get_decoder().register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the tokens of one call."""
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        self.tokens += ids.numel()


class Side:
    """Asks the prompts, and stores the answers and the number of tokens that were read for them."""

    def __init__(self, ask: Callable[[], list[str]], counter: Counter) -> None:
        self.ask, self.counter = ask, counter

    def __call__(self) -> None:
        """Ask all prompts once."""
        self.counter.tokens = 0
        self.answers = self.ask()
        self.tokens = self.counter.tokens


class Grid:
    """One checkpoint and length: the prompts, and the functions of both sides that answer them."""

    def __init__(self, model: Any, tokenizer: Any, length: int, depths: list[float], samples: int) -> None:
        self.model, self.tokenizer, self.length = model, tokenizer, length
        self.depths, self.samples = depths, samples
        self.columns = self.make()

    def make(self) -> list[list[Prompt]]:
        """Return the prompts: a list of all depths for each sample."""
        maker = PromptMaker(self.tokenizer, "builtin")
        return [maker.prompts(TASK, self.length, self.depths, seed=SEED, sample=i) for i in range(self.samples)]

    def lm_eval_asks(self, columns: list[list[Prompt]]) -> list[str]:
        """Return the answers that lm-eval's own HFLM generates."""
        # By default HFLM cuts prompts to the length that the checkpoint was trained at; a prompt and its answer just
        # fit into ours.
        lm = HFLM(pretrained=self.model, tokenizer=self.tokenizer, batch_size=1, max_length=self.length)
        requests = [
            Instance(
                request_type="generate_until",
                doc={},
                arguments=(prompt.text, {"until": [], "max_gen_toks": prompt.answer, "do_sample": False}),
                idx=i,
            )
            for i, prompt in enumerate(prompt for column in columns for prompt in column)
        ]
        return lm.generate_until(requests, disable_tqdm=True)

    def we_ask(self, columns: list[list[Prompt]]) -> list[str]:
        """Return the answers of our engine, haystack by haystack."""
        reader, answers = Reader(self.model), []
        for column in columns:
            for (got,) in answer_prompts(reader, [[prompt] for prompt in column], stops=(self.tokenizer.eos_token_id,)):
                answers.append(self.tokenizer.decode(list(got.output), skip_special_tokens=True))
        return answers

    def lm_eval_whole(self) -> list[str]:
        """Make prompts and ask lm-eval."""
        return self.lm_eval_asks(self.make())

    def retrieval_whole(self) -> list[str]:
        """Call the function that users call."""
        result = retrieval(
            self.model,
            self.tokenizer,
            TASK,
            lengths=[self.length],
            depths=self.depths,
            samples=self.samples,
            seed=SEED,
            haystack="builtin",
            batch_tokens=1,  # one prompt at a time, as lm-eval reads them here
        )
        cells = sorted(result.cells, key=lambda cell: self.depths.index(cell.depth))
        return [cell.samples[i].output for i in range(self.samples) for cell in cells]

    def works(self) -> dict[str, dict[str, Callable[[], list[str]]]]:
        """Return the functions that are timed, by figure and side."""
        return {
            "asking": {"lm_eval": lambda: self.lm_eval_asks(self.columns), "ours": lambda: self.we_ask(self.columns)},
            "whole": {"lm_eval": self.lm_eval_whole, "ours": self.retrieval_whole},
        }


def measure(grid: Grid, counter: Counter, repeats: int) -> dict[str, Any]:
    """Time both sides alternately, compare their answers and count the tokens that they read."""
    row: dict[str, Any] = {"prompts": sum(map(len, grid.columns)), "rounds": repeats}
    for figure, asked in grid.works().items():
        sides = {name: Side(ask, counter) for name, ask in asked.items()}
        times = time_in_turn(sides, repeats)
        theirs, ours = sides["lm_eval"], sides["ours"]
        row[figure] = {
            "cpu_ratio": ratio(times["cpu"], "lm_eval", "ours", digits=3),
            "wall_ratio": ratio(times["wall"], "lm_eval", "ours", digits=3),
            "tokens_ratio": round(theirs.tokens / ours.tokens, 3),
            "lm_eval_tokens": theirs.tokens,
            "our_tokens": ours.tokens,
            "lm_eval_cpu_s": round(statistics.median(times["cpu"]["lm_eval"]), 3),
            "our_cpu_s": round(statistics.median(times["cpu"]["ours"]), 3),
            "outputs_identical": theirs.answers == ours.answers,
            "outputs_different": sum(a != b for a, b in zip(theirs.answers, ours.answers, strict=True)),
        }
        right = [prompt.parts[0] for column in grid.columns for prompt in column]
        row["right"] = sum(s.strip().startswith(r) for s, r in zip(ours.answers, right, strict=True))
        row["outputs"] = ours.answers[: len(grid.depths)]
    return row


def main() -> None:
    """Measure all checkpoints and lengths, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; standard output by default")
    parser.add_argument("--checkpoints", nargs="+", choices=CHECKPOINTS, help="both by default")
    parser.add_argument("--method", default="yarn:factor=4")
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; 1024 and 2048 by default")
    parser.add_argument("--depths", type=int, help="how many; 11 by default")
    parser.add_argument("--samples", type=int, help="haystacks per length; 2 by default")
    parser.add_argument("--repeats", type=int, help="rounds; 5 by default")
    parser.add_argument("--quick", action="store_true", help="a size that takes seconds")
    options = parser.parse_args()
    quick = options.quick
    lengths = options.lengths or ([256] if quick else [1024, 2048])
    count = options.depths or (3 if quick else 11)
    checkpoints = options.checkpoints or (CHECKPOINTS[:1] if quick else CHECKPOINTS)
    samples, repeats = options.samples or (1 if quick else 2), options.repeats or (1 if quick else 5)
    depths = [round(i / (count - 1), 3) for i in range(count)] if count > 1 else [0.5]
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    results = []
    bar = tqdm(total=len(checkpoints) * len(lengths), desc="grids")
    for name in checkpoints:
        folder = rope_patch.data_path("assets") / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        rope_patch.apply(model, options.method)
        counter = Counter(model)
        first = Grid(model, tokenizer, 128, [0.5], 1)  # loads kernels and libraries before anything is timed
        first.we_ask(first.columns)
        first.lm_eval_asks(first.columns)
        for length in lengths:
            measured = measure(Grid(model, tokenizer, length, depths, samples), counter, repeats)
            results.append({"checkpoint": name, "length": length, **measured})
            bar.update()
    bar.close()
    lowest = {
        figure: {
            "cpu_ratio": min(row[figure]["cpu_ratio"]["median"] for row in results),
            "tokens_ratio": min(row[figure]["tokens_ratio"] for row in results),
        }
        for figure in ("asking", "whole")
    }
    report = {
        "benchmark": "retrieval_grid",
        "command": command(),
        "what": "lm-eval's CPU time / ours and lm-eval's tokens / ours, same prompts, greedy, one at a time",
        "summary": {
            "lowest_median": lowest,
            "outputs_identical": all(row[f]["outputs_identical"] for row in results for f in ("asking", "whole")),
            "outputs_compared": 2 * sum(row["prompts"] for row in results),
        },
        "settings": {
            "task": TASK,
            "method": options.method,
            "depths": depths,
            "samples": samples,
            "seed": SEED,
            "dtype": "float32",
            "batch": 1,
        },
        "environment": environment("lm_eval"),
        "results": results,
    }
    write(report, options.output)
    print(json.dumps(report["summary"], indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
