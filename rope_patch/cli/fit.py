"""``rope-patch fit``: parsing and printing only; modules that are slow to import are imported inside functions."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rope_patch.cli.loading import (
    load_model,
    load_tokenizer,
    prepare,
)
from rope_patch.cli.parsing import parse
from rope_patch.cli.printing import command_line
from rope_patch.options.fit import FitOptions
from rope_patch.runtime import progress

if TYPE_CHECKING:
    from rope_patch.fitting import FittedPatch

CARRIES_OVER = (
    "A gain on text like the fit's need not carry over to other text: in tests fitted tables read stories 1 to 4.6 % "
    "better than YaRN's table, and the far positions of novels up to 4.6 % worse. Compare the table with the one it "
    "started from on text of your own."
)


def fit(words: Sequence[str]) -> None:
    """Run ``rope-patch fit`` with the words that follow it."""
    options = parse(FitOptions, words)
    from rope_patch import fitting
    from rope_patch.checkpoints.folder_patch import patch_folder
    from rope_patch.evaluation.compare import environment
    from rope_patch.evaluation.spec import what_is_lost
    from rope_patch.evaluation.time_budget import default_tokens
    from rope_patch.fitting.fit_cost import spec_within_tokens, tokens_to_fit
    from rope_patch.runtime.folders import check_source, holds_files, locked_output, write_atomically

    settings, output = options.settings, options.output
    check_source(options.model, ["config.json"])  # an adapter's folder has none, and is refused
    if holds_files(output):
        raise FileExistsError(f"{output} is not empty: give a new folder")
    prepare(options.machine, options.text)
    with locked_output(output):
        tokenizer, model = load_tokenizer(options.model), load_model(options.model, options.machine)
        whole = fitting.held_out_spec(model, settings.target_length, seed=settings.seed)
        spec = spec_within_tokens(whole, settings.steps, settings.positions, default_tokens(model))
        if spec != whole:
            print(what_is_lost(whole, spec), file=sys.stderr)
        tokens = tokens_to_fit(spec, settings.steps, settings.positions)
        print(f"reads {tokens:,} tokens", file=sys.stderr)
        with progress.bar(tokens):
            patch = fitting.fit(model, tokenizer, options.text, spec=spec, **asdict(settings))
        note = {"command": command_line(), **patch.to_dict(), "settings": asdict(settings)}
        note["environment"] = environment(model)

        def finish(folder: Path) -> None:
            write_atomically(folder / "fit.json", json.dumps(note, indent=1, allow_nan=False))

        patch_folder(options.model, patch.method, output, finish=finish, target_length=settings.target_length)
    for line in described(patch):
        print(line)
    print(f"wrote {output}: AutoModelForCausalLM.from_pretrained({str(output)!r}) loads it; fit.json has the numbers")


def described(patch: FittedPatch) -> Iterator[str]:
    """Yield a line for each table, the changes of the chosen one from the start, and warnings."""
    from rope_patch.evaluation.intervals import INTERVAL_OVER_PROMPTS, INTERVAL_OVER_WINDOWS
    from rope_patch.evaluation.metrics import METRICS, change_sentence
    from rope_patch.fitting.candidates import METRIC_OF

    for candidate in patch.candidates:
        text, second, shares = (candidate.means[kind] for kind in METRIC_OF)
        losses = ("/".join(f"{math.exp(nll):.3f}" for nll in several.values()) for several in (text, second))
        answered = "/".join(f"{share:.2f}" for share in shares.values())
        yield f"{candidate.name:8}  perplexity {next(losses)}, of the second domain {next(losses)}, answered {answered}"
    if patch.stopped:
        yield f"The fit was stopped: it {patch.stopped}."
    if patch.chosen == "start":
        yield "There was nothing to gain: no fitted table is better than the start, which is written as it is."
    else:
        yield f"Chosen: {patch.chosen}. Change from the start, with 95 % intervals:"
        for kind, several in patch.winner.changes(patch.candidates[0]).items():
            metric = METRICS[METRIC_OF[kind][0]]
            parts = (f"{n}: {change_sentence(metric, change)}" for n, change in several.items())
            yield f"- {kind} to {', '.join(parts)}"
        yield f"{INTERVAL_OVER_WINDOWS} {INTERVAL_OVER_PROMPTS} {CARRIES_OVER}"
    for sentence in patch.warnings:
        yield f"Warning: {sentence}."
