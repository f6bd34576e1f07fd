"""``rope-patch plan --serve``."""

from __future__ import annotations

from dataclasses import asdict

from rope_patch.cli.printing import new_table, print_json, show
from rope_patch.options.plan import ServeOptions
from rope_patch.planning.serving import VLLM_SHARE, serve
from rope_patch.runtime.text import GIB


def plan_serve(options: ServeOptions) -> None:
    """Run ``rope-patch plan --serve`` with its options."""
    planned = serve(options)
    if options.as_json:
        print_json(asdict(planned))
        return
    print(
        f"{planned.model}: of {options.gpu_memory:g} GiB vLLM takes {VLLM_SHARE:.0%} by default. The weights take "
        f"{planned.weights_bytes / GIB:.2f} GiB, and {planned.room_bytes / GIB:.2f} GiB are left for caches. "
        "Not counted: activations, and the tokens of a step that vLLM keeps beside a sliding window."
    )
    table = new_table("format", "bytes a token", "longest context [tokens]", f"of each of {options.requests} requests")
    for row in planned.rows:
        table.add_row(row.format, *(f"{value:,.0f}" for value in (row.bytes_per_token, row.tokens, row.tokens_each)))
    show(table)
