"""Fine-tune a patched checkpoint at longer contexts with LoRA or QLoRA, evaluate it, and save adapter and patch.

    python recipes/finetune_lora.py recipes/configs/lora.yaml --smoke                  # about a minute on a CPU
    python recipes/finetune_lora.py recipes/configs/llama-3.1-8b-32k.yaml --dry-run    # predicted memory
    python recipes/finetune_lora.py recipes/configs/lora.yaml model.name=FOLDER data.length=32k output=out
    accelerate launch --config_file recipes/configs/accelerate/two_gpus_fsdp2.yaml recipes/finetune_lora.py ...

Options come from YAML files and `key=value` overrides; recipes/configs/lora.yaml describes them all.
`rope_patch.load(OUTPUT)` loads the adapter with base and patch. This script does the same as `rope-patch finetune`, and
launchers of several processes, such as `accelerate launch`, can start it.
"""

import sys

from rope_patch.cli.finetune import finetune
from rope_patch.runtime.command import run_and_exit

if __name__ == "__main__":
    run_and_exit(lambda: finetune(sys.argv[1:]))
