"""``rope-patch kv-check``: parsing and printing only; modules that are slow to import are imported inside functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rope_patch.cli.kv_check_tables import print_presets
from rope_patch.cli.loading import (
    load_model,
    load_tokenizer,
    prepare,
    say_smaller,
)
from rope_patch.cli.parsing import parse_given
from rope_patch.cli.printing import RESULT_CACHE, command_line, resumable, show_page
from rope_patch.cli.processes import working_together
from rope_patch.options.kv_check import KvCheckOptions
from rope_patch.packaged import name_of
from rope_patch.reports.plots import require_matplotlib
from rope_patch.runtime import progress


def kv_check(words: Sequence[str]) -> None:
    """Run ``rope-patch kv-check`` with the words that follow it."""
    if "--list" in words:  # before parsing, since it needs neither a model nor formats
        print_presets()
        return
    options, given = parse_given(KvCheckOptions, words)
    from dataclasses import replace

    from rope_patch.evaluation.suite import EvalSuite
    from rope_patch.kv_evaluation import kv_check as engine
    from rope_patch.kv_evaluation.token_count import suite_for, tokens_to_attribute, tokens_to_check
    from rope_patch.methods import as_method
    from rope_patch.patching.install import for_target

    if options.report:
        require_matplotlib()
    names = engine.parse_formats(options.formats)
    compared = list(map(as_method, options.methods))
    machine = options.machine
    # Perplexity is compared over all positions up to a length, so the text needs no finer position buckets.
    spec = replace(options.evaluation, bucket=options.evaluation.longest)
    engine.check_spec(spec)
    prepare(machine, spec.text, spec.haystack)
    output, finished = options.output, options.output / RESULT_CACHE
    files = ["kv-check.json", *["kv-check.html"] * options.report]
    with working_together(output, [*files, RESULT_CACHE]) as first:
        tokenizer, loaded = load_tokenizer(options.model), load_model(options.model, machine)
        patch = options.patching.arguments()
        del patch["target_length"]  # the lengths say it
        # A factor that is left out follows from the longest requested length.
        compared = [for_target(loaded, method, spec.longest, **patch) for method in compared]
        # Full precision is among the names, and is not a format to check.
        counts = (len(names) - 1, len(compared))
        suite, lost = suite_for(loaded, EvalSuite(spec, tokenizer), *counts, given)
        planned = replace(suite.spec, windows=len(suite.windows))
        total = tokens_to_check(planned, *counts)
        layers = int(loaded.config.get_text_config().num_hidden_layers)
        more = math.prod(counts) * tokens_to_attribute(planned, layers)
        say_smaller(total, lost, more=f", and up to {more:,} more where formats are unsafe")
        with resumable(finished), progress.bar(total, hidden=options.as_json or not first):
            checked = engine.kv_check(
                loaded,
                tokenizer,
                list(names),
                suite,
                methods=compared,
                limits=options.limits,
                resume=finished,
                **patch,
            )
    if first:
        _show(replace(checked, model=name_of(options.model)), options, files)


def _show(checked: Any, options: KvCheckOptions, files: Sequence[str]) -> None:
    """Write a check and print it; the page comes last, so that an error in it loses no result."""
    from rope_patch.reports import kv as report
    from rope_patch.reports import page
    from rope_patch.runtime.folders import write_atomically

    write_atomically(options.output / "kv-check.json", checked.to_json())
    if options.as_json:
        print(checked.to_json(), flush=True)
        if not options.report:
            return
    shown = report.page(checked)
    if not options.as_json:
        show_page(shown)
    if options.report:
        page.write(options.output / "kv-check.html", shown, command_line())
    if not options.as_json:
        print(f"wrote {', '.join(files)} in {options.output}")
