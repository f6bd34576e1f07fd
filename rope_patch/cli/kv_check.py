"""``rope-patch kv-check``: parsing and printing only; modules that are slow to import are imported inside functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rope_patch.cli.loading import load_model, load_tokenizer, prepare, say_tokens, working_together
from rope_patch.cli.parsing import parse_words
from rope_patch.cli.printing import new_table, resumable, show, write_and_show
from rope_patch.options.kv_check import KvCheckOptions
from rope_patch.runtime import progress
from rope_patch.runtime.packaged import name_of

HEAD_DIM = 128
"""The number of features of a head for which the bits of presets are listed."""
SERVED_FOLDER = "vllm-fp8"
"""The folder in the output that vLLM serves with calibrated scales."""


def kv_check(words: Sequence[str]) -> None:
    """Run ``rope-patch kv-check`` with the words that follow it."""
    if "--list" in words:  # before parsing, since it needs neither a model nor formats
        print_presets()
        return
    options = parse_words(KvCheckOptions, words)
    from dataclasses import replace

    from rope_patch.checkpoints.source_files import cache_scales
    from rope_patch.evaluation.suite import EvalSuite
    from rope_patch.kv_cache.schemes import Scheme
    from rope_patch.kv_evaluation import kv_check as engine
    from rope_patch.kv_evaluation.calibration import config_with_scales, own_scales, with_scales, write_scales
    from rope_patch.kv_evaluation.measure_format import tokens_to_attribute, tokens_to_check
    from rope_patch.methods import as_method
    from rope_patch.reports import kv as report
    from rope_patch.runtime.result_cache import RESULT_CACHE

    names = engine.parse_formats(options.formats, calibrating=options.calibrate is not None)
    fp8 = [name for name, scheme in names.items() if scheme.takes_scales]
    if own := own_scales(options.model):
        names |= with_scales(names, own, "with its own scales")
    if options.calibrate:
        config_with_scales(options.model)
    compared = list(map(as_method, options.methods))
    machine = options.machine
    # Perplexity is compared over all positions up to a length, so the text needs no finer position buckets.
    spec = replace(options.evaluation, bucket=options.evaluation.longest)
    engine.check_spec(spec)
    prepare(machine)
    finished = options.output / RESULT_CACHE
    files = ["kv-check.json", *["kv-check.html"] * options.report]
    with working_together(options.output, [*files, RESULT_CACHE]) as first:
        tokenizer = load_tokenizer(options.model)
        for sentence in cache_scales(options.model):
            progress.say(sentence)
        suite = EvalSuite(spec, tokenizer)  # texts that are missing or too short raise before the model is loaded
        loaded = load_model(options.model, machine)
        calibrate: Any = options.calibrate
        if calibrate not in (None, "builtin"):
            calibrate = Path(calibrate)
        patch = options.patching.arguments()
        del patch["target_length"]  # the lengths say it
        # Full precision is among the names, and is not a format to check.
        counts = (len(names) - 1 + len(fp8) * bool(options.calibrate), len(compared))
        total = tokens_to_check(suite.planned, *counts)
        layers = int(loaded.config.get_text_config().num_hidden_layers)
        more = math.prod(counts) * tokens_to_attribute(suite.planned, layers)
        say_tokens(loaded, total, spec.longest, chunk=spec.chunk)
        progress.say(f"and up to {more:,} tokens more where formats are unsafe")
        with resumable(finished), progress.bar(total, hidden=options.as_json or not first):
            checked = engine.kv_check(
                loaded,
                tokenizer,
                {name: str(scheme) for name, scheme in names.items()},
                suite,
                methods=compared,
                limits=options.limits,
                calibrate=calibrate,
                resume=finished,
                **patch,
            )
    if first:
        named = replace(checked, model=name_of(options.model))
        write_and_show(options, files, named.to_json(), lambda: report.page(named))
        for row in checked.rows:
            # Under another table keys are others: the folder of rope-patch apply has scales of its own.
            if options.calibrate and (row.method, row.format) == ("default", f"{fp8[0]} calibrated"):
                folder = options.output / SERVED_FOLDER
                write_scales(options.model, folder, Scheme.parse(row.format_text).scales)
                progress.say(f"vllm serve {folder} --kv-cache-dtype fp8 reads these scales")


def print_presets() -> None:
    """Print the cache formats with source, bits and what they were compared with, and the number formats of texts."""
    from rich.markup import escape

    from rope_patch.kv_cache.formats import FORMATS
    from rope_patch.kv_cache.schemes import PRESETS, SWITCHES, Scheme, effective_bits

    table = new_table("format", "bits", "source, and as a text", "compared with")
    table.columns[2].min_width = 70  # so that no text is broken into two lines
    for name, preset in PRESETS.items():
        scheme = Scheme.parse(name)
        bits = ", ".join(f"{effective_bits(side, HEAD_DIM):.2f}" for side in (scheme.key, scheme.value))
        table.add_row(name, bits, escape(f"{preset.source}\n{preset.text}"), escape(preset.compared))
    show(table)
    table = new_table(
        *("number format", "bits of an element", "what it is"),
        caption="Parts may be added to a format: kivi-2;sinks=4. A text is "
        "k=SIDE;v=SIDE;rope=SIDE;residual=N;flush=N;sinks=N;skip=0+27, a side FORMAT.AXIS.SWITCH…: axes token, tokenN, "
        f"channelN; switches {', '.join(SWITCHES)}. rope= is for the features of keys that rotate, rope=full "
        f"leaves them in full precision. Bits are those of keys and values, heads of {HEAD_DIM} "
        "features, without sinks and residual window.",
        caption_justify="left",
    )
    for name, form in FORMATS.items():
        table.add_row(name, f"{form.bits:g}", escape((form.__doc__ or "").partition("\n")[0]))
    show(table)
