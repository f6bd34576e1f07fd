"""``rope-patch finetune`` and ``recipes/finetune_lora.py``: parsing and printing; slow imports are inside functions."""

from __future__ import annotations

import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rope_patch.cli.parsing import parse_words
from rope_patch.options.finetune import FinetuneOptions, RecipeOptions
from rope_patch.options.yaml_and_json import to_yaml

SMOKE_REQUIRED = ("model.name=llama", "train.max_length=512", "output=build/finetuned")
"""Values that ``--smoke`` uses if neither a recipe nor the command line gives them."""

SMOKE_OVERRIDES = """
    model.dtype=float32 model.attention=sdpa model.revision=null patch.target_length=1024
    data.source=builtin data.documents=null data.allow_short=true
    train.max_length=512 train.max_steps=4 train.per_device_train_batch_size=1 train.gradient_accumulation_steps=2
    train.assistant_only_loss=false train.bf16=false train.warmup_steps=1 train.save_steps=2 train.logging_steps=1
    train.use_liger_kernel=false train.dataset_text_field=text
    evaluation.lengths=256,1024 evaluation.samples=1 evaluation.depths=0.1,0.9 evaluation.windows=2 evaluation.every=2
"""
"""Values that ``--smoke`` changes in any recipe, for few and short rows; LoRA and positions stay as they are."""


def finetune(words: Sequence[str], train: Callable[..., Any] | None = None) -> int:
    """Run ``rope-patch finetune`` with the words that follow it, and return its exit status.

    Args:
        words: the words of the command line.
        train: the function of the recipe that trains; by default that of the recipe that ships with this package.
    """
    command = shlex.join(["rope-patch", "finetune", *words])
    if "--smoke" in words:
        words = [*SMOKE_REQUIRED, *words]
        files = [i for i, word in enumerate(words) if word.endswith((".yaml", ".yml")) and "=" not in word]
        # Behind the last file, so that the smaller values replace those of files, but not single values that follow.
        after = max(files, default=len(SMOKE_REQUIRED) - 1) + 1
        words = [*words[:after], *smaller(parse_words(FinetuneOptions, words).recipe), *words[after:]]
    options = parse_words(FinetuneOptions, words)
    recipe = options.recipe

    import datasets
    import torch
    from transformers.utils import logging as hf_logging

    from rope_patch.training.finetune import finetune as run
    from rope_patch.training.results import scores_table
    from rope_patch.training.runs import last_checkpoint

    warnings.formatwarning = lambda message, *place, **more: f"warning: {message}\n"  # without a line of our source
    hf_logging.disable_progress_bar()  # hides the bar of loading weights; the Trainer's own stays
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", message=r"Could not find a config file in .*\.gguf")  # PEFT, of a GGUF file
    warnings.filterwarnings("ignore", message="`(is_)?gradient_checkpointing(_enable)?` is deprecated")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        result = run(recipe, train, command=command, restart=options.restart, dry_run=options.dry_run)
    except KeyboardInterrupt:
        work = recipe.output.expanduser() / "work"
        if last_checkpoint(work) is not None:
            print(f"\nCheckpoints are saved in {work}: the same command continues from the last.", file=sys.stderr)
        else:
            print("\nNothing is saved: it was interrupted before the first checkpoint.", file=sys.stderr)
        raise
    except Exception:
        print(file=sys.stderr)  # so that the message stands below the progress bar
        raise
    if result.plan is not None:
        print(result.plan.describe(options.gpu_memory))
    if options.dry_run:
        print(f"\n{to_yaml(recipe)}\ndry run: nothing was trained or written")
    if not result.results:  # only the first process has results, and prints
        return 0
    print(scores_table(result.results))
    for change in result.results["changes"]:
        print(change["sentence"])
    for note in result.results["notes"]:
        print(f"note: {note}", file=sys.stderr)
    verb = "wrote"
    if result.finished_before:
        verb = "nothing was trained, since an earlier command finished"
    print(f"{verb} {result.folder}: rope_patch.load({str(result.folder)!r}) loads it with its patch")
    return 0


def smaller(options: RecipeOptions) -> Iterator[str]:
    """Yield changes such as ``train.max_steps=4``, with which a run uses the same code and takes about a minute."""
    from rope_patch.training.models import BUNDLED_MODELS

    yield from SMOKE_OVERRIDES.split()
    yield f"model.name={BUNDLED_MODELS['gemma' in options.model.name.lower()]}"
    if options.patch.method:
        # The context of the checkpoint that is replaced would leave most pairs of the bundled one as they are.
        yield "patch.method=" + re.sub(r":original_max_position_embeddings=[^:+]+", "", options.patch.method)
    yield f"output={options.output}-smoke"
