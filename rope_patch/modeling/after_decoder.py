"""Ask a model's own forward pass what it makes of hidden states: scales, soft caps and heads are the family's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def decoder_path(model: PreTrainedModel) -> tuple[nn.Module, ...]:
    """Return the modules on the way from a model to its input embedding, the outermost first.

    The first holds all layers, so it is the decoder that the model's forward pass calls, or it wraps the next one,
    which is called in its place. No name is looked up: ``base_model_prefix`` names no module in Llama 4.

    Raises:
        ValueError: the model has no embedding below its head.
    """
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    path = next((name for name, module in model.named_modules() if module is embedding), "")
    parts = path.split(".")[:-1]
    if not parts or model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no decoder with an output head: a causal LM is needed")
    return tuple(model.get_submodule(".".join(parts[: i + 1])) for i in range(len(parts)))


class DecoderOutput:
    """Hidden states in place of what a decoder returns; all else is None.

    Args:
        hidden: (rows, tokens, hidden) last hidden states.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol of Python, which None would break
            raise AttributeError(name)
        return None

    def __getitem__(self, at: int | slice) -> Any:
        if at == 0:
            return self.last_hidden_state
        return () if isinstance(at, slice) else None


@contextlib.contextmanager
def modules_return(modules: Sequence[nn.Module], output: Any) -> Iterator[None]:
    """Let modules return a given output within a ``with`` block, whatever they are called with.

    Args:
        modules: the modules; with those of :func:`decoder_path`, whichever of them the model calls returns the output.
        output: what each returns.
    """
    replaced: list[Callable[..., Any] | None] = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = lambda *_, **__: output
    try:
        yield
    finally:
        for module, forward in zip(modules, replaced, strict=True):
            del module.forward
            if forward is not None:  # a hook of accelerate had replaced it before
                module.forward = forward
