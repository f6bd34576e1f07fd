"""``--backend`` of ``rope-patch compare``: retrieval through vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rope_patch.cli.options import RESULT_CACHE, value_of

BACKENDS = ("transformers", "vllm")
REFUSED = {
    "adapter": "merge the adapter first, rope-patch export ADAPTER --to hf -o FOLDER",
    "windows": "perplexity is not measured through vLLM: leave it out",
    "bucket": "perplexity is not measured through vLLM: leave it out",
    "text": "perplexity is not measured through vLLM: leave it out, or give the text as --haystack",
    "longppl": "perplexity is not measured through vLLM: leave it out",
    "short_context": "perplexity is not measured through vLLM: leave it out",
    "evaluator": "perplexity is not measured through vLLM: leave it out",
    "chunk": "vLLM reads prompts in its own way: --vllm-args '{\"max_num_batched_tokens\": 2048}' bounds its memory",
    "budget": "the pace of vLLM is not measured: leave it out, and give --samples",
    "shard": "vLLM runs in one process here: leave it out",
    "merge": "vLLM runs in one process here: leave it out",
    "device": "vLLM chooses the GPUs: set CUDA_VISIBLE_DEVICES, or --vllm-args '{\"tensor_parallel_size\": 2}'",
}
"""Options that do not go with vLLM, and what to do."""


def read_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a JSON object.

    Raises:
        ValueError: something else.
    """
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"must be a JSON object ({error}), got {text!r}") from None
    if not isinstance(values, dict):
        raise ValueError(f"must be a JSON object, got {text!r}")
    return values


Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="NAME",
        help="What runs the model: transformers, or vllm for retrieval alone. vllm exports MODEL under each method, "
        "opens it with vLLM's offline engine, and measures no perplexity. It needs pip install 'rope_patch[vllm]', and "
        "was not yet run with a real vLLM: it is unverified.",
    ),
]
VLLMArgs = Annotated[
    Any,
    typer.Option(
        "--vllm-args",
        parser=value_of("--vllm-args", read_arguments),
        metavar="JSON",
        help="With --backend vllm: other arguments of vllm.LLM, for example "
        '\'{"tensor_parallel_size": 2, "gpu_memory_utilization": 0.8}\'.',
        show_default=False,
    ),
]


def through_vllm(backend: str, arguments: Mapping[str, Any] | None, given: Collection[str], model: str) -> bool:
    """Return whether vLLM is asked for.

    Args:
        backend: value of ``--backend``.
        arguments: value of ``--vllm-args``.
        given: parameters of the command that were given.
        model: MODEL.

    Raises:
        ValueError: an unknown backend, or what vLLM is not asked for here.
        ImportError: no vLLM.
    """
    if backend not in BACKENDS:
        raise ValueError(f"--backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend != "vllm":
        if arguments is not None:
            raise ValueError("--vllm-args goes with --backend vllm")
        return False
    for name, reason in REFUSED.items():
        if name in given:
            option = {"evaluator": "longppl-evaluator"}.get(name, name.replace("_", "-"))
            raise ValueError(f"--{option} does not go with --backend vllm: {reason}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("--backend vllm starts processes of its own: run the command without torchrun")
    from rope_patch.evaluation.vllm_engine import check_options, vllm_version
    from rope_patch.exporting.served import check_source_for_vllm

    vllm_version()
    check_options(arguments or {})
    check_source_for_vllm(model)
    return True


def measured_with_vllm(
    model: str,
    methods: Sequence[Any],
    spec: Any,
    output: Path,
    layer_types: Sequence[str] | None,
    freeze_at: int | None,
    dtype: str,
    arguments: Mapping[str, Any] | None,
    *,
    report: bool,
    quiet: bool,
) -> Any:
    """Return the comparison of methods through vLLM; finished work is kept in the output folder."""
    from rope_patch.cli.loading import load_tokenizer, progress_bar
    from rope_patch.cli.options import resumable
    from rope_patch.evaluation.suite import EvalSuite
    from rope_patch.exporting.served import compare_with_vllm
    from rope_patch.files import folder_to_write

    finished = output / RESULT_CACHE
    with folder_to_write(output, ["comparison.json", RESULT_CACHE, *["report.html"] * report]):
        tokenizer = load_tokenizer(model)
        suite = EvalSuite(spec, tokenizer)
        total = len(methods) * suite.tokens
        with resumable(finished), progress_bar(total, ", ".join(spec.tasks), hidden=quiet) as (_, on_progress):
            return compare_with_vllm(
                model,
                tokenizer,
                methods,
                suite,
                layer_types=layer_types,
                freeze_at=freeze_at,
                dtype=dtype,
                options=arguments,
                resume=finished,
                on_progress=on_progress,
            )
