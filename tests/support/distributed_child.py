"""The work that test_distributed.py runs in one process and in two, which must give the same figures.

The two processes are forked; ``torchrun --nproc_per_node 2 tests/support/distributed_child.py FOLDER`` does the same.
Either writes ``rank-0.pt`` and ``rank-1.pt`` into the folder.
"""

import os
import random
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, default_data_collator

import rope_patch
from rope_patch.checkpoints import adapters
from rope_patch.evaluation.perplexity.measure import perplexity
from rope_patch.modeling.identity import model_hash
from rope_patch.modeling.positions import skipped_positions
from rope_patch.patching.locate import PatchError, base_of, locate
from support.prompting import TOKENIZER
from support.scored import bold_model
from support.tiny import ids

PROCESSES = 2
IGNORED_LABEL = -100
TEXT = ids(96, batch=1, seed=7)[0]


def rows(count=16, size=24):
    """Rows at skipped positions with unequal numbers of labels, so that a mean of means is far from the mean."""
    examples = []
    for i in range(count):
        rng = random.Random(i)
        tokens = ids(size, batch=1, seed=i)[0]
        learned = torch.tensor([rng.random() < (0.9 if i % 4 == 0 else 0.2) for _ in range(size)])
        if i in (2, 3):  # the rows that the second of two processes reads first have no labels at all
            learned[:] = False
        examples.append(
            {
                "input_ids": tokens,
                "labels": tokens.masked_fill(~learned, IGNORED_LABEL),
                "position_ids": skipped_positions(random.Random(f"1/{i}"), size, 96),
                "attention_mask": torch.ones_like(tokens),
            }
        )
    return examples


def tuned(tied=False, folder=None):
    """A patched model under LoRA, the same in every process."""
    if folder is None:
        model = bold_model(tie_word_embeddings=tied)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rope_patch.apply(model, "yarn", factor=4)
    torch.manual_seed(0)
    peft_model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:  # PEFT sets it to zeros, with which no gradient reaches lora_A
                parameter.normal_(std=0.05)
    return peft_model.train()


def full():
    """A patched model of which all weights are trained, those of the head, too."""
    model = bold_model()
    rope_patch.apply(model, "yarn", factor=4)
    return model.train()


def fused(model):
    """The model with the head that TRL's SFTTrainer gives it."""
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(base_of(model))
    return model


# --- the trainer


def train(folder, steps, resume=False):
    """Return losses, gradient norms and the adapter after some steps of eight rows, split over all processes.

    Args:
        folder: the output folder of the trainer.
        steps: number of steps.
        resume: whether to resume from the last checkpoint in the folder.
    """
    from trl import SFTConfig, SFTTrainer

    # A step has the same eight rows for any number of processes.
    size = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    arguments = SFTConfig(
        str(folder),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=2,
        max_steps=steps,
        logging_steps=1,
        save_steps=1,
        save_total_limit=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_length=None,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        report_to=[],
        optim="sgd",  # unlike Adam it shows a wrong scale
        learning_rate=0.3,
        lr_scheduler_type="constant",
        disable_tqdm=True,
        seed=3,
    )
    trainer = SFTTrainer(
        tuned(),
        arguments,
        train_dataset=Dataset.from_list([{name: row.tolist() for name, row in each.items()} for each in rows()]),
        data_collator=default_data_collator,
        processing_class=TOKENIZER,
        callbacks=[rope_patch.RopePatchCallback()],
    )
    written = []
    stock = adapters.write_atomically
    adapters.write_atomically = lambda path, content: (written.append(str(path)), stock(path, content))
    try:
        trainer.train(resume_from_checkpoint=resume)
    finally:
        adapters.write_atomically = stock
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    adapter = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return {
        "losses": [entry["loss"] for entry in history],
        "norms": [entry["grad_norm"] for entry in history],
        "adapter": adapter,
        "written": written,
    }


# --- sharded models


def step(model, processes=1, rank=0):
    """Loss and gradients of a step of two passes, each process on its share of the rows."""
    model.zero_grad()
    passes = [default_data_collator([row]) for row in rows(4)]
    total = float(sum((batch["labels"][:, 1:] != IGNORED_LABEL).sum() for batch in passes))
    summed = torch.zeros(())
    for batch in passes[rank::processes]:
        loss = model(**batch, num_items_in_batch=total, fused_lm_head=True)["loss"]
        (loss * processes).backward()  # FSDP divides the summed gradients by the number of processes
        summed += loss.detach().float()
    if processes > 1:
        dist.all_reduce(summed)
    grads = {
        name.replace("_checkpoint_wrapped_module.", ""): whole(p.grad).clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {"loss": float(summed), "gradients": grads}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def measure(model):
    """Return the losses of a text, read in one pass, in chunks and in overlapping windows."""
    return [
        perplexity(model, TEXT).nll,
        perplexity(model, TEXT, chunk=16).nll,
        perplexity(model, TEXT, window=32, stride=16, batch=2).nll,
    ]


def verified(model):
    """Return "verified" if the tables in use are those of the patch, and otherwise the error."""
    try:
        rope_patch.verify(model)
    except PatchError as error:
        return str(error)
    return "verified"


def by_accelerate(model, *, precision="no", efficient=False):
    """Shard a model with accelerate's own function, with a stand-in for the Accelerator, which would ask for GPUs."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=efficient
    )
    if precision != "no":
        plugin.set_mixed_precision(precision)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=None,
        mixed_precision=precision,
        is_main_process=dist.get_rank() == 0,
        is_fsdp2=True,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


def sharded(rank):
    """Return all measurements of sharded models, by the name of the model."""
    results = {}
    for name, make in {
        "by accelerate": lambda: by_accelerate(fused(tuned())),
        "tied": lambda: by_accelerate(fused(tuned(tied=True))),
        "whole": lambda: by_accelerate(fused(full())),
    }.items():
        model = make()
        before = measure(model)  # the decoder is called alone, before any forward pass of the root
        steps = [step(model, PROCESSES, rank) for _ in range(2)]
        after = measure(model)
        again = step(model, PROCESSES, rank)
        results[name] = {"before": before, "steps": [*steps, again], "after": after, "verified": verified(model)}
        results[name]["model_hash"] = model_hash(model)
    rounded = by_accelerate(fused(tuned()), precision="bf16")
    results["bf16"] = {
        "steps": [step(rounded, PROCESSES, rank)],
        "verified": verified(rounded),
        "nll": measure(rounded),
    }
    plain = by_accelerate(bold_model())
    statuses = [rope_patch.doctor(rounded).status]
    statuses.append(rope_patch.doctor(plain).status)
    if rank == 1:
        locate(plain).module.to(torch.bfloat16)
    results["doctor"] = [*statuses, rope_patch.doctor(plain).status]
    # Only the first process checks, as when a checkpoint is written: nothing in it may wait for the others.
    results["alone"] = verified(rounded) if rank == 0 else "verified"
    return results


def loaded_by_one(folder, rank):
    """Return measurements of a model whose weights only the first process has, and sends to the others.

    That is accelerate's cpu_ram_efficient_loading; the others patch a model with empty weights.
    """
    names = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    os.environ |= names
    try:
        model = tuned(folder=folder)
        if rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        model = by_accelerate(fused(model), efficient=True)
        return {"verified": verified(model), "nll": measure(model), **step(model, PROCESSES, rank)}
    finally:
        for name in names:
            os.environ.pop(name, None)


def main(folder):
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))  # processes that wait in vain fail soon
    results = {"whole": train(folder / "whole", 2), "cut": train(folder / "cut", 1)}
    results["resumed"] = train(folder / "cut", 2, resume=True)
    results["sharded"] = sharded(rank)
    results["loaded by one"] = loaded_by_one(folder / "base", rank)
    torch.save(results, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
