"""Fine-tune a patched checkpoint at longer contexts with LoRA or QLoRA, and save an adapter with its patch.

    python recipes/finetune_lora.py recipes/configs/lora.yaml --smoke           # all of it in a CPU minute
    python recipes/finetune_lora.py recipes/configs/lora.yaml --dry-run         # what it takes, from the config alone
    python recipes/finetune_lora.py recipes/configs/lora.yaml model.name=meta-llama/Llama-3.1-8B output=out
    accelerate launch --config_file recipes/configs/accelerate/two_gpus_fsdp2.yaml recipes/finetune_lora.py ...

Options are YAML files, each over those before it, then `key=value` words; recipes/configs/lora.yaml names them all.
`rope_patch.load(OUTPUT)` loads what a run leaves. The work is done in `rope_patch.training`, the same as by
`rope-patch finetune`; this script is what launchers of several processes start.
"""

import typer

from rope_patch.cli.app import run
from rope_patch.cli.finetune import finetune

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command()(finetune)
    run(app)
