"""Lists what the stages need beside torch, transformers, peft and accelerate, and finds what is missing here.

``gpu.py --list`` prints it, and a cell that lacks something is skipped with the reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from gpu_stages.base import Setting

PACKAGES = {
    "flash-attn": "attention kernels; a build for the torch and CUDA of the machine",
    "bitsandbytes": "NF4 weights",
    "liger-kernel": "fused norms and MLPs in Triton",
    "lm-eval": "the harness that ours is compared with",
}
"""Optional packages by their name on the package index; the module has the same name, with underscores for hyphens."""
NEEDS = {**PACKAGES, "GPU": "a CUDA device", "text": "any English text, a megabyte or more; --text"}
"""Everything that a cell may name under ``needs``."""


def lacking(names: Iterable[str], setting: Setting) -> list[str]:
    """Return a reason for each need that this machine or this run does not meet.

    Args:
        names: the needs, which are keys of ``NEEDS``.
        setting: the setting of this run.
    """
    reasons = []
    for name in names:
        if name == "GPU":
            if setting.device != "cuda":
                reasons.append("it runs on a GPU only")
        elif name == "text":
            if not setting.text:
                reasons.append("no text is given: --text FILE")
        elif importlib.util.find_spec(name.replace("-", "_")) is None:
            reasons.append(f"{name} is not installed")
    return reasons
