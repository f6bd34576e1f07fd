"""Predicts the memory that a training step takes on one GPU, part by part.

Letters in formulas: N tokens on the GPU, h hidden, f ffn, q = heads x head_dim, k = KV heads x head_dim, V
vocabulary, e bytes per entry of the dtype (2 or 4). Three parts are left out, each far below 1 %: rotary tables, biases
of adapters and token ids. Adapters are float32 with their products under autocast, as PEFT and Trainer's ``bf16=True``
have them, and without dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from rope_patch.modeling.logit_slices import LOGITS_AT_ONCE
from rope_patch.options.plan import ALL_LINEAR, StepOptions
from rope_patch.planning.shapes import Layer, Linear, Shape

OVERHEAD_BYTES = 2 * 2**30
"""An allowance for the CUDA context, library workspaces and memory that the allocator cannot use [bytes]; it is not
derived."""


@dataclass(frozen=True)
class Part:
    """One share of the memory. Parts with ``turns`` are never live together, so only the largest of them counts."""

    name: str
    bytes: int
    what: str
    turns: bool = False


def training_memory(shape: Shape, options: StepOptions) -> tuple[Part, ...]:
    """Return the parts of one GPU's peak memory in training.

    Weights, gradients and states are divided by the number of GPUs (ZeRO stage 3, Rajbhandari et al. 2020,
    arXiv:1910.02054, section 5.3); the layers that FSDP gathers are added.
    """
    saved = shape.total(lambda layer: _saved_for_backward(layer, options))
    work = max(_working_memory(layer, options) for layer in shape.kinds)
    inputs = shape.total(lambda layer: layer.hidden * options.element * options.tokens_per_gpu)
    if options.checkpointing:
        # Checkpointing computes a layer again in the backward pass, and then keeps for one layer what it saved for all.
        work += max(_saved_for_backward(layer, options) for layer in shape.kinds)
    adapters = adapter_entries(shape, options)
    full = shape.parameters if options.lora_rank is None else 0
    storage = (
        options.dtype
        if options.quantization == "none"
        else f"projections {options.quantization}, the rest {options.dtype}"
    )
    divided = (
        Part("weights", weight_bytes(shape, options), f"{shape.parameters / 1e9:.2f} B parameters, {storage}"),
        Part("adapter", 4 * adapters, f"{adapters / 1e6:.1f} M parameters"),
        Part("gradients", 4 * adapters + options.element * full, "of what is trained"),
        Part(
            "optimizer",
            _optimizer_state(adapters, 4, options) + _optimizer_state(full, options.element, options),
            options.optimizer,
        ),
    )
    return (
        *(Part(part.name, part.bytes // options.gpus, part.what) for part in divided),
        Part("gathered", _gathered_by_fsdp(shape, options), "two layers and the root, whole, under FSDP"),
        Part("masks", _window_mask(shape, options), "of sliding windows"),
        Part(
            "activations",
            int(inputs if options.checkpointing else saved),
            "the input of every layer" if options.checkpointing else "all that the backward pass reads",
        ),
        Part(
            "layer",
            int(work),
            "one layer computed again, its gradients" if options.checkpointing else "gradients in one layer",
            turns=True,
        ),
        Part("loss", _loss_memory(shape, options), f"slices of {LOGITS_AT_ONCE} tokens", turns=True),
        Part("overhead", OVERHEAD_BYTES, "context, workspaces, fragments: an allowance"),
    )


def kv_cache_bytes(shape: Shape, options: StepOptions) -> int:
    """Return the size of one sequence's keys and values in inference [bytes]; sliding layers hold their window only."""
    return int(
        shape.total(lambda layer: 2 * layer.key * options.element * min(options.length, layer.window or options.length))
    )


def prefill_memory(shape: Shape, options: StepOptions) -> int:
    """Return the memory beside weights and cache while one sequence is read in a single pass [bytes].

    It holds the embeddings, and of the widest layer the input, the residual stream, and the input and three tensors of
    the MLP. It also holds all keys and values of sliding layers: the window that transformers' cache keeps of them is a
    view into the whole tensor.
    """
    work = max(4 * layer.hidden + 3 * layer.ffn for layer in shape.kinds)
    whole = shape.total(lambda layer: 2 * layer.key)
    return int(options.length * options.element * (work + whole)) - kv_cache_bytes(shape, options)


def with_adapters(layer: Layer, options: StepOptions) -> tuple[Linear, ...]:
    """Return the projections of a layer that get an adapter."""
    if options.lora_rank is None:
        return ()
    names = {ALL_LINEAR: layer.linears, "attention": [x for x in layer.linears if x.place.startswith("attention")]}
    groups = [names.get(target, ()) for target in options.target_modules]
    return tuple(
        x
        for x in layer.linears
        if x.name.rpartition(".")[2] in options.target_modules or any(x in group for group in groups)
    )


def adapter_entries(shape: Shape, options: StepOptions) -> int:
    """Return the number of float32 entries that LoRA adds.

    *Source*: LoRA (Hu et al. 2021, arXiv:2106.09685, section 4.1): r (inputs + outputs) per projection.
    """
    rank = options.lora_rank or 0
    return int(shape.total(lambda layer: rank * sum(x.inputs + x.outputs for x in with_adapters(layer, options))))


def _layer_weight_bytes(layer: Layer, options: StepOptions) -> float:
    """Return the size of a layer's weights as they are stored [bytes].

    *Source*: bitsandbytes. LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339): one byte each and a float32 per output
    row. NF4 (QLoRA, arXiv:2305.14314, section 3): half a byte each and per 64 of them a constant of one byte, itself
    scaled in float32 per 256: 0.127 bits per weight for both.
    """
    rest = layer.parameters - layer.matmul_weights
    match options.quantization:
        case "8bit":
            return layer.matmul_weights + 4 * sum(x.outputs for x in layer.linears) + rest * options.element
        case "nf4":
            return layer.matmul_weights * (1 / 2 + 1 / 64 + 4 / (64 * 256)) + rest * options.element
    return layer.parameters * options.element


def _bytes_outside_layers(shape: Shape, options: StepOptions) -> float:
    """Return the size of the weights outside layers, which are never quantized [bytes]: embeddings, last norm, head."""
    return (shape.parameters - shape.total(lambda layer: layer.parameters)) * options.element


def weight_bytes(shape: Shape, options: StepOptions) -> int:
    """Return the size of all weights as they are stored [bytes]."""
    return int(shape.total(lambda layer: _layer_weight_bytes(layer, options)) + _bytes_outside_layers(shape, options))


def _optimizer_state(entries: int, element: int, options: StepOptions) -> int:
    """Return the size of what an optimizer keeps for so many trained entries [bytes].

    *Source*: AdamW as in mixed-precision training (ZeRO, section 3.1): two float32 moments, and a float32 master of
    16-bit weights. 8-bit Adam (Dettmers et al. 2022, arXiv:2110.02861, section 2): two one-byte moments, a float32
    scale each per 256 entries (our reading of bitsandbytes), no master. SGD has no momentum here.
    """
    master = 4 if element < 4 else 0
    return int(entries * {"adamw": 8 + master, "adamw_8bit": 2 + 2 * 4 / 256, "sgd": 0}[options.optimizer])


def _gathered_by_fsdp(shape: Shape, options: StepOptions) -> int:
    """Return the size of what FSDP holds whole [bytes]: this layer, the next one, and the root (embeddings, head)."""
    if options.gpus == 1:
        return 0
    layer = max(_layer_weight_bytes(layer, options) for layer in shape.kinds)
    # A trained weight has a gradient of its own size, which is whole until it is divided among the GPUs.
    gradient = 0 if options.lora_rank else max(layer.parameters for layer in shape.kinds) * options.element
    return int(2 * layer + gradient + _bytes_outside_layers(shape, options))


def _gets_mask(layer: Layer, options: StepOptions) -> bool:
    """Return whether sdpa gets a mask: torch's kernels have a flag for causal attention, but not for a window."""
    return options.attention == "sdpa" and layer.window is not None and layer.window < options.length


def _window_mask(shape: Shape, options: StepOptions) -> int:
    """Return the size of the mask of booleans that all layers with a window share [bytes]."""
    needed = any(_gets_mask(layer, options) for layer in shape.kinds)
    return int(options.tokens_per_gpu / options.batch * options.length) if needed else 0


def _saved_for_backward(layer: Layer, options: StepOptions) -> float:
    r"""Return the size of what one layer saves for its backward pass [bytes].

    *Source*: the counting of Korthikanti et al. 2022 (arXiv:2205.05198, section 4.1, equation 1:
    :math:`sbh(34 + 5as/h)`), repeated for the operations that transformers runs. We differ: no dropout; grouped KV
    heads; norms compute in float32, and a trained one keeps what it multiplies by its weight (in float32 for Gemma,
    whose count is taken for all); a gated MLP keeps three tensors as wide as f; inputs of projections are saved only
    where the weight or an adapter is trained, and 16-bit ones once per adapter, because each casts its own copy; flash
    attention (Dao et al. 2022, arXiv:2205.14135, section 3.1) keeps q, k, v, its output and one float32 per head and
    token in place of the scores.
    """
    e = options.element
    norms = sum(layer.norm_inputs) * (8 if options.lora_rank is None else 4) + 4 * len(layer.norm_inputs)
    attention: float = 2 * (layer.query + layer.key) * e + 4 * layer.heads
    if _gets_mask(layer, options):
        # Keys and values are repeated for every head, and the mask once more as numbers to add.
        attention = 4 * layer.query * e + 4 * layer.heads + options.length * e / options.batch
    return options.tokens_per_gpu * (norms + attention + 3 * layer.ffn * e + _saved_inputs(layer, options))


def _saved_inputs(layer: Layer, options: StepOptions) -> float:
    """Return the size of the saved inputs of projections [bytes per token], without the attention's output."""
    own = layer.linears if options.lora_rank is None else with_adapters(layer, options)
    ranks = (options.lora_rank or 0) * len(own) * options.element
    if options.lora_rank is not None and options.element < 4:
        return ranks + sum(x.inputs for x in own) * options.element
    # Projections at the same place read the same input, which is saved once. That of the last projection of the
    # attention is the attention's output, which `_saved` counts.
    widths = {x.place: x.inputs for x in own if x.place != "attention_out"}
    return ranks + sum(widths.values()) * options.element


def _working_memory(layer: Layer, options: StepOptions) -> float:
    """Return the size of what lives beside the saved tensors at the busiest moment of a layer [bytes].

    *Source*: our own reading of the order in which autograd frees, checked by counting live tensors. It is the largest
    of: the backward pass of the gated product (three gradients as wide as f, the saved input of the last projection
    gone); the float32 copy that an adapter on that projection makes of its input. A frozen quantized projection is
    unpacked to be multiplied.
    """
    e = options.element
    down = next(x for x in layer.linears if x.place == "mlp_out")
    adapted = down in with_adapters(layer, options)
    released = layer.ffn * e if adapted or options.lora_rank is None else 0
    gated = 3 * layer.ffn * e + 2 * layer.hidden * e - released
    casting = (layer.ffn * (e + 4) if adapted and e < 4 else 0) + 5 * layer.hidden * e
    unpacked = max(x.weight for x in layer.linears) * e if options.quantization != "none" else 0
    return options.tokens_per_gpu * max(gated, casting) + unpacked


def _loss_memory(shape: Shape, options: StepOptions) -> int:
    """Return the size of what lives at the loss, from the last layer's output on [bytes].

    *Source*: what autograd holds for ``cross_entropy(logits.float())`` of a slice of tokens: the backward pass has the
    log-probabilities, their gradient and that of the float32 logits, (4 + 4 + 4) V per token, which is more than the
    forward pass. A cap on logits keeps its tanh. Beside the slice there are all hidden states: the last norm's float32
    input, its input and output, two gradients, and the sum under way.
    """
    logits = min(LOGITS_AT_ONCE, options.tokens_per_gpu) * shape.vocab * (12 + 4 * shape.capped_logits)
    # 4 for the norm's float32 input; 5 tensors in the model's type: its input and output, two gradients, the sum.
    return int(logits + options.tokens_per_gpu * shape.hidden * (4 + 5 * options.element))
