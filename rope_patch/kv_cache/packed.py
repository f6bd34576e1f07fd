"""What transformers' own quantized caches hold in bytes, and how fast they decode.

These are packed, so memory and speed are real; losses are not measured through them: their first pass attends to the
keys before rounding, all is rounded anew at each flush of the residual window, and their groups are not KIVI's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, QuantizedCache

from rope_patch.modeling.modes import in_eval_mode
from rope_patch.patching.cache_argument import cache_argument
from rope_patch.patching.locate import device_of, locate
from rope_patch.patching.two_tables import reaching

BACKENDS = {"fp8": (8,), "quanto": (2, 4), "hqq": (1, 2, 4, 8)}
"""The backends of transformers, and the bits that each packs; hqq 0.2.8 cannot unpack its 3-bit format."""
GROUPS = (64, 32, 16)
"""Features that share a scale: the first of these that divides a head."""
AXES = {"quanto": 0, "hqq": 1}
"""The axis under which a group holds features of one token."""
NEW, ROUNDS = 128, 3
"""Tokens decoded (as many as transformers' residual window holds, so that one flush is timed), and timing rounds."""


@dataclass(frozen=True)
class PackedCache:
    """A packed cache beside one in the model's own precision, on the same prompt.

    Attributes:
        name: of the format, such as ``"quanto-4"``.
        tokens: held at the end.
        stored: bytes of keys and values, scales and residual window included.
        full: bytes of the same in the model's precision.
        seconds: per token decoded, mean over tokens, median over rounds.
        full_seconds: of the same in the model's precision.
        agree: share of decoded tokens up to the first one that differs.
    """

    name: str
    tokens: int
    stored: int
    full: int
    seconds: float
    full_seconds: float
    agree: float

    @property
    def bits(self) -> float:
        """Bits per element; full precision counts as 16."""
        return 16 * self.stored / self.full

    def __str__(self) -> str:
        """Say what was measured.

        >>> print(PackedCache("fp8", 1000, 5e5, 1e6, 0.02, 0.01, 0.5))
        packed fp8: 0.5 MB for 1000 tokens (0.50 x), 20 ms per token (2.00 x), 50% of the tokens until one differs
        """
        return (
            f"packed {self.name}: {self.stored / 1e6:.3g} MB for {self.tokens} tokens "
            f"({self.stored / self.full:.2f} x), {1000 * self.seconds:.3g} ms per token "
            f"({self.seconds / self.full_seconds:.2f} x), "
            f"{self.agree:.0%} of the tokens until one differs"
        )


def check_packed(model: nn.Module, names: Sequence[str]) -> None:
    """Raise if a model cannot use these packed caches, before anything is run.

    Raises:
        ValueError: an unknown format, a model with layers that slide, heads that no group divides.
        ImportError: a backend that is not installed.
    """
    for name in names:
        _maker(model, name)


def packed_caches(
    model: nn.Module, token_ids: Tensor, names: Sequence[str], *, new_tokens: int = NEW, rounds: int = ROUNDS
) -> list[PackedCache]:
    """Decode greedily behind a prompt with packed caches and in full precision, in turn.

    Args:
        model: a causal language model.
        token_ids: (tokens,) the prompt.
        names: of formats: ``fp8``, ``quanto-2``, ``quanto-4``, ``hqq-1`` to ``hqq-8``.
        new_tokens: to decode.
        rounds: of timing, after a first one that is not counted.

    Raises:
        ValueError: as for :func:`check_packed`; an empty prompt, or nothing to decode.
        ImportError: as for ``check_packed``.
    """
    if token_ids.ndim != 1 or not len(token_ids) or new_tokens < 1 or rounds < 1:
        raise ValueError("give a prompt of shape (tokens,), and at least one token to decode and one round")
    location = locate(model)
    config: Any = location.model.config
    makers: dict[str, Callable[[], Cache]] = {"": lambda: DynamicCache(config=config)}
    makers |= {name: _maker(model, name) for name in dict.fromkeys(names)}
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    tokens: dict[str, list[int]] = {}
    stored: dict[str, int] = {}
    with in_eval_mode(model):
        for turn in range(rounds + 1):
            order = list(makers) if turn % 2 else list(reversed(makers))
            for name in order:
                cache = makers[name]()
                with reaching(location.module, len(token_ids) + new_tokens + 1):
                    tokens[name], spent = _decode(model, token_ids, cache, new_tokens)
                stored[name] = sum(part.numel() * part.element_size() for part in _states(cache))
                if turn:  # the first one compiles and warms up
                    seconds[name].append(spent)
    return [
        PackedCache(
            name,
            len(token_ids) + new_tokens,
            stored[name],
            stored[""],
            statistics.median(seconds[name]),
            statistics.median(seconds[""]),
            _agree(tokens[name], tokens[""]),
        )
        for name in makers
        if name
    ]


@torch.no_grad()
def _decode(model: Any, token_ids: Tensor, cache: Cache, new_tokens: int) -> tuple[list[int], float]:
    """Return the tokens decoded after the prompt, and the seconds per token."""
    device = device_of(model.get_input_embeddings())
    ids = token_ids[None].to(device)
    through = {cache_argument(locate(model).decoder): cache, "use_cache": True}
    out, began = [], 0.0
    for i in range(new_tokens + 1):  # the last token is read, too, so that the cache holds it
        if i == 1:
            began = time.perf_counter()
        logits = model(ids, **through, logits_to_keep=1).logits
        ids = logits[:, -1].argmax(-1, keepdim=True)
        out.append(int(ids))  # waits for the device
    return out[:-1], (time.perf_counter() - began) / new_tokens


def _agree(one: list[int], other: list[int]) -> float:
    """Return the share of tokens up to the first one that differs.

    >>> _agree([5, 6, 7, 8], [5, 6, 9, 8])
    0.5
    """
    same = 0
    while same < len(one) and one[same] == other[same]:
        same += 1
    return same / len(one)


def _states(value: Any) -> Iterator[Tensor]:
    """Return what a cache is stored as: plain tensors, inside of whatever a backend packs them in."""
    if isinstance(value, Cache):
        for layer in value.layers:
            for name in ("keys", "values", "_quantized_keys", "_quantized_values"):
                yield from _states(getattr(layer, name, None))
    elif isinstance(value, Tensor) and type(value) is not Tensor and hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _states(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _states(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _states(part)


def _maker(model: nn.Module, name: str) -> Callable[[], Cache]:
    """Return a function that makes empty caches of a format.

    Raises:
        ValueError: as for :func:`check_packed`.
        ImportError: as for ``check_packed``.
    """
    backend, _, bits = name.partition("-")
    known = [b if b == "fp8" else f"{b}-{n}" for b, sizes in BACKENDS.items() for n in sizes]
    if name not in known:
        raise ValueError(f"unknown packed cache {name!r}. Known: {', '.join(known)}")
    config: Any = locate(model).model.config
    text = config.get_text_config(decoder=True)
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    options: dict[str, Any] = {}
    if backend != "fp8":
        group = next((size for size in GROUPS if width % size == 0), None)
        if group is None:
            raise ValueError(f"{name}: no group of {', '.join(map(str, GROUPS))} features divides heads of {width}")
        options = {"nbits": int(bits), "q_group_size": group, "axis_key": AXES[backend], "axis_value": AXES[backend]}
    try:
        QuantizedCache(backend, config, **options)
    except ValueError as error:
        raise ValueError(
            f"{name}: transformers cannot pack a cache of this model: {error} Simulated schemes work without it"
        ) from error
    except ImportError as error:
        what = {"quanto": "optimum-quanto"}.get(backend, backend)
        raise ImportError(f"{name} needs {what}: pip install {what}") from error
    return lambda: QuantizedCache(backend, config, **options)
