"""``rope-patch extend``."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.checkpoints.source_files import config_json, how_to_load
from rope_patch.cli.loading import load_model, load_tokenizer, prepare, working_together
from rope_patch.cli.printing import command_line, print_json, resumable, show_page, show_table
from rope_patch.extending.begin import begin, describe
from rope_patch.extending.explain import RULES
from rope_patch.extending.extend import carry_out, work_folder
from rope_patch.extending.result import Extended
from rope_patch.extending.write_extended import check_output, record, trained_by_extend
from rope_patch.options.extend import ExtendOptions, ExtendSettings
from rope_patch.patching.config_settings import settings_of
from rope_patch.patching.install import rebase, restore
from rope_patch.patching.locate import locate
from rope_patch.reports import comparison as report
from rope_patch.runtime import page as pages
from rope_patch.runtime import progress
from rope_patch.runtime.page import Note, Page, Part, Section
from rope_patch.runtime.result_cache import RESULT_CACHE

EXIT_NOTHING_CHOSEN = 4
"""The exit status if no method can be chosen, so that nothing is written."""


def extend(options: ExtendOptions) -> int:
    """Run ``rope-patch extend`` with its options, and return its exit status."""
    settings = options.settings
    output = options.output
    check_output(settings, output, options.force)
    text = settings.evaluation.text
    if text is not None and not Path(text).exists():
        raise FileNotFoundError(f"no file or folder {text}")
    prepare(settings.machine)
    work = work_folder(output)

    def write_report(outcome: Extended, folder: Path) -> None:
        """Write the report, which is part of the folder before that is put in its place."""
        if options.report:
            pages.write(folder / "report.html", _page(outcome), command_line())

    # What ends before the first measurement deletes the folder, unless an earlier run left its own there.
    fresh = not work.exists()
    with working_together(work, [RESULT_CACHE, "comparison.json"]) as first, contextlib.ExitStack() as unused:
        if fresh and first:
            unused.callback(shutil.rmtree, work, ignore_errors=True)
        if (work / RESULT_CACHE).exists():
            progress.say(f"{work} holds measurements of an earlier run, which are used where they fit")
        model = _load(settings)
        tokenizer = load_tokenizer(settings.model)
        start = begin(model, tokenizer, settings)
        for line in describe(model, start, output):
            progress.say(line)
        if options.dry_run:
            progress.say("dry run: nothing was measured or written")
            return 0
        unused.pop_all()  # what is measured from now on serves the next run
        total = start.windows * settings.length
        with resumable(work / RESULT_CACHE), progress.bar(total, hidden=options.as_json or not first):
            outcome = carry_out(
                model, tokenizer, start, output, overwrite=options.force, owned=True, report=write_report
            )
    if not first:
        return 0
    if outcome.output is None and outcome.comparisons:
        write_report(outcome, work)
    report_page = (outcome.output or work) / "report.html"
    if options.as_json:
        print_json(record(outcome))
    else:
        _print(outcome, options.verbose)
        if report_page.exists():
            print(f"all rounds and scores: {report_page} (or add -v)")
        print(f"all measurements are in {work}, for another run; you may delete it")
    return EXIT_NOTHING_CHOSEN if outcome.output is None else 0


def _load(settings: ExtendSettings) -> Any:
    """Load the model with the table that is extended: the one under which its weights were trained."""
    if config_json(settings.model):  # before its weights are read; an adapter and a GGUF file have none
        locate(model_without_weights(settings.model, beside_adapter=True)).check_windowed()
    model = load_model(settings.model, settings.machine)
    trained = trained_by_extend(settings.model)
    if hasattr(model, "peft_config"):
        progress.say(f"{settings.model} is an adapter: merged into its base")
        model = model.merge_and_unload().eval()
        trained = True
    location = locate(model)
    if location.record is None or trained is None:
        return model
    method = location.record.to_method()
    if trained:
        rebase(model, settings_of(location.config))
        progress.say(f"{settings.model}: its weights were trained under {method}, so that table is extended")
    else:
        restore(model)
        progress.say(f"{settings.model}: its weights were not trained under {method}, so that patch is undone first")
    return model


def _page(outcome: Extended) -> Page:
    """Return the choice and the rounds as a page, the last round first: it is the one that decided."""
    evidence: list[Part] = []
    if outcome.choice and outcome.choice.label:
        evidence.append(report.before_after(outcome.comparison, outcome.choice.label))
    section = Section("The choice", outcome.verdict, [*evidence, Note(f"{RULES}.")])
    page = report.page(outcome.comparisons, title=f"A longer context: {outcome.options.length} tokens", folded=True)
    sections = [replace(one, title=f"Round {n}, {one.title}") for n, one in enumerate(page.sections, 1)]
    return replace(page, sections=[section, *reversed(sections)])


def _print(outcome: Extended, verbose: bool) -> None:
    """Print the choice with its price, the scores at two lengths, or all of them, and what was written."""
    if verbose and outcome.comparisons:
        show_page(_page(outcome))
    else:
        print(outcome)
        if outcome.choice and outcome.choice.label:
            ends = [outcome.trained_length, outcome.options.length]
            show_table(report.before_after(outcome.comparison, outcome.choice.label, ends))
    if outcome.output is not None:
        print(f"wrote {outcome.output}: {how_to_load(outcome.output)} loads it")
