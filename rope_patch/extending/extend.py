"""``rope_patch.extend``: candidates, rounds of measurements, evidence, choice, and what is written."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_patch.checkpoints.save_load import load
from rope_patch.checkpoints.source_files import like
from rope_patch.evaluation.compare import UNPATCHED, Comparison, Row, row_name
from rope_patch.evaluation.finished_work import FinishedWork, open_work
from rope_patch.evaluation.needle_suite import NeedleSuite
from rope_patch.extending.begin import Start, begin
from rope_patch.extending.choose import Choice, rank
from rope_patch.extending.evidence import Findings, measured_in
from rope_patch.extending.explain import explain, no_time
from rope_patch.extending.measure import Clock, measure
from rope_patch.extending.result import Extended
from rope_patch.extending.served_by import served_by
from rope_patch.extending.train_adapter import MODEL_COPY, plan_training, train_adapter
from rope_patch.extending.write_extended import check_output, write_extended
from rope_patch.options.extend import ExtendSettings
from rope_patch.options.yaml_and_json import options_from_dict, to_yaml
from rope_patch.patching.verify import inspect_model
from rope_patch.runtime import progress
from rope_patch.runtime.folders import locked_output, write_atomically
from rope_patch.runtime.parallel import alone, from_first_process, processes
from rope_patch.runtime.result_cache import RESULT_CACHE


def extend(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    output: str | Path,
    overwrite: bool = False,
    **options: Any,
) -> Extended:
    """Find the method that brings a model to a longer context, and write a checkpoint that plain transformers loads.

    Candidates are measured by successive halving: all of them on few windows of text, the better half on more, until
    two are left and differ clearly, or the budget ends. A needle lies in each window within the trained context, so
    that one reading measures the perplexity at all positions and asks for the needle at every length. Of the methods
    that reach the length and raise perplexity within the trained context by no more than the tolerance, those that are
    clearly worse at retrieval, at perplexity beyond the context, or in price are dropped, and the cheapest of the rest
    is chosen. Where no method will do, nothing is written, and the result says what would help.

    Finished work is kept in ``OUTPUT.work``: after Ctrl-C or a crash the same call goes on where it was.

    Args:
        model: a causal language model that is not patched; it is left as it was, and where it was. The process that
            checks what was written, and a training, load weights of their own beside it.
        tokenizer: the tokenizer of the model.
        output: the folder to write; new or empty unless ``overwrite`` is given.
        overwrite: whether to write into a folder that holds files.
        **options: further options, the fields of :class:`~rope_patch.options.extend.ExtendSettings`, of which
            ``length`` is required: the context to reach [tokens].

    Raises:
        ValueError: a bad option or method, or a model that reaches the length already; raised before anything is
            measured.
        PatchError: the model is patched already.
        BlockingIOError: another run writes this output.
        RuntimeError: plain transformers gives other logits from what was written.

    Example:
        ``extend(model, tokenizer, length=32768, output="llama-32k", budget=1800)``
    """
    name = model.config.name_or_path or type(model).__name__
    settings = options_from_dict(ExtendSettings, {"model": name, **options})
    out = Path(output)
    check_output(settings, out, overwrite)
    start = begin(model, tokenizer, settings)
    with contextlib.ExitStack() as stack:
        # The first process alone: the others would be refused as other commands.
        from_first_process(lambda: bool(stack.enter_context(locked_output(work_folder(out)))))
        return carry_out(model, tokenizer, start, out, overwrite=overwrite)


def work_folder(output: Path) -> Path:
    """Return the folder of the measurements of a run."""
    return output.with_name(f"{output.name}.work")


def carry_out(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    start: Start,
    output: Path,
    *,
    overwrite: bool = False,
    owned: bool = False,
    report: Callable[[Extended, Path], object] = lambda *_: None,
) -> Extended:
    """Measure, choose, train if asked to, and write; finished work is not repeated.

    Args:
        model: the model to be extended.
        tokenizer: the tokenizer of the model.
        start: what the run begins with.
        output: the folder to write.
        overwrite: whether to write into a folder that holds files.
        owned: whether nobody else needs the model, so that its weights are freed before others are loaded.
        report: a function that writes the report of an outcome into a folder.
    """
    options = start.options
    work = work_folder(output)
    work.mkdir(parents=True, exist_ok=True)
    write_atomically(work / "extend.yaml", to_yaml(options))
    finished = open_work(model, work / RESULT_CACHE)
    assert finished is not None
    clock = start.clock
    suite = choose_task(model, start.suites, clock, finished)
    comparisons = measure(model, suite, start.methods, clock, finished, options)
    outcome = Extended(options, start.trained_length, work, tuple(comparisons))
    if not comparisons:
        return replace(outcome, verdict=tuple(no_time(start.methods, clock.window, options)))
    methods = [row.method for row in comparisons[-1].rows]
    served = {method: served_by(model, method, options.model, options.length) for method in methods}
    measured, choice = decide(comparisons[-1], served, options, conditions=not options.train)
    chosen: Any = model
    if options.train and choice.method is not None:
        # All processes train alike, though each has a time of its own.
        speed: float = from_first_process(lambda: options.length / clock.window)
        training = plan_training(model, options, start.trained_length, speed)
        adapter = train_adapter(model, tokenizer, choice.method, options, training, work, owned=owned)
        progress.say("measuring the adapted model")
        adapted: Any = load(adapter, **like(model)).eval()
        row = row_after_training(adapted, choice.method, suite.smaller(comparisons[-1].spec.samples), finished)
        last = replace(comparisons[-1], rows=(*comparisons[-1].rows, row))
        outcome = replace(outcome, training=training, comparisons=(*comparisons[:-1], last))
        measured, choice = decide(last, served, options)
        if choice.chosen is not None and choice.chosen.trained:
            chosen = adapted.merge_and_unload().eval()
        elif owned:
            chosen = load(work / MODEL_COPY, **like(model)).eval()
        del adapted
    write_atomically(work / "comparison.json", outcome.comparison.to_json())
    outcome = replace(outcome, choice=choice, verdict=tuple(explain(measured, choice, options, output)))
    if choice.method is None or processes()[0] > 0:  # the first process writes for all
        return outcome
    owned = owned or chosen is not model
    with alone():
        outcome = write_extended(outcome, output, chosen, tokenizer, overwrite=overwrite, owned=owned, report=report)
    # A second checkpoint, which the same command would write again.
    shutil.rmtree(work / MODEL_COPY, ignore_errors=True)
    return outcome


def choose_task(model: PreTrainedModel, suites: Sequence[NeedleSuite], clock: Clock, work: FinishedWork) -> NeedleSuite:
    """Return the suite with the first of the tasks that the unpatched model answers within its context, in one window.

    Where it answers none of them, the task whose right answer is most probable is asked; the first without time to ask.

    Args:
        model: the model, without a patch.
        suites: the windows with the needle of each task.
        clock: the deadline.
        work: where finished windows are stored.
    """
    if len(suites) == 1:
        return suites[0]
    found = dict[NeedleSuite, tuple[float, float]]()
    within = suites[0].spec.lengths[0]
    share = within / suites[0].spec.longest
    for suite in suites:
        if not clock.has_room_for(share):
            break
        probe = suite.smaller(1).asking(suite.task, [within])
        progress.more(within)
        with progress.stage(UNPATCHED), clock.timing(share, work):
            result = probe.run(model, resume=work).retrieval[suite.task]
        found[suite] = result.accuracy(within), result.logprob(within)
        if result.accuracy(within):
            break
    chosen = max(found, key=found.__getitem__, default=suites[0])
    missed = [suite.task for suite in found if not found[suite][0]]
    if missed:
        progress.say(
            f"asks for {chosen.task}: in a window of {within} tokens the unpatched model does not answer "
            f"{' or '.join(missed)}"
        )
    return chosen


def decide(
    comparison: Comparison, served: dict[str, dict[str, str]], options: ExtendSettings, *, conditions: bool = True
) -> tuple[Findings, Choice]:
    """Return the evidence of a comparison, and the choice between its methods.

    Args:
        comparison: the comparison of the last round.
        served: the programs that run each method.
        options: the options of the run.
        conditions: as for :func:`~rope_patch.extending.choose.rank`.
    """
    measured = measured_in(comparison)
    methods = tuple(replace(one, served_by=served[one.method]) for one in measured.methods)
    return replace(measured, methods=methods), rank(methods, options.tolerance, conditions=conditions)


def row_after_training(adapted: Any, method: str, suite: NeedleSuite, work: FinishedWork) -> Row:
    """Return the scores of a model with an adapter that was trained under a method, on the windows of the others."""
    progress.more(suite.spec.samples * suite.spec.longest)
    with progress.stage(row_name(method, trained=True)):
        scores = suite.run(adapted, resume=work.values)
    return Row(method, scores, inspect_model(adapted).tables, trained=True)
