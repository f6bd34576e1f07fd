"""Methods compared through vLLM: each as the folder that an export writes, opened by vLLM's offline engine in turn."""

from __future__ import annotations

import contextlib
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from rope_patch import __version__
from rope_patch.checkpoints import is_adapter
from rope_patch.checkpoints.offline import skeleton
from rope_patch.evaluation.compare import Comparison, compare, under
from rope_patch.evaluation.spec import EvalSpec
from rope_patch.evaluation.suite import EvalSuite, as_suite
from rope_patch.evaluation.vllm_engine import VLLMEngine, check_options, vllm_version
from rope_patch.exporting.engines import check
from rope_patch.exporting.folders import folder_to_measure, read_tables
from rope_patch.files import is_gguf
from rope_patch.methods import MethodLike
from rope_patch.packaged import name_of
from rope_patch.patching.locate import find_rotary
from rope_patch.patching.targets import for_target
from rope_patch.patching.two_tables import switch_of
from rope_patch.processes import processes


def compare_with_vllm(
    source: str | Path,
    tokenizer: Any,
    methods: Sequence[MethodLike],
    spec: EvalSpec | EvalSuite,
    *,
    layer_types: Sequence[str] | None = None,
    freeze_at: int | None = None,
    dtype: str = "auto",
    options: Mapping[str, Any] | None = None,
    resume: str | Path | MutableMapping[str, Any] | None = None,
    on_progress: Callable[[str, int], None] = lambda method, tokens: None,
) -> Comparison:
    """Measure the retrieval of each method through vLLM; perplexity is not measured.

    No release of vLLM was run with it yet: see :mod:`rope_patch.evaluation.vllm_engine`.

    Args:
        source: folder or hub id of a checkpoint with safetensors weights, patched or not.
        tokenizer: its tokenizer.
        methods: as for :func:`rope_patch.compare`.
        spec: what is measured, with ``windows=0``, or a suite of it.
        layer_types: as for ``compare``.
        freeze_at: as for ``compare``.
        dtype: of the weights, as vLLM names it; by default that of the checkpoint.
        options: other arguments of ``vllm.LLM``, such as ``{"tensor_parallel_size": 2}``.
        resume: as for ``compare``; results of another version, option or checkpoint are not taken.
        on_progress: as for ``compare``.

    Raises:
        ImportError: no vLLM.
        ValueError: what vLLM cannot be asked for: before anything is measured.

    Example:
        ``compare_with_vllm("./llama", tokenizer, ["default", "yarn"], EvalSpec(lengths=[16384], windows=0))``
    """
    version, options = vllm_version(), dict(options or {})
    check_options(options)
    check_source_for_vllm(source)
    suite = as_suite(spec, tokenizer)
    asked = suite.spec
    if suite.windows or asked.longppl or asked.chunk is not None:
        raise ValueError("vLLM answers prompts alone: give a spec with windows=0, and without longppl and chunk")
    if processes()[1] > 1:
        raise ValueError("vLLM starts processes of its own: run one process, without torchrun")
    model = skeleton(source)
    patch: dict[str, Any] = {"layer_types": layer_types, "freeze_at": freeze_at}
    for method in () if isinstance(methods, str) else methods:  # a text is refused below
        chosen = for_target(model, method, asked.longest, **patch)
        with under(model, chosen, find_rotary(model).record is not None, patch):
            if switch_of(model) is not None:
                raise ValueError(f"{chosen} has two tables, and vLLM serves one: compare its two methods by themselves")
            check("vllm", str(model.config.model_type), read_tables(model, asked.longest))

    @contextlib.contextmanager
    def opened(patched: Any) -> Iterator[VLLMEngine]:
        with tempfile.TemporaryDirectory(prefix="rope-patch-vllm-") as place:
            folder = Path(place) / name_of(str(source))
            folder_to_measure(patched, source, folder, to="vllm", longest=asked.longest)
            with VLLMEngine(folder, asked.longest, dtype, **options) as engine:
                yield engine

    comparison = compare(
        model, tokenizer, methods, suite, **patch, opened=opened, resume=resume, on_progress=on_progress
    )
    environment = {
        "rope_patch": __version__,
        "engine": f"vLLM {version}",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": str(model.config.dtype).removeprefix("torch.") if dtype == "auto" else dtype,
        **{name: str(value) for name, value in options.items()},
    }
    before = {name: value for name, value in comparison.environment.items() if name == "patch before"}
    return replace(comparison, model=f"{type(model).__name__} {name_of(str(source))}", environment=environment | before)


def check_source_for_vllm(source: str | Path) -> None:
    """Raise for a checkpoint that is not measured through vLLM.

    Raises:
        ValueError: an adapter or a GGUF file, and what to do.
    """
    if is_adapter(source):
        raise ValueError(f"{source} is an adapter: merge it first, rope-patch export {source} --to hf -o FOLDER")
    if is_gguf(source):
        raise ValueError(f"{source} is a GGUF file: make a folder of it first, rope-patch apply {source} default")
