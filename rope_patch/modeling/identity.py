"""By what a model is known when its finished work is found again: what it is made of, and what it answers.

A digest covers what can be compared bit by bit: weights, rotary tables, config, adapters and the versions of the code.
What else changes a result (a hook, a replaced ``forward``, an attribute of a layer, a patched library) shows in the
logits of a short fixed text. Bits of logits differ between machines, so logits are compared with a tolerance.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from rope_patch.modeling.inputs import tensor_hash
from rope_patch.modeling.reader import CacheFactory, Reader, fixed_ids
from rope_patch.modeling.temporary_modes import in_eval_mode
from rope_patch.patching.rotary import PatchedRotary
from rope_patch.runtime import progress
from rope_patch.runtime.result_cache import key

UNHASHED_KEYS = ("transformers_version", "_name_or_path", "architectures", "dtype")
"""Keys of a config that say who wrote it and where it is: a folder that is moved holds the same model.

``save_pretrained`` writes the last two into the config of the model that it saves; the digests cover both elsewhere.
"""

FIXED_TOKENS = 64
"""Number of fixed tokens whose logits are compared, and of those that are read beyond a window [tokens]."""
SKETCH_SUMS = 32
"""Number of sums by which the logits of a token are kept."""
TOLERANCE_32, TOLERANCE_16 = 1e-3, 3e-2
"""Difference of logits, in units of their standard deviation, that counts as equal: of models that compute in 32 and in
16 bits. Other instructions of a processor change those of SmolLM2-135M by 3e-6 and by .029; without the MLP of one of
its 30 layers they change by .23 or more."""


def model_hash(model: nn.Module, weights: str | None = None) -> str:
    """Return a digest of a model, its patch and the versions of the code.

    Args:
        model: a model of transformers.
        weights: the digest of its weights, if it is known: to compute it takes the most time.
    """
    return key(weights=weights or weights_digest(model), state=state_digest(model))


def weights_digest(model: nn.Module) -> str:
    """Return a digest of all that a model would save, every bit of it: parameters, buffers and scales of quantization.

    A few values of each tensor would not show that some rows of an embedding were trained.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        owned = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for part, tensor in owned:
            if part not in module._non_persistent_buffers_set:
                tensors = _at_hand(module, part, tensor), *_quantized_by(module, tensor)
                digest.update(_described(f"{name}.{part}", *tensors))
    return digest.hexdigest()


def state_digest(model: nn.Module) -> str:
    """Return a digest of the rest that can be compared exactly: tables, config, adapters in use, versions of the code.

    It costs no reading of weights, so it is computed anew under each patch.
    """
    digest = hashlib.sha256()
    root: Any = model.config
    text = root.get_text_config()
    config = {name: value for name, value in text.to_dict().items() if name not in UNHASHED_KEYS}
    attention = getattr(text, "_attn_implementation", None)
    digest.update(json.dumps([config, attention, _versions()], sort_keys=True, default=str).encode())
    for name, module in model.named_modules():
        state = [value for attribute, value in vars(module).items() if attribute.endswith("attention_scaling")]
        if isinstance(module, PatchedRotary):
            state += [table.fingerprint for table in module.tables.values()]
        # A layer of PEFT; a model of transformers has methods of these names.
        if isinstance(getattr(module, "disable_adapters", None), bool):
            state += [module.disable_adapters, module.active_adapters, module.merged_adapters]
            state.append(getattr(module, "scaling", None))
        if state:
            digest.update(f"{name}{state}".encode())
        for part, tensor in module.named_buffers(recurse=False):
            if part in module._non_persistent_buffers_set:
                digest.update(_described(f"{name}.{part}", _at_hand(module, part, tensor)))
    return digest.hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    """Return the versions of the libraries that compute results, and a digest of this package's own sources.

    The version of this package stands still in a clone of its repository, while its code changes.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return transformers.__version__, torch.__version__, digest.hexdigest()


def _quantized_by(module: nn.Module, tensor: Tensor) -> list[Tensor]:
    """Return the scales with which bitsandbytes quantized a weight.

    They are attributes of the weight; those of 8-bit weights move to the layer in its first forward pass. The library's
    own state_dict is not asked: it repacks 4-bit weights for CPUs in place, and cannot do so rightly (0.50.2).
    """
    state = getattr(tensor, "quant_state", None)
    scales = getattr(tensor, "SCB", None)
    if scales is None and hasattr(tensor, "CB"):
        scales = getattr(getattr(module, "state", None), "SCB", None)
    inner = getattr(state, "state2", None)  # double quantization: the scales are quantized themselves
    parts = [getattr(part, name, None) for part in (state, inner) for name in ("absmax", "offset", "code")]
    return [values for values in (scales, *parts) if values is not None]


def _at_hand(module: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of a module with all of its values: gathered if it is sharded, read if it is offloaded."""
    offloaded = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
    if tensor.is_meta:
        return tensor if offloaded is None else offloaded[name]
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def _described(name: str, tensor: Tensor, *scales: Tensor) -> bytes:
    digests = [bits_digest(values) for values in (tensor, *scales)]
    return f"{name}{tuple(tensor.shape)}{tensor.dtype}{digests}".encode()


def bits_digest(tensor: Tensor) -> Any:
    """Return the SHA-256 of all bits of a tensor; of a quantized tensor those of its parts, and None without values."""
    if hasattr(tensor, "__tensor_flatten__"):  # a quantized tensor, which holds others
        return [bits_digest(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]]
    if tensor.is_meta:
        return None
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    # As bytes, since numpy has no bfloat16.
    return tensor_hash(dense.contiguous().reshape(-1).view(torch.uint8))


@torch.no_grad()
def fixed_logits(
    model: nn.Module, longest: int, cache: CacheFactory | None = None
) -> tuple[dict[str, list[list[float]]], float]:
    """Return what a model answers to fixed tokens, and the difference below which two such answers are equal.

    A layer with a window acts by the distance of tokens. So a text beyond the longest window is read, too, unless
    windows are longer than all that is measured.

    Args:
        model: a causal language model of transformers.
        longest: the longest text of the measurements [tokens].
        cache: factory of the caches that they read through, if it is not the usual one.

    Returns:
        Sums of the logits of the last :data:`FIXED_TOKENS` tokens by the length of the text, JSON values; and the
        tolerance, which depends on the data type in which the model computes.
    """
    reader = Reader(model)
    lengths = [FIXED_TOKENS]
    windows = [getattr(module, "sliding_window", None) for module in model.modules()]
    acting = [size for size in (*windows, reader.sliding_window) if isinstance(size, int) and size < longest]
    if acting:
        lengths.append(min(longest, max(acting) + FIXED_TOKENS))
    sums = {}
    tolerance = TOLERANCE_32
    with in_eval_mode(model), progress.work(0):
        for length in lengths:
            ids = fixed_ids(length, reader.vocabulary)
            chunk = reader.chunk(length)
            past = None
            if chunk < length:
                past = reader.new_cache(length) if cache is None else cache()
            hidden = reader.states(ids, past, chunk)[0, -FIXED_TOKENS:]
            if torch.finfo(hidden.dtype).bits < 32:
                tolerance = TOLERANCE_16
            sums[str(length)] = _sketch(reader.logits(hidden))
    return sums, tolerance


def _sketch(logits: Tensor) -> list[list[float]]:
    """Return a few sums of each token's logits with random signs, which change as much as the logits do.

    *Source*: Charikar et al. 2002, *Finding frequent items in data streams*: a sum for each group of entries.
    """
    # What is masked (-inf, the least float) would hide all other numbers.
    known = torch.where(logits.abs() < 1e6, logits, 0.0)
    signs = torch.randint(2, known.shape[-1:], generator=torch.Generator().manual_seed(0)) * 2 - 1
    signed = (known - known.mean(-1, keepdim=True)) * signs.to(known.device)
    padded = torch.nn.functional.pad(signed, (0, -signed.shape[-1] % SKETCH_SUMS))
    sums = padded.view(len(padded), -1, SKETCH_SUMS).sum(1)
    return [[float(f"{value:.5g}") for value in row] for row in sums.tolist()]


def differs(before: dict[str, list[list[float]]], now: dict[str, list[list[float]]], tolerance: float) -> bool:
    """Tell whether what :func:`fixed_logits` returned at two times differs by more than a tolerance."""
    if before.keys() != now.keys():
        return True
    pairs = [(torch.tensor(before[name]), torch.tensor(now[name])) for name in now]
    return any(float((new - old).square().mean().sqrt()) > tolerance * float(old.std()) for old, new in pairs)
