"""The ``rope-patch`` command: parsing and printing only."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.analyze import analyze
from rope_patch.cli.export import export
from rope_patch.cli.finetune import finetune
from rope_patch.cli.fit import fit
from rope_patch.cli.kv_check import kv_check
from rope_patch.cli.loading import check_device, check_dtype, depth, items, load_model, load_tokenizer
from rope_patch.cli.theory import theory
from rope_patch.packaged import name_of

app = typer.Typer(
    help="Adapt Hugging Face checkpoints to longer contexts by changing their rotary position embeddings.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
recipes = typer.Typer(help="Training scripts that ship with the package.", no_args_is_help=True)
app.add_typer(recipes, name="recipes")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint folder or hub id.", show_default=False)]
Out = Annotated[Path, typer.Option("--output", "-o", help="Folder to write; new or empty.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
KEPT = "kept.jsonl"
"""Finished work, in the folder that is written."""

Force = Annotated[bool, typer.Option("--force", help="Write into a folder that holds files.")]


def _version(asked: bool) -> None:
    if asked:
        from rope_patch import __version__

        print(f"rope-patch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods, with their parameters and defaults."""
    from dataclasses import fields

    from rich import box
    from rich.console import Console
    from rich.table import Table

    from rope_patch.methods import METHODS, field_help

    rows = [
        (name, [field_help(f) for f in fields(cls)], (cls.__doc__ or "").strip().splitlines()[0])
        for name, cls in METHODS.items()
    ]
    if as_json:
        _print_json([{"method": name, "defaults": METHODS[name]().to_dict(), "what": what} for name, _, what in rows])
        return
    table = Table(
        "method", "parameters", "what it does", box=box.SIMPLE_HEAD, caption="NAME[:key=value…], chained with +"
    )
    for name, parameters, what in rows:
        table.add_row(name, "\n".join(parameters), what.replace("``", ""))
    Console().print(table)


@app.command()
def inspect(model: Model, as_json: Json = False) -> None:
    """Show the rotary tables of a checkpoint: type, wavelengths, pairs that never turn, scaling, patch record.

    Only the config is read, or the header of a GGUF file, so this is instant at any size.
    """
    from rope_patch.checkpoints.offline import skeleton
    from rope_patch.frequencies import wavelength
    from rope_patch.patching.verify import look

    if model.lower().endswith(".gguf"):
        from rope_patch.exporting.gguf import read_gguf

        seen = read_gguf(model)
    else:
        seen = look(skeleton(model))
    if not as_json:
        print(seen)
        return
    slots = [
        {
            "layer_type": slot.layer_type,
            "path": slot.path,
            "rope_type": slot.rope_type,
            "rope_theta": slot.rope_theta,
            "attention_scaling": slot.attention_scaling,
            "max_position_embeddings": slot.max_position_embeddings,
            "inv_freq": slot.inv_freq.tolist(),
            "wavelength": [None if w == float("inf") else w for w in wavelength(slot.inv_freq).tolist()],
            "hash": slot.fingerprint,
        }
        for slot in seen.slots
    ]
    record = seen.record.to_dict() if seen.record else None
    _print_json({"model": seen.model_class, "tables": slots, "record": record, "notes": list(seen.remarks)})


@app.command()
def apply(
    model: Model,
    method: Annotated[str, typer.Argument(help="A method's name, or the grammar NAME:key=value+NAME…")],
    out: Out,
    parameters: Annotated[
        list[str] | None, typer.Argument(metavar="[key=value]...", help="The method's parameters.")
    ] = None,
    target_length: Annotated[
        str | None,
        typer.Option(help="Context to state in the config, such as 32k; a factor left out follows from it [tokens]."),
    ] = None,
    layer_types: Annotated[
        list[str] | None, typer.Option("--layer-type", help="Which tables, on mixed models; may be repeated.")
    ] = None,
    freeze_at: Annotated[int | None, typer.Option(help="Length at which to freeze a dynamic table [tokens].")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace an earlier patch.")] = False,
    keep_edits: Annotated[
        bool, typer.Option("--keep-edits", help="With --replace: start from the config as it was edited since.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a patched copy of a checkpoint that plain transformers loads.

    Weights are copied byte for byte; the config says the new table.

    Example: **rope-patch apply ./llama abf rope_theta=500000 -o ./llama-abf**
    """
    from rope_patch.checkpoints.offline import patch_folder
    from rope_patch.methods import as_method
    from rope_patch.words import parse_length

    params: dict[str, Any] = {}
    for item in parameters or ():
        key, equals, value = item.partition("=")
        if not equals or not key or not value:
            raise ValueError(f"expected key=value after the method, got {item!r}")
        params[key] = value
    patch = patch_folder(
        model,
        as_method(method, **params),
        out,
        overwrite=force,
        progress=_say,
        target_length=None if target_length is None else parse_length(target_length),
        layer_types=layer_types,
        freeze_at=freeze_at,
        replace=replace,
        keep_edits=keep_edits,
    )
    if as_json:
        _print_json({"output": str(out), "record": patch.record.to_dict()})
        return
    print(patch.describe())
    print(f"wrote {out}: AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it, with or without rope_patch")


@app.command()
def verify(folder: Model, as_json: Json = False) -> None:
    """Check that a patched checkpoint or adapter folder still says and gives what was applied to it."""
    from rope_patch.checkpoints.offline import verify_folder

    record = verify_folder(folder)
    if as_json:
        _print_json({"verified": True, "record": record.to_dict()})
        return
    tables = ", ".join(f"{key} {table.hash}" for key, table in record.tables.items())
    print(f"{folder}: patched with {record.to_method()}, as recorded (tables: {tables})")


@app.command()
def restore(folder: Model, out: Out, force: Force = False) -> None:
    """Write a copy of a patched checkpoint as it was before the patch."""
    from rope_patch.checkpoints.offline import restore_folder

    restore_folder(folder, out, overwrite=force, progress=_say)
    print(f"wrote {out}: the checkpoint before its patch")


@app.command()
def tasks() -> None:
    """Print the folder of lm-eval tasks, for **lm_eval --include_path "$(rope-patch tasks)"**."""
    from rope_patch import data_path

    print(data_path("eval_tasks"))


@recipes.command()
def copy(
    folder: Annotated[Path, typer.Argument(help="Folder to copy the recipes into.", show_default=False)],
    force: Force = False,
) -> None:
    """Copy the recipes into a folder of yours, to run and change."""
    from rope_patch import data_path
    from rope_patch.files import folder_in_one_move

    with folder_in_one_move(folder, overwrite=force) as made:
        shutil.copytree(data_path("recipes"), made, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    print(f"copied to {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")


@app.command()
def compare(
    model: Model,
    methods: Annotated[str, typer.Option(help='Such as "default yarn:factor=4 p_rope:p=0.5".', show_default=False)],
    lengths: Annotated[str, typer.Option(help='Prompt lengths, "4k 16k 32k" [tokens].', show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("rope-patch-compare"),
    adapter: Annotated[str | None, typer.Option(help="PEFT adapter to measure under every method.")] = None,
    task: Annotated[str, typer.Option(help="passkey, niah, multivalue, multiquery or vt.")] = "passkey",
    mode: Annotated[
        str, typer.Option(help="single (a needle per prompt) or multikey (one at every depth).")
    ] = "single",
    depths: Annotated[str, typer.Option(help="Of the needles: 0 is the start, 1 the end.")] = "0 0.25 0.5 0.75 1",
    samples: Annotated[int, typer.Option(help="Haystacks per length; each is asked at every depth.")] = 5,
    windows: Annotated[
        int | None, typer.Option(help="Windows of text, as long as the longest length; 16, or as many as there are.")
    ] = None,
    bucket: Annotated[int | None, typer.Option(help="Width of the perplexity curve's points [tokens].")] = None,
    text: Annotated[Path | None, typer.Option(help="File or folder (*.txt) for perplexity; else Python's own.")] = None,
    haystack: Annotated[str, typer.Option(help="builtin, noise, or a file or folder.")] = "builtin",
    layer_types: Annotated[
        list[str] | None, typer.Option("--layer-type", help="Which tables, on mixed models; may be repeated.")
    ] = None,
    freeze_at: Annotated[int | None, typer.Option(help="Length at which to freeze a dynamic table [tokens].")] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens per forward pass: bounds memory to the KV cache and little more.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens read side by side, at most.")] = 16384,
    device: Annotated[str, typer.Option(help="cpu, cuda …; auto spreads the model over what is there.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of keys and haystacks.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    report: Annotated[bool, typer.Option(help="Write report.html; needs matplotlib.")] = True,
    as_json: Json = False,
) -> None:
    """Measure methods on one model: perplexity by position and retrieval, same texts and prompts for all.

    Writes **comparison.json** and **report.html**. Finished work is kept in the folder: after Ctrl-C or a crash the
    same command goes on where it was.

    Example: **rope-patch compare ./llama --methods "default yarn:factor=4" --lengths "4k 16k" -o ./compared**
    """
    from dataclasses import replace

    import torch
    from tqdm import tqdm
    from transformers.utils import logging as hf_logging

    from rope_patch import checkpoints
    from rope_patch.checkpoints.adapters import is_adapter
    from rope_patch.errors import blamed_on
    from rope_patch.evaluation import compare as engine
    from rope_patch.evaluation.prompts import find_task
    from rope_patch.evaluation.retrieval import check_asked
    from rope_patch.files import folder_to_write, write_atomically
    from rope_patch.methods import as_method
    from rope_patch.words import parse_length

    if report:
        from rope_patch.reports import comparison as page
    wanted = [as_method(name) for name in items(methods)]
    sizes, places = [parse_length(item) for item in items(lengths)], [depth(item) for item in items(depths)]
    check_dtype(dtype)
    check_device(device)
    if not wanted or not sizes:
        raise ValueError("give at least one method and one length")
    check_asked(task, mode, sizes, places, samples, chunk)
    hay = haystack if haystack in ("builtin", "noise") else Path(haystack)
    for path in (text, hay):
        if isinstance(path, Path) and not path.exists():
            raise FileNotFoundError(f"no file or folder {str(path)!r}")
    if adapter is not None and not Path(adapter).exists() and adapter.count("/") != 1:
        raise FileNotFoundError(f"no adapter folder {adapter!r}")
    if adapter is not None and is_adapter(model):
        raise ValueError(f"{model} is an adapter itself: give its base as MODEL to measure another one on it")
    if threads is not None:
        torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()
    with folder_to_write(output, ["comparison.json", KEPT, *["report.html"] * report]):
        tokenizer, loaded = load_tokenizer(model), load_model(model, None, device, dtype)
        notes: dict[str, str] = {}
        if is_adapter(model):
            notes["adapter"] = name_of(model)
        if adapter is not None:
            from peft import PeftModel

            record = checkpoints.read_record(adapter)
            trained = f"trained under {record.to_method()}" if record else "no patch recorded beside it"
            notes["adapter"] = f"{Path(adapter).name} ({trained})"
            print(f"adapter {notes['adapter']}: measured under every method", file=sys.stderr)
            with blamed_on(f"{adapter}: PEFT cannot load this adapter onto {type(loaded).__name__}"):
                loaded = PeftModel.from_pretrained(loaded, adapter)
        prompts = 1 if find_task(task, mode).joined else len(places)
        total = engine.tokens_to_read(len(wanted), sizes, windows or 16, prompts, samples)
        try:
            with tqdm(total=total, unit="tok", unit_scale=True, desc=task, disable=as_json) as bar:

                def told(method: str, tokens: int) -> None:
                    bar.set_postfix_str(method, refresh=False)
                    bar.update(tokens)

                comparison = engine.compare(
                    loaded.eval(),
                    tokenizer,
                    wanted,
                    lengths=sizes,
                    windows=windows,
                    bucket=bucket,
                    depths=places,
                    samples=samples,
                    seed=seed,
                    task=task,
                    mode=mode,
                    text=text,
                    haystack=hay,
                    chunk=chunk,
                    batch_tokens=batch_tokens,
                    layer_types=layer_types,
                    freeze_at=freeze_at,
                    resume=output / KEPT,
                    progress=told,
                )
        except KeyboardInterrupt:
            if (output / KEPT).exists():
                print(f"what was finished is kept in {output}: the same command goes on from there", file=sys.stderr)
            raise
    comparison = replace(comparison, environment=comparison.environment | notes)
    write_atomically(output / "comparison.json", comparison.to_json())
    if report:
        page.write(output / "report.html", [comparison], command=_command())
    if as_json:
        print(comparison.to_json())
        return
    _print_table(comparison)
    print(f"wrote {output / 'comparison.json'}" + (f" and {output / 'report.html'}" if report else ""))


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, hub id, or a name such as Llama-3.1-8B.", show_default=False)
    ],
    length: Annotated[str, typer.Option(help="Of a sequence, 131072 or 128k [tokens].", show_default=False)],
    gpus: Annotated[int, typer.Option(help="Weights and states are divided among them (FSDP).")] = 1,
    gpu_memory: Annotated[float, typer.Option(help="Of one GPU, as nvidia-smi counts it [GiB].")] = 80,
    batch: Annotated[int, typer.Option(help="Sequences per step, in each group that shares one.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Train every weight, not LoRA.")] = False,
    lora_rank: Annotated[int, typer.Option(help="Of the adapters.")] = 16,
    target_modules: Annotated[str, typer.Option(help='Such as "q_proj v_proj".')] = "all-linear",
    long_lora: Annotated[bool, typer.Option("--long-lora", help="Train embeddings and norms too.")] = False,
    quantization: Annotated[str, typer.Option(help="Of frozen weights: none, 8bit or nf4.")] = "none",
    optimizer: Annotated[str, typer.Option(help="adamw, adamw_8bit or sgd.")] = "adamw",
    checkpointing: Annotated[bool, typer.Option(help="Compute each layer again in the backward pass.")] = True,
    loss: Annotated[str, typer.Option(help="fused (logits in slices) or naive (all at once).")] = "fused",
    attention: Annotated[str, typer.Option(help="flash, sdpa or eager.")] = "flash",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    context_parallel: Annotated[int, typer.Option(help="GPUs that share one sequence.")] = 1,
    tflops: Annotated[float, typer.Option(help="Dense peak of one GPU; an H100's in bfloat16.")] = 989,
    mfu: Annotated[float, typer.Option(help="Share of it reached, recomputation counted.")] = 0.45,
    as_json: Json = False,
) -> None:
    """Say what fine-tuning at a length takes, by part, and what to turn on when it does not fit.

    Only the config is read; those of common models ship with the package. Nothing is downloaded or run.

    Example: **rope-patch plan Llama-3.1-8B --length 128k --gpu-memory 141**
    """
    from rope_patch import planning
    from rope_patch.words import parse_length

    if not 0 < gpu_memory < float("inf"):
        raise ValueError(f"gpu-memory must be > 0 GiB, got {gpu_memory}")
    options: dict[str, Any] = {"quantization": quantization, "optimizer": optimizer, "checkpointing": checkpointing}
    options |= {"loss": loss, "attention": attention, "dtype": dtype, "batch": batch, "long_lora": long_lora}
    options |= {"lora_rank": None if full else lora_rank, "target_modules": tuple(items(target_modules))}
    options |= {"gpus": gpus, "context_parallel": context_parallel, "tflops": tflops, "mfu": mfu}
    planned = planning.plan(model, length=parse_length(length), **options)
    if as_json:
        print(planned.to_json(gpu_memory=gpu_memory))
    else:
        _print_plan(planned, gpu_memory)


def _print_plan(planned: Any, gpu_memory: float) -> None:
    """Print a plan for people: the parts, whether they fit, what to turn on, and the time."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    o, done, gib = planned.options, planned.compute, 2.0**30
    title = f"{planned.shape.name}, {o.batch} x {o.length} tokens, {o.gpus} GPU{'s' * (o.gpus > 1)}"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for head, side in (("part", "left"), ("GiB per GPU", "right"), ("what", "left")):
        table.add_column(head, justify=side)  # type: ignore[arg-type]
    largest = max(part.bytes for part in planned.parts if part.turns)
    for part in planned.parts:
        idle = part.turns and part.bytes < largest
        what = f"{part.what}; at another time, not counted" if idle else part.what
        if part.bytes:
            table.add_row(part.name, f"{part.bytes / gib:.2f}", what, style="dim" if idle else None)
    table.add_section()
    table.add_row("peak", f"{planned.total / gib:.2f}", f"of {gpu_memory:g}", style="bold")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    steps = planned.advice(gpu_memory)
    print("fits" if planned.fits(gpu_memory) else "does not fit" + (". Turn on, in this order:" if steps else ""))
    for step in steps:
        print(f"  {step.option}: {step.total / gib:.1f} GiB{', fits' * step.fits} ({step.cost})")
    if not planned.fits(gpu_memory) and not (steps and steps[-1].fits):
        print("  nothing else here makes it fit: take a shorter length or a smaller model")
    longest = planned.longest(gpu_memory)
    print(f"longest sequence that fits with these options: {f'{longest} tokens' if longest else 'none'}")
    print(
        f"evaluation at this length: {planned.kv_cache / gib:.2f} GiB of keys and values per sequence, beside weights"
    )
    print(
        f"time: {done.seconds:.3g} s per step, {done.tokens_per_second:.0f} tokens/s, if {o.mfu:.0%} of {o.tflops:g} "
        f"TFLOP/s per GPU are reached"
    )
    print(
        f"  without recomputation {done.model_flops_share:.0%}; by PaLM's formula, 6 N + 12 L H Q T per token, an MFU "
        f"of {done.palm_mfu:.0%} ({done.palm_mfu_causal:.0%} with causal attention)"
    )


app.command()(finetune)
app.command()(theory)
app.command()(analyze)
app.command("kv-check")(kv_check)
app.command()(fit)
app.command()(export)


def _command() -> str:
    """The command as it was typed."""
    import shlex

    return shlex.join(["rope-patch", *sys.argv[1:]])


def _print_table(comparison: Any) -> None:
    """Print the scores of every method, those that lead beyond doubt in green with a star."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    columns = comparison.columns()
    task = comparison.rows[0].retrieval.task
    heads = [f"ppl {c.start}-{c.stop}" if c.kind == "perplexity" else f"{task} {c.stop}" for c in columns]
    title = escape(f"{comparison.model}, trained at {comparison.trained_length} tokens")
    table = Table("method", *heads, title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for i, row in enumerate(comparison.rows):
        cells = []
        for column in columns:
            value = f"{column.values[i]:.1f}" if column.kind == "perplexity" else f"{column.values[i]:.2f}"
            cells.append(f"[bold green]{value}*[/]" if column.winner == row.method else value)
        table.add_row(row.method, *cells)
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if any(column.winner for column in columns):
        print("* ahead of every other method: the paired 95 % intervals of all differences exclude zero")


@app.command()
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("rope-patch-demo"),
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="llama or gemma3; both by default.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Three methods, few prompts: under a minute.")] = False,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda …")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights: float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the passkey prompts.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; more only help on an idle machine.")] = 1,
    as_json: Json = False,
) -> None:
    """Compare every method at 4x the trained context on the bundled checkpoints; save and reload the best."""
    import torch
    from tqdm import tqdm
    from transformers.utils import logging as hf_logging

    from rope_patch.cli import demo as bundled
    from rope_patch.reports import comparison as page

    types = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if dtype not in types:
        raise ValueError(f"dtype must be one of {', '.join(types)}, got {dtype!r}")
    for name in shape or ():
        if name not in bundled.SHAPES:
            raise ValueError(f"shape must be one of {', '.join(bundled.SHAPES)}, got {name!r}")
    if device == "auto":
        raise ValueError("device must be one of torch's here, such as cpu or cuda, got 'auto'")
    check_device(device)
    torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()  # ours tells enough
    results = []
    for name in shape or bundled.SHAPES:
        with tqdm(total=bundled.tokens_to_read(quick), unit="tok", unit_scale=True, desc=name) as bar:

            def told(method: str, tokens: int, bar: Any = bar) -> None:
                bar.set_postfix_str(method, refresh=False)
                bar.update(tokens)

            options: dict[str, Any] = {"quick": quick, "device": device, "dtype": types[dtype], "seed": seed}
            shown = bundled.run(name, output, **options, progress=told)
        results.append(shown)
        if as_json:
            continue
        _print_table(shown.comparison)
        print(f"best retrieval at the end: {shown.comparison.best().method}, saved to {shown.saved}")
        print("reloaded by plain transformers in a process without rope_patch: logits equal, bit for bit\n")
    page.write(output / "report.html", [shown.comparison for shown in results], command=_command())
    if as_json:
        _print_json({r.shape: json.loads(r.comparison.to_json()) | {"saved": str(r.saved)} for r in results})
        return
    print(f"report: {output / 'report.html'}")


def _say(name: str) -> None:
    print(f"copying {name}", file=sys.stderr)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=2, allow_nan=False))


def main() -> None:
    """Run the ``rope-patch`` command."""
    run(app)


def run(app: typer.Typer) -> None:
    """Run a command; errors of the user's making are one line on stderr."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it reports missing kernels that no command uses
    try:
        app()
    except (KeyboardInterrupt, SystemExit) as stop:  # typer turns Ctrl-C into a silent exit
        if isinstance(stop, SystemExit) and stop.code != 130:
            raise
        print("interrupted: nothing was left half written", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if os.environ.get("ROPE_PATCH_DEBUG"):
            raise
        hint = (
            ': pip install "rope_patch[plots]", or give --no-report (--no-figure for fit)'
            if "No module named 'matplotlib" in str(error)
            else ""
        )
        system = isinstance(error, OSError) and error.filename is not None and error.strerror is not None
        said = f"{str(error.filename)!r}: {error.strerror.lower()}" if system else str(error)  # type: ignore[union-attr]
        print(f"error: {said}{hint}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:  # of a library: its name helps
        if os.environ.get("ROPE_PATCH_DEBUG"):
            raise
        message = " ".join(str(error).split())[:500]
        print(f"error: {type(error).__name__}: {message} (ROPE_PATCH_DEBUG=1 shows where)", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
