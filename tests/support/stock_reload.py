"""Load folders with plain transformers and save their logits: a program for a process that cannot import rope_patch.

A name such as ``yarn@bfloat16`` is that of a folder, and of the data type in which it is loaded.
"""

import sys


def main(root: str, *names: str) -> None:
    sys.modules["rope_patch"] = None  # importing it would fail
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    tokens = load_file(f"{root}/ids.safetensors")["ids"]
    outputs = {}
    for name in names:
        folder, _, dtype = name.partition("@")
        model = AutoModelForCausalLM.from_pretrained(f"{root}/{folder}", dtype=dtype or "auto").eval()
        for weights in [*model.parameters(), *model.buffers()]:
            # Out of the mapped file, whose alignment decides the last bits of a product.
            weights.data = weights.data.clone()
        with torch.no_grad():
            outputs[name] = model(tokens, use_cache=False).logits.contiguous()
    save_file(outputs, f"{root}/stock.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
