"""``rope-patch demo``: ``rope-patch extend`` on a checkpoint that ships with this package."""

from __future__ import annotations

import shlex
import sys

from rope_patch.cli.extend import extend
from rope_patch.cli.parsing import parse_words
from rope_patch.options.extend import ExtendOptions
from rope_patch.options.shipped import DemoOptions
from rope_patch.runtime.packaged import data_path

DEMO_METHODS = (
    "yarn",
    "mrrope",
    "ntk",
    "abf:factor=50",
    "llama3",
    "p_rope:p=0.5",
    "pi",
)
"""Methods that may reach four times the context without training, and ``pi``, which needs training."""


def demo(options: DemoOptions) -> int:
    """Run ``rope-patch demo`` with its options, and return the exit status of ``extend``."""
    model = str(data_path("assets") / options.shape)
    methods = " ".join(("yarn", "nope") if options.quick else DEMO_METHODS)
    arguments = [model, "--length", "1k", "-o", str(options.output), "--methods", methods]
    arguments += ["--threads", str(options.threads), "--budget", "90s", "--force"]
    print(f"$ {shlex.join(['rope-patch', 'extend', *arguments])}", file=sys.stderr)
    return extend(parse_words(ExtendOptions, arguments))
