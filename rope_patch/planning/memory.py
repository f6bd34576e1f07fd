"""Predicts the memory that a training step takes on one GPU, part by part.

Letters in formulas: N tokens on the GPU, h hidden, f ffn, q = heads x head_dim, k = KV heads x head_dim, V
vocabulary, e bytes per entry of the dtype (2 or 4). Four things are left out, each far below 1 %: rotary tables, token
ids, biases of adapters, and the float32 per token that a norm keeps beside its input. Adapters are float32 with their
products under autocast, as PEFT and Trainer's ``bf16=True`` have them, and without dropout.
"""

from __future__ import annotations

from rope_patch.modeling.read_at_once import SLIDING_CHUNK, scored_at_once
from rope_patch.options.plan import ALL_LINEAR, StepOptions
from rope_patch.planning.shapes import Layer, Linear, Shape

LOSS_TILE = (4096, 32768)
"""Size of a tile of logits in TRL's loss [tokens, entries of the vocabulary]."""

OVERHEAD_BYTES = 2 * 2**30
"""An allowance for the CUDA context, library workspaces and memory that the allocator cannot use [bytes]; it is not
derived."""


def training_memory(shape: Shape, options: StepOptions) -> dict[str, int]:
    """Return the parts of one GPU's peak memory in training [bytes].

    Weights, gradients and states are divided by the number of GPUs (ZeRO stage 3, Rajbhandari et al. 2020,
    arXiv:1910.02054, section 5.3); the layers that FSDP gathers are added.

    *Source* of the optimizer's states: AdamW as in mixed-precision training (ZeRO, section 3.1): two float32 moments,
    and a float32 master of 16-bit weights. 8-bit Adam (Dettmers et al. 2022, arXiv:2110.02861, section 2): two one-byte
    moments, a float32 scale each per 256 entries (our reading of bitsandbytes), no master. SGD has no momentum here.
    """
    activations = shape.total(lambda layer: _saved_for_backward(layer, options))
    working = max(_working_memory(layer, options) for layer in shape.kinds)
    if options.checkpointing:
        # Checkpointing keeps the inputs of layers, computes a layer again in the backward pass, and then keeps for one
        # layer what it saved for all.
        activations = shape.total(lambda layer: layer.hidden) * options.element * options.tokens_per_gpu
        working += max(_saved_for_backward(layer, options) for layer in shape.kinds)
    adapters = adapter_entries(shape, options)
    trained = adapters or shape.parameters
    entry = 4 if adapters else options.element
    states = {"adamw": 8, "adamw_8bit": 2 + 2 * 4 / 256, "sgd": 0}[options.optimizer]
    if options.optimizer == "adamw" and entry != 4:
        states += 4  # a float32 master of the 16-bit weights
    return {
        "weights": weight_bytes(shape, options) // options.gpus,
        "adapter": 4 * adapters // options.gpus,
        "gradients": entry * trained // options.gpus,
        "optimizer": int(states * trained) // options.gpus,
        "gathered": _gathered_by_fsdp(shape, options),
        "masks": sum({layer.window: _mask_entries(layer, options) for layer in shape.kinds}.values()),
        "activations": activations,
        "layer": working,
        "loss": _loss_memory(shape, options),
        "overhead": OVERHEAD_BYTES,
    }


def reading_memory(shape: Shape, options: StepOptions) -> dict[str, int]:
    """Return the memory of reading one sequence on a GPU, without training and without an adapter [bytes].

    The weights, the KV cache, in which sliding layers hold their windows alone, and the peaks of perplexity and
    retrieval, the weights included. Models with sliding windows are read in chunks, others in one pass.
    """
    length = options.length
    element = options.element
    weights = weight_bytes(shape, options)
    chunk = length
    windows = [layer.window for layer in shape.kinds if layer.window]
    if windows:
        chunk = min(length, max(SLIDING_CHUNK, *windows))
    cache = _cached(shape, options, chunk)
    # Of a forward pass: the embeddings, and of the widest layer the input, the residual stream, and the input and three
    # tensors of the MLP.
    read = element * chunk * max(4 * layer.hidden + 3 * layer.ffn for layer in shape.kinds)
    scored = min(scored_at_once(chunk, "cuda"), length) * shape.vocab * (element + 8)
    scored = max(read, scored) + cache * (chunk < length)
    return {
        "weights": weights,
        "KV cache": _cached(shape, options, 0),
        "perplexity": weights + scored,
        "retrieval": weights + cache + read,
    }


def _cached(shape: Shape, options: StepOptions, chunk: int) -> int:
    """Return the size of keys and values whose sliding layers hold a chunk beside their window [bytes]."""
    length = options.length
    entries = shape.total(lambda layer: layer.key * min(length, (layer.window or length) + chunk))
    return 2 * entries * options.element


def trained_linears(layer: Layer, options: StepOptions) -> tuple[Linear, ...]:
    """Return the projections of a layer that are trained or get an adapter."""
    if options.lora_rank is None:
        return layer.linears
    targets = set(options.target_modules)
    return tuple(x for x in layer.linears if targets & {ALL_LINEAR, x.name, x.place.removesuffix("_out")})


def adapter_entries(shape: Shape, options: StepOptions) -> int:
    """Return the number of float32 entries that LoRA adds.

    *Source*: LoRA (Hu et al. 2021, arXiv:2106.09685, section 4.1): r (inputs + outputs) per projection.
    """
    rank = options.lora_rank or 0
    return rank * shape.total(lambda layer: sum(x.inputs + x.outputs for x in trained_linears(layer, options)))


def weight_bytes(shape: Shape, options: StepOptions) -> int:
    """Return the size of all weights as they are stored [bytes]; only projections of layers are quantized.

    *Source*: bitsandbytes. LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339): one byte each and a float32 per output
    row. NF4 (QLoRA, arXiv:2305.14314, section 3): half a byte each and per 64 of them a constant of one byte, itself
    scaled in float32 per 256: 0.127 bits per weight for both.
    """
    projections = shape.total(lambda layer: layer.matmul_weights)
    stored = {
        "none": projections * options.element,
        "8bit": projections + 4 * shape.total(lambda layer: sum(x.outputs for x in layer.linears)),
        "nf4": int(projections * (1 / 2 + 1 / 64 + 4 / (64 * 256))),
    }
    return stored[options.quantization] + (shape.parameters - projections) * options.element


def _gathered_by_fsdp(shape: Shape, options: StepOptions) -> int:
    """Return the size of what FSDP holds whole [bytes]: this layer, the next one, and the root (embeddings, head)."""
    if options.gpus == 1:
        return 0
    root = shape.outside_layers * options.element
    # A trained weight has a gradient of its own size, which is whole until it is divided among the GPUs.
    copies = 2 if options.lora_rank else 3
    return root + copies * (weight_bytes(shape, options) - root) // shape.total(lambda layer: 1)


def _mask_entries(layer: Layer, options: StepOptions) -> int:
    """Return the size of sdpa's mask, of booleans [bytes]; layers with the same window share it.

    torch's kernels have a flag for causal attention, but not for a window, nor for documents apart.
    """
    if options.attention == "flash":
        return 0
    if options.boundaries == "apart":  # each row has a mask of its own
        return options.tokens_per_gpu * options.length
    if layer.window is None or layer.window >= options.length:
        return 0
    return options.tokens_per_gpu // options.batch * options.length


def _saved_for_backward(layer: Layer, options: StepOptions) -> int:
    r"""Return the size of what one layer saves for its backward pass [bytes].

    *Source*: the counting of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1, equation 1:
    :math:`sbh(34 + 5as/h)`), repeated for the operations that transformers runs. We differ: no dropout; grouped KV
    heads; norms compute in float32, and a trained one keeps what it multiplies by its weight (in float32 for Gemma,
    whose count is taken for all); a gated MLP keeps three tensors as wide as f; inputs of projections are saved only
    where the weight or an adapter is trained, and 16-bit ones once per adapter where each casts its own copy; flash
    attention (Dao et al. 2022, arXiv:2205.14135, section 3.1) keeps q, k, v, its output and one float32 per head and
    token in place of the scores.
    """
    trained = trained_linears(layer, options)
    if _casts(options):
        inputs = sum(x.inputs for x in trained)
    else:
        # Projections at the same place read the same input, which is saved once. That of the last projection of the
        # attention is the attention's output, which is counted below.
        inputs = sum({x.place: x.inputs for x in trained if x.place != "attention_out"}.values())
    # With a mask, keys and values are repeated for every head, and the mask is kept once more as numbers to add.
    mask = _mask_entries(layer, options)
    keys = layer.query if mask else layer.key
    ranks = (options.lora_rank or 0) * len(trained)
    features = 2 * (layer.query + keys) + 3 * layer.ffn + inputs + ranks
    norms = 4 * layer.norms
    if options.lora_rank is None:
        norms *= 2
    return options.tokens_per_gpu * (norms + 4 * layer.heads + features * options.element) + mask * options.element


def _working_memory(layer: Layer, options: StepOptions) -> int:
    """Return the size of what lives beside the saved tensors at the busiest moment of a layer [bytes].

    *Source*: our own reading of the order in which autograd frees, checked by counting live tensors. With adapters on
    16-bit weights it is when that on the last projection of the MLP makes a float32 copy of its input, (2 + 4) f bytes
    beside five tensors as wide as h. Without, it is the backward pass of the gated product: three gradients as wide as
    f, less the saved input of the last projection, which is gone. A frozen quantized projection is unpacked to be
    multiplied.
    """
    features = 3 * layer.ffn + 2 * layer.hidden
    if layer.linears[-1] in trained_linears(layer, options):
        if _casts(options):
            features += 3 * layer.hidden
        else:
            features -= layer.ffn
    unpacked = 0
    if options.quantization != "none":
        unpacked = max(x.inputs * x.outputs for x in layer.linears)
    return (options.tokens_per_gpu * features + unpacked) * options.element


def _casts(options: StepOptions) -> bool:
    """Return whether each adapter makes its own copy of a 16-bit input; on bitsandbytes' weights PEFT makes none."""
    return options.lora_rank is not None and options.element < 4 and options.quantization == "none"


def _loss_memory(shape: Shape, options: StepOptions) -> int:
    """Return the size of what lives at the loss, from the last layer's output on [bytes].

    *Source*: the head of TRL 1.16 (``ChunkedLogProbFunction``): logits are made in tiles of at most 4096 tokens x 32768
    entries, in the model's type, and the gradient of the states is summed in float32. Beside them there are
    the last norm's float32 input, its input and output, and two gradients in the model's type.
    """
    # A small vocabulary has a tile of the whole size, too.
    tile = min(LOSS_TILE[0], options.tokens_per_gpu) * LOSS_TILE[1] * options.element
    return tile + options.tokens_per_gpu * shape.hidden * (4 + 4 + 4 * options.element)
