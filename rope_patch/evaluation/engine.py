"""What answers prompts: a model in memory, or another program that runs a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from rope_patch.evaluation.answering import Answer, answer
from rope_patch.evaluation.prompts import Prompt
from rope_patch.modeling.scoring import CacheFactory, Reader, fingerprint
from rope_patch.processes import is_alone, processes


class AnsweringEngine(ABC):
    """What answers prompts: a model in memory, or an engine such as vLLM.

    Attributes:
        name: with its version, for people.
        vocabulary: how many token ids it knows.
        stops: token ids that end a text, besides the tokenizer's.
    """

    name: str
    vocabulary: int
    stops: tuple[int, ...]

    @property
    @abstractmethod
    def identity(self) -> str:
        """What tells its answers from those of other programs, versions, settings and checkpoints."""

    @abstractmethod
    def answer(
        self, rows: Sequence[Sequence[Prompt]], stops: Sequence[int], on_progress: Callable[[int], None]
    ) -> list[list[Answer]]:
        """Answer every prompt of a grid, as :func:`~rope_patch.evaluation.answering.answer` does.

        Args:
            rows: (questions, batch) prompts; those of a column share what they begin with.
            stops: token ids that end a text.
            on_progress: may be called with the tokens of prompts done since the last call.

        Raises:
            ValueError: log-probabilities that are not finite.
        """


class InMemory(AnsweringEngine):
    """A model of transformers in this process.

    Args:
        model: that answers.
        chunk: tokens per forward pass.
        cache: factory of a cache to read through.
    """

    name = "transformers"

    def __init__(self, model: nn.Module, chunk: int | None, cache: CacheFactory | None) -> None:
        self.model, self.options = model, {"chunk": chunk, "cache": cache}
        self.reader = Reader(model)
        self.vocabulary = self.reader.vocabulary
        ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        self.stops = tuple(int(i) for i in (ids if isinstance(ids, list | tuple) else [ids]) if i is not None)

    @property
    def identity(self) -> str:
        """Digest of the model."""
        return fingerprint(self.model)

    def answer(
        self, rows: Sequence[Sequence[Prompt]], stops: Sequence[int], on_progress: Callable[[int], None]
    ) -> list[list[Answer]]:
        """Answer every prompt of a grid; what prompts share is read once."""
        options: Any = self.options
        return answer(self.reader, rows, stops=stops, on_progress=on_progress, **options)


def engine_of(model: nn.Module | AnsweringEngine, chunk: int | None, cache: CacheFactory | None) -> AnsweringEngine:
    """Return what answers prompts: a model in memory, or another program.

    Raises:
        ValueError: options that are for models in memory alone, or several processes before another program.
    """
    if not isinstance(model, AnsweringEngine):
        return InMemory(model, chunk, cache)
    if chunk is not None or cache is not None:
        raise ValueError(f"chunk and cache are for models in memory: leave them out with {model.name}")
    if processes()[1] > 1 and not is_alone():
        raise ValueError(
            f"{model.name} starts its own processes: run the command without torchrun or accelerate launch"
        )
    return model
