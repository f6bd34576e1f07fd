"""``rope-patch analyze``."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rope_patch.analysis import analyze as engine
from rope_patch.analysis.result import Analysis
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
    texts = read_texts(options.texts)
    prepare(options.machine)
    tokenizers = [load_tokenizer(model) for model in options.models]
    if len(options.models) == 1:
        _analyze(options, options.models[0], tokenizers[0], texts)
        return
    names = [name_of(model) for model in options.models]
    if len(set(names)) < len(names):
        raise ValueError("two models have one name, by which results name them: give each once, or rename a folder")
    files = ["analyses.json", *["analyses.html"] * options.report]
    with folder_to_write(options.output, files):
        analyses = []
        for model, tokenizer, name in zip(options.models, tokenizers, names, strict=True):
            own = replace(options, output=options.output / name)
            analyses.append(_analyze(own, model, tokenizer, texts, is_printed=False))
        whole = {name: json.loads(analysis.to_json()) for name, analysis in zip(names, analyses, strict=True)}
        write_and_show(options, files, json.dumps(whole, indent=1, ensure_ascii=False), lambda: report.models(analyses))


def _analyze(
    options: AnalyzeOptions, model: str, tokenizer: Any, texts: dict[str, Any] | None, *, is_printed: bool = True
) -> Analysis:
    """Analyze one model, and write its files into the output folder."""
    names = ["analysis.json", "capture.npz", "heads.npz", "single_heads.npz", *["analysis.html"] * options.report]
    with folder_to_write(options.output, names):
        loaded = load_model(model, options.machine, options.method, **options.patching.arguments())
        rows = engine.rows_to_read(loaded, tokenizer, texts, tokens=options.tokens_read, window=options.window)
        say_tokens(loaded, rows.ids.numel(), rows.ids.shape[1])
        with progress.bar(None, name_of(model), hidden=options.as_json):
            analysis = engine.analyze(
                loaded,
                tokenizer,
                rows,
                heads=options.heads,
                p_values=options.p_values,
            )
        analysis.capture.to_npz(options.output / "capture.npz")
        analysis.heads.to_npz(options.output / "heads.npz")
        analysis.single_heads_to_npz(options.output / "single_heads.npz")
        build = functools.partial(report.page, analysis, all_figures=options.all_figures)
        brief = functools.partial(report.brief, analysis)
        write_and_show(options, names, analysis.to_json(), build, brief, is_printed=is_printed)
    return analysis


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
