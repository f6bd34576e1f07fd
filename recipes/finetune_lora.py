"""Fine-tune a patched checkpoint at longer contexts with TRL and PEFT: LoRA, QLoRA, or every weight.

    python recipes/finetune_lora.py --smoke                                              # about a minute on a CPU
    python recipes/finetune_lora.py recipes/configs/32k.yaml --dry-run                   # steps and predicted memory
    python recipes/finetune_lora.py recipes/configs/32k.yaml model.name=FOLDER output=out
    accelerate launch --config_file recipes/configs/accelerate/two_gpus_fsdp2.yaml recipes/finetune_lora.py ...

Options come from YAML files and key=value overrides. Below `train` they are those of TRL's SFTConfig, below `lora`
those of PEFT's LoraConfig; `rope-patch finetune --help` lists the others. `rope-patch finetune` runs this script, which
leaves an adapter with its patch in `output`: rope_patch.load(OUTPUT) loads both. Change it as you like.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import BitsAndBytesConfig, PreTrainedModel
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

import rope_patch
from rope_patch.checkpoints import read_tokenizer
from rope_patch.checkpoints.model_without_weights import model_without_weights
from rope_patch.checkpoints.source_files import on_device
from rope_patch.cli.finetune import finetune as command
from rope_patch.options.finetune import ModelOptions, RecipeOptions
from rope_patch.patching.verify import verify_model
from rope_patch.runtime.command import run_and_exit
from rope_patch.runtime.parallel import choose_device
from rope_patch.training import models
from rope_patch.training.callbacks import EvaluationCallback, FiniteLossCallback
from rope_patch.training.checks import build, check_context_parallel, check_loss, description
from rope_patch.training.documents import as_needed, builtin_documents, check_documents, hold_out, read_documents
from rope_patch.training.evaluate_run import evaluate_model, suite_of
from rope_patch.training.finetune import Result
from rope_patch.training.position_collator import PositionCollator
from rope_patch.training.results import write_results
from rope_patch.training.runs import run_folder


def training_arguments(options: RecipeOptions) -> dict[str, Any]:
    """Return the arguments of SFTConfig: those of the user, over defaults for long rows."""
    steps = options.max_steps
    arguments = {
        "max_steps": steps,
        "learning_rate": 2e-4,  # for LoRA; lower it where every weight is trained
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": min(20, steps // 5),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "packing": True,
        "packing_strategy": "wrapped",  # all tokens are learned; TRL's default, bfd, drops what is beyond one row
        "shuffle_dataset": True,
        "save_steps": options.evaluation.every or max(1, steps // 5),
        "save_total_limit": 2,
        "logging_steps": 5,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # a loss that is no number ends the run, below
        "report_to": "tensorboard",
        "ddp_timeout": 6 * 3600,  # seconds; the other processes wait while the first prepares the documents
        "ddp_find_unused_parameters": False,  # all adapters take part in every step
    }
    if options.evaluation.every:
        arguments |= {
            "eval_strategy": "steps",
            "eval_steps": options.evaluation.every,
            "load_best_model_at_end": True,
            "metric_for_best_model": "score",  # of EvaluationCallback: retrieval, then perplexity
            "greater_is_better": True,
        }
    return arguments | options.train


def load(options: ModelOptions, *, weights: bool = True) -> PreTrainedModel:
    """Return the model, in the memory of this process's GPU unless a launcher may spread it over several."""
    source = models.bundled_folder_or_name(options.name)
    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    quantized = models.is_quantized(options)  # an adapter is refused, and what is quantized is not quantized again
    if not weights and (quantized or not Path(source).is_dir()):
        return model_without_weights(source, **hub)
    dtype = getattr(torch, options.dtype)
    kernel = {"flash": "flash_attention_2"}.get(options.attention, options.attention)
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": kernel, **hub}
    if not weights:
        how["device_map"] = "meta"  # the names and shapes of the tensors are compared with the model's
    elif options.quantization != "none":
        how["device_map"] = {"": choose_device()}
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_8bit=options.quantization == "8bit",
            load_in_4bit=options.quantization == "nf4",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_quant_storage=dtype,  # so that FSDP can shard the packed weights with the others
        )
    elif "WORLD_SIZE" not in os.environ:
        how |= on_device(choose_device())
    return rope_patch.load(source, **how)


def train(options: RecipeOptions, *, command: str = "", restart: bool = False, dry_run: bool = False) -> Result:
    """Train, evaluate, and write all into `options.output`; an interrupted run is resumed, a finished one returned.

    Args:
        options: the options of the run.
        command: the command that started the run; the model card shows it.
        restart: whether to delete what an earlier run left in the output folder.
        dry_run: whether to stop before the weights are loaded; nothing is written.
    """
    out = options.output.expanduser()
    options = replace(options, train=training_arguments(options))  # a run is resumed only under the same defaults
    own = {"output_dir": str(out / "work"), "use_cpu": not torch.accelerator.is_available()}
    args = build(SFTConfig, "train", own | options.train)
    with run_folder(options, restart=restart) as run:
        if run.results is not None:
            return Result(out, run.results if args.process_index == 0 else {}, finished_before=True)

        # The model under its patch. From here on, a patch that is lost stops the run.
        model = load(options.model, weights=not dry_run)
        source = models.bundled_folder_or_name(options.model.name)
        hub = {"revision": options.model.revision, "trust_remote_code": options.model.trust_remote_code}
        tokenizer = read_tokenizer(source, **hub)
        # Documents are longer than the model reads, and are packed into rows; this silences a warning about each.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        patch = models.patch_arguments(model, options)
        if patch is not None:  # else the checkpoint keeps the patch that it has
            rope_patch.apply(model, options.patch.method or "default", **patch)

        # The documents: texts, or conversations in a column `messages`. Some are kept for the evaluation.
        documents = read_documents(options)
        check_documents(documents, tokenizer, options)
        documents, held_out = hold_out(documents, tokenizer, options)
        suite = suite_of(options, tokenizer, held_out)
        if args.process_index == 0:
            print(description(options, args, run, model, suite), flush=True)

        lora = None
        if options.lora_rank:
            lora = build(LoraConfig, "lora", models.lora_arguments(model, options))
        check_context_parallel(model)
        if dry_run:
            if lora is not None:
                get_peft_model(model, lora)  # refuses names that match no projection
            return Result(out, {}, plan=models.training_plan(options, args))

        # PoSE and RandPos: short rows at positions of the whole context. TRL's collator drops such positions.
        collator = None
        if options.data.positions != "full":
            collator = PositionCollator(
                DataCollatorForLanguageModeling(pad_token_id=0),
                options.target_length,
                kind=options.data.positions,
                chunks=options.data.chunks,
                seed=args.seed,
            )

        evaluated = None
        if options.evaluation.every:
            evaluated = held_out or as_needed(builtin_documents("heldout", options), tokenizer, options)
        trainer = SFTTrainer(
            model,
            args,
            train_dataset=documents,
            eval_dataset=evaluated,
            processing_class=tokenizer,
            peft_config=lora,
            data_collator=collator,
            # Writes the patch beside every adapter, and checks that it is the one that the run was begun under.
            callbacks=[rope_patch.RopePatchCallback(), FiniteLossCallback()],
        )
        trainer.add_callback(EvaluationCallback(trainer, suite))
        check_loss(trainer)

        run.begin(options)  # deletes what an earlier run left, unless it is resumed
        trainer.train(resume_from_checkpoint=run.checkpoint and str(run.checkpoint))
        trainer.save_model(str(out))

        # Perplexity and retrieval: after training, before it (without the adapter), and without the patch.
        trained: Any = trainer.model
        scores = {"after": evaluate_model(suite, trained)}
        if options.evaluation.before and lora is not None:
            with trained.disable_adapter():
                scores["before"] = evaluate_model(suite, trained)
                record = verify_model(trained)
                if record.changed:
                    with rope_patch.patched(trained, "default", replace=True, freeze_at=record.freeze_at):
                        scores["unpatched"] = evaluate_model(suite, trained)
        trainer.accelerator.wait_for_everyone()
        if args.process_index:
            return Result(out, {})
        return Result(out, write_results(out, options, command, trainer, scores, suite.text_name))


if __name__ == "__main__":
    run_and_exit(lambda: command(sys.argv[1:], train))
