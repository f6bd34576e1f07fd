"""Models whose rotary table is not the one that is meant: published cases, rebuilt as tiny models.

Each case is a function that builds a broken model, in memory or as a folder, and a healthy twin that differs in nothing
but the cause; its docstring says the cause and the effect. ``CASES`` holds them by name, with the threads in which the
case was published. If the fault is in another program, ``program`` names it.

The threads were read in a stored copy of GitHub's; the figures are from the threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import rope_patch
from support.patches import edit_json, module_of, saved_with
from support.tiny import DYNAMIC, LLAMA, LLAMA3, PLAIN, YARN, ids, tiny_config, tiny_model, without_base

LARGE_BASE = {"rope_type": "default", "rope_theta": 500000.0}
GARBAGE = [1.2755e22, 4.5914e-41, 1.4013e-45, 0.0, 1.121e-43, 0.0, 2.9978e27, 3.0872e-41]
"""Eight numbers that a ``torch.empty`` once held: memory differs from run to run, and may hold the right table."""


@dataclass(frozen=True)
class Pair:
    """What ``doctor`` reads of a broken model and of its healthy twin: a model or folder, or it with a tokenizer."""

    broken: Any
    healthy: Any


@dataclass(frozen=True)
class Case:
    """A published case.

    Attributes:
        threads: the threads in which it was published, ``owner/repository#number``; the first is the main one.
        build: function that writes into an empty folder and returns the pair.
        program: the program that computes another table; None if the model in transformers does.
    """

    threads: tuple[str, ...]
    build: Callable[[Path], Pair]
    program: str | None = None


CASES: dict[str, Case] = {}


def case(*threads: str, program: str | None = None) -> Callable[[Any], Any]:
    """Return a decorator that enters a function into ``CASES``; the arguments are attributes of :class:`Case`."""

    def enter(build: Callable[[Path], Pair]) -> Callable[[Path], Pair]:
        CASES[build.__name__] = Case(threads, build, program)
        return build

    return enter


def extended(family: str = "llama", **changes: Any) -> PreTrainedModel:
    """A tiny model whose context is four times that of its original table, by YaRN unless ``changes`` say otherwise."""
    return tiny_model(family, **{"rope_parameters": YARN, "max_position_embeddings": 256, **changes})


def with_buffer(model: PreTrainedModel, values: Any, name: str = "inv_freq") -> PreTrainedModel:
    """Write numbers into a buffer of a model's rotary module."""
    module_of(model)._buffers[name].copy_(torch.as_tensor(values))
    return model


# --- the table in memory is not computed, or is computed in too few bits ----------------------------------------------


class FastRotary(nn.Module):
    """A rotary class of a fork, without the ``original_inv_freq`` by which transformers 5 recognizes tables to fill."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.rope_type = "default"
        self.attention_scaling = 1.0
        exponents = torch.arange(0, 16, 2).float() / 16
        inv_freq = 1.0 / config.rope_parameters["rope_theta"] ** exponents
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, as Llama's module does."""
        angles = position_ids[..., None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class FastLlama(LlamaForCausalLM):
    """Llama with the rotary class of the fork."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.rotary_emb = FastRotary(config)


@case("unslothai/unsloth#4112")
def table_of_a_fork_is_not_filled(folder: Path) -> Pair:
    """transformers 5 builds a model without memory and fills the tables of its own classes alone: a table of another
    class stays what the memory held.

    Effect: training loss 5 to 11 times as high.
    """
    path = saved_with(tiny_model(), folder / "plain")
    torch.use_deterministic_algorithms(True)  # fresh memory then holds NaN; otherwise it may hold the right table
    try:
        broken = FastLlama.from_pretrained(path)
    finally:
        torch.use_deterministic_algorithms(False)
    return Pair(broken.eval(), FastLlama(tiny_config("llama")).eval())


@case("pytorch/torchtitan#4783", "huggingface/transformers#45902")
def table_is_what_the_memory_held(folder: Path) -> Pair:
    """``to_empty()`` gives a model that was built on the meta device fresh memory, and nothing computes the table.

    Effect: the first loss is 11.08 in place of 3.63.
    """
    weights = tiny_model().state_dict()
    with torch.device("meta"):
        broken = tiny_model()
    broken = broken.to_empty(device="cpu").eval()
    broken.load_state_dict(weights)  # strict: the table is no part of it
    for name in ("inv_freq", "original_inv_freq"):
        with_buffer(broken, GARBAGE, name)
    return Pair(broken, tiny_model())


@case("NovaSky-AI/SkyRL#1709", "hiyouga/LlamaFactory#10820")
def table_is_nan_in_the_second_process(folder: Path) -> Pair:
    """FSDP sends weights from the first process to the others, and no buffers that checkpoints do not hold.

    Effect: logits are NaN in every process but the first, and the loss from step 1 on.
    """
    return Pair(with_buffer(tiny_model(), float("nan")), tiny_model())


@case("huggingface/transformers#45649")
def table_is_zero(folder: Path) -> Pair:
    """Tables that are missing in a checkpoint are filled with zeros where memory is saved: nothing rotates.

    Effect: no figure: the thread is about the memory that this takes.
    """
    return Pair(with_buffer(tiny_model(), 0.0), tiny_model())


@case("deepspeedai/DeepSpeed#8066", "huggingface/transformers#25681", "EleutherAI/gpt-neox#1003")
def table_is_cast_with_the_weights(folder: Path) -> Pair:
    """``model.to(torch.bfloat16)`` casts the table with the weights.

    Effect: cos off by 0.78 within 2,048 positions in float16 (gpt-neox).
    """
    path = saved_with(tiny_model(), folder / "plain")
    healthy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return Pair(tiny_model().to(torch.bfloat16), healthy.eval())


@case("tenstorrent/tt-metal#54528")
def table_was_cast_and_cast_back(folder: Path) -> Pair:
    """A model is cast to bfloat16 and back: its table is float32 again, and keeps the rounded numbers.

    Effect: frequencies off by 4.4e-4, an error that grows with the position.
    """
    return Pair(tiny_model().to(torch.bfloat16).float(), tiny_model().float())


# --- the table in memory is another one than the config describes -----------------------------------------------------


@case("MakazhanAlpamys/Soup#793", "lm-sys/FastChat#2124")
def scaling_is_written_after_loading(folder: Path) -> Pair:
    """``rope_scaling`` is written into the config of a model that is built already, and never read again.

    Effect: logits equal to the last bit after the message that the context is longer.
    """
    broken = tiny_model(max_position_embeddings=256)
    broken.config.rope_parameters = dict(YARN)
    return Pair(broken, extended())


@case("MakazhanAlpamys/Soup#793", "NVIDIA-NeMo/Megatron-Bridge#3077")
def older_name_loses_the_base(folder: Path) -> Pair:
    """``rope_scaling`` is set by its older name, which in transformers 5 replaces rope_parameters and loses the base.

    Effect: rope_theta is gone: the config describes no table at all.
    """
    broken = tiny_model(max_position_embeddings=256)
    broken.config.rope_scaling = without_base(YARN)
    return Pair(broken, extended())


@case("deepspeedai/DeepSpeed#8345", "sgl-project/sglang#14745")
def older_name_sets_nothing(folder: Path) -> Pair:
    """``rope_theta`` is set by its older name, beside rope_parameters, where transformers 5 looks for the base.

    Effect: the base that was asked for reaches nothing.
    """
    broken = tiny_model()
    broken.config.rope_theta = 500000.0
    return Pair(broken, tiny_model(rope_parameters=LARGE_BASE))


class PlainRotary(LlamaRotaryEmbedding):
    """A rotary class of a fork, which computes plain RoPE with the base 10000 whatever the config says."""

    def __init__(self, config: Any) -> None:
        plain = copy.deepcopy(config)
        plain.rope_parameters = dict(PLAIN)
        super().__init__(plain)
        self.config = config


@case("sgl-project/SpecForge#265", "lyogavin/airllm#368")
def class_ignores_the_base(folder: Path) -> Pair:
    """A rotary class has the base 10000 written into it, and the config says another one.

    Effect: 1.6 % fewer tokens of the draft accepted (SpecForge); incoherent from about 1,000 tokens on (airllm).
    """
    healthy = tiny_model(rope_parameters=LARGE_BASE)
    broken = tiny_model(rope_parameters=LARGE_BASE)
    broken.model.rotary_emb = PlainRotary(broken.config)
    return Pair(broken, healthy)


@case("NVIDIA-NeMo/Automodel#2825", "Blaizzy/mlx-vlm#1710")
def class_ignores_the_scaling(folder: Path) -> Pair:
    """A rotary class does not know the rope type of the config, and falls back to another one without a word.

    Effect: cosine of right and wrong states .76 at position 8,192 (mlx-vlm).
    """
    healthy = extended(rope_parameters=LLAMA3)
    broken = extended(rope_parameters=LLAMA3)
    broken.model.rotary_emb = PlainRotary(broken.config)
    return Pair(broken, healthy)


@case("PrimeIntellect-ai/prime-rl#2802", "turboderp-org/exllamav3#259")
def attention_factor_is_lost(folder: Path) -> Pair:
    """YaRN's frequencies are right, and its attention factor is left out.

    Effect: KL of sampler and trainer .030 in place of .0015 (prime-rl); fluent answers off the prompt (exllamav3).
    """
    broken = extended()
    module_of(broken).attention_scaling = 1.0
    return Pair(broken, extended())


@case("huggingface/transformers#41922", "Comfy-Org/ComfyUI#11409")
def tables_of_the_layer_types_are_exchanged(folder: Path) -> Pair:
    """The tables of Gemma's sliding and full attention are exchanged.

    Effect: the converter of transformers itself wrote such configs.
    """
    broken = tiny_model("gemma3")
    buffers = module_of(broken)._buffers
    for name in ("inv_freq", "original_inv_freq"):
        full = f"full_attention_{name}"
        sliding = f"sliding_attention_{name}"
        buffers[full], buffers[sliding] = buffers[sliding], buffers[full]
    return Pair(broken, tiny_model("gemma3"))


@case("Blaizzy/mlx-vlm#1709", "sgl-project/sglang#21537", "lablup/mlxcel#1340")
def linear_factor_of_full_attention_is_dropped(folder: Path) -> Pair:
    """The linear factor 8 of Gemma 3's full attention is read and not used.

    Effect: another first token at 2,916 tokens (mlx-vlm); accuracy 54 % in place of 72 % (SGLang).
    """
    rope_parameters = {
        "sliding_attention": PLAIN,
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    }
    broken, healthy = (tiny_model("gemma3", rope_parameters=rope_parameters) for _ in range(2))
    buffer = module_of(broken)._buffers["full_attention_inv_freq"]
    return Pair(with_buffer(broken, buffer * 8, "full_attention_inv_freq"), healthy)


class PrefixPaired(Gemma4TextRotaryEmbedding):
    """p-RoPE whose rotated pairs are together at the start of a head, as if the head ended after them."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str) -> Any:
        """Return cos and sin: feature i of a head turns with i + rotated / 2 in place of i + head_dim / 2."""
        cos, sin = super().forward(x, position_ids, layer_type)
        inv_freq = getattr(self, f"{layer_type}_inv_freq")
        rotated = int((inv_freq != 0).sum())
        pairs = len(inv_freq)
        order = [*range(rotated), *range(rotated), *range(rotated, pairs), *range(rotated, pairs)]
        return cos[..., order], sin[..., order]


@case("NVIDIA-NeMo/Megatron-Bridge#4195", "NVIDIA-NeMo/Megatron-Bridge#4916", "apple/coreai-models#66")
def rotated_pairs_are_paired_within_their_prefix(folder: Path) -> Pair:
    """The frequencies of Gemma 4's p-RoPE are right, and each is given to another pair of features.

    Effect: 11.6 % difference of the first global layer in place of 1.55 %.
    """
    broken = tiny_model("gemma4")
    module_of(broken).__class__ = PrefixPaired
    return Pair(broken, tiny_model("gemma4"))


@case("huggingface/transformers#27226", "huggingface/transformers#25104")
def dynamic_table_keeps_the_longest_text(folder: Path) -> Pair:
    """A dynamic table keeps what the longest text made of it, and the next text is read under that.

    Effect: the same text gives other logits after a longer one.
    """
    broken = tiny_model(rope_parameters=DYNAMIC)
    with torch.no_grad():
        broken(ids(200, batch=1))
    frozen = tiny_model(rope_parameters=DYNAMIC)
    rope_patch.apply(frozen, "default", freeze_at=200)
    return Pair(broken, frozen)


# --- the context ------------------------------------------------------------------------------------------------------


@case("modelscope/ms-swift#1591", "h2oai/h2ogpt#524")
def tokenizer_cuts_at_the_old_context(folder: Path) -> Pair:
    """The context of a model was extended, and its tokenizer cuts texts at the old length.

    Effect: 26,333 tokens of a text against a stated 8,192.
    """
    return Pair(cutting(64), cutting(256))


def cutting(length: int) -> tuple[PreTrainedModel, Any]:
    """A model of 256 tokens, and a tokenizer that cuts texts at a length."""
    tokenizer = AutoTokenizer.from_pretrained(LLAMA, model_max_length=length)
    return extended(vocab_size=len(tokenizer)), tokenizer


@case("modelscope/ms-swift#1591", "h2oai/h2ogpt#524")
def saved_tokenizer_cuts_at_the_old_context(folder: Path) -> Pair:
    """The same in a saved folder.

    Effect: 26,333 tokens of a text against a stated 8,192.
    """
    pair = []
    for length in (64, 256):
        model, tokenizer = cutting(length)
        path = saved_with(model, folder / str(length))
        tokenizer.save_pretrained(path)
        pair.append(path)
    return Pair(*pair)


# --- folders ----------------------------------------------------------------------------------------------------------


@case("swiss-ai/Megatron-LM#137")
def converter_drops_the_scaling(folder: Path) -> Pair:
    """A converter that writes a checkpoint anew leaves out the scaling with which it was trained.

    Effect: the scaling does not survive the way from Hugging Face and back.
    """
    broken = tiny_model()
    healthy = tiny_model()
    for model, name in ((broken, "broken"), (healthy, "healthy")):
        rope_patch.apply(model, "yarn", target_length=256)
        rope_patch.save(model, folder / name)
    edit_json(folder / "broken" / "config.json", lambda data: data.update(rope_parameters=PLAIN, rope_scaling=None))
    return Pair(folder / "broken", folder / "healthy")


@case("vllm-project/vllm#44158", "vllm-project/vllm#42624", program="transformers-4")
def base_is_stated_twice(folder: Path) -> Pair:
    """``config.json`` states the base twice, and the two differ: one program reads one, another the other.

    Effect: base 10000 in place of 500000, without a warning.
    """
    model = tiny_model(rope_parameters=LARGE_BASE)
    broken = saved_with(model, folder / "broken", rope_theta=10000.0)
    return Pair(broken, saved_with(model, folder / "healthy", rope_theta=500000.0))


# --- folders that another program reads otherwise ---------------------------------------------------------------------

_LLAMA3_LARGE = {**LLAMA3, "rope_theta": 500000.0}


@case("Open-Athena/MarinFold#184", "marin-community/marin#7801", program="transformers-4")
def folder_of_transformers_5(folder: Path) -> Pair:
    """transformers 5 writes rope_parameters, which transformers 4 does not read: it takes base 10000, unscaled.

    Effect: loss 3.179 in place of 2.414 nats a token.
    """
    model = extended(rope_parameters=_LLAMA3_LARGE)
    broken = saved_with(model, folder / "broken")
    both = {"rope_theta": 500000.0, "rope_scaling": without_base(_LLAMA3_LARGE)}
    return Pair(broken, saved_with(model, folder / "healthy", **both))


@case("vllm-project/vllm#48351", "ml-explore/mlx-lm#1507", program="sglang")
def stated_attention_factor_is_ignored(folder: Path) -> Pair:
    """A program computes YaRN's attention factor itself, and does not read the one that the config states.

    Effect: cos and sin times 1.416 in place of 1.0 (vLLM before its pull request 56446).
    """
    broken = extended(rope_parameters={**YARN, "attention_factor": 1.0})
    return Pair(saved_with(broken, folder / "broken"), saved_with(extended(), folder / "healthy"))


@case("vllm-project/vllm#43419", program="transformers-4")
def scaling_of_sliding_layers_is_dropped(folder: Path) -> Pair:
    """A program scales OLMo 3's full attention alone, and the config scales the sliding layers, too.

    Effect: mean error of the logarithm of probabilities .0032 in place of .00005.
    """
    pair = []
    for scaled in (True, False):
        full = {**YARN, "rope_theta": 500000.0}
        sliding = full if scaled else LARGE_BASE
        rope_parameters = {"full_attention": full, "sliding_attention": sliding}
        model = tiny_model("olmo3", max_position_embeddings=256, rope_parameters=rope_parameters)
        pair.append(saved_with(model, folder / str(scaled)))
        if not scaled:
            older = {"rope_theta": 500000.0, "rope_scaling": without_base(full), "rope_parameters": None}
            saved_with(model, pair[-1], **older)
    return Pair(*pair)


@case("jundot/omlx#3347", "Blaizzy/mlx-vlm#1710", program="mlx")
def yarn_is_ignored(folder: Path) -> Pair:
    """An MLX program builds plain RoPE for a family, and reads nothing of YaRN in its config.

    Effect: relative distances up to four times as long as trained beyond 262,144 tokens.
    """
    # Windows that limit nothing: MLX knows none on Gemma 2, which is no fault of the table.
    broken = extended("gemma2", sliding_window=4096)
    broken_folder = saved_with(broken, folder / "broken", rope_theta=10000.0, rope_scaling=YARN)
    return Pair(broken_folder, saved_with(tiny_model("gemma2", sliding_window=4096), folder / "healthy"))
