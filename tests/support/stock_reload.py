"""Load folders with plain transformers and save their logits: a program for a process that cannot import rope_patch."""

import sys


def main(root: str, *names: str) -> None:
    sys.modules["rope_patch"] = None  # importing it would fail
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    tokens = load_file(f"{root}/ids.safetensors")["ids"]
    outputs = {}
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(f"{root}/{name}").eval()
        with torch.no_grad():
            outputs[name] = model(tokens, use_cache=False).logits.contiguous()
    save_file(outputs, f"{root}/stock.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
