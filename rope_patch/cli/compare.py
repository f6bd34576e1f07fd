"""``rope-patch compare``."""

from __future__ import annotations

from dataclasses import replace

from rope_patch.cli.loading import load_model, load_tokenizer, prepare, say_tokens, working_together
from rope_patch.cli.printing import resumable, write_and_show
from rope_patch.evaluation import compare as engine
from rope_patch.evaluation.count_tokens import check_tasks
from rope_patch.evaluation.suite import EvalSuite
from rope_patch.methods import as_method
from rope_patch.options.evaluation import CompareOptions
from rope_patch.patching.install import for_target
from rope_patch.reports import comparison as report
from rope_patch.runtime import progress
from rope_patch.runtime.packaged import name_of
from rope_patch.runtime.result_cache import RESULT_CACHE


def compare(options: CompareOptions) -> None:
    """Run ``rope-patch compare`` with its options."""
    spec = check_tasks(options.evaluation)
    machine = options.machine
    compared = list(map(as_method, options.methods))
    prepare(machine)
    finished = options.output / RESULT_CACHE
    files = ["comparison.json", *["report.html"] * options.report]
    with working_together(options.output, [*files, RESULT_CACHE]) as first:
        tokenizer = load_tokenizer(options.model)
        suite = EvalSuite(spec, tokenizer)  # texts that are missing or too short raise before the model is loaded
        loaded = load_model(options.model, machine)
        patch = options.patching.arguments()
        del patch["target_length"]  # the lengths say it
        # A method that does not fit raises before anything is read.
        compared = [for_target(loaded, method, spec.longest, **patch) for method in compared]
        total = len(compared) * suite.tokens
        rows = min(spec.window_batch, max(1, len(suite.windows)))
        more = ""
        if spec.tasks:
            more = ", and more where answers are wrong, which are written out"
        marking = suite.tokens_to_mark(loaded)
        say_tokens(loaded, total + marking, spec.longest, rows=rows, chunk=spec.chunk, more=more)
        name = ", ".join(options.evaluation.tasks)
        with resumable(finished), progress.bar(total, name, hidden=options.as_json or not first):
            comparison = engine.compare(loaded.eval(), tokenizer, compared, suite, **patch, resume=finished)
    if first:
        if hasattr(loaded, "peft_config"):
            adapter = {"adapter": name_of(options.model)}
            comparison = replace(comparison, environment=comparison.environment | adapter)
        write_and_show(options, files, comparison.to_json(), lambda: report.page([comparison]))
