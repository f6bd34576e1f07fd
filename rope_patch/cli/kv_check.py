"""``rope-patch kv-check``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.kv_check_tables import csv_of, print_check, print_presets
from rope_patch.cli.loading import (
    check_device,
    check_dtype,
    check_paths,
    load_model,
    load_tokenizer,
    prepare,
    progress_bar,
    read_haystack,
    read_methods,
    suite_within,
)
from rope_patch.cli.options import (
    RESULT_CACHE,
    ChatTemplate,
    Chunk,
    Depths,
    Device,
    Dtype,
    FreezeAt,
    Haystack,
    Import,
    Json,
    LayerTypes,
    Lengths,
    Methods,
    Mode,
    Model,
    Output,
    Report,
    Samples,
    Seed,
    Tasks,
    Text,
    Threads,
    Windows,
    chosen,
    command_line,
    items,
    resumable,
    tokens,
    value_of,
)
from rope_patch.cli.processes import working_together
from rope_patch.options.shared import Machine
from rope_patch.packaged import name_of


def _list(requested: bool) -> None:
    if requested:
        print_presets()
        raise typer.Exit


# Longer than a screen: the signature is the options, each with its help, and the docstring is the help of the command.
def kv_check(
    command: typer.Context,
    model: Model,
    schemes: Annotated[
        Sequence[str],
        typer.Option(
            parser=value_of("--schemes", items),
            metavar="SCHEMES",
            help="The cache formats to check, separated by spaces: presets, or formats of your own such as "
            '"k=int4.token.pre;v=int4.token". --list explains both.',
            show_default=False,
        ),
    ],
    lengths: Lengths,
    methods: Methods = ("default",),
    output: Output = Path("rope-patch-kv-check"),
    packed: Annotated[
        Sequence[str],
        typer.Option(
            parser=value_of("--packed", items),
            metavar="CACHES",
            help="Also decode with quantized caches of transformers, to measure their size and speed, for example "
            '"fp8 quanto-4 hqq-4".',
            show_default=False,
        ),
    ] = (),
    tolerance: Annotated[
        float,
        typer.Option(metavar="SHARE", help="The relative increase in perplexity up to which a format counts as safe."),
    ] = 0.02,
    windows: Windows = None,
    tasks: Tasks = ("passkey",),
    mode: Mode = "single",
    depths: Depths = (0.0, 0.25, 0.5, 0.75, 1.0),
    samples: Samples = 4,
    text: Text = None,
    haystack: Haystack = "noise",
    chat_template: ChatTemplate = "auto",
    context: Annotated[
        int | None,
        tokens(
            "--context",
            "The context length used to decide which frequencies are low enough to carry outliers. By default that of "
            "each layer.",
            show_default=False,
        ),
    ] = None,
    layer_types: LayerTypes = None,
    freeze_at: FreezeAt = None,
    chunk: Chunk = None,
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    report: Report = True,
    imports: Import = None,
    as_json: Json = False,
    listed: Annotated[
        bool,
        typer.Option("--list", callback=_list, is_eager=True, help="List the cache formats and how to write them."),
    ] = False,
) -> None:
    """Check which formats of a quantized KV cache a model works with, under which methods, and where errors come from.

    Writes **kv-check.json**, **kv-check.csv** and **kv-check.html**. The caches are simulated: values are rounded
    exactly as decoding would round them, but not stored in fewer bits. If the command is interrupted, run it again to
    continue: finished work is saved in the output folder.

    Presets: none, kivi-2, kivi-4, kivi-2-window, kivi-4-window, kvquant-4, int8-token, int4-token, fp8, nf4.

    Example: **rope-patch kv-check ./llama --schemes "kivi-2 int4-token fp8" --methods "default yarn:factor=4"
    --lengths "4k 16k" -o ./kv**
    """
    from dataclasses import replace

    from rope_patch.evaluation.calibration import calibration
    from rope_patch.evaluation.spec import EvalSpec
    from rope_patch.evaluation.suite import EvalSuite
    from rope_patch.files import write_atomically
    from rope_patch.kv_evaluation import run as engine
    from rope_patch.kv_evaluation.reading import CheckReading
    from rope_patch.kv_evaluation.verdicts import Limits
    from rope_patch.patching.targets import for_target

    if report:
        from rope_patch.reports import kv as page
    names, compared = engine.find_schemes(schemes), read_methods(methods)
    check_paths(text)
    spec = EvalSpec(
        lengths,
        depths=depths,
        samples=samples,
        windows=windows,
        tasks=tasks,
        mode=mode,
        text=None if text is None else str(text),
        haystack=str(read_haystack(haystack)),
        chat_template=chat_template,
        bucket=max(lengths, default=None),
        chunk=chunk,
        seed=seed,
    )
    engine.check_spec(spec)
    limits = Limits(tolerance, context=context)
    check_dtype(dtype)
    check_device(device)
    prepare(threads)
    files = ["kv-check.json", "kv-check.csv", *["kv-check.html"] * report]
    with working_together(output, [*files, RESULT_CACHE]) as first:
        tokenizer, loaded = load_tokenizer(model), load_model(model, Machine(device, dtype))
        suite, patch = EvalSuite(spec, tokenizer), dict[str, Any](layer_types=layer_types, freeze_at=freeze_at)
        # A factor that is left out comes from the longest length that was asked for.
        compared = [for_target(loaded, method, spec.longest, **patch) for method in compared]
        centred = any(scheme.key.centre for scheme in names.values())
        means = calibration(tokenizer, loaded).numel() if centred else 0
        layers = int(loaded.config.get_text_config().num_hidden_layers)
        reading = CheckReading(names, len(compared), layers, means)
        suite, attributed = _planned(suite, reading, loaded, chosen(command))
        planned, finished = replace(suite.spec, windows=len(suite.windows)), output / RESULT_CACHE
        total = reading.tokens(planned)
        with resumable(finished), progress_bar(total, hidden=as_json or not first) as (bar, on_progress):

            def on_more(count: int) -> None:  # which schemes are unsafe is not known before
                bar.total += count

            checked = engine.kv_check(
                loaded,
                tokenizer,
                list(names),
                suite,
                methods=compared,
                limits=limits,
                packed=packed,
                attributed=attributed,
                resume=finished,
                on_progress=on_progress,
                on_more=on_more,
                **patch,
            )
            checked = replace(checked, model=name_of(model))
            bar.total = bar.n
    if not first:
        return
    # What took long is out before the page, whose failure costs nothing then.
    write_atomically(output / "kv-check.json", checked.to_json())
    write_atomically(output / "kv-check.csv", csv_of(checked.table()))
    if as_json:
        print(checked.to_json(), flush=True)
    else:
        print_check(checked)
    if report:
        page.write(output / "kv-check.html", checked, command=command_line())
    if not as_json:
        print(f"wrote {', '.join(files)} in {output}")


def _planned(suite: Any, reading: Any, model: Any, given: set[str]) -> tuple[Any, int]:
    """Return a suite of what the size of the model allows, and say how much it reads.

    What was chosen on the command line stays as it is. What a smaller spec costs is printed.

    Args:
        suite: of what is measured.
        reading: what the check reads of a spec.
        model: the model that reads it.
        given: options that were given on the command line.

    Returns:
        The suite, and the windows that costs of unsafe schemes are attributed on.
    """
    from dataclasses import replace

    from rope_patch.evaluation.budget import default_tokens
    from rope_patch.evaluation.spec import SCALABLE, smallest, tokens_to_read
    from rope_patch.kv_evaluation.setting import COMPARED

    whole, why, most = (
        replace(suite.spec, windows=len(suite.windows)),
        "for a model of this size",
        default_tokens(model),
    )
    attributed = COMPARED if reading.attribution(whole, COMPARED) <= most else 1
    scalable = [name for name in SCALABLE if name not in given]
    each = max(most / reading.methods / len(reading.schemes), tokens_to_read(smallest(whole, scalable)))
    suite = suite_within(suite, each, scalable, tokens_to_read, why)
    if attributed < min(COMPARED, len(suite.windows)):
        print(f"{why}: what each layer of an unsafe scheme costs alone is measured on 1 window", file=sys.stderr)
    spec = replace(suite.spec, windows=len(suite.windows))
    more = reading.attribution(spec, attributed)
    unsafe = f", and up to {more:,} more where schemes are unsafe" if more else ""
    print(f"reads {reading.tokens(spec):,} tokens{unsafe}", file=sys.stderr)
    return suite, attributed
