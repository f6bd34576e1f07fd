"""Short fits of tiny models to the bundled texts, and fits whose held-out scores are given by a test."""

from __future__ import annotations

from pathlib import Path

import rope_patch
from rope_patch.evaluation.retrieval import RetrievalCell, RetrievalResult
from rope_patch.evaluation.suite import EvalResult
from rope_patch.fitting import Candidate, fit, held_out_spec
from rope_patch.fitting.draw_rows import DrawnRows
from rope_patch.fitting.fit_run import FitRun
from rope_patch.methods import Default
from support.evaluated import answered, perplexity_of, result_of
from support.tiny import small

ASSETS = Path(rope_patch.data_path("assets"))
TEXT = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((ASSETS / "domains").glob("*.txt")))
LENGTHS = (64, 128)


def fitted(model, tokenizer, data=TEXT, *, target_length=96, windows=2, samples=1, depths=(0.0, 1.0), **options):
    """A fit of four steps that is evaluated on few windows and prompts."""
    asked = {"windows": windows, "samples": samples, "depths": depths}
    spec = held_out_spec(model, target_length, seed=options.get("seed", 0), **asked)
    return fit(model, tokenizer, data, target_length=target_length, spec=spec, **{"steps": 4, **options})


def candidate(name, found, nll, loss=0.1, *, second=None, method=None, depths=1):
    """A candidate of a fit with given scores.

    Args:
        name: the name of the candidate.
        found: how many of ten haystacks are answered at each of two lengths, at all depths alike.
        nll: losses of the windows in two buckets of 64 tokens, the near one first [nats/token].
        loss: loss of the answers [nats/token].
        second: losses on the text of the second domain; None if there is none.
        method: the method of the candidate.
        depths: number of depths at which each haystack is asked.
    """
    cells = [
        RetrievalCell(n, i / depths, tuple(answered("7", "7", j < count, -loss) for j in range(10)))
        for n, count in zip(LENGTHS, found, strict=True)
        for i in range(depths)
    ]
    text, other = (each and perplexity_of(list(zip(*each, strict=True)), (0, *LENGTHS)) for each in (nll, second))
    scores = result_of(text, RetrievalResult("passkey", tuple(cells), 0, "", "", None, ()))
    return Candidate(name, method or Default(), scores, other and EvalResult(scores.spec, other, {}))


class Verdicts:
    """An evaluator of candidates that returns the scores that a test gives, without any text or prompts.

    Attributes:
        model: the model whose table is fitted.
        scores: function that returns the scores of a candidate by its name.
        tables: the logarithms of factors of each candidate that was evaluated, by name.
        run: the run of the fit.
    """

    START = ((10, 5), ([2.0], [3.0]), 0.1)
    WORSE = ((10, 5), ([2.1], [3.1]), 0.1)

    def __init__(self, model, scores):
        self.model, self.scores, self.tables, self.run = model, scores, {}, None

    def __call__(self, name, method):
        self.tables[name] = self.run.table.log_factors[0].detach().clone()
        return candidate(name, *(self.START if name == "start" else self.scores(name)), method=method)


def run_of(tokenizer, scores, *, retrieval=0.8, positions="full", change=None):
    """The run of a fit, its evaluator, and two lists that each step extends.

    The first holds the learning rates of the steps, that for text first; the second the table before each step.
    """
    model = small()
    method = rope_patch.apply(model, "yarn:factor=1.5", target_length=96).method
    rows = DrawnRows(tokenizer, TEXT, answers=retrieval > 0, positions=positions, trained=64, target=96, seed=0)
    verdicts = Verdicts(model, scores)
    run = verdicts.run = FitRun(method, ChangedRows(rows, change) if change else rows, verdicts, retrieval)
    rates, before = [], []

    def begins(optimizer, *_):
        rates.append([group["lr"] for group in optimizer.param_groups])
        before.append(sum(part.detach() for part in run.parts).clone())

    run.adam.register_step_pre_hook(begins)
    return run, verdicts, rates, before


class ChangedRows:
    """The rows of a fit with other weights, which ``change(goal, weights)`` returns."""

    def __init__(self, rows, change):
        self.rows, self.change = rows, change
        self.goals, self.skipping, self.target = rows.goals, rows.skipping, rows.target

    def __call__(self, step, goal):
        for ids, labels, weights, positions in self.rows(step, goal):
            yield ids, labels, self.change(goal, weights), positions
