"""The sections of a recipe's options: model, patch, LoRA, data, training and evaluation, with their defaults.

:class:`~rope_patch.training.recipe.RecipeOptions` joins and checks them, and :func:`~rope_patch.training.reading.read`
reads them from YAML files and ``key=value`` overrides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from omegaconf import MISSING

from rope_patch.training.data import Boundaries

Precision = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True)
class ModelOptions:
    """The checkpoint.

    Attributes:
        name: a folder, a hub id, or a bundled checkpoint (``llama``, ``gemma3``). Required.
        revision: branch, tag or commit of a hub id.
        dtype: of the weights that are not quantized.
        attention: the attention kernel.
        quantization: of the frozen weights, by bitsandbytes: NF4 with double quantization (QLoRA), or LLM.int8.
        trust_remote_code: run code that comes with the checkpoint.
    """

    name: str = MISSING
    revision: str | None = None
    dtype: Precision = "bfloat16"
    attention: Literal["sdpa", "flash", "eager"] = "sdpa"
    quantization: Literal["none", "8bit", "nf4"] = "none"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class PatchOptions:
    """The rotary patch; arguments of :func:`rope_patch.apply`.

    Attributes:
        method: a method string (chains too). Without one the checkpoint keeps its own patch or, where it has none, its
            original table, which is warned about.
        target_length: context that the model is patched for; by default the length of the longest row [tokens].
        layer_types: the layer types whose tables are patched, on models with several.
        freeze_at: context length at which a table that changes with the input's length is frozen [tokens].
        replace: replace an earlier patch.
    """

    method: str | None = None
    target_length: str | int | None = None
    layer_types: list[str] | None = None
    freeze_at: int | None = None
    replace: bool = False


@dataclass(frozen=True)
class LoraOptions:
    """Which weights are trained.

    Attributes:
        rank: of the adapters; 0 trains every weight and adds no adapter.
        alpha: LoRA's alpha, the scale of the adapters times their rank; twice the rank by default.
        dropout: on the input of the adapters.
        target_modules: ``all-linear`` (attention and MLP), ``attention``, or names of projections.
        long_lora: train embeddings and norms too, and save them with the adapter (LongLoRA, arXiv:2309.12307).
    """

    rank: int = 16
    alpha: int | None = None
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"
    long_lora: bool = False


@dataclass(frozen=True)
class DataOptions:
    """The documents, and the rows of tokens that they are packed into.

    Attributes:
        source: ``builtin`` (text that ships with CPython), a file, a folder, or the hub id of a dataset.
        config: of a hub dataset.
        split: of a hub dataset.
        streaming: read a dataset while it is downloaded.
        column: that holds the text; a column of message lists is rendered with the chat template.
        learn: which tokens of a conversation count in the loss: ``all``, or those of the ``assistant``.
        shuffle: shuffle the documents, by ``train.seed``.
        lengths: of the rows [tokens], such as ``32k``. Required. A schedule gives shares of the steps:
            ``"4k:0.25 16k:0.25 32k"``; each step has as many tokens as one at the longest length.
        boundaries: between documents. ``join``: documents see those before them in their row; ``apart``: they do not;
            ``whole``: each row holds one document, or a piece of one.
        allow_short: train although no document is as long as a row.
        positions: ``full`` counts from 0; ``pose`` gives short rows positions up to ``patch.target_length``.
        chunks: pieces of a row under ``pose``.
        retrieval: share of the rows that are retrieval prompts over training text.
        task: of these prompts.
        answer_weight: weight of an answer's tokens in the loss of these prompts; other tokens have weight 1.
    """

    source: str = "builtin"
    config: str | None = None
    split: str = "train"
    streaming: bool = False
    column: str = "text"
    learn: Literal["all", "assistant"] = "all"
    shuffle: bool = True
    lengths: str | int = MISSING
    boundaries: Boundaries = "join"
    allow_short: bool = False
    positions: Literal["full", "pose"] = "full"
    chunks: int = 2
    retrieval: float = 0.0
    task: str = "passkey"
    answer_weight: float = 5.0


@dataclass(frozen=True)
class TrainOptions:
    """The optimizer and its steps.

    Attributes:
        steps: of the optimizer.
        batch: rows of the longest length per forward pass and device.
        accumulate: forward passes per step.
        learning_rate: the highest value that the scheduler reaches.
        scheduler: a name that transformers knows, such as ``cosine``.
        warmup: number of warm-up steps, or a share of all steps if below 1.
        optimizer: AdamW or SGD; ``adamw_8bit`` and ``paged_adamw_8bit`` are those of bitsandbytes.
        weight_decay: of AdamW.
        max_grad_norm: gradients are clipped to this norm.
        precision: of the arithmetic (autocast); ``float32`` turns autocast off.
        checkpointing: compute each layer again in the backward pass: less memory, a third more time.
        liger: use Liger's kernels for norms and MLPs; needs a GPU and the extra ``gpu``. The loss is ours either way.
        seed: of adapters, order, positions and prompts.
        save_every: steps between checkpoints; by default ``evaluation.every``, or a fifth of all steps.
        keep: number of checkpoints that are not deleted, the best one among them.
        log_every: steps between lines of the log.
    """

    steps: int = 500
    batch: int = 1
    accumulate: int = 8
    learning_rate: float = 2e-4
    scheduler: str = "constant_with_warmup"
    warmup: float = 20
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "sgd"] = "adamw"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    precision: Precision = "bfloat16"
    checkpointing: bool = True
    liger: bool = False
    seed: int = 0
    save_every: int | None = None
    keep: int = 2
    log_every: int = 5


@dataclass(frozen=True)
class EvaluationOptions:
    """How the model is evaluated: perplexity by position and retrieval, during training and at the end.

    Attributes:
        every: steps between evaluations. The checkpoint with the best retrieval (then perplexity) is what is saved at
            the end. 0 evaluates at the end only.
        before: evaluate the patched model before training too.
        lengths: of the prompts; perplexity is measured at the positions between them. By default the target length.
        depths: of the needles.
        samples: haystacks per length; each is asked at every depth.
        windows: of text, as long as the longest length; 0 leaves perplexity out.
        text: file or folder for perplexity; by default held-out text that ships with CPython.
        haystack: ``noise``, ``builtin``, a file or folder.
        chat_template: ``on``, ``off``, or ``auto``: prompts go through the tokenizer's chat template where it has one.
        longppl: measure LongPPL too, over the tokens that the model without patch and adapter predicts well only with
            a long context. They are chosen before the first evaluation, which takes several times as long as one.
        task: retrieval task.
        mode: ``single`` (one needle per prompt) or ``multikey``, which reads less text for as many questions.
        chunk: tokens per forward pass; bounds memory.
        patience: stop after this many evaluations without an improvement; 0 never stops.
        seed: of keys and haystacks; no prompt of training is among them.
    """

    every: int = 0
    before: bool = True
    lengths: str | None = None
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    samples: int = 4
    windows: int = 8
    text: str | None = None
    haystack: str = "noise"
    chat_template: str = "auto"
    longppl: bool = False
    task: str = "passkey"
    mode: Literal["single", "multikey"] = "single"
    chunk: int | None = None
    patience: int = 0
    seed: int = 0
