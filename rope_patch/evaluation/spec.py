"""What an evaluation measures: a value that can be written down, compared and hashed."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Real
from os import PathLike
from typing import Any

from rope_patch.evaluation.chat import CHAT_TEMPLATES
from rope_patch.evaluation.haystack import HAYSTACK
from rope_patch.evaluation.tasks import find_task

LEAST_WINDOWS = 4
"""Windows that a smaller spec keeps: the interval of two or three is useless."""

SCALABLE = ("windows", "samples")
"""Fields that a smaller spec may lower: the others say what is measured, not how precisely."""

WINDOWS = 16
"""Windows of text by default, where the text has room for so many."""


_WHOLE = {"samples": False, "seed": False, "batch_tokens": False}
_WHOLE |= dict.fromkeys(("windows", "short_context", "bucket", "chunk"), True)
"""Fields that are whole numbers, and whether they may be None."""


def _whole(name: str, value: Any) -> int:
    """Return a whole number as Python's own, whatever library it is of."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None


@dataclass(frozen=True)
class EvalSpec:
    """What is measured: perplexity by position, and retrieval at every length and depth.

    ``compare``, ``extend``, ``kv_check``, ``fit`` and the fine-tuning recipe take one, so that the same numbers mean
    the same measurement everywhere.

    Attributes:
        lengths: of the retrieval prompts, rising; perplexity is measured over windows of the longest [tokens].
        depths: of the needles, rising, from 0, the start of the prompt, to 1, right before the question.
        samples: haystacks for each task and length; each is asked at every depth.
        windows: windows of text, spread evenly over it; None for 16, or as many as the text has room for; 0 leaves
            perplexity out.
        tasks: retrieval tasks, keys of :data:`rope_patch.evaluation.tasks.TASKS`.
        mode: ``"single"``, one needle in each prompt, or ``"multikey"``, a needle at every depth in all prompts.
        text: file or folder (``*.txt``) for perplexity; None for the held-out part of the text that ships with Python.
        haystack: ``"noise"``, ``"builtin"``, or a file or folder; None for the text of perplexity itself.
        chat_template: whether prompts go through the tokenizer's chat template: ``"on"``, ``"off"``, or ``"auto"``,
            which is on where there is one.
        longppl: measure LongPPL too, the perplexity over the tokens that the unpatched model predicts well only with a
            long context; see :mod:`rope_patch.evaluation.key_tokens`.
        short_context: the context that LongPPL compares with the model's own, an eighth to a half of it; None for 4096,
            or a quarter of the model's where that is less, but at least an eighth [tokens].
        bucket: width of the position buckets of the perplexity curve; None for a sixteenth of the longest length
            [tokens].
        chunk: tokens per forward pass, which bounds memory; None for whole windows and prompts [tokens].
        batch_tokens: tokens read side by side, at most; a single window or prompt may be longer [tokens].
        seed: of numbers, names and haystacks.

    Raises:
        ValueError: a value out of its range, or an unknown task or mode.

    Example:
        >>> EvalSpec(lengths=[512, 256]).lengths
        (256, 512)
    """

    lengths: Sequence[int]
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 4
    windows: int | None = None
    tasks: Sequence[str] = ("passkey",)
    mode: str = "single"
    text: str | None = None
    haystack: str | None = HAYSTACK
    chat_template: str = "auto"
    longppl: bool = False
    short_context: int | None = None
    bucket: int | None = None
    chunk: int | None = None
    batch_tokens: int = 16384
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values, and put lengths and depths in order."""
        if isinstance(self.tasks, str) or not isinstance(self.tasks, Sequence):
            raise ValueError(f"tasks must be a list of names, got {self.tasks!r}")
        for name, optional in _WHOLE.items():
            value = getattr(self, name)
            if value is not None or not optional:
                object.__setattr__(self, name, _whole(name, value))
        for name in ("text", "haystack"):
            if not isinstance(getattr(self, name), str | PathLike | None):
                raise ValueError(f"{name} must be a path or a name, got {getattr(self, name)!r}")
        if not self.tasks or len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks must be one or more names that differ from each other, got {list(self.tasks)}")
        for task in self.tasks:
            lengths, depths = check_retrieval(task, self.mode, self.lengths, self.depths, self.samples, self.chunk)
        if min(lengths) < 2:
            raise ValueError(f"lengths must be at least 2 tokens, got {min(lengths)}")
        for depth in depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depth must be in [0, 1], got {depth}")
        for name, value, least in (
            ("windows", self.windows, 0),
            ("bucket", self.bucket, 1),
            ("short_context", self.short_context, 1),
            ("batch_tokens", self.batch_tokens, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{name} must be >= {least}, got {value}")
        if self.short_context is not None and not self.longppl:
            raise ValueError("short_context is of LongPPL: give longppl=True (--longppl) too, or leave it out")
        if self.longppl and self.windows == 0:
            raise ValueError("LongPPL is measured on windows of text: give windows >= 1")
        if self.chat_template not in CHAT_TEMPLATES:
            raise ValueError(f"chat_template must be one of {', '.join(CHAT_TEMPLATES)}, got {self.chat_template!r}")
        object.__setattr__(self, "lengths", tuple(sorted(lengths)))
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "tasks", tuple(self.tasks))
        for name in ("text", "haystack"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else str(value))

    @property
    def longest(self) -> int:
        """The longest prompt, and the window of text [tokens]."""
        return self.lengths[-1]

    def edge_at(self, position: int) -> int:
        """Return the last edge between buckets at or before a position [tokens]."""
        return max(edge for edge in self.edges if edge <= position)

    @property
    def edges(self) -> list[int]:
        """Edges of the position buckets of perplexity; every length is among them [tokens]."""
        return sorted({*range(0, self.longest, self._bucket), *self.lengths, 0} - {1})

    @property
    def _bucket(self) -> int:
        """Width of the position buckets [tokens]."""
        return max(2, self.longest // 16) if self.bucket is None else self.bucket

    @property
    def rows(self) -> int:
        """Windows of text that are read side by side."""
        return 1 if self.chunk is not None else max(1, self.batch_tokens // self.longest)

    @property
    def sha256(self) -> str:
        """Digest of the whole spec. The texts themselves have digests of their own in the results."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def tokens_to_read(self, windows: int | None = None) -> int:
        """Return the tokens that one run reads, for a progress bar.

        Args:
            windows: that the text has room for; by default those asked for.
        """
        asked = WINDOWS if self.windows is None else self.windows
        prompts = sum(1 if find_task(task, self.mode).joined else len(self.depths) for task in self.tasks)
        return (asked if windows is None else windows) * self.longest + prompts * self.samples * sum(self.lengths)

    def tokens_computed(self) -> float:
        """Return the tokens that the model computes in one run: fewer than :meth:`tokens_to_read`.

        What prompts share is computed once: in mode ``single`` all that stands before the needle, else nearly all.
        """
        asked = WINDOWS if self.windows is None else self.windows
        whole = len(self.depths) - math.fsum(self.depths[:-1])  # of the deepest prompt the others are read in part
        single = [self.mode == "single" and not find_task(task, self.mode).joined for task in self.tasks]
        prompts = self.samples * math.fsum(whole if alone else 1 for alone in single)
        return asked * self.longest + prompts * sum(self.lengths)

    def within(
        self, most: float, scalable: Collection[str] = SCALABLE, cost: Callable[[EvalSpec], float] | None = None
    ) -> EvalSpec:
        """Return a spec that costs at most so much: the same task with fewer windows and samples.

        Where four windows and one sample cost too much, the longest lengths are left out, as many as needed.

        Args:
            most: at most, in the unit of the cost; tokens by default.
            scalable: of ``windows`` and ``samples``, those that may be lowered.
            cost: of a spec, such as the time it takes; by default the tokens that it reads.

        Raises:
            ValueError: the least that can be read costs more.
        """
        price = cost or (lambda spec: float(spec.tokens_to_read()))
        for count in range(len(self.lengths), 0, -1):
            for spec in self.shortened(count).smaller(scalable):
                if price(spec) <= most:
                    return spec
        least = self.shortened(1).smallest(scalable)
        raise ValueError(
            f"at least {least.tokens_to_read()} tokens would be read under each method or scheme, at {least.longest} "
            f"tokens alone, and that is {price(least) / max(most, 1e-9):.1f} times what fits into the time: give more "
            "time, shorter lengths, or fewer methods or schemes"
        )

    def shortened(self, count: int) -> EvalSpec:
        """Return the spec of the shortest lengths, as many as given; buckets stay as wide as they are."""
        if count == len(self.lengths):
            return self
        return replace(self, lengths=self.lengths[:count], bucket=self._bucket)

    def smallest(self, scalable: Collection[str] = SCALABLE) -> EvalSpec:
        """Return the spec of this kind that reads least: four windows and one sample."""
        return self.smaller(scalable)[-1]

    def smaller(self, scalable: Collection[str]) -> list[EvalSpec]:
        """Return this spec and smaller ones of the same lengths, by falling number of tokens.

        Windows become fewer together with the samples, then alone.

        Args:
            scalable: as for :meth:`within`.
        """
        windows = WINDOWS if self.windows is None else self.windows
        least = min(LEAST_WINDOWS, windows) if "windows" in scalable else windows
        specs = [self]
        if "samples" in scalable:
            for samples in range(self.samples - 1, 0, -1):
                count = max(least, round(windows * samples / self.samples))
                specs.append(replace(self, samples=samples, windows=count))
        last = windows if specs[-1].windows is None else specs[-1].windows
        return specs + [replace(specs[-1], windows=count) for count in range(last - 1, least - 1, -1)]

    def cost_of(self, smaller: EvalSpec) -> str:
        """Return what is lost with a spec of :meth:`within`, as a sentence; "" where nothing is."""
        if smaller == self:
            return ""
        from rope_patch.evaluation.intervals import widening

        before, after = (WINDOWS if spec.windows is None else spec.windows for spec in (self, smaller))
        parts, wider = [], math.sqrt(self.samples / smaller.samples)
        if smaller.samples < self.samples:
            parts.append(f"{smaller.samples} instead of {self.samples} samples at each length and depth")
        if 1 < after < before:
            parts.append(f"{after} instead of {before} windows")
            wider = max(wider, widening(before, after))
        sentence = f"{', '.join(parts)}: intervals are up to {wider:.1f} times as wide" if parts else ""
        left_out = [str(length) for length in self.lengths if length not in smaller.lengths]
        if not left_out:
            return sentence
        missing = f"nothing is measured at {' and '.join(left_out)} tokens"
        return f"{sentence}; {missing}" if sentence else missing

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as JSON values."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EvalSpec:
        """Return the spec that :meth:`to_dict` wrote.

        Raises:
            ValueError: an unknown name.
        """
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"EvalSpec has no {', '.join(sorted(unknown))}")
        return cls(**values)


def check_retrieval(
    task: str, mode: str, lengths: Sequence[int], depths: Sequence[float], samples: int, chunk: int | None
) -> tuple[list[int], list[float]]:
    """Return lengths and depths as numbers, the depths rising.

    Raises:
        ValueError: anything that :func:`~rope_patch.evaluation.retrieval.retrieval` cannot ask.
    """
    find_task(task, mode)
    for name, values in (("lengths", lengths), ("depths", depths)):
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise ValueError(f"{name} must be a list of numbers, got {values!r}")
        if not len(values):
            raise ValueError(f"{name} is empty")
        if not all(isinstance(value, Real) and math.isfinite(value) for value in values):
            raise ValueError(f"{name} must be numbers, got {list(values)}")
        if len(set(values)) < len(values):
            raise ValueError(f"{name} must differ from each other, got {list(values)}")
    for length in lengths:
        if int(length) != length:
            raise ValueError(f"a length must be a whole number of tokens, got {length}")
    if samples < 1:
        raise ValueError(f"samples must be >= 1, got {samples}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be >= 1 tokens, got {chunk}")
    return [int(length) for length in lengths], sorted(float(depth) for depth in depths)
