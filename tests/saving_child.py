"""Run in several processes: what each of them sees when a patched model is saved. No assertion here; a line of JSON."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny import ids, logits, tiny_model

import rope_patch
from rope_patch import processes


def main(root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, outcomes = dist.get_rank(), {}
    model = tiny_model()
    rope_patch.apply(model, "yarn", factor=4)

    def attempt(name, call):
        try:
            call()
            outcomes[name] = "ok"
        except Exception as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        dist.barrier()

    def loads(name):
        try:
            return torch.equal(logits(rope_patch.load(root / name).eval(), ids()), logits(model))
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def slowly(*args, **kwargs):
        time.sleep(0.2)
        return stock(*args, **kwargs)

    stock = type(model).save_pretrained
    type(model).save_pretrained = slowly
    for turn in range(3):
        flag, every = root / f"flag-{turn}", root / f"every-{turn}"
        attempt(f"flag {turn}", lambda out=flag: rope_patch.save(model, out, is_main_process=rank == 0))
        attempt(f"every rank {turn}", lambda out=every: rope_patch.save(model, out))
        outcomes[f"whole {turn}"] = loads(f"flag-{turn}") is True and loads(f"every-{turn}") is True
        dist.barrier()
    # Whoever comes back finds a whole folder: no barrier between saving and looking.
    rope_patch.save(model, root / "at-once")
    outcomes["whole at once"] = loads("at-once")
    dist.barrier()
    attempt("twice into one folder", lambda: [rope_patch.save(model, root / "at-once") for _ in range(3)])
    attempt("first alone", lambda: rank or rope_patch.save(model, root / "alone"))
    outcomes["whole alone"] = loads("alone")
    # The first process alone has the gathered weights, as accelerate and FSDP give them.
    state = model.state_dict() if rank == 0 else {}
    attempt("gathered", lambda: rope_patch.save(model, root / "gathered", is_main_process=rank == 0, state_dict=state))
    outcomes["whole gathered"] = loads("gathered")
    (root / "file").write_text("") if rank == 0 else None
    dist.barrier()
    attempt("in the way", lambda: rope_patch.save(model, root / "file"))
    processes.PATIENCE = timedelta(seconds=1), timedelta(seconds=1)
    attempt("never came", lambda: rank and rope_patch.save(model, root / "never"))
    torch.manual_seed(0)
    tuned = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False)).eval()
    attempt("adapter", lambda: rope_patch.save(tuned, root / "adapter", is_main_process=rank == 0))
    outcomes["record"] = json.loads((root / "adapter" / "rope_patch.json").read_text())["method"]["method"]
    outcomes["left"] = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
    dist.barrier()
    dist.destroy_process_group()
    (root / f"outcomes-{os.environ['RANK']}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
