"""``rope-patch extend``: parsing and printing only; what takes long to import waits."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.loading import (
    check_device,
    check_dtype,
    check_paths,
    load_model,
    load_tokenizer,
    prepare,
    progress_bar,
    read_haystack,
)
from rope_patch.cli.options import (
    Budget,
    ChatTemplate,
    Chunk,
    Device,
    Dtype,
    Force,
    Haystack,
    Import,
    Json,
    Methods,
    Mode,
    Model,
    NewFolder,
    Report,
    Seed,
    Tasks,
    Text,
    Threads,
    command_line,
    items,
    print_json,
    resumable,
    tokens,
    value_of,
)
from rope_patch.cli.processes import working_together
from rope_patch.options.shared import Machine

NOTHING = 4
"""Exit status where no method can be chosen and nothing is written."""
RECIPE = "rope_patch.extend"
"""Key under which the context keeps what a recipe says and no option does."""
METHODS = ("yarn", "ntk", "abf", "mrrope", "cope", "llama3", "p_rope")


def _recipe(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options of a file as defaults of the command."""
    if path is not None:
        from rope_patch.extending.options import read_options

        if not path.is_file():
            raise FileNotFoundError(f"no file {str(path)!r}")
        values = {name: value for name, value in read_options(path).items() if value is not None}
        context.meta[RECIPE] = {name: values.pop(name) for name in ("depths", "batch_tokens") if name in values}
        context.default_map = {**(context.default_map or {}), **values}
    return path


# Longer than a screen: the signature is the options, each with its help, and the docstring is the help of the command.
def extend(
    context: typer.Context,
    model: Model,
    length: Annotated[int, tokens("--length", "The context length to reach.", show_default=False)],
    output: NewFolder,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="FILE",
            is_eager=True,
            callback=_recipe,
            help="The extend.yaml of an earlier run: its options are the defaults of this one.",
            show_default=False,
        ),
    ] = None,
    methods: Methods = METHODS,
    tolerance: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="By which share perplexity may rise within the context that the model was trained at: 0.01 is 1 %.",
        ),
    ] = 0.01,
    fit: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Also fit a rotary table to Python's code and let it compete. Its time is not counted in --budget.",
        ),
    ] = False,
    train: Annotated[
        bool, typer.Option("--train", help="Train the best method with LoRA, and let the trained model compete.")
    ] = False,
    train_text: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="With --train: a file, a folder or the hub id of a dataset. By default text that ships with Python.",
            show_default=False,
        ),
    ] = None,
    train_rows: Annotated[
        int | None,
        typer.Option(
            metavar="COUNT",
            help="With --train: the number of rows, rounded up to a multiple of 8. By default 200, or as many as half "
            "of --budget has time for.",
            show_default=False,
        ),
    ] = None,
    exports: Annotated[
        str,
        typer.Option(
            "--export",
            parser=value_of("--export", items),
            metavar="ENGINES",
            help="Engines to export the result to as well, separated by spaces: vllm, sglang, and of a GGUF file gguf "
            "(llama.cpp).",
            show_default=False,
        ),
    ] = "",
    budget: Budget = None,
    tasks: Tasks = ("passkey",),
    mode: Mode = "single",
    text: Text = None,
    haystack: Haystack = "noise",
    chat_template: ChatTemplate = "auto",
    chunk: Chunk = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Load the model, measure its speed if --budget is given, print the steps with their tokens, and stop.",
        ),
    ] = False,
    finish_now: Annotated[
        bool,
        typer.Option(
            "--finish-now",
            help="Choose by the rounds that an interrupted run has finished, without training, and write that.",
        ),
    ] = False,
    force: Force = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    seed: Seed = 0,
    threads: Threads = None,
    report: Report = True,
    imports: Import = None,
    as_json: Json = False,
) -> None:
    """Bring a checkpoint to a longer context: measure methods, choose one, write the checkpoint and check it.

    All candidates are measured on little text, the better half on more, until one is ahead. The output folder is a
    checkpoint that plain transformers loads, with a model card that shows the scores before and after, and
    **report.html**. If no method reaches the length, or each loses more than --tolerance at short texts, nothing is
    written, the command says what would help, and the exit status is 4. If it is interrupted, run it again to continue.

    Example: **rope-patch extend ./llama --length 32k -o ./llama-32k --budget 30m**
    """
    from rope_patch.extending.options import ExtendOptions
    from rope_patch.extending.run import CACHE, Run
    from rope_patch.extending.writing import check_outputs

    if report:
        from rope_patch.reports import comparison as page
    check_dtype(dtype)
    check_device(device)
    check_paths(text)
    options = ExtendOptions(
        model=model,
        length=length,
        methods=tuple(methods),
        tolerance=tolerance,
        fit=fit,
        train=train,
        train_text=train_text,
        train_rows=train_rows,
        exports=tuple(exports),
        budget=budget,
        tasks=tuple(tasks),
        mode=mode,
        text=None if text is None else str(text),
        haystack=str(read_haystack(haystack)),
        chat_template=chat_template,
        chunk=chunk,
        dtype=dtype,
        seed=seed,
        **context.meta.get(RECIPE, {}),
    )
    if dry_run and finish_now:
        raise ValueError("--dry-run and --finish-now exclude each other")
    check_outputs(options, output, force)
    prepare(threads)
    work = output.with_name(f"{output.name}.work")
    fresh = not work.exists()
    with working_together(work, [CACHE, "comparison.json"]) as first:

        def say(sentence: str) -> None:
            print(sentence, file=sys.stderr)  # the other processes have none

        loaded = load_model(model, Machine(device, dtype))
        if hasattr(loaded, "peft_config"):
            say(f"{model} is an adapter: merged into its base")
            loaded = loaded.merge_and_unload().eval()
        run = Run(loaded, load_tokenizer(model), options, output, say)
        run.look()
        tokens, total = None, None
        if not finish_now:
            if budget is not None:
                tokens = run.tokens_in_time()
            rounds, training = run.plan(tokens)
            for line in run.describe(rounds, training):
                say(line)
            if budget is None:
                say("without --budget the first round is as large as suits the model: --budget 30m aims at a time")
            if dry_run:
                say("dry run: nothing was measured or written")
                if fresh and first:
                    shutil.rmtree(work, ignore_errors=True)
                return
            total = int(sum((one.candidates + 1) * run.tokens_of(one.windows, one.samples) for one in rounds))
            if fit:
                from rope_patch.extending.fitted import cost

                total += cost(loaded, length).tokens
        again = "the same command (with --finish-now to choose by the finished rounds)"
        with (
            resumable(work / CACHE, again=again),
            progress_bar(total, hidden=as_json or not first) as (bar, on_progress),
        ):
            run.on_progress, run.on_step = on_progress, lambda sentence: bar.write(sentence, file=sys.stderr)
            outcome = run.finish(overwrite=force, finish_now=finish_now, tokens=tokens)
            bar.total = bar.n  # rounds that were not needed, and a training, are not in the estimate
    if not first:
        return
    folder = outcome.output or outcome.work
    if report:
        page.write(folder / "report.html", outcome.comparisons[::-1], command=command_line(), title="A longer context")
    if as_json:
        print_json(
            {"output": None if outcome.output is None else str(output), "chosen": outcome.choice.method}
            | {"reason": outcome.choice.reason, "advice": list(outcome.choice.advice)}
        )
    else:
        _print(outcome)
    if outcome.output is None:
        raise typer.Exit(NOTHING)


def _print(outcome: Any) -> None:
    """Print the scores and what came of them."""
    from rope_patch.cli.compare import print_scores, print_table
    from rope_patch.extending.choosing import BASIS

    if len(outcome.comparisons) > 1:
        print_scores(outcome.comparisons[0])
        print("the last round, on more text and prompts:")
    print_table(outcome.comparison)
    print(f"{BASIS}.")
    print(outcome.choice.reason)
    for one in outcome.choice.evaluated:
        for failure in one.failures:
            print(f"  {one.method}: {failure}")
    if outcome.output is None:
        print("nothing was written. What would help:")
        for sentence in outcome.choice.advice:
            print(f"  {sentence}")
        print(f"the measurements are in {outcome.work}, and a changed command uses them again")
        return
    print(f"wrote {outcome.output}: AutoModelForCausalLM.from_pretrained({str(outcome.output)!r}) loads it")
    for path in outcome.exports:
        print(f"wrote {path}")
