"""``rope-patch analyze``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rope_patch.analysis import analyze as engine
from rope_patch.cli.loading import load_model, load_tokenizer, prepare, say_tokens
from rope_patch.cli.printing import write_and_show
from rope_patch.options.analyze import AnalyzeOptions
from rope_patch.reports import analysis as report
from rope_patch.runtime import progress
from rope_patch.runtime.folders import folder_to_write
from rope_patch.runtime.packaged import name_of
from rope_patch.texts.documents import documents


def analyze(options: AnalyzeOptions) -> None:
    """Run ``rope-patch analyze`` with its options."""
    machine = options.machine
    texts = read_texts(options.texts)
    prepare(machine)
    tokenizer = load_tokenizer(options.model)
    names = ["analysis.json", "capture.npz", "heads.npz", *["analysis.html"] * options.report]
    with folder_to_write(options.output, names):
        loaded = load_model(options.model, machine, options.method, **options.patching.arguments())
        rows = engine.rows_to_read(loaded, tokenizer, texts, tokens=options.tokens_read, window=options.window)
        say_tokens(loaded, rows.ids.numel(), rows.ids.shape[1])
        with progress.bar(None, name_of(options.model), hidden=options.as_json):
            analysis = engine.analyze(
                loaded,
                tokenizer,
                rows,
                heads=options.heads,
                p_values=options.p_values,
            )
        analysis.capture.to_npz(options.output / "capture.npz")
        analysis.heads.to_npz(options.output / "heads.npz")
        write_and_show(
            options, names, analysis.to_json(), lambda: report.page(analysis), brief=lambda: report.brief(analysis)
        )


def read_texts(paths: Sequence[Path]) -> dict[str, Any] | None:
    """Return the documents of each text by its name; None if no text is given.

    Raises:
        ValueError: two texts have the same name.
        FileNotFoundError: a text does not exist.
    """
    named = {path.name or str(path): list(documents(path)) for path in paths}
    if len(named) < len(paths):
        raise ValueError("two texts have the same name: rename one, because results are listed by name")
    return named or None
