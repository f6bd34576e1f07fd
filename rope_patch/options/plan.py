"""The options of ``rope-patch plan``."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from typing import Any

from rope_patch.options import shared
from rope_patch.options.fields import OptionSet, contained, flag, number, tokens, whole, word
from rope_patch.options.shared import CommandOptions

ALL_LINEAR = "all-linear"
BYTES_PER_ELEMENT = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Size of one weight or activation in each data type [bytes]."""


@dataclass(frozen=True, kw_only=True)
class StepOptions(OptionSet):
    """All options that the memory of a training step depends on, beside the shape of the model."""

    length: int = tokens("The length of the training sequences.")
    batch: int = whole("Sequences per step on each GPU, or on each group that shares a sequence.", 1, least=1)
    lora_rank: int | None = whole("The rank of the LoRA adapters.", 16, metavar="RANK", least=1, optional=True)
    target_modules: tuple[str, ...] = word(
        "The projections that get an adapter: all-linear (attention and MLP), attention, or names.",
        (ALL_LINEAR,),
        metavar="NAMES",
        several=True,
    )
    quantization: str = word(
        "The quantization of the frozen weights: none, 8bit or nf4.",
        "none",
        metavar="KIND",
        choices=("none", "8bit", "nf4"),
    )
    optimizer: str = word("The optimizer: adamw, adamw_8bit or sgd.", "adamw", choices=("adamw", "adamw_8bit", "sgd"))
    checkpointing: bool = flag("Use gradient checkpointing: less memory, but the forward pass is computed twice.", True)
    attention: str = word("The attention kernel: flash or sdpa.", "flash", metavar="KERNEL", choices=("flash", "sdpa"))
    dtype: str = word(
        "The data type of training: bfloat16, float16 or float32.",
        "bfloat16",
        metavar="DTYPE",
        choices=tuple(BYTES_PER_ELEMENT),
    )
    boundaries: str = word(
        "How documents are packed into a row: join (documents attend to earlier documents) or apart (they do not; "
        "flash attention needs no mask for that, sdpa needs one of length x length).",
        "join",
        choices=("join", "apart"),
    )
    gpus: int = whole("The number of GPUs. Weights and states are divided among them (FSDP).", 1, least=1)
    context_parallel: int = whole("The number of GPUs that share one sequence (context parallelism).", 1, least=1)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.gpus % self.context_parallel:
            raise ValueError(f"context_parallel must divide gpus, got {self.context_parallel} and {self.gpus}")
        if self.lora_rank is None and self.quantization != "none":
            raise ValueError(f"quantized weights cannot be trained: {self.quantization} needs LoRA, or choose none")

    @property
    def element(self) -> int:
        """The size of one weight or activation [bytes]."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def tokens_per_gpu(self) -> int:
        """The number of tokens whose activations one GPU holds."""
        return self.batch * self.length // self.context_parallel


def _model() -> Any:
    """Return the field for a model of which only the config is read."""
    return word(
        "A checkpoint (a local folder or a Hugging Face hub id), or the name of a common model such as Llama-3.1-8B, "
        "whose shape ships with this package.",
        metavar="MODEL",
        positional=True,
    )


@dataclass(frozen=True)
class PlanOptions(OptionSet, command="plan"):
    """Estimate the GPU memory of fine-tuning at a length, and advise what to change if it does not fit.

    Only the shape of the model is read. Nothing is trained, and no weights are downloaded. ``rope-patch plan --serve``
    is about serving.

    Example: ``rope-patch plan Llama-3.1-8B --length 128k --gpu-memory 141``
    """

    model: str = _model()
    step: StepOptions = contained(StepOptions)
    full: bool = flag("Train all weights instead of LoRA adapters.")
    gpu_memory: float = shared.gpu_memory()
    as_json: bool = shared.as_json()


@dataclass(frozen=True)
class ServeOptions(CommandOptions, command="plan --serve"):
    """Say how long a text fits into a GPU that serves a model, by the format of its KV cache.

    Only the config is read, and the cache is the one that transformers makes from it: sliding layers hold their window,
    latent attention its latents, linear layers a state of fixed size. Weights and caches get 92 % of the memory, the
    default of vLLM 0.32. Activations are left out.

    Example: ``rope-patch plan Llama-3.1-8B --serve --gpu-memory 24 --formats "none vllm:fp8 llama.cpp:q4_0"``
    """

    model: str = _model()
    gpu_memory: float = shared.gpu_memory(MISSING)
    formats: tuple[str, ...] = word(
        "The cache formats, separated by spaces, as kv-check takes them; none is 16 bits.",
        ("none", "vllm:fp8"),
        metavar="FORMATS",
        several=True,
    )
    requests: int = whole(
        "The number of requests at a time. Their longest context is printed beside that of a single request.",
        8,
        least=1,
    )
    weights: float | None = number(
        "The size of the weights in GiB, if the checkpoint is quantized. By default two bytes a parameter.",
        None,
        metavar="GIB",
        above=0,
    )
